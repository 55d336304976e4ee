"""Checksums of sums over ranks: whole numbers whose sum every float type represents exactly.

With t a fixed random sequence of PERIOD numbers, rank r adds to element i

    1 + (t_i + r) mod M          M (M + 1) / 2 <= 2 / eps, the largest whole number that the type counts up to

for up to M - 1 ranks; more ranks add in batches, while the others add zeros. So nothing is rounded, whatever the order
of additions. A missing part makes the sum too small and a repeated one too large; no two ranks' parts are equal. The
sum depends on t_i, so a right sum at another element's place is wrong, too.

    type        M      ranks per batch
    bfloat16    22     21
    float16     63     62
    others      128    127     (few enough for an exact mean: gradients are these numbers times the number of ranks)
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.bench.check import first_failing_rank

PERIOD = 1021  # prime: chunks cut from round sizes do not begin at the same place in it
ROWS_AT_ONCE = 64  # periods compared at a time: their float64 copies stay in cache


def first_wrong(reduce: Callable[[Tensor], object], tensor: Tensor) -> str | None:
    """Describe the first wrong element on the first such rank, on all ranks; None if the sum is right.

    `reduce` should sum `tensor`, contiguous and of a float type, over all ranks in place.
    """
    for members in rank_batches(dist.get_world_size(), tensor.dtype):
        fill_part(tensor, dist.get_rank(), members)
        reduce(tensor)
        if failure := first_failing_rank(first_deviation(tensor, members)):
            rank, (element, expected, got) = failure
            return (
                f"wrong: rank {rank}, element {element:.0f}: expected {expected:g}, got {got:g} (sum of whole numbers)"
            )
    return None


def first_deviation(
    tensor: Tensor, members: range, *, starts: Iterable[int] = (0,), within: float = 0.0
) -> tuple[int, float, float]:
    """The first element further than `within` from the sum of the `members`' parts, that sum, and the actual value.

    (-1, 0, 0) if there is none. Several `starts` are summed, too.
    """
    modulus, ranks = _modulus(tensor.dtype), torch.tensor(members)[:, None]
    period = torch.stack([_part(ranks, modulus, start).sum(0) for start in starts]).sum(0)
    exact = period.repeat(ROWS_AT_ONCE).to(tensor.device)
    rounded = exact.to(tensor.dtype)
    can_equal = torch.equal(rounded.double(), exact)
    for index, got in enumerate(tensor.view(-1).split(len(exact))):
        if can_equal and torch.equal(got, rounded[: len(got)]):  # takes a third of the time; NaN equals nothing
            continue
        is_right = (got.double() - exact[: len(got)]).abs() <= within  # false for NaN
        if not is_right.all():
            first = int((~is_right).nonzero()[0])
            return index * len(exact) + first, float(exact[first]), float(got[first])
    return -1, 0.0, 0.0


def rank_batches(ranks: int, dtype: torch.dtype) -> Iterator[range]:
    """Batches of ranks that add something together; each rank is in one."""
    size = _modulus(dtype) - 1
    return (range(first, min(first + size, ranks)) for first in range(0, ranks, size))


def fill_part(tensor: Tensor, rank: int, members: range, *, start: int = 0, times: int = 1) -> None:
    """Overwrite the tensor with the part of `rank` from element `start`, times a number; zeros outside of its batch."""
    vector = tensor.view(-1)
    if rank not in members:
        vector.zero_()
        return
    period = (_part(rank, _modulus(tensor.dtype), start) * times).to(tensor.device, tensor.dtype)
    end = len(vector) // PERIOD * PERIOD
    vector[:end].view(-1, PERIOD).copy_(period)  # broadcast over whole periods
    vector[end:].copy_(period[: len(vector) - end])


def _modulus(dtype: torch.dtype) -> int:
    return min(128, int((math.sqrt(1 + 16 / torch.finfo(dtype).eps) - 1) / 2))


def _part(rank: int | Tensor, modulus: int, start: int = 0) -> Tensor:
    """One period of a rank's part, (PERIOD,) in float64; (ranks, PERIOD) for several ranks, (ranks, 1)."""
    return ((_sequence().roll(-start) + rank) % modulus + 1).double()


@cache
def _sequence() -> Tensor:
    return torch.randint(2**31, (PERIOD,), generator=torch.Generator().manual_seed(PERIOD))
