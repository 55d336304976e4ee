"""`labkit check`, `notebook` and `hand-in`: arguments, lines in the terminal, exit status."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from labkit.check import TOLERANCE
from labkit.lab.commands.console import err, out, plain, print_json, print_output, tell_of_load
from labkit.lab.config import ParameterError
from labkit.lab.units import counted

if TYPE_CHECKING:
    from labkit.check.checking import CheckResult


def check(
    save: Annotated[bool, typer.Option("--save", help="Add this measurement to the machine's baseline.")] = False,
    against: Annotated[
        str | None, typer.Option(metavar="RUN|FILE", help="Compare with this check.", show_default="the baseline")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0.0, max=10.0, help="Slower by more than this share is status 3.")
    ] = TOLERANCE,
    bundle: Annotated[Path | None, typer.Option(metavar="FILE.zip", help="Also write what a bug report needs.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document (docs/for-scripts.md).")] = False,
) -> None:
    """Is every implementation right on this machine, and is it as fast as its baseline? About a minute on two cores.

    Exit status: 0; 1 if a result is wrong; 3 if something is slower by more than the tolerance, or cores are gone.
    """
    from labkit.check.checking import check_machine, load_baseline, save_baseline
    from labkit.check.comparison import FEW_RUNS
    from labkit.lab.project import check_writable, path_from_here
    from labkit.lab.runs.progress import terminal_line

    if save and against is not None:
        raise ParameterError("--save keeps a new baseline, and --against compares with one: expected one of them")
    if bundle is not None:
        if bundle.is_dir():
            raise ParameterError(f"--bundle names the file to write, and {bundle} is a folder")
        check_writable(bundle.parent)
    baseline = [] if save else load_baseline(against)
    tell_of_load()
    try:
        with terminal_line(err, "check") as show:
            result = check_machine(baseline, show, print_output, tolerance=tolerance)
    except KeyboardInterrupt:
        err.print("interrupted: nothing was compared or saved")
        raise typer.Exit(130) from None
    facts = describe(result)
    if as_json:
        print_json("check", **facts)
    else:
        _print(result)
    if bundle is not None:
        from labkit.check.bundle import write_bundle
        from labkit.lab.commands.console import document

        write_bundle(bundle, result, document("check", **facts))
        err.print(f"bundle: {plain(path_from_here(bundle))}", soft_wrap=True)
    if not save:
        raise typer.Exit(result.status)
    try:
        if result.status:
            raise ParameterError("no baseline was saved: something is wrong or failed")
        path = save_baseline(result.run)
    except ParameterError as error:
        err.print(plain(error), soft_wrap=True)
        raise typer.Exit(1) from None
    n_runs = len(load_baseline(None))
    advice = "" if n_runs >= FEW_RUNS else "; three, at different hours, say how much this machine varies"
    err.print(f"baseline: {counted(n_runs, 'run')}, {plain(path_from_here(path))}{advice}", soft_wrap=True)


def describe(result: "CheckResult") -> dict[str, Any]:
    """The numbers and facts of a check's JSON document (`docs/for-scripts.md`)."""
    from labkit.lab.commands.console import number

    at = result.run.header.started
    numbers = [
        number(
            f"{one.quantity}, {one.place}",
            one.ratio,
            "seconds now over seconds then",
            low=one.low,
            high=one.high,
            validity=one.verdict if one.reason is None else f"{one.verdict}: {one.reason}",
            measured=at,
            seconds=one.seconds,
            smallest_change=one.smallest_change,
        )
        for one in result.changes
    ]
    return {
        "numbers": numbers,
        "status": result.status,
        "baseline": [run.name for run in result.baseline],
        "circumstances": result.circumstances,
        "correctness": [asdict(one) for one in result.correctness],
    }


def notebook(
    lab: Annotated[str, typer.Argument(help="The lab.", show_default=False)],
    student: Annotated[bool, typer.Option("--student", help="Leave out implementations, answers, solutions.")] = False,
    output: Annotated[Path | None, typer.Option(help="The copy.", show_default="LAB.ipynb")] = None,
) -> None:
    """Write a copy of a lab's notebook to work in: reports go on running the project's own."""
    import nbformat

    from labkit.check.student import student_notebook
    from labkit.lab.project import check_writable, notebook_path, path_from_here, write_file
    from labkit.studies import load_lab

    declaration = load_lab(lab)
    path = output or Path(f"{lab}.ipynb")
    if path.exists():
        raise ParameterError(f"{path}: is there already; --output names another file")
    content = student_notebook(declaration) if student else nbformat.read(notebook_path(lab), as_version=4)
    check_writable(path.parent)
    write_file(path, nbformat.writes(content) + "\n")
    out.print(plain(path_from_here(path)), soft_wrap=True)


