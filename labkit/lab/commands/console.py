"""Output in a terminal: results or JSON (docs/for-scripts.md) on stdout, all else on stderr."""

import io
import json
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from labkit.lab.config import ParameterError

if TYPE_CHECKING:
    from labkit.lab.compare import Pair
    from labkit.lab.declaration import Lab
    from labkit.lab.pages.report import LabResult
    from labkit.lab.pages.report_time import ReportTime
    from labkit.lab.runs.progress import Progress
    from labkit.lab.runs.store import Run

# Options of several commands.
Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON document (docs/for-scripts.md).")
]
# Of the JSON documents: a script can refuse one that it does not know.
FORMAT = 1
# Text is printed as it is: names may have brackets and colons, and long lines are the terminal's to
# wrap.
AS_IT_IS: dict[str, Any] = {"highlight": False, "markup": False, "emoji": False, "soft_wrap": True}


class _Console(Console):
    """A console whose reader may leave early, as `head -1` does: the command ends quietly."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


out = _Console(**AS_IT_IS)
err = _Console(stderr=True, **AS_IT_IS)
# A table that is not printed in a terminal has one line per row, which `grep` finds.
PIPED_WIDTH = 10_000


def prepare_shell() -> None:
    """Replace output that a shell closed (`>&-`), and characters that it cannot show.

    ParameterError without a working directory.
    """
    # Python has no stream then, and the next file that is opened would get its number.
    for stream in ("stdout", "stderr"):
        if getattr(sys, stream) is None:
            setattr(sys, stream, Path(os.devnull).open("w"))  # noqa: SIM115
    # Names of files may hold bytes that are no UTF-8, and a terminal may know only ASCII.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    # In a folder that is gone, torch's libraries would end the process.
    try:
        Path.cwd()
    except FileNotFoundError:
        raise ParameterError("the working directory is gone: cd to another") from None


def print_table(rows: Iterable[Iterable[Any]], *names: str, console: Console = out) -> None:
    """Print rows under these names as an aligned table; without names the first column is bold."""
    if console.is_terminal:
        console.print(_table(rows, *names), soft_wrap=False)
        return
    for line in table_lines(rows, *names):
        console.print(line)


def table_lines(rows: Iterable[Iterable[Any]], *names: str) -> list[str]:
    """Lines of an aligned table, each row in one line, however wide."""
    # Plain text also in a terminal and in a notebook, for which rich would add colors or HTML.
    wide = Console(width=PIPED_WIDTH, force_terminal=False, force_jupyter=False, **AS_IT_IS)
    with wide.capture() as text:
        wide.print(_table(rows, *names), soft_wrap=False)
    return [line.rstrip() for line in text.get().splitlines()]


def _table(rows: Iterable[Iterable[Any]], *names: str) -> Table:
    table = Table(*names, box=None, show_header=bool(names), pad_edge=False)
    if not names:
        table.add_column(style="bold")
    for row in rows:
        table.add_row(*row)
    return table


@contextmanager
def progress(lab: str) -> "Iterator[Callable[[Progress], None]]":
    """Show a lab's progress in the terminal; after Ctrl-C, the commands that finish it."""
    from labkit.lab.runs.progress import terminal_line

    run: str | None = None

    def tell(now: "Progress") -> None:
        nonlocal run
        run = now.run or run
        show(now)

    try:
        with terminal_line(err, lab) as show:
            yield tell
    # Caught here: typer would end without a word.
    except KeyboardInterrupt:
        hint = ""
        if run is not None:
            hint = (
                f"; what was measured is kept: `labkit measure {lab} --resume {run}` goes on from"
                f" there, `labkit report {lab} --run {run}` makes the page"
            )
        err.print(f"interrupted{hint}")
        raise typer.Exit(130) from None


def calibrate_first(studies: "Sequence[Lab]", profile: str) -> None:
    """Measure this machine's limits if a lab needs a calibration and there is none of today."""
    from labkit.lab.calibration import LIMITS
    from labkit.lab.runs.measure import CALIBRATING, calibrate, needs_calibration

    # A report that begins with the limits calibrates by them.
    if studies[0].name != LIMITS and needs_calibration(studies, profile):
        err.print(CALIBRATING)
        with progress(LIMITS) as show:
            calibrate(on_progress=show, on_output=err.print)


def print_plan(times: "ReportTime", console: Console) -> None:
    """Say how long a report takes here, or how its time is divided among the labs."""
    from labkit.lab.units import format_seconds

    console.print(f"everything takes about {format_seconds(round(times.total_s))} on this machine")
    if times.is_limited:
        console.print("planned seconds of measuring, of those that everything takes:")
        shares = times.shares()
        for lab, seconds in times.expected.items():
            console.print(f"  {lab:18s} {min(shares[lab], seconds):.0f} of {seconds:.0f}")


def print_page(result: "LabResult", console: Console) -> None:
    """Say how a lab of a report ended, where its page is, and for what there was no time."""
    from labkit.lab.project import path_from_here
    from labkit.lab.units import format_seconds

    outcome = f"failed: {result.error}" if result.error else "ok"
    took = f"in {format_seconds(result.elapsed_s)}; {path_from_here(result.page)}"
    style = "bold red" if result.error else None
    console.print(f"{result.study.name}: {outcome}, {took}", style=style)
    if result.left_out:
        console.print(f"  left out {len(result.left_out)}: {'; '.join(result.left_out)}")


