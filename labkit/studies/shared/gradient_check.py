"""Checks that a wrapper's gradients are the mean over ranks and complete, before anything is timed.

Two checks. The first puts whole numbers in the place of each local gradient, in the middle of the same backward pass.
Their mean is whole, and wrong if any rank's part of any element is missing, counts twice, or is in another place
(`bench.checksums`). Rounding would hide that of a small gradient. The second compares the model's gradients with the
mean of the local ones.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.bench.check import deterministic_math, first_failing_rank, largest_difference, max_over_ranks, verdict
from labkit.bench.checksums import fill_part, first_deviation

TOLERANCES = {"float32": 1e-3, "bfloat16": 5e-2, "float16": 5e-2}
"""Errors of a gradient by the precision of the passes, relative to the largest of its tensor.

The order of sums, and fused or atomic additions, change it by some hundred units of float32. A wrong kernel, or a rank
that is missing, changes it by the size of the gradient.
"""
# For a mean of whole numbers that is whole: dividing first by a number of ranks that is no power of two rounds.
HALF = 0.5

RIGHT, MISSING = -1, -2
"""In the place of an element: none is wrong; the tensor itself is missing."""
Deviation = tuple[int, float, float]
"""The first wrong element, the expected value, and the actual one."""
Run = Callable[[], None]
"""Forward and backward passes of one step, without the optimizer's: afterwards gradients are averaged."""


def local_means(parameters: Mapping[str, nn.Parameter], run: Run) -> list[Tensor]:
    """Expected gradients: the mean over ranks of those that `run` computes on the bare model, which loses them.

    Summed in float64, returned in each one's dtype. All parameters have gradients.
    """
    with deterministic_math():
        run()
    means = []
    for local in _take_gradients(parameters.values()):
        assert local is not None, "the model uses every parameter"
        total = local.double()
        dist.all_reduce(total)
        means.append((total / dist.get_world_size()).to(local.dtype))
    return means


def check_gradients(parameters: Mapping[str, nn.Parameter], run: Run, means: Sequence[Tensor]) -> tuple[float, str]:
    """Return the largest relative error of the gradients that `run` computes, and "ok" or what is wrong, on all ranks.

    `parameters` are all of the wrapped model, by name, `means` from `local_means`. Parameters lose their gradients.
    """
    if len(parameters) != len(means):
        return math.inf, f"wrong: expected the {len(means)} parameters of the model, got {len(parameters)}"
    with deterministic_math():
        run()
        error = largest_error(_take_gradients(parameters.values()), means)
        complete = check_completeness(parameters, run)
    return error, verdict(error, TOLERANCES["float32"]) if complete == "ok" else complete


def check_completeness(parameters: Mapping[str, nn.Parameter], run: Run) -> str:
    """ "ok", or the first wrong mean over ranks of whole numbers in the place of local gradients, on all ranks.

    Gradients are float32 or float64; parameters lose them.
    """
    with _whole_numbers(list(parameters.values())) as starts:
        run()
    gradients = _take_gradients(parameters.values())
    deviations = [_deviation(*pair) for pair in zip(gradients, starts, strict=True)]
    wrong = describe_first(list(parameters), deviations)
    return f"{wrong} in a mean of whole numbers, which is whole" if wrong else "ok"


def _deviation(gradient: Tensor | None, starts: list[int]) -> Deviation:
    if gradient is None:
        return MISSING, 0.0, 0.0
    return first_deviation(gradient.contiguous(), dist.get_world_size(), starts=starts, within=HALF)


def describe_first(names: Sequence[str], deviations: Sequence[Deviation]) -> str | None:
    """ "wrong: rank 1, layers.0.weight, element 5: expected 96, got 48" for the first rank and tensor, or None.

    A collective: every rank has a deviation for each name, and gets the same text.
    """
    local = ((index, *one) for index, one in enumerate(deviations) if one[0] != RIGHT)
    place = first_failing_rank(next(local, (RIGHT, 0, 0, 0)))
    if place is None:
        return None
    rank, (index, element, expected, got) = place
    where = f"wrong: rank {rank}, {names[int(index)].removeprefix('module.')}"
    if element == MISSING:
        return f"{where}: missing, or of another shape"
    return f"{where}, element {element:.0f}: expected {expected:.6g}, got {got:.6g}"


@contextmanager
def _whole_numbers(parameters: Sequence[nn.Parameter]) -> Iterator[list[list[int]]]:
    """Inside, each local gradient is this rank's part times the number of ranks, another one in every pass.

    Yields where in the sequence the numbers of each pass begin: a list per parameter, one longer after each pass.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    begins = [0, *accumulate(parameter.numel() for parameter in parameters)]
    starts: list[list[int]] = [[] for _ in parameters]

    def replace_gradient(index: int, gradient: Tensor) -> Tensor:
        start = begins[index] + 7 * len(starts[index])
        starts[index].append(start)
        numbers = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        fill_part(numbers, rank, ranks, start=start, times=ranks)
        return numbers

    hooks = [parameter.register_hook(partial(replace_gradient, index)) for index, parameter in enumerate(parameters)]
    try:
        yield starts
    finally:
        for hook in hooks:
            hook.remove()


def largest_error(gradients: Sequence[Tensor | None], means: Sequence[Tensor]) -> float:
    """Return the largest deviation from the mean, relative to the largest mean of the tensor, over all ranks.

    Infinite for NaN and for a missing gradient.
    """
    actual = {str(index): one for index, one in enumerate(gradients) if one is not None}
    return max_over_ranks(largest_difference(actual, {str(index): one for index, one in enumerate(means)}))


def furthest(actual: Tensor, expected: Tensor) -> Deviation:
    """Return the element that deviates most, NaN before all others; the expected value, and the actual one."""
    difference = (actual.double() - expected.double()).abs().reshape(-1).nan_to_num(nan=math.inf)
    element = int(difference.argmax())
    return element, float(expected.reshape(-1)[element]), float(actual.reshape(-1)[element])


def _take_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor | None]:
    """Return the parameters' gradients, which they lose."""
    gradients = []
    for parameter in parameters:
        gradients.append(parameter.grad)
        parameter.grad = None
    return gradients
