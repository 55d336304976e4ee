"""Memory: where a training step's memory goes, what checkpointing saves, and the largest model that fits."""

from collections.abc import Iterator
from itertools import product
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import Field

from labkit.costs.transformer import SIZES
from labkit.lab.answers import Check, Compare, Report
from labkit.lab.config import Device, TimedConfig, TimeoutSeconds, one_of
from labkit.lab.declaration import Lab
from labkit.lab.figures import RATIO, Areas, Bars, Lines
from labkit.lab.metric import Metric, Results
from labkit.lab.project import reference_directory
from labkit.lab.user_models import model_names, shape_of, user_model_names
from labkit.machine import Machine
from labkit.studies.memory.counting import PARTS
from labkit.studies.memory.worker import (
    CHECKPOINT,
    COUNTED,
    FORWARD,
    FULL_STEP,
    INFERENCE,
    MEASURED,
    MODEL_BATCH,
    NO_CHECKPOINTS,
    MemoryPoint,
    measure,
)

PHASES = (INFERENCE, FORWARD, FULL_STEP)
FIT_SHARE = 0.9  # of a machine's memory that a step may take; the rest is for everything else
VISIBLE_SHARE = 0.01  # of the largest value; smaller parts are not drawn
Size = Annotated[str, one_of(model_names)]
Named = Annotated[str, one_of(lambda: SIZES)]
Context = Annotated[int, Field(ge=2, le=2**20)]


class MemoryConfig(TimedConfig):
    """The parameters of this lab. Contexts are in tokens."""

    sizes: Annotated[list[Size], Field(min_length=1)] = ["nano", "mini"]
    """Models whose peaks are measured and counted, at `contexts`."""
    contexts: Annotated[list[Context], Field(min_length=1)] = [64, 128]
    counted_sizes: list[Named] = [size for size in SIZES if size != "10B"]
    """Models that are only counted, to see which fit; the last one is looked at in detail."""
    counted_contexts: list[Context] = [512, 2048]
    precisions: Annotated[list[Literal["float32", "bfloat16"]], Field(min_length=1)] = ["float32", "bfloat16"]
    """On a CPU, which may have no instructions for 16-bit numbers, others than float32 are counted only."""
    checkpoint_size: Named = "nano"
    """Measured and timed with each segment length that divides its layers."""
    counted_checkpoint_size: Named = "mini"
    batch: Annotated[int, Field(ge=1, le=4096)] = 4
    device: Device = "auto"
    warmup: int = Field(1, ge=0, le=10_000)
    rounds_s: float | None = 5.0
    timeout_s: TimeoutSeconds = 300.0


CONFIGURATION = ("device", "size", "context_length", "batch")
PEAK_KEYS = ["device", "size", "context_length", "precision", "phase", "batch"]
CHECKPOINTED = {"table": "checkpoint"}
SEGMENT_PEAK = Metric("counted_bytes", "segment", CONFIGURATION, where=CHECKPOINTED, exact=True)
SEGMENT_TIME = Metric("seconds", "segment", CONFIGURATION, where=CHECKPOINTED)


def points(config: MemoryConfig, machine: Machine) -> list[MemoryPoint]:
    """Counting first, which takes no memory and predicts; then measured peaks by growing size; then checkpointing."""
    every = _points(config, machine.device(config.device))
    return list({point.id: point for point in every}.values())


def _points(config: MemoryConfig, device: str) -> Iterator[MemoryPoint]:
    def point(kind: str, size: str, context: int, precision: str = "float32", **more: Any) -> MemoryPoint:
        batch = {"batch": MODEL_BATCH} if context == MODEL_BATCH else {}
        about = {"kind": kind, "size": size, "context_length": context, "precision": precision, "device": device}
        return MemoryPoint.of(config, **about | batch | {"phases": (), "repeats": 2} | more)

    for size in config.sizes:
        for precision, context in product(config.precisions, _contexts(config, size)):
            yield point(COUNTED, size, context, precision, phases=PHASES, has_details=size in user_model_names())
    for size, context in product(config.counted_sizes, sorted(config.counted_contexts)):
        is_last = (size, context) == (config.counted_sizes[-1], max(config.counted_contexts))
        yield point(COUNTED, size, context, phases=(FULL_STEP,), has_details=is_last)
    for size in config.sizes:
        for low in config.precisions if device != "cpu" else ["float32"]:
            for phase, context in product(PHASES, _contexts(config, size)):
                yield point(MEASURED, size, context, low, phases=(phase,))
    for size, repeats in {config.counted_checkpoint_size: 0, config.checkpoint_size: config.repeats}.items():
        segments = segment_lengths(SIZES[size].n_layers)
        yield point(CHECKPOINT, size, max(config.contexts), segments=segments, repeats=repeats)


def _contexts(config: MemoryConfig, size: str) -> list[int]:
    """From short to long; a user's model brings its own batch."""
    return sorted(config.contexts) if shape_of(size) else [MODEL_BATCH]


