"""What a command says in a terminal: results on stdout; how far it is, and what else there is to tell, on stderr."""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

if TYPE_CHECKING:
    from labkit.lab.declaration import Lab
    from labkit.lab.runs.progress import Progress

out = Console(highlight=False)
err = Console(stderr=True, highlight=False)


@contextmanager
def progress(command: str, lab: str) -> "Iterator[Callable[[Progress], None]]":
    """A line in the terminal that says how far a lab is, and after Ctrl-C the command that goes on from there."""
    from labkit.lab.runs.progress import terminal_line

    run: str | None = None

    def tell(now: "Progress") -> None:
        nonlocal run
        run = now.run or run
        show(now)

    try:
        with terminal_line(err, lab) as show:
            yield tell
    except KeyboardInterrupt:  # here: typer would end without a word
        way_on = f"; what was measured is kept: `labkit {command} {lab} --resume {run}` goes on from there"
        err.print(f"interrupted{way_on if run else ''}", soft_wrap=True)
        raise typer.Exit(130) from None


def print_output(line: str) -> None:
    """What the ranks print, above the progress line."""
    err.print(plain(line), soft_wrap=True)


def calibrate_first(studies: "Sequence[Lab]", profile: str) -> None:
    """Measure this machine's limits if one of these labs predicts, and there are none of this source and day."""
    from labkit.lab.calibration import LIMITS
    from labkit.lab.runs.calibrate import CALIBRATING, calibrate, needs_calibration

    if studies[0].name != LIMITS and needs_calibration(studies, profile):
        err.print(CALIBRATING)
        with progress("measure", LIMITS) as show:
            calibrate(on_progress=show, on_output=print_output)


def tell_of_load(run: Path | None = None) -> None:
    """Say why GPUs or shared memory are not used, and what else keeps the machine busy; the page says so, too."""
    from labkit.machine import describe_machine
    from labkit.machine.load import busy_reason, load_before_measuring
    from labkit.parallel.transport.build import unavailable_reason

    machine = describe_machine()
    if machine.no_gpu_reason:
        err.print(plain(f"GPUs are not used: {machine.no_gpu_reason}"), soft_wrap=True)
    if reason := unavailable_reason():
        err.print(plain(f"shared memory not available ({reason}): CPU ranks send point to point"), soft_wrap=True)
    if reason := busy_reason(load_before_measuring(), machine.cores):
        err.print(plain(f"Busy machine: {reason}; times may be too long."), soft_wrap=True)


def require_device(device: object) -> None:
    """End the command with status 1 and one line, if this machine cannot use the device that was asked for."""
    from labkit.machine import describe_machine

    if reason := describe_machine().no_device_reason(str(device)):
        err.print(plain(f"device={device}: {reason}"), soft_wrap=True)
        raise typer.Exit(1)


def print_json(command: str, numbers: Iterable[dict[str, Any]] = (), **facts: Any) -> None:
    """The document of a command on standard output, which has nothing else then (`labkit.lab.json_output`)."""
    from labkit.lab.json_output import document

    print(json.dumps(document(command, numbers, **facts)))


def plain(value: object) -> str:
    """Text that rich shows as it is: brackets are not markup."""
    return str(value).replace("[", r"\[")
