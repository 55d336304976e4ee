"""Draw a declared figure."""

import pandas as pd
from matplotlib.figure import Figure as Canvas

from labkit.lab.figures.bars import draw_areas, draw_bars, draw_timeline
from labkit.lab.figures.figure import Areas, Bars, Figure, Lines, Timeline
from labkit.lab.figures.lines import draw_lines
from labkit.lab.figures.plot import Plot
from labkit.lab.figures.style import FONT, WIDTH
from labkit.lab.metric import Results


def draw(figure: Figure, results: Results, answer_table: pd.DataFrame | None = None) -> Plot:
    """Draw the results of a run. ParameterError for a missing column."""
    return draw_frame(figure, figure.frame(results, answer_table))


def draw_frame(figure: Figure, frame: pd.DataFrame) -> Plot:
    """Draw a frame of one row per point, bar or box. ParameterError for a missing column."""
    rows = figure.tidy(frame)
    # A run within a budget may have no rows for a figure: the page must still be written.
    if rows.empty:
        canvas = Canvas(figsize=(WIDTH, 1.0))
        text = "nothing was measured to draw here"
        canvas.text(0.5, 0.5, text, ha="center", va="center", fontsize=FONT)
        return Plot(canvas, rows)
    match figure:
        case Lines():
            return draw_lines(figure, rows)
        case Bars():
            return draw_bars(figure, rows)
        case Areas():
            return draw_areas(figure, rows)
        case Timeline():
            return draw_timeline(figure, rows)
    raise TypeError(f"expected Lines, Bars, Areas or Timeline, got {figure!r}")
