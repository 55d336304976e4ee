"""Sharding: what each stage of ZeRO saves in memory, sends, and costs in time."""

from collections.abc import Iterator
from itertools import product
from typing import Annotated, Any

import pandas as pd
from pydantic import Field

from labkit.costs.communication import STAGES
from labkit.costs.memory import PARTS, activation_bytes, state_bytes
from labkit.costs.transformer import SIZES, n_parameters
from labkit.lab.answers import Check, Compare, Report
from labkit.lab.config import Count, DeviceConfig, Seconds, Some, Warmup, one_of
from labkit.lab.declaration import Lab
from labkit.lab.figures import Bars
from labkit.lab.metric import Metric, Results
from labkit.machine.description import Machine
from labkit.parallel.ranks.torchrun import ranks_here
from labkit.parallel.transport import AUTO, CHOICES, POINT_TO_POINT, SHARED
from labkit.studies.sharding.worker import OPTIMIZERS, ShardingPoint, measure
from labkit.studies.shared import tasks
from labkit.studies.shared.held import FIT_SHARE
from labkit.studies.shared.sharding_strategies import IMPLEMENTATIONS, NAMES, TORCHS, register
from labkit.studies.shared.tables import add_up
from labkit.studies.shared.verification import verify_sharding

DDP, ZERO1, _, ZERO3 = STAGES
TORCH_DDP, TORCH_ZERO1, TORCH_ZERO3 = TORCHS
WorldSizes = Some[Annotated[int, Field(ge=2, le=1024)]]


class ShardingConfig(DeviceConfig):
    sizes: Some[Annotated[str, one_of(lambda: SIZES)]] = ["mini"]
    implementations: Some[Annotated[str, one_of(lambda: IMPLEMENTATIONS)]] = [
        name for name in IMPLEMENTATIONS if name != TORCH_DDP
    ]
    """The lab on data-parallel training measures torch's DDP."""
    optimizers: Some[Annotated[str, one_of(lambda: OPTIMIZERS)]] = ["AdamW"]
    """Sharding saves time if the update is expensive (AdamW), and hardly any with SGD."""
    transports: Some[Annotated[str, one_of(lambda: CHOICES)]] = [AUTO]
    """Of labkit's implementations; "auto": shared memory if possible. torch's use the backend."""
    world_sizes: WorldSizes = [2]
    memory_world_sizes: WorldSizes = [2]
    batch: Count = 1
    context_length: Count = 32
    # The check has run steps already.
    warmup: Warmup = 0
    rounds_s: Seconds | None = 6.0


CONFIGURATION = ("size", "optimizer", "transport", "world_size", "device")
BY_PART = (*CONFIGURATION, "part")
PARTS_OF_STEP = Metric("seconds", "implementation", BY_PART, where={"kind": "time"})


