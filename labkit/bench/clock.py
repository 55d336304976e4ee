"""A clock: alternatives run in shuffled rounds until their ratios are precise enough.

CPU time is `time.perf_counter`. CUDA time is a pair of events on the current stream of an idle
device. It includes whatever the stream waits for: kernels, and the host if it is slower. A host
takes 10 to 50 us to launch the first kernel; `calls` above 1 takes that out.

With several ranks, pass a barrier as `before`. Each rank times itself, and the slowest rank of each
repeat counts.

Only the width of intervals or the time ends the rounds, never the result. Stopping at a fixed width
makes intervals slightly too narrow (Chow & Robbins 1965, "On the asymptotic theory of fixed-width
sequential confidence intervals for the mean"). `MIN_ROUNDS`, and checks ever further apart, keep
that effect small.
"""

import math
import random
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from typing import Any, TypeVar

import numpy as np
import torch

from labkit.bench.check import gather_numbers
from labkit.bench.intervals import MIN_SAMPLES, estimate_paired

Action = Callable[[], Any]
Device = str | torch.device
Samples = dict[str, dict[str, list[float]]]
"""Seconds by alternative and part, one per round."""
T = TypeVar("T")

MIN_ROUNDS = 8
"""Rounds before which no interval counts as narrow."""
GROWTH = 1.25
"""Rounds at one check over those at the check before.

Frequent checks would stop at chance agreement.
"""


def time_interleaved(
    alternatives: Mapping[str, Action], *, warmup: int, repeats: int, **options: Any
) -> dict[str, list[float]]:
    """Return seconds per call of each alternative, one sample per round.

    `options` as in `time_parts_interleaved`.

    Sample i of all alternatives is from the same round. An empty mapping takes no time.
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
    ratio_within: float = 0.0,
    rounds_s: float = math.inf,
) -> Samples:
    """Time alternatives in successive parts, such as forward and backward.

    Returns seconds by alternative and part.

    A round gives each alternative one turn, in a new order (`turn_order`); a turn runs all its
    parts. Turns expose every alternative to the same drift of the machine, so ratios hold even if
    absolute times do not. Caches hold what ran before: in a fixed order identical functions differ
    by a factor of two.

    `warmup` rounds are thrown away, and at most `repeats` are kept. They end sooner once the ratio
    of any two alternatives is known to within `ratio_within` (0.05: 5%; 0: never), or at the first
    check after `rounds_s` seconds. With either limit this is a collective: all ranks must call it.
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
    is_cuda = _is_cuda(device)
    samples: Samples = {name: {part: [] for part in parts} for name, parts in alternatives.items()}
    stopping = None
    for repeat in range(-warmup, repeats):
        if repeat == 0:
            stopping = Stopping(ratio_within, rounds_s)
        for name in turn_order(alternatives, repeat, seed=seed):
            if prepare is not None:
                prepare(name)
            for part, action in alternatives[name].items():
                if before is not None:
                    before()
                seconds = _time_calls(action, calls, is_cuda)
                if repeat >= 0:
                    samples[name][part].append(seconds)
        if stopping is not None and repeat + 1 < repeats and stopping.is_enough(samples):
            break
    return samples


def turn_order(names: Iterable[str], round_number: int, *, seed: int | str = 0) -> list[str]:
    """Shuffle the turns of a round; every order is equally likely.

    The order depends on the names, the number and the seed: neither on the rank nor on the order of
    `names`.
    """
    turns = sorted(names)
    random.Random(f"{seed} {round_number}").shuffle(turns)
    return turns


class Stopping:
    """Decides after each round whether it was the last. Starts with the first kept round."""

    def __init__(self, ratio_within: float, rounds_s: float) -> None:
        self._half_width = math.log1p(ratio_within)
        self._rounds_s = rounds_s
        self._start = time.perf_counter()
        self._next_check = MIN_SAMPLES if ratio_within or rounds_s < math.inf else math.inf

    def is_enough(self, samples: Samples) -> bool:
        """Return whether each part's ratios are precise, or the time is up.

        A collective: all ranks decide alike.
        """
        columns = [seconds for parts in samples.values() for seconds in parts.values()]
        if not columns or (rounds := len(columns[0])) < self._next_check:
            return False
        table = np.array(columns)
        self._next_check = math.ceil(rounds * GROWTH)
        elapsed_s, *slowest = np.max(
            gather_numbers([time.perf_counter() - self._start, *table.ravel()]), axis=0
        )
        if elapsed_s >= self._rounds_s:
            return True
        if rounds < MIN_ROUNDS or min(slowest) <= 0:
            return False
        by_part: dict[str, list[np.ndarray]] = defaultdict(list)
        names = [part for parts in samples.values() for part in parts]
        for name, logs in zip(names, np.log(slowest).reshape(table.shape), strict=True):
            by_part[name].append(logs)
        return all(
            _widest_ratio(alternatives) <= self._half_width for alternatives in by_part.values()
        )


def _widest_ratio(logs: list[np.ndarray]) -> float:
    """Return half the width of the widest interval of a ratio of two alternatives.

    In log units; of a lone alternative, its time's.
    """
    differences = [one - other for one, other in combinations(logs, 2)] or logs
    return max((estimate.high - estimate.low) / 2 for estimate in map(estimate_paired, differences))


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
    first = _make_event(is_cuda)
    last = _make_event(is_cuda)
    if is_cuda:
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
    """The time on a CPU, or an event that CUDA's current stream now records."""
    if event is None:
        return time.perf_counter()
    event.record()
    return event


def _seconds_between(start: Any, end: Any) -> float:
    if isinstance(end, torch.cuda.Event):
        end.synchronize()
        return start.elapsed_time(end) / 1000
    return float(end - start)
