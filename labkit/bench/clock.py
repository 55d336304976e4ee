"""A clock: warm-up apart, alternatives interleaved in a shuffled order, the device's own time.

CPU time is `time.perf_counter`. CUDA time is a pair of events on the current stream of an idle device: whatever the
stream waits for, kernels, and the host wherever it is slower. The host takes 10 to 50 us to launch the first kernel of
a call, which is most of the time of a short one; `calls` above 1 takes that out.

A caller on several ranks passes a barrier as `before`; each rank times itself, and the slowest rank of each repeat
counts.
"""

import math
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypedDict, TypeVar, Unpack

import torch
import torch.distributed as dist

from labkit.bench.stopping import Stopping

Action = Callable[[], Any]
Seed = int | str
T = TypeVar("T")


class Options(TypedDict, total=False):
    """Options of `time_interleaved` and `time_parts_interleaved`."""

    device: str
    """ "cpu" (the default), or a CUDA device, whose current stream is timed."""
    prepare: Callable[[str], Any] | None
    """Called with the name of the alternative whose turn comes, outside the timed region: fresh inputs."""
    before: Action | None
    """Called after `prepare`, right before the timed region: a barrier."""
    calls: int
    """A sample is the mean of so many calls in a row. On CUDA one more call goes first and is not timed: while the
    device is busy with it, the host launches the next ones, so that a sample is the device's time."""
    seed: Seed
    """Of the order (`turn_order`). A point's `id` is the same on all ranks, and differs between points."""
    ratio_within: float
    """Rounds end when the ratio of any two alternatives is known to this share (`stopping.py`); 0: they do not."""
    rounds_s: float
    """Rounds end after so many seconds, too. With either, all ranks of the job call."""


def time_interleaved(
    alternatives: Mapping[str, Action], *, warmup: int, repeats: int, **options: Unpack[Options]
) -> dict[str, list[float]]:
    """Seconds per call of each alternative, which take turns in an order that is shuffled anew every round.

    Taking turns lets every alternative see the same drift of the machine, so that ratios hold even where absolute times
    do not. Shuffling lets every alternative run equally often after every other: what ran before decides what is in the
    caches, and in a fixed order, rotated or not, identical functions get times that differ by a factor of two.

    `warmup` rounds are thrown away and at most `repeats` are kept. The names are the same on all ranks; an empty
    mapping takes no time. Returns as many samples by name as rounds were kept; sample i of all is of one round.
    ValueError for impossible counts.
    """
    wholes = {name: {"": action} for name, action in alternatives.items()}
    samples = time_parts_interleaved(wholes, warmup=warmup, repeats=repeats, **options)
    return {name: parts[""] for name, parts in samples.items()}


def time_parts_interleaved(
    alternatives: Mapping[str, Mapping[str, Action]], *, warmup: int, repeats: int, **options: Unpack[Options]
) -> dict[str, dict[str, list[float]]]:
    """`time_interleaved` for alternatives in successive parts: forward, then backward. Samples by alternative and part.

    A turn is all parts in the order of the mapping; only alternatives are shuffled. `prepare` runs once per turn,
    `before` ahead of every part. With `calls`, a part is called as often before the next one comes.
    """
    device, calls, seed = options.get("device", "cpu"), options.get("calls", 1), options.get("seed", 0)
    prepare, before = options.get("prepare"), options.get("before")
    ratio_within, rounds_s = options.get("ratio_within", 0.0), options.get("rounds_s", math.inf)
    if warmup < 0 or repeats < 1 or calls < 1:
        raise ValueError(f"expected warmup >= 0, repeats >= 1 and calls >= 1, got {warmup}, {repeats} and {calls}")
    if not (ratio_within >= 0 and rounds_s > 0):
        raise ValueError(f"expected ratio_within >= 0 and rounds_s > 0, got {ratio_within} and {rounds_s}")
    time_calls = _time_cuda if torch.device(device).type == "cuda" else _time_cpu
    samples: dict[str, dict[str, list[float]]] = {
        name: {part: [] for part in parts} for name, parts in alternatives.items()
    }
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
                seconds = time_calls(action, calls)
                if repeat >= 0:
                    samples[name][part].append(seconds)
        if stopping is not None and repeat + 1 < repeats and stopping.is_enough(samples, device):
            break
    return samples


def turn_order(names: Iterable[str], round_number: int, *, seed: Seed = 0) -> list[str]:
    """Order the turns of a round: every order is equally likely, in every round anew.

    It depends on names, number and seed alone: not on the rank, nor the order of the names.
    """
    turns = sorted(names)
    random.Random(f"{seed} {round_number}").shuffle(turns)
    return turns


def timed_once(action: Callable[[], T], device: str) -> tuple[T, float]:
    """Return the result of a single call, and its seconds until the device is done."""
    start = time.perf_counter()
    result = action()
    if device == "cuda":
        torch.cuda.synchronize()
    return result, time.perf_counter() - start


def _time_cpu(action: Action, calls: int) -> float:
    start = time.perf_counter()
    for _ in range(calls):
        action()
    return (time.perf_counter() - start) / calls


def _time_cuda(action: Action, calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    if calls > 1:
        action()
    start.record()
    for _ in range(calls):
        action()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000 / calls


def start_together(margin_s: float = 0.0005) -> None:
    """Return on all ranks of a host at one moment.

    Ranks leave an ordinary barrier tens of microseconds apart: as long as a short collective takes. Here they agree on
    a moment of the clock that processes of one host share, `margin_s` ahead, and wait for it (window synchronization:
    Hunold & Carpen-Amarie 2016, "Reproducible MPI benchmarking is still not as easy as you think").
    """
    moment = torch.tensor(time.perf_counter() + margin_s, dtype=torch.float64)
    dist.all_reduce(moment, op=dist.ReduceOp.MAX)
    at = float(moment)
    # Ranks beyond the cores must sleep, so that those that still are on their way get there.
    if dist.get_world_size() > (os.cpu_count() or 1):
        time.sleep(max(0.0, at - time.perf_counter()))
    while time.perf_counter() < at:
        pass


class Stopwatch:
    """Laps inside timed actions, on the device's clock: `start()` and `stop()` around a part.

    On CUDA both are marks in the current stream and do not wait; read `seconds` when all is done.
    """

    def __init__(self, device: str = "cpu"):
        self._is_cuda = torch.device(device).type == "cuda"
        self._laps: list[tuple[Any, Any]] = []
        self._started: Any = None

    def start(self) -> None:
        self._started = self._mark()

    def stop(self) -> None:
        """ValueError without a start."""
        if self._started is None:
            raise ValueError("start the stopwatch first")
        self._laps.append((self._started, self._mark()))
        self._started = None

    @property
    def seconds(self) -> list[float]:
        """Every lap so far, in order."""
        if not self._is_cuda:
            return [end - start for start, end in self._laps]
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1000 for start, end in self._laps]

    def _mark(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
