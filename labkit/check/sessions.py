"""Times of the fixed set by session: what a comparison of checks rests on.

A place is a device and a number of ranks. A round times each of its quantities, one after the
other; the slowest rank counts. A session gives one number per quantity, the median of its rounds; a
run gives the median of its sessions, each in new processes.
"""

import math
from typing import Any

import numpy as np
import pandas as pd

from labkit.check.worker import TURNS
from labkit.lab.runs.store import Run
from labkit.lab.units import format_seconds, format_value

QUANTITY = ["device", "world_size", "quantity"]
# Undisturbed sessions: processes differ, and the median of fewer may be that of an exception.
MIN_SESSIONS = 3
COLUMNS = {"FLOP/s": "flops_per_s", "B/s": "bytes_per_s"}


class SessionTimes:
    """Times of a run's undisturbed sessions, as logarithms.

    `rounds`: by quantity (row), session and round (columns). `medians`: of the sessions, NaN if
    they are too few; `noise`: the distance of the two turns of each round. `parallel`: quantities
    of several cores. `exchange`: time in which two ranks exchange a message, over that of a call;
    NaN if unknown.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        rows = timed_rows(run)
        self.names = list(rows[QUANTITY].drop_duplicates().itertuples(index=False, name=None))
        several = rows[
            (rows["device"] == "cpu") & ((rows["world_size"] > 1) | (rows["threads"] > 1))
        ]
        self.parallel = set(several[QUANTITY].itertuples(index=False, name=None))
        # Names were read before: a quantity whose points were all busy says so, and is not missing.
        rows = rows[~rows["point"].isin(list(run.busy))]
        self._work = rows.groupby(QUANTITY)[["work", "unit"]].first()
        by_turn = rows.groupby([*QUANTITY, "session", "repeat", "turn"], sort=False)
        # The slowest rank counts. Logarithms, since what slows a machine down is a factor.
        turns = np.log(by_turn["seconds"].max()).unstack("turn").reindex(columns=TURNS)
        self.rounds = turns.mean(axis=1).unstack(["session", "repeat"])
        distances = (turns[TURNS[1]] - turns[TURNS[0]]).groupby([*QUANTITY, "session"]).median()
        self.noise = abs(distances.groupby(QUANTITY).median())
        sessions = self.rounds.T.groupby(level="session").median()
        self.medians = sessions.median().where(sessions.count() >= MIN_SESSIONS)
        exchange = [
            load.exchange_s
            for point, load in run.loads.items()
            if load.exchange_s and point not in run.busy
        ]
        call_s = math.exp(self.medians.get(("cpu", 1, "call"), math.nan))
        self.exchange = math.nan
        if exchange:
            self.exchange = float(np.median(exchange)) / call_s

    def speed(self, name: tuple[Any, ...]) -> dict[str, Any]:
        """Return the seconds per sample, the rate of its work, and either of them as text."""
        if name not in self.rounds.index:
            return {}
        seconds = math.exp(self.rounds.loc[name].median())
        work, unit = self._work.loc[name]
        if unit not in COLUMNS:
            return {"seconds": seconds, "speed": format_seconds(seconds)}
        rate = float(work / seconds)
        return {"seconds": seconds, "rate": rate, "speed": format_value(COLUMNS[unit], rate)}

    def missing_reason(self, name: tuple[Any, ...]) -> str | None:
        """Return why there are too few undisturbed sessions, or None."""
        if not math.isnan(self.medians.get(name, math.nan)):
            return None
        points = self._run.coverage()
        points = points[(points["device"] == name[0]) & (points["world_size"] == name[1])]
        # First what a reader can change: another program can be ended.
        busy = [
            f"busy: {self._run.busy[point]}" for point in points["point"] if point in self._run.busy
        ]
        failed = points.loc[points["status"] != "ok", "reason"].dropna().tolist()
        missing = "too few sessions measured it" if name in self.medians else "it was not measured"
        return str([*busy, *failed, missing][0])


def timed_rows(run: Run) -> pd.DataFrame:
    """Return the rows that have times."""
    columns = [
        *QUANTITY,
        "turn",
        "session",
        "repeat",
        "point",
        "rank",
        "seconds",
        "unit",
        "work",
        "threads",
    ]
    return run.frame().reindex(columns=columns).dropna(subset="seconds")
