"""Data-parallel training: how to average gradients over ranks, with which bucket size, and what it costs a step."""

from collections.abc import Iterator
from itertools import product
from typing import Annotated, Any

import pandas as pd
from pydantic import Field

from labkit.lab.answers import Compare, Report
from labkit.lab.config import Count, Device, RoundsSeconds, Some, TimedConfig, Warmup, one_of
from labkit.lab.declaration import Lab
from labkit.lab.figures import RATIO, Bars, Lines, Timeline
from labkit.lab.metric import Metric, Results
from labkit.machine import Machine
from labkit.nn.transformer import SIZES
from labkit.nn.workloads import RESNET50
from labkit.parallel.data_parallel import IMPLEMENTATIONS, LOCAL, OVER_SHARED_MEMORY, TORCH, register
from labkit.parallel.ranks.torchrun import ranks_here
from labkit.studies.data_parallel.timeline import ALL_REDUCE, BACKWARD, FORWARD, OPTIMIZER
from labkit.studies.data_parallel.worker import DEFAULT_BUCKETS, EVERY, LAST, DataParallelPoint, measure
from labkit.studies.shared.tables import read_published

WorkloadName = Annotated[str, one_of(lambda: (RESNET50, *SIZES))]
Megabytes = Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]
BUCKETED = (TORCH, "bucketed")
"""Wrappers of the sweep of bucket sizes, and of accumulation."""
# The wrapper whose waiting after backward is the communication of these, with nothing else to do.
SAME_COLLECTIVES = {TORCH: "bucketed_sync", "bucketed": "bucketed_sync", "overlapped": "naive"}


class DataParallelConfig(TimedConfig):
    """The parameters of this lab. Bucket sizes are in MiB for all wrappers."""

    workloads: Some[WorkloadName] = ["nano", "mini"]
    world_sizes: Some[Annotated[int, Field(ge=1, le=64)]] = [2]
    implementations: list[Annotated[str, one_of(lambda: IMPLEMENTATIONS)]] = list(IMPLEMENTATIONS)
    buckets_mb: list[Megabytes] = [1.0, 10.0, 100.0]
    """Sizes of every bucket in the sweep, on the last workload; elsewhere buckets are the default."""
    batches: Some[Count] = [2]
    """Sequences or images per rank."""
    context_lengths: Some[Count] = [32]
    image_size: Annotated[int, Field(ge=32, le=4096)] = 32
    micro_batches: Annotated[int, Field(ge=2, le=1024)] = 2
    device: Device = "auto"
    warmup: Warmup = 0
    rounds_s: RoundsSeconds | None = 2.5


CONFIGURATION = ("workload", "world_size", "backend", "device", "batch", "context_length")
TIME = Metric(
    "seconds", "implementation", CONFIGURATION, where={"sweep": "wrappers", "phase": BACKWARD}, without=(LOCAL,)
)
PHASES = Metric("seconds", "implementation", (*CONFIGURATION, "phase"), where={"sweep": "wrappers"})
BUCKETS = Metric("seconds", "bucket", (*CONFIGURATION, "implementation"), where={"sweep": "buckets", "phase": BACKWARD})
ACCUMULATION = Metric(
    "seconds", "averaged_after", (*CONFIGURATION, "micro_batches", "implementation"), where={"sweep": "accumulation"}
)
PEAK = Metric("peak_bytes", "implementation", CONFIGURATION, where={"sweep": "memory"}, exact=True)
NAMES = {
    TORCH: "torch's DDP",
    DEFAULT_BUCKETS: "the default size",
    EVERY: "averaging after every micro-batch",
    LAST: "a step under no_sync",
}


def points(config: DataParallelConfig, machine: Machine) -> Iterator[DataParallelPoint]:
    """By ranks, workload and batch: all wrappers. Accumulation on the first workload; the rest on the last one."""
    device = machine.device(config.device)
    for world_size, workload in product(config.world_sizes, config.workloads):
        backend = machine.backend(device, ranks_here(world_size))
        for batch, length in product(config.batches, config.context_lengths):
            about = {"workload": workload, "batch": batch, "context_length": length, "world_size": world_size}
            yield from _points(
                config,
                workload == config.workloads[-1],
                about | {"device": device, "backend": backend, "micro_batches": 1},
            )


