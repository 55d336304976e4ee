"""`labkit compare`: runs side by side, or a folder of hand-ins as the page of a class."""

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from labkit.lab import project
from labkit.lab.commands.console import err, out, print_json


def compare(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN RUN...", help="Files, names, or folders of runs.")
    ],
    output: Annotated[
        Path | None, typer.Option(help="File of the page.", show_default="reports/compare.html")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document (docs/for-scripts.md).")
    ] = False,
) -> None:
    """Compare runs of several machines or commits with the first one, on the points they share.

    A folder of hand-ins (`labkit hand-in`) becomes the page of a class.
    """
    from labkit.check.class_folder import holds_hand_ins
    from labkit.check.class_page import write_class_page
    from labkit.lab.commands.console import comparison_numbers
    from labkit.lab.compare import compare_runs, write_comparison
    from labkit.lab.runs.copies import load_runs
    from labkit.studies import load_lab

    page = output or project.project_root() / "reports" / "compare.html"
    project.check_page(page)
    status = 0
    if len(runs) == 1 and holds_hand_ins(runs[0]):
        result = write_class_page(Path(runs[0]), page)
        lines = result.lines()
        document: dict[str, Any] = result.describe()
        status = result.status
    else:
        different, left_out = load_runs(runs)
        for name, reason in left_out.items():
            err.print(f"left out: {name}: {reason}")
        pairs = compare_runs(different, load_lab)
        lines = write_comparison(pairs, shlex.join(["labkit", "compare", *runs]), page, left_out)
        document = {"numbers": comparison_numbers(pairs), "left_out": left_out}
    for line in (*lines, f"page: {project.path_from_here(page)}"):
        (err if as_json else out).print(line)
    if as_json:
        print_json("compare", page=str(page), **document)
    raise typer.Exit(status)
