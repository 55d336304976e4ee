"""A clock: alternatives run in shuffled rounds, as many as their spread or the time asks for.

CPU time is `time.perf_counter`. CUDA time is a pair of events on the current stream of an idle
device. It includes whatever the stream waits for: kernels, and the host if it is slower. A host
takes 10 to 50 us to launch the first kernel; `calls` above 1 takes that out.

With several ranks, pass a barrier as `before`. Each rank times itself, and the slowest rank of each
repeat counts.

A pilot of a few rounds decides once how many follow (`plan_rounds`): by their spread alone, never
by their ratios, so that no result decides when to stop. A pilot that was narrow by chance would
make intervals too narrow: with it 3.9% of questions claim a difference that is none, instead of
2.5%. So it is discarded (two-stage sampling: Stein 1945).
"""

import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from labkit.bench.check import gather_numbers
from labkit.bench.intervals import FALSE_DISCOVERY_RATE, MIN_SAMPLES, rounds_to_show

Action = Callable[[], Any]
Device = str | torch.device
# Seconds by alternative and part, one per round.
Samples = dict[str, dict[str, list[float]]]
T = TypeVar("T")

# Rounds after which the number of all rounds is decided.
PILOT_ROUNDS = MIN_SAMPLES
# Fewest rounds after a pilot that is discarded.
MIN_ROUNDS = 8
# Share of the set-up's time that rounds may take in any case. The pilot's rounds after a minute of
# compiling would leave undecided what ten seconds more decide.
SET_UP_SHARE = 0.3


def time_interleaved(
    alternatives: Mapping[str, Action], *, warmup: int, repeats: int, **options: Any
) -> dict[str, list[float]]:
    """Return seconds per call of each alternative, one sample per round.

    Sample i of all alternatives is from the same round. An empty mapping takes no time. `options`
    are those of `time_parts_interleaved`.
    """
    parts = {name: {"": action} for name, action in alternatives.items()}
    samples = time_parts_interleaved(parts, warmup=warmup, repeats=repeats, **options)
    return {name: by_part[""] for name, by_part in samples.items()}


def time_parts_interleaved(
    alternatives: Mapping[str, Mapping[str, Action]],
    *,
    warmup: int,
    repeats: int,
    device: Device = "cpu",
    calls: int = 1,
    prepare: Callable[[str], Any] | None = None,
    before: Action | None = None,
    seed: int | str = 0,
    gain: float = 0.0,
    rounds_s: float = math.inf,
) -> Samples:
    """Time alternatives in successive parts, such as forward and backward.

    Returns seconds by alternative and part. A round gives each alternative one turn, in a new order
    (`turn_order`); a turn runs all its parts. Turns expose every alternative to the same drift of
    the machine, so ratios hold even if absolute times do not.

    `warmup` rounds are thrown away, and at most `repeats` are kept. With `gain` (0.1: 10%; 0: all
    `repeats`), as many are timed as show a gain of that size with a power of 80%. Rounds end after
    about `rounds_s` seconds, or 0.3 of the set-up's time if that is longer. With either limit this
    is a collective: all ranks must call it.
    `prepare` makes inputs before a turn, and `before` (a barrier) precedes each part; both are
    untimed. A sample is the mean of `calls` in a row. With several on CUDA, an untimed call goes
    first, during which the host queues the others. `seed` must be equal on all ranks. ValueError
    for impossible counts.
    """
    if warmup < 0 or repeats < 1 or calls < 1:
        raise ValueError(
            f"expected warmup >= 0, repeats >= 1 and calls >= 1, got {warmup}, {repeats} and"
            f" {calls}"
        )
    rounds = _Rounds(alternatives, -warmup, seed, prepare, before, calls, _is_cuda(device))
    rounds.run(warmup)
    is_limited = gain > 0 or rounds_s < math.inf
    if alternatives and is_limited and repeats > PILOT_ROUNDS:
        samples = _run_planned(rounds, repeats, gain, rounds_s)
    else:
        samples = rounds.run(repeats)
    # The next rounds of this point have a set-up of their own.
    set_up.start()
    return samples


