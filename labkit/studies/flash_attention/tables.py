"""From the frame of a FlashAttention run to the tables its findings and figures are made of.

Every table is tidy and carries units in its names.
"""

from functools import cache
from textwrap import shorten

import pandas as pd

from labkit.bench.statistics import with_verdicts
from labkit.costs.attention import BACKWARD_OVER_FORWARD, forward_flops, visited_share
from labkit.costs.calibration import Calibration
from labkit.lab.project import reference_directory
from labkit.lab.rows import Measured, select
from labkit.studies.flash_attention.recorded import RecordedRun, has_flash
from labkit.studies.flash_attention.worker import ALL_TECHNIQUES, CAUSAL, FULL, TECHNIQUES
from labkit.studies.shared.attention_passes import EXPLICIT, FLASH
from labkit.studies.shared.attention_tables import (
    BOTH,
    ORDER,
    PROBLEM,
    against,
    peaks,
    refused,
    times,
    with_mask,
)

__all__ = ["BOTH", "ORDER", "against", "peaks", "times"]  # for the notebook, beside what is defined here

KERNELS = Measured(PROBLEM, "implementation")
HIDDEN_TILES = "skip_hidden_tiles"
"""The one technique that tiled attention has, too."""
FLOPS_OF_FORWARD = {"forward": 1.0, "backward": BACKWARD_OVER_FORWARD, BOTH: 1 + BACKWARD_OVER_FORWARD}
REASON_WIDTH = 160  # characters: a long one goes on in the run
# What is left of the kernel's time with a technique, at best: if nothing but the work it saves took time.
# exp2 saves one of six operations on a score outside the matrix units (scale, maximum, subtraction, exponential,
# sum, conversion); masks only at edges save comparison and selection, two of eight; half of all blocks are hidden.
PREDICTED = {"exp2": 5 / 6, "skip_hidden": 1 / 2, "mask_only_edges": 6 / 8}


