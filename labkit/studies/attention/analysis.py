"""From the frame of an attention run to the tables its answers and figures are made of.

Every table is tidy and carries units in its names. "both" is forward and backward of one round together.
"""

from functools import cache

import numpy as np
import pandas as pd

from labkit.bench.statistics import CONFIDENCE, FEWEST_SAMPLES, compare_groups, resampled_medians
from labkit.costs.attention import explicit_peak, explicit_saved, matrix_bytes, tiled_saved
from labkit.lab.project import reference_directory
from labkit.studies.attention.worker import EXPLICIT, IMPLEMENTATIONS, MARGIN, TILED
from labkit.studies.shared.attention_tables import SETTING, against, empty, refused, samples, times, with_width

__all__ = ["refused", "times"]  # for the notebook and the answers, beside what is defined here

ORDER = IMPLEMENTATIONS
PUBLISHED_BATCH = 8
GIB = 2**30
LEAST_SIZES = 3  # of a power law: two always lie on one
LARGEST_RESIDUAL = 0.25  # relative, of a power law that is said to hold


def against_explicit(frame: pd.DataFrame, implementation: str, sweep: str) -> pd.DataFrame:
    """Time of an implementation over that of the explicit one in the same rounds, with interval and verdict."""
    ratios = against(frame, sweep)
    return ratios[ratios["implementation"] == implementation]


def memory(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a (setting, implementation): bytes held before backward and at the peak, and what was predicted.

    `peak_bytes` is the growth above the inputs. The prediction is that of the explicit version, or of tiling.
    """
    if frame.empty or not {"saved_bytes", "peak_bytes"} <= set(frame):
        return empty("saved_bytes", "peak_bytes", "predicted_saved_bytes", "predicted_peak_bytes", "width")
    by = [*SETTING, "implementation"]
    saved = frame[frame["phase"] == "saved"].groupby(by)["saved_bytes"].sum()
    peaks = frame[frame["phase"] == "both"].groupby(by)["peak_bytes"].max()
    table = pd.concat([saved, peaks], axis=1).dropna(subset="saved_bytes").reset_index()
    predicted = [_predicted(row) for row in table.to_dict("records")]
    table[["predicted_saved_bytes", "predicted_peak_bytes"]] = pd.DataFrame(predicted, columns=["saved", "peak"])
    return with_width(table)


def _predicted(row: dict[str, object]) -> tuple[float, float]:
    size = _size(row)
    if row["implementation"] == TILED:
        return sum(tiled_saved(*size).values()), float("nan")
    saved = explicit_saved(*size, causal=False)
    if row["implementation"] != EXPLICIT:  # a compiler may keep more or less alive at the peak
        return sum(saved.values()), float("nan")
    inputs = saved["q"] + saved["k"] + saved["v"]
    return sum(saved.values()), sum(explicit_peak(*size, causal=False).values()) - inputs


def _size(row: dict[str, object]) -> tuple[int, int, int, int]:
    """b, s, d and bytes an element."""
    element = {"float64": 8, "float32": 4}.get(str(row["dtype"]), 2)
    b, s, d = (int(str(row[name])) for name in ("batch", "sequence", "head_dim"))
    return b, s, d, element


def memory_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Measured beside predicted, at the longest sequence of each head dimension and implementation."""
    table = memory(frame)
    table = table[table["sweep"] == "grid"]
    largest = table[table["sequence"] == table.groupby(["head_dim", "implementation"])["sequence"].transform("max")]
    ratio = largest["saved_bytes"] / largest["predicted_saved_bytes"]
    names = ["head_dim", "sequence", "implementation", "predicted_saved_bytes", "saved_bytes"]
    return largest[names].assign(measured_over_predicted=ratio)


def smallest_too_large(frame: pd.DataFrame) -> dict[str, int] | None:
    """The first power of two at which explicit attention, with its margin, needs more memory than there is.

    Tensor by tensor, at the batch and the largest head dimension of the run's grid. Keys: the tensors, and "sequence".
    """
    if frame.empty or "available_bytes" not in frame:
        return None
    grid = frame[(frame["sweep"] == "grid") & frame["available_bytes"].notna()]
    if grid.empty:
        return None
    available, row = most_available(frame), grid.loc[grid["head_dim"].idxmax()].to_dict()
    for exponent in range(6, 31):
        b, s, d, e = _size(row | {"sequence": 2**exponent})
        needed = explicit_peak(b, s, d, e, causal=False)
        if MARGIN * sum(needed.values()) > available:
            return {"sequence": s, "batch": b, "head_dim": d} | needed
    return None


def most_available(frame: pd.DataFrame) -> float:
    """Memory that was free before anything large ran, in bytes."""
    return float(frame["available_bytes"].max())


def accounting(frame: pd.DataFrame) -> pd.DataFrame:
    """Tensor by tensor, what the smallest explicit attention that does not fit would need."""
    needed = smallest_too_large(frame)
    if needed is None:
        return pd.DataFrame(columns=["tensor", "bytes", "share_percent"])
    tensors = {name: n for name, n in needed.items() if name not in ("sequence", "batch", "head_dim")}
    total = sum(tensors.values())
    rows = [{"tensor": name, "bytes": n, "share_percent": 100 * n / total} for name, n in tensors.items()]
    rows.append({"tensor": "all together", "bytes": total, "share_percent": 100.0})
    rows.append({"tensor": "available", "bytes": int(most_available(frame)), "share_percent": float("nan")})
    return pd.DataFrame(rows)


def power_laws(frame: pd.DataFrame) -> pd.DataFrame:
    """Exponent of time in the sequence length, by (implementation, phase, head_dim), and the range it holds in.

    The longest range that ends at the longest sequence in which no median is off a power law by more than
    `LARGEST_RESIDUAL`. The interval is by resampling the repeats of each size. No row where there is no such range.
    """
    rows = []
    for key, group in samples(frame, "grid").groupby(["implementation", "phase", "head_dim"]):
        by_size = {int(s): g["seconds"].to_numpy() for s, g in group.groupby("sequence")}
        sizes = sorted(by_size)
        for start in range(len(sizes) - LEAST_SIZES + 1):
            found = _power_law({size: by_size[size] for size in sizes[start:]})
            if found["largest_residual"] <= LARGEST_RESIDUAL:
                rows.append(dict(zip(("implementation", "phase", "head_dim"), key, strict=True)) | found)
                break
    names = ["implementation", "phase", "head_dim", "from_sequence", "to_sequence"]
    return pd.DataFrame(rows, columns=[*names, "exponent", "low", "high", "largest_residual"])


def _power_law(by_size: dict[int, np.ndarray]) -> dict[str, float]:
    sizes = np.log(list(by_size))
    exponent, offset = np.polyfit(sizes, np.log([np.median(x) for x in by_size.values()]), 1)
    medians = np.log([np.median(x) for x in by_size.values()])
    residual = float(np.expm1(np.abs(medians - exponent * sizes - offset).max()))
    low = high = float("nan")
    if min(map(len, by_size.values())) >= FEWEST_SAMPLES:
        resampled = [resampled_medians(x, seed) for seed, x in enumerate(by_size.values())]
        slopes = np.polyfit(sizes, np.log(resampled), 1)[0]
        low, high = np.percentile(slopes, [50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)])
    range_of = {"from_sequence": min(by_size), "to_sequence": max(by_size)}
    return range_of | {"exponent": exponent, "low": low, "high": high, "largest_residual": residual}


