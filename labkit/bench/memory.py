"""Memory: peaks of PyTorch's allocator, of the process, and what autograd saves for backward.

    with record_allocations("cpu") as record:
        step = ...                      # whatever counts is created and dropped inside
        with record.window("step"):
            step.run()
    record.peaks["step"]

Bytes as requested, counted from the beginning of the record, without C++ libraries' memory (gloo's
buffers). A record misses what other threads free, so trainings whose gradients are freed in the
background use `process_peak`.
"""

import ctypes
import gc
import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, record_function

from labkit.bench.check import max_over_ranks, refusal_columns
from labkit.bench.trace import profiled

WINDOW = "labkit.window."
MAX_RECORDS = 4
# Of a peak: the share by which a record may be too high.
MAX_EXCESS = 0.01

T = TypeVar("T")


@dataclass
class AllocationRecord:
    """Peak bytes by window; on a CPU they are filled in when the record ends."""

    is_cuda: bool
    peaks: dict[str, int] = field(default_factory=dict)
    base_bytes: int = 0
    left_bytes: int = 0
    """Bytes that the profiler of a CPU saw allocated inside and not freed. If everything was
    dropped, another thread has freed them, and the record is this much too high."""

    @contextmanager
    def window(self, name: str) -> Iterator[None]:
        """Measure the peak of the block."""
        if not self.is_cuda:
            with record_function(WINDOW + name):
                yield
            return
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        yield
        torch.cuda.synchronize()
        self.peaks[name] = _cuda_bytes("peak") - self.base_bytes


@contextmanager
def record_allocations(device: str) -> Iterator[AllocationRecord]:
    """Record what is allocated inside. Not to be nested, nor used under another profiler.

    CPU: PyTorch's allocator reports to the profiler. CUDA: the caching allocator's counters.
    """
    record = AllocationRecord(torch.device(device).type == "cuda")
    if record.is_cuda:
        torch.cuda.synchronize()
        record.base_bytes = _cuda_bytes("current")
        yield record
        return
    with profiled([ProfilerActivity.CPU], memory=True) as profiler:
        yield record
    results: Any = profiler.profiler
    events = sorted(results.kineto_results.events(), key=lambda event: event.start_ns())
    changes = [event for event in events if event.name() == "[memory]"]
    times = [event.start_ns() for event in changes]
    totals = [0, *accumulate(event.nbytes() for event in changes)]
    record.left_bytes = max(0, totals[-1])
    for event in events:
        if event.name().startswith(WINDOW):
            first = bisect_left(times, event.start_ns())
            last = bisect_right(times, event.end_ns())
            record.peaks[event.name().removeprefix(WINDOW)] = max(totals[first : last + 1])


def _cuda_bytes(moment: str) -> int:
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{moment}"])


def measure_second_peak(
    make: Callable[[], T], run: Callable[[T], Any], *, device: str
) -> dict[str, Any]:
    """Measure the peak of the second `run` of what `make` returns. A collective.

    Return columns of a row: `peak_bytes`, or the status `refused` with the reason. A record in
    which another thread freed tensors, which the profiler misses, is repeated until every rank has
    one without that, or about the same as before.
    """
    gc.collect()  # what is freed inside must have been allocated inside
    excess_before = math.inf
    for _ in range(MAX_RECORDS):
        with record_allocations(device) as record:
            subject = make()
            run(subject)  # allocates what stays
            with record.window("run"):
                run(subject)
            del subject
            gc.collect()
        peak = record.peaks["run"]
        excess = record.left_bytes / max(1, peak)
        if max_over_ranks(excess) < MAX_EXCESS:
            return {"status": "ok", "peak_bytes": peak}
        # The same threads free the same tensors in every step: a further record has them, too. Not
        # to the byte, as a few small ones are freed by whichever thread comes last.
        if max_over_ranks(abs(excess - excess_before)) < MAX_EXCESS:
            break
        excess_before = excess
    return refusal_columns("another thread freed tensors each time the allocator was recorded")


@dataclass
class ProcessPeak:
    """Bytes above the use at the start: at most, and at the end. None if unknown."""

    growth_bytes: int | None = None
    end_bytes: int | None = None


@contextmanager
def process_peak(device: str = "cpu") -> Iterator[ProcessPeak]:
    """Measure the highest memory use in the block above that at its start, by all threads.

    CUDA: bytes of the caching allocator. CPU: the resident set on Linux, with what libraries
    allocate.
    """
    peak = ProcessPeak()
    if torch.device(device).type == "cuda":
        with record_allocations(device) as record, record.window("block"):
            yield peak
        peak.growth_bytes = record.peaks["block"]
        peak.end_bytes = _cuda_bytes("current") - record.base_bytes
        return
    # The C library's free memory would not count when it is used again.
    _call_glibc("malloc_trim", 0)
    before = 0
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): resets the peak resident set size
        before = _resident_bytes("VmRSS")
    yield peak
    if before:
        peak.growth_bytes = max(0, _resident_bytes("VmHWM") - before)
        _call_glibc("malloc_trim", 0)
        peak.end_bytes = _resident_bytes("VmRSS") - before


def return_memory_when_freed() -> None:
    """Return freed tensors above 64 KiB to Linux at once, from now on; slower.

    Otherwise a peak would count free memory.
    """
    # M_MMAP_THRESHOLD: larger blocks are mapped, and unmapped when freed.
    _call_glibc("mallopt", -3, 1 << 16)


def _call_glibc(name: str, *arguments: int) -> None:
    function = getattr(ctypes.CDLL(None), name, None)
    if function is not None:  # other C libraries lack it
        function(*arguments)


def _resident_bytes(field: str) -> int:
    (kib,) = re.findall(
        rf"^{field}:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE
    )
    return int(kib) * 1024


def saved_for_backward(function: Callable[[], T]) -> tuple[T, dict[int, int]]:
    """Call `function`; return its result, and bytes by address that autograd saved."""
    saved: dict[int, int] = {}

    def record(tensor: Tensor) -> Tensor:
        # By storage: views of one are saved more than once, and held once.
        storage = tensor.untyped_storage()
        if storage.nbytes():
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor):
        result = function()
    return result, saved
