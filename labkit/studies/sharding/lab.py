"""Sharding: what each stage of ZeRO saves in memory, sends, and costs in time, beside torch's own."""

from collections.abc import Iterator
from itertools import product
from typing import Annotated, Any

import pandas as pd
from pydantic import Field

from labkit.costs.memory import activation_bytes
from labkit.costs.sharding import PARTS, STAGES, state_bytes
from labkit.costs.transformer import SIZES, n_parameters
from labkit.lab.answers import Check, Compare, Report
from labkit.lab.config import Count, Device, TimedConfig, TimeoutSeconds, one_of
from labkit.lab.declaration import Lab
from labkit.lab.figures import Bars
from labkit.lab.metric import Metric, Results
from labkit.lab.project import reference_directory
from labkit.machine import Machine
from labkit.parallel.ranks.torchrun import ranks_here
from labkit.parallel.sharding.implementations import IMPLEMENTATIONS, TORCHS, register
from labkit.parallel.transport import AUTO, POINT_TO_POINT, SHARED, TRANSPORTS
from labkit.studies.sharding.worker import (
    AFTER_STEP,
    BACKWARD,
    BEFORE_STEP,
    FORWARD,
    OPTIMIZER,
    OPTIMIZERS,
    ShardingPoint,
    measure,
)

FIT_SHARE = 0.9  # of a memory that a training may take: the rest is for other programs
DDP, ZERO1, ZERO2, ZERO3 = STAGES
TORCH_ZERO1, TORCH_ZERO3 = TORCHS[1:]
WorldSizes = Annotated[list[Annotated[int, Field(ge=2, le=1024)]], Field(min_length=1)]


class ShardingConfig(TimedConfig):
    """The parameters of this lab."""

    sizes: Annotated[list[Annotated[str, one_of(lambda: SIZES)]], Field(min_length=1)] = ["mini"]
    implementations: Annotated[list[Annotated[str, one_of(lambda: IMPLEMENTATIONS)]], Field(min_length=1)] = list(
        IMPLEMENTATIONS
    )
    optimizers: Annotated[list[Annotated[str, one_of(lambda: OPTIMIZERS)]], Field(min_length=1)] = list(OPTIMIZERS)
    """A dear update and a cheap one: the time that sharding saves depends on that."""
    transports: Annotated[list[Annotated[str, one_of(lambda: TRANSPORTS)]], Field(min_length=1)] = [
        SHARED,
        POINT_TO_POINT,
    ]
    """Of labkit's implementations; torch's send by the backend."""
    world_sizes: WorldSizes = [2]
    memory_world_sizes: WorldSizes = [2, 4]
    batch: Count = 1
    context_length: Count = 32
    device: Device = "auto"
    warmup: int = Field(0, ge=0, le=10_000)
    rounds_s: float | None = 6.0
    timeout_s: TimeoutSeconds = 600.0


SETTING = ("size", "optimizer", "transport", "world_size", "device")
PARTS_OF_STEP = Metric("seconds", "implementation", (*SETTING, "part"), where={"kind": "time"})


def _whole_steps(rows: pd.DataFrame) -> pd.DataFrame:
    """One row per step of a rank: the sum of its parts."""
    keys = [*SETTING, "implementation", "rank", "repeat"]
    return rows.dropna(subset="seconds").groupby(keys, dropna=False, sort=False)["seconds"].sum().reset_index()


STEP = Metric(
    "seconds",
    "implementation",
    SETTING,
    where={"kind": "time", "part": (FORWARD, BACKWARD, OPTIMIZER)},
    prepare=_whole_steps,
)
PEAK = Metric(
    "peak_bytes",
    "implementation",
    ("size", "world_size", "device"),
    where={"kind": "memory", "moment": (BEFORE_STEP, AFTER_STEP)},
    exact=True,
)
NAMES = {
    DDP: "DDP",
    ZERO1: "ZeRO-1",
    ZERO2: "ZeRO-2",
    ZERO3: "FSDP (ZeRO-3)",
    "torch_ddp": "torch's DDP",
    TORCH_ZERO1: "torch's ZeRO-1",
    TORCH_ZERO3: "torch's FSDP",
}


