"""Checks before anything is timed: of averaged gradients, and of trainings.

Gradients are checked twice. First, whole numbers take the place of each local gradient in the
middle of the backward pass. Their mean is whole, and wrong if any rank's part of any element is
missing, counts twice, or is in another place (`bench.checksums`). Rounding would hide that of a
small gradient. Then the model's gradients are compared with the mean of the local ones. A training
is checked by its parameters after two steps.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from labkit.bench.check import (
    describe_error,
    deterministic_math,
    first_failing_rank,
    largest,
    largest_difference,
    max_over_ranks,
    status_columns,
)
from labkit.bench.checksums import Deviation, fill_part, first_deviation
from labkit.nn.training import Workload

# Errors of a gradient by the precision of the passes, relative to the largest of its tensor. The
# order of sums, and fused or atomic additions, change it by some hundred units of float32. A wrong
# kernel, or a rank that is missing, changes it by the size of the gradient.
TOLERANCES = {"float64": 1e-9, "float32": 1e-3, "bfloat16": 5e-2, "float16": 5e-2}
# Wrappers may divide before they add, which rounds unless the number of ranks is a power of two. A
# missing part is off by one or more.
WHOLE_NUMBER_TOLERANCE = 0.5

# The tensor itself is missing, or has another shape.
MISSING = Deviation(-1, 0.0, 0.0)
# Forward and backward of one step, after which gradients are averaged.
Run = Callable[[], None]

STEPS = 2  # a gradient that is wrong in the first one has spread by the second
# Error of an element, relative to the largest change of its tensor.
PARAMETER_TOLERANCE = 1e-2
# Share of the model's largest gradient below which a gradient is rounding. AdamW's update of it
# says nothing.
ROUNDING = 1e-6


def local_means(model: nn.Module, run: Run) -> list[Tensor]:
    """Return expected gradients: means over ranks of what `run` computes on the bare model."""
    with deterministic_math():
        run()
    means = []
    for local in _take_gradients(model.parameters()):
        assert local is not None, "the model uses every parameter"
        total = local.double()  # so that the order of ranks rounds nothing
        dist.all_reduce(total)
        means.append((total / dist.get_world_size()).to(local.dtype))
    return means


def check_gradients(model: nn.Module, run: Run, means: Sequence[Tensor]) -> dict[str, Any]:
    """Return `error`, `status` and `reason` of the gradients that `run` computes.

    `error` is the largest relative one.

    `model` is wrapped, and loses its gradients; `means` are from `local_means`. All ranks get the
    same.
    """
    parameters = dict(model.named_parameters())
    if len(parameters) != len(means):
        reason = f"expected the {len(means)} parameters of the model, got {len(parameters)}"
        return {"error": math.inf, **status_columns(reason)}
    with deterministic_math():
        run()
        error = largest_error(_take_gradients(parameters.values()), means)
        incomplete = check_completeness(parameters, run)
    wrong = incomplete or describe_error(error, TOLERANCES["float32"])
    return {"error": error, **status_columns(wrong)}


def check_completeness(parameters: Mapping[str, nn.Parameter], run: Run) -> str | None:
    """Describe the first wrong mean over ranks of whole numbers; None, on all ranks, if none is.

    They take the place of local gradients, which are float32 or float64; parameters lose them.
    """
    with _whole_numbers(list(parameters.values())) as starts:
        run()
    pairs = zip(_take_gradients(parameters.values()), starts, strict=True)
    ranks = dist.get_world_size()
    deviations: list[Deviation | None] = []
    for mean, start in pairs:
        deviation: Deviation | None = MISSING
        if mean is not None:
            deviation = first_deviation(
                mean.contiguous(), ranks, starts=start, within=WHOLE_NUMBER_TOLERANCE
            )
        deviations.append(deviation)
    wrong = describe_first(list(parameters), deviations)
    return None if wrong is None else f"{wrong} in a mean of whole numbers, which is whole"


def describe_first(names: Sequence[str], deviations: Sequence[Deviation | None]) -> str | None:
    """Describe the first rank and tensor that are wrong, or None.

    "rank 1, layers.0.weight, element 5: expected 96, got 48".

    A collective: every rank has a deviation, or None, for each name, and gets the same text.
    """
    # Ranks exchange equally many numbers, whether or not they found something.
    report: tuple[float, ...] = (-1, 0, 0, 0)
    for number, deviation in enumerate(deviations):
        if deviation is not None:
            report = (number, *deviation)
            break
    failure = first_failing_rank(report)
    if failure is None:
        return None
    rank, (name, element, expected, got) = failure
    # torch's DDP, and wrappers like it, put "module." before the model's names.
    where = f"rank {rank}, {names[int(name)].removeprefix('module.')}"
    if element == MISSING.element:
        return f"{where}: missing, or of another shape"
    return f"{where}, element {element:.0f}: expected {expected:.6g}, got {got:.6g}"


def judge(
    errors: Mapping[str, float], limit: float, find_worst: Callable[[str], Deviation]
) -> dict[str, Any]:
    """Return `error`, `status` and `reason` of tensors by name. A collective.

    `error` is the largest of any rank; the reason says where the first failing rank is wrong.
    """
    deviations = [find_worst(name) if error > limit else None for name, error in errors.items()]
    wrong = describe_first(list(errors), deviations)
    return {"error": max_over_ranks(max(errors.values())), **status_columns(wrong)}


@contextmanager
def _whole_numbers(parameters: Sequence[nn.Parameter]) -> Iterator[list[list[int]]]:
    """Replace each local gradient by this rank's part times the number of ranks, within the block.

    Yields where in the sequence the numbers of each pass begin: a list per parameter, one longer
    after each pass. Each pass has another part, so that gradients of the pass before are wrong.
    """
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    begins = [0, *accumulate(parameter.numel() for parameter in parameters)]
    starts: list[list[int]] = [[] for _ in parameters]

    def replace_gradient(index: int, gradient: Tensor) -> Tensor:
        # Parameters begin at other places of the sequence, so that one in another's place is wrong.
        start = begins[index] + 7 * len(starts[index])
        starts[index].append(start)
        numbers = torch.empty_like(gradient, memory_format=torch.contiguous_format)
        fill_part(numbers, rank, ranks, start=start, times=ranks)
        return numbers

    hooks = [
        parameter.register_hook(partial(replace_gradient, index))
        for index, parameter in enumerate(parameters)
    ]
    try:
        yield starts
    finally:
        for hook in hooks:
            hook.remove()


def largest_error(gradients: Sequence[Tensor | None], means: Sequence[Tensor]) -> float:
    """Return the largest deviation of any rank, relative to its tensor's largest mean.

    Infinite for NaN and for a missing gradient.
    """
    actual = {str(index): one for index, one in enumerate(gradients) if one is not None}
    expected = {str(index): one for index, one in enumerate(means)}
    return max_over_ranks(largest_difference(actual, expected))


def furthest(actual: Tensor, expected: Tensor) -> Deviation:
    """Return the element that deviates most, NaN before all others."""
    difference = (actual.double() - expected.double()).abs().reshape(-1).nan_to_num(nan=math.inf)
    element = int(difference.argmax())
    return Deviation(
        element, float(expected.reshape(-1)[element]), float(actual.reshape(-1)[element])
    )


def _take_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor | None]:
    """Return the parameters' gradients, which they lose."""
    gradients = []
    for parameter in parameters:
        gradients.append(parameter.grad)
        parameter.grad = None
    return gradients


