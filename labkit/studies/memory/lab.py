"""Memory: where that of a training step goes, what checkpointing saves, what still fits."""

from collections.abc import Iterator
from itertools import product
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import Field

from labkit.costs.transformer import SIZES
from labkit.lab.answers import Check, Compare, Report
from labkit.lab.config import DeviceConfig, Seconds, Some, one_of
from labkit.lab.declaration import Lab
from labkit.lab.figures import Areas, Bars, Lines
from labkit.lab.metric import Metric, Results
from labkit.lab.units import format_bytes, labels
from labkit.machine.description import Machine
from labkit.nn.training import FORWARD
from labkit.studies.memory import worker
from labkit.studies.memory.counting import PARTS
from labkit.studies.memory.worker import (
    COUNTED,
    FULL_STEP,
    MEASURED,
    NO_CHECKPOINTS,
    MemoryPoint,
)
from labkit.studies.shared.held import FIT_SHARE
from labkit.studies.shared.tables import in_order

PHASES = (worker.INFERENCE, FORWARD, FULL_STEP)
VISIBLE_SHARE = 0.01  # of the largest value; smaller parts are not plotted
Size = Annotated[str, one_of(lambda: SIZES)]
Context = Annotated[int, Field(ge=2, le=2**20)]


class MemoryConfig(DeviceConfig):
    """The parameters of this lab. Contexts are in tokens."""

    sizes: Some[Size] = ["nano", "mini"]
    """Models whose peaks are measured and counted, at `contexts`."""
    contexts: Some[Context] = [64, 128]
    counted_sizes: list[Size] = [size for size in SIZES if size != "10B"]
    """Models that are only counted, at the longest of `counted_contexts`; the last one in detail,
    at all of them."""
    counted_contexts: list[Context] = [512, 2048]
    precisions: Some[Literal["float32", "bfloat16"]] = ["float32", "bfloat16"]
    """On a CPU, which may have no instructions for 16-bit numbers, all but float32 are counted
    only."""
    checkpoint_size: Size = "nano"
    """The model that is measured and timed with each segment length that divides its layers."""
    counted_checkpoint_size: Size = "mini"
    """The model that is counted with each of its own, at the longest of `counted_contexts`."""
    batch: Annotated[int, Field(ge=1, le=4096)] = 4
    rounds_s: Seconds | None = 2.0


CONFIGURATION = ("device", "size", "context_length", "batch")
PEAK_KEYS = ["device", "size", "context_length", "precision", "phase", "batch"]
PART_BYTES = [f"{part}_bytes" for part in PARTS]
CHECKPOINTED = {"table": "checkpoint"}
SEGMENT_PEAK = Metric("counted_bytes", "segment", CONFIGURATION, where=CHECKPOINTED, exact=True)
SEGMENT_TIME = Metric("seconds", "segment", CONFIGURATION, where=CHECKPOINTED)


def points(config: MemoryConfig, machine: Machine) -> Iterator[MemoryPoint]:
    """Plan counted peaks, then measured ones from small to large, then checkpointing."""
    device = machine.device(config.device)
    contexts = sorted(config.counted_contexts)

    def point(
        kind: str, size: str, context: int, precision: str = "float32", **more: Any
    ) -> MemoryPoint:
        about: dict[str, Any] = {"kind": kind, "size": size, "context_length": context}
        about |= {"precision": precision, "device": device, "phases": (), "repeats": 2}
        return MemoryPoint.of(config, **about | more)

    by_length = sorted(config.contexts)
    for size, precision, context in product(config.sizes, config.precisions, by_length):
        yield point(COUNTED, size, context, precision, phases=PHASES)
    for size, context in product(config.counted_sizes, contexts):
        is_last = size == config.counted_sizes[-1]
        is_longest = context == contexts[-1]
        # All sizes at one length and all lengths of one size: what fits, and how a peak grows.
        if is_last or is_longest:
            both = is_last and is_longest
            yield point(COUNTED, size, context, phases=(FULL_STEP,), has_details=both)
    precisions = config.precisions if device != "cpu" else ["float32"]
    for size, dtype, phase, context in product(config.sizes, precisions, PHASES, by_length):
        yield point(MEASURED, size, context, dtype, phases=(phase,))
    # By size and length: if both are the same model, one point is timed, too.
    repeats_of_checkpointed = {
        # Counting takes as long at any length, and short of memory are those who train long ones.
        (config.counted_checkpoint_size, max(contexts, default=by_length[-1])): 0,
        (config.checkpoint_size, by_length[-1]): config.repeats,
    }
    for (size, context), repeats in repeats_of_checkpointed.items():
        n_layers = SIZES[size].n_layers
        # Segments of equal length: the layers' divisors.
        lengths = [length for length in range(1, n_layers + 1) if n_layers % length == 0]
        segments = [NO_CHECKPOINTS, *lengths]
        yield point(worker.CHECKPOINT, size, context, segments=segments, repeats=repeats)


