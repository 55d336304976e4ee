"""From the frame of an attention run to the tables its findings and figures are made of.

Every table is tidy and carries units in its names.
"""

from functools import cache
from typing import Any

import numpy as np
import pandas as pd

from labkit.bench.statistics import CONFIDENCE, MIN_SAMPLES
from labkit.costs.attention import explicit_peak, explicit_saved, tiled_saved
from labkit.lab.project import reference_directory
from labkit.lab.rows import Measured, in_order, select
from labkit.studies.attention.worker import EXPLICIT, MARGIN, TILED
from labkit.studies.shared.attention_tables import (
    BOTH,
    ORDER,
    PASSES,
    PROBLEM,
    against,
    passes,
    peaks,
    refused,
    times,
    with_mask,
)

__all__ = ["BOTH", "ORDER", "against", "refused", "times"]  # for the notebook, beside what is defined here

HEAD_DIMS = Measured(("device", "dtype", "mask", "batch", "sequence", "phase"), "head_dim", took_turns=False)
LEAST_SIZES = 3  # of a power law: two always lie on one
LARGEST_RESIDUAL = 0.25  # relative, of a power law that is said to hold


def power_laws(frame: pd.DataFrame) -> pd.DataFrame:
    """Time as a power of the sequence length, and `times_per_doubling`: what twice the length takes.

    Rows: (implementation, phase, head_dim): the longest range that ends at the longest sequence in which no median
    is off a power law by more than `LARGEST_RESIDUAL`. The interval of the exponent is by resampling the repeats of
    each size. No row where there is no such range.
    """
    rows = []
    keys = ["implementation", "head_dim", "phase"]
    samples = PASSES.samples(passes(frame, "grid"))
    samples = in_order(samples, implementation=ORDER)
    for key, group in samples.groupby(keys, sort=False):
        by_size = {int(s): g["seconds"].to_numpy() for s, g in group.groupby("sequence")}
        sizes = sorted(by_size)
        for start in range(len(sizes) - LEAST_SIZES + 1):
            found = _power_law({size: by_size[size] for size in sizes[start:]})
            if found is not None:
                rows.append(dict(zip(keys, key, strict=True)) | found)
                break
    names = [*keys, "from_sequence", "to_sequence", "times_per_doubling", "exponent", "low", "high"]
    return pd.DataFrame(rows, columns=names)


def _power_law(by_size: dict[int, np.ndarray]) -> dict[str, float] | None:
    sizes = np.log(list(by_size))
    medians = np.log([np.median(x) for x in by_size.values()])
    exponent, offset = np.polyfit(sizes, medians, 1)
    if np.expm1(np.abs(medians - exponent * sizes - offset).max()) > LARGEST_RESIDUAL:
        return None
    low = high = float("nan")
    if min(map(len, by_size.values())) >= MIN_SAMPLES:
        rng = np.random.default_rng(0)
        resampled = [np.median(x[rng.integers(0, len(x), (2000, len(x)))], axis=1) for x in by_size.values()]
        slopes = np.polyfit(sizes, np.log(resampled), 1)[0]
        low, high = np.percentile(slopes, [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)])
    found = {"from_sequence": min(by_size), "to_sequence": max(by_size), "times_per_doubling": 2**exponent}
    return found | {"exponent": exponent, "low": low, "high": high}


def width_growth(frame: pd.DataFrame) -> pd.DataFrame:
    """Explicit: time over that at the smallest head dimension, at every larger one and every length both have."""
    table = select(passes(frame, "grid"), implementation=EXPLICIT)
    return HEAD_DIMS.over(table, table["head_dim"].min())