@dataclass(frozen=True)
class Reference:
    """Parameters after a training in one process."""

    expected: Mapping[str, Tensor]
    scales: Mapping[str, float]
    """The largest change of each parameter, or of the whole model if its gradients are rounding."""

    def check(self, parameters: Mapping[str, Tensor]) -> dict[str, Any]:
        """Judge parameters by name (`judge`). A collective."""

        def find_worst(name: str) -> Deviation:
            actual = parameters.get(name)
            expected = self.expected[name]
            if actual is None or actual.shape != expected.shape:
                return MISSING
            return furthest(actual, expected)

        return judge(self.errors(parameters), PARAMETER_TOLERANCE, find_worst)

    def errors(self, parameters: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the relative error of each parameter, infinite for a missing one and for NaN."""
        errors = {}
        for name, expected in self.expected.items():
            actual = parameters.get(name)
            errors[name] = math.inf
            if actual is None or actual.shape != expected.shape:
                continue
            difference = largest(actual - expected)
            if difference == 0:
                errors[name] = 0.0
            # A parameter that no step should change has the scale 0.
            elif self.scales[name] and not math.isnan(difference):
                errors[name] = difference / self.scales[name]
        return errors


def train_in_one_process(
    workloads: list[Workload], make_optimizer: Callable[[nn.Module], Optimizer]
) -> Reference:
    """Train two steps on the mean loss of all ranks' workloads."""
    model = workloads[0].build()
    start = _copy_parameters(model)
    optimizer = make_optimizer(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for workload in workloads:
            (workload.loss(model) / len(workloads)).backward()
        optimizer.step()
    gradients = {
        name: largest(value.grad)
        for name, value in model.named_parameters()
        if value.grad is not None
    }
    expected = _copy_parameters(model)
    changes = {name: largest(value - start[name]) for name, value in expected.items()}
    rounding = ROUNDING * max(gradients.values(), default=0.0)
    # AdamW turns a gradient that is rounding into a full step of any sign.
    scales = dict(changes)
    for name, gradient in gradients.items():
        if 0 < gradient <= rounding:
            scales[name] = max(changes.values())
    return Reference(expected, scales)


def _copy_parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}