def _run_planned(rounds: "_Rounds", most: int, gain: float, rounds_s: float) -> Samples:
    """Run a pilot and the rounds that it asks for; return those that count."""
    set_up_s = set_up.seconds()
    start = time.perf_counter()
    pilot = rounds.run(PILOT_ROUNDS)
    pilot_s = time.perf_counter() - start
    plan = plan_rounds(pilot, pilot_s, set_up_s, gain=gain, rounds_s=rounds_s, most=most)
    samples = rounds.run(plan.rounds)
    if not plan.keeps_pilot:
        return samples
    return {
        name: {part: seconds + samples[name][part] for part, seconds in parts.items()}
        for name, parts in pilot.items()
    }


@dataclass
class _Rounds:
    """Rounds of alternatives in parts; each gives every alternative one turn."""

    alternatives: Mapping[str, Mapping[str, Action]]
    number: int
    """Of the next round; it decides the order of the turns."""
    seed: int | str
    prepare: Callable[[str], Any] | None
    before: Action | None
    calls: int
    is_cuda: bool

    def run(self, n: int) -> Samples:
        """Run the next `n` rounds."""
        samples: Samples = {
            name: {part: [] for part in parts} for name, parts in self.alternatives.items()
        }
        for _ in range(n):
            for name in turn_order(self.alternatives, self.number, seed=self.seed):
                self._take_turn(name, samples[name])
            self.number += 1
        return samples

    def _take_turn(self, name: str, samples: dict[str, list[float]]) -> None:
        if self.prepare is not None:
            self.prepare(name)
        for part, action in self.alternatives[name].items():
            if self.before is not None:
                self.before()
            samples[part].append(_time_calls(action, self.calls, self.is_cuda))


def turn_order(names: Iterable[str], round_number: int, *, seed: int | str = 0) -> list[str]:
    """Shuffle the turns of a round; every order is equally likely.

    The order depends on the names, the number and the seed: neither on the rank nor on the order of
    `names`.
    """
    # Caches hold what ran before: in a fixed order identical functions differ by a factor of two.
    # Sorted first, so that all ranks shuffle the same list.
    turns = sorted(names)
    random.Random(f"{seed} {round_number}").shuffle(turns)
    return turns


