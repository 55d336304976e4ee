"""From the frame of a SyncBatchNorm run to the tables its findings and figures are made of.

Every table is tidy and carries units in its names. A time is that of one call, on the slowest rank of each repeat.
"""

from dataclasses import asdict
from functools import cache
from typing import Any

import pandas as pd

from labkit.bench.statistics import compare, compare_groups, summarize, with_verdicts
from labkit.lab.made_once import made_once
from labkit.lab.project import reference_directory
from labkit.lab.rows import Measured, exactly_over, in_order, select
from labkit.studies.sync_batchnorm.alternatives import ALL_REDUCES, ALONE, COLLECTIVES, LOCAL, OWN, TORCH
from labkit.studies.sync_batchnorm.worker import LAYER, PHASES

MACHINE = ("world_size", "backend", "device")
SETTING = (*MACHINE, "batch", "features")
LAYERS = Measured((*SETTING, "phase"), "alternative")
BOTH = PHASES[-1]
PRICE, COLLECTIVE, ARITHMETIC, REST = "price", "collectives", "arithmetic", "waiting and waking"
PARTS = (COLLECTIVE, ARITHMETIC, REST)
PRICES = Measured(SETTING, "part")
PUBLISHED_SELFMADE = "self-made"
COUNTS = ("world_size", "batch", "features")


def _rows(frame: pd.DataFrame, **wanted: Any) -> pd.DataFrame:
    """Timed rows of layers and bare collectives."""
    rows = select(frame, [*LAYERS.columns, "rank", "repeat", "seconds"], sweep=LAYER, **wanted)
    return rows.dropna(subset=["phase", "seconds"]).astype(dict.fromkeys(COUNTS, int))


def times(frame: pd.DataFrame, **wanted: Any) -> pd.DataFrame:
    """Median `seconds` with interval, one row per (setting, phase, alternative)."""
    return with_panel(LAYERS.medians(_rows(frame, **wanted)))


def with_panel(table: pd.DataFrame) -> pd.DataFrame:
    """Add `panel`, "2 ranks, batch 32", the panel of a figure."""
    panels = [f"{p:.0f} ranks, batch {b:.0f}" for b, p in zip(table["batch"], table["world_size"], strict=True)]
    return table.assign(panel=panels)


def phase_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Of the largest batch with the most features, medians by phase side by side, and the interval of both together."""
    table = times(frame)
    table = table[(table["batch"] == table["batch"].max()) & (table["features"] == table["features"].max())]
    keys = ["world_size", "batch", "features", "alternative"]
    medians = table.pivot_table(index=keys, columns="phase", values="seconds").reindex(columns=list(PHASES))
    both = table[table["phase"] == BOTH].set_index(keys)[["low", "high"]].add_prefix("both_")
    return medians.join(both).add_suffix("_s").reset_index().sort_values(["world_size", "forward_s"])


def ratios(frame: pd.DataFrame, alternative: str, baseline: str, **wanted: Any) -> pd.DataFrame:
    """The alternative's time over the baseline's, from the same turns, with interval and verdict, by phase."""
    return with_panel(_named(LAYERS.over(_rows(frame, alternative=[alternative, baseline], **wanted), baseline)))


def _named(table: pd.DataFrame) -> pd.DataFrame:
    return table.replace({"phase": {BOTH: "forward and backward"}})


def over_labkits(frame: pd.DataFrame) -> pd.DataFrame:
    """Forward and backward of everything that took turns over those of labkit's layer."""
    return _named(LAYERS.over(_rows(frame, phase=BOTH), OWN))


def _by_turn(frame: pd.DataFrame, *alternatives: str) -> pd.DataFrame:
    """Seconds of forward and backward, an alternative a column, one row per (setting, repeat)."""
    table = LAYERS.samples(_rows(frame, alternative=list(alternatives), phase=BOTH))
    wide = table.pivot_table(index=[*SETTING, "repeat"], columns="alternative", values="seconds")
    return wide.reindex(columns=list(alternatives)).astype(float)


@made_once
def price_samples(frame: pd.DataFrame) -> pd.DataFrame:
    """What synchronizing adds to forward and backward of plain BatchNorm, and its parts, turn by turn.

    Columns: setting, `repeat`, and in seconds
    `price`                labkit's layer less the plain one
    `collectives`          the layer's collectives alone
    `arithmetic`           the layer without its collectives, less the plain one
    `waiting and waking`   what is left: a rank waits for a slower one, threads and caches are cold after it
    Below zero where it is so.
    """
    wide = _by_turn(frame, OWN, LOCAL, COLLECTIVES, ALONE)
    price, arithmetic = wide[OWN] - wide[LOCAL], wide[ALONE] - wide[LOCAL]
    columns = {PRICE: price, COLLECTIVE: wide[COLLECTIVES], ARITHMETIC: arithmetic}
    found = pd.DataFrame(columns | {REST: price - arithmetic - wide[COLLECTIVES]})
    return found.dropna(subset=PRICE).reset_index()


