"""The end-to-end lab: its parameters and the points it measures."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import Field

from labkit.costs.memory import STATES_BYTES, peak_bytes
from labkit.costs.transformer import n_parameters
from labkit.lab import capacity
from labkit.lab.agreement import Known, step_times
from labkit.lab.config import Count, Device, Repeats, TimedConfig, TimeoutSeconds, Warmup, one_of
from labkit.lab.own_models import in_model_order, model_names, parameters_of, shape_of
from labkit.lab.rows import select
from labkit.lab.study import Study
from labkit.machine import Machine
from labkit.nn.attention_implementations import no_compiler_reason
from labkit.studies.end_to_end import tables
from labkit.studies.end_to_end.findings import QUESTIONS
from labkit.studies.end_to_end.worker import COMPILED_PHASES, PHASES_OF_MODE, EndToEndPoint, measure_point

Size = Annotated[str, one_of(model_names)]
Precision = Literal["float32", "bfloat16"]
CompiledPhase = Annotated[str, one_of(lambda: COMPILED_PHASES)]


class EndToEndConfig(TimedConfig):
    """What a reader may set."""

    sizes: Annotated[list[Size], Field(min_length=1)]
    """Models whose phases are timed."""
    warmup_sizes: list[Size]
    """Models whose first steps are timed, in new processes."""
    compile_sizes: list[Size]
    """Models that are compiled."""
    compiled_phases: Annotated[list[CompiledPhase], Field(min_length=1)] = list(COMPILED_PHASES)
    """What is timed of these, compiled against eager. Inference is compiled for itself, which takes seconds more."""
    precisions: Annotated[list[Precision], Field(min_length=1)] = ["float32"]
    mode: Annotated[str, one_of(lambda: PHASES_OF_MODE)] = "step"
    """How far a step goes."""
    batch: Count = 4
    context_length: Count = 128
    warmup: Warmup = 5
    repeats: Repeats = 15
    trials: Repeats = 6
    """New processes whose first steps are timed. Below six there is no interval, and so no verdict."""
    device: Device = "auto"
    timeout_s: TimeoutSeconds = 600.0


class EndToEndStudy(Study):
    """Forward, backward and optimizer step of the Transformer; the first steps; eager against compiled."""

    name = "end_to_end"
    title = "A training step, end to end"
    summary = "What a training step costs, part by part; what warm-up and torch.compile change."
    questions = QUESTIONS
    profiles = {
        "smoke": EndToEndConfig(
            sizes=["nano"], warmup_sizes=["nano"], compile_sizes=[], warmup=1, repeats=6, trials=2, context_length=32
        ),
        "quick": EndToEndConfig(
            sizes=["nano", "mini", "small"],
            warmup_sizes=["nano"],
            compile_sizes=["nano"],
            compiled_phases=["step"],
            batch=2,
            context_length=64,
            warmup=1,
            rounds_s=3.0,
        ),
        "standard": EndToEndConfig(
            sizes=["nano", "mini", "small", "medium", "large"],
            warmup_sizes=["nano", "mini", "small"],
            compile_sizes=["nano", "mini", "small"],
            precisions=["float32", "bfloat16"],
        ),
        "paper": EndToEndConfig(
            sizes=["small", "medium", "large", "xl", "2.7B", "10B"],
            warmup_sizes=["small", "medium", "large"],
            compile_sizes=["small", "medium", "large", "xl"],
            precisions=["float32", "bfloat16"],
            ratio_within=0.0,
            rounds_s=600.0,
            timeout_s=1800.0,
        ),
    }
    worker = staticmethod(measure_point)
    models_into = ("sizes", "compile_sizes")
    predicted = tables.PREDICTED

    def points(self, config: EndToEndConfig, machine: Machine) -> Sequence[EndToEndPoint]:
        """The phases, the first steps, and compilation."""
        points = [
            *_by_size(config, machine, "phases", config.sizes, mode=config.mode),
            *_first_steps(config, machine),
            *_by_size(config, machine, "compile", config.compile_sizes, compiled_phases=tuple(config.compiled_phases)),
        ]
        return list({point.id: point for point in points}.values())

    def known(self, frame: pd.DataFrame) -> Iterable[Known]:
        phases = select(frame, ["seconds", "phase"], sweep="phases", mode="step")
        yield step_times(phases.assign(part=phases["phase"]), "AdamW", "phases")
        later = tables.settled_steps(frame)
        yield step_times(later.assign(part=later["phase"]), "AdamW", "new processes")
        eager = select(frame, ["seconds", "phase"], sweep="compile", implementation="eager")
        yield step_times(eager.assign(part=eager["phase"]), "AdamW", "beside compiled")

    def skip_reason(self, point: EndToEndPoint, machine: Machine) -> str | None:
        if reason := machine.no_device_reason(point.device):
            return reason
        if point.sweep == "compile" and (reason := no_compiler_reason(point.device)):
            return reason
        copies = 2 if point.sweep == "compile" else 1
        return capacity.skip_reason(machine, point.device, copies * _needed_bytes(point))

    def series(self, point: EndToEndPoint) -> tuple[Hashable, float] | None:
        shape = shape_of(point.size)  # what another model of a reader's needs, its parameters alone do not say
        return ((point.sweep, point.precision, point.device), n_parameters(shape)) if shape else None


def _needed_bytes(point: EndToEndPoint) -> int:
    """By the formulas; of a model without them, what its states take, if known."""
    if (shape := shape_of(point.size)) is None:
        return STATES_BYTES * (parameters_of(point.size) or 0)
    phase, about = "full_step" if point.mode == "step" else "forward", (shape, point.batch, point.context_length)
    return peak_bytes(*about, phase=phase, precision=point.precision, device=point.device)


def _by_size(
    config: EndToEndConfig, machine: Machine, sweep: str, sizes: Sequence[Size], **given: Any
) -> Iterator[EndToEndPoint]:
    for precision in config.precisions:
        for size in in_model_order(sizes):
            yield _point(config, machine, sweep, size=size, precision=precision, **given)


def _first_steps(config: EndToEndConfig, machine: Machine) -> Iterator[EndToEndPoint]:
    """As many steps as the published protocol takes, warm-up included, from the first one of a process on."""
    steps = config.warmup + config.repeats
    for size in config.warmup_sizes:
        for trial in range(config.trials):
            yield _point(config, machine, "warmup", size=size, trial=trial, fresh_ranks=True, warmup=0, repeats=steps)


def _point(config: EndToEndConfig, machine: Machine, sweep: str, **given: Any) -> EndToEndPoint:
    device = machine.device(config.device)
    peak = machine.gpus[0].dense_bf16_peak_tflops if device == "cuda" and machine.gpus else None
    fields = {"mode": "step", "compiled_phases": (), "device": device, "peak_flops_per_s": peak and peak * 1e12} | given
    return EndToEndPoint.of(config, sweep=sweep, **fields)


STUDY = EndToEndStudy()
