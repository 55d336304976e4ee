"""The command line: `labkit` or `python -m labkit`. Nothing but arguments, messages and exit codes."""

import atexit
import errno
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from labkit.lab.advise.command import advise
from labkit.lab.commands.console import err, out, plain, print_output, progress, require_device, tell_of_load
from labkit.lab.config import PROFILES, ParameterError, parse_assignments
from labkit.lab.project import reference_directory
from labkit.studies import LABS, load_lab

if TYPE_CHECKING:
    from labkit.lab.declaration import Lab

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

# Of the lab `limits`, before another one is measured alone: what predictions need, in as few repeats as tell.
SHORT_LIMITS = {"repeats": 6, "warmup": 1, "model": "nano"}
COLUMNS = reference_directory() / "scaling" / "README.md"

NOT_WRITABLE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
"""A full disk or a read-only folder: no mistake in the command, so status 1."""

LabName = Annotated[str, typer.Argument(help=f"One of: {', '.join(LABS)}.", show_default=False)]
Profile = Annotated[str | None, typer.Option(help=f"How much to measure: {', '.join(PROFILES)}.", show_default="quick")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="NAME=VALUE", help="Change a parameter; may be repeated.")
]


def main() -> None:
    """Entry point: a mistake of the caller is one line and exit status 2, never a traceback."""
    # Nothing of what is imported becomes garbage: looking for it takes a second, and at the end another one.
    if "WORLD_SIZE" not in os.environ:  # under torchrun this process is measured, with Python's own setting
        gc.set_threshold(50_000)
    atexit.register(gc.freeze)
    # jsonschema, which checks notebooks, would take a second to make a parser of addresses that no notebook has.
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
    try:
        status = app(standalone_mode=False)  # typer would draw a box around a wrong option
    except KeyboardInterrupt:  # while modules are imported, say
        err.print("interrupted")
        raise SystemExit(130) from None
    except ParameterError as error:
        err.print(f"[bold red]error:[/] {plain(error)}", soft_wrap=True)
        raise SystemExit(2) from None
    except OSError as error:
        if error.errno not in NOT_WRITABLE:
            raise
        err.print(f"[bold red]error:[/] {plain(f'{error.filename}: {error.strerror}')}", soft_wrap=True)
        raise SystemExit(1) from None
    except Exception as error:
        if not hasattr(error, "format_message"):  # typer's own errors, whose class it keeps to itself
            raise
        if message := error.format_message().strip():
            err.print(f"[bold red]error:[/] {plain(' '.join(message.split()))}", soft_wrap=True)
        raise SystemExit(2) from None
    raise SystemExit(status)


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        from labkit.machine.source import describe_source

        source = describe_source()
        out.print(f"labkit {source.version}, {source}" if source.commit else str(source))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show which labkit this is.")
    ] = False,
) -> None:
    """Measure what the systems side of training costs on this machine, and read the answers."""


@app.command("list")
def list_labs() -> None:
    """The labs, one line each."""
    table = Table(box=None, show_header=False, pad_edge=False)
    for lab in LABS:
        table.add_row(f"[bold]{lab}[/]", load_lab(lab).summary)
    out.print(table)


@app.command()
def doctor() -> None:
    """What this machine is, which labs and profiles it can run, and why not."""
    from labkit.lab.commands.doctor import lab_rows, machine_rows

    machine = Table(box=None, show_header=False, pad_edge=False)
    for name, value in machine_rows():
        machine.add_row(f"[bold]{name}[/]", plain(value))
    out.print(machine, "")
    labs = Table("lab", "profile", "points", "can run", "planned", "why not", box=None, pad_edge=False)
    for row in lab_rows(load_lab(lab) for lab in LABS):
        labs.add_row(*(plain(cell) for cell in row))
    out.print(labs)


