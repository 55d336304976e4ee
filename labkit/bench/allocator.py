"""What an allocator hands out while something runs: the peak, measured.

    with record_allocations("cpu") as record:
        step = ...                      # whatever is to be in the record is made inside, and dropped inside
        with record.window("step"):
            step.run()
        del step
    record.windows["step"].peak_bytes

CPU: the allocations and frees that PyTorch's CPU allocator reports to the profiler, added up in order of time. CUDA:
the caching allocator's own counters. Both count bytes as they were asked for, by any operator or kernel that uses
PyTorch's allocator; memory that a library takes from the system by itself is not seen.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from labkit.bench.profiling import profiled


@dataclass
class Window:
    """Bytes in use, counted from the beginning of the record."""

    peak_bytes: int
    """The most at any moment of it."""
    reserved_bytes: int | None = None
    """CUDA: what the allocator had taken from the device at most, rounding and unused blocks included."""


@dataclass
class AllocationRecord:
    """Windows by name; on a CPU they are filled in when the record ends."""

    device_type: str
    windows: dict[str, Window] = field(default_factory=dict)
    base_bytes: int = 0
    left_bytes: int = 0
    """CPU: allocated inside and not seen to be freed. If all was dropped, some other thread has freed it, which the
    profiler does not see: from then on the record is so much too high."""

    @contextmanager
    def window(self, name: str) -> Iterator[None]:
        """Look at the peak of what runs inside. ValueError if there is a window of that name."""
        if name in self.windows:
            raise ValueError(f"the record has a window {name!r} already")
        self.windows[name] = Window(0)
        if self.device_type != "cuda":
            with record_function(_mark(name)):
                yield
            return
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        yield
        torch.cuda.synchronize()
        self.windows[name] = Window(_cuda_bytes("peak") - self.base_bytes, torch.cuda.max_memory_reserved())


@contextmanager
def record_allocations(device: str) -> Iterator[AllocationRecord]:
    """Record what is allocated inside. Not to be nested, nor to be used under another profiler."""
    record = AllocationRecord(torch.device(device).type)
    if record.device_type == "cuda":
        torch.cuda.synchronize()
        record.base_bytes = _cuda_bytes("current")
        yield record
        return
    with profiled([ProfilerActivity.CPU], memory=True) as profiler:
        yield record
    _read_windows(record, profiler)


def _read_windows(record: AllocationRecord, profiler: profile) -> None:
    """Replay the profiler's memory events: the running total, and its maximum within each window."""
    results: Any = profiler.profiler
    events = results.kineto_results.events()
    names = {_mark(name): name for name in record.windows}
    spans = {
        names[event.name()]: (event.start_ns(), event.start_ns() + event.duration_ns())
        for event in events
        if event.name() in names
    }
    changes = sorted(((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"), key=lambda c: c[0])
    record.left_bytes = max(0, sum(n_bytes for _, n_bytes in changes))
    for name, (start, end) in spans.items():
        total = sum(n_bytes for at, n_bytes in changes if at < start)
        window = Window(total)
        for at, n_bytes in changes:
            if start <= at <= end:
                total += n_bytes
                window.peak_bytes = max(window.peak_bytes, total)
        record.windows[name] = window


def _mark(name: str) -> str:
    return f"labkit.window.{name}"


def _cuda_bytes(moment: str) -> int:
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{moment}"])
