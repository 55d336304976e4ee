"""From a run's long frame to tidy tables: what was measured, declared once, then samples, medians and ratios of it."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from labkit.bench.sessions import combine_sessions
from labkit.bench.statistics import compare_groups, slowest_rank, summarize_groups, with_verdicts

TURN = "session"
"""The column that tells apart what several groups of ranks measured of one setting."""


def select(frame: pd.DataFrame, columns: Iterable[str] = (), **wanted: Any) -> pd.DataFrame:
    """The rows in which each column of `wanted` has that value, or one of those in a list, tuple or set.

    A frame that lacks a column, as that of a run without such points does, has no such rows: the result is empty, and
    has all the columns that were asked for.
    """
    missing = [name for name in (*columns, *wanted) if name not in frame]
    if missing:
        # of objects, as all tables without rows are: they can be merged
        return frame.iloc[:0].reindex(columns=list(dict.fromkeys([*frame.columns, *missing]))).astype(object)
    kept = np.ones(len(frame), dtype=bool)  # the rows are copied once, with all their columns
    for name, value in wanted.items():
        is_one = frame[name].isin(value) if isinstance(value, list | tuple | set) else frame[name] == value
        kept &= is_one.to_numpy(dtype=bool, na_value=False)
    return frame[kept] if wanted else frame


def in_order(table: pd.DataFrame, **orders: Iterable[Any] | None) -> pd.DataFrame:
    """Sorted by these columns, the first one first, each in the order that is given; None: from small to large.

    What an order does not name comes after it, as it appears in the table.
    """
    places = {
        name: {value: place for place, value in enumerate(dict.fromkeys([*order, *table[name]]))}
        for name, order in orders.items()
        if order
    }
    return table.sort_values(
        list(orders),
        key=lambda values: values.map(places[values.name]) if values.name in places else values,
        kind="stable",
        ignore_index=True,
    )


def summed(rows: pd.DataFrame, column: str, parts: Collection[str], name: str, by: Iterable[str]) -> pd.DataFrame:
    """Seconds of the parts of a repeat together, as one more part called `name`; of repeats that have them all.

    `column` names the part, `by` are the columns of the setting and the alternative.
    """
    keys = [key for key in dict.fromkeys([*by, TURN, "rank", "repeat"]) if key in rows and key != column]
    of_repeats = rows[rows[column].isin(parts)].groupby(keys, dropna=False)["seconds"]
    table = of_repeats.agg(["sum", "count"]).rename(columns={"sum": "seconds"}).reset_index()
    return table[table["count"] == len(parts)].drop(columns="count").assign(**{column: name})


@dataclass(frozen=True)
class Measured:
    """Samples of a time (or another quantity that is better when smaller) by setting and alternative.

    `setting` are the columns that tell comparisons apart, `alternative` is the one that names what took turns. The
    slowest rank of each repeat counts. `took_turns`: repeat i of all alternatives was measured in one round. `exact`:
    a count, such as of bytes, which no noise blurs; of several the largest stands for its alternative. A frame may have
    a column `session`: what other groups of ranks measured at another time (`labkit.bench.sessions`).
    """

    setting: tuple[str, ...]
    alternative: str
    value: str = "seconds"
    took_turns: bool = True
    exact: bool = False

    @property
    def columns(self) -> list[str]:
        return [*self.setting, self.alternative]

    def samples(self, frame: pd.DataFrame, **wanted: Any) -> pd.DataFrame:
        """One row per (setting, alternative, turn, repeat): `value` of the slowest rank. Rows as `select` has them."""
        rows = select(frame, [*self.columns, self.value], **wanted).dropna(subset=self.value)
        if rows.empty:
            return pd.DataFrame(columns=[*self._keys, "repeat", self.value])
        if TURN not in self.columns:
            rows = rows.assign(**{TURN: rows[TURN].astype(object).fillna(1) if TURN in rows else 1})
        return slowest_rank(rows, self.value, self._keys)

    @property
    def _keys(self) -> list[str]:
        """The columns, and `session`, which is an alternative where a clock is compared with itself."""
        return list(dict.fromkeys([*self.columns, TURN]))

    def medians(self, frame: pd.DataFrame, **wanted: Any) -> pd.DataFrame:
        """One row per (setting, alternative): the median as `value`, its interval `low` and `high`, and `n`.

        Of several turns the interval reaches over those of all: a median is known no better than turns agree.
        """
        samples = self.samples(frame, **wanted)
        table = summarize_groups(samples, self.value, self.columns)
        if samples[TURN].nunique() > 1 and TURN not in self.columns:
            of_turns = summarize_groups(samples, self.value, self._keys).groupby(self.columns, dropna=False)
            ends = of_turns.agg(low=("low", "min"), high=("high", "max")).reset_index()
            table = table.assign(low=np.fmin(table["low"], ends["low"]), high=np.fmax(table["high"], ends["high"]))
        return table.rename(columns={"median": self.value})

    def over(self, frame: pd.DataFrame, baseline: Any, **wanted: Any) -> pd.DataFrame:
        """Within each setting, every alternative over `baseline`: `ratio`, `low`, `high`, `p`, `rounds`, `verdict`."""
        if self.exact:
            rows = select(frame, [*self.columns, self.value], **wanted)
            largest = rows.groupby(self.columns, dropna=False)[self.value].max().dropna().reset_index()
            return exactly_over(largest, self.setting, self.alternative, self.value, baseline).drop(columns=self.value)
        by_turn = [name for name in self._keys if name != self.alternative]
        samples = self.samples(frame, **wanted)
        of_turns = compare_groups(samples, self.value, by_turn, self.alternative, baseline, interleaved=self.took_turns)
        return with_verdicts(combine_sessions(of_turns, self.setting, self.alternative))


def exactly_over(
    table: pd.DataFrame, setting: Iterable[str], alternative: str, value: str, baseline: Any
) -> pd.DataFrame:
    """Within each setting, a count (of bytes) of every alternative over that of `baseline`, as `Measured.over` has it.

    One row per (setting, alternative) in `table`. Counts are exact: `low` and `high` are the ratio and `p` is 0.
    """
    keys = list(setting)
    base = table.loc[table[alternative] == baseline, [*keys, value]]
    both = table[table[alternative] != baseline].merge(base, on=keys, suffixes=("", "_of_baseline"))
    ratio = both[value].astype(float) / both[f"{value}_of_baseline"].astype(float)
    found = both[[*keys, alternative]].assign(ratio=ratio, low=ratio, high=ratio, p=0.0)
    return with_verdicts(found.assign(**{value: both[value]}))
