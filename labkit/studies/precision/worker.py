"""What a rank runs to measure one point of the precision lab. Imports torch, the model and the instruments only."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from labkit.bench.clock import time_interleaved
from labkit.bench.rates import time_matmuls
from labkit.lab.point import Point
from labkit.nn.training import AUTOCAST_DTYPES, TrainingStep, gradients
from labkit.nn.transformer import shape_named
from labkit.studies.precision.dtypes import MODELS, observed_dtypes
from labkit.studies.precision.numerics import ACCUMULATIONS, accumulate, norm_steps

FULL = "float32"
FORWARD, BOTH = "forward", "forward and backward"
# Largest relative deviation from float32 before a precision counts as wrong: rounding of a 16-bit format through
# tens of layers leaves a percent or two of the loss, and up to a tenth of the gradients.
LOSS_BOUND, GRADIENT_BOUND = 0.02, 0.25


@dataclass(frozen=True, kw_only=True)
class PrecisionPoint(Point):
    """One part of the lab: "accumulation", "dtypes", "norm", "rates" or "speed"."""

    part: str
    device: str
    precision: str = FULL
    """dtypes: the autocast dtype; norm: the dtype of the inputs."""
    precisions: tuple[str, ...] = ()
    """rates and speed: alternatives that take turns, float32 first."""
    term: float = 0.01
    additions: int = 1000
    offset: float = 0.0
    scale: float = 1.0
    model: str = ""
    batch: int = 4
    context_length: int = 128
    warmup: int = 1
    repeats: int = 6
    seed: int = 0

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
        case "rates":
            yield from _rates(point)
        case "speed":
            yield from _speed(point)
        case _:
            raise ValueError(f"no part {point.part!r} of this lab")


def _rates(point: PrecisionPoint) -> Iterator[dict[str, Any]]:
    """FLOP/s of a large matrix product in each precision: what the prediction is made of."""
    dtypes: list[torch.dtype] = [getattr(torch, name) for name in point.precisions]
    options: dict[str, Any] = {"warmup": point.warmup, "repeats": point.repeats, "order_seed": point.id}
    times = time_matmuls(point.device, dtypes, **options)
    for name, dtype in zip(point.precisions, dtypes, strict=True):
        yield {"alternative": name, "flops_per_s": times[dtype].flops_per_s}


def _speed(point: PrecisionPoint) -> Iterator[dict[str, Any]]:
    """One row a (mode, precision): seconds of each repeat, all taking turns on one model; "wrong" gets no time."""
    step = TrainingStep(
        shape_named(point.model),
        batch=point.batch,
        context_length=point.context_length,
        device=point.device,
        seed=point.seed,
    )
    checks = dict(zip(point.precisions, _check(step, point.precisions), strict=True))
    facts = {"float32_matmul_precision": torch.get_float32_matmul_precision()}
    for name, row in checks.items():
        if row["gate"] != "ok":
            yield {"alternative": name} | row
    actions = {
        (mode, name): _action(step, mode, name)
        for mode in (FORWARD, BOTH)
        for name, row in checks.items()
        if row["gate"] == "ok"
    }
    labels = {f"{mode}/{name}": action for (mode, name), action in actions.items()}
    samples = time_interleaved(
        labels,
        warmup=point.warmup,
        repeats=point.repeats,
        device=point.device,
        before=step.drop_gradients,
        seed=point.id,
    )
    for mode, name in actions:
        row = {"mode": mode, "alternative": name, "seconds": samples[f"{mode}/{name}"]}
        yield checks[name] | facts | row


def _action(step: TrainingStep, mode: str, precision: str) -> Callable[[], None]:
    """The forward pass as training runs it, keeping what the backward pass needs; alone or with that."""

    def run() -> None:
        step.autocast_dtype = AUTOCAST_DTYPES[precision]
        step.forward()
        if mode == BOTH:
            step.backward()

    return run


def _check(step: TrainingStep, precisions: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """The gate: loss and gradients of each precision against those of float32, on the same model and batch."""
    loss, reference = _loss_and_gradients(step, FULL)
    for name in precisions:
        own_loss, own = _loss_and_gradients(step, name)
        loss_error = abs(own_loss - loss) / abs(loss)
        difference = sum(float((own[key] - grad).double().square().sum()) for key, grad in reference.items())
        del own  # before the next ones come: at most two sets of gradients at once
        size = sum(float(grad.double().square().sum()) for grad in reference.values())
        error = (difference / size) ** 0.5
        right = loss_error <= LOSS_BOUND and error <= GRADIENT_BOUND  # False for NaN
        wrong = f"wrong: loss off by {loss_error:.1e}, gradients by {error:.1e}"
        yield {"loss_error": loss_error, "error": error, "gate": "ok" if right else wrong}
    step.drop_gradients()


def _loss_and_gradients(step: TrainingStep, precision: str) -> tuple[float, dict[str, Tensor]]:
    step.drop_gradients()  # what somebody keeps of them stays
    step.autocast_dtype = AUTOCAST_DTYPES[precision]
    loss = float(step.forward().detach())
    step.backward()
    return loss, gradients(step.model)
