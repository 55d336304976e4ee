"""The results of a run, and metrics, which turn its rows into samples, medians and ratios."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from labkit.bench import statistics
from labkit.costs.calibration import Calibration
from labkit.lab.units import join_words, label


@dataclass(frozen=True, eq=False)
class Results:
    """Input of questions: the long frame, the machine's calibration, and why points are missing."""

    frame: pd.DataFrame
    """One row per (point, rank, repeat), with the point's fields and the values."""
    calibration: Calibration | None = None
    missing: tuple[str, ...] = ()
    """Reasons for points that did not end `ok`, the most frequent first."""
    machine_bytes: float = float("nan")
    link_bytes_per_s: float = float("nan")
    """Data-sheet peak of the links between the machine's GPUs."""
    names: Mapping[Any, str] = field(default_factory=dict)
    """Names of alternatives in sentences (`Lab.names`)."""

    def rows(self, columns: Sequence[str], **where: Any) -> pd.DataFrame:
        """These columns of the rows that have these values; a column that the frame lacks is
        empty."""
        rows = self.frame.reindex(columns=list(dict.fromkeys([*columns, *where])))
        for name, value in where.items():
            rows = rows[rows[name] == value]
        return rows[list(columns)]


Table = Callable[[Results], pd.DataFrame]


