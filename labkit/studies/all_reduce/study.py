"""The all-reduce lab: its parameters, the points it measures, and what it expects of them."""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import Field

from labkit.lab import capacity
from labkit.lab.agreement import AllReduceTime, Known
from labkit.lab.config import TimedConfig, TimeoutSeconds, one_of
from labkit.lab.point import repeat_in_sessions
from labkit.lab.rows import select
from labkit.lab.study import Study
from labkit.lab.units import format_bytes
from labkit.machine import Machine
from labkit.parallel.collectives import ALGORITHMS
from labkit.parallel.ranks.torchrun import is_job_rank, ranks_here
from labkit.studies.all_reduce.findings import QUESTIONS
from labkit.studies.all_reduce.tables import PREDICTED
from labkit.studies.all_reduce.transports import CHOSEN, FLOOR, MESSAGES, ROUTES, SHARED_MEMORY, TORCH, alternative
from labkit.studies.all_reduce.worker import AllReducePoint, measure_point, plug_in, torch_dtype

KIB, MIB, GIB = 2**10, 2**20, 2**30
RANK_BYTES = 160 * MIB  # a rank's own resident memory, torch included
COPIES = 5  # of the tensor on each rank: base, input, two or three that are reduced, an algorithm's scratch

# One-shot sends n (p-1) bytes a rank, p/2 times as many as a ring: it is measured where it is asked for.
USUAL = [name for name in (*ALGORITHMS, CHOSEN) if name != "one_shot"]
Algorithm = Annotated[str, one_of(lambda: (TORCH, *ALGORITHMS, CHOSEN))]
OwnAlgorithm = Annotated[str, one_of(lambda: (*ALGORITHMS, CHOSEN))]
PositiveInt = Annotated[int, Field(ge=1, lt=2**48)]
Ranks = Annotated[int, Field(ge=1, le=1024)]


class AllReduceConfig(TimedConfig):
    """What a reader may set. Sizes are of the whole tensor, in bytes."""

    world_sizes: Annotated[list[Ranks], Field(min_length=1)] = [2, 4, 6]
    """Ranks of the sweep over sizes."""
    sizes_bytes: Annotated[list[PositiveInt], Field(min_length=1)]
    many_world_sizes: list[Ranks] = [1, 2, 4, 8, 16, 32]
    """Ranks of the sweep over ranks, at few sizes."""
    many_elements: list[PositiveInt]
    algorithms: Annotated[list[Algorithm], Field(min_length=1)] = [TORCH, *USUAL]
    backends: Annotated[list[Literal["gloo", "nccl"]], Field(min_length=1)] = ["gloo", "nccl"]
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    scheduling_sizes_bytes: list[PositiveInt] = [4 * KIB, 64 * KIB]
    """Sizes at which the system's default scheduling policy is compared with SCHED_BATCH."""
    transport_world_sizes: list[Ranks] = [2, 4]
    """Ranks of the comparison of transports, on the CPU."""
    transport_sizes_bytes: list[PositiveInt] = [4 * KIB, 64 * KIB, MIB, 10 * MIB, 100 * MIB]
    transport_algorithms: list[OwnAlgorithm] = [CHOSEN]
    """Each of them is measured over messages, over shared memory, and on a tensor that lies there."""
    phase_world_sizes: list[Ranks] = [2]
    """Ranks with which reduce-scatter and all-gather are measured on their own, over each transport, on the CPU."""
    phase_sizes_bytes: list[PositiveInt] = [MIB, 10 * MIB, 100 * MIB]
    twice_up_to_bytes: Annotated[int, Field(ge=0)] = MIB
    """All-reduces that are not longer are measured once more by other ranks: of them ranks' luck decides most."""
    most_bytes: Annotated[int, Field(ge=0)] = 0
    """Larger points, all ranks' tensors together, are left out; 0: only what does not fit into memory is."""
    timeout_s: TimeoutSeconds = 120.0


