"""The SyncBatchNorm lab: its parameters and the points it measures."""

from collections.abc import Hashable, Sequence
from typing import Annotated, Any

from pydantic import Field

from labkit.lab import capacity
from labkit.lab.config import Count, Device, TimedConfig, TimeoutSeconds, one_of
from labkit.lab.study import Study
from labkit.machine import Machine
from labkit.parallel.ranks.torchrun import ranks_here
from labkit.studies.sync_batchnorm.alternatives import ALTERNATIVES, BARE, LAYERS, plug_in
from labkit.studies.sync_batchnorm.findings import QUESTIONS
from labkit.studies.sync_batchnorm.worker import SyncBatchNormPoint, measure_point

RANK_BYTES = 200 * 2**20  # a rank's own resident memory, torch included
# Of the whole batch in float32, on a rank, beside those that wait for their backward: every alternative's input and
# gradient, and the exact results in float64.
COPIES = 30


class SyncBatchNormConfig(TimedConfig):
    """What a reader may set."""

    world_sizes: Annotated[list[Annotated[int, Field(ge=2, le=1024)]], Field(min_length=1)] = [2, 4]
    batches: Annotated[list[Annotated[int, Field(ge=4, lt=2**31)]], Field(min_length=1)] = [32, 64]
    """Rows of all ranks together."""
    features: Annotated[list[Count], Field(min_length=1)] = [128, 256, 512, 1024]
    alternatives: list[Annotated[str, one_of(lambda: (*LAYERS, *BARE))]] = list(ALTERNATIVES)
    calls: Annotated[int, Field(ge=1, le=10_000)] = 5
    """Of which one sample is the mean."""
    device: Device = "auto"
    timeout_s: TimeoutSeconds = 300.0


class SyncBatchNormStudy(Study):
    """Layers synchronized and not, and their collectives alone, in turns."""

    name = "sync_batchnorm"
    title = "SyncBatchNorm"
    summary = "What normalizing by the batch of all ranks costs a layer, and where that goes."
    questions = QUESTIONS
    profiles = {
        "smoke": SyncBatchNormConfig(
            world_sizes=[2],
            batches=[32, 64],
            features=[128, 1024],
            calls=2,
            warmup=1,
            repeats=6,
        ),
        "quick": SyncBatchNormConfig(calls=2, repeats=60, warmup=1, rounds_s=0.8),
        "standard": SyncBatchNormConfig(repeats=200),
        "paper": SyncBatchNormConfig(
            calls=10,
            warmup=10,
            repeats=1000,
            ratio_within=0.0,
            rounds_s=None,
            timeout_s=3600.0,
        ),
    }
    worker = staticmethod(measure_point)
    plugs_into = "alternatives"
    plug_in = staticmethod(plug_in)

    def points(self, config: SyncBatchNormConfig, machine: Machine) -> Sequence[SyncBatchNormPoint]:
        """By world size one point per batch and number of features."""
        device = machine.device(config.device)
        points = []
        for world_size in sorted(set(config.world_sizes)):
            here: dict[str, Any] = {"world_size": world_size, "device": device}
            here["backend"] = machine.backend(device, ranks_here(world_size))
            for batch in sorted(set(config.batches)):
                for features in sorted(set(config.features)):
                    points.append(SyncBatchNormPoint.of(config, batch=batch, features=features, **here))
        return points

    def skip_reason(self, point: SyncBatchNormPoint, machine: Machine) -> str | None:
        if reason := machine.no_device_reason(point.device):
            return reason
        if point.batch < 2 * point.world_size:
            return "plain BatchNorm needs two rows a rank, and there are fewer"
        ranks = ranks_here(point.world_size)
        return capacity.skip_reason(machine, point.device, ranks * (RANK_BYTES + _rank_bytes(point)), ranks=ranks)

    def series(self, point: SyncBatchNormPoint) -> tuple[Hashable, float]:
        return point.world_size, point.batch * point.features


def _rank_bytes(point: SyncBatchNormPoint) -> int:
    """What a rank allocates: inputs, gradients, exact results, and the outputs that wait for their backward."""
    return (COPIES + 2 * point.calls) * 4 * point.batch * point.features


STUDY = SyncBatchNormStudy()
