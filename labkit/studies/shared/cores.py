"""Equal cores for a comparison of one rank with several."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from labkit.machine.cgroups import available_cores

ALL_CORES = "one rank, all cores"
"""Name of the alternative that computes on one rank, while the others wait."""


@contextmanager
def cores_of_all_ranks() -> Iterator[None]:
    """Give this rank the threads of all ranks inside the block.

    Each rank has its share of the cores. One that computes alone would leave the others' idle, and
    several ranks would look faster by exactly these cores.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(min(available_cores(), threads * dist.get_world_size()))
    try:
        yield
    finally:
        torch.set_num_threads(threads)
