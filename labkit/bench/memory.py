"""One counter for memory: the peak of an allocator, the peak of the process, what autograd holds for backward.

    with record_allocations("cpu") as record:
        step = ...                      # whatever counts is made inside, and dropped inside
        with record.window("step"):
            step.run()
        del step
    record.windows["step"].peak_bytes

`record_allocations` is exact, and sees what PyTorch's allocator hands out. `peak_memory_growth` also sees what C++
libraries take on a CPU (gloo's buffers), in whole pages. `saved_for_backward` needs no allocator.
"""

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from labkit.bench.profiling import profiled

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_MMAP_THRESHOLD = -3  # mallopt(3): from this size on, memory is mapped, and unmapped when it is freed

Result = TypeVar("Result")


@dataclass
class Window:
    """Bytes in use, counted from the beginning of the record."""

    peak_bytes: int
    """The most at any moment of it."""
    reserved_bytes: int | None = None
    """CUDA: the most that the allocator had taken from the device, rounding and unused blocks included."""


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
    """Record what is allocated inside, in bytes as requested. Not to be nested, nor used under another profiler.

    CPU: PyTorch's allocator reports to the profiler. CUDA: the caching allocator's counters.
    """
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
    spans = {event.name(): (event.start_ns(), event.start_ns() + event.duration_ns()) for event in events}
    changes = sorted(((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]"), key=lambda c: c[0])
    record.left_bytes = max(0, sum(n_bytes for _, n_bytes in changes))
    for name, window in record.windows.items():
        start, end = spans[_mark(name)]
        total = window.peak_bytes = sum(n_bytes for at, n_bytes in changes if at < start)
        for at, n_bytes in changes:
            if start <= at <= end:
                total += n_bytes
                window.peak_bytes = max(window.peak_bytes, total)


def _mark(name: str) -> str:
    return f"labkit.window.{name}"


def _cuda_bytes(moment: str) -> int:
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{moment}"])


@dataclass
class PeakMemory:
    """Bytes above the use at the start: at most, and at the end. None where it cannot be measured."""

    growth_bytes: int | None = None
    end_bytes: int | None = None


@contextmanager
def peak_memory_growth(device: str = "cpu") -> Iterator[PeakMemory]:
    """Measure the highest memory use inside the block, above the use on entering it.

    CUDA: bytes of the caching allocator. CPU: the resident set, on Linux. Buffers that are kept and used again do not
    count: release them first if they should.
    """
    peak = PeakMemory()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield peak
        torch.cuda.synchronize()
        peak.growth_bytes = torch.cuda.max_memory_allocated() - before
        peak.end_bytes = torch.cuda.memory_allocated() - before
        return
    _return_free_memory()
    resident = _reset_peak_resident()
    yield peak
    if resident is not None:
        peak.growth_bytes = max(0, _resident_bytes("VmHWM") - resident)
        _return_free_memory()
        peak.end_bytes = _resident_bytes("VmRSS") - resident


def return_memory_when_freed() -> None:
    """From now on return freed tensors above 64 KiB to Linux at once, so that a peak counts no free memory.

    It costs time, and lasts as long as the process.
    """
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):
        library.mallopt(_MMAP_THRESHOLD, 1 << 16)


def _return_free_memory() -> None:
    """Give free memory of the C library back to the system: reused, it would not count.

    No garbage collection: in a rank that was forked it writes to every object, and so copies every page of them.
    """
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "malloc_trim"):  # glibc
        library.malloc_trim(0)


def _reset_peak_resident() -> int | None:
    """Set the kernel's high-water mark back to the present resident set; returns that, in bytes."""
    try:
        _CLEAR_REFS.write_text("5")  # proc(5): "5" resets the peak resident set size
        return _resident_bytes("VmRSS")
    except OSError:
        return None


def _resident_bytes(field: str) -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith(field + ":"))
    return int(line.split()[1]) * 1024


@dataclass(frozen=True)
class SavedTensor:
    """One storage that the backward pass will read."""

    shape: tuple[int, ...]
    """Of the first tensor that was saved in it; others may be views of the same memory."""
    dtype: str
    n_bytes: int
    address: int


def saved_for_backward(function: Callable[[], Result]) -> tuple[Result, list[SavedTensor]]:
    """Call `function` and list the distinct storages that autograd saved, its inputs included.

    A storage that several operators save counts once. What Python keeps alive by a name does not count.
    """
    saved: dict[int, SavedTensor] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            dtype, address = str(tensor.dtype).removeprefix("torch."), storage.data_ptr()
            saved.setdefault(address, SavedTensor(tuple(tensor.shape), dtype, storage.nbytes(), address))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = function()
    return result, list(saved.values())
