"""The kernels lab: its parameters and the points it measures."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Annotated

import pandas as pd
from pydantic import Field

from labkit.costs.memory import STATES_BYTES, peak_bytes
from labkit.costs.transformer import n_parameters
from labkit.lab import capacity
from labkit.lab.agreement import Known, step_times
from labkit.lab.config import Device, LabConfig, Seed, TimeoutSeconds, one_of
from labkit.lab.own_models import in_model_order, model_names, parameters_of, shape_of
from labkit.lab.rows import select
from labkit.lab.study import Study
from labkit.machine import Machine
from labkit.studies.kernels.findings import QUESTIONS
from labkit.studies.kernels.tables import PREDICTED
from labkit.studies.kernels.worker import INFERENCE, STEP, KernelsPoint, measure_point

HEADROOM = 1.1  # over the formulas, which leave out what comes while something else goes

Size = Annotated[str, one_of(model_names)]


class KernelsConfig(LabConfig):
    """What a reader may set."""

    device: Device = "auto"
    """auto: the GPU if there is one."""
    models: Annotated[list[Size], Field(min_length=1)]
    batch: Annotated[int, Field(ge=1, le=2**16)] = 4
    context_length: Annotated[int, Field(ge=1, le=2**20)] = 128
    warmup: Annotated[int, Field(ge=0, le=1000)] = 2
    passes: Annotated[int, Field(ge=1, le=1000)] = 12
    """Profiled passes of each mode. Below six there is no interval, and so no verdict."""
    seed: Seed = 0
    timeout_s: TimeoutSeconds = 600.0


class KernelsStudy(Study):
    """Where the time of the Transformer goes, by operator or kernel."""

    name = "kernels"
    title = "Kernels"
    summary = "Where the time of a forward pass and of a training step goes, by operator or GPU kernel."
    questions = QUESTIONS
    profiles = {
        "smoke": KernelsConfig(models=["nano"], batch=2, context_length=32, warmup=1, passes=6),
        "quick": KernelsConfig(models=["nano", "mini"], batch=2, context_length=64),
        "standard": KernelsConfig(models=["nano", "mini", "small", "medium"]),
        "paper": KernelsConfig(models=["small", "medium", "large", "xl", "2.7B"], warmup=5),
    }
    worker = staticmethod(measure_point)
    model_parameters = ("models",)
    predicted = PREDICTED

    def points(self, config: KernelsConfig, machine: Machine) -> Sequence[KernelsPoint]:
        """From small models to large."""
        device = machine.device(config.device)
        models = in_model_order(config.models)
        return [KernelsPoint.of(config, device=device, model=model, keep_trace=model == models[0]) for model in models]

    def known(self, frame: pd.DataFrame) -> Iterable[Known]:
        for mode, part in ((INFERENCE, "inference"), (STEP, "step")):
            rows = select(frame, ["clock_s", "model"], record="clock", mode=mode)
            rows = rows.assign(part=part, seconds=rows["clock_s"], size=rows["model"], precision="float32")
            yield step_times(rows, "AdamW")

    def skip_reason(self, point: KernelsPoint, machine: Machine) -> str | None:
        return capacity.skip_reason(machine, point.device, needed_bytes(point))

    def series(self, point: KernelsPoint) -> tuple[Hashable, float] | None:
        shape = shape_of(point.model)  # what another model of a reader's needs, its parameters alone do not say
        return (point.device, n_parameters(shape)) if shape else None


def needed_bytes(point: KernelsPoint) -> int:
    """Memory of a full step, the larger mode, by the formulas; of a model without them, its states, if known."""
    if (shape := shape_of(point.model)) is None:
        return STATES_BYTES * (parameters_of(point.model) or 0)
    peak = peak_bytes(shape, point.batch, point.context_length, device=point.device)
    return round(HEADROOM * peak)


STUDY = KernelsStudy()
