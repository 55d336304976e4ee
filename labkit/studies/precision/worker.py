"""Worker of the precision lab: sums of small numbers, dtypes under autocast, timed passes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from labkit.bench.check import norm_difference, status_columns
from labkit.costs.memory import HEADROOM, peak_bytes, state_bytes
from labkit.costs.transformer import SIZES, n_parameters
from labkit.lab.point import ModelPoint
from labkit.nn.training import AUTOCAST_DTYPES, FORWARD, TrainingStep, gradients
from labkit.studies.shared.alternatives import row_of, timed_rows

FULL = "float32"
BOTH = "forward and backward"
ACCUMULATION = "accumulation"
DTYPES = "dtypes"
SPEED = "speed"
# Largest deviation from float32: rounding to 16 bits through tens of layers changes the loss by a
# percent or two, and the gradient of a parameter by up to a tenth.
LOSS_BOUND = 0.02
GRADIENT_BOUND = 0.25
# Dtype of the sum, dtype of the term, and whether the term is cast before it is added.
SUMS: Mapping[str, tuple[str, str, bool]] = {
    "fp32": ("float32", "float32", False),
    "fp16": ("float16", "float16", False),
    "fp16_into_fp32": ("float32", "float16", False),
    "fp16_cast_to_fp32": ("float32", "float16", True),
    "bf16": ("bfloat16", "bfloat16", False),
    "bf16_into_fp32": ("float32", "bfloat16", False),
}


@dataclass(frozen=True, kw_only=True)
class PrecisionPoint(ModelPoint):
    """One part of the lab: "accumulation", "dtypes" or "speed"."""

    part: str
    precision: str = FULL
    """The autocast dtype of the part "dtypes"."""
    precisions: tuple[str, ...] = ()
    """Alternatives of the part "speed", float32 first."""
    term: float = 0.01
    additions: int = 1000
    model: str = ""

    @property
    def needed_bytes(self) -> float:
        """A forward pass in the precision that needs most, and two sets of gradients."""
        if self.part != SPEED:
            return 0
        sizes = SIZES[self.model], self.batch, self.context_length
        peaks = [
            peak_bytes(*sizes, is_full_step=False, precision=one, device=self.device)
            for one in self.precisions
        ]
        return HEADROOM * (
            max(peaks) + 2 * state_bytes(n_parameters(SIZES[self.model]))["gradients"]
        )


def measure(point: PrecisionPoint) -> Iterator[dict[str, Any]]:
    """Yield the rows of one part."""
    if point.part == ACCUMULATION:
        for name in SUMS:
            yield from accumulate(
                name, term=point.term, additions=point.additions, device=point.device
            )
    elif point.part == DTYPES:
        yield from observe_dtypes(point.precision, device=point.device, seed=point.seed)
    else:
        yield from _measure_speed(point)


def accumulate(name: str, *, term: float, additions: int, device: str) -> Iterator[dict[str, Any]]:
    """Add `term` repeatedly; one row after 1, 2, 5, 10, 20, ... additions and after the last.

    `stored_sum` is the exact sum of the term as its dtype stores it.
    """
    sum_dtype, term_dtype, is_cast = SUMS[name]
    total = torch.zeros((), dtype=getattr(torch, sum_dtype), device=device)
    stored = torch.tensor(term, dtype=getattr(torch, term_dtype), device=device)
    # Three rows per decade: the figure's axis is logarithmic.
    rows_after = {base * 10**power for power in range(8) for base in (1, 2, 5)} | {additions}
    for count in range(1, additions + 1):
        total += stored.to(total.dtype) if is_cast else stored
        if count in rows_after:
            sums = {
                "sum": float(total),
                "exact_sum": count * term,
                "stored_sum": count * float(stored),
            }
            yield {"variant": name, "n_added": count} | sums


class ToyModel(nn.Module):
    """The model of the published exercise: 20 features to 5 logits, with a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 10, bias=False)
        self.norm = nn.LayerNorm(10)
        self.second = nn.Linear(10, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.second(self.norm(torch.relu(self.first(x))))
        return logits


def observe_dtypes(precision: str, *, device: str, seed: int) -> Iterator[dict[str, Any]]:
    """Run one forward and backward pass under autocast.

    Yield the dtype of each quantity, read by hooks.
    """
    torch.manual_seed(seed)
    with torch.device(device):
        model = ToyModel()
        x = torch.randn(8, 20)
        classes = torch.randint(5, (8,))
    tensors: dict[str, list[Tensor]] = {}

    def keep_output(name: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
        tensors[name] = [output]

    model.first.register_forward_hook(partial(keep_output, "first linear"))
    model.norm.register_forward_hook(partial(keep_output, "norm"))
    model.second.register_forward_hook(partial(keep_output, "logits"))
    dtype = AUTOCAST_DTYPES[precision]
    with torch.autocast(torch.device(device).type, dtype=dtype, enabled=dtype is not None):
        loss = nn.functional.cross_entropy(model(x), classes)
    loss.backward()
    tensors["loss"] = [loss]
    tensors["parameters"] = list(model.parameters())
    tensors["gradients"] = [p.grad for p in model.parameters() if p.grad is not None]
    for quantity in ("parameters", "first linear", "norm", "logits", "loss", "gradients"):
        names = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors[quantity]})
        yield {"model": "toy model", "quantity": quantity, "observed": ", ".join(names)}


