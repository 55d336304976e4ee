"""Data-parallel training: how to average gradients, in which buckets, and what it costs a step."""

from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Annotated, Any

import pandas as pd
from pydantic import Field

from labkit.costs.transformer import SIZES
from labkit.lab.answers import Compare, Report
from labkit.lab.config import Count, DeviceConfig, Ranks, Seconds, Some, Warmup, one_of
from labkit.lab.declaration import Lab
from labkit.lab.figures import Bars, Lines, Timeline
from labkit.lab.metric import Metric, Results
from labkit.machine.description import Machine
from labkit.nn.training import BACKWARD, FORWARD, OPTIMIZER, RESNET50
from labkit.parallel.data_parallel import (
    IMPLEMENTATIONS,
    LOCAL,
    OVER_SHARED_MEMORY,
    TORCH,
    register,
)
from labkit.parallel.ranks.torchrun import ranks_here
from labkit.studies.data_parallel import worker
from labkit.studies.shared import tasks
from labkit.studies.shared.tables import WRAPPER_NAMES, add_up
from labkit.studies.shared.verification import verify_wrapper

# Wrappers whose bucket sizes, and accumulation, are compared.
BUCKETED = (TORCH, "bucketed")
# For a wrapper that overlaps, the one that runs the same collectives after backward.
SAME_COLLECTIVES = {TORCH: "bucketed_sync", "bucketed": "bucketed_sync", "overlapped": "naive"}
# Wrappers with a timeline.
PROFILED = (TORCH, "bucketed", "naive", "flat")


class DataParallelConfig(DeviceConfig):
    """The parameters of this lab. Bucket sizes are in MiB for all wrappers."""

    workloads: Some[Annotated[str, one_of(lambda: (RESNET50, *SIZES))]] = ["nano", "mini"]
    world_sizes: Some[Ranks] = [2]
    throughput_world_sizes: list[Ranks] = []
    """Further numbers of ranks, with the largest batch and length only."""
    implementations: list[Annotated[str, one_of(lambda: IMPLEMENTATIONS)]] = list(IMPLEMENTATIONS)
    buckets_mb: list[Annotated[float, Field(gt=0, le=1e6, allow_inf_nan=False)]] = [1.0, 100.0]
    """Bucket sizes that are compared on the last workload; all else uses the default."""
    batches: Some[Count] = [2]
    """Sequences or images per rank."""
    context_lengths: Some[Count] = [32]
    image_size: Annotated[int, Field(ge=32, le=4096)] = 32
    micro_batches: Annotated[int, Field(ge=2, le=1024)] = 2
    warmup: Warmup = 0  # the check has run steps already
    rounds_s: Seconds | None = 2.5


CONFIGURATION = ("workload", "world_size", "backend", "device", "batch", "context_length")
KEYS = [*CONFIGURATION, "implementation"]
STEP_PHASES = (FORWARD, BACKWARD, OPTIMIZER)


