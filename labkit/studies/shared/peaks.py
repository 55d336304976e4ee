"""The allocator's peak over a step with communication, recorded again if another thread's frees were missed."""

import gc
import math
from collections.abc import Callable
from typing import Any, TypeVar

from labkit.bench.check import max_over_ranks
from labkit.bench.memory import record_allocations

MAX_RECORDS = 8
MIN_EXCESS = 0.01
"""Of the peak: a record that is too high by less counts as right."""

T = TypeVar("T")


def peak_of_second(make: Callable[[], T], run: Callable[[T], Any], *, device: str) -> int:
    """Bytes at the peak of the second `run` of what `make` builds, that included. A collective.

    On a CPU a thread of gloo may free a tensor last, which the profiler does not see. The record is then repeated until
    every rank has one without that, at most `MAX_RECORDS` times; the one with the smallest excess counts.
    """
    min_excess, peak = math.inf, 0
    gc.collect()  # what is freed inside must have been allocated inside
    for _ in range(MAX_RECORDS):
        with record_allocations(device) as record:
            subject = make()
            run(subject)  # allocates what stays
            with record.window("run"):
                run(subject)
            del subject
            gc.collect()
        peak_bytes = record.windows["run"].peak_bytes
        min_excess, peak = min((min_excess, peak), (record.left_bytes / max(1, peak_bytes), peak_bytes))
        if max_over_ranks(min_excess) < MIN_EXCESS:
            break
    return peak
