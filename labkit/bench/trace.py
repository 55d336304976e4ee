"""Operators or GPU kernels inside a call, from `torch.profiler`, as events to sum up.

If the profiler's trace has GPU kernels, they are the events; otherwise the operators on the host
are. An event's own time leaves out what ran inside it, so sums over events are the total.

Named ranges (`torch.profiler.record_function`) hold whatever starts while they are open, on any
thread: a backward pass runs in a thread of its own. A kernel belongs to the ranges open at its
launch.
"""

import json
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from labkit.bench.kernel_names import family_of, short_name

Trace = Mapping[str, Any]
Event = Mapping[str, Any]

RANGE = "user_annotation"
HOST = ("cpu_op", RANGE)
DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
LAUNCH = ("cuda_runtime", "cuda_driver")


@dataclass(frozen=True)
class TraceEvent:
    """One operator or kernel. Seconds; `start_s` counts from the first event of the trace."""

    name: str
    family: str
    ranges: tuple[str, ...]
    """The named ranges around it, the outermost first."""
    start_s: float
    duration_s: float
    self_s: float
    """`duration_s` without what ran inside."""

    def within(self, ranges: Collection[str]) -> str:
        """Return the innermost of `ranges` that it belongs to, or ""."""
        return next((name for name in reversed(self.ranges) if name in ranges), "")


@contextmanager
def profiled(activities: Sequence[ProfilerActivity], *, memory: bool = False) -> Iterator[profile]:
    """Run torch's profiler around the block, without its messages; `memory`: with allocations."""
    # Otherwise it reports start and end on stderr.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    profiler = profile(activities=activities, profile_memory=memory)
    with warnings.catch_warnings():
        # It warns that events of earlier cycles are lost, and there is one cycle.
        warnings.filterwarnings("ignore", ".*Profiler clears events")
        profiler.start()
    try:
        yield profiler
    finally:
        profiler.stop()


def profile_call(
    action: Callable[[], Any], *, device: str = "cpu", before: Callable[[], Any] | None = None
) -> list[TraceEvent]:
    """Run `action` once under the profiler and return its events (`read_events`). Warm up first.

    `before` (a barrier) runs once the profiler has started, which takes ranks unequally long.
    RuntimeError if a GPU was profiled and no kernel was recorded: operators of the host must not
    pass for kernels.
    """
    is_cuda = torch.device(device).type == "cuda"
    activities = [ProfilerActivity.CPU]
    if is_cuda:
        activities.append(ProfilerActivity.CUDA)
    with profiled(activities) as profiler:
        if before is not None:
            before()
        if is_cuda:  # earlier kernels have ended
            torch.cuda.synchronize()
        action()
        if is_cuda:
            torch.cuda.synchronize()
    with TemporaryDirectory() as directory:
        path = Path(directory, "trace.json")
        profiler.export_chrome_trace(str(path))
        trace = json.loads(path.read_bytes())
    if is_cuda and not _complete(trace, DEVICE):
        raise RuntimeError(
            "the profiler recorded no GPU kernel: another profiler runs, or only administrators may"
            " profile (NVreg_RestrictProfilingToAdminUsers)"
        )
    return read_events(trace)


def read_events(trace: Trace) -> list[TraceEvent]:
    """List the events of a Chrome trace by start.

    A GPU's kernels, copies and fills if there are any, else operators.
    """
    host = _complete(trace, HOST)
    device = _complete(trace, DEVICE)
    events = device or host
    launches: dict[Any, float] = {}
    for event in _complete(trace, LAUNCH):
        number = _correlation(event)
        if number is not None:
            launches[number] = event["ts"]
    # A kernel belongs to the ranges that are open at its launch; an operator has no launch.
    starts: list[Any] = [launches.get(_correlation(event), event["ts"]) for event in events]
    ranges = [event for event in host if event["cat"] == RANGE]
    result = []
    for event, start, own in zip(events, starts, _self_times(events), strict=True):
        # A range's own time is Python's, between its operators.
        is_range = event["cat"] == RANGE
        result.append(
            TraceEvent(
                name=short_name(event["name"]),
                family="dispatch" if is_range else family_of(event["name"]),
                ranges=tuple(one["name"] for one in ranges if one["ts"] <= start < _end(one)),
                start_s=(event["ts"] - events[0]["ts"]) / 1e6,
                duration_s=event["dur"] / 1e6,
                self_s=own / 1e6,
            )
        )
    return result


def _complete(trace: Trace, categories: Sequence[str]) -> list[Event]:
    """List the events with a duration in these categories by start, each before those inside."""
    events = [
        event
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in categories
    ]
    # The longer one first where two start together: it holds the other.
    return sorted(events, key=lambda event: (event["ts"], -event["dur"]))


def _correlation(event: Event) -> Any:
    """Return the number that a kernel shares with the call that launched it; None without one."""
    return event.get("args", {}).get("correlation")


def _end(event: Event) -> float:
    return float(event["ts"] + event["dur"])


def _self_times(events: list[Event]) -> list[float]:
    """Return each event's duration without the host's events directly inside it.

    `events` are in the order of `_complete`.
    """
    own = [float(event["dur"]) for event in events]
    # Per thread, the events that are open: those on one thread are nested.
    stacks: dict[Any, list[int]] = defaultdict(list)
    for i, event in enumerate(events):
        stack = stacks[event["tid"]]
        while stack and _end(events[stack[-1]]) <= event["ts"]:
            stack.pop()
        if stack and event["cat"] in HOST:
            own[stack[-1]] -= event["dur"]
        stack.append(i)
    # Times are rounded, so what is inside may add up to a little more.
    return [max(0.0, value) for value in own]
