"""From the frame of a FlashAttention run to the tables its answers and figures are made of.

Every table is tidy and carries units in its names. "both" is forward and backward of one round together.
"""

from functools import cache
from textwrap import shorten
from typing import Any

import pandas as pd

from labkit.bench.statistics import compare, compare_groups, judged
from labkit.costs.attention import BACKWARD_OVER_FORWARD, forward_flops, visited_share
from labkit.lab.evidence import significant
from labkit.lab.project import reference_directory
from labkit.studies.flash_attention.recorded import RecordedRun, has_flash
from labkit.studies.flash_attention.worker import ALL_TECHNIQUES, CAUSAL, FULL, TECHNIQUES
from labkit.studies.shared.attention_passes import EXPLICIT, FLASH
from labkit.studies.shared.attention_tables import SETTING, against, empty, refused, samples, times, with_width

__all__ = ["against", "refused", "samples", "times"]  # for the notebook and the answers, beside what is defined here

ORDER = (
    EXPLICIT,
    "compiled",
    "tiled",
    FLASH,
    "sdpa",
    "sdpa_flash",
    "sdpa_efficient",
    "sdpa_cudnn",
    "sdpa_math",
)
FLOPS_OF_FORWARD = {"forward": 1.0, "backward": BACKWARD_OVER_FORWARD, "both": 1 + BACKWARD_OVER_FORWARD}
REASON_WIDTH = 160  # characters: a long one goes on in the run
# What is left of the kernel's time with a technique, at best: if nothing but the work it saves took time.
# exp2 saves one of six operations on a score outside the matrix units (scale, maximum, subtraction, exponential,
# sum, conversion); masks only at edges save comparison and selection, two of eight; half of all blocks are hidden.
PREDICTED = {"exp2": 5 / 6, "skip_hidden": 1 / 2, "mask_only_edges": 6 / 8}


def lengths(frame: pd.DataFrame, phase: str = "both") -> pd.DataFrame:
    """Times of one phase at the largest head dimension, the one that figures show."""
    table = times(frame, "lengths")
    return table[(table["phase"] == phase) & (table["head_dim"] == table["head_dim"].max())]


def ratios(frame: pd.DataFrame, phase: str = "both") -> pd.DataFrame:
    """Time of each implementation over that of the explicit one, of one phase, all head dimensions."""
    table = against(frame, "lengths")
    return judged(table[table["phase"] == phase])


def beats_from(frame: pd.DataFrame) -> pd.DataFrame:
    """From which length on an implementation is faster than explicit at every length and head dimension measured.

    One row a (dtype, implementation): `from_sequence` (NaN: from none), smallest and largest `ratio` from there on,
    and `longest`, the last length compared.
    """
    rows = []
    for (dtype, name), group in ratios(frame).groupby(["dtype", "implementation"]):
        starts = sorted(group["sequence"].unique())
        faster = set(significant(group)[0].index)
        won = [s for s in starts if set(group.index[group["sequence"] >= s]) <= faster]
        beyond = group[group["sequence"] >= won[0]] if won else group.iloc[:0]
        row = {"dtype": dtype, "implementation": name, "from_sequence": won[0] if won else float("nan")}
        row |= {"least_ratio": beyond["ratio"].min(), "most_ratio": beyond["ratio"].max(), "longest": starts[-1]}
        rows.append(row)
    names = ["dtype", "implementation", "from_sequence", "least_ratio", "most_ratio", "longest"]
    return pd.DataFrame(rows, columns=names)


def matmul_rates(frame: pd.DataFrame) -> dict[str, tuple[float, list[float]]]:
    """By dtype: floating-point operations of the large product, and seconds of its repeats."""
    if frame.empty or "seconds" not in frame:
        return {}
    products = frame[frame["sweep"] == "matmul"].dropna(subset="seconds")
    return {
        str(dtype): (2.0 * int(group["sequence"].iloc[0]) ** 3, group["seconds"].tolist())
        for dtype, group in products.groupby("dtype")
    }


def shares(frame: pd.DataFrame) -> pd.DataFrame:
    """Useful FLOP/s of each phase, and as a percentage of what a large product of the same dtype reaches here.

    Columns: setting, implementation, phase, `tflop_per_s`, `share_percent` with its interval `low`, `high`.
    """
    products, rows = matmul_rates(frame), []
    keys = [*SETTING, "implementation", "phase"]
    for key, seconds in samples(frame, "lengths").groupby(keys)["seconds"]:
        row: dict[str, Any] = dict(zip(keys, key, strict=True))
        if row["dtype"] not in products:
            continue
        of_product, product_s = products[row["dtype"]]
        forward = forward_flops(row["batch"], row["sequence"], row["head_dim"], causal=True)
        flops = forward * FLOPS_OF_FORWARD[row["phase"]]
        ratio = compare(product_s, seconds, interleaved=False)
        percent = 100 * flops / of_product
        row |= {"tflop_per_s": flops / seconds.median() / 1e12, "share_percent": percent * ratio.ratio}
        rows.append(row | {"low": percent * ratio.low, "high": percent * ratio.high})
    return pd.DataFrame(rows, columns=[*keys, "tflop_per_s", "share_percent", "low", "high"])


