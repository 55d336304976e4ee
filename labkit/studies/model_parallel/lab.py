"""Model parallelism: what splitting a model by tensor or by pipeline costs, and which axis is best
here."""

from collections.abc import Iterator
from functools import partial
from typing import Annotated

import pandas as pd
from pydantic import Field

from labkit.costs.transformer import SIZES
from labkit.lab.answers import Check, Compare
from labkit.lab.config import Count, DeviceConfig, Seconds, SeveralRanks, Some, Warmup, one_of
from labkit.lab.declaration import Lab
from labkit.lab.figures import Bars, Lines, Timeline
from labkit.lab.metric import Metric, Results
from labkit.lab.units import labels
from labkit.machine.description import Machine
from labkit.parallel.pipeline_schedule import SCHEDULES, make_schedule, simulate
from labkit.parallel.ranks.torchrun import ranks_here
from labkit.parallel.transport import SHARED
from labkit.studies.model_parallel.point import (
    DATA,
    SEQUENCE,
    TORCH,
    WAYS,
    WHOLE,
    ModelParallelPoint,
)
from labkit.studies.model_parallel.trainings import AXES
from labkit.studies.model_parallel.worker import measure
from labkit.studies.shared.alternatives import ALL_CORES
from labkit.studies.shared.tables import join, most_sent, predict_messages_s
from labkit.studies.shared.verification import verify_plan


class ModelParallelConfig(DeviceConfig):
    world_sizes: Some[SeveralRanks] = [2]
    # Multiples of 16: eight heads, whose dimension is even for rotary positions.
    widths: Some[Annotated[int, Field(ge=16, le=2**15, multiple_of=16)]] = [128, 256, 512]
    """Of models cut by tensor; a pipeline takes the first at which a stage takes 5 ms."""
    layers: Count = 2
    batch: Count = 2
    context_length: Count = 64
    micro_batches: Some[Count] = [2, 8]
    """In a step of a pipeline, one sequence each."""
    model: Annotated[str, one_of(lambda: SIZES)] = "mini"
    """The model that is trained along each axis."""
    model_batch: Count = 1
    """Its sequences per rank; each is a micro-batch of the pipeline."""
    axes: Some[Annotated[str, one_of(lambda: AXES)]] = list(AXES)
    # The check has run steps already.
    warmup: Warmup = 0
    rounds_s: Seconds | None = 2.0


SPLIT = tuple(way for way in WAYS if way not in (ALL_CORES, WHOLE))
TENSOR_KEYS = ("world_size", "device", "width")
TENSOR_TIME = Metric("seconds", "way", TENSOR_KEYS, where={"sweep": "tensor"})
AXIS_KEYS = ("model", "world_size", "device", "batch", "context_length")
AXIS_TIME = Metric("seconds", "axis", AXIS_KEYS, where={"sweep": "axes"})
AXIS_PEAK = Metric("peak_bytes", "axis", AXIS_KEYS, where={"sweep": "axes"}, exact=True)
PIPELINE_KEYS = ("world_size", "device", "width", "schedule", "micro_batches", "rank")
NAMES = {
    ALL_CORES: "the whole model on one rank with all cores",
    WHOLE: "the whole model on one rank's cores",
    TORCH: "tensor parallelism with torch's collectives",
    SHARED: "tensor parallelism through shared memory",
    SHARED + SEQUENCE: "sequence parallelism through shared memory",
    DATA: "data parallelism",
    "sharded": "sharding",
    "tensor parallel": "tensor parallelism",
    "pipeline": "a pipeline",
    "context parallel": "context parallelism",
}


def points(config: ModelParallelConfig, machine: Machine) -> Iterator[ModelParallelPoint]:
    """Plan by number of ranks: tensor parallelism from narrow to wide, pipelines, then all axes."""
    device = machine.device(config.device)
    widths = tuple(sorted(config.widths))
    for world_size in config.world_sizes:
        point = partial(ModelParallelPoint.on, machine, config, world_size)
        ways: tuple[str, ...] = WAYS
        # A rank has at least one core: alone, it would have more than its share of them.
        if device == "cpu" and ranks_here(world_size) > machine.cores:
            ways = tuple(way for way in WAYS if way != WHOLE)
        for width in widths:
            yield point(
                sweep="tensor", alternatives=ways, widths=(width,), model="", micro_batches=()
            )
        layers = max(config.layers, 2 * world_size)  # interleaved, a rank has two stages
        pipeline = partial(point, sweep="pipeline", alternatives=SCHEDULES, model="", layers=layers)
        fitting = [
            width for width in widths if pipeline(widths=(width,)).skip_reason(machine) is None
        ]
        # If none fits, the point says why it is skipped.
        yield pipeline(widths=tuple(fitting or widths))
        # All axes train on the same batch: each rank's sequences, taken together.
        yield point(
            sweep="axes",
            alternatives=tuple(config.axes),
            widths=(),
            batch=world_size * config.model_batch,
        )


def sent(results: Results) -> pd.DataFrame:
    """Return calls, bytes and seconds per step, measured and predicted."""
    keys = [*TENSOR_KEYS, "way"]
    table = most_sent(results.frame, keys)
    medians = TENSOR_TIME.medians(results.frame)[[*keys, "seconds"]]
    # Predicted: an equal share of one rank's time, and messages that nothing hides.
    whole_s = join(table.assign(way=WHOLE), medians, keys, "left")["seconds"].astype(float)
    table = join(table, medians, keys, "left")
    return table.assign(
        predicted_s=whole_s / table["world_size"] + predict_messages_s(table, results)
    )