@app.command()
def measure(
    lab: LabName,
    profile: Profile = None,
    settings: Settings = None,
    resume: Annotated[str | None, typer.Option(metavar="RUN", help="Measure what this run still lacks.")] = None,
) -> None:
    """Measure a lab into a new run under data/runs/; no notebook."""
    from labkit.lab.project import path_from_here, runs_directory
    from labkit.lab.runs import measure as measuring
    from labkit.lab.runs.store import find_run

    study = load_lab(lab)
    if resume is not None and (settings or profile is not None):
        raise ParameterError("--resume takes its parameters from the run: leave out --profile and --set")
    profile = profile or "quick"
    config = study.configure(profile, parse_assignments(settings or []))
    if resume is None:
        require_device(getattr(config, "device", None))
        _calibrate([study], profile)
    with progress("measure", lab) as show:
        if resume is None:
            run = measuring.measure(
                study, config, profile=profile, on_progress=show, on_start=tell_of_load, on_output=print_output
            )
        else:
            path = find_run([runs_directory() / lab], resume)
            run = measuring.resume(study, path, on_progress=show, on_output=print_output)
    coverage = run.coverage()
    described = ", ".join(f"{count} {status}" for status, count in coverage["status"].value_counts().items())
    out.print(f"{lab}: {described}; {path_from_here(run.path)}", soft_wrap=True)
    others = coverage.loc[coverage["status"] != "ok", ["status", "reason"]]
    for (status, reason), count in others.value_counts().head(5).items():
        err.print(f"  {count} {status}: {plain(reason)}", soft_wrap=True)
    raise typer.Exit(1 if coverage["status"].isin(["failed", "timeout"]).any() else 0)


