"""The gate: are a wrapper's gradients the mean over ranks of the local ones? Nothing is timed before it is right."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

# A contribution that is missing or counted twice changes a mean over 2 ranks by half of it; the order of sums, and of
# atomic additions on a GPU, by some hundred units of float32, relative to the largest gradient of a tensor.
TOLERANCE = 1e-3


def mean_over_ranks(local: Iterable[Tensor]) -> list[Tensor]:
    """What every wrapper should arrive at: the mean of local gradients, summed in float64, in their own dtype."""
    means = []
    for gradient in local:
        total = gradient.double()
        dist.all_reduce(total)
        means.append((total / dist.get_world_size()).to(gradient.dtype))
    return means


def largest_error(gradients: Iterable[Tensor], means: Iterable[Tensor]) -> float:
    """Largest deviation from the mean over the largest mean of the tensor, of any rank: all get the same number.

    NaN counts as infinite. ValueError if the two differ in number.
    """
    errors = [
        (got.double() - mean.double()).abs().max() / mean.abs().max().clamp_min(1e-30)
        for got, mean in zip(gradients, means, strict=True)
    ]
    worst = torch.stack(errors).nan_to_num(torch.inf).max()
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)
