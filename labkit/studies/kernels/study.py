"""The kernels lab: its parameters and the points it measures."""

from collections.abc import Hashable, Sequence
from typing import Annotated, Literal

import pandas as pd
from pydantic import Field

from labkit.costs.memory import peak_bytes
from labkit.costs.transformer import n_parameters
from labkit.lab import capacity
from labkit.lab.answers import Answer, check_complete
from labkit.lab.config import Device, LabConfig, Seed, TimeoutSeconds
from labkit.lab.study import Study
from labkit.machine import Machine
from labkit.nn.transformer import shape_named
from labkit.studies.kernels import answers as answering
from labkit.studies.kernels.worker import KernelsPoint, measure_point

HEADROOM = 1.1  # over the formulas, which leave out what comes while something else goes

Size = Literal["nano", "mini", "small", "medium", "large", "xl", "2.7B", "10B"]


class KernelsConfig(LabConfig):
    """What a reader may set."""

    device: Device = "auto"
    """auto: the GPU if there is one."""
    models: Annotated[list[Size], Field(min_length=1)]
    batch: Annotated[int, Field(ge=1, le=2**16)] = 4
    context_length: Annotated[int, Field(ge=1, le=2**20)] = 128
    warmup: Annotated[int, Field(ge=0, le=1000)] = 2
    passes: Annotated[int, Field(ge=1, le=1000)] = 8
    """Profiled passes of each mode. Below six there is no interval, and so no verdict."""
    seed: Seed = 0
    timeout_s: TimeoutSeconds = 600.0


class KernelsStudy(Study):
    """Where the time of the Transformer goes, by operator or kernel."""

    name = "kernels"
    title = "Kernels"
    summary = "Where the time of a forward pass and of a training step goes, by operator or GPU kernel."
    questions = answering.QUESTIONS
    profiles = {
        "smoke": KernelsConfig(models=["nano"], batch=2, context_length=32, warmup=1, passes=6),
        "quick": KernelsConfig(models=["nano", "mini"], context_length=64),
        "standard": KernelsConfig(models=["nano", "mini", "small", "medium"]),
        "paper": KernelsConfig(models=["small", "medium", "large", "xl", "2.7B"], warmup=5),
    }
    worker = staticmethod(measure_point)

    def points(self, config: KernelsConfig, machine: Machine) -> Sequence[KernelsPoint]:
        """The rate of matrix products, for the prediction; then models from small to large."""
        device = machine.device(config.device)
        ordered = sorted(dict.fromkeys(config.models), key=lambda name: n_parameters(shape_named(name)))
        rates = KernelsPoint(
            part="rates",
            device=device,
            warmup=config.warmup,
            passes=config.passes,
            seed=config.seed,
            timeout_s=config.timeout_s,
        )
        return [rates, *(_profile_point(config, device, model, model == ordered[0]) for model in ordered)]

    def skip_reason(self, point: KernelsPoint, machine: Machine) -> str | None:
        return capacity.skip_reason(machine, point.device, needed_bytes(point) if point.part == "profile" else 0)

    def series(self, point: KernelsPoint) -> tuple[Hashable, float] | None:
        return (point.device, n_parameters(shape_named(point.model))) if point.part == "profile" else None

    def answers(self, frame: pd.DataFrame, coverage: pd.DataFrame) -> Sequence[Answer]:
        return check_complete(self.questions, answering.answer_all(frame, coverage))


def _profile_point(config: KernelsConfig, device: str, model: str, keep_trace: bool) -> KernelsPoint:
    return KernelsPoint(
        part="profile",
        device=device,
        model=model,
        batch=config.batch,
        context_length=config.context_length,
        warmup=config.warmup,
        passes=config.passes,
        keep_trace=keep_trace,
        seed=config.seed,
        timeout_s=config.timeout_s,
    )


def needed_bytes(point: KernelsPoint) -> int:
    """Memory of a full step, which needs more than inference, by the formulas."""
    peak = peak_bytes(shape_named(point.model), point.batch, point.context_length, device=point.device)
    return round(HEADROOM * peak)


STUDY = KernelsStudy()