@app.command()
def report(
    labs: Annotated[list[str] | None, typer.Argument(metavar="[LAB]...", show_default="all")] = None,
    profile: Profile = None,
    settings: Settings = None,
    run: Annotated[str | None, typer.Option(metavar="RUN", help="Draw this run instead of measuring.")] = None,
    resume: Annotated[
        str | None, typer.Option(metavar="RUN", help="Measure what this run still lacks, and draw it.")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Folder of the pages.", show_default="reports/")] = None,
) -> None:
    """Execute notebooks and write HTML pages and an index."""
    from labkit.lab.pages.index import write_index
    from labkit.lab.pages.report import check_report, report_lab
    from labkit.lab.project import path_from_here, recorded_directory, reports_directory, runs_directory
    from labkit.lab.runs import measure as measuring
    from labkit.lab.runs.store import Run, find_run
    from labkit.lab.units import format_seconds

    if (given := resume if run is None else run) is not None and not labs:
        folders = [recorded_directory(), runs_directory()] if resume is None else [runs_directory()]
        labs = [Run.load(find_run([folder / lab for folder in folders for lab in LABS], given)).header.lab]
    studies = [load_lab(lab) for lab in (labs or LABS)]
    if given is not None and len(studies) != 1:
        raise ParameterError(f"--run and --resume belong to one lab, got {len(studies)}: {', '.join(labs or ())}")
    if resume is not None and (settings or profile is not None or run is not None):
        raise ParameterError("--resume takes its parameters from the run: leave out --profile, --set and --run")
    parameters: dict[str, Any] = parse_assignments(settings or [])
    parameters |= {name: value for name, value in (("profile", profile), ("run", run)) if value is not None}
    output = output or reports_directory()
    check_report(studies, parameters, output)
    if run is None:
        require_device(parameters.get("device"))
        tell_of_load()
    if run is None and resume is None:
        _calibrate(studies, profile or "quick")
    results = []
    for study in studies:
        with progress("report", study.name) as show:
            if resume is not None:
                path = find_run([runs_directory() / study.name], resume)
                parameters["run"] = str(measuring.resume(study, path, on_progress=show, on_output=print_output).path)
            result = report_lab(study, parameters, output, show)
        results.append(result)
        outcome = f"[bold red]failed:[/] {plain(result.error)}" if result.error else "ok"
        page = path_from_here(result.page)
        out.print(f"{study.name}: {outcome}, in {format_seconds(result.elapsed_s)}; {page}", soft_wrap=True)
        index = write_index(_all_studies(), output, to_come=studies[len(results) :])
        if len(results) in (1, len(studies)):
            out.print(f"index: {path_from_here(index)}", soft_wrap=True)
    raise typer.Exit(1 if any(result.error for result in results) else 0)


@app.command("compare")
def compare_command(
    runs: Annotated[list[str], typer.Argument(metavar="RUN RUN...", help="Files, names, folders of runs, or reports.")],
    output: Annotated[Path | None, typer.Option(help="File of the page.", show_default="reports/compare.html")] = None,
) -> None:
    """Compare the answers of runs from several machines or commits, on the points they share, with the first one's."""
    import shlex

    from labkit.lab.pages.compare import load_runs, write_comparison
    from labkit.lab.project import check_writable, path_from_here, reports_directory
    from labkit.lab.runs.comparison import compare_runs

    page = output or reports_directory() / "compare.html"
    if page.is_dir():
        raise ParameterError(f"--output names the file of the page, and {page} is a folder")
    check_writable(page.parent)
    different, left_out = load_runs(runs)
    for name, reason in left_out.items():
        err.print(f"left out: {plain(name)}: {plain(reason)}", soft_wrap=True)
    comparisons = compare_runs(different, load_lab)
    for line in write_comparison(comparisons, shlex.join(["labkit", "compare", *runs]), page, left_out):
        out.print(plain(line), soft_wrap=True)
    out.print(f"page: {plain(path_from_here(page))}", soft_wrap=True)


@app.command("predict")
def predict_command(
    rows: Annotated[
        Path, typer.Argument(metavar="ROWS.csv", help=f"Runs, one per row, `-` for standard input; columns: {COLUMNS}.")
    ],
    output: Annotated[Path | None, typer.Option(help="File of the predictions.", show_default="printed")] = None,
) -> None:
    """Predict step time, memory and MFU of training runs on many GPUs, one per row of a table."""
    from labkit.scaling.predicted_table import predict_rows, write_rows
    from labkit.scaling.table import read_rows

    try:
        table = read_rows(rows)
        predicted = predict_rows(table)
        if output is None:
            write_rows(predicted, sys.stdout)
        else:
            with output.open("w", newline="", encoding="utf-8") as file:
                write_rows(predicted, file)
    except (OSError, ValueError) as error:
        message = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise ParameterError(message) from None
    refused = [row for row in table if row.run is None]
    for row in refused:
        err.print(f"line {row.line}: {plain(row.refusal)}", soft_wrap=True)
    if output is not None:
        out.print(f"{len(table) - len(refused)} predicted, {len(refused)} refused; {plain(output)}", soft_wrap=True)
    raise typer.Exit(1 if refused else 0)


app.command("advise")(advise)


def _calibrate(studies: "Sequence[Lab]", profile: str) -> None:
    """Measure this machine's limits if one of these labs predicts, and there are none of this source and day."""
    from labkit.lab.calibration import FRESH, LIMITS, newest_calibration
    from labkit.lab.runs.measure import measure as measure_run
    from labkit.machine import describe_machine

    predicts = any(getattr(question, "needs_calibration", False) for lab in studies for question in lab.questions)
    is_wanted = predicts and studies[0].name != LIMITS
    if not is_wanted or profile == "smoke" or "WORLD_SIZE" in os.environ:  # smoke is to be quick; a job's ranks wait
        return
    machine = describe_machine()
    found = newest_calibration(machine, within=FRESH)
    if found is not None and found.source == str(machine.source):
        return
    err.print("calibrating this machine first, some 15 seconds once a day and version: predictions are made of it")
    limits = load_lab(LIMITS)
    short = limits.configure("quick", SHORT_LIMITS)
    with progress("measure", LIMITS) as show:
        measure_run(limits, short, profile="quick", on_progress=show, on_output=print_output)


def _all_studies() -> "Iterator[Lab]":
    return (load_lab(lab) for lab in LABS)


if __name__ == "__main__":
    main()
