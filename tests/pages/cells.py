"""Runs the cells of a lab's notebook in this process, on a run from memory; nothing is written."""

import json
import re
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any
from unittest import mock

import matplotlib.pyplot as plt

from labkit.lab import notebook
from labkit.lab.declaration import Lab
from labkit.lab.figures.plot import Plot
from labkit.lab.pages.cards import Piece
from labkit.lab.project import notebook_path, recorded_directory
from labkit.lab.runs.records import Row
from labkit.lab.runs.store import Run
from labkit.lab.user_worker import Plugins
from tests import small_steps  # noqa: F401

Record = dict[str, Any]


class LabOnRun(notebook.OpenLab):
    """Has its run already, and builds tables, figures and answers without saving any."""

    def __init__(self, lab: Lab, parameters: notebook.Parameters, run: Run):
        super().__init__(lab, parameters)
        self._run = run

    def measure(self, alternatives: Mapping[str, Any] | None = None, **options: Any):
        self.study.check_plugins(Plugins(alternatives or {}, options.get("models") or {}))
        return self.run.frame()

    def but(self, **changed: Any):
        return LabOnRun(self.study, super().but(**changed).parameters, self.run)

    def _figure(self, plot: Plot, name: str, alt: str, caption: str = "") -> Piece:
        plot.csv()
        plt.close(plot.figure)
        return Piece("")


@cache
def recorded(lab: str) -> Run:
    """The newest recorded run of a lab."""
    return Run.load(max((recorded_directory() / lab).glob("*.jsonl")))


def cells_of(lab: str) -> list[tuple[str, str]]:
    """Kind and source of each cell of a lab's notebook."""
    cells = json.loads(notebook_path(lab).read_text())["cells"]
    return [(cell["cell_type"], "".join(cell["source"])) for cell in cells]


def tries_in(text: str) -> list[str]:
    """The code that a Markdown cell offers to its reader."""
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


def kind_of_point(point: Record) -> str:
    """What tells the kinds of points of a lab apart."""
    return next((point[name] for name in ("sweep", "part", "kind") if name in point), "point")


def carry_out(lab: Lab, run: Run, *, has_tries: bool = False) -> None:
    """Run every code cell of the lab's notebook on `run`, and the Tries where they stand; raise
    what a cell raises.

    What a Try leaves is not there for the cells below it.
    """
    namespace: dict[str, Any] = {"display": lambda *_: None}
    with mock.patch.object(notebook, "display"):
        for number, (kind, source) in enumerate(cells_of(lab.name)):
            place = f"{lab.name}, cell {number}"
            if kind == "code":
                exec(compile(source, place, "exec"), namespace)
                # The cell that opens the lab would measure a run.
                if type(namespace.get("lab")) is notebook.OpenLab:
                    namespace["lab"] = LabOnRun(lab, namespace["lab"].parameters, run)
            elif has_tries:
                for text in tries_in(source):
                    exec(compile(text, f"{place}, a Try", "exec"), dict(namespace))
    plt.close("all")


def run_of(run: Run, rows: Callable[[Record, Record], Record | None]) -> Run:
    """The same run with other rows: `rows` returns the record in a record's place, or None."""
    planned = run.header.planned
    changed = [(row.point, rows(planned[row.point], row.model_dump())) for row in run.rows]
    kept = [Row.model_validate(record) for _, record in changed if record is not None]
    without = {point for point, record in changed if record is None} - {row.point for row in kept}
    lost = {"status": "failed", "reason": "rank 0: RuntimeError: rehearsed"}
    ends = {
        point: end.model_copy(update=lost if point in without else {})
        for point, end in run.ends.items()
    }
    return Run(run.path, run.header, kept, ends)
