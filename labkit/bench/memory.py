"""How much memory something takes: the peak of this process's resident set, or of CUDA's allocator."""

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
_MMAP_THRESHOLD = -3  # mallopt(3): bytes from which on memory is mapped, and unmapped when it is freed


@dataclass
class PeakMemory:
    """Bytes above where memory stood at the start: at most, and at the end. None where it cannot be measured."""

    growth_bytes: int | None = None
    kept_bytes: int | None = None


@contextmanager
def peak_memory_growth(device: str = "cpu") -> Iterator[PeakMemory]:
    """Measure the highest memory use inside the block, above the use on entering it.

    CUDA: bytes of the caching allocator. CPU: the resident set as Linux counts it, which includes memory
    that C++ libraries take (gloo's buffers, say) and is granular to pages; None on other systems. Buffers that
    somebody keeps and uses again do not count: release them first if they are to be seen.
    """
    peak = PeakMemory()
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        yield peak
        torch.cuda.synchronize()
        peak.growth_bytes = torch.cuda.max_memory_allocated() - before
        peak.kept_bytes = torch.cuda.memory_allocated() - before
        return
    _return_free_memory()
    resident = _reset_peak_resident()
    yield peak
    if resident is not None:
        peak.growth_bytes = max(0, _resident_bytes("VmHWM") - resident)
        _return_free_memory()
        peak.kept_bytes = _resident_bytes("VmRSS") - resident


def return_memory_when_freed() -> None:
    """From now on, tensors above 64 KiB are memory of their own to Linux, which gets it back when they are freed.

    Otherwise the C library keeps what is freed for later: a peak then tells what it keeps. It costs time, and lasts as
    long as the process.
    """
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "mallopt"):
        library.mallopt(_MMAP_THRESHOLD, 1 << 16)


def _return_free_memory() -> None:
    """Give what the C library keeps for later back to the system: reused, it would not be seen.

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
