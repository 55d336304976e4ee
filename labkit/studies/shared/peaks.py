"""The allocator's peak over a step whose gradients travel: recorded again where the record cannot be right."""

import gc
import math
from collections.abc import Callable
from typing import Any, TypeVar

from labkit.bench.check import max_over_ranks
from labkit.bench.memory import record_allocations

MOST_RECORDS = 8
LEAST_LEFT = 0.01
"""Of the peak: what a record has to be too high by to count."""

T = TypeVar("T")


def peak_of_second(make: Callable[[], T], run: Callable[[T], Any], *, device: str) -> int:
    """Bytes at the peak of the second `run` of what `make` makes, which is in them. All ranks call it together.

    On a CPU a thread of gloo's may be the last to let go of a tensor, which the profiler does not see: then once more,
    until each rank has a record without that; of several records, the one that is too high by the least counts.
    """
    least_left, of_least = math.inf, 0
    for _ in range(MOST_RECORDS):
        with record_allocations(device) as record:
            subject = make()
            run(subject)  # makes what stays
            with record.window("run"):
                run(subject)
            del subject
            gc.collect()
        peak_bytes = record.windows["run"].peak_bytes
        least_left, of_least = min((least_left, of_least), (record.left_bytes / max(1, peak_bytes), peak_bytes))
        if max_over_ranks(least_left) < LEAST_LEFT:
            break
    return of_least