def prices(frame: pd.DataFrame) -> pd.DataFrame:
    """Median `seconds` of the price and of its parts with interval; one row per (setting, `part`)."""
    long = price_samples(frame).melt([*SETTING, "repeat"], [PRICE, *PARTS], "part", "seconds")
    table = PRICES.medians(long)
    return with_panel(in_order(table, **dict.fromkeys(SETTING), part=(PRICE, *PARTS)))


def price_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Median seconds of the price and its parts side by side, one row per setting."""
    wide = prices(frame).pivot_table(index=["world_size", "batch", "features"], columns="part", values="seconds")
    return wide.reindex(columns=[PRICE, *PARTS]).add_suffix("_s").reset_index()


def price_growth(frame: pd.DataFrame) -> pd.DataFrame:
    """As `time_growth`, of the price; left out where either price may be zero, as a ratio would mean nothing."""
    return _growth(price_samples(frame).rename(columns={PRICE: "seconds"}))


def time_growth(frame: pd.DataFrame) -> pd.DataFrame:
    """The time of labkit's layer at the largest value over that at the smallest: `ratio`, interval, verdict.

    Columns: `grows` (features, batch or world_size), `before`, `after`, what stays the same. Settings are measured
    one after the other, world sizes by other ranks, so that drift of the machine is in the ratio.
    """
    return _growth(LAYERS.samples(_rows(frame, alternative=OWN, phase=BOTH)))


def _growth(table: pd.DataFrame) -> pd.DataFrame:
    found = []
    for grows in ("features", "batch", "world_size"):
        fixed = [name for name in SETTING if name != grows]
        for key, group in table.groupby(fixed):
            before, after = group[grows].min(), group[grows].max()
            first, last = (group.loc[group[grows] == value, "seconds"] for value in (before, after))
            if before < after and not any(summarize(seconds).low <= 0 for seconds in (first, last)):
                numbers = asdict(compare(last, first, interleaved=False))
                same = dict(zip(fixed, key, strict=True))
                found.append({"grows": grows, "before": before, "after": after} | same | numbers)
    columns = ["grows", "before", "after", *SETTING, "ratio", "low", "high", "p", "rounds"]
    return with_verdicts(pd.DataFrame(found, columns=columns))


def bounds(frame: pd.DataFrame) -> pd.DataFrame:
    """Forward and backward over plain BatchNorm on the local batch plus two all-reduces of each pass's bytes.

    `ratio`, interval and verdict by setting, from the same turns.
    """
    wide = _by_turn(frame, OWN, LOCAL, ALL_REDUCES).dropna()
    wide = wide.assign(bound=wide[LOCAL] + 2 * wide[ALL_REDUCES])[[OWN, "bound"]]
    long = wide.reset_index().melt([*SETTING, "repeat"], var_name="of", value_name="seconds")
    return compare_groups(long, "seconds", SETTING, "of", "bound").drop(columns="of")


def memory(frame: pd.DataFrame) -> pd.DataFrame:
    """Bytes saved for backward (in all, beside the input) and the peak, of the first rank, by alternative."""
    names = ["saved_bytes", "beside_input_bytes", "peak_bytes"]
    rows = select(frame, [*SETTING, "alternative", *names]).dropna(subset="saved_bytes")
    table = rows.groupby([*SETTING, "alternative"], as_index=False)[names].max()
    return with_panel(table.astype(dict.fromkeys((*COUNTS, *names), int)))


def memory_over(frame: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Peak bytes of labkit's layer over those of another."""
    table = select(memory(frame), alternative=[OWN, baseline])
    return exactly_over(table, SETTING, "alternative", "peak_bytes", baseline)


def errors(frame: pd.DataFrame) -> pd.DataFrame:
    """The largest error of every alternative in any setting, relative to the largest expected value; and its gate."""
    rows = select(frame, ["alternative", "error", "check"], sweep=LAYER).dropna(subset="error")
    return rows.groupby("alternative", as_index=False, sort=False).agg({"error": "max", "check": "max"})


@cache
def published() -> pd.DataFrame:
    """`sync_batchnorm.csv` in the columns of `times` and `memory`: both phases together, 2 workers."""
    table = pd.read_csv(reference_directory() / "sync_batchnorm.csv")
    names = {"batch_size": "batch", "workers": "world_size", "median_s": "seconds", "max_memory_bytes": "peak_bytes"}
    table = table.rename(columns=names).assign(phase=BOTH)
    alternative = table["implementation"].map({"torch": TORCH, "selfmade": PUBLISHED_SELFMADE})
    return with_panel(table.assign(alternative=alternative).drop(columns="implementation"))
