"""The sharding lab: its parameters and the points it measures."""

from collections.abc import Hashable, Iterator, Sequence
from itertools import product
from typing import Annotated, Any

from pydantic import Field

from labkit.costs.transformer import SIZES
from labkit.lab import capacity
from labkit.lab.config import Count, Device, TimedConfig, TimeoutSeconds, Warmup, one_of
from labkit.lab.own_models import model_names, parameters_of
from labkit.lab.study import Study
from labkit.machine import Machine
from labkit.parallel.ranks.torchrun import ranks_here
from labkit.parallel.sharding.implementations import IMPLEMENTATIONS, TORCHS, register
from labkit.parallel.transport import AUTO, POINT_TO_POINT, TRANSPORTS
from labkit.studies.sharding.findings import QUESTIONS
from labkit.studies.sharding.predicting import PREDICTED
from labkit.studies.sharding.training import OPTIMIZERS, ShardingPoint
from labkit.studies.sharding.worker import measure_point

RANK_BYTES = 300 * 2**20  # a rank's own resident memory, torch included
COPIES = 5  # of the parameters, for each way: parameters, gradients, two states, what is on its way

Size = Annotated[str, one_of(model_names)]
Way = Annotated[str, one_of(lambda: IMPLEMENTATIONS)]
OptimizerName = Annotated[str, one_of(lambda: OPTIMIZERS)]
TransportName = Annotated[str, one_of(lambda: TRANSPORTS)]
WorldSizes = Annotated[list[Annotated[int, Field(ge=2, le=1024)]], Field(min_length=1)]


class ShardingConfig(TimedConfig):
    """What a reader may set."""

    sizes: Annotated[list[Size], Field(min_length=1)]
    """Measured with all ways."""
    swept_sizes: list[Annotated[str, one_of(lambda: SIZES)]]
    """With and without a sharded optimizer, by both transports: each of `swept_optimizers` with the first of
    `swept_batches`, and each of these with the first optimizer."""
    swept_batches: Annotated[list[Count], Field(min_length=1)]
    swept_optimizers: list[OptimizerName] = list(OPTIMIZERS)
    """One whose step is dear, one whose step is cheap: what sharding saves, and so whether it pays, depends on that."""
    ways: Annotated[list[Way], Field(min_length=1)] = list(IMPLEMENTATIONS)
    transports: Annotated[list[TransportName], Field(min_length=1)] = list(reversed(TRANSPORTS))
    world_sizes: WorldSizes = [2]
    memory_sizes: list[Size]
    memory_world_sizes: WorldSizes = [2, 4]
    batch: Count = 1
    context_length: Count = 32
    memory_batch: Count = 2
    warmup: Warmup = 0
    device: Device = "auto"
    timeout_s: TimeoutSeconds = 600.0


