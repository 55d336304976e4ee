"""The limits of this machine: arithmetic, memory, threads, messages. A run is also the machine's
calibration."""

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Any, Literal

import numpy as np
import pandas as pd
from pydantic import Field

from labkit.bench.statistics import MIN_RELEVANT_DIFFERENCE
from labkit.costs.calibration import ALL_REDUCE
from labkit.costs.transformer import SIZES
from labkit.lab.answers import Compare, Report
from labkit.lab.calibration import MEMORY
from labkit.lab.config import Count, DeviceConfig, Seconds, SeveralRanks, Some, one_of
from labkit.lab.declaration import Lab
from labkit.lab.figures import Lines
from labkit.lab.metric import Metric, Results
from labkit.machine.description import Machine
from labkit.studies.limits.worker import LimitPoint, measure

KIB = 2**10
MIB = 2**20
# Large enough to use every thread, and too large for any cache.
THREADED_ROWS = 1024
THREADED_BYTES = 64 * MIB
ITSELF_ROWS = 512
ITSELF_BYTES = MIB
# More than other points need: the widths of intervals are the result here, not the ratios.
ITSELF_REPEATS = 20
ITSELF_RANKS = 2


class LimitsConfig(DeviceConfig):
    # At least 8: a matmul of the batched one has an eighth of the largest side.
    matmul_sizes: Some[Annotated[int, Field(ge=8, le=2**15)]] = [2**k for k in range(4, 12)]
    """Rows of square matrices."""
    dtypes: Some[Literal["float32", "float64", "bfloat16", "float16"]] = ["float32", "bfloat16"]
    copy_sizes_bytes: Some[Count] = [64, *(KIB * 4**k for k in range(10))]
    """Arrays that are copied and added."""
    exchange_sizes_bytes: list[Count] = [KIB, 16 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB]
    """Messages between ranks."""
    ranks: list[SeveralRanks] = [2, 4]
    """Numbers of ranks that all-reduce."""
    model: Annotated[str, one_of(lambda: SIZES)] = "mini"
    """The model whose operators are timed, for the roofline."""
    batch: Count = 4
    context_length: Count = 128
    rounds_s: Seconds | None = 1.0


MATMUL = Metric(
    "seconds",
    "shape",
    ("device", "dtype", "dimensions", "flops"),
    where={"sweep": "products", "world_size": 1},
)
THREADS = Metric("seconds", "threads", ("operation",), where={"sweep": "threads"})
EXCHANGE = Metric(
    "seconds", "way", ("world_size", "n_bytes"), where={"sweep": "exchange", "what": ALL_REDUCE}
)
ITSELF = Metric(
    "seconds", "repetition", ("world_size", "device", "operation"), where={"sweep": "itself"}
)
OPERATOR_KEYS = ("device", "model", "batch", "context_length", "flops", "bytes")
OPERATORS = Metric("seconds", "operator", OPERATOR_KEYS, where={"sweep": "operators"})


def points(config: LimitsConfig, machine: Machine) -> Iterator[LimitPoint]:
    """Plan matmuls, memory and operators on the device; threads and messages on the CPU."""
    device = machine.device(config.device)
    rows = config.matmul_sizes
    arrays = config.copy_sizes_bytes
    threaded = (min(THREADED_ROWS, max(rows)), min(THREADED_BYTES, max(arrays)))
    on_cpu: dict[str, Any] = {"device": "cpu", "dtype": "float32"}
    for dtype in config.dtypes:
        yield LimitPoint.of(config, sweep="products", device=device, dtype=dtype, sizes=rows)
    yield LimitPoint.of(config, sweep="memory", device=device, sizes=arrays)
    yield LimitPoint.of(config, sweep="operators", device=device)
    yield LimitPoint.of(config, sweep="threads", sizes=threaded, **on_cpu)
    for sweep, sizes, largest in (("products", rows, threaded[0]), ("memory", arrays, threaded[1])):
        # The sizes of a GPU's profile would take a CPU minutes.
        fitting = [size for size in sizes if device == "cpu" or size <= largest]
        yield LimitPoint.of(config, sweep=sweep, sizes=fitting, **on_cpu)
    # All rounds are run: with fewer, intervals would be as wide as the rounds are few.
    rounds = {"repeats": max(config.repeats, ITSELF_REPEATS), "gain": 0.0, "rounds_s": None}
    yield LimitPoint.of(config, sweep="autograd", sizes=(threaded[1],), **on_cpu | rounds)
    itself = partial(LimitPoint.of, config, sweep="itself", sizes=(ITSELF_ROWS, ITSELF_BYTES))
    yield itself(**on_cpu | {"device": device} | rounds)
    # CPU ranks are measured on every machine: gloo and shared memory connect them.
    exchange = partial(LimitPoint.of, config, sweep="exchange", sizes=config.exchange_sizes_bytes)
    for ranks in sorted(config.ranks):
        on_ranks = on_cpu | {"world_size": ranks, "backend": "gloo"}
        if ranks == ITSELF_RANKS:
            yield itself(**on_ranks | rounds)
        if config.exchange_sizes_bytes:
            yield exchange(**on_ranks)
            if machine.backend(device, ranks) == "nccl":
                yield exchange(**on_ranks | {"device": device, "backend": "nccl"})


