"""From the frame of a limits run to its tables: rates, what bounds an operator, and the regime of a model's step."""

import numpy as np
import pandas as pd

from labkit.bench.statistics import MIN_RELEVANT_DIFFERENCE
from labkit.costs.transformer import BACKWARD_OVER_FORWARD, forward_flops, n_parameters
from labkit.lab.calibration import transports
from labkit.lab.made_once import made_once
from labkit.lab.rows import Measured, select
from labkit.nn.transformer import SIZES
from labkit.studies.limits.worker import FROM_GPU, TO_GPU

PRODUCTS = Measured(("device", "dtype", "dimensions", "flops", "bytes"), "shape")
MEMORY = Measured(("device", "n_bytes", "bytes"), "operation")
OPERATORS = Measured(("device", "model", "batch", "context_length", "flops", "bytes"), "operator")
THREADS = Measured(("operation",), "threads")
RANKS = Measured(("shape", "flops"), "world_size", took_turns=False)
ITSELF = Measured(("world_size", "device", "operation"), "repetition")
NEAR = 0.8  # of the best rate: from here on a size counts as large enough

# A step in float32, by layer: operators that read and write activations (forward, and about twice as many backward),
# and the passes over (tokens, d_model) that they make; over (heads, S, S) the explicit attention makes five.
CALLS_PER_LAYER, PASSES_PER_LAYER, ATTENTION_PASSES = 25, 20, 5
BYTES_OF_ADAMW = 28  # per parameter: gradient, weight and two averages read, the last three written


def products(frame: pd.DataFrame) -> pd.DataFrame:
    """Median seconds of a product with interval, FLOP/s, and the share of the best rate of its dtype."""
    table = PRODUCTS.medians(frame, sweep="products", world_size=1)
    table = table.assign(flops_per_s=table["flops"] / table["seconds"])
    best = table.groupby(["device", "dtype"])["flops_per_s"].transform("max")
    size = table["shape"].where(table["shape"].str.startswith("square")).str.removeprefix("square ")
    kind = table["shape"].str.split().str[0]
    table = table.assign(size=pd.to_numeric(size), kind=kind, of_best_percent=100 * table["flops_per_s"] / best)
    return table.sort_values(["device", "dtype", "kind", "flops"], ignore_index=True)


@made_once
def memory(frame: pd.DataFrame) -> pd.DataFrame:
    """Median seconds of a copy or an addition with interval, and bytes per second, read and written together."""
    table = MEMORY.medians(frame, sweep="memory", world_size=1)
    return table.assign(bytes_per_s=table["bytes"] / table["seconds"]).sort_values(["operation", "n_bytes"])


def transfers(table: pd.DataFrame) -> dict[str, float]:
    """Bytes per second of the fastest copy to the GPU and from it, from memory that may move and that is pinned."""
    copies = table[table["operation"].str.startswith((TO_GPU, FROM_GPU))]
    return copies.groupby("operation")["bytes_per_s"].max().to_dict()


def threads(frame: pd.DataFrame) -> pd.DataFrame:
    """The time of each operator with several threads over that with one."""
    ratios = THREADS.over(frame, 1, sweep="threads")
    return ratios.assign(threads=ratios["threads"].astype(int))


def against_itself(frame: pd.DataFrame) -> pd.DataFrame:
    """An operator over itself: `ratio` with interval, and the smallest difference that such an interval can show.

    `smallest_percent`: half of the interval's width, as a factor, or the least that is ever claimed.
    """
    table = ITSELF.over(frame, "first", sweep="itself")
    half = np.sqrt((table["high"] / table["low"]).astype(float)) - 1
    smallest = np.maximum(half, MIN_RELEVANT_DIFFERENCE).where(half.notna())
    return table.drop(columns="repetition").assign(smallest_percent=100 * smallest)