class ShardingStudy(Study):
    """What each stage of ZeRO saves, sends and costs."""

    name = "sharding"
    title = "Sharding"
    summary = "What every rank may hold a share of instead of a copy (ZeRO, FSDP): memory saved, bytes sent, time paid."
    questions = QUESTIONS
    profiles = {
        "smoke": ShardingConfig(
            sizes=["nano"],
            swept_sizes=["nano"],
            swept_batches=[1],
            transports=["shared"],
            memory_sizes=["nano"],
            memory_world_sizes=[2],
            memory_batch=1,
            context_length=8,
            repeats=3,
        ),
        "quick": ShardingConfig(
            sizes=["mini"], swept_sizes=["nano"], swept_batches=[1, 4], memory_sizes=["mini"], rounds_s=9.0
        ),
        "standard": ShardingConfig(
            sizes=["mini"],
            swept_sizes=["nano", "mini"],
            swept_batches=[1, 4, 16],
            world_sizes=[2, 4],
            memory_sizes=["mini", "small"],
            context_length=64,
            warmup=1,
            repeats=15,
        ),
        "paper": ShardingConfig(
            sizes=["xl"],
            swept_sizes=["small", "medium", "large"],
            swept_batches=[2, 8],
            memory_sizes=["xl"],
            memory_world_sizes=[2],
            batch=2,
            context_length=512,
            memory_batch=2,
            warmup=5,
            repeats=10,
            ratio_within=0.0,
            rounds_s=None,
            timeout_s=3600.0,
        ),
    }
    worker = staticmethod(measure_point)
    predicted = PREDICTED
    plugin_parameter = "ways"
    register = staticmethod(register)
    model_parameters = ("sizes", "memory_sizes")

    def points(self, config: ShardingConfig, machine: Machine) -> Sequence[ShardingPoint]:
        """By world size: all ways in turns, the sweep, then memory, after which freeing memory costs time."""
        worlds = sorted({*config.world_sizes, *config.memory_world_sizes})
        points = [point for world_size in worlds for point in _points_of_world(config, world_size, machine)]
        return list({point.id: point for point in points}.values())

    def skip_reason(self, point: ShardingPoint, machine: Machine) -> str | None:
        ranks, ways = ranks_here(point.world_size), 1 if point.kind == "memory" else len(point.ways) + 2
        needed = ranks * (RANK_BYTES + ways * COPIES * 4 * (parameters_of(point.size) or 0))
        return capacity.skip_reason(machine, point.device, needed, ranks=ranks, says=f"{ways} copies need {{}}")

    def series(self, point: ShardingPoint) -> tuple[Hashable, float] | None:
        setting = (point.kind, point.world_size, point.transport, point.optimizer, point.ways)
        parameters = parameters_of(point.size)
        return (setting, parameters) if parameters else None


def _points_of_world(config: ShardingConfig, world_size: int, machine: Machine) -> Iterator[ShardingPoint]:
    device = machine.device(config.device)
    here: dict[str, Any] = {"world_size": world_size, "device": device, "machine_bytes": machine.memory_of(device)}
    here["backend"] = machine.backend(device, ranks_here(world_size))
    ways = tuple(way for way in IMPLEMENTATIONS if way in config.ways)
    own = tuple(way for way in ways if way not in TORCHS)
    pair = tuple(way for way in ("ddp", "zero1") if way in ways)
    # what torch has, too: over its own transport, what is left is the implementation
    both = tuple(way for way in ways if way not in ("zero2", "torch_ddp"))
    transports = config.transports if device == "cpu" else [AUTO]
    for number, transport in enumerate(transports if world_size in config.world_sizes else []):
        compared = {"kind": "time", "transport": transport, "ways": ways if number == 0 else both}
        for size in config.sizes:
            yield ShardingPoint.of(config, size=size, **compared, **here)
        for size, (batch, optimizer) in product(config.swept_sizes, _swept(config)):
            of = {"size": size, "batch": batch, "optimizer": optimizer, "ways": pair}
            if size not in config.sizes or (batch, optimizer) != (config.batch, ShardingPoint.optimizer):
                yield ShardingPoint.of(config, **compared | of, **here)
    for size in config.memory_sizes if world_size in config.memory_world_sizes else []:
        weighed = own if world_size > 2 else tuple(way for way in ways if way != "torch_ddp")  # holds what DDP does
        # what several ranks map would count on each of them
        of = {"transport": POINT_TO_POINT if device == "cpu" else AUTO, "batch": config.memory_batch}
        of |= {"size": size, "ways": weighed}
        yield ShardingPoint.of(config, kind="memory", **of, **here)
    if world_size in config.world_sizes and device == "cpu":  # where there is a GPU, they are all of this kind
        nccl = here | {"device": "cuda", "backend": "nccl", "transport": AUTO}
        for size in config.sizes:
            yield ShardingPoint.of(config, kind="time", size=size, ways=ways, **nccl)


def _swept(config: ShardingConfig) -> list[tuple[int, str]]:
    """Every optimizer with the first batch, and every batch with the first optimizer."""
    optimizers, (first, *others) = config.swept_optimizers, config.swept_batches
    return [*((first, name) for name in optimizers), *((batch, name) for name in optimizers[:1] for batch in others)]


STUDY = ShardingStudy()
