"""Attention: what it costs in time and memory, and which implementation is best here, from which length up."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import Field

from labkit.costs.attention import BACKWARD_OVER_FORWARD, explicit_peak, explicit_saved, forward_flops, tiled_saved
from labkit.lab.answers import Check, Compare, Report
from labkit.lab.config import Count, Device, RoundsSeconds, Sessions, Some, TimedConfig, one_of
from labkit.lab.declaration import Lab
from labkit.lab.figures import Lines
from labkit.lab.metric import Metric, Results
from labkit.lab.point import repeat_in_sessions
from labkit.machine import Machine
from labkit.nn.attention_implementations import IMPLEMENTATIONS, register
from labkit.studies.attention.worker import (
    BACKWARD,
    BOTH,
    COMPILED,
    EXPLICIT,
    FLASH,
    FORWARD,
    MARGIN,
    TILED,
    AttentionPoint,
    measure,
)

MIB = 2**20
PUBLISHED_HEAD_DIM = 64  # of the lines in figures
Length = Annotated[int, Field(ge=16, lt=2**31)]  # gradients of shorter ones are sums of too few terms to be checked
HeadDim = Annotated[int, Field(ge=1, le=1024)]
Dtype = Literal["float32", "bfloat16", "float16"]


class AttentionConfig(TimedConfig):
    """The parameters of this lab."""

    sequences: Some[Length] = [256, 512, 1024, 2048, 4096]
    head_dims: Some[HeadDim] = [64]
    dtypes: Some[Dtype] = ["float32", "bfloat16"]
    implementations: list[Annotated[str, one_of(lambda: IMPLEMENTATIONS)]] = [
        name for name in IMPLEMENTATIONS if name != "sdpa_math"
    ]
    """All are compared with naive attention. SDPA's unfused backend is measured only if it is named."""
    compiled_sequences: list[Length] = [1024]
    """Lengths at which compiled attention takes part: each shape costs seconds to compile."""
    batch: Count = 1
    """Sequences, or heads, at once."""
    causal: bool = True
    sessions: Sessions = 2
    device: Device = "auto"
    max_bytes: int = Field(512 * MIB, ge=0)
    """An implementation that needs more is left out; 0: only what does not fit into memory is."""
    rounds_s: RoundsSeconds | None = 1.0


CONFIGURATION = ("device", "dtype", "batch", "head_dim", "sequence")
TIME = Metric("seconds", "implementation", CONFIGURATION, where={"phase": BOTH})
PHASES = Metric("seconds", "implementation", (*CONFIGURATION, "phase"), where={"phase": (FORWARD, BACKWARD, BOTH)})
PEAK = Metric("peak_bytes", "implementation", CONFIGURATION, where={"phase": "both"}, exact=True)
NAMES = {
    EXPLICIT: "naive attention",
    COMPILED: "compiled attention",
    TILED: "tiled attention",
    FLASH: "the Triton kernel",
    "sdpa": "SDPA",
    "sdpa_flash": "SDPA's flash backend",
    "sdpa_efficient": "SDPA's memory-efficient backend",
    "sdpa_cudnn": "SDPA's cuDNN backend",
}


def points(config: AttentionConfig, machine: Machine) -> Sequence[AttentionPoint]:
    """Short sequences first; then all again in further sessions, by other processes."""
    once = list(_points(config, machine.device(config.device)))
    return [*once, *repeat_in_sessions(once, config.sessions)]


def _points(config: AttentionConfig, device: str) -> Iterator[AttentionPoint]:
    names = dict.fromkeys([EXPLICIT, *config.implementations])
    for dtype in config.dtypes:
        for sequence in sorted(config.sequences):
            here = tuple(name for name in names if name != COMPILED or sequence in config.compiled_sequences)
            for head_dim in config.head_dims:
                problem = {"dtype": dtype, "sequence": sequence, "head_dim": head_dim, "device": device}
                yield AttentionPoint.of(config, implementations=here, **problem)


def growth(results: Results) -> pd.DataFrame:
    """Time of both passes by length, how often that of half the length, and the useful FLOP/s."""
    table = TIME.medians(results.frame)
    keys = [*(name for name in CONFIGURATION if name != "sequence"), "implementation"]
    before = table.groupby(keys, dropna=False)[["sequence", "seconds"]].shift()
    is_double = table["sequence"] == 2 * before["sequence"]
    ratio = table["seconds"] / before["seconds"]
    causal = bool(results.frame["causal"].iloc[0]) if len(table) else True
    sizes = table[["batch", "sequence", "head_dim"]].to_numpy()
    flops = [(1 + BACKWARD_OVER_FORWARD) * forward_flops(*size, causal=causal) for size in sizes]
    return table.assign(times_per_doubling=ratio.where(is_double), flops_per_s=flops / table["seconds"])


def naive_growth(results: Results) -> pd.DataFrame:
    """The same with naive attention in float32 at the longest sequence last; empty if no length was doubled."""
    table = growth(results)
    is_naive = (table["implementation"] == EXPLICIT) & (table["dtype"] == "float32")
    doubled = table[is_naive].dropna(subset="times_per_doubling").sort_values("sequence")
    return pd.concat([table.drop(doubled.index), doubled]) if len(doubled) else table.iloc[:0]


def phases(results: Results) -> pd.DataFrame:
    """Times of each pass in float32, for the figure."""
    table = _at_one_head_dim(PHASES.medians(results.frame))
    return table[table["dtype"] == table["dtype"].max()]