def _measure_speed(point: PrecisionPoint) -> Iterator[dict[str, Any]]:
    """Yield the seconds of each repeat by mode and precision, interleaved.

    All on one model and batch.
    """
    step = TrainingStep(
        SIZES[point.model],
        device=point.device,
        seed=point.seed,
        batch=point.batch,
        context_length=point.context_length,
    )
    expected_loss, expected = _compute_gradients(step, FULL)
    rows: dict[str, dict[str, Any]] = {}
    actions: dict[str, Any] = {}
    for name in point.precisions:
        check = partial(_check, step, name, expected_loss, expected)
        columns = row_of(name, check, device=point.device)
        for mode in (FORWARD, BOTH):
            rows[f"{mode}/{name}"] = {"precision": name} | columns
            actions[f"{mode}/{name}"] = {mode: partial(_run, step, mode, name)}
    # Before each: the forward pass alone leaves a graph, and gradients would add up.
    step.drop_gradients()
    yield from timed_rows(
        rows, actions, "mode", device=point.device, before=step.drop_gradients, **point.rounds
    )


def _run(step: TrainingStep, mode: str, precision: str) -> None:
    """Run the forward pass with its graph, and in mode `BOTH` the backward pass."""
    # All precisions have one model and batch, by which they are compared.
    step.autocast_dtype = AUTOCAST_DTYPES[precision]
    step.forward()
    if mode == BOTH:
        step.backward()


def _check(
    step: TrainingStep, precision: str, expected_loss: float, expected: Mapping[str, Tensor]
) -> dict[str, float | str]:
    """Compare loss and gradients with those of float32, on the same model and batch."""
    loss, actual = _compute_gradients(step, precision)
    loss_error = abs(loss - expected_loss) / abs(expected_loss)
    error = norm_difference(actual, expected)
    n_wrong = 0
    for name, gradient in expected.items():
        of_one = {name: actual[name]} if name in actual else {}
        n_wrong += norm_difference(of_one, {name: gradient}) > GRADIENT_BOUND
    wrong = None
    if n_wrong or not loss_error <= LOSS_BOUND:  # also NaN
        wrong = (
            f"the loss is off by {loss_error:.1e}, gradients by {error:.1e}, {n_wrong} of them too"
            " far"
        )
    return {"loss_error": loss_error, "error": error, **status_columns(wrong)}


def _compute_gradients(step: TrainingStep, precision: str) -> tuple[float, dict[str, Tensor]]:
    """Return the loss, and gradients by parameter."""
    step.drop_gradients()
    step.autocast_dtype = AUTOCAST_DTYPES[precision]
    loss = float(step.forward().detach())
    step.backward()
    return loss, gradients(step.model)