def widest(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the largest head dimension, the one that figures show."""
    return table[table["head_dim"] == table["head_dim"].max()]


def beats_from(frame: pd.DataFrame) -> pd.DataFrame:
    """From which length on an implementation is faster than explicit at every length and head dimension measured.

    Both passes together, one row per (dtype, implementation): `from_sequence` (NaN: from none), smallest and largest
    `ratio` from there on, and `longest`, the last length compared.
    """
    rows = []
    table = with_verdicts(select(against(frame, "lengths"), phase=BOTH))
    for (dtype, name), group in table.groupby(["dtype", "implementation"]):
        beyond = group[group["sequence"] > group.loc[group["verdict"] != "faster", "sequence"].max()]
        beyond = group if (group["verdict"] == "faster").all() else beyond
        row = {"dtype": dtype, "implementation": name, "from_sequence": beyond["sequence"].min()}
        row |= {"least_ratio": beyond["ratio"].min(), "most_ratio": beyond["ratio"].max()}
        rows.append(row | {"longest": group["sequence"].max()})
    names = ["dtype", "implementation", "from_sequence", "least_ratio", "most_ratio", "longest"]
    return pd.DataFrame(rows, columns=names)


def shares(frame: pd.DataFrame, calibration: Calibration | None) -> pd.DataFrame:
    """Useful FLOP/s of each phase, and as a percentage of the calibrated rate of the fastest product in its dtype.

    Columns: dtype, head_dim, sequence, phase, implementation, `tflop_per_s`, `matmul_tflop_per_s`, `share_percent` with
    its interval `low`, `high`. Without what has no calibrated product in its dtype.
    """
    keys, rows = ["dtype", "head_dim", "sequence", "phase", "implementation"], []
    for row in times(frame, "lengths").to_dict("records"):
        if calibration is None or not calibration.knows(row["device"]):
            continue
        rate = calibration.of_ranks(1, row["device"]).flops_per_s(row["dtype"])
        flops = forward_flops(row["batch"], row["sequence"], row["head_dim"], causal=True)
        flops *= FLOPS_OF_FORWARD[row["phase"]]
        # the longest time is the lowest rate
        bounds = dict(zip(("share_percent", "low", "high"), ("seconds", "high", "low"), strict=True))
        of_rate = {name: 100 * flops / row[bound] / rate for name, bound in bounds.items()}
        speeds = {"tflop_per_s": flops / row["seconds"] / 1e12, "matmul_tflop_per_s": rate / 1e12}
        rows.append({key: row[key] for key in keys} | speeds | of_rate)
    names = [*keys, "tflop_per_s", "matmul_tflop_per_s", "share_percent", "low", "high"]
    return pd.DataFrame(rows, columns=names).dropna(subset="share_percent")


def reasons(frame: pd.DataFrame) -> pd.DataFrame:
    """Why implementations have no times: one row per reason, cut to a line, with the lengths it holds for."""
    table = refused(frame)
    table = table.assign(check=[shorten(text, REASON_WIDTH, placeholder=" …") for text in table["check"]])
    grouped = table.groupby(["implementation", "dtype", "check"], sort=False)["sequence"].agg(["min", "max", "size"])
    grouped = grouped.reset_index().rename(columns={"min": "from", "max": "to", "size": "points", "check": "reason"})
    return grouped[["implementation", "dtype", "from", "to", "points", "reason"]]


def techniques(frame: pd.DataFrame) -> pd.DataFrame:
    """Time with a technique over time without: the kernel's, then tiled attention causal over full.

    `predicted` is the smallest ratio it could have: see `PREDICTED`; of tiled attention the share of tiles that some
    query sees, those on the diagonal whole.
    """
    rows = with_mask(frame)
    wanted = {"sweep": "techniques", "phase": "kernel"}
    tables = [
        KERNELS.over(rows, f"without {name}", **wanted, implementation=[ALL_TECHNIQUES, f"without {name}"]).assign(
            implementation=name, predicted=PREDICTED[name]
        )
        for name in TECHNIQUES
    ]
    hidden = KERNELS.over(rows, FULL, sweep="hidden", phase="kernel", implementation=[CAUSAL, FULL])
    tiles = select(frame, ["sequence", "tiles"], sweep="hidden").groupby("sequence")["tiles"].first()
    predicted = [visited_share(number) for number in hidden["sequence"].map(tiles)]
    tables.append(hidden.assign(implementation=HIDDEN_TILES, predicted=predicted))
    table = pd.concat([table for table in tables if len(table)] or tables[:1], ignore_index=True)
    return with_verdicts(table.rename(columns={"implementation": "technique"}))


def kernel_times(frame: pd.DataFrame, recorded: RecordedRun | None) -> tuple[pd.DataFrame, pd.DataFrame, str]:
    """Times of the Triton kernel and SDPA here; those of the kernel on a GPU of the project; and their label.

    Both passes at the largest head dimension. Without a kernel here or there all is empty; nothing is recorded of it
    where it was timed here.
    """
    here = widest(select(times(frame, "lengths"), phase=BOTH))
    here = select(here, implementation=[FLASH, "sdpa"])
    if has_flash(frame):
        return here, here.iloc[:0], ""
    if recorded is None:
        return here.iloc[:0], here.iloc[:0], ""
    table = select(times(recorded.frame, "lengths"), phase=BOTH, implementation=FLASH)
    if len(here):
        table = select(table, head_dim=here["head_dim"].max(), dtype=set(here["dtype"]))
    return here, table, recorded.label


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
            implementation=name, phase=phase, seconds=pd.to_numeric(table[f"{word}_{column}_ms"], errors="coerce") / 1e3
        )
        for name, word in ((EXPLICIT, "eager"), (FLASH, "flash"))
        for phase, column in (("forward", "forward"), ("backward", "backward"), (BOTH, "both"))
    ]
    return pd.concat(rows, ignore_index=True).dropna(subset="seconds")
