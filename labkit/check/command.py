"""`labkit check`: arguments, lines in the terminal, and the exit status."""

import json
from typing import Annotated, Any

import typer
from rich.table import Table

from labkit.lab.commands.console import err, out, plain, print_output, tell_of_load


def check(
    save: Annotated[bool, typer.Option("--save", help="Keep this measurement as the machine's baseline.")] = False,
    against: Annotated[
        str | None, typer.Option(metavar="RUN|FILE", help="Compare with this check.", show_default="the baseline")
    ] = None,
    tolerance: Annotated[
        float, typer.Option(min=0.0, max=10.0, help="Slower by more than this share is status 3.")
    ] = 0.05,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document (docs/for-scripts.md).")] = False,
) -> None:
    """Is every implementation right on this machine, and is it as fast as its baseline? Some 90 seconds.

    Exit status: 0; 1 if a result is wrong; 3 if something is slower by more than the tolerance, or cores are gone.
    """
    from labkit.check.checking import check_machine, load_baseline, save_baseline
    from labkit.lab.project import path_from_here
    from labkit.lab.terminal_line import terminal_line

    baseline = load_baseline(against)
    tell_of_load()
    try:
        with terminal_line(err, "check") as show:
            result = check_machine(None if save else baseline, show, print_output, tolerance=tolerance)
    except KeyboardInterrupt:
        err.print("interrupted: nothing was compared or saved")
        raise typer.Exit(130) from None
    if as_json:
        out.print(json.dumps(describe(result)), soft_wrap=True, markup=False)
    else:
        _print(result)
    if save and result.status == 0:
        path = save_baseline(result.run)
        err.print(f"baseline: {plain(path_from_here(path))}; `labkit check` compares with it", soft_wrap=True)
    raise typer.Exit(result.status)


def describe(result: Any) -> dict[str, Any]:
    """The JSON document of a check (`docs/for-scripts.md`)."""
    from labkit.lab.json_output import document, number

    at = result.run.header.started
    return document(
        "check",
        [
            number(
                f"{one.quantity}, {one.place}",
                one.ratio,
                "seconds now over seconds then",
                low=one.low,
                high=one.high,
                validity=one.verdict if one.reason is None else f"{one.verdict}: {one.reason}",
                measured=at,
                seconds=one.seconds,
                smallest_seen=one.smallest_seen,
            )
            for one in result.changes
        ],
        status=result.status,
        baseline=result.baseline.name if result.baseline else None,
        circumstances=result.circumstances,
        correctness=[vars(one) for one in result.correctness],
    )


def _print(result: Any) -> None:
    _print_correctness(result.correctness)
    for note in result.circumstances:
        out.print(plain(note), soft_wrap=True)
    reasons = {one.reason for one in result.changes}
    if len(reasons) == 1 and (reason := reasons.pop()) is not None:
        out.print(plain(f"nothing is comparable: {reason}"), soft_wrap=True)
    table = Table("quantity", "where", "now", "now / baseline", "verdict", box=None, pad_edge=False)
    for one in result.changes:
        table.add_row(*(plain(cell) for cell in _row(one, result.run.header.machine)))
    out.print(table)


def _print_correctness(rows: list[Any]) -> None:
    """One line per lab and place if all is well; what is not, by name."""
    groups: dict[tuple[str, str, int], list[Any]] = {}
    for row in rows:
        groups.setdefault((row.lab, row.device, row.ranks), []).append(row)
    for (lab, device, ranks), group in groups.items():
        right = [row.name for row in group if row.verdict == "ok"]
        out.print(plain(f"{lab}, {device}, {ranks} rank{'s' * (ranks > 1)}: right: {', '.join(right) or 'none'}"))
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
        verdict += f" (from {100 * (one.smallest_seen - 1):.0f}% on it would be)"
    ratio = f"{one.ratio:.2f} [{one.low:.2f}, {one.high:.2f}]"
    return one.quantity, one.place, now + _share_of_peak(one, machine), ratio, verdict


def _share_of_peak(one: Any, machine: Any) -> str:
    """ ", 71% of the peak (published: up to 83%)" for products in bfloat16 on a GPU whose peak is known."""
    from labkit.scaling.hardware import published_share

    peak = machine.gpus[0].dense_bf16_peak_tflops if one.device == "cuda" and machine.gpus else None
    if peak is None or one.quantity != "matmul bfloat16" or not one.rate:
        return ""
    share = f", {100 * one.rate / peak / 1e12:.0f}% of the peak"
    published = published_share(machine.gpus[0].name)
    return share + (f" (published: up to {100 * published:.0f}%)" if published else "")
