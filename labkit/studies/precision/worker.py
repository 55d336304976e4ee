"""What is run for a point of the precision lab: sums of small numbers, dtypes under autocast, timed passes."""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from labkit.costs.memory import peak_bytes, state_bytes
from labkit.costs.transformer import SIZES, n_parameters
from labkit.lab.point import TimedPoint, skip_reason
from labkit.nn.training import AUTOCAST_DTYPES, TrainingStep, gradients
from labkit.nn.transformer import Transformer, language_model_loss
from labkit.studies.shared.alternatives import Failed, run_guarded, timed_phases

if TYPE_CHECKING:
    from labkit.machine import Machine

FULL = "float32"
FORWARD, BOTH = "forward", "forward and backward"
ACCUMULATION, DTYPES, SPEED = "accumulation", "dtypes", "speed"
# Largest deviation from float32: rounding of a 16-bit format through tens of layers leaves a percent or two of the
# loss, and up to a tenth of the gradient of a parameter.
LOSS_BOUND, GRADIENT_BOUND = 0.02, 0.25
HEADROOM = 1.1  # over the formulas of memory
SUMS: Mapping[str, tuple[str, str, bool]] = {
    "fp32": ("float32", "float32", False),
    "fp16": ("float16", "float16", False),
    "fp16_into_fp32": ("float32", "float16", False),
    "fp16_cast_to_fp32": ("float32", "float16", True),
    "bf16": ("bfloat16", "bfloat16", False),
    "bf16_into_fp32": ("float32", "bfloat16", False),
}
"""By name: the dtype of the sum, the dtype of the term, and whether the term is cast first."""
TOY, TRANSFORMER = "toy model", "Transformer"


@dataclass(frozen=True, kw_only=True)
class PrecisionPoint(TimedPoint):
    """One part of the lab: "accumulation", "dtypes" or "speed"."""

    part: str
    device: str
    precision: str = FULL
    """The autocast dtype of the part "dtypes"."""
    precisions: tuple[str, ...] = ()
    """Alternatives of the part "speed", float32 first."""
    term: float = 0.01
    additions: int = 1000
    model: str = ""
    batch: int = 4
    context_length: int = 128

    @property
    def series(self) -> tuple[Hashable, float] | None:
        return ((self.part, self.device), n_parameters(SIZES[self.model])) if self.part == SPEED else None

    def skip_reason(self, machine: "Machine") -> str | None:
        """Memory of a forward pass in the precision that needs most, and of two sets of gradients."""
        if self.part != SPEED:
            return skip_reason(machine, self.device, 0)
        sizes = SIZES[self.model], self.batch, self.context_length
        peaks = [peak_bytes(*sizes, phase="forward", precision=one, device=self.device) for one in self.precisions]
        needed = HEADROOM * (max(peaks) + 2 * state_bytes(SIZES[self.model])["gradients"])
        return skip_reason(machine, self.device, needed)

    def title(self) -> str:
        return ", ".join(filter(None, [self.part, self.model, self.device]))


def measure(point: PrecisionPoint) -> Iterator[dict[str, Any]]:
    """The rows of one part."""
    if point.part == ACCUMULATION:
        for name in SUMS:
            yield from accumulate(name, term=point.term, additions=point.additions, device=point.device)
    elif point.part == DTYPES:
        for model in (TOY, TRANSFORMER):
            yield from observe_dtypes(model, point.precision, device=point.device, seed=point.seed)
    else:
        yield from _measure_speed(point)


def accumulate(name: str, *, term: float, additions: int, device: str) -> Iterator[dict[str, Any]]:
    """Add `term` again and again; one row after 1, 2, 5, 10, 20, ... additions and after the last.

    `stored_sum` is what the term would add up to as its dtype holds it, without any further rounding.
    """
    sum_dtype, term_dtype, is_cast = SUMS[name]
    total = torch.zeros((), dtype=getattr(torch, sum_dtype), device=device)
    stored = torch.tensor(term, dtype=getattr(torch, term_dtype), device=device)
    rows_after = {base * 10**power for power in range(8) for base in (1, 2, 5)} | {additions}
    for count in range(1, additions + 1):
        total += stored.to(total.dtype) if is_cast else stored
        if count in rows_after:
            sums = {"sum": float(total), "exact_sum": count * term, "stored_sum": count * float(stored)}
            yield {"variant": name, "n_added": count} | sums


