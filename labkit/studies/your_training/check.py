"""Whether a change keeps the results: loss, gradients, and the loss after some steps."""

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from labkit.bench.check import (
    OK,
    largest_difference,
    norm_difference,
    refusal_columns,
    status_columns,
)
from labkit.studies.shared.checks import PARAMETER_TOLERANCE, TOLERANCES, Reference
from labkit.studies.your_training.loop import Loop
from labkit.studies.your_training.setup import Training, seed_everything, tensors_in

# Smallest scale of a gradient's error, as a share of the model's largest gradient. Some gradients
# are rounding alone, such as that of a bias before batch norm: their exact value is 0.
FLOOR = 1e-3
# Times that the parameters are rounded otherwise, and the factor by which a right change may differ
# more than the worst of these: it rounds activations otherwise, too.
ROUNDINGS = 3
ROUNDING_MARGIN = 3
# Largest error that may be rounding. Where rounding alone does more, as in deep networks with batch
# norm, a gradient of half the size or of the other sign would pass.
MAX_ROUNDING = {"float32": 0.03, "bfloat16": 0.5}
# Largest error of a parameter's change that may be rounding: beyond it, a check on ranks leaves the
# parameter out.
MAX_CHANGE_ROUNDING = 0.3
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# Steps after which the losses of yours and of an inexact change are compared.
TRAINED_STEPS = 10


def compare_results(yours: Loop, changed: Loop, *, precision: str, seed: int) -> dict[str, Any]:
    """Compare a changed training with yours; return columns of its row, `status` among them.

    `error`: of the gradients on the same batch, "wrong" above the tolerance of `precision`, and
    above what rounding does to gradients of yours; "refused" if rounding would hide what is wrong.
    `loss_change`: of the loss after `TRAINED_STEPS`, relative to yours. `first_s`: seconds of the
    first pass, with compilation. `is_exact`: whether results stay the same but for rounding.
    """
    # Workers draw random numbers of their own: then inputs differ, and so do trained losses.
    batch, other_batch = (first_batch(loop.training, seed) for loop in (yours, changed))
    draws_differently = not are_equal(batch, other_batch)
    models = [loop.training.model for loop in (yours, changed)]
    modes = [model.training for model in models]
    if is_random(yours, batch, seed):
        # Compilers and workers draw other random numbers: compared without dropout.
        for model in models:
            model.eval()
    _, expected = yours.gradients(batch)
    rounding = rounding_error(yours, batch, expected, precision=precision)
    is_exact = precision == "float32"
    with changed.turn():
        start = time.perf_counter()
        _, actual = changed.gradients(batch)
        first_s = time.perf_counter() - start
        error = gradient_error(actual, expected, is_exact=is_exact)
        status = _judge(error, rounding, precision)
        loss = trained_loss(changed, batch) if status == OK else math.nan
    loss_of_yours = trained_loss(yours, batch)
    for model, mode in zip(models, modes, strict=True):
        model.train(mode)
    return {
        **status,
        "error": error,
        "loss_change": (loss - loss_of_yours) / max(abs(loss_of_yours), 1e-12),
        "first_s": first_s,
        "is_exact": is_exact and error <= TOLERANCES[precision] and not draws_differently,
    }


def _judge(error: float, rounding: float, precision: str) -> dict[str, str]:
    """Return the status of gradients with this error, and the reason unless they are right."""
    if error == math.inf:
        return status_columns("gradients are missing or no numbers")
    explained = ROUNDING_MARGIN * rounding
    most = MAX_ROUNDING[precision]
    limit = max(TOLERANCES[precision], min(most, explained))
    if error <= limit:
        return status_columns(None)
    if explained > most:
        does = f"rounding alone changes gradients by {100 * rounding:.3g}%"
        return refusal_columns(f"it cannot be checked: {does}")
    off = f"gradients are off by {100 * error:.3g}%"
    return status_columns(f"{off}, and rounding explains {100 * limit:.3g}%")


def first_batch(training: Training, seed: int) -> Any:
    """Return the first batch of an epoch, drawn with seeded random numbers."""
    seed_everything(seed)
    return next(training.forever())


