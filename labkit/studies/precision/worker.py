"""What a rank runs to measure one point of the precision lab. Imports torch, the model and the instruments only."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from labkit.lab.point import TimedPoint
from labkit.nn.training import AUTOCAST_DTYPES, TrainingStep, gradients
from labkit.nn.transformer import shape_named
from labkit.studies.precision.dtypes import MODELS, observed_dtypes
from labkit.studies.precision.numerics import ACCUMULATIONS, accumulate, norm_steps
from labkit.studies.shared.alternatives import Failed, attempt, timed_phases

FULL = "float32"
FORWARD, BOTH = MODES = "forward", "forward and backward"
# Largest relative deviation from float32 before a precision counts as wrong: rounding of a 16-bit format through
# tens of layers leaves a percent or two of the loss, and up to a tenth of the gradient of a parameter.
LOSS_BOUND, GRADIENT_BOUND = 0.02, 0.25


@dataclass(frozen=True, kw_only=True)
class PrecisionPoint(TimedPoint):
    """One part of the lab: "accumulation", "dtypes", "norm" or "speed"."""

    part: str
    device: str
    precision: str = FULL
    """dtypes: the autocast dtype; norm: the dtype of the inputs."""
    precisions: tuple[str, ...] = ()
    """speed: alternatives that take turns, float32 first."""
    term: float = 0.01
    additions: int = 1000
    offset: float = 0.0
    scale: float = 1.0
    model: str = ""
    batch: int = 4
    context_length: int = 128
    warmup: int = 1
    repeats: int = 6

    def title(self) -> str:
        what = {"dtypes": self.precision, "norm": self.precision, "speed": self.model}.get(self.part)
        return ", ".join(word for word in (self.part, what, self.device) if word)


def measure_point(point: PrecisionPoint) -> Iterator[dict[str, Any]]:
    """The rows of one part; see the functions for their columns."""
    match point.part:
        case "accumulation":
            for name in ACCUMULATIONS:
                yield from accumulate(name, term=point.term, additions=point.additions, device=point.device)
        case "dtypes":
            for model in MODELS:
                yield from observed_dtypes(model, point.precision, device=point.device, seed=point.seed)
        case "norm":
            options = {"offset": point.offset, "scale": point.scale}
            yield from norm_steps(point.precision, device=point.device, seed=point.seed, **options)
        case "speed":
            yield from _speed(point)
        case _:
            raise ValueError(f"no part {point.part!r} of this lab")


def _speed(point: PrecisionPoint) -> Iterator[dict[str, Any]]:
    """One row per (mode, precision): seconds of each repeat, all taking turns on one model; "wrong" gets no time."""
    step = TrainingStep(
        shape_named(point.model),
        batch=point.batch,
        context_length=point.context_length,
        device=point.device,
        seed=point.seed,
    )
    checks = dict(zip(point.precisions, _check(step, point.precisions, point.device), strict=True))
    facts = {"float32_matmul_precision": torch.get_float32_matmul_precision()}
    yield from ({"alternative": name} | row for name, row in checks.items() if row["check"] != "ok")
    pairs = [(mode, name) for mode in MODES for name, row in checks.items() if row["check"] == "ok"]
    rows = {f"{mode}/{name}": checks[name] | facts | {"mode": mode, "alternative": name} for mode, name in pairs}
    actions = {f"{mode}/{name}": {mode: _action(step, mode, name)} for mode, name in pairs}
    yield from timed_phases(rows, actions, "mode", device=point.device, before=step.drop_gradients, **point.rounds)


def _action(step: TrainingStep, mode: str, precision: str) -> Callable[[], None]:
    """The forward pass as training runs it, keeping what the backward pass needs; alone or with that."""

    def run() -> None:
        step.autocast_dtype = AUTOCAST_DTYPES[precision]
        step.forward()
        if mode == BOTH:
            step.backward()

    return run


def _check(step: TrainingStep, precisions: tuple[str, ...], device: str) -> Iterator[dict[str, Any]]:
    """The gate: loss and gradients of each precision against those of float32, on the same model and batch.

    Of the gradients each parameter's must be right; the error that is told is of all together.
    """
    loss, reference = _loss_and_gradients(step, FULL)
    for name in precisions:
        found = attempt(name, partial(_loss_and_gradients, step, name), device=device)
        if isinstance(found, Failed):  # a device without this precision
            yield {"check": found.reason}
            continue
        own_loss, own = found
        del found
        loss_error = abs(own_loss - loss) / abs(loss)
        sizes = {key: float(grad.double().square().sum()) for key, grad in reference.items()}
        off = {key: float((own[key] - grad).double().square().sum()) for key, grad in reference.items() if key in own}
        del own  # before the next ones come: at most two sets of gradients at once
        error = (sum(off.values()) / sum(sizes.values())) ** 0.5
        wrong_ones = [key for key, size in sizes.items() if not off.get(key, math.inf) <= GRADIENT_BOUND**2 * size]
        right = loss_error <= LOSS_BOUND and not wrong_ones  # False for NaN
        wrong = f"wrong: loss off by {loss_error:.1e}, gradients by {error:.1e}, {len(wrong_ones)} of them too far"
        yield {"loss_error": loss_error, "error": error, "check": "ok" if right else wrong}
    step.drop_gradients()


def _loss_and_gradients(step: TrainingStep, precision: str) -> tuple[float, dict[str, Tensor]]:
    step.drop_gradients()  # what somebody keeps of them stays
    step.autocast_dtype = AUTOCAST_DTYPES[precision]
    loss = float(step.forward().detach())
    step.backward()
    return loss, gradients(step.model)
