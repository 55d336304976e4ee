"""The scaling lab: its parameters and the tables of predictions it makes."""

from collections.abc import Sequence
from typing import Annotated

from pydantic import AfterValidator, Field

from labkit.lab.config import Count, LabConfig, TimeoutSeconds
from labkit.lab.study import Study
from labkit.machine import Machine
from labkit.scaling.hardware import find_hardware
from labkit.scaling.named_models import find_model
from labkit.studies.scaling.findings import QUESTIONS
from labkit.studies.scaling.worker import ScalingPoint, measure_point

MOST_GPUS = 16384
TABLES = ("published", "margins", "families", "students", "here", "trends")


def _known(find: object) -> AfterValidator:
    """A name that `find` knows: its ValueError says which there are."""

    def check(name: str) -> str:
        find(name)  # type: ignore[operator]
        return name

    return AfterValidator(check)


class ScalingConfig(LabConfig):
    """What a reader may set: the trainings to take apart. The published rows are always all of them."""

    models: Annotated[list[Annotated[str, _known(find_model)]], Field(min_length=1)] = ["llama-3-8b"]
    gpu: Annotated[str, _known(find_hardware)] = "h100"
    gpus: Annotated[list[Annotated[int, Field(ge=1, le=MOST_GPUS)]], Field(min_length=1)] = [
        *(8, 64, 512, 2048, 8192, 16384),
    ]
    sequence: Annotated[int, Field(ge=1, le=2**20)] = 8192
    tokens_per_step: Count = 2**24
    timeout_s: TimeoutSeconds = 120.0


class ScalingStudy(Study):
    """The predictor of many GPUs beside all published rows, and a training that it takes apart."""

    name = "scaling"
    title = "From one machine to many"
    summary = "What a training takes on 8 to 16,384 GPUs, where its time goes, and how wrong that prediction is."
    questions = QUESTIONS
    profiles = {
        "smoke": ScalingConfig(gpus=[8, 64]),
        "quick": ScalingConfig(),
        "standard": ScalingConfig(models=["llama-3-8b", "llama-3-70b"]),
        "paper": ScalingConfig(models=["llama-3-8b", "llama-3-70b", "llama-3-405b"]),
    }
    worker = staticmethod(measure_point)

    def points(self, config: ScalingConfig, machine: Machine) -> Sequence[ScalingPoint]:
        """The tables of published rows, then each training on each number of GPUs. Nothing here is measured."""
        tables = [ScalingPoint(sweep=sweep, timeout_s=config.timeout_s) for sweep in TABLES]
        trainings = [
            ScalingPoint.of(config, sweep="training", model=model, gpus=gpus)
            for model in config.models
            for gpus in sorted(set(config.gpus))
        ]
        return [*tables, *trainings]


STUDY = ScalingStudy()