def width_growth(frame: pd.DataFrame) -> pd.DataFrame:
    """Explicit: time at the largest head dimension over time at the smallest, at the longest sequence both have."""
    table = samples(frame, "grid")
    table = table[table["implementation"] == EXPLICIT]
    few, many = table["head_dim"].min(), table["head_dim"].max()
    common = set(table.loc[table["head_dim"] == few, "sequence"])
    common &= set(table.loc[table["head_dim"] == many, "sequence"])
    if not common or few == many:
        return pd.DataFrame(
            columns=["phase", "head_dim", "ratio", "low", "high", "verdict", "from_head_dim", "sequence"]
        )
    at = table[(table["sequence"] == max(common)) & table["head_dim"].isin([few, many])]
    ratios = compare_groups(at, "seconds", ["phase"], "head_dim", few, interleaved=False)
    return ratios.assign(from_head_dim=few, sequence=max(common))


def compile_seconds(frame: pd.DataFrame) -> pd.Series:
    """Seconds of the first call of the compiled version, by point, in the order in which they were made."""
    if frame.empty or "first_call_s" not in frame:
        return pd.Series(dtype=float)
    return frame["first_call_s"].dropna().reset_index(drop=True)


@cache
def published() -> pd.DataFrame:
    """Both `attention_*.csv` in long form: head_dim, sequence, implementation, phase, seconds."""
    table = pd.read_csv(reference_directory() / "attention_compile.csv")
    rows = [
        table[["seq_len", "head_dim"]].assign(implementation=name, phase=phase, seconds=table[column] / 1e3)
        for name, word in ((EXPLICIT, "eager"), ("compiled", "compiled"))
        for phase, column in (("forward", f"{word}_forward_ms"), ("backward", f"{word}_backward_ms"))
    ]
    return with_width(pd.concat(rows, ignore_index=True).rename(columns={"seq_len": "sequence"}))


@cache
def published_ratios() -> pd.DataFrame:
    """Compiled over eager, published."""
    table = published().pivot(index=["sequence", "head_dim", "phase"], columns="implementation", values="seconds")
    return with_width((table["compiled"] / table[EXPLICIT]).rename("ratio").reset_index())


@cache
def published_memory() -> pd.DataFrame:
    """`attention_eager.csv`: bytes held before backward; `matrices`, how many (batch, s, s) matrices those are."""
    table = pd.read_csv(reference_directory() / "attention_eager.csv").rename(columns={"seq_len": "sequence"})
    held = table["memory_gib"] * GIB
    matrices = held / [matrix_bytes(PUBLISHED_BATCH, s, 4) for s in table["sequence"]]
    keep = table[["sequence", "head_dim"]].assign(implementation=EXPLICIT, saved_bytes=held, matrices=matrices)
    return with_width(keep)
