"""The results of a run, and metrics, which turn its rows into samples, medians and ratios."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from labkit.bench import statistics
from labkit.costs.calibration import Calibration
from labkit.lab.facts import STATUSES, Note
from labkit.lab.phrases import is_time
from labkit.lab.units import label


@dataclass(frozen=True, eq=False)
class Results:
    """Input of questions: the long frame, the machine's calibration, and why points are missing."""

    frame: pd.DataFrame
    """One row per (point, rank, repeat), with the point's fields and the values."""
    calibration: Calibration | None = None
    missing: tuple[Note, ...] = ()
    """Points that did not end `ok`, by reason, the most frequent first."""
    is_busy: bool = False
    """Whether other programs were at work while it was measured: then nothing is recommended."""
    user_alternatives: tuple[str, ...] = ()
    """Alternatives that a reader added to labkit's."""
    machine_bytes: float = float("nan")
    link_bytes_per_s: float = float("nan")
    """Data-sheet peak of the links between the machine's GPUs."""
    alternatives: tuple[str, ...] = ()
    names: Mapping[Any, str] = field(default_factory=dict)
    """Columns of alternatives and their names in sentences, as the lab declares them."""

    @property
    def refusal(self) -> str | None:
        """Why a run measured nothing at all, if its points say so; else None."""
        # If a reader's setup is wrong, the points end well, and all they have is a reason.
        rows = self.frame.reindex(columns=["status", "reason"])
        refused = rows[rows["status"] == "refused"]
        if refused.empty or rows["status"].fillna("ok").eq("ok").any():
            return None
        return str(refused["reason"].iloc[0])

    def rows(self, columns: Sequence[str], **where: Any) -> pd.DataFrame:
        """Return columns of the rows with these values; a column that the frame lacks is empty."""
        rows = self.frame.reindex(columns=list(dict.fromkeys([*columns, *where])))
        for name, value in where.items():
            rows = rows[rows[name] == value]
        return rows[list(columns)]

    def timed_s(self, rows: pd.DataFrame, value: str) -> float:
        """Seconds of the rounds behind these rows, with all alternatives; 0 if none were timed."""
        if not is_time(value) or "point" not in rows:
            return 0.0
        timed = self.frame[self.frame["point"].isin(rows["point"])]
        if "is_sum" in timed:  # its parts have rows, too
            timed = timed[timed["is_sum"].isna()]
        # Ranks measure at the same time: the slowest one's sum is what passed.
        by_rank = timed.groupby(["point", "rank"])[value].sum()
        return float(by_rank.groupby("point").max().sum())


Table = Callable[[Results], pd.DataFrame]