def matmuls(results: Results) -> pd.DataFrame:
    """Return medians of each matmul, its FLOP/s, and the percentage of its dtype's best rate."""
    table = MATMUL.medians(results.frame)
    table = table.assign(flops_per_s=table["flops"] / table["seconds"])
    best = table.groupby(["device", "dtype"])["flops_per_s"].transform("max")
    # The axis of the figure has square matmuls alone: the others have no single size.
    is_square = table["shape"].str.startswith("square")
    size = table["shape"].where(is_square).str.removeprefix("square ").astype(float)
    table = table.assign(rows=size, of_best_percent=100 * table["flops_per_s"] / best)
    return table.sort_values(["device", "dtype", "flops"], ignore_index=True)


def memory(results: Results) -> pd.DataFrame:
    """Return medians of copies and additions, and bytes per second, read and written together."""
    table = MEMORY.medians(results.frame)
    return table.assign(bytes_per_s=table["bytes"] / table["seconds"]).sort_values(
        ["device", "operation", "n_bytes"], ignore_index=True
    )


def shortest_all_reduce(results: Results) -> pd.DataFrame:
    """Return the time of the shortest all-reduce, and the rate of the longest one.

    Measured, not fitted: the fitted rate of all lengths was 16% above that of the longest.
    """
    keys = ["world_size", "way"]
    table = EXCHANGE.medians(results.frame)
    table["bytes_per_s"] = table["n_bytes"] / table["seconds"]
    # Medians are sorted by their keys, and so by length.
    table["bytes_per_s"] = table.groupby(keys)["bytes_per_s"].transform("last")
    shortest = table["n_bytes"] == table["n_bytes"].min()
    return table[shortest].drop(columns=["low", "high", "n"]).reset_index(drop=True)


def against_itself(results: Results) -> pd.DataFrame:
    """Return the ratio of an operator to itself, and the smallest difference that it can show."""
    table = ITSELF.ratios_to("first", results.frame)
    # Half of the interval's width: a ratio this far from 1 has an interval without 1.
    half = np.sqrt((table["high"] / table["low"]).astype(float)) - 1
    smallest = 100 * np.maximum(half, MIN_RELEVANT_DIFFERENCE).where(half.notna())
    return table.assign(smallest_percent=smallest).dropna(subset="smallest_percent")


def roofline(results: Results) -> pd.DataFrame:
    """Return the operators of a step, the limit that binds each, and its time over the limit's."""
    table = OPERATORS.medians(results.frame)
    if table.empty:
        return table
    on_device = f"device == '{table['device'].iloc[0]}'"
    best = matmuls(results).query(f"dtype == 'float32' and {on_device}")
    added = memory(results).query(f"operation == 'add' and {on_device}")
    if best.empty or added.empty:
        return table.iloc[:0]
    # The longest addition lies in no cache, as activations of a real model do not.
    moved_per_s = added.loc[added["n_bytes"].idxmax(), "bytes_per_s"]
    limits = pd.DataFrame(
        {
            "arithmetic": table["flops"] / best["flops_per_s"].max(),
            "memory": table["bytes"] / moved_per_s,
            # The shortest addition has next to nothing to do.
            "the call": added["seconds"].min(),
        }
    )
    bound = limits.idxmax(axis=1)
    share = 100 * bound.map(bound.value_counts()) / len(bound)
    table = table.assign(
        intensity=table["flops"] / table["bytes"],
        flops_per_s=table["flops"] / table["seconds"],
        bound=bound,
        of_operators_percent=share,
        measured_over_limit=table["seconds"] / limits.max(axis=1),
        roof_flops_per_s=table["flops"] / limits[["arithmetic", "memory"]].max(axis=1),
    )
    return table.sort_values("intensity", ignore_index=True)


