"""Checksums of sums over ranks: whole numbers whose sum every float type holds exactly.

With t a fixed random sequence of PERIOD numbers, rank r adds to element i

    1 + (t_i + r) mod M          M (M + 1) / 2 <= 2 / eps, the largest whole number that the type counts up to

for up to M - 1 ranks; more ranks add in batches, while the others add zeros. So nothing is rounded at any element, in
any order of additions. A missing part makes the sum too small, one that counts twice too large, and no two ranks' parts
are equal. The sum depends on t_i, so that a right sum in another element's place is wrong, too.

    type        M      ranks per batch
    bfloat16    22     21
    float16     63     62
    others      128    127

(Few enough in the other types that a mean is exact, too: gradients are these numbers times the number of ranks.)
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
    """ "wrong: rank 1, element 500: expected 96, got 48", for the first rank and element; None if the sum is right.

    `reduce` should sum `tensor`, contiguous and of a float type, over all ranks in place. All ranks get the same.
    """
    for members in rank_batches(dist.get_world_size(), tensor.dtype):
        fill_part(tensor, dist.get_rank(), members)
        reduce(tensor)
        if failure := first_failing_rank(first_deviation(tensor, members)):
            rank, (element, expected, got) = failure
            where = f"rank {rank}, element {element:.0f}"
            return f"wrong: {where}: expected {expected:g}, got {got:g} in a sum of whole numbers, which none rounds"
    return None


def first_deviation(
    tensor: Tensor, members: range, *, starts: Iterable[int] = (0,), within: float = 0.0
) -> tuple[int, float, float]:
    """The first element further than `within` from the sum of the `members`' parts, that sum, and the actual value.

    (-1, 0, 0) if there is none. Several `starts`: the sum over them, too.
    """
    modulus, ranks = _modulus(tensor.dtype), torch.tensor(members)[:, None]
    period = torch.stack([_part(ranks, modulus, start).sum(0) for start in starts]).sum(0)
    at_once = ROWS_AT_ONCE * PERIOD
    exact = period.repeat(ROWS_AT_ONCE).to(tensor.device)
    rounded = exact.to(tensor.dtype)
    can_equal = torch.equal(rounded.double(), exact)
    for start, got in zip(range(0, tensor.numel(), at_once), tensor.view(-1).split(at_once), strict=True):
        if can_equal and torch.equal(got, rounded[: len(got)]):  # a third of the time, and NaN equals nothing
            continue
        is_right = (got.double() - exact[: len(got)]).abs() <= within  # NaN is not
        if not is_right.all():
            first = int((~is_right).nonzero()[0])
            return start + first, float(exact[first]), float(got[first])
    return -1, 0.0, 0.0


def rank_batches(ranks: int, dtype: torch.dtype) -> Iterator[range]:
    """Batches of ranks that add something; each rank is in one."""
    at_once = _modulus(dtype) - 1
    return (range(first, min(first + at_once, ranks)) for first in range(0, ranks, at_once))


def fill_part(tensor: Tensor, rank: int, members: range, *, start: int = 0, times: int = 1) -> None:
    """Overwrite the tensor with the part of `rank` in the batch `members`, from element `start`, times a number."""
    if rank in members:
        _fill(tensor, _part(rank, _modulus(tensor.dtype), start) * times)
    else:
        tensor.zero_()


def _modulus(dtype: torch.dtype) -> int:
    counts_to = 2 / torch.finfo(dtype).eps
    return min(128, int((math.sqrt(1 + 8 * counts_to) - 1) / 2))


def _part(rank: int | Tensor, modulus: int, start: int = 0) -> Tensor:
    """One period of a rank's part, (PERIOD,) in float64, or of several ranks', (ranks, 1), (ranks, PERIOD)."""
    return ((_sequence().roll(-start) + rank) % modulus + 1).double()


@cache
def _sequence() -> Tensor:
    return torch.randint(2**31, (PERIOD,), generator=torch.Generator().manual_seed(PERIOD))


def _fill(tensor: Tensor, period: Tensor) -> None:
    period = period.to(tensor.device, tensor.dtype)
    vector = tensor.view(-1)
    end = len(vector) // PERIOD * PERIOD
    vector[:end].view(-1, PERIOD).copy_(period)  # broadcast over whole periods
    vector[end:].copy_(period[: len(vector) - end])
