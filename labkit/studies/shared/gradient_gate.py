"""The gate of gradients: are a wrapper's the mean over ranks, complete? Nothing is timed before it is right.

Two looks. The first is at the gradients of the model, as they are: how far are they from the mean of the local ones?
What rounding does to them, and to the largest of a tensor, hides what is missing of a small one. So the second puts
whole numbers in the place of each local gradient, in the middle of the same backward pass: numbers whose mean is
whole, and wrong if any rank's part of any element is missing, counts twice, or stands elsewhere (`exact_sums`).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.bench.exact_sums import fill_part, sum_deviation, turns
from labkit.bench.gate import verdict, worst_of_ranks
from labkit.bench.products import settled_products

# The order of sums, and of atomic additions on a GPU, changes a gradient by some hundred units of float32, relative to
# the largest of its tensor.
TOLERANCE = 1e-3
# Of a mean of whole numbers that is whole: dividing first by a number of ranks that is no power of two rounds.
HALF = 0.5

Run = Callable[[], None]
"""Forward and backward passes of one step, without the optimizer's: afterwards gradients are averaged."""


def local_means(parameters: Iterable[nn.Parameter], run: Run) -> list[Tensor | None]:
    """What wrappers should arrive at: the mean over ranks of what `run` leaves on the bare model, which is forgotten.

    Summed in float64, each in its own dtype.
    """
    parameters = list(parameters)
    with settled_products():
        run()
    return [_mean_over_ranks(gradient) for gradient in _taken(parameters)]


def check_gradients(parameters: Iterable[nn.Parameter], run: Run, means: Sequence[Tensor | None]) -> tuple[float, str]:
    """Largest relative error of the gradients that `run` leaves, and "ok" or what is wrong; all ranks get the same.

    `parameters` are all of the wrapped model, `means` from `local_means`. Gradients are forgotten.
    """
    parameters = list(parameters)
    with settled_products():
        run()
        error = largest_error(_taken(parameters), means)
        if (found := verdict(error, TOLERANCE)) == "ok":
            found = check_completeness(parameters, run)
    return error, found


def check_completeness(parameters: Iterable[nn.Parameter], run: Run) -> str:
    """ "ok", or what is wrong of the mean over ranks of whole numbers in the place of local gradients, on all ranks.

    Gradients, float32 or float64, are forgotten.
    """
    parameters = list(parameters)
    worst = 0.0
    for members in turns(dist.get_world_size(), parameters[0].dtype):
        with _whole_numbers(parameters, members) as starts:
            run()
        for gradient, of_passes in zip(_taken(parameters), starts, strict=True):
            if gradient is None or not of_passes:
                worst = math.inf
            else:
                worst = max(worst, sum_deviation(gradient.contiguous(), members, starts=of_passes))
    off = worst_of_ranks(worst)
    return "ok" if off < HALF else f"wrong: a mean of whole numbers, which is whole, is off by {off:.3g}"


@contextmanager
def _whole_numbers(parameters: Sequence[nn.Parameter], members: range) -> Iterator[list[list[int]]]:
    """Inside, each local gradient is this rank's part times the number of ranks, another one in every pass.

    Yields where in the sequence the numbers of each pass begin: a list that grows by one per pass.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    begins = [0, *accumulate(parameter.numel() for parameter in parameters)]
    starts: list[list[int]] = [[] for _ in parameters]

    def stand_in(index: int, gradient: Tensor) -> Tensor:
        start = begins[index] + 7 * len(starts[index])
        starts[index].append(start)
        numbers = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        fill_part(numbers, rank, members, start=start, times=ranks)
        return numbers

    hooks = [parameter.register_hook(partial(stand_in, index)) for index, parameter in enumerate(parameters)]
    try:
        yield starts
    finally:
        for hook in hooks:
            hook.remove()


def largest_error(gradients: Sequence[Tensor | None], means: Sequence[Tensor | None]) -> float:
    """Largest deviation from the mean over the largest mean of the tensor, of any rank: all get the same number.

    NaN counts as infinite, and so does a gradient that is there on one side only.
    """
    errors = [_error(got, mean) for got, mean in zip(gradients, means, strict=True)]
    return worst_of_ranks(max(errors, default=0.0))


def _error(got: Tensor | None, mean: Tensor | None) -> float:
    if got is None or mean is None:
        return 0.0 if got is mean else math.inf
    error = float((got.double() - mean.double()).abs().max() / mean.abs().max().clamp_min(1e-30))
    return math.inf if math.isnan(error) else error


def _mean_over_ranks(local: Tensor | None) -> Tensor | None:
    if local is None:
        return None
    total = local.double()
    dist.all_reduce(total)
    return (total / dist.get_world_size()).to(local.dtype)


def _taken(parameters: Iterable[nn.Parameter]) -> list[Tensor | None]:
    """Gradients, which the parameters no longer have."""
    gradients = []
    for parameter in parameters:
        gradients.append(parameter.grad)
        parameter.grad = None
    return gradients
