"""torch's profiler, without what it says of its own accord."""

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch.profiler import ProfilerActivity, profile


@contextmanager
def profiled(activities: Sequence[ProfilerActivity], *, memory: bool = False) -> Iterator[profile]:
    """torch's profiler around what runs inside, stopped behind it; `memory`: with what is allocated.

    `acc_events` would keep torch 2.11 quiet, too, and costs the memory lab half of its time again.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # otherwise its start and end are news on stderr
    profiler = profile(activities=activities, profile_memory=memory)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*Profiler clears events")  # of earlier cycles: there is one
        profiler.start()
    try:
        yield profiler
    finally:
        profiler.stop()