def peaks(results: Results, method: str) -> pd.DataFrame:
    """Return the highest peak of each configuration and phase, with its parts if it was counted."""
    rows = results.rows(
        [*PEAK_KEYS, "peak_bytes", "predicted_bytes", *PART_BYTES], table="peak", method=method
    )
    rows = rows.dropna(subset="peak_bytes").sort_values("peak_bytes", kind="stable")
    return in_order(rows.drop_duplicates(PEAK_KEYS, keep="last"), "size", SIZES)


def counted_against_measured(results: Results) -> pd.DataFrame:
    """Return configurations that were both counted and measured."""
    columns = [*PEAK_KEYS, "peak_bytes"]
    measured = peaks(results, MEASURED)[columns]
    counted = peaks(results, COUNTED)[columns]
    table = measured.merge(counted, on=PEAK_KEYS, suffixes=("_measured", "_counted"))
    names = {"peak_bytes_measured": "measured_bytes", "peak_bytes_counted": "counted_bytes"}
    return table.rename(columns=names)


def by_context(results: Results) -> pd.DataFrame:
    """Return counted peaks of models with several contexts, and their ratio to the shortest's."""
    table = peaks(results, COUNTED)
    keys = ["device", "size", "precision", "phase"]
    # A model with one context has nothing to grow from.
    table = table[table.groupby(keys)["context_length"].transform("nunique") > 1]
    table = table.sort_values([*keys, "context_length"])
    shortest = table.groupby(keys)["peak_bytes"].transform("first")
    table = table.assign(
        times_the_shortest=table["peak_bytes"] / shortest,
        kind=labels(table, ["phase", "precision"]),
    )
    return in_order(table, "size", SIZES)


def full_steps(results: Results) -> pd.DataFrame:
    """Return counted full steps in float32."""
    table = peaks(results, COUNTED)
    return table[(table["phase"] == FULL_STEP) & (table["precision"] == "float32")]


def parts_of_peak(results: Results) -> pd.DataFrame:
    """Return parts of the peak of each counted full step: bytes and percent, one row per part."""
    keys = ["size", "context_length", "batch", "peak_bytes"]
    long = full_steps(results).melt(keys, PART_BYTES, "part", "bytes").dropna()
    steps = labels(long, ["size", "context_length"])
    # Every bar ends at 100%, so its name says how many bytes that is.
    sizes = long["peak_bytes"].map(format_bytes)
    long = long.assign(
        part=long["part"].str.removesuffix("_bytes"),
        model=[f"{step}: {size}" for step, size in zip(steps, sizes, strict=True)],
        of_peak_percent=100 * long["bytes"].astype(float) / long["peak_bytes"].astype(float),
    )
    visible = long[long["of_peak_percent"] > 100 * VISIBLE_SHARE]
    return visible.sort_values("peak_bytes", kind="stable", ignore_index=True)


def timeline(results: Results) -> pd.DataFrame:
    """Return live bytes by part over the allocations and frees of one full step."""
    rows = results.rows(["size", "moment", *PART_BYTES], table="timeline").dropna(subset="moment")
    rows = rows.rename(columns={"moment": "allocations_and_frees"})
    long = rows.melt(["size", "allocations_and_frees"], PART_BYTES, "part", "bytes")
    most = long.groupby("part")["bytes"].transform("max")
    visible = long[most > VISIBLE_SHARE * long["bytes"].max()]
    return visible.assign(part=visible["part"].str.removesuffix("_bytes"))


def allocations(results: Results) -> pd.DataFrame:
    """Return the largest allocations of a full step, and their bytes at the peak."""
    columns = ["size", "context_length", "operator", "line", "part_of_step", "n_bytes", "times"]
    rows = results.rows([*columns, "at_peak_bytes"], table="allocation")
    table = rows.sort_values("at_peak_bytes", ascending=False, ignore_index=True)
    # "_softmax" is an operator of torch's, whose underscore says nothing to a reader.
    return table.assign(operator=[name.lstrip("_") for name in table["operator"]])


def segment_peaks(results: Results) -> pd.DataFrame:
    """Return counted peaks by segment; `model` has the length, of which a size may have two."""
    table = SEGMENT_PEAK.largest(results.frame)
    return table.assign(model=labels(table, ["size", "context_length"]))


