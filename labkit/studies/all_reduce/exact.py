"""Inputs whose mean over ranks is known, and the gate: is a result that mean, and is a sum complete?

Every rank holds the same random base vector times its own power of two, so that the mean over ranks is the base
times one known number, exactly, in float64, without knowing the other ranks' tensors.
"""

import math
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from labkit.bench.check import max_over_ranks, verdict
from labkit.bench.checksums import first_wrong

Collective = Callable[..., None]  # (tensor, op="mean" or "sum")

CHECKED_AT_ONCE = 2**16  # elements compared with the oracle at a time, so that their float64 copies stay in cache


def inputs(n_elements: int, dtype: torch.dtype, device: str, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The base vector and this rank's multiple of it, (n_elements,)."""
    generator = torch.Generator().manual_seed(seed)
    base = torch.rand(n_elements, generator=generator).sub_(0.5).to(dtype).to(device)
    return base, base * multiple(dist.get_rank())


def multiple(rank: int) -> float:
    """1, 1/2, ... 1/128, 1, ...: multiplying by it is exact, but for the smallest numbers of float16."""
    return 2.0 ** -(rank % 8)


def gate(reduce: Collective, tensor: torch.Tensor, base: torch.Tensor) -> tuple[float, str]:
    """Relative error of the mean that is in `tensor`, and "ok" or what is wrong: first of a sum, which is timed.

    All ranks get the same. The tensor is overwritten. The error says how a mean is rounded; that no rank's part and no
    element is missing is seen by sums of whole numbers, which must be exact: in a 16-bit type a small part of a mean
    over many ranks is less than what rounding may do.
    """
    error = max_over_ranks(_relative_error(tensor, base))
    # one rounding a sum and one for the scaling, each at most eps/2 of the largest partial result; doubled
    found = verdict(error, (dist.get_world_size() + 1) * torch.finfo(tensor.dtype).eps)
    return error, first_wrong(partial(reduce, op="sum"), tensor) or found


def _relative_error(result: torch.Tensor, base: torch.Tensor) -> float:
    """Largest deviation from the exact mean over the largest mean; NaN counts as infinite."""
    ranks = dist.get_world_size()
    factor = sum(multiple(rank) for rank in range(ranks)) / ranks
    deviation = 0.0
    for got, of_base in zip(result.split(CHECKED_AT_ONCE), base.split(CHECKED_AT_ONCE), strict=True):
        difference = float((got.double() - of_base.double() * factor).abs_().max())
        deviation = max(deviation, math.inf if math.isnan(difference) else difference)
    largest = factor * float(base.abs().max())
    return deviation / largest if largest else deviation
