"""Worker of the training-step lab: phases, first steps, compiled steps, a profile."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from statistics import median_high
from typing import TYPE_CHECKING, Any

import torch

from labkit.bench.check import OK, describe_error, largest_difference, status_columns
from labkit.bench.clock import time_interleaved, time_once, time_parts_interleaved
from labkit.bench.trace import profile_call
from labkit.costs.memory import HEADROOM, peak_bytes
from labkit.costs.transformer import SIZES, TransformerShape
from labkit.lab.point import ModelPoint
from labkit.nn.attention_implementations import no_compiler_reason
from labkit.nn.training import BACKWARD, FORWARD, OPTIMIZER, TrainingStep, adamw, gradients
from labkit.studies.shared.alternatives import check_and_time, sum_rounds
from labkit.studies.shared.checks import TOLERANCES
from labkit.torch_private import fake_tensor_mode, fresh_compiler_cache

if TYPE_CHECKING:
    from labkit.bench.operators import OperatorCall
    from labkit.costs.calibration import Rates

INFERENCE = "inference"
STEP = "step"
FORWARD_BACKWARD = "forward and backward"
Phases = Mapping[str, tuple["OperatorCall", ...]]  # operators by phase
EAGER = "eager"
COMPILED = "compiled"
FIRST = "the first step"
LATER = "a later step"
SETTLED_AFTER = 5  # steps of a process before a step counts as a later one
MAX_PROFILED_PASSES = 6  # shares are means without a verdict, and traces are slow to read
# Planned seconds to compile a model with an empty cache.
COMPILE_S = 20.0


@dataclass(frozen=True, kw_only=True)
class TrainingStepPoint(ModelPoint):
    """A model, and the sweep that measures it."""

    sweep: str
    """ "phases", "first" (steps of a new process), "compile" or "profile"."""
    size: str
    precision: str = "float32"
    trial: int = 0

    @property
    def needed_bytes(self) -> float:
        steps = 2 if self.sweep == "compile" else 1  # the eager one stays, to be compared with
        peak = peak_bytes(SIZES[self.size], self.batch, self.context_length, device=self.device)
        return steps * HEADROOM * peak

    @property
    def planned_s(self) -> float:
        return super().planned_s + COMPILE_S * (self.sweep == "compile")

    @property
    def refusal(self) -> str | None:
        return no_compiler_reason(self.device) if self.sweep == "compile" else None


def measure(point: TrainingStepPoint) -> Iterator[dict[str, Any]]:
    """Yield rows of the sweep that the point belongs to."""
    actions = {
        "phases": _measure_phases,
        "first": _measure_first,
        "compile": _measure_compiled,
        "profile": _profile,
    }
    yield from actions[point.sweep](point)


def _make_step(point: TrainingStepPoint, *, compiled: bool = False) -> TrainingStep:
    names = ("batch", "context_length", "device", "precision", "seed")
    options = {name: getattr(point, name) for name in names}
    return TrainingStep(SIZES[point.size], compiled=compiled, **options)


def _measure_phases(point: TrainingStepPoint) -> Iterator[dict[str, Any]]:
    """Yield seconds of inference, of each phase of a step, and of sums of phases in each round."""
    step = _make_step(point)
    training = {FORWARD: step.forward, BACKWARD: step.backward, OPTIMIZER: step.optimizer_step}
    turns: dict[str, dict[str, Callable[[], Any]]] = {
        INFERENCE: {INFERENCE: step.infer},
        STEP: training,
    }
    samples = time_parts_interleaved(turns, device=point.device, **point.rounds)
    loss = float(step.infer())
    if not math.isfinite(loss):
        yield status_columns(f"the loss is {loss}")
        return
    seconds = samples[INFERENCE] | samples[STEP]
    sums = {FORWARD_BACKWARD: (FORWARD, BACKWARD), STEP: (FORWARD, BACKWARD, OPTIMIZER)}
    for phase, values in seconds.items():
        yield {"phase": phase, "seconds": values, "status": "ok"}
    for phase, parts in sums.items():
        values = sum_rounds(seconds, parts)
        yield {"phase": phase, "seconds": values, "status": "ok", "is_sum": True}


def _measure_first(point: TrainingStepPoint) -> Iterator[dict[str, Any]]:
    """Yield the first step of a new process, and the median of those that follow the first few."""
    step = _make_step(point)
    repeats = SETTLED_AFTER + max(3, min(point.repeats, 10))
    samples = time_interleaved({STEP: step.run}, warmup=0, repeats=repeats, device=point.device)
    seconds = samples[STEP]
    # A process is one sample, whose steps are not independent: so one number of each kind.
    later_s = median_high(seconds[SETTLED_AFTER:])
    yield {"which": FIRST, "seconds": [seconds[0]], "status": "ok"}
    yield {"which": LATER, "seconds": [later_s], "status": "ok"}


def _measure_compiled(point: TrainingStepPoint) -> Iterator[dict[str, Any]]:
    """Compile with an empty cache, compare gradients, then time both in turns."""
    eager = _make_step(point)

    def check(name: str) -> tuple[dict[str, Any], Callable[[], None]]:
        _run_forward_backward(eager)
        if name == EAGER:
            return dict(OK), eager.run
        # torch tries the C++ compiler once for each user: 15 s that are no part of compiling a
        # model.
        if point.device == "cpu":
            torch.compile(torch.neg)(torch.zeros(64))
        torch.compiler.reset()
        # A user's cache may have the code of an earlier run, and compiling would take no time.
        with fresh_compiler_cache():
            compiled = _make_step(point, compiled=True)
            compile_s = time_once(partial(_run_forward_backward, compiled), point.device)[1]
        error = largest_difference(gradients(compiled.model), gradients(eager.model))
        # Drops the gradients, and allocates AdamW's states before the first timed step.
        for step in (eager, compiled):
            step.optimizer_step()
        columns = {
            "compile_s": compile_s,
            "error": error,
            **status_columns(describe_error(error, TOLERANCES[point.precision])),
        }
        return columns, compiled.run

    rows = {name: {"implementation": name} for name in (EAGER, COMPILED)}
    yield from check_and_time(rows, check, device=point.device, **point.rounds)


def _run_forward_backward(step: TrainingStep) -> None:
    step.drop_gradients()
    step.forward()
    step.backward()


def _profile(point: TrainingStepPoint) -> Iterator[dict[str, Any]]:
    """Yield the time of each operator or GPU kernel in inference and a full step.

    Without the time of those that it calls.
    """
    step = _make_step(point)
    for name, action in {INFERENCE: step.infer, STEP: step.run}.items():
        action()
        profile_call(action, device=point.device)  # the first one starts the profiler itself
        n_passes = min(point.repeats, MAX_PROFILED_PASSES)
        # By operator, the seconds of its calls in each pass.
        calls_s: dict[tuple[str, ...], list[list[float]]] = {}
        for number in range(n_passes):
            for event in profile_call(action, device=point.device):
                phase = event.within((FORWARD, BACKWARD, OPTIMIZER))
                by_pass = calls_s.setdefault(
                    (phase, event.family, event.name), [[] for _ in range(n_passes)]
                )
                by_pass[number].append(event.self_s)
        for (phase, family, operator), by_pass in calls_s.items():
            yield {
                "profiled": name,
                "phase": phase,
                "family": family,
                "operator": operator,
                "self_s": [sum(seconds) for seconds in by_pass],
                "calls": [len(seconds) for seconds in by_pass],
            }


@cache
def list_operators(
    shape: TransformerShape,
    batch: int,
    context_length: int,
    precision: str = "float32",
    device: str = "cpu",
) -> Phases:
    """Return the operators that each phase of a step calls, in any order.

    The optimizer has its states, as in every step but the first. Traced on the CPU for every
    device: a torch without CUDA has no backward pass even of fake CUDA tensors. The optimizer is
    the device's.
    """
    # Every rank imports this module, and only predictions need operators.
    from labkit.bench.operators import record_operators

    with fake_tensor_mode(allow_non_fake_inputs=True):
        step = TrainingStep(shape, batch=batch, context_length=context_length, precision=precision)
        step.optimizer = adamw(step.model.parameters(), torch.device(device))
        step.run()
        actions = {
            INFERENCE: step.infer,
            FORWARD: step.forward,
            BACKWARD: step.backward,
            OPTIMIZER: step.optimizer_step,
        }
        return {name: record_operators(action) for name, action in actions.items()}


def predict_seconds(rates: "Rates", operators: Phases, parts: Iterable[str]) -> float:
    """Predict seconds of parts of a step: operators at the device's rates, and autograd."""
    parts = list(parts)
    n_autograd = sum(len(operators[part]) for part in parts if part in (FORWARD, BACKWARD))
    # Layers repeat their operators: each different one is looked up once.
    counts = Counter(
        (call.flops, call.n_bytes, call.dtype) for part in parts for call in operators[part]
    )
    seconds = sum(count * rates.operator_s(*call) for call, count in counts.items())
    # The start of both passes was measured together, so a pass alone does not get it.
    return seconds + rates.autograd_s(n_autograd, begin={FORWARD, BACKWARD} <= set(parts))
