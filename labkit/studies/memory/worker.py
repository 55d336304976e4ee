"""Worker of the memory lab: measured peaks, peaks counted with fake tensors, checkpointing."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from labkit.bench.check import describe_error, largest_difference, refusal_columns, status_columns
from labkit.bench.memory import record_allocations
from labkit.costs.memory import HEADROOM, peak_bytes, state_bytes
from labkit.costs.transformer import SIZES, n_parameters
from labkit.lab.point import ModelPoint
from labkit.lab.project import runs_directory
from labkit.nn.training import AUTOCAST_DTYPES, FORWARD, TrainingStep, gradients
from labkit.studies.memory.counting import count_phases, count_rows
from labkit.studies.shared.alternatives import check_and_time
from labkit.torch_private import write_memory_snapshot

MEASURED = "measured"
COUNTED = "counted"
CHECKPOINT = "checkpoint"
INFERENCE = "inference"
FULL_STEP = "full_step"
NO_CHECKPOINTS = 0  # the segment length that stands for no checkpointing
# Of a gradient, relative to the largest of its tensor: the same operators run again.
MAX_ERROR = 1e-4


@dataclass(frozen=True, kw_only=True)
class MemoryPoint(ModelPoint):
    """One model size, context length and precision, measured, counted or with checkpointing."""

    kind: str
    """ "measured", "counted" or "checkpoint"."""
    size: str
    precision: str = "float32"
    phases: tuple[str, ...] = ()
    """A measured point has exactly one."""
    checkpoint_segment: int = NO_CHECKPOINTS
    segments: tuple[int, ...] = ()
    """Segment lengths that a checkpoint point compares, `NO_CHECKPOINTS` first."""
    has_details: bool = False
    """Whether the timeline and the largest allocations of a full step are counted, too."""

    @property
    def contests(self) -> int:
        return int(self.kind == CHECKPOINT and self.repeats > 0)

    @property
    def needed_bytes(self) -> float:
        if self.kind == COUNTED or not self.repeats:  # fake tensors take no memory
            return 0
        phase = FULL_STEP
        if self.kind == MEASURED and self.phases != (FULL_STEP,):
            phase = FORWARD
        needed: float = predict_peak(self, phase)["predicted_bytes"]
        if self.kind == CHECKPOINT:  # whose check holds two sets of gradients
            needed += 2 * state_bytes(n_parameters(SIZES[self.size]))["gradients"]
        return HEADROOM * needed


def measure(point: MemoryPoint) -> Iterator[dict[str, Any]]:
    """Yield rows of a point, with the formulas' peaks."""
    kinds = {MEASURED: _measure_peaks, COUNTED: _count, CHECKPOINT: _compare_segments}
    yield from kinds[point.kind](point)


def predict_peak(point: MemoryPoint, phase: str) -> dict[str, int]:
    """Return the formula's peak of a forward pass or a full step as `predicted_bytes`.

    Empty for inference, which has no formula.
    """
    if phase == INFERENCE:
        return {}
    names = ("precision", "checkpoint_segment", "device")
    options: dict[str, Any] = {name: getattr(point, name) for name in names}
    options["is_full_step"] = phase == FULL_STEP
    return {
        "predicted_bytes": peak_bytes(
            SIZES[point.size], point.batch, point.context_length, **options
        )
    }


def _step_arguments(point: MemoryPoint) -> dict[str, Any]:
    names = ("batch", "context_length", "device", "precision", "checkpoint_segment", "seed")
    return {"source": SIZES[point.size]} | {name: getattr(point, name) for name in names}


def _measure_peaks(point: MemoryPoint) -> Iterator[dict[str, Any]]:
    """Yield one row: the peak of each repeat of the phase, after a warm-up run."""
    (phase,) = point.phases
    if torch.device(point.device).type == "cuda":
        # CUDA's libraries allocate their workspaces before anything is recorded.
        for precision in AUTOCAST_DTYPES:
            TrainingStep(
                SIZES["nano"], batch=1, context_length=16, device=point.device, precision=precision
            ).run()
    with record_allocations(point.device) as record:
        step = TrainingStep(**_step_arguments(point))
        run = {INFERENCE: step.infer, FORWARD: step.forward, FULL_STEP: step.run}[phase]
        # Allocates what stays, such as AdamW's states, which every later step has.
        run()
        step.drop_gradients()
        for repeat in range(point.repeats):
            with record.window(str(repeat)):
                run()
            step.drop_gradients()
        # Once per configuration, and not while a peak is measured: recording takes memory.
        if record.is_cuda and phase == FULL_STEP:
            _write_snapshot(point, run)
        del step, run
    peaks = list(record.peaks.values())
    row = {"table": "peak", "method": MEASURED, "phase": phase, "peak_bytes": peaks}
    yield row | predict_peak(point, phase)


def _write_snapshot(point: MemoryPoint, run: Callable[[], Any]) -> None:
    """Write what a step allocates beside the runs, for pytorch.org/memory_viz."""
    folder = runs_directory() / "memory"
    name = f"{point.size}-batch-{point.batch}-{point.precision}-{point.id}.pickle"
    # An extra: the point's peaks are measured, and stand without it.
    with suppress(Exception):
        folder.mkdir(parents=True, exist_ok=True)
        write_memory_snapshot(run, str(folder / name))


def _count(point: MemoryPoint) -> Iterator[dict[str, Any]]:
    arguments = _step_arguments(point)
    for row in count_rows(point.phases, has_details=point.has_details, **arguments):
        if row["table"] == "peak":
            row |= predict_peak(point, row["phase"])
        yield row


def _compare_segments(point: MemoryPoint) -> Iterator[dict[str, Any]]:
    """Yield one row per segment length: counted peak, the error of gradients, seconds per step.

    Without repeats, peaks are counted only. If the step without checkpointing cannot run, nothing
    is compared with it, and nothing is timed.
    """
    rows: dict[str, dict[str, Any]] = {}
    for segment in point.segments:
        counted = count_phases(
            (FULL_STEP,), **_step_arguments(replace(point, checkpoint_segment=segment))
        )
        peak = counted.peak(FULL_STEP).n_bytes
        rows[str(segment)] = {"table": "checkpoint", "segment": segment, "counted_bytes": peak}
    if not point.repeats:
        yield from rows.values()
        return
    step = TrainingStep(**_step_arguments(point))
    expected = dict[str, torch.Tensor]()

    def check(name: str) -> tuple[dict[str, Any], Callable[[], None]]:
        segment = rows[name]["segment"]
        return _check_segment(step, segment, expected), partial(_run_with_segment, step, segment)

    yield from check_and_time(rows, check, device=point.device, **point.rounds)


def _check_segment(
    step: TrainingStep, segment: int, expected: dict[str, torch.Tensor]
) -> dict[str, Any]:
    """Compare gradients with `expected`, which is filled by the step without checkpointing."""
    if segment != NO_CHECKPOINTS and not expected:
        return refusal_columns("no gradients without checkpointing to compare with")
    step.model.checkpoint_segment = segment
    try:
        step.forward()
        step.backward()
        actual = gradients(step.model)
    finally:
        step.drop_gradients()
    # Compared with itself, it is right: the others are compared with it.
    if segment == NO_CHECKPOINTS:
        expected |= actual
    error = largest_difference(actual, expected)
    return {"error": error, **status_columns(describe_error(error, MAX_ERROR))}


def _run_with_segment(step: TrainingStep, segment: int) -> None:
    step.model.checkpoint_segment = segment
    try:
        step.run()
    except Exception:
        # Out of memory, the others need that of the gradients and the graph.
        step.drop_gradients()
        raise
