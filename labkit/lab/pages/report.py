"""The report: every lab executed and exported, and an index over all records of the folder."""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.lab.commands.execute import NotebookFailed, execute_notebook, notebook_parameters
from labkit.lab.declaration import Lab
from labkit.lab.pages.export import export_page
from labkit.lab.parameters import check_parameters
from labkit.lab.project import check_writable, figures_directory, notebook_path, runs_directory
from labkit.lab.runs.progress import Progress


@dataclass(frozen=True)
class LabResult:
    """How one lab of a report went."""

    study: Lab
    page: Path
    elapsed_s: float
    error: str | None
    """None if it ran to its end; otherwise the cause in one line, and the page shows how far it came."""


def check_report(studies: Iterable[Lab], parameters: Mapping[str, Any], output: Path) -> None:
    """ParameterError before the first lab runs: parameters that a lab does not take, folders that take no files."""
    folders = [output / "notebooks"]
    for study in studies:
        checked = check_parameters(study, notebook_parameters(notebook_path(study.name)) | dict(parameters))
        folders += [figures_directory() / study.name, *([] if checked.run else [runs_directory() / study.name])]
    check_writable(*folders)


def report_lab(
    study: Lab,
    parameters: Mapping[str, Any],
    output: Path,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> LabResult:
    """Execute one lab's notebook, write `<output>/<lab>.html` and its record; a failure is in the result and on the
    page.
    """
    start = time.monotonic()
    notebook, page = output / "notebooks" / f"{study.name}.ipynb", output / f"{study.name}.html"
    error = None
    try:
        source = notebook_path(study.name)
        execute_notebook(study, source, notebook, parameters, on_progress=on_progress)
    except NotebookFailed as failure:
        error = str(failure)
    export_page(notebook, page, study, error=error)
    return LabResult(study, page, time.monotonic() - start, error)