@dataclass(frozen=True)
class Metric:
    """A measured column in which smaller is better, the column of alternatives, and the columns of
    a configuration.

    The slowest rank of each repeat counts. Sessions, which measure the same configuration in other
    processes at another time, are combined into one ratio.
    """

    value: str
    compare: str
    """Column of the alternatives."""
    configuration: tuple[str, ...]
    where: Mapping[str, Any] = field(default_factory=dict)
    """Values that rows must have, by column."""
    prepare: Callable[[pd.DataFrame], pd.DataFrame] = lambda rows: rows
    """Turns selected rows into samples, if they are not samples yet."""
    without: tuple[Any, ...] = ()
    """Alternatives that are measured but not compared."""
    exact: bool = False
    """Whether values are counts without noise; then the largest of all ranks and repeats counts."""

    @property
    def columns(self) -> list[str]:
        return [*self.configuration, self.compare]

    def select(self, frame: pd.DataFrame, *, with_missing: bool = False) -> pd.DataFrame:
        """Select rows that meet `where` and turn them into samples; `with_missing`: also rows that
        lack its columns."""
        rows = frame.reindex(
            columns=list(dict.fromkeys([*frame.columns, *self.columns, *self.where, self.value]))
        )
        for name, wanted in self.where.items():
            is_wanted = rows[name] == wanted
            rows = rows[is_wanted | rows[name].isna() if with_missing else is_wanted]
        rows = rows[~rows[self.compare].isin(self.without)].dropna(subset=[self.compare])
        return rows if with_missing or rows.empty else self.prepare(rows)

    def samples(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return the slowest rank's value: one row per (configuration, alternative, session,
        repeat)."""
        rows = self.select(frame).dropna(subset=[self.value])
        rows = rows.assign(
            session=rows["session"].astype(object).fillna(1) if "session" in rows else 1
        )
        keys = [*self.columns, "session"]
        if rows.empty:
            return rows.reindex(columns=[*keys, "repeat", self.value])
        return statistics.slowest_rank(rows, self.value, keys)

    def medians(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return medians, intervals that cover those of all sessions, and `n`, by configuration and
        alternative."""
        samples = self.samples(frame)
        table = statistics.median_groups(samples, self.value, self.columns)
        if samples["session"].nunique() > 1:
            sessions = statistics.median_groups(samples, self.value, [*self.columns, "session"])
            groups = pd.concat([table, sessions]).groupby(self.columns, dropna=False, sort=False)
            table[["low", "high"]] = groups.agg({"low": "min", "high": "max"}).to_numpy()
        return table.rename(columns={"median": self.value})[
            [*self.columns, self.value, "low", "high", "n"]
        ]

    def largest(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return the largest value of any rank and repeat: one row per (configuration,
        alternative)."""
        rows = self.select(frame).dropna(subset=[self.value])
        return rows.groupby(self.columns, dropna=False, sort=False)[self.value].max().reset_index()

    def ratios_to(
        self, baseline: Any, frame: pd.DataFrame, among: Sequence[Any] | None = None
    ) -> pd.DataFrame:
        """Divide each alternative (of `among`, if given) by `baseline` in each configuration that
        has both.

        Columns: configuration, alternative, `ratio`, `low`, `high`, `p`, `verdict`.
        """
        if among is not None:
            frame = (
                frame[frame[self.compare].isin([baseline, *among])]
                if self.compare in frame
                else frame
            )
        if self.exact:
            return self._exact_ratios(baseline, self.largest(frame))
        keys = [*self.configuration, "session"]
        samples = self.samples(frame)
        ratios = statistics.compare_groups(samples, self.value, keys, self.compare, baseline)
        return statistics.with_verdicts(
            statistics.combine_sessions(ratios, self.configuration, self.compare)
        )

    def _exact_ratios(self, baseline: Any, table: pd.DataFrame) -> pd.DataFrame:
        keys = list(self.configuration)
        base = table.loc[table[self.compare] == baseline, [*keys, self.value]]
        pairs = table[table[self.compare] != baseline].merge(
            base, on=keys, suffixes=("", "_baseline")
        )
        ratio = pairs[self.value].astype(float) / pairs[f"{self.value}_baseline"].astype(float)
        return statistics.with_verdicts(
            pairs[self.columns].assign(ratio=ratio, low=ratio, high=ratio, p=0.0)
        )

    def best(self, table: pd.DataFrame) -> Any:
        """Return the alternative with most wins less losses over configurations; None if none is
        better anywhere.

        Alternatives are ranked over the configurations that all of them have, if there are any.
        Among those within the smallest relevant difference of the fastest, the first in the table
        wins.
        """
        name = self.compare
        keys = list(self.configuration)
        if table[name].nunique() == 1:
            return table[name].iloc[0]
        shared = table
        if keys:
            shared = table[
                table.groupby(keys, dropna=False)[name].transform("nunique")
                == table[name].nunique()
            ]
        ranked = shared if (shared["verdict"] == "faster").any() else table
        score = ranked["verdict"].map({"faster": 1, "slower": -1}).fillna(0)
        standing = pd.DataFrame(
            {name: ranked[name], "wins": score, "log": np.log(ranked["ratio"].astype(float))}
        )
        standing = standing.groupby(name, sort=False).agg(wins=("wins", "sum"), log=("log", "mean"))
        standing = standing[standing.index.isin(ranked.loc[ranked["verdict"] == "faster", name])]
        if standing.empty:
            return None
        leaders = standing[standing["wins"] == standing["wins"].max()]
        return leaders.index[
            leaders["log"] <= leaders["log"].min() + np.log1p(statistics.MIN_RELEVANT_DIFFERENCE)
        ][0]

    def failures(
        self, frame: pd.DataFrame, among: Collection[Any] | None = None
    ) -> tuple[str, ...]:
        """Note alternatives (of `among`, if given) without a value: wrong results, failures,
        refusals."""
        rows = self.select(frame, with_missing=True)
        rows = rows if among is None else rows[rows[self.compare].isin(among)]
        rows = rows.reindex(columns=[self.compare, "check", "not_measured"])
        bad = rows[rows["check"].astype(object).fillna("ok") != "ok"]
        is_wrong = bad["check"].astype(str).str.startswith("wrong")
        is_slow = bad["check"].astype(str).str.startswith("right")
        kinds = (
            ("WRONG RESULTS, not timed", bad[is_wrong], "check"),
            ("Failed", bad[~is_wrong & ~is_slow], "check"),
            ("Not timed", bad[is_slow], "check"),
            ("Not measured", rows.dropna(subset="not_measured"), "not_measured"),
        )
        return tuple(
            f"{kind}: {join_words([label(self.compare, name) for name in names.unique()])}"
            f" ({reason})."
            for kind, some, reasons in kinds
            for reason, names in some.groupby(reasons, sort=False)[self.compare]
        )
