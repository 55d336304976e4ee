"""The command line: nothing but arguments, messages and exit codes."""

import atexit
import gc
import logging
import math
import os
import select
import signal
import sys
import time
import warnings
from contextlib import closing
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from labkit.advise.command import advise
from labkit.check.commands import check, compare, hand_in, notebook
from labkit.check.try_command import try_training
from labkit.lab import project
from labkit.lab.commands.console import (
    Json,
    calibrate_first,
    err,
    out,
    prepare_shell,
    print_json,
    print_load,
    print_table,
    progress,
    require_device,
    require_loopback,
)
from labkit.lab.commands.predict import predict
from labkit.lab.config import PROFILES, ParameterError, parse_assignments
from labkit.studies import LABS, load_lab

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

LabName = Annotated[str, typer.Argument(help=f"One of: {', '.join(LABS)}.", show_default=False)]
Profile = Annotated[
    str | None,
    typer.Option(help=f"How much to measure: {', '.join(PROFILES)}.", show_default="quick"),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Change a parameter; may be repeated."),
]
Minutes = Annotated[
    float | None,
    typer.Option(
        min=0.1,
        help="Time that it may take; what does not fit is left out.",
        show_default="no limit",
    ),
]
Resume = Annotated[
    str | None, typer.Option(metavar="RUN", help="Measure what this run still lacks.")
]


def main() -> None:
    """Entry point: a mistake of the caller is one line and exit status 2, never a traceback."""
    # Imported objects are never garbage: collecting them takes a second, and another one at exit.
    gc.set_threshold(50_000)
    atexit.register(gc.freeze)
    # Without a home folder it says on every command that its fonts are cached elsewhere.
    logging.getLogger("matplotlib").setLevel(logging.ERROR)
    os.environ.pop("MPLBACKEND", None)  # figures are files; matplotlib raises for an unknown name
    # jsonschema, which checks notebooks, would take a second to build a parser of addresses that no
    # notebook has.
    sys.modules.setdefault("rfc3987_syntax", None)  # type: ignore[arg-type]
    # The fork server lives until this process ends, and so does the socket to it.
    warnings.filterwarnings("ignore", category=ResourceWarning)
    try:
        prepare_shell()
        status = app(standalone_mode=False)  # typer would draw a box around a wrong option
        sys.stdout.flush()
    except KeyboardInterrupt:  # for example during imports
        err.print("interrupted")
        status = 130
    except ParameterError as error:
        status = _print_error(str(error), 2)
    except SystemExit as end:
        # A rank of torchrun other than the first ends with 0; rich, with 1, if nobody reads help.
        status = 128 + signal.SIGPIPE if end.code else 0
    except BrokenPipeError:
        if not _has_reader_left():  # a pipe between processes of labkit
            raise
        # Python flushes once more at its end, and would print the error.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = 128 + signal.SIGPIPE
    except OSError as error:
        status = project.status_of_file_error(error)
        if status is None:
            raise
        _print_error(f"{error.filename or 'standard output'}: {error.strerror}", status)
    except Exception as error:
        if not hasattr(error, "format_message"):  # typer's own errors, whose class is private
            raise
        status = _print_error(" ".join(error.format_message().split()), 2)
    raise SystemExit(status)


def _has_reader_left() -> bool:
    """Return whether standard output is a pipe that nobody reads any more, as with `head -1`."""
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    return bool(poll.poll(0))


def _print_error(message: str, status: int) -> int:
    if message:  # typer has printed its help otherwise
        err.print(Text.assemble(("error:", "bold red"), f" {message}"))
    return status


def _print_version(is_wanted: bool) -> None:
    if is_wanted:
        from labkit.machine.source import describe_source

        source = describe_source()
        out.print(f"labkit {source.version}, {source}" if source.commit else str(source))
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show which labkit this is."
        ),
    ] = False,
) -> None:
    """Measure what the systems side of training costs on this machine, and read the answers."""


@app.command("list")
def list_labs(as_json: Json = False) -> None:
    """List the labs, one line each."""
    labs = []
    for study in map(load_lab, LABS):
        questions = [{"id": one.id, "text": one.text} for one in study.questions]
        labs.append({"name": study.name, "summary": study.summary, "questions": questions})
    if as_json:
        print_json("list", labs=labs)
        return
    print_table([(lab["name"], lab["summary"]) for lab in labs])


@app.command()
def doctor(as_json: Json = False) -> None:
    """Describe this machine: which labs and profiles it can run, and why not others."""
    from labkit.lab.commands.doctor import lab_rows, machine_rows

    rows = list(lab_rows(map(load_lab, LABS)))
    names = ("lab", "profile", "points", "can_run", "planned", "why_not")
    if as_json:
        plans = [dict(zip(names, row, strict=True)) for row in rows]
        print_json("doctor", about=dict(machine_rows()), plans=plans)
        return
    print_table(machine_rows())
    out.print()
    print_table(rows, *(name.replace("_", " ") for name in names))