def segment_lengths(n_layers: int) -> tuple[int, ...]:
    """No checkpointing, then every length that divides the layers evenly."""
    return (NO_CHECKPOINTS, *(length for length in range(1, n_layers + 1) if n_layers % length == 0))


def peaks(results: Results, method: str) -> pd.DataFrame:
    """The highest peak of each configuration and phase, with its parts if it was counted."""
    parts = [f"{part}_bytes" for part in PARTS]
    columns = [*PEAK_KEYS, "table", "method", "peak_bytes", "predicted_bytes", *parts]
    rows = results.frame.reindex(columns=columns)
    rows = rows[(rows["table"] == "peak") & (rows["method"] == method)]
    rows = rows.dropna(subset="peak_bytes").sort_values("peak_bytes", kind="stable")
    table = rows.drop_duplicates(PEAK_KEYS, keep="last").drop(columns=["table", "method"])
    order = {size: place for place, size in enumerate(SIZES)}
    return table.sort_values("size", key=lambda sizes: sizes.map(order), kind="stable", ignore_index=True)


def counted_against_measured(results: Results) -> pd.DataFrame:
    """Configurations that were both counted and measured."""
    counted = peaks(results, COUNTED)[[*PEAK_KEYS, "peak_bytes"]].rename(columns={"peak_bytes": "counted_bytes"})
    measured = peaks(results, MEASURED)[[*PEAK_KEYS, "peak_bytes"]].rename(columns={"peak_bytes": "measured_bytes"})
    return measured.merge(counted, on=PEAK_KEYS)


def by_context(results: Results) -> pd.DataFrame:
    """Counted peaks of the models with several contexts, and how often that of the shortest context they are."""
    table = peaks(results, COUNTED)
    if table.empty:
        return table
    table, keys = table.dropna(axis=1, how="all"), ["device", "size", "precision", "phase"]
    table = table[table.groupby(keys)["context_length"].transform("nunique") > 1].sort_values([*keys, "context_length"])
    shortest = table.groupby(keys)["peak_bytes"].transform("first")
    kinds = table["phase"] + ", " + table["precision"]
    return table.assign(times_the_shortest=table["peak_bytes"] / shortest, kind=kinds).reset_index(drop=True)


def largest_full_step(table: pd.DataFrame) -> Any:
    """The largest full step in float32."""
    rows = table[(table["phase"] == FULL_STEP) & (table["precision"] == "float32")]
    return rows["peak_bytes"].idxmax()


def parts_of_peak(results: Results) -> pd.DataFrame:
    """Parts of each counted full step's peak in float32: bytes and percent, one row per part."""
    table = peaks(results, COUNTED)
    table = table[(table["phase"] == FULL_STEP) & (table["precision"] == "float32")]
    names = [f"{part}_bytes" for part in PARTS]
    long = table.melt(["size", "context_length", "batch", "peak_bytes"], names, "part", "bytes").dropna()
    context = ", " + long["context_length"].astype(str) + " tokens"
    model = long["size"] + context.where(long["context_length"] != MODEL_BATCH, "")
    long = long.assign(part=long["part"].str.removesuffix("_bytes"), model=model)
    long = long.assign(of_peak_percent=100 * long["bytes"].astype(float) / long["peak_bytes"].astype(float))
    return long[long["of_peak_percent"] > 100 * VISIBLE_SHARE].sort_values(
        "peak_bytes", kind="stable", ignore_index=True
    )


def largest_part(table: pd.DataFrame) -> Any:
    """The largest part of the largest peak."""
    return table[table["peak_bytes"] == table["peak_bytes"].max()]["bytes"].idxmax()


def timeline(results: Results) -> pd.DataFrame:
    """Live bytes by part over the allocations and frees of one full step of the big model."""
    parts = [f"{part}_bytes" for part in PARTS]
    rows = results.frame.reindex(columns=["table", "size", "context_length", "moment", *parts])
    rows = rows[rows["table"] == "timeline"].dropna(subset="moment").rename(columns={"moment": "allocations_and_frees"})
    long = rows.melt(["size", "allocations_and_frees"], parts, "part", "bytes")
    shares = long.groupby("part")["bytes"].transform("max") / max(long["bytes"].max(), 1) if len(long) else 0
    return long[shares > VISIBLE_SHARE].assign(part=lambda table: table["part"].str.removesuffix("_bytes"))


def allocations(results: Results) -> pd.DataFrame:
    """The largest allocations of a full step: operator, line, bytes of one, how many, and their bytes at the peak."""
    columns = ["size", "context_length", "operator", "line", "part_of_step", "n_bytes", "times", "at_peak_bytes"]
    rows = results.frame.reindex(columns=["table", *columns])
    table = rows[rows["table"] == "allocation"][columns].sort_values("at_peak_bytes", ascending=False)
    return table.assign(operator=[name.lstrip("_") for name in table["operator"]]).reset_index(drop=True)


