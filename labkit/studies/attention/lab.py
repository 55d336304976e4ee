"""Attention: what it costs in time and memory, and which implementation is best here, from which
length up."""

from collections.abc import Sequence
from functools import partial
from itertools import product
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import Field

from labkit.costs.attention import (
    BACKWARD_OVER_FORWARD,
    explicit_peak,
    explicit_saved,
    forward_flops,
    tiled_saved,
)
from labkit.lab.answers import Check, Compare, Report
from labkit.lab.config import Count, DeviceConfig, Seconds, Sessions, Some, one_of
from labkit.lab.declaration import Lab
from labkit.lab.figures import Lines
from labkit.lab.metric import Metric, Results
from labkit.lab.point import repeat_in_sessions
from labkit.machine.description import Machine
from labkit.nn.attention_implementations import IMPLEMENTATIONS, register
from labkit.studies.attention.worker import (
    BOTH,
    COMPILED,
    EXPLICIT,
    FLASH,
    MARGIN,
    TILED,
    AttentionPoint,
    measure,
)
from labkit.studies.shared import tasks

SESSIONS_UP_TO = 2048  # tokens; at longer sequences processes hardly differ
# Gradients of shorter sequences are sums of too few terms to be checked.
Length = Annotated[int, Field(ge=16, lt=2**31)]


class AttentionConfig(DeviceConfig):
    sequences: Some[Length] = [256, 512, 1024, 2048, 4096]
    head_dims: Some[Annotated[int, Field(ge=1, le=1024)]] = [64]
    dtypes: Some[Literal["float32", "bfloat16", "float16"]] = ["float32", "bfloat16"]
    implementations: list[Annotated[str, one_of(lambda: IMPLEMENTATIONS)]] = [
        name for name in IMPLEMENTATIONS if name != "sdpa_math"
    ]
    """Compared with naive attention. SDPA's unfused backend is measured only if it is named."""
    compiled_sequences: list[Length] = []
    """Lengths at which compiled attention is measured; none on a CPU but in the profile `paper`,
    since each shape takes seconds to compile."""
    batch: Count = 1
    """Sequences times heads."""
    causal: bool = True
    sessions: Sessions = 2
    """How often lengths of up to 2048 tokens are measured, each time by other processes."""
    max_bytes: int = Field(2**29, ge=0)
    """An implementation that needs more is skipped; 0: only one that does not fit into memory
    is."""
    rounds_s: Seconds | None = 1.0


CONFIGURATION = ("device", "dtype", "batch", "head_dim", "sequence")
TIME = Metric("seconds", "implementation", CONFIGURATION, where={"phase": BOTH})
PHASES = Metric("seconds", "implementation", (*CONFIGURATION, "phase"))
PEAK = Metric("peak_bytes", "implementation", CONFIGURATION, exact=True)
# Figures show this head dimension, and this dtype unless panels show all.
AT = {"head_dim": 64, "dtype": "float32"}
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
    """Plan each dtype from short to long; then short lengths again in further sessions."""
    # Every question compares with naive attention, which comes first and once.
    names = dict.fromkeys([EXPLICIT, *config.implementations])
    make_point = partial(AttentionPoint.of, config, device=machine.device(config.device))
    once: list[AttentionPoint] = []
    sizes = product(config.dtypes, sorted(config.sequences), config.head_dims)
    for dtype, sequence, head_dim in sizes:
        is_compiled = sequence in config.compiled_sequences
        measured = tuple(name for name in names if name != COMPILED or is_compiled)
        once.append(
            make_point(implementations=measured, dtype=dtype, sequence=sequence, head_dim=head_dim)
        )
    short = [point for point in once if point.sequence <= SESSIONS_UP_TO]
    return [*once, *repeat_in_sessions(short, config.sessions)]


def growth(results: Results) -> pd.DataFrame:
    """Return the time of both passes, its growth since half the length, and useful FLOP/s."""
    table = TIME.medians(results.frame)
    if table.empty:
        return table
    keys = [*(name for name in CONFIGURATION if name != "sequence"), "implementation"]
    # The row before, since medians are sorted by their keys, and so by length.
    before = table.groupby(keys, dropna=False)[["sequence", "seconds"]].shift()
    ratio = (table["seconds"] / before["seconds"]).where(
        table["sequence"] == 2 * before["sequence"]
    )
    # The first row's: a run has one mask for all its problems.
    causal = bool(results.frame["causal"].iloc[0])
    sizes = table[["batch", "sequence", "head_dim"]].to_numpy()
    flops = [(1 + BACKWARD_OVER_FORWARD) * forward_flops(*size, causal=causal) for size in sizes]
    return table.assign(times_per_doubling=ratio, flops_per_s=flops / table["seconds"])


