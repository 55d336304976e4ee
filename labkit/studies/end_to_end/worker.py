"""What a rank runs to measure one point of the end-to-end lab. Imports torch, the model and the instruments only."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from labkit.bench.check import largest_difference, verdict
from labkit.bench.clock import time_interleaved, time_parts_interleaved, timed_once
from labkit.lab.own_models import source_of
from labkit.lab.point import TimedPoint
from labkit.nn.training import TrainingStep, gradients
from labkit.studies.shared.alternatives import Failed, attempt, timed_rows
from labkit.studies.shared.compiler import make_compiler_ready

# In the order in which they follow one another; "inference" is a forward pass that keeps nothing.
PHASES = ("inference", "forward", "backward", "optimizer")
COMPILED_PHASES = ("inference", "step")
PHASES_OF_MODE = {"forward": PHASES[:2], "forward_backward": PHASES[:3], "step": PHASES}

# Gradients of eager and compiled differ by the order of sums and by fused roundings, relative to the largest of a
# tensor: some hundred units of float32 in 12 layers; a wrong kernel is off by the size of the gradient itself.
FLOAT32_TOLERANCE = 1e-3
HALF_TOLERANCE = 5e-2  # bfloat16 has 8 bits: an ulp is 0.8 %, and a fused kernel leaves out roundings


@dataclass(frozen=True, kw_only=True)
class EndToEndPoint(TimedPoint):
    """One of: the phases of a step, the first steps of a new process, eager against compiled."""

    sweep: str
    device: str
    size: str
    precision: str = "float32"
    batch: int = 4
    context_length: int = 128
    mode: str = "step"
    trial: int = 0
    compiled_phases: tuple[str, ...] = COMPILED_PHASES
    peak_flops_per_s: float | None = None
    """The device's data-sheet peak, dense bfloat16; None where none is known."""

    def title(self) -> str:
        what = f"first steps, try {self.trial + 1}" if self.sweep == "warmup" else self.sweep
        return f"{what} {self.size} {self.precision}"


def measure_point(point: EndToEndPoint) -> Iterator[dict[str, Any]]:
    """Rows of one point: samples by phase, the first steps in order, or both implementations in turn."""
    if point.sweep == "phases":
        yield from _phases(point)
    elif point.sweep == "warmup":
        yield _first_steps(point)
    else:
        yield from _compiled_against_eager(point)


def _phases(point: EndToEndPoint) -> Iterator[dict[str, Any]]:
    step = _training_step(point)
    samples = time_parts_interleaved(
        _turns(step, PHASES_OF_MODE[point.mode]),
        device=point.device,
        # without the optimizer's step nobody else drops the gradients
        prepare=None if point.mode == "step" else lambda _: step.drop_gradients(),
        **point.rounds,
    )
    loss = float(step.infer())
    if (gate := _finite(loss)) != "ok":
        yield {"check": gate}
        return
    for parts in samples.values():
        for phase, seconds in parts.items():
            yield {"phase": phase, "seconds": seconds, "loss": loss, "check": gate}


def _turns(step: TrainingStep, phases: tuple[str, ...]) -> dict[str, dict[str, Callable[[], Any]]]:
    """Inference, which is no part of training, and the phases that follow one another in a step."""
    actions = {
        "inference": step.infer,
        "forward": step.forward,
        "backward": step.backward,
        "optimizer": step.optimizer_step,
    }
    alone, *together = phases
    return {alone: {alone: actions[alone]}, "training": {phase: actions[phase] for phase in together}}


def _first_steps(point: EndToEndPoint) -> dict[str, Any]:
    """Every step of a new process from the first one on, in order; the point asks for fresh ranks."""
    step = _training_step(point)
    samples = time_interleaved({"step": step.run}, warmup=0, repeats=point.repeats, device=point.device)
    gate = _finite(float(step.infer()))
    return {"phase": "step", "seconds": samples["step"], "check": gate} if gate == "ok" else {"check": gate}


def _compiled_against_eager(point: EndToEndPoint) -> Iterator[dict[str, Any]]:
    """Compile time apart (the first calls, with an empty cache), then both take turns in each of the phases.

    What torch tries of the C++ compiler, whatever the model, is `compiler_s`, and in no `compile_s`.
    """
    compiler_s = attempt("compiled", partial(make_compiler_ready, point.device), device=point.device)
    if isinstance(compiler_s, Failed):
        yield {"implementation": "compiled", "check": compiler_s.reason}
        return
    from torch._inductor.utils import fresh_cache  # seconds, which a rank that compiles nothing need not spend

    torch._dynamo.reset()
    with fresh_cache():
        steps = {"eager": _training_step(point)}

        def compile_and_compare() -> tuple[_Difference, dict[str, dict[str, float]]]:
            steps["compiled"] = _training_step(point, compiled=True)
            error = _largest_difference(steps["compiled"], steps["eager"], point.device)
            compile_s = {"step": error.compile_s}
            if "inference" in point.compiled_phases:
                compile_s["inference"] = timed_once(steps["compiled"].infer, point.device)[1]
            return error, {phase: {"compile_s": taken, "compiler_s": compiler_s} for phase, taken in compile_s.items()}

        found = attempt("compiled", compile_and_compare, device=point.device)
        if isinstance(found, Failed):
            yield {"implementation": "compiled", "check": found.reason}
            return
        error, compiling = found
        bound = FLOAT32_TOLERANCE if point.precision == "float32" else HALF_TOLERANCE
        gate = verdict(error.relative, bound)
        if gate != "ok":
            yield {"implementation": "compiled", "error": error.relative, "check": gate}
            return
        for phase in point.compiled_phases:
            rows: dict[str, dict[str, Any]] = {
                name: {"implementation": name, "phase": phase, "check": gate} for name in steps
            }
            rows["compiled"] |= compiling[phase] | {"error": error.relative}
            actions = {name: step.infer if phase == "inference" else step.run for name, step in steps.items()}
            timing = point.rounds | {"seed": f"{point.id} {phase}"}
            yield from timed_rows(rows, actions, device=point.device, **timing)


@dataclass(frozen=True)
class _Difference:
    relative: float
    compile_s: float


def _largest_difference(compiled: TrainingStep, eager: TrainingStep, device: str) -> _Difference:
    """Largest deviation of a gradient over the largest gradient of its tensor; the first call's time with it.

    Both steps hold the same parameters and tokens, being made from one seed.
    """

    def forward_backward(step: TrainingStep) -> None:
        step.forward()
        step.backward()

    compile_s = timed_once(lambda: forward_backward(compiled), device)[1]
    forward_backward(eager)
    worst = largest_difference(gradients(compiled.model), gradients(eager.model))
    for step in (compiled, eager):
        step.optimizer_step()
    return _Difference(worst, compile_s)


def _training_step(point: EndToEndPoint, *, compiled: bool = False) -> TrainingStep:
    return TrainingStep(
        source_of(point.size),
        batch=point.batch,
        context_length=point.context_length,
        device=point.device,
        precision=point.precision,
        compiled=compiled,
        seed=point.seed,
    )


def _finite(loss: float) -> str:
    return "ok" if math.isfinite(loss) else f"wrong: the loss is {loss}"