class AllReduceStudy(Study):
    """How long an all-reduce takes, by size, ranks, backend and algorithm."""

    name = "all_reduce"
    title = "All-reduce"
    summary = "What averaging a tensor over ranks costs, and which algorithm does it best."
    questions = QUESTIONS
    profiles = {
        "smoke": AllReduceConfig(
            world_sizes=[2],
            sizes_bytes=[4 * KIB, MIB],
            many_world_sizes=[1, 3],
            many_elements=[1000],
            scheduling_sizes_bytes=[4 * KIB],
            transport_world_sizes=[2],
            transport_sizes_bytes=[4 * KIB, MIB],
            phase_sizes_bytes=[MIB],
            twice_up_to_bytes=0,
            warmup=1,
            repeats=6,
        ),
        "quick": AllReduceConfig(
            sizes_bytes=[KIB, 4 * KIB, 64 * KIB, 256 * KIB, MIB, 10 * MIB],
            many_world_sizes=[1, 2, 4, 8, 16],
            many_elements=[1000, 100_000],
            transport_sizes_bytes=[4 * KIB, 64 * KIB, MIB, 10 * MIB],
            phase_sizes_bytes=[MIB, 10 * MIB],
            warmup=1,
            # A few of 30 settings that take 20 % less, in rounds with noise of 25 %: 30 find 4 of 5, 15 find 1 of 4.
            repeats=60,
            rounds_s=0.6,
        ),
        "standard": AllReduceConfig(
            sizes_bytes=[2**k * KIB for k in range(0, 17, 2)] + [10 * MIB, 100 * MIB, GIB],
            many_elements=[1000, 10_000, 100_000, 1_000_000],
            transport_world_sizes=[2, 4, 8],
            transport_algorithms=USUAL,
            repeats=100,
            rounds_s=10.0,
        ),
        "paper": AllReduceConfig(
            sizes_bytes=[KIB, 4 * KIB, 64 * KIB, MIB, 10 * MIB, 100 * MIB, GIB],
            many_elements=[1, 32, 1024, 2048, 4096, 16384, 131_072],
            transport_world_sizes=[2, 4, 8],
            transport_algorithms=USUAL,
            repeats=50,
            ratio_within=0.0,
            rounds_s=60.0,
            timeout_s=600.0,
        ),
    }
    worker = staticmethod(measure_point)
    predicted = PREDICTED
    plugs_into = "algorithms"
    plug_in = staticmethod(plug_in)

    def points(self, config: AllReduceConfig, machine: Machine) -> Sequence[AllReducePoint]:
        """By backend and world size: links between hosts, if there may be several, then the two sweeps."""
        worlds = sorted({*config.world_sizes, *config.many_world_sizes})
        points = [
            point
            for backend in config.backends
            for world_size in worlds
            for point in _points_of_world(config, world_size, backend)
        ]
        if "gloo" in config.backends:
            points += _transport_points(config)
            points += [
                _point(config, n_bytes, sweep="phases", world_size=world_size)
                for world_size in config.phase_world_sizes
                if world_size > 1
                for n_bytes in config.phase_sizes_bytes
            ]
            points += _scheduling_points(config)
        points += _once_more(config, points)
        return list({point.id: point for point in points}.values())

    def known(self, frame: pd.DataFrame) -> Iterable[Known]:
        on_cpu = select(frame, ["seconds", "transport"], backend="gloo", dtype="float32").assign(device="cpu")
        for sweep in ("ranks", "sizes", "transports", "scheduling"):
            rows = select(on_cpu, sweep=sweep)
            torch_s = select(rows, algorithm=TORCH)
            yield Known(AllReduceTime, torch_s.assign(over="gloo"), sweep)
            doubling = select(rows, algorithm="recursive_doubling")
            is_by_messages = doubling["transport"].isna() | (doubling["transport"] == MESSAGES)
            yield Known(AllReduceTime, doubling[is_by_messages].assign(over="messages"), sweep)
            shared = select(rows, algorithm=CHOSEN, transport=SHARED_MEMORY)
            yield Known(AllReduceTime, shared.assign(over="shared"), sweep)

    def skip_reason(self, point: AllReducePoint, machine: Machine) -> str | None:
        total = point.world_size * point.n_bytes
        if 0 < point.most_bytes < total:
            return f"{format_bytes(total)} on all ranks, more than most_bytes, {format_bytes(point.most_bytes)}"
        ranks = ranks_here(point.world_size)
        if point.backend == "nccl":
            if machine.no_gpu_reason:
                return machine.no_device_reason("cuda")
            gpus = len(machine.gpus)
            if ranks > gpus:
                return f"NCCL needs a GPU a rank, and there are {gpus} here"
            return capacity.skip_reason(machine, "cuda", ranks * COPIES * point.n_bytes, ranks=ranks)
        return capacity.skip_reason(machine, "cpu", ranks * (RANK_BYTES + COPIES * point.n_bytes))

    def series(self, point: AllReducePoint) -> tuple[Hashable, float]:
        return (point.sweep, point.backend, point.world_size, point.scheduling), point.n_bytes


