"""How long something takes: warm-up apart, alternatives interleaved in a shuffled order, the device's own clock.

CPU time is `time.perf_counter`. CUDA time is a pair of events on the current stream of a device that has nothing else
to do. Between the two lies whatever the stream waits for: the kernels, and the host wherever it is slower than the
device. The host takes 10 to 50 us to launch the first kernel of a call, which is most of the time of a short one.
`calls` above 1 takes that out: see `time_interleaved`.

A caller on several ranks passes a barrier as `before`; each rank then times itself, and the reader of the samples
takes the slowest rank of each repeat.
"""

import math
import os
import random
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from labkit.bench.stopping import Stopping

Action = Callable[[], Any]
Prepare = Callable[[str], Any]
Seed = int | str
T = TypeVar("T")


def time_interleaved(
    alternatives: Mapping[str, Action],
    *,
    warmup: int,
    repeats: int,
    device: str = "cpu",
    prepare: Prepare | None = None,
    before: Action | None = None,
    calls: int = 1,
    seed: Seed = 0,
    ratio_within: float = 0.0,
    rounds_s: float = math.inf,
) -> dict[str, list[float]]:
    """Seconds of a call of each alternative, which take turns in an order that is shuffled anew every round.

    Taking turns lets every alternative see the same drift of the machine, so that the ratio of two of them holds even
    where their absolute times do not. Shuffling lets every alternative run equally often after every other: what ran
    before decides what is in the caches, and in a fixed order, rotated or not, identical functions get times that
    differ by a factor of two.

    Args:
        alternatives: what to time, by name; the same names on all ranks. An empty mapping takes no time.
        warmup: rounds that are thrown away.
        repeats: rounds that are kept, at most.
        device: "cpu", or a CUDA device, whose current stream is timed.
        prepare: called with the name of the alternative whose turn comes, outside the timed region (fresh inputs).
        before: called after `prepare`, right ahead of what is timed (a barrier).
        calls: a sample is the mean of so many calls in a row. On CUDA one more call goes ahead of them, which is not
            timed: while the device is busy with it, the host launches the next ones, so that a sample is what the
            device takes, or the time of a launch if that is longer.
        seed: of the order: `turn_order`. A point's `id` is the same on all ranks, and another for every point.
        ratio_within: rounds end when the ratio of any two alternatives is known to this share; 0: they do not.
        rounds_s: they end after so many seconds, too (`stopping.py`). With either, all ranks of the job call.

    Returns:
        As many samples by name as rounds were kept, in the order of the mapping; sample i of all is of one round.

    Raises:
        ValueError: counts that cannot be.
    """
    wholes = {name: {name: action} for name, action in alternatives.items()}
    samples = time_parts_interleaved(
        wholes,
        warmup=warmup,
        repeats=repeats,
        device=device,
        prepare=prepare,
        before=before,
        calls=calls,
        seed=seed,
        ratio_within=ratio_within,
        rounds_s=rounds_s,
    )
    return {name: parts[name] for name, parts in samples.items()}


def time_parts_interleaved(
    alternatives: Mapping[str, Mapping[str, Action]],
    *,
    warmup: int,
    repeats: int,
    device: str = "cpu",
    prepare: Prepare | None = None,
    before: Action | None = None,
    calls: int = 1,
    seed: Seed = 0,
    ratio_within: float = 0.0,
    rounds_s: float = math.inf,
) -> dict[str, dict[str, list[float]]]:
    """`time_interleaved` for alternatives in parts that follow one another: forward, then backward.

    The turn of an alternative is all its parts in the order of its mapping; only alternatives are shuffled. `prepare`
    runs once a turn, `before` ahead of every part. With `calls`, a part is called as often before the next one comes.
    Returns samples by alternative and part.
    """
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
    """The names in the order of their turns in a round: every order is equally likely, in every round anew.

    The same wherever names, number and seed are the same, on all ranks and in a run that is taken up again, in
    whatever order the names are given. For callers that cannot leave the rounds to `time_interleaved`.
    """
    turns = sorted(names)
    random.Random(f"{seed} {round_number}").shuffle(turns)
    return turns


def timed_once(action: Callable[[], T], device: str) -> tuple[T, float]:
    """What a single call returns, and its seconds until the device is done; no warm-up, no repeat."""
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
    """Return on all ranks of a host at one moment: a barrier whose end does not depend on who leaves it first.

    Ranks leave an ordinary barrier one after the other, tens of microseconds apart: as long as a short collective
    takes. Here they agree on a moment of the clock that processes of one host share, `margin_s` ahead, and wait for it
    (window synchronization: Hunold & Carpen-Amarie 2016, "Reproducible MPI benchmarking is still not as easy as you
    think").
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
    """Laps inside of timed actions, on the device's clock: `start()` and `stop()` around what is to be told apart.

    On CUDA both are marks in the current stream and cost no waiting; read `seconds` when all is done.
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
        """Of every lap so far, in their order."""
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