def points(config: ShardingConfig, machine: Machine) -> Iterator[ShardingPoint]:
    """Steps by optimizer and transport; then memory, one implementation after the other."""
    device = machine.device(config.device)
    names = tuple(dict.fromkeys(config.implementations))
    transports = dict.fromkeys(config.transports if device == "cpu" else [AUTO])
    sizes, optimizers = dict.fromkeys(config.sizes), dict.fromkeys(config.optimizers)
    for world_size, size, optimizer, transport in product(
        dict.fromkeys(config.world_sizes), sizes, optimizers, transports
    ):
        about: dict[str, Any] = {"world_size": world_size, "size": size, "optimizer": optimizer, "transport": transport}
        about |= {"device": device, "backend": machine.backend(device, ranks_here(world_size))}
        yield ShardingPoint.of(config, kind="time", implementations=names, **about)
    # Pages that several ranks map would count on each of them: memory is measured point to point.
    transport = POINT_TO_POINT if device == "cpu" else AUTO
    for world_size, size in product(dict.fromkeys(config.memory_world_sizes), sizes):
        about = {"world_size": world_size, "size": size, "transport": transport}
        about |= {"device": device, "backend": machine.backend(device, ranks_here(world_size))}
        yield ShardingPoint.of(config, kind="memory", implementations=names, **about)


def parts(results: Results) -> pd.DataFrame:
    """Medians of the parts of a step of the largest model, for the figure."""
    table = PARTS_OF_STEP.medians(results.frame).drop(columns=["low", "high"])
    largest = max(table["size"], key=lambda size: n_parameters(SIZES[size]), default="")
    table = table[table["size"] == largest]
    panels = zip(table["optimizer"], table["transport"], table["world_size"], strict=True)
    return table.assign(panel=[f"{optimizer}, {transport}, {ranks} ranks" for optimizer, transport, ranks in panels])


def held(results: Results) -> pd.DataFrame:
    """Bytes that the rank which holds most keeps from step to step, by stage and part, beside the formula."""
    keys = ["size", "world_size", "implementation"]
    values = [f"{kind}{part}_bytes" for part in PARTS for kind in ("", "formula_")]
    rows = results.frame.reindex(columns=[*keys, "moment", *values])
    rows = rows[(rows["moment"] == AFTER_STEP) & rows["implementation"].isin(STAGES)]
    table = rows.groupby(keys, sort=False)[values].max().reset_index()
    parts = [
        table[keys].assign(part=part, held_bytes=table[f"{part}_bytes"], formula_bytes=table[f"formula_{part}_bytes"])
        for part in PARTS
    ]
    return pd.concat(parts, ignore_index=True).dropna(subset="formula_bytes")


def sent(results: Results) -> pd.DataFrame:
    """Bytes that the rank which sends most sends per step, by stage and collective, beside the formula."""
    keys = ["size", "optimizer", "transport", "world_size", "implementation", "collective"]
    values = ["sent_bytes", "formula_bytes", "model_bytes"]
    rows = results.frame.reindex(columns=[*keys, *values]).dropna(subset="collective")
    table = rows.groupby(keys, sort=False)[values].max().reset_index()
    share = (table["world_size"] - 1) / table["world_size"]
    return table.assign(times_model=(table["sent_bytes"] / table["model_bytes"] / share).astype(float))


def sent_once(results: Results) -> pd.DataFrame:
    """The same by the first optimizer and transport, for the figure."""
    table = sent(results)
    for name in ("optimizer", "transport"):
        table = table[table[name] == table[name].iloc[:1].squeeze()]
    return table


def largest_models(results: Results) -> pd.DataFrame:
    """By stage, the largest named model whose training in float32 with AdamW fits into a rank's memory, by formulas."""
    columns = ["kind", "world_size", "device", "batch", "context_length"]
    frame = results.frame.reindex(columns=columns)
    rows = []
    for _, point in frame[frame["kind"] == "memory"].drop_duplicates("world_size").iterrows():
        ranks, batch, context = (int(point[name]) for name in ("world_size", "batch", "context_length"))
        memory = FIT_SHARE * results.machine_bytes / (ranks if point["device"] == "cpu" else 1)
        for stage in STAGES:
            needed = {
                name: sum(state_bytes(n_parameters(shape), stage, ranks).values())
                + activation_bytes(shape, batch, context)
                for name, shape in SIZES.items()
            }
            best = max((name for name in needed if needed[name] <= memory), key=needed.__getitem__, default="none")
            row = {"world_size": ranks, "implementation": NAMES[stage], "model": best}
            rows.append(row | {"needed_bytes": needed.get(best), "memory_bytes": memory})
    return pd.DataFrame(rows)