def of_steps(frame: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """The rows of a table of `frame` that are of the device which steps run on: the GPU, if there is one."""
    devices = set(select(frame, ["device"], sweep="operators")["device"])
    return select(table, device=list(devices)) if devices else table


def call_s(frame: pd.DataFrame) -> float:
    """Seconds of an addition that has next to nothing to add; NaN if no run has one."""
    return float(select(of_steps(frame, memory(frame)), operation="add")["seconds"].min())


def operators(frame: pd.DataFrame) -> pd.DataFrame:
    """The operators of a step: intensity (FLOPs per byte), what each limit alone would take, and what binds.

    Limits are the best product in float32, the fastest addition that comes from memory, and the cost of a call.
    """
    table, rates = OPERATORS.medians(frame, sweep="operators"), limits(frame)
    if table.empty or rates is None:
        added = ["intensity", "flops_per_s", "predicted_s", "bound", "measured_over_predicted"]
        return table.iloc[:0].reindex(columns=[*table.columns, *added])
    flops_per_s, bytes_per_s, per_call = rates
    limited = {"arithmetic": table["flops"] / flops_per_s, "memory": table["bytes"] / bytes_per_s, "the call": per_call}
    bounds = pd.DataFrame(limited)
    return table.assign(
        intensity=table["flops"] / table["bytes"],
        flops_per_s=table["flops"] / table["seconds"],
        predicted_s=bounds.max(axis=1),
        bound=bounds.idxmax(axis=1),
        measured_over_predicted=table["seconds"] / bounds.max(axis=1),
    )


def limits(frame: pd.DataFrame) -> tuple[float, float, float] | None:
    """FLOP/s of the best float32 product, bytes/s of the longest addition, seconds of a call; None if one lacks."""
    best = select(of_steps(frame, products(frame)), dtype="float32")
    moved = select(of_steps(frame, memory(frame)), operation="add")
    if best.empty or moved.empty:
        return None
    return float(best["flops_per_s"].max()), float(moved.iloc[-1]["bytes_per_s"]), call_s(frame)


def exchanges(frame: pd.DataFrame) -> pd.DataFrame:
    """What an all-reduce, messages in a row and messages at once cost, by way and ranks: a call, a message, a byte."""
    rates = [(one, 1 / one.beta_s_per_byte if one.beta_s_per_byte else float("nan")) for one in transports(frame)]
    rows = [(one.way, one.what, one.ranks, one.call_s, one.alpha_s, rate, one.error) for one, rate in rates]
    names = ["way", "what", "world_size", "call_s", "alpha_s", "bytes_per_s", "median_error"]
    return pd.DataFrame(rows, columns=names)


def regimes(frame: pd.DataFrame, batch: int = 4, context: int = 128) -> pd.DataFrame:
    """A training step of each named model: what arithmetic, memory and calls alone would take, and the largest."""
    rates, rows = limits(frame), []
    columns = ["model", "parameters", "arithmetic_s", "memory_s", "calls_s", "regime"]
    if rates is None:
        return pd.DataFrame(columns=columns)
    flops_per_s, bytes_per_s, per_call = rates
    for name, shape in SIZES.items():
        flops = (1 + BACKWARD_OVER_FORWARD) * sum(forward_flops(shape, batch, context).values())
        activations = shape.n_layers * 4 * batch * context
        passes = PASSES_PER_LAYER * shape.d_model + ATTENTION_PASSES * shape.n_heads * context
        parts = {
            "arithmetic_s": flops / flops_per_s,
            "memory_s": (3 * activations * passes + BYTES_OF_ADAMW * n_parameters(shape)) / bytes_per_s,
            "calls_s": 3 * CALLS_PER_LAYER * shape.n_layers * per_call,
        }
        regime = max(parts, key=lambda part: parts[part]).removesuffix("_s")
        rows.append({"model": name, "parameters": n_parameters(shape), **parts, "regime": regime})
    return pd.DataFrame(rows, columns=columns)


def second_rank(frame: pd.DataFrame) -> float | None:
    """Products per second of two ranks together over those of one rank with all threads, of the largest that both did.

    On the CPU, in float32.
    """
    table = RANKS.medians(frame, sweep="products", device="cpu", dtype="float32")
    wide = table[table["shape"].str.startswith("square")].pivot_table(
        index="flops", columns="world_size", values="seconds"
    )
    if not {1, 2} <= set(wide.columns) or wide[[1, 2]].dropna().empty:
        return None
    seconds = wide[[1, 2]].dropna().iloc[-1]
    return float(2 * seconds[1] / seconds[2])