def longest_naive(table: pd.DataFrame) -> Any:
    """Pick naive attention's longest float32 row that has its growth; None if there is none."""
    naive = table[(table["implementation"] == EXPLICIT) & (table["dtype"] == "float32")]
    grown = naive[naive["times_per_doubling"].notna()]
    return None if grown.empty else grown["sequence"].idxmax()


def held(results: Results) -> pd.DataFrame:
    """Return bytes that autograd holds between the passes, and the formulas' bytes."""
    keys = [*CONFIGURATION, "causal", "implementation"]
    rows = results.rows([*keys, "saved_bytes"]).dropna(subset="saved_bytes")
    # What the others hold is their libraries' choice, for which there is no formula.
    rows = rows[rows["implementation"].isin([EXPLICIT, TILED])]
    table = rows.groupby(keys, as_index=False)["saved_bytes"].sum()
    predicted = [_predict_held(row) for row in table.to_dict("records")]
    return table.assign(predicted_bytes=predicted).drop(columns="causal")


def _predict_held(row: dict[str, Any]) -> int:
    element_bytes = 4 if row["dtype"] == "float32" else 2
    size = row["batch"], row["sequence"], row["head_dim"], element_bytes
    if row["implementation"] == TILED:
        return sum(tiled_saved(*size).values())
    return sum(explicit_saved(*size, causal=row["causal"]).values())


def end_of_memory(results: Results) -> pd.DataFrame:
    """Return the predicted peak of naive attention by length, up to the first that does not fit.

    In float32 and with a margin, for the run's batch and its largest head dimension.
    """
    frame = results.frame
    if frame.empty or not results.machine_bytes > 0:  # also if it is not known, NaN
        return pd.DataFrame()
    batch = int(frame["batch"].iloc[0])
    head_dim = int(frame["head_dim"].max())
    causal = bool(frame["causal"].iloc[0])
    sequence = 256
    needed = 0.0
    rows: list[dict[str, Any]] = []
    while needed <= results.machine_bytes:
        needed = MARGIN * sum(explicit_peak(batch, sequence, head_dim, 4, causal=causal).values())
        rows.append(
            {"batch": batch, "head_dim": head_dim, "sequence": sequence, "needed_bytes": needed}
        )
        sequence *= 2
    return pd.DataFrame(rows).assign(memory_bytes=results.machine_bytes)


LAB = Lab(
    name="attention",
    title="Attention",
    summary=(
        "What attention costs in time and memory, and which implementation is best here, from which"
        " length up."
    ),
    config=AttentionConfig,
    # As in data/reference/flash_attention.csv, and compiled as in attention_compile.csv.
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
        "sequences": [1024, 2048, 4096, 8192, 16384],
        "head_dims": [64, 128],
        "compiled_sequences": [1024],
        "sessions": 1,
        "max_bytes": 0,
    },
    preload=("torch._inductor.compile_fx",),
    worker=measure,
    points=points,
    plugin_parameter="implementations",
    task=tasks.ATTENTION,
    register=register,
    alternatives=("implementation",),
    names=NAMES,
    questions=[
        Report(
            id="growth",
            text="How does the time of both passes grow with the sequence length?",
            table=growth,
            pick=longest_naive,
            configuration=CONFIGURATION,
            says=(
                "At {sequence} tokens naive attention takes {times_per_doubling} times as long as"
                " at half the length."
            ),
            figure=Lines(source=PHASES, x="sequence", panel="phase", at=AT),
        ),
        Compare(
            id="fastest",
            text="Is any implementation faster than naive attention, and from which length up?",
            metric=TIME,
            baseline=EXPLICIT,
            topic="attention",
            advice="Use {name}{where}.",
            figure=Lines(x="sequence", hue="implementation", panel="dtype", at=AT),
        ),
        Compare(
            id="peak_memory",
            is_expected=True,
            text="Does any implementation need less memory at its peak than naive attention?",
            metric=PEAK,
            baseline=EXPLICIT,
            figure=Lines(source=PEAK, x="sequence", panel="dtype", at=AT),
        ),
        Check(
            id="held",
            text="Is the memory held before the backward pass what the formulas say?",
            table=held,
            measured="saved_bytes",
            predicted="predicted_bytes",
            subject="byte counts",
            within=1.02,
            figure=Lines(x="sequence", y="saved_bytes", hue="implementation", panel="dtype", at=AT),
        ),
        Report(
            id="end_of_memory",
            text="At which length does naive attention no longer fit into this machine's memory?",
            table=end_of_memory,
            verdict="predicted",
            configuration=("batch", "head_dim"),
            says=(
                "At {sequence} tokens naive attention needs {needed_bytes}, with a margin; this"
                " machine has {memory_bytes}."
            ),
        ),
    ],
)