def published() -> pd.DataFrame:
    """Published pairs of trainings with and without a sharded optimizer, two GPUs: ratios of step time and of peak."""
    table = pd.read_csv(reference_directory() / "sharded_training_2gpu.csv")
    table = table.assign(
        source=table["source"].str.split("@").str[0], is_sharded=table["variant"].str.contains("shard")
    )
    keys = ["source", "hardware", "seq_len", "global_batch"]
    table = table[table["optimizer"].str.startswith("AdamW") & ~table["variant"].str.contains("fsdp|gpipe")]
    pairs = table[~table["is_sharded"]].merge(table[table["is_sharded"]], on=keys, suffixes=("", "_sharded"))
    return pairs[keys].assign(
        step_ratio=pairs["step_ms_sharded"] / pairs["step_ms"],
        peak_ratio=pairs["mem_after_step_sharded"] / pairs["mem_after_step"],
    )


LAB = Lab(
    name="sharding",
    title="Sharding",
    summary="What every rank may hold a share of instead of a copy (ZeRO, FSDP): memory saved, bytes sent, time paid.",
    config=ShardingConfig,
    paper={
        "sizes": ["mini", "small"],
        "world_sizes": [2, 4],
        "batch": 4,
        "context_length": 64,
        "warmup": 1,
        "ratio_within": 0.0,
        "rounds_s": 60.0,
        "timeout_s": 3600.0,
    },
    on_gpu={
        "sizes": ["large"],
        "world_sizes": [2, 8],
        "memory_world_sizes": [2, 8],
        "batch": 4,
        "context_length": 512,
        "warmup": 2,
    },
    worker=measure,
    points=points,
    plugin_parameter="implementations",
    register=register,
    model_parameters=("sizes",),
    questions=[
        Compare(
            id="peaks",
            text="Does a rank need less memory in shards?",
            metric=PEAK,
            baseline=DDP,
            among=STAGES[1:],
            names=NAMES,
            figure=Bars(source=PEAK.largest_table, x="implementation", y="peak_bytes", panel="world_size"),
        ),
        Check(
            id="held",
            text="Does a rank hold, from step to step, the bytes that the formulas say?",
            table=held,
            measured="held_bytes",
            predicted="formula_bytes",
            within=1.01,
            subject="bytes held",
            reference="those of the formulas",
            configuration=("size", "world_size"),
            figure=Bars(source=held, x="implementation", y="held_bytes", hue="part", panel="world_size", stacked=True),
        ),
        Check(
            id="sent",
            text="Does a rank send the bytes that the formulas say?",
            table=sent,
            measured="sent_bytes",
            predicted="formula_bytes",
            within=1.01,
            subject="bytes sent",
            reference="those of the formulas",
            configuration=("size", "optimizer", "transport", "world_size"),
            figure=Bars(
                source=sent_once, x="implementation", y="sent_bytes", hue="collective", panel="world_size", stacked=True
            ),
        ),
        Compare(
            id="time",
            text="Is a step in shards faster than one with whole copies?",
            metric=STEP,
            baseline=DDP,
            among=STAGES[1:],
            names=NAMES,
            topic="sharding",
            advice="Shard as {name} does{where}.",
            keep="Shard only to save memory.",
            figure=Bars(source=parts, x="implementation", y="seconds", hue="part", panel="panel", stacked=True),
        ),
        *(
            Compare(
                id=theirs,
                text=f"Is labkit's {NAMES[own]} faster than {NAMES[theirs]}?",
                metric=STEP,
                baseline=theirs,
                among=(own,),
                names=NAMES | {own: f"labkit's {NAMES[own]}"},
            )
            for theirs, own in ((TORCH_ZERO1, ZERO1), (TORCH_ZERO3, ZERO3))
        ),
        Report(
            id="largest_model",
            text="Which is the largest model that fits, by what is sharded?",
            table=largest_models,
            verdict="predicted",
            configuration=("world_size",),
            says="With {world_size} ranks {implementation} holds {model}, at {needed_bytes} per rank, by the formulas.",
        ),
    ],
)
