"""The lab of this machine: the recommendations of all other labs in one configuration, against the default."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Annotated, Literal

import pandas as pd
from pydantic import Field

from labkit.costs.memory import peak_bytes
from labkit.costs.transformer import SIZES, n_parameters
from labkit.lab import capacity
from labkit.lab.advise.machine import (
    DEFAULT,
    OF_RANKS,
    Configuration,
    Recommendation,
    compute_share,
    configuration,
    expected_ratio,
    newest_runs,
    recommendations,
)
from labkit.lab.agreement import Known, step_times
from labkit.lab.config import Count, Device, TimedConfig, TimeoutSeconds
from labkit.lab.rows import select
from labkit.lab.study import Study
from labkit.machine import Machine
from labkit.parallel.data_parallel.implementations import OVER_SHARED_MEMORY
from labkit.parallel.ranks.torchrun import ranks_here
from labkit.studies.this_machine import findings, worker
from labkit.studies.this_machine.worker import ThisMachinePoint, measure_point

RANK_BYTES = 200 * 2**20  # a rank's own resident memory, torch included
NOTHING = "the newest runs of the other labs here recommend nothing but the default: measure them first"
Model = Literal["nano", "mini", "small", "medium", "large"]
Choice = Literal["as recommended"]


class ThisMachineConfig(TimedConfig):
    """What a reader may set. "as recommended": by the newest runs of the other labs on this machine."""

    models: Annotated[list[Model], Field(min_length=1)]
    world_sizes: Annotated[list[Count], Field(min_length=1)] = [2]
    precision: Literal["as recommended", "float32", "bfloat16", "float16"] = "as recommended"
    attention: Literal["as recommended", "explicit", "tiled", "compiled", "flash", "sdpa"] = "as recommended"
    compiled: Choice | bool = "as recommended"
    wrapper: Literal[
        "as recommended", "torch", "naive", "flat", "overlapped", "bucketed", "bucketed_shared", "naive_shared"
    ] = "as recommended"
    bucket_mb: Choice | Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)] | None = "as recommended"
    batch: Count = 2
    context_length: Count = 128
    device: Device = "auto"
    timeout_s: TimeoutSeconds = 900.0


class ThisMachineStudy(Study):
    """The joined configuration against the default, in turns."""

    name = "this_machine"
    title = "Training on this machine"
    summary = "All recommendations of the other labs joined into one configuration: what it gains over the default."
    questions = findings.QUESTIONS
    profiles = {
        "smoke": ThisMachineConfig(
            models=["nano"], precision="bfloat16", compiled=False, batch=1, context_length=32, warmup=1, repeats=6
        ),
        "quick": ThisMachineConfig(models=["mini"], context_length=64, warmup=1, rounds_s=5.0),
        "standard": ThisMachineConfig(models=["mini", "small", "medium"], world_sizes=[1, 2]),
        "paper": ThisMachineConfig(
            models=["small", "medium", "large"],
            world_sizes=[1, 2],
            batch=8,
            context_length=512,
            warmup=5,
            repeats=20,
            ratio_within=0.0,
            rounds_s=None,
        ),
    }
    worker = staticmethod(measure_point)

    def points(self, config: ThisMachineConfig, machine: Machine) -> Sequence[ThisMachinePoint]:
        """One for each model and number of ranks; what is recommended is looked up now, and recorded with the point."""
        runs = newest_runs(machine)
        return [
            _point(config, machine, world_size, model, runs)
            for world_size in sorted(set(config.world_sizes))
            for model in config.models
        ]

    def known(self, frame: pd.DataFrame) -> Iterable[Known]:
        rows = select(frame, ["seconds", "model"], implementation=worker.DEFAULT, world_size=1)
        yield step_times(rows.assign(part="step", size=rows["model"], precision="float32"), "AdamW")

    def skip_reason(self, point: ThisMachinePoint, machine: Machine) -> str | None:
        if _joined(point) == DEFAULT:
            return NOTHING
        step = peak_bytes(SIZES[point.model], point.batch, point.context_length, phase="full_step")
        ranks = ranks_here(point.world_size)
        return capacity.skip_reason(machine, point.device, ranks * (RANK_BYTES + 2 * step), ranks=ranks)

    def series(self, point: ThisMachinePoint) -> tuple[Hashable, float]:
        return (point.world_size,), n_parameters(SIZES[point.model])


def _joined(point: ThisMachinePoint) -> Configuration:
    """What is joined in a point; on one rank nothing wraps a model."""
    if point.world_size == 1:
        return Configuration(point.precision, point.attention, point.compiled)
    return Configuration(point.precision, point.attention, point.compiled, point.wrapper, point.bucket_mb)


def _point(
    config: ThisMachineConfig, machine: Machine, world_size: int, model: str, runs: findings.Runs
) -> ThisMachinePoint:
    device = machine.device(config.device)
    found = [
        one
        for one in recommendations(model, config.context_length, runs)
        if getattr(config, one.topic) == "as recommended" and (device == "cpu" or one.value not in OVER_SHARED_MEMORY)
    ]
    given = {name: value for name in findings.FIELDS if (value := getattr(config, name)) != "as recommended"}
    recommended = configuration(found)
    return ThisMachinePoint.of(
        config,
        world_size=world_size,
        backend=machine.backend(device, ranks_here(world_size)) if world_size > 1 else None,
        model=model,
        device=device,
        expected_ratio=_expected_ratio(found, world_size, model, runs),
        **{name: given.get(name, getattr(recommended, name)) for name in findings.FIELDS},
    )


def _expected_ratio(found: Sequence[Recommendation], world_size: int, model: str, runs: findings.Runs) -> float:
    """On one rank there is no communication, and no wrapper to save any."""
    if world_size > 1:
        return expected_ratio(found, compute_share=compute_share(model, runs))
    return expected_ratio([one for one in found if one.topic not in OF_RANKS])


STUDY = ThisMachineStudy()