def fits(results: Results) -> pd.DataFrame:
    """Return the counted full step of each size, and whether it fits here.

    At the longest context that most sizes were counted at.
    """
    table = full_steps(results)
    if table.empty:
        return table
    context = table.groupby("context_length")["size"].nunique().sort_values().index[-1]
    table = table[table["context_length"] == context].sort_values("peak_bytes")
    memory = FIT_SHARE * results.machine_bytes
    columns = ["size", "context_length", "batch", "peak_bytes", "predicted_bytes"]
    return table[columns].assign(
        machine_bytes=results.machine_bytes, fits=table["peak_bytes"] <= memory
    )


SEGMENT_NAMES = {NO_CHECKPOINTS: "no checkpointing", 1: "checkpointing every layer"} | {
    n: f"checkpointing every {n} layers" for n in range(2, 100)
}
LAB = Lab(
    name="memory",
    title="Memory",
    summary="Where a training step's memory goes, what checkpointing saves, what still fits.",
    config=MemoryConfig,
    smoke={"counted_sizes": ["nano", "mini"], "counted_checkpoint_size": "nano"},
    # Contexts as in data/reference/memory_peaks.csv.
    paper={
        "sizes": ["small", "medium", "large", "xl", "2.7B"],
        "contexts": [128, 256, 512],
        "counted_contexts": [128, 256, 512, 1024, 2048],
        "checkpoint_size": "xl",
        "counted_checkpoint_size": "2.7B",
    },
    on_gpu={
        "sizes": ["small", "medium", "large"],
        "contexts": [128, 512],
        "checkpoint_size": "medium",
    },
    worker=worker.measure,
    points=points,
    model_parameters=("sizes",),
    alternatives=("segment",),
    names=SEGMENT_NAMES,
    questions=[
        Report(
            id="peak_by_context",
            text="How does the peak memory grow with the context?",
            table=by_context,
            pick=lambda table: table["peak_bytes"].idxmax(),
            verdict="counted",
            configuration=("size", "precision", "batch", "context_length"),
            says=(
                "`{size}` peaks {times_the_shortest} times as high at {context_length} tokens as at"
                " the shortest context."
            ),
            figure=Lines(x="context_length", y="peak_bytes", hue="kind", panel="size"),
        ),
        Report(
            id="where_it_goes",
            text="What is the peak of a full step made of?",
            table=parts_of_peak,
            # The largest part of the highest peak: within a peak, "bytes" decides.
            pick=lambda table: table.sort_values(["peak_bytes", "bytes"]).index[-1],
            verdict="counted",
            configuration=("size", "batch", "context_length"),
            says="At {context_length} tokens, {of_peak_percent}% of {size}'s peak is {part}.",
            figure=Bars(x="model", y="of_peak_percent", hue="part", stacked=True),
        ),
        Report(
            id="largest_allocations",
            text="Which allocations are largest at the peak, and which line makes them?",
            table=allocations,
            pick=lambda table: table.index[0],
            verdict="counted",
            configuration=("size", "context_length"),
            says=(
                "At the peak of {size}, {operator} holds most: {at_peak_bytes}, allocated at"
                " {line}."
            ),
            figure=Areas(
                source=timeline,
                x="allocations_and_frees",
                y="bytes",
                hue="part",
                panel="size",
                order=PARTS,
            ),
        ),
        Compare(
            id="checkpointing",
            text="How much memory does activation checkpointing save?",
            metric=SEGMENT_PEAK,
            baseline=NO_CHECKPOINTS,
            topic="checkpointing",
            noun="checkpointing scheme",
            advice="If memory is short, train with {name}.",
            figure=Bars(source=segment_peaks, x="segment", y="counted_bytes", panel="model"),
        ),
        Compare(
            id="checkpointing_time",
            text="Is a step with activation checkpointing as fast as one without?",
            metric=SEGMENT_TIME,
            baseline=NO_CHECKPOINTS,
            noun="checkpointing scheme",
            figure=Lines(x="segment", hue="size", log=""),
        ),
        Report(
            id="largest_model",
            text="Which is the largest model whose training step fits into this machine's memory?",
            table=fits,
            # Smallest peaks first: the last that fits, or the smallest if none does.
            pick=lambda table: table.index[max(0, table["fits"].sum() - 1)],
            verdict="counted",
            configuration=("batch", "context_length"),
            topic="largest_model",
            says="`{size}`: a full step needs {peak_bytes} of {machine_bytes}.",
            advice=(
                "The largest labkit model that fits is `{size}` (batch {batch}, {context_length}"
                " tokens, float32, AdamW, naive attention)."
            ),
        ),
        Check(
            id="counted_against_measured",
            text="Is the counted peak the measured one?",
            table=counted_against_measured,
            measured="measured_bytes",
            predicted="counted_bytes",
            within=1.02,
            subject="measured peaks",
            reference="the counted ones",
        ),
    ],
)