def _add_parts(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one row per step of a rank: the sum of its parts."""
    return add_up(rows, [*CONFIGURATION, "implementation", "rank", "repeat"])


STEP = Metric(
    "seconds", "implementation", CONFIGURATION, where={"kind": "time"}, prepare=_add_parts
)
PEAK = Metric(
    "peak_bytes",
    "implementation",
    ("size", "world_size", "device"),
    where={"kind": "memory"},
    exact=True,
)
# Figures show the largest model and the most ranks, with AdamW over shared memory.
AT = {"size": None, "world_size": None, "optimizer": "AdamW", "transport": SHARED}


def points(config: ShardingConfig, machine: Machine) -> Iterator[ShardingPoint]:
    """Plan steps, then peak memory.

    The first optimizer is measured over every transport, the others over the first transport. With
    more than the fewest ranks, torch's memory is left out: questions compare labkit's stages.
    """
    is_cpu = machine.device(config.device) == "cpu"
    names = config.implementations
    transports = config.transports if is_cpu else [AUTO]
    # Not all pairs: what an optimizer costs does not depend on how its gradients have come.
    pairs = [
        *product(config.optimizers[:1], transports),
        *product(config.optimizers, transports[:1]),
    ]

    def point(world_size: int, **about: Any) -> ShardingPoint:
        return ShardingPoint.on(
            machine, config, world_size, host_ranks=ranks_here(world_size), **about
        )

    for world_size, size, (optimizer, transport) in product(
        config.world_sizes, config.sizes, pairs
    ):
        yield point(world_size, kind="time", size=size, optimizer=optimizer, transport=transport)
    # Pages that several ranks map would count on each of them: memory is measured point to point.
    transport = POINT_TO_POINT if is_cpu else AUTO
    for world_size, size in product(config.memory_world_sizes, config.sizes):
        is_fewest = world_size == min(config.memory_world_sizes)
        # Of a run with torch's implementations alone, nothing would be left to measure.
        measured = [name for name in names if is_fewest or name not in TORCHS] or names
        yield point(
            world_size, kind="memory", size=size, transport=transport, implementations=measured
        )


def held(results: Results) -> pd.DataFrame:
    """Return the bytes that a rank keeps from step to step, by stage and part, with the formula."""
    keys = ["size", "world_size", "implementation"]
    tables = []
    for part in PARTS:
        columns = {f"{part}_bytes": "held_bytes", f"formula_{part}_bytes": "formula_bytes"}
        # Rows of torch's implementations have no formula: how torch shards may change.
        rows = results.rows([*keys, *columns]).dropna().rename(columns=columns)
        most = rows.groupby(keys, sort=False)[["held_bytes", "formula_bytes"]].max()
        tables.append(most.reset_index().assign(part=part))
    return pd.concat(tables, ignore_index=True)


def sent(results: Results) -> pd.DataFrame:
    """Return the bytes that a rank sends per step, by stage and collective, with the formula.

    `sent_over_model`: the same in units of (p-1)/p times the bytes of the model.
    """
    keys = ["size", "optimizer", "transport", "world_size", "implementation", "collective"]
    values = ["sent_bytes", "formula_bytes", "model_bytes"]
    rows = results.rows([*keys, *values]).dropna(subset="collective")
    table = rows.groupby(keys, sort=False)[values].max().reset_index()
    # The ZeRO paper counts in this unit: an all-reduce sends 2, and ZeRO-3 3.
    share = (table["world_size"] - 1) / table["world_size"]
    ratio = table["sent_bytes"] / table["model_bytes"] / share
    return table.assign(sent_over_model=ratio.astype(float))


def largest_models(results: Results) -> pd.DataFrame:
    """Return the largest named model by stage that fits into a rank's memory, by formulas.

    It is trained in float32 with AdamW.
    """
    columns = ["world_size", "host_ranks", "device", "batch", "context_length"]
    table = results.rows(columns, kind="memory").drop_duplicates("world_size")
    # Runs without that column had one host.
    points = table.fillna({"host_ranks": table["world_size"]}).to_dict("records")
    rows: list[dict[str, Any]] = []
    for point, stage, (model, shape) in product(points, STAGES, SIZES.items()):
        ranks = int(point["world_size"])
        size = (int(point["batch"]), int(point["context_length"]))
        memory = FIT_SHARE * results.machine_bytes
        if point["device"] == "cpu":  # whose memory all ranks of a host share
            memory /= point["host_ranks"]
        states = state_bytes(n_parameters(shape), stage, ranks)
        rows.append(
            {
                "world_size": ranks,
                "implementation": NAMES[stage],
                "model": model,
                "batch": size[0],
                "context_length": size[1],
                "needed_bytes": sum(states.values()) + activation_bytes(shape, *size),
                "memory_bytes": memory,
            }
        )
    if not rows:
        return pd.DataFrame()
    table = pd.DataFrame(rows)
    fitting = table[table["needed_bytes"] <= table["memory_bytes"]]
    fitting = fitting.sort_values("needed_bytes", kind="stable")
    table = fitting.groupby(["world_size", "implementation"]).tail(1).sort_index(ignore_index=True)
    # FSDP's largest model is told next to DDP's: one without the other says little.
    unsharded = table[table["implementation"] == NAMES[DDP]].set_index("world_size")["model"]
    return table.assign(with_ddp=table["world_size"].map(unsharded))


LAB = Lab(
    name="sharding",
    title="Sharding",
    summary=(
        "What every rank may hold a share of instead of a copy (ZeRO, FSDP): memory saved, bytes"
        " sent, time paid."
    ),
    config=ShardingConfig,
    paper={
        "sizes": ["mini", "small"],
        "world_sizes": [2, 4],
        "memory_world_sizes": [2, 4],
        "batch": 4,
        "context_length": 64,
        "warmup": 1,
    },
    on_gpu={
        "sizes": ["small", "medium"],
        "world_sizes": [2, 8],
        "memory_world_sizes": [2, 4, 8],
        "batch": 4,
        "context_length": 512,
        "warmup": 2,
    },
    preload=("torch._dynamo",),
    worker=measure,
    verify=verify_sharding,
    points=points,
    plugin_parameter="implementations",
    task=tasks.SHARD,
    register=register,
    is_checked=lambda point: point.kind == "time",
    model_parameters=("sizes",),
    alternatives=("implementation",),
    names=NAMES,
    questions=[
        Compare(
            id="peaks",
            text="Which stage of ZeRO lowers the peak memory of a rank most?",
            metric=PEAK,
            baseline=DDP,
            among=STAGES[1:],
            figure=Bars(source=PEAK, x="implementation", panel="world_size", at=AT),
        ),
        Check(
            id="held",
            text="Does a rank hold, from step to step, the bytes that the formulas say?",
            table=held,
            measured="held_bytes",
            predicted="formula_bytes",
            # An optimizer also counts its steps, in a number per tensor.
            within=1.01,
            subject="bytes held",
            reference="the formulas",
            figure=Bars(
                x="implementation",
                y="held_bytes",
                hue="part",
                panel="world_size",
                stacked=True,
                at=AT,
            ),
        ),
        Check(
            id="sent",
            text="Does a rank send the bytes that the formulas say?",
            table=sent,
            measured="sent_bytes",
            predicted="formula_bytes",
            within=1.01,
            subject="bytes sent",
            reference="the formulas",
            figure=Bars(
                x="implementation",
                y="sent_bytes",
                hue="collective",
                panel="world_size",
                stacked=True,
                at=AT,
            ),
        ),
        Compare(
            id="time",
            text="Is any stage of ZeRO faster than DDP?",
            metric=STEP,
            baseline=DDP,
            among=STAGES[1:],
            topic="sharding",
            advice="If memory is short, shard as {name} does{where}: a step takes less time, too.",
            keep="Shard only to save memory.",
            figure=Bars(
                source=PARTS_OF_STEP,
                x="implementation",
                hue="part",
                panel="transport",
                stacked=True,
                at=AT,
            ),
        ),
        *(
            Compare(
                id=theirs,
                text=f"Is labkit's {NAMES[own]} faster than {NAMES[theirs]}?",
                metric=STEP,
                baseline=theirs,
                among=(own,),
            )
            for theirs, own in ((TORCH_ZERO1, ZERO1), (TORCH_ZERO3, ZERO3))
        ),
        Report(
            id="largest_model",
            text="What is the largest model that fits, for each stage?",
            table=largest_models,
            verdict="predicted",
            configuration=("world_size", "batch", "context_length"),
            says=(
                "With batch {batch} and {context_length} tokens on {world_size} ranks,"
                " {implementation} fits `{model}`; DDP fits `{with_ddp}`."
            ),
        ),
    ],
)
