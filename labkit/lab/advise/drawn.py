"""An advice as a figure: where the steps of the best layouts go. Imports matplotlib, which the screen does without."""

from collections.abc import Sequence

import pandas as pd

from labkit.lab.advise.report import YOURS, Step
from labkit.lab.figures import Plot, waterfall

DRAWN = 5e-3
"""Share of a step from which on a part is drawn."""


def waterfalls(steps: Sequence[Step]) -> Plot:
    """One panel a step, its parts from the top down, the whole with its interval at the end; all on one time axis."""
    whole = [sum(seconds for _, seconds in step.parts_s) for step in steps]
    names = list(dict.fromkeys(name for step in steps for name, _ in step.parts_s))
    shown = [
        name
        for name in names
        if any(dict(step.parts_s).get(name, 0.0) > DRAWN * step_s for step, step_s in zip(steps, whole, strict=True))
    ]
    rows = [
        {"layout": step.name, "part": name, "seconds": seconds}
        for step in steps
        for name, seconds in step.parts_s
        if name in shown
    ]
    rows += [
        {"layout": step.name, "part": "step", "seconds": step_s, "low": step.interval_s[0], "high": step.interval_s[1]}
        for step, step_s in zip(steps, whole, strict=True)
    ]
    columns = ["layout", "part", "seconds", "low", "high"]
    frame = pd.DataFrame(rows, columns=columns)
    plot = waterfall(frame, part="part", y="seconds", part_order=shown, total="step", facet="layout")
    return plot.of_source("predicted" if all(step.name != YOURS for step in steps) else f"predicted, {YOURS}")
