"""What a rank runs to measure one point of the kernels lab: clock and profiler in turns on one training step."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from labkit.bench.clock import time_interleaved, turn_order
from labkit.bench.trace import Profile, Sum, Trace, TraceEvent, profile_call, sum_up
from labkit.costs.transformer import TransformerShape
from labkit.lab.own_models import shape_of, source_of
from labkit.lab.point import Point
from labkit.lab.units import format_bytes
from labkit.nn.attention import naive_attention
from labkit.nn.training import PHASES, TrainingStep
from labkit.nn.transformer import shape_named
from labkit.studies.kernels.attention import PARTS, attention_in_parts
from labkit.studies.kernels.traces import encode_trace, host_seconds

Sums = dict[tuple[str, ...], Sum]

INFERENCE, STEP = "inference", "full step"
CLOCK, PROFILER = "clock", "profiler"
# Operators below this share of every pass are summed up under one name a (phase, part, family).
LEAST_SHARE = 0.001
OTHERS = "all others"
MOST_TRACE_BYTES = 1_500_000  # of a trace that travels inside the run
ERROR_BOUND = 1e-6


@dataclass(frozen=True, kw_only=True)
class KernelsPoint(Point):
    """A model to profile in both modes."""

    device: str
    model: str
    batch: int = 4
    context_length: int = 128
    warmup: int = 2
    passes: int = 6
    keep_trace: bool = False
    seed: int = 0

    def title(self) -> str:
        return ", ".join(word for word in (self.model, self.device) if word)


@dataclass
class _Passes:
    """What the passes of one mode gave so far; of the traces only the last one is kept, they are large."""

    clock: dict[str, list[Any]] = field(default_factory=dict)
    sums: list[Sums] = field(default_factory=list)
    last_trace: Trace | None = None

    def add(self, profile: Profile) -> None:
        """Seconds by the clock with the profiler on, of all events, and of the ranges on the host; sums over events."""
        self.note(
            profiled_s=profile.seconds,
            events_s=sum(event.self_s for event in profile.events),
            host_s=host_seconds(profile.trace),
            recorded=profile.n_recorded,
        )
        self.sums.append(sum_up(profile.events, _operator))
        self.last_trace = profile.trace

    def note(self, **values: float) -> None:
        for name, value in values.items():
            self.clock.setdefault(name, []).append(value)


def measure_point(point: KernelsPoint) -> Iterator[dict[str, Any]]:
    """Rows of the kinds "clock", "operator" and "trace" (column `record`)."""
    step = TrainingStep(
        source_of(point.model),
        batch=point.batch,
        context_length=point.context_length,
        device=point.device,
        attention=attention_in_parts,
        seed=point.seed,
    )
    shape = shape_of(point.model)
    error = _attention_error(point, shape) if shape else 0.0  # other models have an attention of their own
    if not error <= ERROR_BOUND:  # NaN is not
        yield {"record": "check", "error": error, "check": f"wrong: attention in parts is off by {error:.1e}"}
        return
    by_mode = _measure(point, {INFERENCE: step.infer, STEP: step.run})
    for mode, passes in by_mode.items():
        facts = {"record": "clock", "error": error, "check": "ok", "nsys": shutil.which("nsys") is not None}
        yield {"mode": mode} | facts | passes.clock
        for row in _operator_rows(passes.sums):
            yield {"mode": mode} | row
    if point.keep_trace:
        yield {"mode": STEP} | _trace_row(by_mode[STEP].last_trace or {})


def run_with_nvtx(model: str, *, batch: int = 4, context_length: int = 128) -> None:
    """An inference and a full step, ranges and operators marked for Nsight Systems. RuntimeError without CUDA."""
    if not torch.cuda.is_available():
        raise RuntimeError("marks for Nsight Systems need a CUDA device")
    shape = shape_named(model)
    options: dict[str, Any] = {"device": "cuda", "attention": attention_in_parts}
    step = TrainingStep(shape, batch=batch, context_length=context_length, **options)
    for _ in range(3):
        step.run()
    with torch.autograd.profiler.emit_nvtx():
        step.infer()
        step.run()
    torch.cuda.synchronize()


def _measure(point: KernelsPoint, actions: dict[str, Callable[[], Any]]) -> dict[str, _Passes]:
    """Modes by the clock alone, and modes under the profiler, take turns: in each pass every one of them."""
    time_interleaved(actions, warmup=0, repeats=max(1, point.warmup), device=point.device)
    for action in actions.values():
        profile_call(action, device=point.device)  # the first one starts the profiler itself
    found = {mode: _Passes() for mode in actions}
    turns = {f"{mode}, {how}": (mode, how) for mode in actions for how in (CLOCK, PROFILER)}
    for number in range(point.passes):
        for mode, how in map(turns.__getitem__, turn_order(turns, number, seed=point.id)):
            if how == PROFILER:
                found[mode].add(profile_call(actions[mode], device=point.device))
            else:
                clock = time_interleaved({mode: actions[mode]}, warmup=0, repeats=1, device=point.device)
                found[mode].note(clock_s=clock[mode][0])
    return found


def _operator_rows(sums: list[Sums]) -> Iterator[dict[str, Any]]:
    """One row per (phase, part, family, operator): own seconds and calls of each pass."""
    totals = [sum(entry.seconds for entry in of_pass.values()) for of_pass in sums]
    rows: dict[tuple[str, ...], tuple[list[float], list[int]]] = {}
    for key in dict.fromkeys(key for of_pass in sums for key in of_pass):
        entries = [of_pass.get(key) for of_pass in sums]
        seconds = [entry.seconds if entry else 0.0 for entry in entries]
        small = all(own < LEAST_SHARE * total for own, total in zip(seconds, totals, strict=True))
        kept = (*key[:3], OTHERS) if small else key
        row = rows.setdefault(kept, ([0.0] * len(sums), [0] * len(sums)))
        for index, entry in enumerate(entries):
            row[0][index] += seconds[index]
            row[1][index] += entry.calls if entry else 0
    for (phase, part, family, operator), (seconds, calls) in rows.items():
        names = {"record": "operator", "phase": phase, "within": part, "family": family, "operator": operator}
        yield names | {"self_s": seconds, "calls": calls}


def _operator(event: TraceEvent) -> tuple[str, ...]:
    return event.within(PHASES), event.within(PARTS), event.family, event.name


def _trace_row(trace: Trace) -> dict[str, Any]:
    text = encode_trace(trace)
    if len(text) > MOST_TRACE_BYTES:
        reason = f"{format_bytes(len(text))}, more than the {format_bytes(MOST_TRACE_BYTES)} that a run carries"
        return {"record": "trace", "left_out": reason}
    return {"record": "trace", "trace": text}


def _attention_error(point: KernelsPoint, shape: TransformerShape) -> float:
    """Largest deviation of the attention in parts from the oracle, output and gradients, on the model's shape.

    Each relative to the largest value of the oracle's; NaN where there is one anywhere.
    """
    size = (4, point.batch, shape.n_heads, point.context_length, shape.head_dim)
    q, k, v, grad_output = torch.randn(size, device=point.device)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    found, expected = (
        (output, *torch.autograd.grad(output, inputs, grad_output))
        for output in (attend(q, k, v, True) for attend in (attention_in_parts, naive_attention))
    )
    pairs = zip(found, expected, strict=True)
    errors = [(own - oracle).detach().abs().max() / oracle.detach().abs().max() for own, oracle in pairs]
    return float(torch.stack(errors).max())