def ratios(results: Results) -> pd.DataFrame:
    """Times of both passes over naive attention's, for the figure."""
    return _at_one_head_dim(TIME.ratios_to(EXPLICIT, results.frame))


def peaks(results: Results) -> pd.DataFrame:
    """Peak bytes by implementation, for the figure."""
    return _at_one_head_dim(PEAK.largest(results.frame))


def _at_one_head_dim(table: pd.DataFrame) -> pd.DataFrame:
    """Rows of the head dimension of published measurements, or else of the largest."""
    is_published = table["head_dim"] == PUBLISHED_HEAD_DIM
    return table[is_published if is_published.any() else table["head_dim"] == table["head_dim"].max()]


def held(results: Results) -> pd.DataFrame:
    """Bytes that autograd keeps between the passes, and the formulas' bytes."""
    keys = [*CONFIGURATION, "causal", "implementation"]
    rows = results.frame.reindex(columns=[*keys, "phase", "saved_bytes"])
    table = rows[rows["phase"] == "saved"].groupby(keys, as_index=False)["saved_bytes"].sum()
    table = table[table["implementation"].isin([EXPLICIT, TILED])]
    return table.assign(predicted_bytes=[_predict_held(row) for row in table.to_dict("records")]).drop(columns="causal")


def _predict_held(row: dict[str, Any]) -> int:
    size = row["batch"], row["sequence"], row["head_dim"], 4 if row["dtype"] == "float32" else 2
    formula = tiled_saved if row["implementation"] == TILED else partial(explicit_saved, causal=row["causal"])
    return sum(formula(*size).values())


def end_of_memory(results: Results) -> pd.DataFrame:
    """Naive attention in float32 by length, up to the first that does not fit: bytes at its peak, with a margin."""
    frame = results.frame
    if frame.empty or not results.machine_bytes > 0:
        return pd.DataFrame()
    rows, batch, head_dim = [], int(frame["batch"].iloc[0]), int(frame["head_dim"].max())
    for exponent in range(8, 31):
        tensors = explicit_peak(batch, 2**exponent, head_dim, 4, causal=bool(frame["causal"].iloc[0]))
        needed = MARGIN * sum(tensors.values())
        size = {"batch": batch, "head_dim": head_dim, "sequence": 2**exponent}
        rows.append(size | {"needed_bytes": needed, "matrix_bytes": max(tensors.values())})
        if needed > results.machine_bytes:
            break
    return pd.DataFrame(rows).assign(memory_bytes=results.machine_bytes)


def held_at_one_head_dim(results: Results) -> pd.DataFrame:
    """The same, for the figure."""
    return _at_one_head_dim(held(results))


LAB = Lab(
    name="attention",
    title="Attention",
    summary="What attention costs in time and memory, and which implementation is best here, from which length up.",
    config=AttentionConfig,
    paper={
        "sequences": [2**k for k in range(7, 17)],
        "head_dims": [16, 32, 64, 128],
        "compiled_sequences": [256, 1024, 4096, 8192, 16384],
        "max_bytes": 0,
        "warmup": 10,
        "repeats": 100,
        "rounds_s": 10.0,
    },
    on_gpu={
        "batch": 32,
        "sequences": [512, 1024, 2048, 4096, 8192, 16384],
        "head_dims": [64, 128],
        "compiled_sequences": [1024],
        "sessions": 1,
        "max_bytes": 0,
    },
    worker=measure,
    points=points,
    plugin_parameter="implementations",
    register=register,
    questions=[
        Report(
            id="growth",
            text="How does the time of both passes grow with the sequence length?",
            table=naive_growth,
            configuration=CONFIGURATION,
            says="At {sequence} tokens naive attention takes {times_per_doubling} times as long as at half the length.",
            figure=Lines(source=phases, x="sequence", y="seconds", hue="implementation", panel="phase"),
        ),
        Compare(
            id="fastest",
            text="Is any implementation faster than naive attention, and from which length up?",
            metric=TIME,
            baseline=EXPLICIT,
            names=NAMES,
            topic="attention",
            advice="Use {name}{where}.",
            figure=Lines(source=ratios, x="sequence", y="ratio", hue="implementation", panel="dtype", level=1),
        ),
        Compare(
            id="peak_memory",
            is_expected=True,
            text="Does any implementation need less memory at its peak than naive attention?",
            metric=PEAK,
            baseline=EXPLICIT,
            names=NAMES,
            figure=Lines(source=peaks, x="sequence", y="peak_bytes", hue="implementation", panel="dtype"),
        ),
        Check(
            id="held",
            text="Is the memory held before the backward pass what the formulas say?",
            table=held,
            measured="saved_bytes",
            predicted="predicted_bytes",
            subject="byte counts",
            within=1.02,
            configuration=CONFIGURATION,
            figure=Lines(
                source=held_at_one_head_dim,
                x="sequence",
                y="saved_bytes",
                hue="implementation",
                panel="dtype",
            ),
        ),
        Report(
            id="end_of_memory",
            text="At which length does naive attention no longer fit into this machine's memory?",
            table=end_of_memory,
            verdict="predicted",
            configuration=("batch", "head_dim"),
            says="At {sequence} tokens it needs {needed_bytes}, with a margin; this machine has {memory_bytes}.",
        ),
    ],
)