@app.command()
def measure(
    lab: LabName,
    profile: Profile = None,
    settings: Settings = None,
    resume: Resume = None,
    minutes: Minutes = None,
    as_json: Json = False,
) -> None:
    """Measure a lab into a new run under data/runs/; no notebook."""
    from labkit.lab.commands.console import answer_numbers
    from labkit.lab.runs import measure as measuring
    from labkit.lab.runs.store import find_run

    study = load_lab(lab)
    if resume is not None and (settings or profile is not None or minutes is not None):
        raise ParameterError(
            "--resume takes its parameters from the run: leave out --profile, --set and --minutes"
        )
    profile = profile or "quick"
    parameters = parse_assignments(settings or [])
    if minutes is not None:
        parameters["budget_s"] = 60 * minutes
    config = study.configure(profile, parameters)
    require_loopback()
    if resume is None:
        require_device(getattr(config, "device", None))
        calibrate_first([study], profile)
    with progress(lab) as show:
        if resume is None:
            run = measuring.measure(
                study,
                config,
                profile=profile,
                on_progress=show,
                on_start=print_load,
                on_output=err.print,
            )
        else:
            path = find_run([project.runs_directory() / lab], resume)
            run = measuring.resume(study, path, on_progress=show, on_output=err.print)
    coverage = run.coverage()
    counts = coverage["status"].value_counts().to_dict()
    statuses = ", ".join(f"{count} {status}" for status, count in counts.items())
    (err if as_json else out).print(f"{lab}: {statuses}; {project.path_from_here(run.path)}")
    if as_json:
        print_json("measure", answer_numbers(study, run), run=str(run.path), points=counts)
    others = coverage.loc[coverage["status"] != "ok", ["status", "reason"]]
    for (status, reason), count in others.value_counts().head(5).items():
        err.print(f"  {count} {status}: {reason}")
    raise typer.Exit(1 if coverage["status"].isin(["failed", "timeout"]).any() else 0)


@app.command()
def report(
    labs: Annotated[
        list[str] | None, typer.Argument(metavar="[LAB]...", show_default="all")
    ] = None,
    profile: Profile = None,
    settings: Settings = None,
    run: Annotated[
        str | None, typer.Option(metavar="RUN", help="Draw this run instead of measuring.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder of the pages.", show_default="reports/")
    ] = None,
    minutes: Minutes = None,
    as_json: Json = False,
) -> None:
    """Execute notebooks and write HTML pages and an index."""
    from labkit.lab.commands.console import print_page, print_plan
    from labkit.lab.pages.execute import Kernel
    from labkit.lab.pages.index import write_index
    from labkit.lab.pages.report import LabResult, plan_report, report_lab
    from labkit.lab.pages.report_time import ReportTime, plan_time

    studies = [load_lab(lab) for lab in _labs_to_report(labs, run)]
    if run is not None and minutes is not None:
        raise ParameterError("--minutes is for measuring: leave it out with --run")
    parameters: dict[str, Any] = parse_assignments(settings or [])
    if profile is not None:
        parameters["profile"] = profile
    if run is not None:
        parameters["run"] = run
    require_loopback()
    output = output or project.project_root() / "reports"
    pages = plan_report(studies, parameters, output)
    for page in pages:
        if page.is_edited:
            edited = project.path_from_here(project.notebook_path(page.study.name))
            err.print(f"{edited}: edited; the report runs the committed notebook")
    results = list[LabResult]()
    say = err if as_json else out
    times = ReportTime()
    if run is None:
        require_device(parameters.get("device"))
        print_load()
        deadline = time.monotonic() + 60 * (minutes or math.inf)
        calibrate_first(studies, profile or "quick")
        times = plan_time(pages, deadline)
        print_plan(times, say)
    with closing(Kernel(studies)) as kernel:
        for page in map(times.limit, pages):
            with progress(page.study.name) as show:
                result = report_lab(page, output, kernel, show)
            results.append(result)
            print_page(result, say)
            # After each lab, so that a reader need not wait for the last.
            index = write_index(map(load_lab, LABS), output, to_come=studies[len(results) :])
            if len(results) in (1, len(studies)):
                say.print(f"index: {project.path_from_here(index)}")
    if as_json:
        written = [
            {"lab": one.study.name, "page": str(one.page), "error": one.error} for one in results
        ]
        print_json("report", pages=written)
    raise typer.Exit(1 if any(result.error for result in results) else 0)


def _labs_to_report(labs: list[str] | None, run: str | None) -> list[str]:
    """Return the named labs, that of a run, or all. ParameterError for a run and other labs."""
    if run is None:
        return labs or list(LABS)
    from labkit.lab.runs.store import Run, find_run

    if not labs:
        folders = product((project.recorded_directory(), project.runs_directory()), LABS)
        labs = [Run.load(find_run([folder / lab for folder, lab in folders], run)).header.lab]
    if len(labs) != 1:
        raise ParameterError(f"--run belongs to one lab, got {len(labs)}: {', '.join(labs)}")
    return labs


app.command("try")(try_training)
app.command("predict")(predict)
app.command("advise")(advise)
app.command("compare")(compare)
app.command("check")(check)
app.command("notebook")(notebook)
app.command("hand-in")(hand_in)


if __name__ == "__main__":
    main()
