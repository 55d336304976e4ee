"""What a rank runs to measure or count one point of the memory lab. Imports torch and the instruments only.

``measured``    the peak that the allocator saw, of one phase
``counted``     the same on fake tensors (`counting.py`), parts and timeline included
``block``       what one layer keeps for backward, by operator
``checkpoint``  peak and time of a full step by segment length of activation checkpointing
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from labkit.bench.check import largest_difference, verdict
from labkit.bench.memory import record_allocations
from labkit.costs import memory as costs
from labkit.lab.own_models import shape_of, source_of
from labkit.lab.point import TimedPoint
from labkit.nn.attention import naive_attention
from labkit.nn.training import AUTOCAST_DTYPES, TrainingStep, gradients
from labkit.nn.transformer import RotaryPositions, TransformerLayer, shape_named
from labkit.studies.memory.counting import count_phases, count_rows
from labkit.studies.memory.saved import saved_by_operator
from labkit.studies.shared.alternatives import row_of, timed_rows

WITHOUT = 0
"""The segment length that stands for no checkpointing."""
ITS_OWN = 0
"""The batch and the context length of a model that comes with its own batch."""
NOTHING_TO_COMPARE = "no gradients without checkpointing to compare with"
LARGEST_ERROR = 1e-4
"""Of a gradient, over the largest of its tensor: the same operators run again."""


@dataclass(frozen=True, kw_only=True)
class MemoryPoint(TimedPoint):
    """One kind of look at one model size, context length and precision."""

    kind: str
    size: str
    context_length: int
    batch: int = 4
    precision: str = "float32"
    device: str = "cpu"
    phases: tuple[str, ...] = ()
    """Of a measured point, exactly one."""
    checkpoint_segment: int = WITHOUT
    segments: tuple[int, ...] = ()
    """Of a checkpoint point: the lengths to compare, `WITHOUT` first."""
    detail: bool = False
    """Of a counted point: its full step's timeline and largest allocations too."""
    machine_bytes: int = 0
    """Memory of the device that would have to hold it."""
    repeats: int = 2

    def title(self) -> str:
        context = f", context {self.context_length}" if self.context_length != ITS_OWN else ""
        return f"{self.kind} {self.size}{context}, {self.precision}"


def measure_point(point: MemoryPoint) -> Iterator[dict[str, Any]]:
    """The rows of a point, predictions first among their columns."""
    kinds = {"measured": _measured, "counted": _counted, "block": _block, "checkpoint": _checkpoint}
    yield from kinds[point.kind](point)


def predicted(point: MemoryPoint, phase: str) -> dict[str, int]:
    """`predicted_bytes`, what the formulas say of a phase; nothing of a model that is no Transformer of labkit's."""
    if (shape := shape_of(point.size)) is None:
        return {}
    peak = costs.peak_bytes(
        shape,
        point.batch,
        point.context_length,
        phase=phase,
        precision=point.precision,
        checkpoint_segment=point.checkpoint_segment,
        device=point.device,
    )
    return {"predicted_bytes": peak}


def _arguments(point: MemoryPoint) -> dict[str, Any]:
    """Of the `TrainingStep` that a point describes."""
    same = ("batch", "context_length", "device", "precision", "checkpoint_segment", "seed")
    return {"source": source_of(point.size)} | {name: getattr(point, name) for name in same}


def _measured(point: MemoryPoint) -> Iterator[dict[str, Any]]:
    """One row: the peak of each repeat of the phase, after a first run of it that warms up and is left out."""
    (phase,) = point.phases
    _warm_up(point.device)
    with record_allocations(point.device) as record:
        step = TrainingStep(**_arguments(point))
        run = {"inference": step.infer, "forward": step.forward, "full_step": step.run}[phase]
        run()
        step.drop_gradients()
        for repeat in range(point.repeats):
            with record.window(str(repeat)):
                run()
            step.drop_gradients()
        del step, run
    windows = record.windows.values()
    yield {
        "table": "peak",
        "method": "measured",
        "phase": phase,
        "peak_bytes": [window.peak_bytes for window in windows],
        "reserved_bytes": max((w.reserved_bytes for w in windows if w.reserved_bytes is not None), default=None),
    } | predicted(point, phase)


def _warm_up(device: str) -> None:
    """On CUDA, let the libraries take their workspaces, for forward and backward, before anything is recorded."""
    if torch.device(device).type == "cuda":
        for precision in AUTOCAST_DTYPES:
            TrainingStep(shape_named("nano"), batch=1, context_length=16, device=device, precision=precision).run()


