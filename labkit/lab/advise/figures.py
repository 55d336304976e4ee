"""An advice as a figure: the parts of the best layouts' steps. Imports matplotlib, which the screen does without."""

from collections.abc import Sequence

import pandas as pd

from labkit.lab.advise.report import YOURS, Step
from labkit.lab.figures import Plot, waterfall

MIN_SHARE = 5e-3
"""Share of a step from which on a part is plotted."""


def waterfalls(steps: Sequence[Step]) -> Plot:
    """One panel per step: its parts from the top down, the whole step with its interval at the end."""
    totals = [sum(seconds for _, seconds in step.parts_s) for step in steps]
    large = [
        name
        for step, total in zip(steps, totals, strict=True)
        for name, seconds in step.parts_s
        if seconds > MIN_SHARE * total
    ]
    names = list(dict.fromkeys(name for step in steps for name, _ in step.parts_s if name in large))
    rows = [
        {"layout": step.name, "part": name, "seconds": seconds}
        for step in steps
        for name, seconds in step.parts_s
        if name in names
    ]
    rows += [
        {"layout": step.name, "part": "step", "seconds": total, "low": step.interval_s[0], "high": step.interval_s[1]}
        for step, total in zip(steps, totals, strict=True)
    ]
    frame = pd.DataFrame(rows, columns=["layout", "part", "seconds", "low", "high"])
    plot = waterfall(frame, part="part", y="seconds", part_order=names, total="step", facet="layout")
    return plot.of_source("predicted" if all(step.name != YOURS for step in steps) else f"predicted, {YOURS}")