def print_load(run: Path | None = None) -> None:
    """Say why GPUs or shared memory are not used, and what else keeps the machine busy."""
    from labkit.machine.description import describe_machine
    from labkit.machine.load import busy_reason, load_before_measuring
    from labkit.parallel.transport.library import unavailable_reason

    machine = describe_machine()
    if machine.no_gpu_reason:
        err.print(f"GPUs are not used: {machine.no_gpu_reason}")
    reason = unavailable_reason()
    if reason:
        err.print(f"shared memory not available ({reason}): CPU ranks send point to point")
    busy = busy_reason(load_before_measuring(), machine.cores)
    if busy:
        err.print(f"Busy machine: {busy}; times may be too long.")


def require_device(device: object) -> None:
    """End the command with status 1 and one line if this machine lacks the requested device."""
    from labkit.machine.description import describe_machine

    # All points would be skipped for this reason, one by one.
    reason = describe_machine().no_device_reason(str(device))
    if reason:
        err.print(f"device={device}: {reason}")
        raise typer.Exit(1)


def require_loopback() -> None:
    """End the command with status 1 and one line if ranks and kernels could not talk to it."""
    from labkit.machine.loopback import no_loopback_reason

    # A kernel would only say that it did not respond, after 60 seconds.
    reason = no_loopback_reason()
    if reason:
        err.print(
            f"127.0.0.1 cannot be reached ({reason}), and ranks and kernels talk through it;"
            " `ip link set lo up` starts it"
        )
        raise typer.Exit(1)


def print_json(command: str, numbers: Iterable[dict[str, Any]] = (), **facts: Any) -> None:
    """Print the document of a command."""
    print(json.dumps(document(command, numbers, **facts)))


def document(command: str, numbers: Iterable[dict[str, Any]], **facts: Any) -> dict[str, Any]:
    """Return the document of a command: where and when it ran, its numbers, and further facts."""
    from labkit.machine.description import describe_machine

    machine = describe_machine()
    return {
        "format": FORMAT,
        "command": command,
        "labkit": str(machine.source),
        "machine": machine.label,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "numbers": list(numbers),
        **facts,
    }


def number(
    name: str,
    value: float | None,
    unit: str,
    *,
    low: float | None = None,
    high: float | None = None,
    validity: str = "ok",
    measured: datetime | None = None,
    **facts: Any,
) -> dict[str, Any]:
    """Return a number with its interval, unit, validity and age, null where unknown."""
    age_s = None
    now = datetime.now(UTC)
    # A clock that was set back dates runs in the future: their age is unknown.
    if measured is not None and measured <= now:
        age_s = round((now - measured).total_seconds())
    for key, fact in facts.items():
        if isinstance(fact, float):
            facts[key] = _finite(fact)
    ends = {"value": _finite(value), "low": _finite(low), "high": _finite(high)}
    return {"name": name, **ends, "unit": unit, "validity": validity, "age_s": age_s, **facts}


def _finite(value: float | None) -> float | None:
    """Return None for NaN and infinities, which JSON does not have."""
    return None if value is None or not math.isfinite(value) else float(value)


def run_validity(run: "Run") -> str:
    """Return "ok", or what disturbed the numbers of a run."""
    if not run.busy:
        return "ok"
    disturbed = f"busy during {len(run.busy)} of {len(run.header.planned)} points"
    return f"{disturbed}: {next(iter(run.busy.values()))}"


def answer_numbers(lab: "Lab", run: "Run") -> Iterator[dict[str, Any]]:
    """Yield the effect of each question of a run, that over all configurations, and all ratios."""
    from labkit.lab import wording
    from labkit.lab.answers import Compare
    from labkit.lab.facts import Comparison
    from labkit.lab.units import labels

    answers = lab.answers(run.results())
    for question in lab.questions:
        answer = answers[question.id]
        headline = wording.headline(answer)
        name = f"{lab.name}.{question.id}"
        facts: dict[str, Any] = {"unit": "ratio", "measured": run.header.started}
        facts |= {"lab": lab.name, "question": question.id}
        if answer.verdict == "not measured":
            yield number(name, None, validity=headline, **facts)
            continue
        facts["validity"] = run_validity(run)
        summary: dict[str, Any] = {"verdict": answer.verdict, "headline": headline}
        summary["notes"] = wording.notes(answer)
        # 1 is that of an answer without a ratio, and of no difference.
        effect = answer.effect if answer.effect != 1 else None
        yield number(name, effect, **facts, **summary)
        if isinstance(answer, Comparison) and answer.overall is not None:
            pooled = answer.overall
            over_all = f"{name}: over all {pooled.n} configurations"
            yield number(over_all, pooled.ratio, low=pooled.low, high=pooled.high, **facts)
        if not isinstance(question, Compare) or answer.table is None:
            continue
        names = labels(answer.table, question.metric.columns)
        ratios = answer.table[["ratio", "low", "high"]].to_numpy()
        for where, (ratio, low, high) in zip(names, ratios, strict=True):
            yield number(f"{name}: {where}", ratio, low=low, high=high, **facts)


def comparison_numbers(pairs: "Iterable[Pair]") -> Iterator[dict[str, Any]]:
    """Yield every ratio that two runs share: the later run's, with that of the first one."""
    for pair in pairs:
        for row in pair.ratios.to_dict("records"):
            facts: dict[str, Any] = {"run": pair.names[1], "first": row["ratio_first"]}
            facts |= {"first_low": row["low_first"], "first_high": row["high_first"]}
            changes = ("low", "high", "change", "change_low", "change_high")
            facts |= {name: row[name] for name in changes}
            facts |= {"validity": row["difference"], "measured": pair.runs[1].header.started}
            name = f"{pair.lab.name}.{row['question']}: {row['configuration']}, {pair.names[1]}"
            yield number(name, row["ratio"], "ratio", **facts)
