"""From the frame of a SyncBatchNorm run to the tables its answers and figures are made of.

Every table is tidy and carries units in its names. A time is that of one call, on the slowest rank of each repeat.
"""

from dataclasses import asdict
from functools import cache
from itertools import chain

import pandas as pd

from labkit.bench.statistics import compare, compare_groups, judged, slowest_rank, summarize, summarize_groups
from labkit.lab.project import reference_directory
from labkit.studies.sync_batchnorm.alternatives import ALL_REDUCES, ALONE, COLLECTIVES, LOCAL, OWN, TORCH
from labkit.studies.sync_batchnorm.worker import LAYER, PHASES

MACHINE = ["world_size", "backend", "device"]
SETTING = [*MACHINE, "batch", "features"]
KEYS = [*SETTING, "phase"]
BOTH = PHASES[-1]
PRICE, COLLECTIVE, ARITHMETIC, REST = "price", "collectives", "arithmetic", "waiting and waking"
PARTS = (COLLECTIVE, ARITHMETIC, REST)
PUBLISHED_SELFMADE = "self-made"
NO_RATIO = dict.fromkeys(("ratio", "low", "high", "p"), float("nan"))


def samples(frame: pd.DataFrame, *alternatives: str, phase: str | None = None) -> pd.DataFrame:
    """`seconds` of the slowest rank, one row a (setting, phase, alternative, repeat); of all, or of those named."""
    columns = [*KEYS, "alternative", "repeat", "seconds"]
    if frame.empty or not {"sweep", "phase", "seconds"} <= set(frame.columns):
        return pd.DataFrame(columns=columns)
    rows = frame[frame["sweep"] == LAYER].dropna(subset=["phase", "seconds"])
    if alternatives:
        rows = rows[rows["alternative"].isin(alternatives)]
    if phase:
        rows = rows[rows["phase"] == phase]
    table = slowest_rank(rows, "seconds", [*KEYS, "alternative"])[columns]
    return table.astype(dict.fromkeys(("world_size", "batch", "features"), int))


def times(frame: pd.DataFrame, *alternatives: str, phase: str | None = None) -> pd.DataFrame:
    """Median `seconds` with interval, one row a (setting, phase, alternative); of all, or of those named."""
    table = summarize_groups(samples(frame, *alternatives, phase=phase), "seconds", [*KEYS, "alternative"])
    return with_panel(table.rename(columns={"median": "seconds"}))


def with_panel(table: pd.DataFrame) -> pd.DataFrame:
    """Add `panel`, "2 ranks, batch 32", the panel of a figure."""
    panels = [f"{p:.0f} ranks, batch {b:.0f}" for b, p in zip(table["batch"], table["world_size"], strict=True)]
    return table.assign(panel=panels)


