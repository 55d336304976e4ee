"""How long something takes: warm-up apart, alternatives interleaved, the device's own clock.

CPU time is `time.perf_counter`; CUDA time is a pair of events on the current stream, which measures the
device and not the queueing of work to it. A caller on several ranks passes a barrier as `before`; each rank
then times itself, and whoever reads the samples takes the slowest rank of each repeat.
"""

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

Action = Callable[[], Any]


def time_interleaved(
    alternatives: Mapping[str, Action],
    *,
    warmup: int,
    repeats: int,
    device: str = "cpu",
    before: Action | None = None,
) -> dict[str, list[float]]:
    """Seconds of each call, alternatives taking turns (A B A B ...), in the order of the mapping.

    Taking turns lets every alternative see the same drift of the machine, so that the ratio of two of them
    holds even where their absolute times do not. `before` runs ahead of every call, outside the timed region
    (fresh inputs, a barrier). Returns `repeats` samples a name; the `warmup` rounds are thrown away.
    """
    if not alternatives:
        raise ValueError("expected at least one alternative to time")
    if warmup < 0 or repeats < 1:
        raise ValueError(f"expected warmup >= 0 and repeats >= 1, got {warmup} and {repeats}")
    time_once = _time_cuda if torch.device(device).type == "cuda" else _time_cpu
    samples: dict[str, list[float]] = {name: [] for name in alternatives}
    for repeat in range(-warmup, repeats):
        for name, action in alternatives.items():
            if before is not None:
                before()
            seconds = time_once(action)
            if repeat >= 0:
                samples[name].append(seconds)
    return samples


def _time_cpu(action: Action) -> float:
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def _time_cuda(action: Action) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    action()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1000


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