def memory(frame: pd.DataFrame, sweep: str) -> pd.DataFrame:
    """Bytes held before backward and at the peak above the inputs, counted and by formula.

    One row per (problem, implementation). The formulas are those of explicit and of tiled attention; what a compiler
    keeps is its own affair.
    """
    columns = [*PROBLEM, "implementation"]
    rows = select(with_mask(frame), [*columns, "saved_bytes"], sweep=sweep, phase="saved")
    held = rows.groupby(columns)["saved_bytes"].sum().reset_index()
    table = held.merge(peaks(frame, sweep).drop(columns="error"), how="left")
    predicted = [_predicted(row) for row in table.to_dict("records")]
    table[["predicted_saved_bytes", "predicted_peak_bytes"]] = pd.DataFrame(predicted, columns=["saved", "peak"])
    return table.assign(measured_over_predicted=table["saved_bytes"] / table["predicted_saved_bytes"])


def _predicted(row: dict[Any, Any]) -> tuple[float, float]:
    """Bytes held and at the peak, NaN where there is no formula."""
    size = _size(row)
    if row["implementation"] == TILED:
        return sum(tiled_saved(*size).values()), float("nan")
    if row["implementation"] != EXPLICIT:
        return float("nan"), float("nan")
    saved = explicit_saved(*size, causal=False)
    inputs = saved["q"] + saved["k"] + saved["v"]
    return sum(saved.values()), sum(explicit_peak(*size, causal=False).values()) - inputs


def _size(row: dict[Any, Any]) -> tuple[int, int, int, int]:
    """b, s, d and bytes an element."""
    element = {"float64": 8, "float32": 4}.get(row["dtype"], 2)
    return int(row["batch"]), int(row["sequence"]), int(row["head_dim"]), element


def saved_tensors(frame: pd.DataFrame) -> pd.DataFrame:
    """Bytes that explicit attention holds before backward at its longest and widest problem, by tensor."""
    columns = ["sequence", "head_dim", "tensor", "saved_bytes"]
    rows = select(frame, columns, sweep="grid", phase="saved", implementation=EXPLICIT)
    rows = rows[rows["sequence"] == rows["sequence"].max()]
    rows = rows[rows["head_dim"] == rows["head_dim"].max()]
    return rows.groupby(["sequence", "tensor"])["saved_bytes"].sum().reset_index()


def too_large(frame: pd.DataFrame) -> pd.DataFrame:
    """The tensors of the shortest explicit attention, a power of two long, that does not fit into the free memory.

    At the batch and the largest head dimension of the run's grid, by formula; needed is `MARGIN` more. Columns:
    batch, head_dim, sequence, tensor ("all together" and "available" at last), bytes and share_percent. Empty if the
    run did not say how much memory was free.
    """
    columns = ["batch", "head_dim", "sequence", "tensor", "bytes", "share_percent"]
    grid = select(frame, ["available_bytes", "head_dim"], sweep="grid").dropna(subset="available_bytes")
    if grid.empty:
        return pd.DataFrame(columns=columns)
    # before anything large ran
    available, row = float(frame["available_bytes"].max()), grid.loc[grid["head_dim"].idxmax()].to_dict()
    for exponent in range(6, 31):
        b, s, d, e = _size(row | {"sequence": 2**exponent})
        tensors = explicit_peak(b, s, d, e, causal=False)
        total = sum(tensors.values())
        if MARGIN * total > available:
            break
    table = pd.DataFrame([*tensors.items(), ("all together", total)], columns=["tensor", "bytes"])
    table = table.assign(share_percent=100 * table["bytes"] / total, batch=b, head_dim=d, sequence=s)
    free = {"tensor": "available", "bytes": available, "batch": b, "head_dim": d, "sequence": s}
    return pd.concat([table, pd.DataFrame([free])], ignore_index=True)[columns]


@cache
def published() -> pd.DataFrame:
    """`attention_compile.csv` in long form: head_dim, sequence, implementation, phase, seconds."""
    table = pd.read_csv(reference_directory() / "attention_compile.csv").rename(columns={"seq_len": "sequence"})
    rows = [
        table[["sequence", "head_dim"]].assign(implementation=name, phase=phase, seconds=table[column] / 1e3)
        for name, word in ((EXPLICIT, "eager"), ("compiled", "compiled"))
        for phase, column in (("forward", f"{word}_forward_ms"), ("backward", f"{word}_backward_ms"))
    ]
    return pd.concat(rows, ignore_index=True)