def pipelines(results: Results) -> pd.DataFrame:
    """Return the share of a step that each rank works, and the micro-batches that it holds.

    `formula_busy` follows from the schedule, `predicted_busy` also from the cost of messages.
    """
    values = ["seconds", "idle_s", "held", "formula_busy", "formula_held", "calls", "sent_bytes"]
    rows = results.frame.reindex(columns=[*PIPELINE_KEYS, *values]).dropna(subset="idle_s")
    rows = rows.assign(busy=1 - rows["idle_s"] / rows["seconds"]).sort_values("rank", kind="stable")
    table = rows.groupby(list(PIPELINE_KEYS), sort=False)[["busy", *values]].median().reset_index()
    work_s = table["seconds"] - table["idle_s"]
    step_s = work_s / table["formula_busy"] + predict_messages_s(table, results)
    # Floats in the frame, where rows of other sweeps have none; a name says "2", not "2.0".
    table = table.astype({"width": int, "micro_batches": int})
    kinds = labels(table, ["schedule", "micro_batches"])
    return table.drop(columns=["calls", "sent_bytes"]).assign(
        kind=kinds, predicted_busy=work_s / step_s
    )


def tasks(results: Results) -> pd.DataFrame:
    """Return simulated tasks by schedule, of two ranks and four micro-batches.

    The unit of time is a forward pass through a rank's layers; a backward pass takes two.
    """
    rows = []
    for name in SCHEDULES:
        # A simulated forward pass is of a stage: interleaved, half of a rank's layers.
        chunks = 2 if name == "interleaved" else 1
        for rank, times in enumerate(simulate(make_schedule(name, 2, 4, chunks=chunks))):
            for task, start, end in times:
                rows.append(
                    {
                        "lane": f"{name}, rank {rank}",
                        "task": {"F": "forward", "B": "backward"}[task.kind],
                        "time_in_forward_passes": start / chunks,
                        "duration_in_forward_passes": (end - start) / chunks,
                    }
                )
    return pd.DataFrame(rows)


def axes(results: Results) -> pd.DataFrame:
    """Return time and peak memory of a rank by axis, in one table."""
    times = AXIS_TIME.medians(results.frame)
    return join(times, AXIS_PEAK.largest(results.frame), AXIS_TIME.columns, "outer")


LAB = Lab(
    name="model_parallel",
    title="Model parallelism",
    summary=(
        "What cutting a model by tensor or by pipeline costs and saves, and which axis is best"
        " here."
    ),
    config=ModelParallelConfig,
    smoke={"model": "nano"},
    paper={
        "world_sizes": [2, 4, 8],
        "widths": [1024, 2048, 4096, 8192],
        "context_length": 1024,
        "micro_batches": [2, 8, 32],
        "model": "xl",
        "model_batch": 4,
    },
    on_gpu={
        "world_sizes": [2, 8],
        "widths": [512, 1024, 2048, 4096],
        "context_length": 512,
        "model": "small",
    },
    worker=measure,
    verify=verify_plan,
    points=points,
    alternatives=("way", "axis", "schedule"),
    names=NAMES,
    questions=[
        Compare(
            id="width",
            text="At what width does splitting a model across ranks pay off?",
            metric=TENSOR_TIME,
            # Equal cores: a baseline with one rank's share of them would lose by that alone.
            baseline=ALL_CORES,
            among=SPLIT,
            figure=Lines(source=TENSOR_TIME, x="width", panel="world_size"),
        ),
        Compare(
            id="transport",
            text=(
                "Is tensor parallelism faster through shared memory than with torch's collectives?"
            ),
            metric=TENSOR_TIME,
            baseline=TORCH,
            among=(SHARED,),
        ),
        Compare(
            id="sequence",
            text="Does sequence parallelism save time?",
            metric=TENSOR_TIME,
            baseline=SHARED,
            among=(SHARED + SEQUENCE,),
        ),
        Check(
            id="sent_bytes",
            text="Does tensor parallelism send the bytes that the formula says?",
            table=sent,
            measured="sent_bytes",
            predicted="formula_sent_bytes",
            within=1.01,
            subject="bytes sent",
            reference="the formula",
        ),
        Check(
            id="busy",
            text="Does each rank of a pipeline work for the share of a step that the formula says?",
            table=pipelines,
            measured="busy",
            predicted="formula_busy",
            # The formula has stages that take equally long, and messages that take no time.
            within=1.15,
            subject="shares",
            reference="the formula",
            figure=Bars(
                source=pipelines,
                x="kind",
                y="busy",
                hue="rank",
                panel="world_size",
                reference="formula_busy",
            ),
        ),
        Check(
            id="held",
            text="Does a pipeline hold as many micro-batches at once as its schedule says?",
            table=pipelines,
            measured="held",
            predicted="formula_held",
            within=1.01,
            subject="counts",
            reference="the formula",
            figure=Timeline(
                source=tasks,
                x="time_in_forward_passes",
                y="duration_in_forward_passes",
                lane="lane",
                hue="task",
            ),
        ),
        Compare(
            id="axis",
            text="Which kind of parallelism trains a model fastest on these ranks?",
            metric=AXIS_TIME,
            baseline=DATA,
            figure=Bars(source=axes, x="axis", y="seconds", panel="world_size"),
        ),
        Compare(
            id="axis_memory",
            text="Which kind of parallelism needs the least memory on a rank?",
            metric=AXIS_PEAK,
            baseline=DATA,
            is_expected=True,  # with every other axis, a rank has a part of the model or sequence
            figure=Bars(source=axes, x="axis", y="peak_bytes", panel="world_size"),
        ),
    ],
)