def _add_phases(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one row per step of a rank. Backward alone would promise more than a step gains."""
    rows = rows[rows["phase"].isin(STEP_PHASES)]
    return add_up(rows, [*KEYS, "rank", "repeat"])


TIME = Metric(
    "seconds",
    "implementation",
    CONFIGURATION,
    where={"sweep": "wrappers"},
    without=(LOCAL,),
    prepare=_add_phases,
)
PHASES = Metric("seconds", "implementation", (*CONFIGURATION, "phase"), where={"sweep": "wrappers"})
BUCKETS = Metric(
    "seconds",
    "bucket",
    (*CONFIGURATION, "implementation"),
    where={"sweep": "buckets", "phase": BACKWARD},
)
ACCUMULATION = Metric(
    "seconds",
    "averaged_after",
    (*CONFIGURATION, "micro_batches", "implementation"),
    where={"sweep": "accumulation"},
)
PEAK = Metric("peak_bytes", "implementation", CONFIGURATION, where={"sweep": "memory"}, exact=True)
LARGEST = {"batch": None, "context_length": None}
# Figures show the most ranks, the largest batch and the longest context.
AT = {"world_size": None, **LARGEST}
NAMES = {
    **WRAPPER_NAMES,
    worker.DEFAULT_BUCKETS: "the default size",
    worker.EVERY: "averaging after every micro-batch",
    worker.LAST: "a step under no_sync",
}


def points(config: DataParallelConfig, machine: Machine) -> Iterator[worker.DataParallelPoint]:
    """Plan all wrappers; accumulation on the first workload, the rest on the last."""
    device = machine.device(config.device)
    names = config.implementations
    most = machine.cores
    if device == "cuda":
        names = [name for name in names if name not in OVER_SHARED_MEMORY]
        most = len(machine.gpus)
    # More ranks than cores or GPUs would share them: no throughput is linear then.
    further = [
        world_size
        for world_size in sorted({*config.throughput_world_sizes} - {*config.world_sizes})
        if ranks_here(world_size) <= most
    ]
    for world_size, workload in product([*config.world_sizes, *further], config.workloads):
        point = partial(worker.DataParallelPoint.on, machine, config, world_size, workload=workload)
        # One rank has nothing to average: only the bare model is timed.
        sweeps = list(_sweeps(config, names if world_size > 1 else [], workload))
        sizes = [*product(config.batches, config.context_lengths)]
        if world_size in further:
            sizes = [(max(config.batches), max(config.context_lengths))]
        for (batch, length), (sweep, alternatives) in product(sizes, sweeps):
            micro_batches = config.micro_batches if sweep == "accumulation" else 1
            about = {"batch": batch, "context_length": length, "micro_batches": micro_batches}
            if alternatives:
                yield point(sweep=sweep, alternatives=alternatives, **about)


def _sweeps(
    config: DataParallelConfig, names: list[str], workload: str
) -> Iterator[tuple[str, list[str]]]:
    """Yield the sweeps of a workload, and the wrappers that each compares."""
    bucketed = [name for name in BUCKETED if name in names]
    yield "wrappers", [LOCAL, *names]
    # The small workload is enough here: what no_sync saves is averaging itself.
    if workload == config.workloads[0]:
        yield "accumulation", bucketed
    # The large one has several buckets, and a peak that is more than the allocator's rounding.
    if workload == config.workloads[-1]:
        if config.buckets_mb:
            # "" is the default size, with which the others are compared.
            sizes = ["", *(f"@{size!r}" for size in sorted(config.buckets_mb))]
            yield "buckets", [name + size for name in bucketed for size in sizes]
        # Neither the profiler nor the allocator sees shared memory.
        visible = [name for name in names if name not in OVER_SHARED_MEMORY]
        yield "timeline", [name for name in PROFILED if name in visible]
        yield "memory", visible


def communication(results: Results) -> pd.DataFrame:
    """Return the cost of averaging in a step, by wrapper, in medians over the rounds.

    `longer_s` and `longer_percent`: the step minus the same one without communication. `waiting_s`:
    from the end of the pass until gradients are averaged. `alone_s`: that of the wrapper that runs
    the same collectives after backward. `hidden_percent`: the part of `alone_s` that overlapping
    with backward hides.
    """
    samples = PHASES.samples(results.frame)
    wide = samples.pivot_table(index=[*KEYS, "repeat"], columns="phase", values="seconds")
    wide = wide.reindex(columns=[*STEP_PHASES, worker.WAITING])
    wide = wide.assign(step_s=wide[list(STEP_PHASES)].sum(axis=1)).reset_index()
    # Differences are of the same round: slow minutes of the machine slow both.
    is_local = wide["implementation"] == LOCAL
    local = wide.loc[is_local, [*CONFIGURATION, "repeat", "step_s", BACKWARD]]
    rounds = wide[~is_local].merge(local, on=[*CONFIGURATION, "repeat"], suffixes=("", "_local"))
    rounds["longer_s"] = rounds["step_s"] - rounds["step_s_local"]
    rounds["exposed_s"] = rounds[BACKWARD] - rounds[f"{BACKWARD}_local"]
    columns = ["step_s", "longer_s", "step_s_local", worker.WAITING, "exposed_s"]
    table = rounds.groupby(KEYS)[columns].median().reset_index()
    table = table.rename(columns={worker.WAITING: "waiting_s"})
    table["same"] = table["implementation"].replace(SAME_COLLECTIVES)
    alone = table[[*KEYS, "waiting_s"]].rename(
        columns={"implementation": "same", "waiting_s": "alone_s"}
    )
    table = table.merge(alone, how="left", on=[*CONFIGURATION, "same"])
    # Noise alone may show less than nothing hidden, or more than there is.
    hidden = 100 * (1 - table["exposed_s"] / table["alone_s"]).clip(0, 1)
    return table.assign(
        longer_percent=100 * table["longer_s"] / table["step_s_local"],
        # Wrappers that average after backward hide nothing, by construction.
        hidden_percent=hidden.where(table["same"] != table["implementation"]),
    ).drop(columns=["same", "exposed_s", "step_s_local"])


def throughput(results: Results) -> pd.DataFrame:
    """Return samples per second of all ranks, in percent of as many ranks without averaging."""
    rows = PHASES.samples(results.frame)
    rows = rows[rows["phase"].isin(STEP_PHASES) & rows["implementation"].isin([LOCAL, *BUCKETED])]
    steps = rows.groupby([*KEYS, "repeat"])["seconds"].sum().groupby(KEYS).median()
    table = steps.reset_index(name="step_s")
    table = table.sort_values("world_size", kind="stable", ignore_index=True)
    # Linear is by the fewest ranks: a larger number may share caches and memory.
    per_rank = [name for name in CONFIGURATION if name not in ("world_size", "backend")]
    alone = table[table["implementation"] == LOCAL].drop_duplicates(per_rank)[[*per_rank, "step_s"]]
    table = table.merge(alone, on=per_rank, suffixes=("", "_alone"))
    return table.assign(
        samples_per_s=table["world_size"] * table["batch"] / table["step_s"],
        of_linear_percent=100 * table["step_s_alone"] / table["step_s"],
    ).drop(columns="step_s_alone")


def bucketed_row(table: pd.DataFrame) -> Any:
    """Return the index of the last row of labkit's bucketed wrapper, or of all."""
    rows = table[table["implementation"] == "bucketed"]
    if rows.empty:
        rows = table
    return rows.index[-1]


def timeline(results: Results) -> pd.DataFrame:
    """Return boxes of one profiled step of rank 0, by wrapper and lane."""
    rows = results.rows(
        ["implementation", "lane", "start_s", "duration_s"], sweep="timeline", rank=0
    )
    rows = rows[rows["implementation"].isin(PROFILED)].dropna(subset="start_s")
    return rows.assign(row=rows["implementation"] + ", " + rows["lane"])


LAB = Lab(
    name="data_parallel",
    title="Data-parallel training",
    summary="How to average gradients over ranks, in which buckets, and what it costs a step.",
    config=DataParallelConfig,
    # As in data/reference/ddp_compare_resnet50.csv and ddp_bucketed_xl_2gpu.csv.
    paper={
        "workloads": ["resnet50", "xl"],
        "throughput_world_sizes": [1, 4, 8],
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
    worker=worker.measure,
    verify=verify_wrapper,
    points=points,
    plugin_parameter="implementations",
    task=tasks.AVERAGE,
    register=register,
    is_checked=lambda point: point.sweep in ("wrappers", "accumulation"),
    model_parameters=("workloads",),
    alternatives=("implementation",),
    names=NAMES,
    questions=[
        Report(
            id="communication",
            text="What does averaging gradients cost a step, and how much does backward hide?",
            table=communication,
            pick=bucketed_row,
            configuration=CONFIGURATION,
            says=(
                "With {workload}, averaging by {implementation} makes a step {longer_percent}%"
                " longer; backward hides {hidden_percent}% of the communication."
            ),
            figure=Timeline(source=timeline, lane="row", hue="lane"),
        ),
        Report(
            id="throughput",
            text="How does throughput grow with the number of ranks?",
            table=throughput,
            pick=bucketed_row,
            configuration=CONFIGURATION,
            says="{implementation} on {world_size} ranks reaches {of_linear_percent}% of linear.",
            figure=Lines(
                x="world_size",
                y="samples_per_s",
                hue="implementation",
                panel="workload",
                at=LARGEST,
                log="",  # throughput that grows with the ranks is a straight line
            ),
        ),
        Compare(
            id="fastest",
            text="Is a training step faster with one of labkit's wrappers than with torch's DDP?",
            metric=TIME,
            baseline=TORCH,
            topic="synchronization",
            advice="Average gradients with {name}{where}.",
            keep="Keep torch's DDP.",
            figure=Bars(source=PHASES, x="implementation", hue="phase", panel="workload", at=AT),
        ),
        Compare(
            id="bucket_size",
            text="Is another bucket size faster than the default?",
            metric=BUCKETS,
            baseline=worker.DEFAULT_BUCKETS,
            topic="bucket_size",
            advice="Use buckets of {name}{where}.",
            keep="Keep the default buckets (25 MiB, the first one 1 MiB).",
            figure=Lines(x="bucket", hue="implementation", panel="context_length", log="y"),
        ),
        Compare(
            id="accumulation",
            text="Does no_sync save time if gradients are accumulated over micro-batches?",
            metric=ACCUMULATION,
            baseline=worker.EVERY,
            advice="Accumulate gradients under no_sync{where}.",
        ),
        Compare(
            id="memory",
            text="Does one of labkit's wrappers need less memory than torch's DDP?",
            metric=PEAK,
            baseline=TORCH,
            figure=Bars(source=PEAK, x="implementation", panel="workload", at=AT),
        ),
    ],
)
