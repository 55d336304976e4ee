"""What ran inside a call: its operators or GPU kernels, from `torch.profiler`, as rows to sum up.

The source is the Chrome trace that the profiler writes, a documented format that Perfetto opens. Where a trace has GPU
kernels, they are the events; otherwise the operators on the host are. An event counts with its time less that of what
ran inside it, so that sums over events are the total.

Named ranges (`torch.profiler.record_function`) hold whatever starts while they are open, on any thread: on a GPU the
backward pass runs in another thread while `backward()` waits. A kernel belongs to the ranges open at its launch.
"""

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from labkit.bench.clock import time_interleaved
from labkit.bench.kernel_names import family_of, short_name
from labkit.bench.profiling import profiled

Trace = Mapping[str, Any]

HOST = ("cpu_op", "user_annotation")
RANGE = "user_annotation"
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

    def within(self, ranges: Iterable[str]) -> str:
        """The innermost of `ranges` that it belongs to, or ""."""
        wanted = set(ranges)
        return next((name for name in reversed(self.ranges) if name in wanted), "")


@dataclass
class Sum:
    """Total time of some events without what ran inside them, and their number."""

    seconds: float = 0.0
    calls: int = 0


@dataclass(frozen=True)
class Profile:
    """One profiled call."""

    trace: Trace
    seconds: float
    """Of the call by labkit's clock, while the profiler was on."""

    @cached_property
    def events(self) -> list[TraceEvent]:
        """As `read_events` has them."""
        return read_events(self.trace)


def profile_call(action: Callable[[], Any], *, device: str = "cpu", before: Callable[[], Any] | None = None) -> Profile:
    """Run `action` once under the profiler; warming up is for the caller to do before.

    `before` runs once the profiler has started, which takes ranks unequally long: a barrier. RuntimeError if a GPU was
    profiled and no kernel was seen: operators of the host must not pass for kernels.
    """
    activities = [ProfilerActivity.CPU]
    if torch.device(device).type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profiled(activities) as profiler:
        seconds = time_interleaved({"call": action}, warmup=0, repeats=1, device=device, before=before)["call"][0]
    with TemporaryDirectory() as directory:
        path = Path(directory, "trace.json")
        profiler.export_chrome_trace(str(path))
        trace = _anonymous(json.loads(path.read_bytes()))
    if ProfilerActivity.CUDA in activities and not _complete(trace, DEVICE):
        raise RuntimeError(
            "the profiler saw no GPU kernel: CUPTI gave none, as where only administrators may profile "
            "(NVreg_RestrictProfilingToAdminUsers), or where another profiler is at work"
        )
    return Profile(trace, seconds)


def read_events(trace: Trace, *, also: str | None = None) -> list[TraceEvent]:
    """List the events of a Chrome trace by start: kernels, copies and fills of a GPU if there are any, else operators.

    With kernels, also operators of the host whose names begin with `also`.
    """
    host, device = _complete(trace, HOST), _complete(trace, DEVICE)
    if device and also is not None:
        device += [event for event in host if event["name"].startswith(also)]
    events = device or host
    if not events:
        return []
    calls = [event for event in _complete(trace, LAUNCH) if "correlation" in event.get("args", {})]
    launched = {event["args"]["correlation"]: event["ts"] for event in calls}
    starts = [launched.get(event.get("args", {}).get("correlation"), event["ts"]) for event in events]
    ranges = _ranges_at(starts, [event for event in host if event["cat"] == RANGE])
    own = [event["dur"] for event in device] if device else _self_times(host)
    first = min(event["ts"] for event in events)
    found = [
        TraceEvent(
            name=short_name(event["name"]),
            family="dispatch" if event["cat"] == RANGE else family_of(event["name"]),
            ranges=around,
            start_s=(event["ts"] - first) / 1e6,
            duration_s=event["dur"] / 1e6,
            self_s=self_us / 1e6,
        )
        for event, around, self_us in zip(events, ranges, own, strict=True)
    ]
    return sorted(found, key=lambda event: event.start_s)


def _complete(trace: Trace, categories: Sequence[str]) -> list[Mapping[str, Any]]:
    """The events with a duration in these categories."""
    return [event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("cat") in categories]


def _anonymous(trace: Trace) -> Trace:
    """What a viewer needs, without the names of the host and of temporary files."""
    needed = ("schemaVersion", "deviceProperties", "displayTimeUnit", "traceEvents")
    return {name: trace[name] for name in needed if name in trace}


def _self_times(events: list[Mapping[str, Any]]) -> list[float]:
    """Duration of each event less that of the events directly inside it, per thread; in the order given."""
    own = [float(event["dur"]) for event in events]
    order = sorted(range(len(events)), key=lambda i: (events[i]["ts"], -events[i]["dur"]))
    open_by_thread: dict[Any, list[int]] = defaultdict(list)
    for i in order:
        open_ones = open_by_thread[events[i]["tid"]]
        while open_ones and event_end(events[open_ones[-1]]) <= events[i]["ts"]:
            open_ones.pop()
        if open_ones:
            own[open_ones[-1]] -= events[i]["dur"]
        open_ones.append(i)
    return [max(0.0, value) for value in own]


def event_end(event: Mapping[str, Any]) -> float:
    return float(event["ts"] + event["dur"])


def _ranges_at(times: list[float], ranges: list[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """The names of the ranges that are open at each time, the outermost first; in the order given."""
    found: list[tuple[str, ...]] = [()] * len(times)
    coming = sorted(ranges, key=lambda event: (event["ts"], -event["dur"]))
    open_ones: list[Mapping[str, Any]] = []
    for index in sorted(range(len(times)), key=times.__getitem__):
        while coming and coming[0]["ts"] <= times[index]:
            open_ones.append(coming.pop(0))
        open_ones = [event for event in open_ones if event_end(event) > times[index]]
        found[index] = tuple(event["name"] for event in open_ones)
    return found


def sum_up(events: Iterable[TraceEvent], key: Callable[[TraceEvent], tuple[str, ...]]) -> dict[tuple[str, ...], Sum]:
    """Sum the events of each `key`."""
    sums: dict[tuple[str, ...], Sum] = defaultdict(Sum)
    for event in events:
        entry = sums[key(event)]
        entry.seconds += event.self_s
        entry.calls += 1
    return dict(sums)