def roof(results: Results) -> pd.DataFrame:
    """Return the operators with the ridge, at which the roof of arithmetic meets that of memory."""
    table = roofline(results)
    if table.empty:
        return table
    # Left of the ridge FLOP/s grow with the intensity: their ratio is memory's bytes per second.
    # The lowest intensity is that of an operator by element, left of the ridge of any machine.
    leftmost = table.iloc[0]
    bytes_per_s = leftmost["roof_flops_per_s"] / leftmost["intensity"]
    highest = table["roof_flops_per_s"].max()
    ridge = {
        "intensity": highest / bytes_per_s,
        "roof_flops_per_s": highest,
        # A point of the line needs an operator's name, whichever it is.
        "operator": leftmost["operator"],
    }
    return pd.concat([table, pd.DataFrame([ridge])]).sort_values("intensity", ignore_index=True)


def fastest_matmul(table: pd.DataFrame) -> Any:
    """Return the index of the fastest in float32, or of all if none was measured in it."""
    # The page's other rates are of float32, too.
    rows = table[table["dtype"] == "float32"]
    if rows.empty:
        rows = table
    return rows["flops_per_s"].idxmax()


def longest_addition(table: pd.DataFrame) -> Any:
    """Return the index of the longest addition, on the GPU if there is one."""
    rows = table.query("operation == 'add' and device == device.max()")  # "cuda" > "cpu"
    return rows["n_bytes"].idxmax()


LAB = Lab(
    name="limits",
    title="The limits of this machine",
    summary=(
        "What this machine can do at best (arithmetic, memory, threads, messages), and what limits"
        " each operator."
    ),
    config=LimitsConfig,
    smoke={"model": "nano", "context_length": 64},
    paper={
        "matmul_sizes": [2**k for k in range(4, 14)],
        "dtypes": ["float32", "float64", "bfloat16", "float16"],
        "copy_sizes_bytes": [64, *(KIB * 2**k for k in range(21))],
        "exchange_sizes_bytes": [KIB * 4**k for k in range(10)],
        "ranks": [2, 4, 6],
        "model": "large",
        "context_length": 512,
    },
    on_gpu={
        "matmul_sizes": [2**k for k in range(6, 14)],
        "copy_sizes_bytes": [64, *(KIB * 4**k for k in range(11))],
        "ranks": [2, 4, 8],
        "model": "small",
    },
    worker=measure,
    points=points,
    # Rows of most sweeps have no alternatives: the sweep names what failed.
    alternatives=("way", "sweep"),
    names={1: "on one thread", 2: "an operator on two threads"}
    | {n: f"an operator on {n} threads" for n in range(3, 257)},
    questions=[
        Report(
            id="matmuls",
            text="How fast are matmuls, and which shape is fastest?",
            table=matmuls,
            pick=fastest_matmul,
            configuration=("device", "dtype"),
            says="Matmuls in {dtype} reach {flops_per_s} ({shape}).",
            figure=Lines(x="rows", y="flops_per_s", hue="dtype", panel="device"),
        ),
        Report(
            id="memory",
            text="How fast is memory?",
            table=memory,
            pick=longest_addition,
            configuration=("device",),
            says="Additions of arrays of {n_bytes} move {bytes_per_s}, read and written together.",
            figure=Lines(x="n_bytes", y="bytes_per_s", hue="operation", panel="device"),
        ),
        Compare(
            id="threads",
            is_expected=True,
            text="Do more threads make an operator faster?",
            metric=THREADS,
            baseline=1,
        ),
        Report(
            id="exchange",
            text=(
                "How long does the shortest all-reduce take, and how many bytes per second does a"
                " long one move?"
            ),
            table=shortest_all_reduce,
            pick=lambda table: table.sort_values(["world_size", "way"]).index[0],
            configuration=("world_size", "way"),
            says=(
                "Between {world_size} ranks over {way}, the shortest all-reduce takes {seconds};"
                " the longest moves {bytes_per_s}."
            ),
            figure=Lines(source=EXCHANGE, x="n_bytes", panel="world_size"),
        ),
        Report(
            id="roofline",
            text=(
                "Which operators of a Transformer step are bound by arithmetic, and which by"
                " memory?"
            ),
            table=roofline,
            pick=lambda table: table["of_operators_percent"].idxmax(),
            configuration=("model", "batch", "context_length", "device"),
            says=(
                "By FLOPs and bytes, {of_operators_percent}% of the operators of {model} are"
                " limited by {bound}."
            ),
            figure=Lines(
                source=roof,
                x="intensity",
                y="flops_per_s",
                hue="operator",
                reference="roof_flops_per_s",
            ),
        ),
        Report(
            id="smallest_difference",
            text="What is the smallest difference that this machine can show today?",
            table=against_itself,
            pick=lambda table: table["smallest_percent"].idxmax(),
            configuration=("operation",),
            says=(
                "Between two {operation}s, the least precise here, differences below"
                " {smallest_percent}% cannot be seen."
            ),
        ),
    ],
)