@dataclass(frozen=True)
class Metric:
    """A measured column in which smaller is better, compared between alternatives.

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

    def select(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Select rows that meet `where` and turn them into samples."""
        rows = self.matching(frame)
        return rows if rows.empty else self.prepare(rows)

    def matching(self, frame: pd.DataFrame, *, with_missing: bool = False) -> pd.DataFrame:
        """Return rows as they are that meet `where`; `with_missing`: or lack its columns."""
        rows = frame.reindex(
            columns=list(dict.fromkeys([*frame.columns, *self.columns, *self.where, self.value]))
        )
        for name, wanted in self.where.items():
            is_wanted = rows[name] == wanted
            if with_missing:
                # A row that failed may lack what its alternative would have measured.
                is_wanted |= rows[name].isna()
            rows = rows[is_wanted]
        return rows[~rows[self.compare].isin(self.without)].dropna(subset=[self.compare])

    def samples(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return the slowest rank's value by configuration, alternative, session and repeat."""
        rows = self.select(frame).dropna(subset=[self.value])
        session: Any = 1  # the only one, in labs without sessions
        if "session" in rows:
            session = rows["session"].astype(object).fillna(1)
        rows = rows.assign(session=session)
        keys = [*self.columns, "session"]
        if rows.empty:
            return rows.reindex(columns=[*keys, "repeat", self.value])
        return statistics.slowest_rank(rows, self.value, keys)

    def medians(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return medians, their intervals and `n`, by configuration and alternative."""
        samples = self.samples(frame)
        table = statistics.median_groups(samples, self.value, self.columns)
        if samples["session"].nunique() > 1:
            sessions = statistics.median_groups(samples, self.value, [*self.columns, "session"])
            # Processes differ: the interval covers that of each session.
            groups = pd.concat([table, sessions]).groupby(self.columns, dropna=False, sort=False)
            table[["low", "high"]] = groups.agg({"low": "min", "high": "max"}).to_numpy()
        return table.rename(columns={"median": self.value})[
            [*self.columns, self.value, "low", "high", "n"]
        ]

    def largest(self, frame: pd.DataFrame) -> pd.DataFrame:
        """Return the largest value of any rank and repeat, by configuration and alternative."""
        rows = self.select(frame).dropna(subset=[self.value])
        return rows.groupby(self.columns, dropna=False, sort=False)[self.value].max().reset_index()

    def ratios_to(
        self, baseline: Any, frame: pd.DataFrame, among: Collection[Any] | None = None
    ) -> pd.DataFrame:
        """Divide each alternative (of `among`, if given) by `baseline`, by configuration.

        Columns: configuration, alternative, `ratio`, `low`, `high`, `p`, `verdict`.
        """
        if among is not None and self.compare in frame:
            frame = frame[frame[self.compare].isin([baseline, *among])]
        if self.exact:
            # A count must hold for every rank: the largest does, and no median is needed.
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
        # A count has no noise: any difference of 3% is one, hence p = 0.
        ratio = pairs[self.value].astype(float) / pairs[f"{self.value}_baseline"].astype(float)
        return statistics.with_verdicts(
            pairs[self.columns].assign(ratio=ratio, low=ratio, high=ratio, p=0.0)
        )

    def select_subjects(self, table: pd.DataFrame) -> list[Any]:
        """Return the alternative that an answer is about, then those that are as good.

        It is the one with most wins less losses in a table of `ratios_to`.

        Empty if there are several and none is better anywhere; a single one is returned in any
        case. Alternatives are ranked over the configurations that all of them have, if there are
        any. Those with as many wins, within the smallest relevant difference of the fastest, are as
        good; the first in the table comes first.
        """
        name = self.compare
        keys = list(self.configuration)
        if table[name].nunique() == 1:
            return [table[name].iloc[0]]
        # One that was measured only where everything is fast must not win for that.
        shared = table
        if keys:
            n_measured = table.groupby(keys, dropna=False)[name].transform("nunique")
            shared = table[n_measured == table[name].nunique()]
        ranked = shared if (shared["verdict"] == "faster").any() else table
        wins = ranked["verdict"].map({"faster": 1, "slower": -1}).fillna(0)
        logs = np.log(ranked["ratio"].astype(float))
        scores = pd.DataFrame({name: ranked[name], "wins": wins, "log": logs})
        scores = scores.groupby(name, sort=False).agg(wins=("wins", "sum"), log=("log", "mean"))
        # Losing least is no win: a subject is faster than the baseline somewhere.
        scores = scores[scores.index.isin(ranked.loc[ranked["verdict"] == "faster", name])]
        if scores.empty:
            return []
        # Wins first: a large gain somewhere must not hide losses elsewhere.
        winners = scores[scores["wins"] == scores["wins"].max()]
        as_good = winners["log"].min() + np.log1p(statistics.MIN_RELEVANT_DIFFERENCE)
        return list(winners.index[winners["log"] <= as_good])

    def failures(
        self,
        frame: pd.DataFrame,
        among: Collection[Any] | None = None,
        names: Mapping[str, str] | None = None,
    ) -> tuple[Note, ...]:
        """Note alternatives (of `among`, if given) that are wrong or have no value.

        `names` are those in sentences, where they differ from the alternatives' own.
        """
        rows = self.matching(frame, with_missing=True)
        if among is not None:
            rows = rows[rows[self.compare].isin(among)]
        rows = rows.reindex(columns=["point", self.compare, self.value, "status", "reason"])
        # A refusal on another metric, such as a peak that is not known, costs this one nothing.
        by_point = rows.groupby(["point", self.compare], dropna=False)
        has_value = by_point[self.value].transform("count") > 0
        rows = rows[rows["reason"].notna() & ((rows["status"] == "wrong") | ~has_value)]
        groups = rows.groupby(["status", "reason"], sort=False)[self.compare]
        texts = names or {}
        notes = [
            Note(
                status,
                str(reason),
                tuple(
                    texts.get(name) or label(self.compare, name) for name in alternatives.unique()
                ),
            )
            for (status, reason), alternatives in groups
        ]
        return tuple(sorted(notes, key=lambda note: STATUSES.index(note.status)))
