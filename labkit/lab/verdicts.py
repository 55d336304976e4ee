"""The verdict of a comparison: its rows and all configurations together, judged by one rule."""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Literal

import pandas as pd
from scipy.special import ndtri

from labkit.bench.intervals import CONFIDENCE, POWER
from labkit.bench.statistics import MIN_RELEVANT_DIFFERENCE, with_verdicts
from labkit.lab.facts import Counts, Overall, Verdict

# A gain for which a reader would change the configuration. Rounds are planned to show it.
RELEVANT_GAIN = 0.1


def judge_together(
    table: pd.DataFrame, pooled: pd.DataFrame
) -> tuple[pd.DataFrame, dict[Any, Overall]]:
    """Judge rows and pooled rows as one question; return the rows and the others by alternative."""
    # One question, one false-discovery rate: pooled rows are comparisons, too.
    both = pd.concat([table[["ratio", "p"]], pooled[["ratio", "p"]].astype(float)])
    verdicts = with_verdicts(both)["verdict"].to_list()
    directions: dict[str, Literal["better", "worse"]] = {"faster": "better", "slower": "worse"}
    by_name = {}
    for row, verdict in zip(pooled.to_numpy(), verdicts[len(table) :], strict=True):
        name, ratio, low, high, _, n = row
        by_name[name] = Overall(ratio, low, high, int(n), directions.get(verdict))
    return table.assign(verdict=verdicts[: len(table)]), by_name


def best_overall(pooled: Mapping[Any, Overall]) -> list[Any]:
    """Return the best alternative over all configurations if it is better than the baseline."""
    better = [name for name, overall in pooled.items() if overall.direction == "better"]
    return sorted(better, key=lambda name: pooled[name].ratio)[:1]


def decide(
    counts: Counts,
    overall: Overall | None,
    ratios: pd.Series,
    *,
    has_winner: bool,
    is_open: bool,
) -> Verdict:
    """Choose the verdict by the winner's `counts`, or, without a winner, those of all rows.

    `is_open`: whether a gain of 10% may lie in the intervals (`open_widths`).
    """
    direction = overall.direction if overall else None
    is_better = counts.better > 0 or direction == "better"
    is_worse = counts.worse > 0 or direction == "worse"
    if not is_better:
        if is_worse:
            # Also if `is_open`: rows without a shown difference may hide a gain, and no sentence
            # may say that there is none.
            return "no"
        # "No clear difference" would be read as "nothing to gain", which wide intervals do not say.
        return "undecided" if is_open else "no clear difference"
    # "Yes" is for a change that a reader can make everywhere without losing. A large gain in a few
    # configurations is a gain over all of them, too, so more than half must lean that way.
    n_leaning = int((ratios <= 1 - MIN_RELEVANT_DIFFERENCE).sum())
    is_general = direction == "better" and 2 * n_leaning > counts.total
    if is_worse or not has_winner or not (counts.is_mostly_better or is_general):
        return "it depends"
    return "yes"


def find_faster(table: pd.DataFrame, rows: pd.DataFrame, keys: list[str]) -> pd.DataFrame:
    """Return the best alternative of each configuration in which it clearly beats that of `rows`.

    `keys`: the columns of a configuration. Column "index": the beaten row's label in `rows`.
    """
    others = table[(table["verdict"] == "faster") & ~table.index.isin(rows.index)]
    if not keys or others.empty:
        return others.head(0)
    fastest = others.loc[others.groupby(keys, dropna=False)["ratio"].idxmin()]
    named = rows[[*keys, "low", "ratio"]].reset_index()
    pairs = fastest.merge(named, on=keys, suffixes=("", "_named"))
    # Where intervals overlap, the order of two alternatives may be chance. Counts differ by less
    # than anybody would change a configuration for: "lighter still" was once 0.8%.
    is_apart = pairs["high"] < pairs["low_named"]
    is_relevant = pairs["ratio"] * (1 + MIN_RELEVANT_DIFFERENCE) <= pairs["ratio_named"]
    return pairs[is_apart & is_relevant]


def open_widths(rows: pd.DataFrame, pooled: Mapping[Any, Overall]) -> list[float]:
    """Return high over low of each interval in which a gain of 10% may lie.

    If there are several configurations, the intervals are those over all of them.
    """
    intervals = [(overall.low, overall.high) for overall in pooled.values()]
    if not intervals:
        certain = rows[rows["p"].notna()]
        intervals = list(zip(certain["low"], certain["high"], strict=True))
    return [high / low for low, high in intervals if low < 1 - RELEVANT_GAIN]


def seconds_more(widths: Sequence[float], timed_s: float) -> float:
    """Estimate how many seconds of rounds more would decide on a gain of 10%.

    `widths` are those of `open_widths`, and shrink with the square root of the time.
    """
    # The median: one noisy configuration does not decide how long to go on.
    half = math.log(median(widths)) / 2
    reach = ndtri((1 + CONFIDENCE) / 2)
    needed_half = -math.log(1 - RELEVANT_GAIN) * reach / (reach + ndtri(POWER))
    return max(1.0, timed_s * ((half / needed_half) ** 2 - 1))
