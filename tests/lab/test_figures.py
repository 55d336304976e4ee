"""Figures: they draw exactly the points they save, and save the same bytes twice."""

import pandas as pd
import pytest

from labkit.lab.figures import lines

FRAME = pd.DataFrame(
    {
        "n_bytes": [1024, 2**20] * 2,
        "seconds": [1e-4, 1e-2, 2e-4, 3e-2],
        "low": [0.9e-4, 0.9e-2, None, None],
        "high": [1.2e-4, 1.1e-2, None, None],
        "algorithm": ["ring", "ring", "torch", "torch"],
        "world_size": [2, 2, 4, 4],
    }
)


def _draw(**options):
    return lines(FRAME, x="n_bytes", y="seconds", hue="algorithm", **options)


def test_the_saved_table_is_what_is_drawn(tmp_path):
    plot = _draw(facet="world_size", reference=FRAME.assign(seconds=1.0))
    plot.save(tmp_path / "figure")
    saved = pd.read_csv(tmp_path / "figure.csv")
    assert len(saved) == 8
    assert set(saved["source"]) == {"measured here", "published"}
    drawn = [line.get_xydata().tolist() for axis in plot.figure.axes for line in axis.get_lines()]
    points = {tuple(point) for line in drawn for point in line}
    assert {(row.n_bytes, row.seconds) for row in saved.itertuples()} <= points


def test_a_figure_is_saved_the_same_twice():
    assert _draw().png() == _draw().png()


def test_axes_carry_units():
    plot = _draw()
    plot.png()
    axis = plot.figure.axes[0]
    labels = [label.get_text() for label in (*axis.get_xticklabels(), *axis.get_yticklabels())]
    assert "1 KiB" in labels
    assert any(label.endswith("ms") for label in labels)


def test_a_rate_is_not_taken_for_a_time():
    rates = FRAME.assign(busbw_gb_per_s=FRAME["seconds"])
    plot = lines(rates, x="n_bytes", y="busbw_gb_per_s", hue="algorithm")
    plot.png()
    assert not any(label.get_text().endswith("s") for label in plot.figure.axes[0].get_yticklabels())


def test_nothing_measured_is_said_and_a_missing_column_is_named():
    assert (
        "nothing was measured"
        in lines(FRAME.iloc[:0], x="n_bytes", y="seconds", hue="algorithm").figure.texts[0].get_text()
    )
    with pytest.raises(ValueError, match="no column rank"):
        lines(FRAME, x="n_bytes", y="seconds", hue="rank")