def trained_loss(loop: Loop, batch: Any) -> float:
    """Return the loss after some steps on one batch; give the parameters their values again."""
    with restored(loop.training.model):
        # One batch again and again: its loss falls, and shows an update that is wrong.
        for _ in range(TRAINED_STEPS):
            loop.step_on(batch)
        with torch.no_grad():
            return float(loop.forward(batch))


@contextmanager
def restored(model: nn.Module) -> Iterator[None]:
    """Give a model the values of its parameters and buffers again after the block.

    Of those that it had: a layer may make a mask or its parameters in its first forward pass.
    """
    before = {
        name: tensor.detach().clone() for name, tensor in _state(model) if not is_lazy(tensor)
    }
    try:
        yield
    finally:
        with torch.no_grad():
            for name, tensor in _state(model):
                if name in before and tensor.shape == before[name].shape:
                    tensor.copy_(before[name])


def _state(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield parameters and buffers by name, also those that a state dict leaves out."""
    yield from model.named_parameters()
    yield from model.named_buffers()


def rounding_error(
    loop: Loop, batch: Any, expected: Mapping[str, Tensor], *, precision: str
) -> float:
    """Return the error of gradients if each parameter is off by half a unit in the last place.

    In a network with batch norm and ReLU an activation near 0 gets another sign, and a gradient is
    off by a percent: no exact change can do better. 0 if it decides which parameters are used.
    """
    errors = []
    for seed in range(ROUNDINGS):
        with restored(loop.training.model):
            round_otherwise(loop.training.model, seed, precision=precision)
            _, actual = loop.gradients(batch)
        errors.append(gradient_error(actual, expected, is_exact=precision == "float32"))
    return max((error for error in errors if error < math.inf), default=0.0)


def round_otherwise(model: nn.Module, seed: int, *, precision: str = "float32") -> None:
    """Move each parameter by half a unit in the last place, up or down by chance."""
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        # Quantized ones are whole numbers.
        if not parameter.is_floating_point():
            continue
        signs = torch.randint(2, parameter.shape, generator=generator) * 2 - 1
        unit = max(torch.finfo(one).eps for one in (parameter.dtype, DTYPES[precision]))
        parameter.data += unit / 2 * signs.to(parameter) * parameter.data


def allow_rounding(reference: Reference, rounded: Iterable[Reference]) -> Reference:
    """Return the reference with the tolerances that its own rounding asks for.

    `rounded` are the same training from parameters that are rounded otherwise. A parameter whose
    change is rounding for the most part is left out: it says nothing of a strategy.
    """
    allowed = dict.fromkeys(reference.expected, PARAMETER_TOLERANCE)
    for one in rounded:
        for name, error in reference.errors(one.expected).items():
            # Infinite: a parameter that no step changes differs by its rounding alone.
            if error < math.inf:
                allowed[name] = max(allowed[name], ROUNDING_MARGIN * error)
    compared = [name for name, error in allowed.items() if error <= MAX_CHANGE_ROUNDING]
    return replace(
        reference,
        expected={name: reference.expected[name] for name in compared},
        scales={
            name: reference.scales[name] * allowed[name] / PARAMETER_TOLERANCE for name in compared
        },
    )


def gradient_error(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, is_exact: bool
) -> float:
    """Return the error of gradients, by parameter name; infinite for NaN or for other names.

    Exact changes: the largest error of an element, relative to the largest of its tensor. In 16
    bits single elements may be off by much (a ReLU that rounds to the other side): the norm of all
    errors, relative to the norm of all gradients.
    """
    if is_exact:
        return largest_difference(actual, expected, floor=FLOOR)
    return norm_difference(actual, expected)


def is_random(loop: Loop, batch: Any, seed: int) -> bool:
    """Return whether the loss depends on the state of the random numbers, as under dropout."""
    # Not by looking for dropout: a loss may draw numbers anywhere.
    losses = []
    # The passes move running statistics, with which evaluation mode computes.
    with restored(loop.training.model), torch.no_grad():
        for number in (seed, seed + 1):
            seed_everything(number)
            losses.append(float(loop.forward(batch)))
    return losses[0] != losses[1]


def are_equal(batch: Any, other: Any) -> bool:
    """Return whether two batches have equal tensors; words, paths and the like do not count."""
    tensors = tensors_in(batch)
    others = tensors_in(other)
    return len(tensors) == len(others) and all(map(_is_same, tensors, others))


def _is_same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal, with NaN, which stands for what is missing, as one."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())
