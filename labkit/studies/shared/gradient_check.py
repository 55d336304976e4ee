"""The check of gradients: are a wrapper's the mean over ranks, complete? Nothing is timed before it is right.

Two looks. The first is at the gradients of the model, as they are: how far are they from the mean of the local ones?
What rounding does to them, and to the largest of a tensor, hides what is missing of a small one. So the second puts
whole numbers in the place of each local gradient, in the middle of the same backward pass: numbers whose mean is
whole, and wrong if any rank's part of any element is missing, counts twice, or stands elsewhere (`exact_sums`).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.bench.check import first_failing_rank, largest, max_over_ranks, verdict
from labkit.bench.checksums import fill_part, first_deviation, rank_batches
from labkit.bench.products import settled_products
from labkit.parallel.data_parallel.consistency import check_same_on_all_ranks, device_of

# The order of sums, and of atomic additions on a GPU, changes a gradient by some hundred units of float32, relative to
# the largest of its tensor.
TOLERANCE = 1e-3
# Of a mean of whole numbers that is whole: dividing first by a number of ranks that is no power of two rounds.
HALF = 0.5

RIGHT = -1
Off = tuple[int, float, float]
"""The element that is wrong (`RIGHT`: none), what was expected there, and what is."""
_LOST: Off = (-2, 0.0, 0.0)  # the gradient itself is missing, or should be

Run = Callable[[], None]
"""Forward and backward passes of one step, without the optimizer's: afterwards gradients are averaged."""


def local_means(parameters: Mapping[str, nn.Parameter], run: Run) -> list[Tensor | None]:
    """What wrappers should arrive at: the mean over ranks of what `run` leaves on the bare model, which is forgotten.

    Summed in float64, each in its own dtype. ValueError, on all ranks, if these leave different parameters unused.
    """
    with settled_products():
        run()
    gradients = _taken(parameters.values())
    present = [f"{name}: {'none' if one is None else 'one'}" for name, one in zip(parameters, gradients, strict=True)]
    check_same_on_all_ranks("gradients", {}, present, device_of(None), None)
    return [_mean_over_ranks(gradient) for gradient in gradients]


def check_all_used(parameters: Mapping[str, nn.Parameter], means: Sequence[Tensor | None]) -> None:
    """ValueError if one that is not frozen has no gradient: wrappers differ in what they do then."""
    for (name, parameter), mean in zip(parameters.items(), means, strict=True):
        if mean is None and parameter.requires_grad:
            raise ValueError(f"expected a gradient for every parameter that is not frozen, got none for {name}")


def check_gradients(
    parameters: Mapping[str, nn.Parameter], run: Run, means: Sequence[Tensor | None]
) -> tuple[float, str]:
    """Largest relative error of the gradients that `run` leaves, and "ok" or what is wrong; all ranks get the same.

    `parameters` are all of the wrapped model, by name, `means` from `local_means`. Gradients are forgotten.
    """
    if len(parameters) != len(means):
        return math.inf, f"wrong: expected the {len(means)} parameters of the model, got {len(parameters)}"
    with settled_products():
        run()
        gradients = _taken(parameters.values())
        error = largest_error(gradients, means)
        if verdict(error, TOLERANCE) == "ok":
            return error, check_completeness(parameters, run)
    off = [_first_off(got, mean) for got, mean in zip(gradients, means, strict=True)]
    return error, _describe_first(parameters, off) or verdict(error, TOLERANCE)


def check_completeness(parameters: Mapping[str, nn.Parameter], run: Run) -> str:
    """ "ok", or what is wrong of the mean over ranks of whole numbers in the place of local gradients, on all ranks.

    Gradients, float32 or float64, are forgotten. Parameters that are frozen have none, nor have those without a use.
    """
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    for members in rank_batches(dist.get_world_size(), next(iter(trained.values())).dtype):
        with _whole_numbers(list(trained.values()), members) as starts:
            run()
        gradients = _taken(trained.values())
        off = [_deviation(*of_one, members) for of_one in zip(gradients, starts, strict=True)]
        if wrong := _describe_first(trained, off):
            return f"{wrong} in a mean of whole numbers, which is whole"
    return "ok"


def _deviation(gradient: Tensor | None, of_passes: list[int], members: range) -> Off:
    if gradient is None or not of_passes:
        return _LOST if gradient is not None or of_passes else (RIGHT, 0.0, 0.0)
    return first_deviation(gradient.contiguous(), members, starts=of_passes, within=HALF)


def _describe_first(parameters: Mapping[str, nn.Parameter], off: Sequence[Off]) -> str | None:
    """ "wrong: rank 1, layers.0.weight, element 5: expected 96, got 48" of the first rank and parameter; or None."""
    place = first_failing_rank(
        next(((index, *one) for index, one in enumerate(off) if one[0] != RIGHT), (RIGHT, 0, 0, 0))
    )
    if place is None:
        return None
    rank, (index, element, expected, got) = place
    where = f"wrong: rank {rank}, {list(parameters)[int(index)].removeprefix('module.')}"
    if element == _LOST[0]:
        return f"{where}: expected a gradient on both sides, got one on one"
    return f"{where}, element {element:.0f}: expected {expected:.6g}, got {got:.6g}"


def _first_off(got: Tensor | None, mean: Tensor | None) -> Off:
    """The element that is furthest from the mean, if that is too far; none of a gradient that both sides lack."""
    if got is None or mean is None:
        return (RIGHT, 0.0, 0.0) if got is mean else _LOST
    if _error(got, mean) <= TOLERANCE:
        return RIGHT, 0.0, 0.0
    return furthest(got, mean)


def furthest(got: Tensor, expected: Tensor) -> Off:
    """The element that is furthest from what is expected there, NaN before all others; that, and what is there."""
    difference = (got.double() - expected.double()).abs().reshape(-1).nan_to_num(nan=math.inf)
    element = int(difference.argmax())
    return element, float(expected.reshape(-1)[element]), float(got.reshape(-1)[element])


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
    return max_over_ranks(max(errors, default=0.0))


def _error(got: Tensor | None, mean: Tensor | None) -> float:
    if got is None or mean is None:
        return 0.0 if got is mean else math.inf
    error = largest(got - mean) / max(largest(mean), 1e-30)
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