def fits(results: Results) -> pd.DataFrame:
    """Counted full step of each size at the longest context that most were counted at, and whether it fits here."""
    table = peaks(results, COUNTED)
    table = table[(table["phase"] == FULL_STEP) & (table["precision"] == "float32")]
    if table.empty:
        return table
    context = table.groupby("context_length")["size"].nunique().sort_values().index[-1]
    table = table[table["context_length"] == context].sort_values("peak_bytes")
    memory = FIT_SHARE * results.machine_bytes
    columns = ["size", "context_length", "batch", "peak_bytes", "predicted_bytes"]
    return table[columns].assign(machine_bytes=results.machine_bytes, fits=table["peak_bytes"] <= memory)


def largest_fitting(table: pd.DataFrame) -> Any:
    """The largest size that fits; the smallest one if none does."""
    fitting = table[table["fits"]]
    return fitting.index[-1] if len(fitting) else table.index[0]


def published_peaks() -> pd.DataFrame:
    """Published peaks of a model with 32 layers and d_model 2560, on an H100; its GB are taken as 10^9 bytes."""
    table = pd.read_csv(reference_directory() / "memory_peaks.csv")
    return table.assign(peak_bytes=table["peak_gb"] * 1e9).drop(columns="peak_gb")


SEGMENT_NAMES = {NO_CHECKPOINTS: "no checkpointing", 1: "checkpointing every layer"} | {
    n: f"checkpointing every {n} layers" for n in range(2, 100)
}
LAB = Lab(
    name="memory",
    title="Memory",
    summary="Where the memory of a training step goes, what checkpointing saves, and the largest model that fits.",
    config=MemoryConfig,
    smoke={"counted_sizes": ["nano", "mini"], "counted_checkpoint_size": "nano"},
    paper={
        "sizes": ["small", "medium", "large", "xl", "2.7B"],
        "contexts": [128, 256, 512],
        "counted_contexts": [128, 256, 512, 1024, 2048],
        "checkpoint_size": "xl",
        "counted_checkpoint_size": "2.7B",
        "timeout_s": 900.0,
    },
    on_gpu={"sizes": ["small", "medium", "large"], "contexts": [128, 512], "checkpoint_size": "medium"},
    worker=measure,
    points=points,
    model_parameters=("sizes",),
    takes_models=True,
    questions=[
        Report(
            id="peak_by_context",
            text="How does the peak memory grow with the context?",
            table=by_context,
            pick=largest_full_step,
            verdict="counted",
            configuration=("size", "precision", "batch", "context_length"),
            says="A full step of {size} peaks at {peak_bytes} with {context_length} tokens.",
            figure=Lines(source=by_context, x="context_length", y="peak_bytes", hue="kind", panel="size"),
        ),
        Report(
            id="where_it_goes",
            text="What is the peak of a full step made of?",
            table=parts_of_peak,
            pick=largest_part,
            verdict="counted",
            configuration=("size", "batch", "context_length"),
            says="At {context_length} tokens, {of_peak_percent}% of {size}'s peak is {part}.",
            figure=Bars(source=parts_of_peak, x="model", y="of_peak_percent", hue="part", stacked=True),
        ),
        Report(
            id="largest_allocations",
            text="Which allocations are largest at the peak, and which line makes them?",
            table=allocations,
            pick=lambda table: table.index[0],
            verdict="counted",
            configuration=("size", "context_length"),
            says="At the peak of {size}, {operator} holds most: {at_peak_bytes}, allocated at {line}.",
            figure=Areas(source=timeline, x="allocations_and_frees", y="bytes", hue="part", panel="size", order=PARTS),
        ),
        Compare(
            id="checkpointing",
            text="How much memory does activation checkpointing save?",
            metric=SEGMENT_PEAK,
            baseline=NO_CHECKPOINTS,
            names=SEGMENT_NAMES,
            topic="checkpointing",
            advice="If memory is short, use {name}.",
            figure=Bars(source=SEGMENT_PEAK.largest_table, x="segment", y="counted_bytes", panel="size"),
        ),
        Compare(
            id="checkpointing_time",
            text="How much time does activation checkpointing cost?",
            metric=SEGMENT_TIME,
            baseline=NO_CHECKPOINTS,
            names=SEGMENT_NAMES,
            figure=Lines(source=RATIO, x="segment", hue="size", log="", level=1),
        ),
        Report(
            id="largest_model",
            text="Which is the largest model whose training step fits into this machine's memory?",
            table=fits,
            pick=largest_fitting,
            verdict="counted",
            configuration=("batch", "context_length"),
            topic="largest_model",
            says="{size}: a full step needs {peak_bytes} of {machine_bytes}.",
            advice="Train models of up to the size {size} (batch {batch}, {context_length} tokens, float32, AdamW).",
        ),
        Check(
            id="counted_against_measured",
            text="Is the counted peak the measured one?",
            table=counted_against_measured,
            measured="measured_bytes",
            predicted="counted_bytes",
            within=1.02,
            subject="measured peaks",
            configuration=("size", "context_length", "precision", "phase"),
        ),
    ],
)