class ToyModel(nn.Module):
    """The model of the published exercise: rows of 20 features to logits of 5 classes, with a layer norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 10, bias=False)
        self.norm = nn.LayerNorm(10)
        self.second = nn.Linear(10, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.second(self.norm(torch.relu(self.first(x))))
        return logits


def observe_dtypes(model_name: str, precision: str, *, device: str, seed: int) -> Iterator[dict[str, Any]]:
    """One forward and backward pass under autocast; one row per quantity with its dtype, read by hooks."""
    torch.manual_seed(seed)
    with torch.device(device):
        model, parts, compute_loss = _make_toy() if model_name == TOY else _make_transformer()
    tensors: dict[str, Tensor] = {}
    for quantity, module in parts.items():
        module.register_forward_hook(partial(_remember, tensors, quantity))
    dtype = AUTOCAST_DTYPES[precision]
    with torch.autocast(torch.device(device).type, dtype=dtype, enabled=dtype is not None):
        tensors["loss"] = compute_loss()
    tensors["loss"].backward()
    by_quantity = {quantity: [tensor] for quantity, tensor in tensors.items()}
    by_quantity["parameters"] = list(model.parameters())
    by_quantity["gradients"] = [p.grad for p in model.parameters() if p.grad is not None]
    for quantity in ("parameters", "first linear", "norm", "logits", "loss", "gradients"):
        names = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in by_quantity[quantity]})
        yield {"model": model_name, "quantity": quantity, "observed": ", ".join(names)}


def _make_toy() -> tuple[nn.Module, dict[str, nn.Module], Callable[[], Tensor]]:
    model = ToyModel()
    x, classes = torch.randn(8, 20), torch.randint(5, (8,))
    parts = {"first linear": model.first, "norm": model.norm, "logits": model.second}
    return model, parts, lambda: nn.functional.cross_entropy(model(x), classes)


def _make_transformer() -> tuple[nn.Module, dict[str, nn.Module], Callable[[], Tensor]]:
    model = Transformer(SIZES["nano"], context_length=16)
    tokens, targets = torch.randint(SIZES["nano"].vocabulary, (2, 2, 16)).unbind()
    layer = model.get_submodule("layers.0")
    parts = {
        "first linear": layer.get_submodule("attention.queries"),
        "norm": layer.get_submodule("attention_norm"),
        "logits": model.output,
    }
    return model, parts, lambda: language_model_loss(model(tokens), targets)


def _remember(tensors: dict[str, Tensor], quantity: str, module: nn.Module, inputs: Any, output: Tensor) -> None:
    tensors[quantity] = output


def _measure_speed(point: PrecisionPoint) -> Iterator[dict[str, Any]]:
    """One row per (mode, precision): seconds of each repeat, all taking turns on one model; a wrong one gets none."""
    sizes: dict[str, Any] = {"batch": point.batch, "context_length": point.context_length}
    step = TrainingStep(SIZES[point.model], device=point.device, seed=point.seed, **sizes)
    checks = dict(zip(point.precisions, _check(step, point.precisions, point.device), strict=True))
    yield from ({"precision": name} | row for name, row in checks.items() if row["check"] != "ok")
    pairs = [(mode, name) for mode in (FORWARD, BOTH) for name, row in checks.items() if row["check"] == "ok"]
    rows = {f"{mode}/{name}": checks[name] | {"precision": name} for mode, name in pairs}
    actions = {f"{mode}/{name}": {mode: partial(_run, step, mode, name)} for mode, name in pairs}
    yield from timed_phases(rows, actions, "mode", device=point.device, before=step.drop_gradients, **point.rounds)


def _run(step: TrainingStep, mode: str, precision: str) -> None:
    """The forward pass as training runs it, keeping what the backward pass needs; alone or with that."""
    step.autocast_dtype = AUTOCAST_DTYPES[precision]
    step.forward()
    if mode == BOTH:
        step.backward()


def _check(step: TrainingStep, precisions: tuple[str, ...], device: str) -> Iterator[dict[str, Any]]:
    """Compare loss and every parameter's gradient with those of float32, on the same model and batch."""
    loss, reference = _loss_and_gradients(step, FULL)
    squares = {key: float(gradient.double().square().sum()) for key, gradient in reference.items()}
    for name in precisions:
        result = run_guarded(name, partial(_loss_and_gradients, step, name), device=device)
        if isinstance(result, Failed):  # a device without this precision
            yield {"check": result.reason}
            continue
        loss_error = abs(result[0] - loss) / abs(loss)
        actual = result[1]
        off = {
            key: float((actual[key] - one).double().square().sum()) for key, one in reference.items() if key in actual
        }
        del result, actual  # before the next ones come: at most two sets of gradients at once
        error = (sum(off.values()) / sum(squares.values())) ** 0.5
        n_wrong = sum(not off.get(key, math.inf) <= GRADIENT_BOUND**2 * size for key, size in squares.items())
        is_right = loss_error <= LOSS_BOUND and not n_wrong  # False for NaN
        wrong = f"wrong: the loss is off by {loss_error:.1e}, gradients by {error:.1e}, {n_wrong} of them too far"
        yield {"loss_error": loss_error, "error": error, "check": "ok" if is_right else wrong}
    step.drop_gradients()


def _loss_and_gradients(step: TrainingStep, precision: str) -> tuple[float, dict[str, Tensor]]:
    step.drop_gradients()
    step.autocast_dtype = AUTOCAST_DTYPES[precision]
    loss = float(step.forward().detach())
    step.backward()
    return loss, gradients(step.model)
