"""Checksums of sums over ranks: whole numbers whose sum every float type represents exactly.

With t a fixed random sequence of PERIOD numbers, rank r of p adds to element i

    1 + (t_i + r) mod M

and the sum is at most 2 / eps, the largest whole number that the type counts up to (256 for
bfloat16). So nothing is rounded, whatever the order of additions. A missing part makes the sum too
small and a repeated one too large. No two ranks' parts are equal, up to 21 ranks in bfloat16, 62 in
float16 and 127 in wider types. A right sum at another element's place is wrong, too (in bfloat16 up
to 59 ranks). M is at most 128, which leaves room for an exact mean.
"""

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.bench.check import first_failing_rank

PERIOD = 1021  # prime: chunks cut from round sizes do not begin at the same place in it
SEQUENCE = torch.randint(2**31, (PERIOD,), generator=torch.Generator().manual_seed(PERIOD))
ROWS_AT_ONCE = 64  # periods compared at a time: their float64 copies stay in cache


class Deviation(NamedTuple):
    """A wrong element of a tensor: its index, the expected value, and the actual one."""

    element: int
    expected: float
    got: float


def first_wrong(reduce: Callable[[Tensor], object], tensor: Tensor) -> str | None:
    """Describe the first wrong element on the first wrong rank, on all ranks.

    None if the sum is right.

    `reduce` should sum `tensor`, contiguous and of a float type, over all ranks in place.
    """
    ranks = dist.get_world_size()
    fill_part(tensor, dist.get_rank(), ranks)
    reduce(tensor)
    deviation = first_deviation(tensor, ranks)
    # Ranks exchange equally many numbers, whether or not they found something.
    report: tuple[float, ...] = (-1, 0, 0, -1, 0)
    if deviation is not None:
        report = (*deviation, *_miscounted_part(tensor, ranks))
    failure = first_failing_rank(report)
    if failure is None:
        return None
    rank, (element, expected, got, other, times) = failure
    why = ""
    if other >= 0:
        kind = "is missing" if times < 0 else "is there twice"
        why = f": rank {other:.0f}'s input {kind}"
    return (
        f"rank {rank}, element {element:.0f}: expected {expected:g}, got {got:g}{why}"
        " (sum of whole numbers)"
    )


def _miscounted_part(tensor: Tensor, ranks: int) -> tuple[int, int]:
    """Return the rank whose part explains every wrong element, and -1 if it is missing, 1 if it is
    there twice; (-1, 0) if no single rank's does."""
    got = tensor.view(-1).double().cpu()
    repeats = len(got) // PERIOD + 1
    parts = [
        _part(rank, ranks, tensor.dtype, 0).repeat(repeats)[: len(got)] for rank in range(ranks)
    ]
    excess = got - torch.stack(parts).sum(0)
    wrong = excess != 0
    for rank, part in enumerate(parts):
        # Missing, or there twice: what a wrong round or neighbor does.
        for times in (-1, 1):
            if torch.equal(excess[wrong], times * part[wrong]):
                return rank, times
    return -1, 0


def first_deviation(
    tensor: Tensor, ranks: int, *, starts: Iterable[int] = (0,), within: float = 0.0
) -> Deviation | None:
    """Return the first element that is off by more than `within`, or None.

    Several `starts` are summed, too.
    """
    parts = [_part(rank, ranks, tensor.dtype, start) for start in starts for rank in range(ranks)]
    exact = torch.stack(parts).sum(0).repeat(ROWS_AT_ONCE).to(tensor.device)
    for index, got in enumerate(tensor.view(-1).split(len(exact))):
        is_right = (got.double() - exact[: len(got)]).abs() <= within  # false for NaN
        # Only then a search, which takes longer than the comparison.
        if not is_right.all():
            first = int((~is_right).nonzero()[0])
            element = index * len(exact) + first
            return Deviation(element, float(exact[first]), float(got[first]))
    return None


def fill_part(tensor: Tensor, rank: int, ranks: int, *, start: int = 0, times: int = 1) -> None:
    """Overwrite the tensor with `times` the part of `rank`, from element `start` on."""
    vector = tensor.view(-1)
    period = (_part(rank, ranks, tensor.dtype, start) * times).to(tensor.device, tensor.dtype)
    end = len(vector) // PERIOD * PERIOD
    vector[:end].view(-1, PERIOD).copy_(period)  # broadcast over whole periods
    vector[end:].copy_(period[: len(vector) - end])


def _part(rank: int, ranks: int, dtype: torch.dtype, start: int) -> Tensor:
    """One period of a rank's part, (PERIOD,) in float64."""
    return ((SEQUENCE.roll(-start) + rank) % _modulus(ranks, dtype) + 1).double()


def _modulus(ranks: int, dtype: torch.dtype) -> int:
    largest = int(2 / torch.finfo(dtype).eps)
    # The largest M for which M ranks, whose parts are 1 to M, add up to M (M + 1) / 2 <= `largest`.
    modulus = min(128, int((math.sqrt(1 + 8 * largest) - 1) / 2))
    if ranks < modulus:
        return modulus
    if ranks > largest:
        raise ValueError(
            f"expected at most {largest} ranks, whose sums {dtype} can count; got {ranks}"
        )
    modulus = min(128, largest // ranks)
    # if ranks fill whole cycles, the sum does not depend on t
    while modulus > 1 and ranks % modulus == 0:
        modulus -= 1
    return modulus
