"""The cells of a lab's notebook, carried out in this process on a run from memory; nothing is written."""

import hashlib
import json
import pickle
from collections.abc import Callable
from typing import Any

import matplotlib.pyplot as plt

from labkit.lab import figures, notebook
from labkit.lab.figures.style import Plot
from labkit.lab.project import notebook_path
from labkit.lab.runs.store import Record, Run
from labkit.lab.study import Study


class LabOnRun(notebook.Lab):
    """Has its run already, and builds tables, figures and answers without drawing or saving any."""

    def __init__(self, study: Study, parameters: notebook.Parameters, run: Run):
        super().__init__(study, parameters)
        self._run = run

    def measure(self):
        return self.run.frame()

    def show(self, plot: Plot, name: str, caption: str = "") -> None:
        self._answer_of(name)
        plot.csv()
        plt.close(plot.figure)


class FiguresOnce:
    """`labkit.lab.figures` that builds a figure of the same frame once: most of a page's stay as they are."""

    def __init__(self) -> None:
        self._built: dict[tuple[str, bytes], Plot] = {}

    def __getattr__(self, name: str) -> Callable[..., Plot]:
        def build(*frames: Any, **options: Any) -> Plot:
            key = name, hashlib.sha256(pickle.dumps((frames, options))).digest()
            if key not in self._built:
                self._built[key] = getattr(figures, name)(*frames, **options)
            return self._built[key]

        return build


FIGURES = FiguresOnce()


def carry_out(study: Study, run: Run) -> None:
    """Every code cell of the lab's notebook on `run`; raises what a cell raises."""
    namespace: dict[str, Any] = {"display": lambda *_: None, "In": []}
    for number, cell in enumerate(json.loads(notebook_path(study.name).read_text())["cells"]):
        if cell["cell_type"] == "code":
            source = "".join(cell["source"])
            namespace["In"].append(source)
            exec(compile(source, f"{study.name}, cell {number}", "exec"), namespace)
            namespace["figures"] = FIGURES
            if isinstance(lab := namespace.get("lab"), notebook.Lab) and not isinstance(lab, LabOnRun):
                namespace["lab"] = LabOnRun(study, lab.parameters, run)


def run_of(run: Run, rows: Callable[[Record, Record], Record | None]) -> Run:
    """The same run with other rows: `rows` gets a point and a record, and gives one in its place, or None."""
    planned = run.header.planned
    changed = [(record, rows(planned[record["point"]], record)) for record in run._rows]
    emptied = {record["point"] for record, kept in changed if kept is None}
    kept = [new for _, new in changed if new is not None]
    lost = {"status": "failed", "reason": "rank 0: RuntimeError: rehearsed"}
    without = emptied - {record["point"] for record in kept}
    ends = {point: end | (lost if point in without else {}) for point, end in run._ends.items()}
    return Run(run.path, run.header, kept, ends)