def _points_of_world(config: AllReduceConfig, world_size: int, backend: str) -> Iterator[AllReducePoint]:
    here: dict[str, Any] = {"world_size": world_size, "backend": backend}
    if world_size in config.world_sizes:
        for sweep, algorithms in (("exchange", ()), ("sizes", config.algorithms)):
            if sweep != "exchange" or is_job_rank():  # ranks that were started here share a host, and have no links
                for n_bytes in config.sizes_bytes:
                    yield _point(config, n_bytes, sweep=sweep, algorithms=algorithms, **here)
    if world_size in config.many_world_sizes:
        for elements in config.many_elements:
            n_bytes = elements * torch_dtype(config.dtype).itemsize
            yield _point(config, n_bytes, sweep="ranks", **here)


def _transport_points(config: AllReduceConfig) -> list[AllReducePoint]:
    """gloo, the floor, and labkit's algorithms over every transport."""
    own = [alternative(name, route) for name in config.transport_algorithms for route in ROUTES]
    return [
        _point(config, n_bytes, sweep="transports", world_size=world_size, algorithms=(TORCH, *own, FLOOR))
        for world_size in config.transport_world_sizes
        if world_size > 1 and own
        for n_bytes in config.transport_sizes_bytes
    ]


def _scheduling_points(config: AllReduceConfig) -> list[AllReducePoint]:
    """The same small all-reduces under both policies, which belong to groups of ranks: these cannot take turns."""
    algorithms = [name for name in (TORCH, CHOSEN) if name in config.algorithms]
    return [
        _point(config, n_bytes, world_size=world_size, sweep="scheduling", scheduling=policy, algorithms=algorithms)
        for world_size in config.world_sizes
        if world_size > 1 and algorithms
        for policy in ("batch", "default")
        for n_bytes in config.scheduling_sizes_bytes
    ]


def _once_more(config: AllReduceConfig, points: Iterable[AllReducePoint]) -> list[AllReducePoint]:
    """What is measured a second time, by other ranks and backwards (A B ... B A)."""
    several = {*config.world_sizes, *config.transport_world_sizes} - {1}
    short = [
        point
        for point in points
        if point.sweep == "scheduling"
        or (
            point.sweep in ("sizes", "ranks", "transports")
            and point.world_size in several
            and point.n_bytes <= config.twice_up_to_bytes
        )
    ]
    return list(repeat_in_sessions(short))


def _point(config: AllReduceConfig, n_bytes: int, *, world_size: int, **more: Any) -> AllReducePoint:
    n_elements = max(1, n_bytes // torch_dtype(config.dtype).itemsize)
    return AllReducePoint.of(config, world_size=world_size, n_elements=n_elements, **{"backend": "gloo"} | more)


STUDY = AllReduceStudy()
