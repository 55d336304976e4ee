"""Which algorithm reduces how many bytes on how many ranks, by measurement."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from labkit.costs.communication import CostOf
from labkit.parallel.transport.base import POINT_TO_POINT, SHARED

# Where one algorithm overtakes another: time over gloo's `dist.all_reduce`, medians, 2 cores, SCHED_BATCH, from
# benchmarks/against_torch.py (RD recursive doubling, D direct exchange, R ring, HD halving-doubling, 1S
# one-shot).
#
#     ranks     2                       4                        8                        16
#     64 KiB    RD .58  D .94  R .96    RD .45  D .75  R .91     RD .33  D .73  R .94     RD .33  D .74  R 1.2
#     256 KiB   RD .64  HD .94 R .93    RD .59  HD .91 R 1.0     RD .45  HD .66 R .95     RD .48  HD .53 R 1.0
#     391 KiB   RD .87  D 1.0   R .97    RD .67  D .85  R 1.0     RD .54  D .74  R .92     RD .41  D .73  R .95
#     1 MiB     RD 1.0  D 1.0  R 1.0    RD .91  D .84  R .94     RD 1.0  D .90  R 1.0     RD 1.2  D .78  R 1.1
#     10 MiB    HD .94  D .91  R .95    HD 1.3  D 1.0  R 1.1     HD 1.3  D 1.2  R 1.1     HD 1.2  D 1.1  R 1.2
#     100 MiB   HD .98  D .96  R .92    HD 1.2  D 1.0  R 1.0
SHORT_BYTES = 512 << 10
MIDDLE_BYTES = 16 << 20
# Through shared memory, time over that of direct exchange:
#
#     ranks     2         3         4         8
#     64 KiB    RD .91    RD .73    RD .84    RD .77
#     256 KiB   RD .96    RD .82    RD 1.0    RD 1.2
#     512 KiB   RD 1.1    RD .87    RD 1.2
SHARED_SHORT_BYTES = 192 << 10


@dataclass(frozen=True)
class Algorithm:
    """An all-reduce: the function, and its predicted cost for (world size, bytes), if there is a formula."""

    run: Callable[..., None]
    cost: CostOf | None = None

    def __call__(self, tensor: Tensor, *arguments: Any, **options: Any) -> None:
        self.run(tensor, *arguments, **options)


def select_algorithm(n_bytes: int, world_size: int, transport: str = POINT_TO_POINT) -> str:
    """Return the name of the algorithm for `n_bytes` per rank: few messages if short, few bytes if long.

    Point to point, the borders hardly move with the number of ranks: all ranks share the cores alike.
    """
    if world_size < 1 or n_bytes < 0:
        raise ValueError(f"expected n_bytes >= 0 and world_size >= 1, got {n_bytes} and {world_size}")
    if n_bytes <= (SHARED_SHORT_BYTES if transport == SHARED else SHORT_BYTES):
        return "recursive_doubling"
    return "butterfly" if transport == SHARED or n_bytes <= MIDDLE_BYTES else "ring"