def peaks(frame: pd.DataFrame) -> pd.DataFrame:
    """Peak memory of a forward and backward pass above the inputs, one row a (setting, implementation)."""
    if frame.empty or "peak_bytes" not in frame:
        return with_width(empty("peak_bytes", "error"))
    table = frame[(frame["sweep"] == "lengths") & frame["peak_bytes"].notna()]
    return with_width(table[[*SETTING, "implementation", "peak_bytes", "error"]].reset_index(drop=True))


def reasons(frame: pd.DataFrame) -> pd.DataFrame:
    """Why implementations did not run: one row a reason, cut to a line, with the lengths it holds for."""
    table = refused(frame)
    table = table.assign(gate=[shorten(text, REASON_WIDTH, placeholder=" …") for text in table["gate"]])
    grouped = table.groupby(["implementation", "dtype", "gate"], sort=False)["sequence"].agg(["min", "max", "size"])
    grouped = grouped.reset_index().rename(columns={"min": "from", "max": "to", "size": "points", "gate": "reason"})
    return grouped[["implementation", "dtype", "from", "to", "points", "reason"]]


def techniques(frame: pd.DataFrame) -> pd.DataFrame:
    """The kernel with all techniques over the kernel without one: below 1, the technique pays.

    `predicted` is the smallest ratio it could have, see `PREDICTED`; 1 where the work it saves is hidden behind other.
    """
    names = ["sequence", "dtype", "head_dim", "technique", "predicted", "ratio", "low", "high", "verdict"]
    table = _kernel_samples(frame, "techniques")
    rows = []
    for name in TECHNIQUES:
        pair = table[table["implementation"].isin([ALL_TECHNIQUES, f"without {name}"])]
        compared = compare_groups(pair, "seconds", SETTING, "implementation", f"without {name}")
        rows.append(compared.assign(technique=name, predicted=PREDICTED[name]))
    return judged(pd.concat(rows, ignore_index=True))[names]


def hidden(frame: pd.DataFrame) -> pd.DataFrame:
    """Tiled attention, causal over full: predicted is the share of tiles that some query sees, those on the diagonal
    whole."""
    table = _kernel_samples(frame, "hidden")
    compared = compare_groups(table, "seconds", SETTING, "implementation", FULL)
    compared = compared[compared["implementation"] == CAUSAL].assign(technique="skip_hidden")
    tiles = table.groupby("sequence")["tiles"].first() if "tiles" in table else {}
    compared = compared.assign(predicted=[visited_share(tiles[s]) for s in compared["sequence"]])
    return compared[["sequence", "dtype", "head_dim", "technique", "predicted", "ratio", "low", "high", "verdict"]]


def _kernel_samples(frame: pd.DataFrame, sweep: str) -> pd.DataFrame:
    if frame.empty or "seconds" not in frame:
        return empty("repeat", "seconds")
    return frame[(frame["sweep"] == sweep) & (frame["phase"] == "kernel")].dropna(subset="seconds")


def with_recorded(frame: pd.DataFrame, recorded: RecordedRun | None) -> tuple[pd.DataFrame, str]:
    """Times of the Triton kernel on a GPU of the project, and their label; none where the kernel was timed here.

    Columns as those of `lengths`, at the head dimension that its figures show.
    """
    own = lengths(frame)
    if recorded is None or has_flash(frame):
        return own.iloc[:0], "recorded"
    table = times(recorded.frame, "lengths")
    wanted = own["head_dim"].max() if len(own) else table["head_dim"].max()
    kept = (table["phase"] == "both") & (table["implementation"] == FLASH) & (table["head_dim"] == wanted)
    kept &= table["dtype"].isin(own["dtype"]) if len(own) else True
    return table[kept], recorded.label


@cache
def published() -> pd.DataFrame:
    """`flash_attention.csv` in long form, without the rows that ran out of memory.

    Columns: dtype, head_dim, sequence, implementation ("explicit" or "flash"), phase, seconds.
    """
    table = pd.read_csv(reference_directory() / "flash_attention.csv")
    table = table.rename(columns={"seq_len": "sequence"})
    table["dtype"] = table["precision"].map({"fp32": "float32", "bf16": "bfloat16"})
    rows = [
        table[["dtype", "head_dim", "sequence"]].assign(
            implementation=name, phase=phase, seconds=pd.to_numeric(table[f"{word}_{phase}_ms"], errors="coerce") / 1e3
        )
        for name, word in ((EXPLICIT, "eager"), (FLASH, "flash"))
        for phase in ("forward", "backward", "both")
    ]
    return with_width(pd.concat(rows, ignore_index=True).dropna(subset="seconds"))


def published_like(table: pd.DataFrame, phase: str = "both") -> pd.DataFrame:
    """The published rows with the dtypes and the head dimension of a table of times."""
    rows = published()
    same = rows["dtype"].isin(table["dtype"]) & rows["head_dim"].isin(table["head_dim"])
    return rows[same & (rows["phase"] == phase)]
