"""A probe of the machine before each point: a round trip of two ranks, a copy of 64 MB.

Load by other programs shows as late wake-ups of ranks, and a slow phase of the memory as a slow
copy. Two ranks exchange 1 MiB three times as slowly if a host has placed their cores where they
share no cache. All are stored with the point (`machine.load.Load`); `machine.load.busy_points`
compares the points of a run, and `labkit check` two runs.
"""

import timeit
from collections.abc import Callable, Iterator
from contextlib import suppress
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from labkit.bench.clock import set_up

COPY_BYTES = 64_000_000
# Number of float32 elements that two ranks send one another, and of round trips.
MESSAGES = {"ping_s": (1, 100), "exchange_s": (2**18, 15)}
# Key of the row that carries the probe; no worker's value has a name with a blank.
PROBE = "machine probe"


def probed(worker: Callable[..., Any], point: Any, **options: Any) -> Iterator[Any]:
    """Yield one row with the probe of this rank, then the worker's rows.

    A point that measures the start of its processes (`fresh_ranks`) is not probed: the probe would
    warm them up.
    """
    set_up.start()
    if not getattr(point, "fresh_ranks", False):
        yield {PROBE: probe()}
    yield from worker(point, **options) or ()


def probe() -> dict[str, float]:
    """Return the mean round trips of `MESSAGES` and `copy_s` on rank 0, and {} elsewhere.

    Without a second rank on the CPU there are no round trips; without 128 MB of memory, no
    `copy_s`. CPU ranks wait for one another, since the work of others would slow the copy down.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    has_peer = dist.is_initialized() and dist.get_world_size() > 1 and dist.get_backend() == "gloo"
    messages = MESSAGES if has_peer and rank < 2 else {}
    seconds = {name: _ping_pong(rank, *message) for name, message in messages.items()}
    if rank == 0:
        with suppress(MemoryError):
            source = np.ones(COPY_BYTES, np.uint8)
            target = np.ones(COPY_BYTES, np.uint8)
            seconds["copy_s"] = median(
                timeit.repeat(lambda: np.copyto(target, source), number=1, repeat=3)
            )
    # All ranks, since those without a part in it would begin the point early.
    if has_peer:
        dist.barrier()
    return seconds if rank == 0 else {}


def _ping_pong(rank: int, numel: int, round_trips: int) -> float:
    """Return the mean seconds of a round trip."""
    # The mean, not the median: under load, a few wake-ups among many are late.
    message = torch.zeros(numel)

    def make_trip() -> None:
        if rank == 0:
            dist.send(message, 1)
        dist.recv(message, 1 - rank)
        if rank == 1:
            dist.send(message, 0)

    timeit.timeit(make_trip, number=5)  # the first message connects the two ranks
    return timeit.timeit(make_trip, number=round_trips) / round_trips