def _counted(point: MemoryPoint) -> Iterator[dict[str, Any]]:
    for row in count_rows(point.phases, detail=point.detail, **_arguments(point)):
        if row["table"] == "peak":
            row |= predicted(point, row["phase"])
        yield row


def _block(point: MemoryPoint) -> Iterator[dict[str, Any]]:
    """A row an operator and tensor kept; one row of totals, with what was predicted and the gradients it produces."""
    shape = shape_named(point.size)
    dtype = AUTOCAST_DTYPES[point.precision]
    predicted = costs.saved_by_layer(shape, point.batch, point.context_length, point.precision, device=point.device)
    torch.manual_seed(point.seed)
    with torch.device(point.device):
        positions = RotaryPositions(point.context_length, shape.head_dim)
        layer = TransformerLayer(shape, positions, naive_attention)
        x = torch.randn(point.batch, point.context_length, shape.d_model, requires_grad=True)

    def forward() -> torch.Tensor:
        with torch.autocast(torch.device(point.device).type, dtype=dtype, enabled=dtype is not None):
            output: torch.Tensor = layer(x)
        return output

    output, saved = saved_by_operator(forward, own=[*layer.parameters(), *positions.buffers()], inputs=[x])
    for storage in saved:
        name = storage.operators[-1] if storage.operators else ""
        yield {"table": "saved", "operator": name, "n_bytes": storage.n_bytes, "readers": " ".join(storage.operators)}
    output.sum().backward()
    yield {
        "table": "block",
        "saved_bytes": sum(storage.n_bytes for storage in saved),
        "predicted_bytes": sum(predicted.values()),
        "input_bytes": sum(storage.n_bytes for storage in saved if storage.is_input),
        "residual_bytes": output.untyped_storage().nbytes(),
        "predicted_residual_bytes": costs.residual_stream_bytes(shape, point.batch, point.context_length),
        "parameter_gradients_bytes": sum(grad.nbytes for grad in gradients(layer).values()),
        "input_gradient_bytes": x.grad.nbytes if x.grad is not None else 0,
    }


def _checkpoint(point: MemoryPoint) -> Iterator[dict[str, Any]]:
    """A row per segment length: error against the first one, peak as measured and as counted, seconds a step.

    If the first one cannot run, nothing is compared with it, and so nothing is timed.
    """
    rows: dict[str, dict[str, Any]] = {}
    for segment in point.segments:
        peak = row_of(str(segment), partial(_peak_of_segment, point, segment), device=point.device)
        rows[str(segment)] = {"table": "checkpoint", "segment": segment} | _counted_peak(point, segment) | peak
    step = TrainingStep(**_arguments(point))  # after all peaks, in which it must not be
    expected: dict[str, torch.Tensor] = {}
    for name, row in rows.items():
        if "check" not in row:
            row |= row_of(name, partial(_check, step, row["segment"], expected), device=point.device)
            step.drop_gradients()
    expected.clear()
    calls = {name: partial(_step_with, step, row["segment"]) for name, row in rows.items()}
    yield from timed_rows(rows, calls, device=point.device, **point.rounds)


def _check(step: TrainingStep, segment: int, expected: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The gate: the largest difference of any gradient from the `expected`, which those without segments become."""
    if segment != WITHOUT and not expected:
        return {"check": NOTHING_TO_COMPARE}
    found = _gradients_with(step, segment)
    if segment == WITHOUT:
        expected |= found
    error = largest_difference(found, expected)
    return {"check": verdict(error, LARGEST_ERROR), "error": error}


def _step_with(step: TrainingStep, segment: int) -> None:
    step.model.checkpoint_segment = segment
    try:
        step.run()
    except Exception:
        step.drop_gradients()  # and what is saved for them, which others need room for
        raise


def _peak_of_segment(point: MemoryPoint, segment: int) -> dict[str, int]:
    (row,) = _measured(replace(point, phases=("full_step",), checkpoint_segment=segment, repeats=1))
    return {"peak_bytes": row["peak_bytes"][0]}


def _counted_peak(point: MemoryPoint, segment: int) -> dict[str, int]:
    counted = count_phases(("full_step",), **_arguments(replace(point, checkpoint_segment=segment)))
    return {"counted_bytes": counted.peak("full_step").n_bytes}


def _gradients_with(step: TrainingStep, segment: int) -> dict[str, torch.Tensor]:
    step.model.checkpoint_segment = segment
    step.forward()
    step.backward()
    found = gradients(step.model)
    step.drop_gradients()
    return found
