"""Predicts training steps on 1 to 16,384 GPUs, with intervals. Numbers in, numbers out: no torch here.

`predict(run)` gives seconds with intervals, a breakdown that adds up, and memory;
`rank` the best layouts; `calibrate` constants for a site with three runs or more.

``models`` ``hardware`` ``runs`` ``table``                the question
``step_time`` ``memory``                                  formulas
``constants`` and `data/reference/scaling/`               numbers, with their sources
``published`` ``intervals``                               measured runs, and how wrong predictions are
``prediction`` ``search`` ``advice`` ``slowdown_causes`` ``scores``      answers
"""

import csv
from pathlib import Path

DATA = Path(__file__).parents[1] / "shipped" / "data" / "reference" / "scaling"


def read_table(name: str) -> list[dict[str, str]]:
    """Rows of `name`.csv in `data/reference/scaling/` as texts by column."""
    with (DATA / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
