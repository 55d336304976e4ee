"""The memory lab: its parameters, the points it measures and counts, and which of them this machine cannot hold."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import Field

from labkit.costs.memory import PHASES, STATES_BYTES, saved_by_layer, state_bytes
from labkit.lab import capacity
from labkit.lab.agreement import Known, PeakMemory, step_times
from labkit.lab.config import Device, TimedConfig, TimeoutSeconds, Warmup, one_of
from labkit.lab.own_models import model_names, own_names, parameters_of, shape_of
from labkit.lab.rows import select
from labkit.lab.study import Study
from labkit.machine import Machine
from labkit.nn.transformer import SIZES, shape_named
from labkit.studies.memory.findings import QUESTIONS
from labkit.studies.memory.worker import ITS_OWN, WITHOUT, MemoryPoint, measure_point, predicted

RANK_BYTES = 400 * 2**20  # a rank's own resident memory, torch and the profiler's events included
HEADROOM = 1.1  # over the prediction, which leaves out what comes while something else goes

Size = Annotated[str, one_of(model_names)]
Context = Annotated[int, Field(ge=1, le=2**20)]
Precision = Literal["float32", "bfloat16"]
Phase = Annotated[str, one_of(lambda: PHASES)]


class MemoryConfig(TimedConfig):
    """What a reader may set. Contexts in tokens."""

    sizes: Annotated[list[Size], Field(min_length=1)]
    """Measured and counted, at `contexts`; counted alone at `counted_contexts`."""
    contexts: Annotated[list[Context], Field(min_length=1)]
    counted_contexts: list[Context]
    big_size: Size = "2.7B"
    """Counted beside the published peaks."""
    big_contexts: list[Context]
    big_low_precision_contexts: list[Context]
    """Where the big size is also counted in the other precisions than float32."""
    fitted_sizes: list[Size] = list(SIZES)
    """Counted at `fitted_context` to see which fit into this machine."""
    fitted_context: Context = 128
    precisions: Annotated[list[Precision], Field(min_length=1)] = ["float32", "bfloat16"]
    """On a CPU, which may have no instructions for 16-bit numbers, these are measured of the smallest named size."""
    phases: Annotated[list[Phase], Field(min_length=1)] = list(PHASES)
    checkpoint_size: Size
    """Measured and timed with each segment length of checkpointing that divides its layers."""
    checkpoint_context: Context
    counted_checkpoint_size: Size
    counted_checkpoint_context: Context
    batch: Annotated[int, Field(ge=1, le=4096)] = 4
    device: Device = "auto"
    warmup: Warmup = 1
    """Of timed steps."""
    timeout_s: TimeoutSeconds = 300.0


class MemoryStudy(Study):
    """Where the memory of a training step goes, measured where it fits and counted where it does not."""

    name = "memory"
    title = "Memory"
    summary = "Where the memory of a training step goes, and the largest model that fits."
    questions = QUESTIONS
    profiles = {
        "smoke": MemoryConfig(
            sizes=["nano"],
            contexts=[16, 32],
            counted_contexts=[],
            big_size="mini",
            big_contexts=[16],
            big_low_precision_contexts=[],
            fitted_sizes=["nano", "mini"],
            fitted_context=16,
            precisions=["float32"],
            phases=["inference", "full_step"],
            checkpoint_size="nano",
            checkpoint_context=16,
            counted_checkpoint_size="nano",
            counted_checkpoint_context=32,
            repeats=2,
        ),
        "quick": MemoryConfig(
            sizes=["nano", "mini"],
            contexts=[64, 128],
            counted_contexts=[512],
            big_contexts=[512, 2048],
            big_low_precision_contexts=[512],
            fitted_sizes=[size for size in SIZES if size != "10B"],
            fitted_context=512,  # as counted anyway
            checkpoint_size="nano",
            checkpoint_context=128,
            counted_checkpoint_size="mini",
            counted_checkpoint_context=512,
            rounds_s=5.0,
        ),
        "standard": MemoryConfig(
            sizes=["nano", "mini", "small"],
            contexts=[64, 128, 256, 512],
            counted_contexts=[1024, 2048],
            big_contexts=[128, 256, 512, 1024, 2048],
            big_low_precision_contexts=[128, 256, 512],
            checkpoint_size="mini",
            checkpoint_context=256,
            counted_checkpoint_size="2.7B",
            counted_checkpoint_context=512,
        ),
        "paper": MemoryConfig(
            sizes=["small", "medium", "large", "xl", "2.7B"],
            contexts=[128, 256, 512],
            counted_contexts=[1024, 2048],
            big_contexts=[128, 256, 512, 1024, 2048],
            big_low_precision_contexts=[128, 256, 512, 1024, 2048],
            checkpoint_size="xl",
            checkpoint_context=512,
            counted_checkpoint_size="2.7B",
            counted_checkpoint_context=2048,
            timeout_s=900.0,
        ),
    }
    worker = staticmethod(measure_point)
    model_parameters = ("sizes", "fitted_sizes")

    def points(self, config: MemoryConfig, machine: Machine) -> Sequence[MemoryPoint]:
        """Counting first, which is cheap and predicts; then blocks, peaks by growing size, checkpointing."""
        points = [*_counted(config, machine), *_blocks(config, machine), *_measured(config, machine)]
        points += _checkpointing(config, machine)
        return list({point.id: point for point in points}.values())

    def known(self, frame: pd.DataFrame) -> Iterable[Known]:
        step = select(frame, ["seconds", "peak_bytes"], table="checkpoint", segment=WITHOUT)
        yield step_times(step.assign(part="step"), "AdamW", "checkpoints")
        peaks = select(frame, ["peak_bytes", "phase"], table="peak", method="measured")
        phases = peaks["phase"].replace({"full_step": "step"})
        yield Known(PeakMemory, peaks.assign(part=phases), "phases", "peak_bytes")
        yield Known(PeakMemory, step.assign(part="step"), "checkpoints", "peak_bytes")

    def skip_reason(self, point: MemoryPoint, machine: Machine) -> str | None:
        return capacity.skip_reason(machine, point.device, needed_bytes(point), says="needs {} (predicted)")

    def series(self, point: MemoryPoint) -> tuple[Hashable, float]:
        return (point.kind, point.size, point.precision, point.phases), point.context_length


def needed_bytes(point: MemoryPoint) -> int:
    """Memory that a point takes of its device, by the formulas; 0 for counted ones, whose tensors take none.

    Of a model without formulas: its parameters, their gradients and AdamW's states, if they are known.
    """
    if point.kind == "counted":
        return 0
    if (shape := shape_of(point.size)) is None:
        return RANK_BYTES + STATES_BYTES * (parameters_of(point.size) or 0)
    if point.kind == "block":
        states = state_bytes(shape)["parameters"] // shape.n_layers
        saved = saved_by_layer(shape, point.batch, point.context_length, point.precision, device=point.device)
        return RANK_BYTES + round(HEADROOM * (2 * states + 2 * sum(saved.values())))
    if point.kind == "checkpoint":  # the gate holds two more sets of gradients
        peak = predicted(point, "full_step")["predicted_bytes"] + 2 * state_bytes(shape)["gradients"]
    else:
        peak = predicted(point, point.phases[0])["predicted_bytes"]
    return RANK_BYTES + round(HEADROOM * peak)


def segment_lengths(n_layers: int) -> tuple[int, ...]:
    """No checkpointing, then every length that divides the layers evenly."""
    return (WITHOUT, *(length for length in range(1, n_layers + 1) if n_layers % length == 0))


def _counted(config: MemoryConfig, machine: Machine) -> Iterator[MemoryPoint]:
    phases = tuple(phase for phase in PHASES if phase in config.phases)
    contexts = sorted({*config.contexts, *config.counted_contexts})
    shown = [(s, max(_contexts(s, config.contexts)), "float32") for s in (_largest(config), *own_names())]
    settings = [(s, c, p) for s in config.sizes for p in config.precisions for c in _contexts(s, contexts)]
    settings += [(config.big_size, context, "float32") for context in config.big_contexts]
    low = [precision for precision in config.precisions if precision != "float32"]
    settings += [(config.big_size, context, p) for p in low for context in config.big_low_precision_contexts]
    shown.append((config.big_size, max(config.big_contexts, default=0), "float32"))  # of these, timelines are drawn
    for setting in dict.fromkeys(settings):
        yield _point(config, machine, "counted", *setting, phases=phases, detail=setting in shown)
    for size in config.fitted_sizes:
        (context,) = _contexts(size, [config.fitted_context])
        if (setting := (size, context, "float32")) not in settings:
            yield _point(config, machine, "counted", *setting, phases=("full_step",))
    size, context = config.counted_checkpoint_size, config.counted_checkpoint_context
    for segment in segment_lengths(shape_named(size).n_layers):
        yield _point(
            config, machine, "counted", size, context, "float32", phases=("full_step",), checkpoint_segment=segment
        )


def _largest(config: MemoryConfig) -> str:
    """The last of the named sizes: what is looked at in detail."""
    named = [size for size in config.sizes if size not in own_names()]
    return named[-1]


def _contexts(size: str, contexts: Sequence[int]) -> list[int]:
    """From short to long; of a model that comes with its own batch, just that one."""
    return sorted(contexts) if shape_of(size) else [ITS_OWN]


def _blocks(config: MemoryConfig, machine: Machine) -> Iterator[MemoryPoint]:
    for precision in config.precisions:
        yield _point(config, machine, "block", _largest(config), max(config.contexts), precision)


def _measured(config: MemoryConfig, machine: Machine) -> Iterator[MemoryPoint]:
    device = machine.device(config.device)
    smallest = next((size for size in SIZES if size in config.sizes), None)
    for size in config.sizes:
        for precision in config.precisions:
            if device == "cpu" and precision != "float32" and size in SIZES and size != smallest:
                continue  # minutes, where there are no instructions for it
            for phase in config.phases:
                for context in _contexts(size, config.contexts):
                    yield _point(config, machine, "measured", size, context, precision, phases=(phase,), repeats=2)


def _checkpointing(config: MemoryConfig, machine: Machine) -> Iterator[MemoryPoint]:
    segments = segment_lengths(shape_named(config.checkpoint_size).n_layers)
    size, context = config.checkpoint_size, config.checkpoint_context
    yield _point(config, machine, "checkpoint", size, context, "float32", segments=segments, repeats=config.repeats)


def _point(
    config: MemoryConfig, machine: Machine, kind: str, size: str, context: int, precision: str, **others: Any
) -> MemoryPoint:
    device = machine.device(config.device)
    given = {"phases": (), "repeats": MemoryPoint.repeats} | others
    if context == ITS_OWN:
        given["batch"] = ITS_OWN
    return MemoryPoint.of(
        config,
        kind=kind,
        size=size,
        context_length=context,
        precision=precision,
        device=device,
        machine_bytes=machine.memory_of(device),
        **given,
    )


STUDY = MemoryStudy()