class SetUp:
    """Time since the point began, or since its last rounds ended: models, checks, warm-up."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self._start = time.perf_counter()

    def seconds(self) -> float:
        return time.perf_counter() - self._start


# Of this process, which measures one point at a time.
set_up = SetUp()


class RoundsPlan(NamedTuple):
    """Rounds that follow a pilot, and whether it counts with them."""

    rounds: int
    keeps_pilot: bool


def plan_rounds(
    pilot: Samples,
    pilot_s: float,
    set_up_s: float,
    *,
    gain: float,
    rounds_s: float,
    most: int,
) -> RoundsPlan:
    """Decide by a pilot how many rounds follow. A collective: all ranks decide alike.

    Args:
        pilot: the samples of `PILOT_ROUNDS`.
        pilot_s, set_up_s: seconds of the pilot, and of the set-up before it, on this rank.
        gain: a gain that the rounds must show; 0: `most` rounds.
        rounds_s: seconds that all rounds may take.
        most: largest number of rounds that count.
    """
    # One row per alternative and part.
    table = np.array([samples for parts in pilot.values() for samples in parts.values()])
    numbers = gather_numbers([pilot_s, set_up_s, *table.ravel()])
    # The slowest rank counts, and all ranks must run equally many rounds: one more would hang.
    slowest_pilot_s, slowest_set_up_s, *slowest = np.max(numbers, axis=0)
    budget_s = max(rounds_s, SET_UP_SHARE * slowest_set_up_s)
    in_time = most
    if budget_s < math.inf:
        # The pilot has taken its part of the budget, and further rounds take as long as its own.
        left_s = budget_s - slowest_pilot_s
        in_time = max(0, int(left_s / slowest_pilot_s * PILOT_ROUNDS))
    # Logarithms: a gain is a ratio. Work that takes no time has none.
    if gain > 0 and min(slowest) > 0:
        needed = _needed_rounds(pilot, np.log(slowest).reshape(table.shape), gain)
        needed = min(max(needed, MIN_ROUNDS), most)
        if needed <= in_time:
            # A pilot that decides how many rounds follow and counts with them claims too much.
            return RoundsPlan(needed, keeps_pilot=False)
    # The time decides, or nothing: then the pilot is as good as any other rounds.
    return RoundsPlan(min(in_time, most - PILOT_ROUNDS), keeps_pilot=True)


def _needed_rounds(pilot: Samples, logs: np.ndarray, gain: float) -> int:
    """Return the rounds that show `gain` in each part, of which some are noisier than others.

    Each of n alternatives is compared with one of them, so a question makes n - 1 comparisons at
    once. `logs` are the slowest rank's, one row per alternative and part.
    """
    by_part: dict[str, list[np.ndarray]] = defaultdict(list)
    names = [part for parts in pilot.values() for part in parts]
    for name, row in zip(names, logs, strict=True):
        by_part[name].append(row)
    needed = 0.0
    for rows in by_part.values():
        differences = [one - other for one, other in combinations(rows, 2)] or rows
        # Six rounds of one pair say little about its spread; all pairs together say more.
        spread = math.sqrt(float(np.mean(np.var(differences, axis=1, ddof=1))))
        n_compared = max(1, len(rows) - 1)
        level = FALSE_DISCOVERY_RATE / n_compared
        freedom = n_compared * (PILOT_ROUNDS - 1)
        # The noisiest part decides: the question may be about it.
        needed = max(needed, rounds_to_show(gain, spread, level, freedom))
    return math.ceil(needed)


def time_once(action: Callable[[], T], device: Device) -> tuple[T, float]:
    """Return the result of a single call, and the seconds until the device has finished it."""
    start = time.perf_counter()
    result = action()
    if _is_cuda(device):
        torch.cuda.synchronize()
    return result, time.perf_counter() - start


class Stopwatch:
    """Times a part inside a timed action, on the device's clock: `with watch.lap(): ...`."""

    def __init__(self, device: Device = "cpu"):
        self._is_cuda = _is_cuda(device)
        self._laps: list[tuple[Any, Any]] = []

    @contextmanager
    def lap(self) -> Iterator[None]:
        """Time the block."""
        start = _read(_make_event(self._is_cuda))
        yield
        self._laps.append((start, _read(_make_event(self._is_cuda))))

    @property
    def seconds(self) -> list[float]:
        """All laps so far, in order. Waits for a CUDA device."""
        return [_seconds_between(*lap) for lap in self._laps]


def _time_calls(action: Action, calls: int, is_cuda: bool) -> float:
    """Return the mean seconds of `calls` successive calls."""
    first = _make_event(is_cuda)
    last = _make_event(is_cuda)
    if is_cuda:
        # While the device runs one call that does not count, the host queues the others.
        torch.cuda.synchronize()
        if calls > 1:
            action()
    start = _read(first)
    for _ in range(calls):
        action()
    return _seconds_between(start, _read(last)) / calls


def _is_cuda(device: Device) -> bool:
    return torch.device(device).type == "cuda"


def _make_event(is_cuda: bool) -> Any:
    return torch.cuda.Event(enable_timing=True) if is_cuda else None


def _read(event: Any) -> Any:
    """Return the time on a CPU, or an event that CUDA's current stream now records."""
    if event is None:
        return time.perf_counter()
    event.record()
    return event


def _seconds_between(start: Any, end: Any) -> float:
    if isinstance(end, torch.cuda.Event):
        end.synchronize()
        return start.elapsed_time(end) / 1000
    return float(end - start)