def _points(config: DataParallelConfig, is_last: bool, about: dict[str, Any]) -> Iterator[DataParallelPoint]:
    names = [name for name in config.implementations if about["device"] == "cpu" or name not in OVER_SHARED_MEMORY]
    if about["world_size"] == 1:
        names = []
    bucketed = [name for name in BUCKETED if name in names]
    yield DataParallelPoint.of(config, sweep="wrappers", alternatives=(LOCAL, *dict.fromkeys(names)), **about)
    if bucketed and about["workload"] == config.workloads[0]:
        several = about | {"micro_batches": config.micro_batches}
        yield DataParallelPoint.of(config, sweep="accumulation", alternatives=tuple(bucketed), **several)
    if not is_last:
        return
    if bucketed and config.buckets_mb:
        sizes = sorted(config.buckets_mb)
        swept = [one for name in bucketed for one in (name, *(f"{name}@{size!r}" for size in sizes))]
        yield DataParallelPoint.of(config, sweep="buckets", alternatives=tuple(swept), **about)
    # Neither the profiler nor the allocator sees shared memory: a thread copies it, and it is mapped.
    visible = tuple(name for name in names if name not in OVER_SHARED_MEMORY)
    for sweep in ("timeline", "memory") if visible else ():
        yield DataParallelPoint.of(config, sweep=sweep, alternatives=visible, **about)


def communication(results: Results) -> pd.DataFrame:
    """What averaging costs a step, by wrapper, in medians over the rounds.

    `longer_s` and `longer_percent`: a step less the same one without communication. `waiting_s`: from the end of
    backward. `alone_s`: the same collectives with nothing else to do. `hidden_percent`: how
    much of those backward hides.
    """
    samples = PHASES.samples(results.frame)
    keys = list(CONFIGURATION)
    wide = samples.pivot_table(index=[*keys, "repeat"], columns=["implementation", "phase"], values="seconds")
    rows = [
        dict(zip(keys, key, strict=True)) | row
        for key, group in wide.groupby(level=keys)
        for row in _costs(group.dropna(axis=1, how="all"))
    ]
    return pd.DataFrame(rows)


def _costs(seconds: pd.DataFrame) -> Iterator[dict[str, Any]]:
    names = dict.fromkeys(seconds.columns.get_level_values("implementation"))
    steps = {name: seconds[name][[FORWARD, BACKWARD, OPTIMIZER]].sum(axis=1) for name in names}
    for name in names if LOCAL in names else ():
        if name == LOCAL:
            continue
        longer = (steps[name] - steps[LOCAL]).median()
        alone = seconds.get((SAME_COLLECTIVES.get(name, name), "waiting"), pd.Series(dtype=float)).median()
        exposed = (seconds[name, BACKWARD] - seconds[LOCAL, BACKWARD]).median()
        hidden = 100 * max(0.0, 1 - exposed / alone) if name in SAME_COLLECTIVES else float("nan")
        yield {
            "implementation": name,
            "step_s": steps[name].median(),
            "longer_s": longer,
            "longer_percent": 100 * longer / steps[LOCAL].median(),
            "waiting_s": seconds.get((name, "waiting"), pd.Series(dtype=float)).median(),
            "alone_s": alone,
            "hidden_percent": hidden,
        }


def throughput(results: Results) -> pd.DataFrame:
    """Samples per second of all ranks, and the share of linear scaling from the fewest, without averaging."""
    rows = PHASES.samples(results.frame)
    rows = rows[rows["phase"].isin([FORWARD, BACKWARD, OPTIMIZER]) & rows["implementation"].isin([LOCAL, *BUCKETED])]
    keys = [*CONFIGURATION, "implementation"]
    steps = rows.groupby([*keys, "repeat"])["seconds"].sum().groupby(keys).median()
    table = steps.rename("step_s").reset_index().sort_values("world_size", kind="stable", ignore_index=True)
    per_rank = [name for name in CONFIGURATION if name not in ("world_size", "backend")]
    alone = table[table["implementation"] == LOCAL].drop_duplicates(per_rank)[[*per_rank, "step_s"]]
    table = table.merge(alone, on=per_rank, suffixes=("", "_alone"))
    return table.assign(
        samples_per_s=table["world_size"] * table["batch"] / table["step_s"],
        of_linear_percent=100 * table["step_s_alone"] / table["step_s"],
    ).drop(columns="step_s_alone")


def phases(results: Results) -> pd.DataFrame:
    """Medians of each phase, for the figure."""
    return _at_most_ranks(PHASES.medians(results.frame))


def peaks(results: Results) -> pd.DataFrame:
    """Peak bytes by wrapper, for the figure."""
    return _at_most_ranks(PEAK.largest(results.frame))