def phase_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Of the largest batch with the most features, medians by phase side by side, and the interval of both together."""
    if frame.empty or "features" not in frame:
        return pd.DataFrame(columns=["world_size", "batch", "features", "alternative"])
    largest = (frame["batch"] == frame["batch"].max()) & (frame["features"] == frame["features"].max())
    table = times(frame[largest])
    keys = ["world_size", "batch", "features", "alternative"]
    medians = table.pivot_table(index=keys, columns="phase", values="seconds").reindex(columns=list(PHASES))
    both = table[table["phase"] == BOTH].set_index(keys)[["low", "high"]].add_prefix("both_")
    return medians.join(both).add_suffix("_s").reset_index().sort_values(["world_size", "forward_s"])


def ratios(frame: pd.DataFrame, alternative: str, baseline: str, phase: str | None = BOTH) -> pd.DataFrame:
    """The alternative's time over the baseline's, from the same turns, with interval and verdict. None: every phase."""
    both = samples(frame, alternative, baseline, phase=phase)
    return with_panel(compare_groups(both, "seconds", KEYS, "alternative", baseline))


def price_samples(frame: pd.DataFrame, phase: str = BOTH) -> pd.DataFrame:
    """What synchronizing adds to plain BatchNorm on the local batch, and its parts, turn by turn.

    Columns: setting, phase, `repeat`, and in seconds
    `price`                labkit's layer less the plain one
    `collectives`          the layer's collectives alone
    `arithmetic`           the layer without its collectives, less the plain one
    `waiting and waking`   what is left: a rank waits for a slower one, threads and caches are cold after it
    Below zero where it is so.
    """
    table = samples(frame, OWN, LOCAL, COLLECTIVES, ALONE, phase=phase)
    wide = table.pivot_table(index=[*KEYS, "repeat"], columns="alternative", values="seconds")
    wide = wide.reindex(columns=[OWN, LOCAL, COLLECTIVES, ALONE])
    price, arithmetic = wide[OWN] - wide[LOCAL], wide[ALONE] - wide[LOCAL]
    columns = {PRICE: price, COLLECTIVE: wide[COLLECTIVES], ARITHMETIC: arithmetic}
    found = pd.DataFrame(columns | {REST: price - arithmetic - wide[COLLECTIVES]})
    return found.dropna(subset=PRICE).reset_index()


def prices(frame: pd.DataFrame, phase: str = BOTH) -> pd.DataFrame:
    """Median `seconds` of the price and of its parts with interval; one row a (setting, phase, `part`)."""
    names = [PRICE, *PARTS]
    long = price_samples(frame, phase).melt([*KEYS, "repeat"], names, "part", "seconds").dropna(subset="seconds")
    table = summarize_groups(long, "seconds", [*KEYS, "part"]).rename(columns={"median": "seconds"})
    order = {name: index for index, name in enumerate(names)}
    table = table.sort_values([*KEYS, "part"], key=lambda c: c.map(order) if c.name == "part" else c)
    return with_panel(table.reset_index(drop=True))


def price_table(frame: pd.DataFrame, phase: str = BOTH) -> pd.DataFrame:
    """Median seconds of the price and its parts side by side, one row a setting."""
    wide = prices(frame, phase).pivot_table(index=SETTING, columns="part", values="seconds")
    return wide.reindex(columns=[PRICE, *PARTS]).add_suffix("_s").reset_index().drop(columns=["backend", "device"])


def growth(frame: pd.DataFrame) -> pd.DataFrame:
    """The price at the largest value over that at the smallest: `ratio`, interval, verdict ("slower": it grew).

    No ratio and the verdict "no difference shown" where either price is not shown to be above zero.

    Columns: `grows` (features, batch or world_size), `before`, `after`, what stays the same. Settings are measured
    one after the other, world sizes by other ranks, so that drift of the machine is in the ratio.
    """
    return _growth(price_samples(frame).rename(columns={PRICE: "seconds"}))


def is_above_zero(prices: pd.DataFrame) -> pd.Series:
    """Of rows of `prices`: whether the interval is wholly above zero; only then a ratio or a share means anything."""
    return prices["low"] > 0


def time_growth(frame: pd.DataFrame, alternative: str = OWN) -> pd.DataFrame:
    """As `growth`, of the time of an alternative."""
    return _growth(samples(frame, alternative, phase=BOTH))


def _growth(table: pd.DataFrame) -> pd.DataFrame:
    found = []
    for grows in ("features", "batch", "world_size"):
        fixed = [name for name in SETTING if name != grows]
        for key, group in table.groupby(fixed):
            before, after = group[grows].min(), group[grows].max()
            if before == after:
                continue
            first, last = (group.loc[group[grows] == value, "seconds"] for value in (before, after))
            if all(summarize(seconds).low > 0 for seconds in (first, last)):
                numbers = asdict(compare(last, first, interleaved=False))
            else:
                numbers = NO_RATIO
            same = dict(zip(fixed, key, strict=True))
            found.append({"grows": grows, "before": before, "after": after} | same | numbers)
    columns = ["grows", "before", "after", *SETTING, "ratio", "low", "high", "p"]
    return judged(pd.DataFrame(found, columns=columns))


def bounds(frame: pd.DataFrame) -> pd.DataFrame:
    """Forward and backward over plain BatchNorm on the local batch plus twice two bare all-reduces of the same bytes.

    `ratio`, interval and verdict by setting, from the same turns.
    """
    table = samples(frame, OWN, LOCAL, ALL_REDUCES, phase=BOTH)
    wide = table.pivot_table(index=[*SETTING, "repeat"], columns="alternative", values="seconds")
    wide = wide.reindex(columns=[OWN, LOCAL, ALL_REDUCES]).dropna()
    bound = wide[LOCAL] + 2 * wide[ALL_REDUCES]
    pieces = [wide[OWN].rename("seconds").reset_index(), bound.rename("seconds").reset_index()]
    both = pd.concat([pieces[0].assign(of=OWN), pieces[1].assign(of="bound")])
    return with_panel(compare_groups(both, "seconds", SETTING, "of", "bound")).drop(columns="of")


def memory(frame: pd.DataFrame) -> pd.DataFrame:
    """Bytes saved for backward (in all, beside the input) and the peak, of the first rank, by alternative."""
    names = ["saved_bytes", "beside_input_bytes", "peak_bytes"]
    columns = [*SETTING, "alternative", *names]
    if frame.empty or "saved_bytes" not in frame:
        return pd.DataFrame(columns=[*columns, "panel"])
    rows = frame.dropna(subset="saved_bytes")
    table = rows.groupby([*SETTING, "alternative"], as_index=False)[names].max()
    return with_panel(table.astype(dict.fromkeys(("world_size", "batch", "features", *names), int)))


def errors(frame: pd.DataFrame) -> pd.DataFrame:
    """The largest error of every alternative in any setting, relative to the largest expected value; and its gate."""
    if frame.empty or "error" not in frame:
        return pd.DataFrame(columns=["alternative", "error", "gate"])
    rows = frame[frame["sweep"] == LAYER].dropna(subset="error")
    return rows.groupby("alternative", as_index=False, sort=False).agg({"error": "max", "gate": "max"})


def refusals(frame: pd.DataFrame) -> list[str]:
    """What torch said where its layer does not take the input."""
    if "refused" not in frame:
        return []
    return sorted(set(frame["refused"].dropna()))


@cache
def published() -> pd.DataFrame:
    """`sync_batchnorm.csv` in the columns of `times` and `memory`: both phases together, 2 workers."""
    table = pd.read_csv(reference_directory() / "sync_batchnorm.csv")
    names = {"batch_size": "batch", "workers": "world_size", "median_s": "seconds", "max_memory_bytes": "peak_bytes"}
    table = table.rename(columns=names).assign(phase=BOTH)
    alternative = table["implementation"].map({"torch": TORCH, "selfmade": PUBLISHED_SELFMADE})
    return with_panel(table.assign(alternative=alternative).drop(columns="implementation"))


def order_of_hues(*groups: tuple[str, ...]) -> list[str]:
    """Every name that a figure may show, so that each keeps its color."""
    return list(dict.fromkeys([*chain(*groups), PUBLISHED_SELFMADE]))
