"""`labkit check`, `compare`, `notebook` and `hand-in`: arguments, lines, exit status."""

import json
import math
import shlex
import statistics
from dataclasses import asdict
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from labkit.check import TOLERANCE
from labkit.lab import project
from labkit.lab.commands.console import (
    Json,
    document,
    err,
    number,
    out,
    print_json,
    print_load,
    print_table,
    require_loopback,
)
from labkit.lab.config import ParameterError
from labkit.lab.units import counted

if TYPE_CHECKING:
    from labkit.check.checking import CheckResult
    from labkit.check.comparison import Change
    from labkit.machine.description import Machine

# Fields of a change that the JSON document has under the same names.
NUMBERS = ("low", "high", "seconds", "shared", "smallest_change")


def check(
    save: Annotated[
        bool, typer.Option("--save", help="Add this measurement to the machine's baseline.")
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(
            metavar="RUN|FILE", help="Compare with this check.", show_default="the baseline"
        ),
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0.0, max=10.0, help="Slower by more than this share is status 3.")
    ] = TOLERANCE,
    bundle: Annotated[
        Path | None, typer.Option(metavar="FILE.zip", help="Also write what a bug report needs.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Check every implementation here, and compare the machine's speed with the baseline.

    Takes 80 s on two cores. Exit status: 0; 1 if a result is wrong; 3 if something is slower by
    more than the tolerance, or hardware is gone; 4 if nothing could be compared, as without a
    baseline.
    """
    from labkit.check.archives import write_bundle
    from labkit.check.checking import (
        check_machine,
        load_baseline,
        no_baseline_reason,
        save_baseline,
    )
    from labkit.lab.runs.progress import terminal_line

    if save and against is not None:
        raise ParameterError(
            "--save keeps a new baseline, and --against compares with one: expected one of them"
        )
    if bundle is not None:
        if bundle.is_dir():
            raise ParameterError(f"--bundle names the file to write, and {bundle} is a folder")
        project.check_writable(bundle.parent)
    # Before anything is measured: a damaged baseline ends the command at once.
    baseline = []
    if not save:
        baseline = load_baseline(against, err.print)
    require_loopback()
    print_load()
    try:
        with terminal_line(err, "check") as show:
            result = check_machine(baseline, show, err.print, tolerance=tolerance)
    except KeyboardInterrupt:
        err.print("interrupted: nothing was compared or saved")
        raise typer.Exit(130) from None  # 128 + SIGINT, as shells say it
    report = document("check", **describe(result))
    if as_json:
        print(json.dumps(report))
    else:
        _print(result)
    # Whatever the result: a bug report is about what is wrong.
    if bundle is not None:
        write_bundle(bundle, result, report)
        err.print(f"bundle: {project.path_from_here(bundle)}")
    if not save:
        raise typer.Exit(result.status)
    reason = no_baseline_reason(result)
    if reason is not None:
        err.print(f"no baseline was saved: {reason}")
        raise typer.Exit(1)
    path = save_baseline(result)
    # Of all saved runs, those of this hardware and torch are the baseline from now on.
    runs = counted(len(load_baseline(None, err.print)), "run")
    err.print(
        f"baseline: {runs}, {project.path_from_here(path)}; three, saved at different hours, show"
        " changes of 10 to 20%"
    )


def describe(result: "CheckResult") -> dict[str, Any]:
    """Return the numbers and facts of a check's JSON document (`docs/for-scripts.md`)."""
    unit = "seconds now over seconds then"
    numbers = []
    for change in result.changes:
        facts: dict[str, Any] = {name: getattr(change, name) for name in NUMBERS}
        facts["validity"] = _verdict(change)
        facts["measured"] = result.run.header.started
        numbers.append(number(f"{change.quantity}, {change.place}", change.ratio, unit, **facts))
    return {
        "numbers": numbers,
        "status": result.status,
        "baseline": [run.name for run in result.baseline],
        "circumstances": [str(difference) for difference in result.circumstances],
        "nothing_compared": result.nothing_compared_reason,
        "correctness": [
            asdict(outcome) | {"is_bad": outcome.is_bad} for outcome in result.correctness
        ],
    }


def _print(result: "CheckResult") -> None:
    _print_correctness(result)
    for _, reason, _ in result.run.failures():
        out.print(f"not timed: {reason}")
    if result.baseline:
        header = result.baseline[-1].header
        runs = counted(len(result.baseline), "run")
        out.print(
            f"baseline: {header.machine.label}, {runs}, the newest of"
            f" {header.started:%Y-%m-%d %H:%M} UTC"
        )
    if result.circumstances:
        changed = ", ".join(map(str, result.circumstances))
        out.print(f"since the baseline: {changed}; the machine is the same")
    _print_shared_changes(result)
    # One reason for all quantities is said once, below the table.
    common = result.nothing_compared_reason
    rows = [_row(change, result.run.header.machine, common) for change in result.changes]
    print_table(rows, "quantity", "where", "now", "now / baseline", "shows from", "verdict")
    if any(change.smallest_change > 1.1 for change in result.changes):
        out.print(
            "more baseline runs (`labkit check --save`), at different hours, show smaller changes"
        )
    slower = ", ".join(f"{change.quantity} ({change.place})" for change in result.slower)
    if slower:
        out.print(f"slower by more than {100 * result.tolerance:g}%: {slower}", style="bold red")
    if common:
        out.print(f"nothing was compared: {common}", style="bold")


def _print_correctness(result: "CheckResult") -> None:
    """Print a line of what is right for each lab and place, and a line for each other result."""
    by_place = groupby(result.correctness, key=attrgetter("lab", "device", "ranks"))
    for (lab, device, ranks), group in by_place:
        rows = list(group)
        right = ", ".join(row.title for row in rows if row.status == "ok")
        out.print(f"{lab}, {device}, {counted(ranks, 'rank')}: right: {right or 'none'}")
        for row in rows:
            if row.status != "ok":
                style = "bold red" if row.is_bad else None
                out.print(f"  {row.title}: {row.status}: {row.reason}", style=style)


def _print_shared_changes(result: "CheckResult") -> None:
    for place, changes in groupby(result.changes, key=attrgetter("place")):
        factors = [change.shared for change in changes if not math.isnan(change.shared)]
        # Within the tolerance nobody would ask what happened to the machine.
        factor = statistics.median(factors or [1.0])
        if abs(math.log(factor)) > math.log1p(result.tolerance):
            out.print(
                f"{place}: all take {factor:.2f} times as long, which the baseline's runs explain:"
                " ratios leave it out"
            )


def _row(change: "Change", machine: "Machine", common: str | None) -> tuple[str, ...]:
    """Return a change as a row of the table; a reason that all have in common is not repeated."""
    ratio = ""
    smallest = ""
    if not math.isnan(change.ratio):
        ratio = f"{change.ratio:.2f} [{change.low:.2f}, {change.high:.2f}]"
        smallest = f"{100 * (change.smallest_change - 1):.0f}%"
    speed = change.speed + describe_peak_share(change, machine)
    verdict = _verdict(change)
    if change.reason and common is not None:
        verdict = ""
    return change.quantity, change.place, speed, ratio, smallest, verdict


def _verdict(change: "Change") -> str:
    return ": ".join(filter(None, (change.verdict, change.reason)))


def describe_peak_share(change: "Change", machine: "Machine") -> str:
    """Word the share of a GPU's declared peak that bfloat16 matmuls reach, or ""."""
    from labkit.scaling.hardware import find_hardware

    if (
        change.quantity != "matmul bfloat16"
        or not change.place.endswith("cuda")
        or math.isnan(change.rate)
    ):
        return ""
    try:
        gpu = find_hardware(machine.gpus[0].name)
    except (IndexError, ValueError):  # no GPU, or none that is declared
        return ""
    share = change.rate / 1e12 / gpu.peak_tflops
    published = gpu.matmul_tflops / gpu.peak_tflops
    return f", {100 * share:.0f}% of the peak (published: up to {100 * published:.0f}%)"


def compare(
    runs: Annotated[
        list[str], typer.Argument(metavar="RUN RUN...", help="Files, names, or folders of runs.")
    ],
    output: Annotated[
        Path | None, typer.Option(help="File of the page.", show_default="reports/compare.html")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare runs of several machines or commits with the first one, on the points they share.

    A folder of hand-ins (`labkit hand-in`) becomes the page of a class.
    """
    from labkit.check.class_folder import holds_hand_ins
    from labkit.check.class_page import write_class_page
    from labkit.lab.commands.console import comparison_numbers
    from labkit.lab.compare import compare_runs, load_runs, write_comparison
    from labkit.studies import load_lab

    page = output or project.project_root() / "reports" / "compare.html"
    if page.suffix not in (".html", ".htm") or page.is_dir():
        raise ParameterError(f"expected --output to name an .html file, got {str(page)[-80:]!r}")
    project.check_writable(page.parent)
    status = 0
    if len(runs) == 1 and holds_hand_ins(runs[0]):
        result = write_class_page(Path(runs[0]), page)
        lines = result.lines()
        content: dict[str, Any] = result.describe()
        status = result.status
    else:
        different, left_out = load_runs(runs)
        for name, reason in left_out.items():
            err.print(f"left out: {name}: {reason}")
        pairs = compare_runs(different, load_lab)
        lines = write_comparison(pairs, shlex.join(["labkit", "compare", *runs]), page, left_out)
        content = {"numbers": comparison_numbers(pairs), "left_out": left_out}
    console = out
    if as_json:  # alone on stdout
        console = err
        print_json("compare", page=str(page), **content)
    for line in (*lines, f"page: {project.path_from_here(page)}"):
        console.print(line)
    raise typer.Exit(status)


def notebook(
    lab: Annotated[str, typer.Argument(help="The lab.", show_default=False)],
    student: Annotated[
        bool, typer.Option("--student", help="Leave out implementations, answers, solutions.")
    ] = False,
    output: Annotated[Path | None, typer.Option(help="The copy.", show_default="LAB.ipynb")] = None,
) -> None:
    """Copy a lab's notebook to work in; reports still run the project's notebook."""
    import nbformat

    from labkit.check.student import student_notebook
    from labkit.lab.project import notebook_path
    from labkit.studies import load_lab

    declaration = load_lab(lab)
    path = output or Path(f"{lab}.ipynb")
    # It may hold a student's work.
    if path.exists():
        raise ParameterError(f"{path}: exists already; --output names another file")
    content = nbformat.read(notebook_path(lab), as_version=4)
    if student:
        content = student_notebook(content, declaration)
    project.check_writable(path.parent)
    project.write_file(path, nbformat.writes(content) + "\n")
    out.print(project.path_from_here(path))


def hand_in(
    name: Annotated[str, typer.Argument(help="Your name.", show_default=False)],
    labs: Annotated[
        list[str] | None, typer.Argument(metavar="[LAB]...", show_default="all that were measured")
    ] = None,
    notebooks: Annotated[
        list[Path] | None,
        typer.Option("--notebook", metavar="FILE", help="Your notebook; may be repeated."),
    ] = None,
) -> None:
    """Bundle the newest run of each lab, the last `lab.check`, pages and notebooks as a zip."""
    from labkit.check.hand_in import write_hand_in
    from labkit.studies import LABS, load_lab

    names = list(LABS)
    if labs:
        names = [load_lab(lab).name for lab in labs]
    path = write_hand_in(name, names, Path.cwd(), notebooks or ())
    out.print(project.path_from_here(path))
