"""How far a measurement is: points done, the time it has taken, and the time it is likely to take still."""

import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

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
    """Expected; None: nothing says how long."""
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
        so_far = f"{format_seconds(round(self.elapsed_s))} so far"
        if self.left_s is None:
            return so_far
        return f"{so_far}, about {format_seconds(max(1, round(self.left_s)))} left"


FEWEST_ENDED = 3  # points from whose time that of others is expected: the first one contains the start of the ranks
ShowProgress = Callable[[Progress], None]


class Tally:
    """Counts the points of a measurement that end, and says how far it is.

    A point is expected to take what it took in the run before, and one that was not in it what the others take.
    """

    def __init__(self, show: ShowProgress, run: Path, pending: Collection[str], total: int):
        self._show = show
        self._run = run
        self._pending = list(pending)
        self._total = total
        self._known_s = _seconds_in_the_run_before(run)
        self._start = time.monotonic()
        self._ended: list[str] = []

    def skipped(self, point: str) -> None:
        self._pending.remove(point)

    def ended(self, point: str) -> None:
        self._pending.remove(point)
        self._ended.append(point)

    def tell(self, text: str) -> None:
        """Say what is being measured now."""
        elapsed_s = time.monotonic() - self._start
        done = self._total - len(self._pending)
        self._show(Progress(done, self._total, text, elapsed_s, self._left_s(elapsed_s), self._run.stem))

    def _left_s(self, elapsed_s: float) -> float | None:
        known = [self._known_s[point] for point in self._pending if point in self._known_s]
        others = len(self._pending) - len(known)
        if not self._pending or (others and len(self._ended) < FEWEST_ENDED):
            return None
        # what started the ranks belongs to the points that ran on them
        return sum(known) + (others * elapsed_s / len(self._ended) if others else 0.0)


def _seconds_in_the_run_before(run: Path) -> dict[str, float]:
    """How long each measured point took in the newest other run beside this one; {} if that cannot be read."""
    for path in sorted(run.parent.glob(f"*{run.suffix}"), reverse=True):
        if path == run:
            continue
        try:
            table = Run.load(path).coverage()
        except (RunFileError, OSError):
            return {}
        measured = table[table["status"] == "ok"]
        return dict(zip(measured["point"], measured["elapsed_s"], strict=True))
    return {}
