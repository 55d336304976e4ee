"""How far a measurement is: points done, the time it has taken, and the time it is likely to take still."""

import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from labkit.lab.runs.store import Run, RunFileError
from labkit.lab.units import format_seconds


@dataclass(frozen=True)
class Progress:
    """Where a measurement stands: `done` of `total` points, and what is being measured now."""

    done: int
    total: int
    text: str
    elapsed_s: float = 0.0
    """Since this process began to measure."""
    left_s: float | None = None
    """Expected; None without an earlier run of the same points."""
    run: str | None = None
    """The name of the run that is written, by which it can be resumed; None: there is none yet."""

    def after(self, waited_s: float) -> "Progress":
        """The same point, `waited_s` later."""
        left_s = None if self.left_s is None else self.left_s - waited_s
        return replace(self, elapsed_s=self.elapsed_s + waited_s, left_s=left_s)

    def times(self) -> str:
        """ "1 min 40 s so far, about 20 s left"; "" before anything is measured."""
        if self.run is None:
            return ""
        left = "" if self.left_s is None else f", about {format_seconds(max(1, round(self.left_s)))} left"
        return f"{format_seconds(round(self.elapsed_s))} so far{left}"


ShowProgress = Callable[[Progress], None]


class Tally:
    """Counts the points of a measurement that end, and shows how far it is.

    A point is expected to take as long as in the run before; the rest, if that run has all of its points.
    """

    def __init__(self, show: ShowProgress, run: Path, pending: Collection[str], total: int):
        self._show, self._run, self._total = show, run.stem, total
        self._pending = list(pending)
        self._expected_s = _seconds_in_previous_run(run)
        self._start = time.monotonic()

    def end(self, point: str) -> None:
        """Count a point that was measured or skipped."""
        self._pending.remove(point)

    def tell(self, text: str) -> None:
        """Show what is being measured now."""
        expected = [self._expected_s[point] for point in self._pending if point in self._expected_s]
        left_s = sum(expected) if self._pending and len(expected) == len(self._pending) else None
        done, elapsed_s = self._total - len(self._pending), time.monotonic() - self._start
        self._show(Progress(done, self._total, text, elapsed_s, left_s, self._run))


def _seconds_in_previous_run(run: Path) -> dict[str, float]:
    """How long each point took in the newest other run next to this one; {} if that cannot be read."""
    others = sorted(path for path in run.parent.glob(f"*{run.suffix}") if path != run)
    try:
        table = Run.load(others[-1]).coverage()
    except (IndexError, RunFileError):
        return {}
    measured = table[table["status"] != "pending"]
    return dict(zip(measured["point"], measured["elapsed_s"], strict=True))


@contextmanager
def terminal_line(console: Console, name: str) -> Iterator[ShowProgress]:
    """A line on `console` that begins with `name`, and whose time goes on between two updates; nothing in a file."""
    last: tuple[Progress, float] | None = None

    def update(progress: Progress) -> None:
        nonlocal last
        last = progress, time.monotonic()

    def render() -> Text:
        if last is None:
            return Text(f"{name}: starting")
        now = last[0].after(time.monotonic() - last[1])
        parts = f"{name}: {now.done} of {now.total}", now.times(), now.text
        return Text("  ".join(filter(None, parts)), no_wrap=True, overflow="ellipsis")

    with Live(console=console, transient=True, get_renderable=render):
        yield update