def _at_most_ranks(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of each workload with the most ranks, of these with the largest batch, then the longest context."""
    for name in ("world_size", "batch", "context_length"):
        table = table[table[name] == table.groupby("workload")[name].transform("max")]
    return table


def bucketed_row(table: pd.DataFrame) -> Any:
    """labkit's bucketed wrapper on the last workload, or the last row."""
    rows = table[table["implementation"] == "bucketed"]
    return (rows if len(rows) else table).index[-1]


def timeline(results: Results) -> pd.DataFrame:
    """Boxes of one step of rank 0, by wrapper and lane."""
    frame = results.frame.reindex(columns=["sweep", "rank", "implementation", "lane", "start_s", "duration_s"])
    rows = frame[(frame["sweep"] == "timeline") & (frame["rank"] == 0)].dropna(subset=["lane", "start_s"])
    rows = rows[rows["implementation"].isin([TORCH, "bucketed", "naive", "flat"])]
    return rows.assign(row=rows["implementation"] + ", " + rows["lane"])


def overlap(results: Results) -> pd.DataFrame:
    """Collectives of one profiled step of rank 0, by wrapper, and the share of their time that ran during backward."""
    frame = results.frame.reindex(columns=["sweep", "rank", "implementation", "lane", "duration_s", "during_s"])
    rows = frame[(frame["sweep"] == "timeline") & (frame["rank"] == 0) & (frame["lane"] == ALL_REDUCE)]
    table = rows.groupby("implementation", sort=False).agg(
        collectives=("duration_s", "size"), total_s=("duration_s", "sum"), during_s=("during_s", "sum")
    )
    return table.assign(during_percent=100 * table["during_s"] / table["total_s"]).reset_index()


def published_buckets() -> pd.DataFrame:
    """Published backward passes of ResNet-50 on two GPUs over gloo, by bucket size, over torch's of the same row.

    Torch's sizes were published in megabytes, the Python wrapper's in Mi elements of four bytes.
    """
    table = read_published("ddp_compare_resnet50")
    table = table[table["phase"] == BACKWARD]
    wide = table.pivot_table(index="buffer_melements", columns="implementation", values="median_ms")
    return wide.div(wide["torch_ddp"], axis=0).reset_index()


LAB = Lab(
    name="data_parallel",
    title="Data-parallel training",
    summary="How to average gradients over ranks on this machine, with which bucket size, and what it costs a step.",
    config=DataParallelConfig,
    paper={
        "workloads": ["resnet50", "xl"],
        "buckets_mb": [1.0, 10.0, 25.0, 100.0, 1000.0],
        "batches": [2, 4, 32],
        "context_lengths": [128, 256, 512],
        "image_size": 224,
        "warmup": 20,
        "repeats": 20,
    },
    on_gpu={
        "workloads": ["resnet50", "small"],
        "world_sizes": [1, 2, 4, 8],
        "batches": [16],
        "context_lengths": [512],
        "warmup": 2,
        "image_size": 224,
        "rounds_s": 3.0,
    },
    worker=measure,
    points=points,
    plugin_parameter="implementations",
    register=register,
    model_parameters=("workloads",),
    questions=[
        Report(
            id="communication",
            text="What does averaging gradients cost a step, and how much of it hides behind the backward pass?",
            table=communication,
            pick=bucketed_row,
            configuration=CONFIGURATION,
            says="With {workload}, averaging makes a step {longer_percent}% longer; {hidden_percent}% of it hides.",
            figure=Timeline(source=timeline, start="start_s", duration="duration_s", lane="row", hue="lane"),
        ),
        Report(
            id="throughput",
            text="How does throughput grow with the number of ranks?",
            table=throughput,
            pick=bucketed_row,
            configuration=CONFIGURATION,
            says="{world_size} ranks process {samples_per_s} samples per second: {of_linear_percent}% of linear.",
            figure=Lines(
                source=throughput, x="world_size", y="samples_per_s", hue="implementation", panel="workload", log=""
            ),
        ),
        Compare(
            id="fastest",
            text="Is one of labkit's wrappers faster than torch's DDP, from backward until gradients are averaged?",
            metric=TIME,
            baseline=TORCH,
            names=NAMES,
            topic="synchronization",
            advice="Average gradients with {name}{where}.",
            keep="Keep torch's DDP.",
            figure=Bars(source=phases, x="implementation", y="seconds", hue="phase", panel="workload"),
        ),
        Compare(
            id="bucket_size",
            text="Is another bucket size faster than the default?",
            metric=BUCKETS,
            baseline=DEFAULT_BUCKETS,
            names=NAMES,
            topic="bucket_size",
            advice="Use buckets of {name}{where}.",
            keep="Keep the default buckets (25 MiB, the first one 1 MiB).",
            figure=Lines(source=RATIO, x="bucket", hue="implementation", panel="context_length", log="y", level=1),
        ),
        Compare(
            id="accumulation",
            text="Does no_sync save time if gradients are accumulated over micro-batches?",
            metric=ACCUMULATION,
            baseline=EVERY,
            names=NAMES,
            advice="Accumulate gradients under no_sync{where}.",
        ),
        Compare(
            id="memory",
            text="Does one of labkit's wrappers need less memory than torch's DDP?",
            metric=PEAK,
            baseline=TORCH,
            names=NAMES,
            figure=Bars(source=peaks, x="implementation", y="peak_bytes", panel="workload"),
        ),
    ],
)