def hand_in(
    name: Annotated[str, typer.Argument(help="Your name.", show_default=False)],
    labs: Annotated[list[str] | None, typer.Argument(metavar="[LAB]...", show_default="all that were measured")] = None,
    notebooks: Annotated[
        list[Path] | None, typer.Option("--notebook", metavar="FILE", help="Your notebook; may be repeated.")
    ] = None,
) -> None:
    """Bundle the newest run of each lab, its page, and your notebooks as hand-in-NAME.zip."""
    from labkit.check.hand_in import write_hand_in
    from labkit.lab.project import path_from_here
    from labkit.studies import LABS, load_lab

    wanted = [load_lab(lab).name for lab in labs or LABS]
    path = write_hand_in(name, wanted, Path.cwd(), notebooks or ())
    out.print(plain(path_from_here(path)), soft_wrap=True)


def _print(result: Any) -> None:
    _print_correctness(result.correctness)
    for _, reason, _ in result.failures:
        out.print(plain(f"not timed: {reason}"), soft_wrap=True)
    if result.baseline:
        header, runs = result.baseline[-1].header, counted(len(result.baseline), "run")
        text = f"baseline: {header.machine.label}, {runs}, the newest of {header.started:%Y-%m-%d %H:%M} UTC"
        out.print(plain(text), soft_wrap=True)
    for note in result.circumstances:
        out.print(plain(note), soft_wrap=True)
    reasons = {one.reason for one in result.changes}
    shared = reasons.pop() if len(reasons) == 1 else None
    if shared is not None:
        out.print(plain(f"nothing is comparable: {shared}"), soft_wrap=True)
    table = Table("quantity", "where", "now", "now / baseline", "verdict", box=None, pad_edge=False)
    for one in result.changes:
        *cells, verdict = map(plain, _row(one, result.run.header.machine))
        table.add_row(*cells, verdict if shared is None else "")
    out.print(table)
    if slower := [f"{one.quantity} ({one.place})" for one in result.slower]:
        out.print(plain(f"slower by more than {100 * result.tolerance:g}%: {', '.join(slower)}"), soft_wrap=True)


def _print_correctness(rows: list[Any]) -> None:
    """One line per lab and place if all is well; what is not, by name."""
    groups: dict[tuple[str, str, int], list[Any]] = {}
    for row in rows:
        groups.setdefault((row.lab, row.device, row.ranks), []).append(row)
    for (lab, device, ranks), group in groups.items():
        right = [row.name for row in group if row.verdict == "ok"]
        out.print(plain(f"{lab}, {device}, {counted(ranks, 'rank')}: right: {', '.join(right) or 'none'}"))
        for row in group:
            if row.verdict != "ok":
                color = "[bold red]" if row.is_bad else ""
                out.print(f"  {color}{plain(f'{row.name}: {row.verdict}: {row.reason}')}", soft_wrap=True)


def _row(one: Any, machine: Any) -> tuple[str, str, str, str, str]:
    from labkit.lab.units import format_flops, format_rate, format_seconds

    forms = {"FLOP/s": format_flops, "B/s": format_rate}
    now = "" if one.seconds is None else forms[one.unit](one.rate) if one.rate else format_seconds(one.seconds)
    if one.ratio is None:
        return one.quantity, one.place, now + _share_of_peak(one, machine), "", f"{one.verdict}: {one.reason}"
    verdict = one.verdict
    if verdict == "no change shown":
        verdict += f" (from {100 * (one.smallest_change - 1):.0f}% on it would be)"
    ratio = f"{one.ratio:.2f} [{one.low:.2f}, {one.high:.2f}]"
    return one.quantity, one.place, now + _share_of_peak(one, machine), ratio, verdict


def _share_of_peak(one: Any, machine: Any) -> str:
    """Word the share of the peak, and what published products reach, for bfloat16 on a GPU whose peak is known."""
    from labkit.scaling.constants import load_constants
    from labkit.scaling.hardware import find_hardware

    peak = machine.gpus[0].dense_bf16_peak_tflops if one.device == "cuda" and machine.gpus else None
    if peak is None or one.quantity != "matmul bfloat16" or not one.rate:
        return ""
    share = f", {100 * one.rate / peak / 1e12:.0f}% of the peak"
    try:
        architecture = find_hardware(machine.gpus[0].name).architecture
    except ValueError:  # not declared
        return share
    published = load_constants().table["matmul_ceiling"].get(architecture)
    return share + (f" (published: up to {100 * published:.0f}%)" if published else "")
