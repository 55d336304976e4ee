"""Compare a run of the fixed set with a machine's baseline: which quantities changed, by how much.

A place is a device and a number of ranks. A round times each of its quantities, one after the
other; the slowest rank counts. All quantities of a place share the speed of the cores, which
depends on what else a virtual machine's host runs. This shared change is estimated and subtracted,
as far as it varies in the baseline (`_subtract_shared_change`). A session gives one number per
quantity, the median of its rounds; a run gives the median of its sessions, each in new processes.

Runs still differ by more than their sessions explain, by a drift that is similar for all quantities
of a machine. A baseline of several runs estimates it, and the variance of each quantity is shrunk
towards it (moderated t-statistics: Smyth 2004, section 3). Intervals hold for all quantities of a
check together (Bonferroni).

A host may move the cores of a virtual machine. Cores without a common cache exchange data at a
third of the rate, and have more memory bandwidth together. So quantities of several cores are
compared only with runs whose cores exchanged data as fast (`MOVED_FACTOR`).
"""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from scipy.special import chdtri, stdtrit

from labkit.bench.statistics import MIN_RELEVANT_DIFFERENCE
from labkit.check.worker import THREADS, TURNS
from labkit.lab.runs.store import Run
from labkit.lab.units import counted, format_seconds, format_value, join_words

QUANTITY = ["device", "world_size", "quantity"]
DRIFT = 0.05
MIN_DRIFT = 0.01
"""Standard deviation of a run beyond what sessions explain: assumed if the baseline has few runs,
and the smallest."""
MIN_RUNS_FOR_DRIFT = 3
PRIOR_FREEDOM = 10.0
"""Weight, in degrees of freedom, of the assumption that all quantities drift alike."""
ERROR_OVER_MAD = 1.25 * 1.4826
"""Standard error of a median times the root of the sample size, over the median absolute
deviation."""
FALSE_ALARMS = 0.05
"""Probability that a check of an unchanged machine reports a change."""
MIN_SESSIONS = 3
"""Undisturbed sessions per quantity and run."""
MIN_PEERS = 3
"""Other quantities of a place that show what all share."""
RANGE = (0.02, 0.98)
"""Quantiles of the baseline's rounds within which a run's shared change is subtracted."""
MAX_SLOPE = 2.0
"""Largest slope of a quantity against the shared change, in logarithms."""
MOVED_FACTOR = 1.4
"""Factor by which moved cores differ in the time of an exchange, relative to that of a call on one
core."""
DECISIVE = ("set of quantities", "processor", "cores", "GPUs", "torch")
"""Facts in which two runs must agree, or their times are not comparable."""
COLUMNS = {"FLOP/s": "flops_per_s", "B/s": "bytes_per_s"}


@dataclass(frozen=True)
class Change:
    """Change of a quantity since the baseline: seconds now over seconds then, above 1 is slower.

    `place`: "2 ranks, cpu". `verdict`: "slower", "faster", "no change shown", or "not comparable:
    <reason>". The new run took `seconds` per sample, at a `rate` of work per second (NaN if only
    the time counts); `speed` is text. `shared`: the part of the change that the quantity shares
    with the others of its place, as when a virtual machine's cores are slower. `ratio` and its
    interval are what remains. `smallest_change`: the smallest ratio above 1 that would have counted
    as a change.
    """

    quantity: str
    place: str
    verdict: str
    seconds: float = math.nan
    rate: float = math.nan
    speed: str = ""
    ratio: float = math.nan
    low: float = math.nan
    high: float = math.nan
    shared: float = math.nan
    smallest_change: float = math.nan


def compare(baseline: Sequence[Run], run: Run) -> list[Change]:
    """Return the change of each quantity of the run or the baseline; without a baseline none is
    comparable."""
    current = SessionTimes(run)
    earlier = [SessionTimes(one) for one in baseline]
    factors = [current.exchange / one.exchange for one in earlier]  # NaN: unknown
    alike = [
        one
        for one, factor in zip(earlier, factors, strict=True)
        if not abs(np.log(factor)) > np.log(MOVED_FACTOR)
    ]
    blocker = (
        join_words(differences(baseline[-1], run, decisive=True))
        if baseline
        else "there is no baseline"
    )
    names = list(dict.fromkeys(name for one in (current, *earlier) for name in one.names))
    parallel = {name for one in (current, *earlier) for name in one.parallel}
    judged: dict[Any, dict[str, Any]] = {}
    for group, runs in ((parallel, alike), (set(names) - parallel, earlier)):
        if runs and group and not blocker:
            judged |= _judge(current, runs, sorted(group), parallel, len(names)).to_dict("index")
    changes = []
    for name in names:
        reason = blocker or current.missing_reason(name)
        if reason is None and name not in judged:
            times = f"{factors[-1]:.1f} times as long as in the baseline"
            reason = (
                f"cores exchange data for {times}: the host moved them; `labkit check --save` adds"
                " this state"
            )
        elif reason is None and math.isnan(judged[name]["ratio"]):
            reasons = filter(None, (one.missing_reason(name) for one in earlier))
            reason = f"{next(reasons, 'it was not measured')}, in the baseline"
        facts: dict[str, Any] = {"verdict": f"not comparable: {reason}"} if reason else judged[name]
        changes.append(
            Change(
                name[2], f"{counted(name[1], 'rank')}, {name[0]}", **current.speed(name), **facts
            )
        )
    return changes


class SessionTimes:
    """Times of a run's undisturbed sessions, as logarithms: `rounds` by quantity (row), session and
    round (columns).

    `medians`: of the sessions, NaN if they are too few; `noise`: the distance of the two turns of
    each round. `parallel`: quantities of several cores. `exchange`: time in which two ranks
    exchange a message, over that of a call; NaN if unknown.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        rows = timed_rows(run)
        self.names = list(rows[QUANTITY].drop_duplicates().itertuples(index=False, name=None))
        several = rows[
            (rows["device"] == "cpu") & ((rows["world_size"] > 1) | (rows["threads"] > 1))
        ]
        self.parallel = set(several[QUANTITY].itertuples(index=False, name=None))
        rows = rows[~rows["point"].isin(list(run.busy))]
        self._work = rows.groupby(QUANTITY)[["work", "unit"]].first()
        slowest = np.log(
            rows.groupby([*QUANTITY, "session", "repeat", "turn"], sort=False)["seconds"].max()
        )
        turns = slowest.unstack("turn").reindex(columns=TURNS)
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
        self.exchange = float(np.median(exchange)) / call_s if exchange else math.nan

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
        busy = [
            f"busy: {self._run.busy[point]}" for point in points["point"] if point in self._run.busy
        ]
        failed = points.loc[points["status"] != "ok", "reason"].dropna().tolist()
        missing = "too few sessions measured it" if name in self.medians else "it was not measured"
        return str([*busy, *failed, missing][0])


def _judge(
    current: SessionTimes,
    earlier: Sequence[SessionTimes],
    names: Sequence[Any],
    parallel: Container[Any],
    n_names: int,
) -> pd.DataFrame:
    """Return ratio, its interval, the smallest change and the verdict of these quantities; NaN if
    not measured."""
    n_runs = len(earlier)
    rounds = pd.concat(
        [one.rounds for one in (*earlier, current)], axis=1, keys=range(n_runs + 1), names=["run"]
    )
    sessions = (
        _subtract_shared_change(rounds, names, parallel)
        .T.groupby(level=["run", "session"])
        .median()
    )
    by_run = sessions.groupby(level="run")
    levels = by_run.median().where(by_run.count() >= MIN_SESSIONS).reindex(range(n_runs + 1))
    deviations = sessions.sub(levels, level="run").abs().groupby(level="run").median()
    explained = ((ERROR_OVER_MAD * deviations) ** 2 / by_run.count()).mean()
    medians = levels.iloc[:-1]
    counts = medians.count()
    between = medians.var()
    typical = (counts - 1) / chdtri(counts - 1, 0.5)  # a variance's expectation over its median
    excess = (between * typical - explained)[counts >= MIN_RUNS_FOR_DRIFT].median()
    drift = DRIFT**2 if math.isnan(excess) else max(excess, MIN_DRIFT**2)
    freedom = PRIOR_FREEDOM + counts - 1
    variance = (PRIOR_FREEDOM * (drift + explained) + (counts - 1) * between.fillna(0)) / freedom
    reach = stdtrit(freedom, 1 - FALSE_ALARMS / n_names / 2) * np.sqrt(variance * (1 + 1 / counts))
    change = levels.iloc[-1] - medians.mean()
    least = np.maximum(
        reach, np.maximum(current.noise.reindex(names), math.log1p(MIN_RELEVANT_DIFFERENCE))
    )
    whole = current.medians - pd.concat([one.medians for one in earlier], axis=1).mean(axis=1)
    verdict = np.select([change > least, change < -least], ["slower", "faster"], "no change shown")
    logs = {
        "ratio": change,
        "low": change - reach,
        "high": change + reach,
        "smallest_change": least,
    }
    logs["shared"] = whole.reindex(names) - change
    return np.exp(pd.DataFrame(logs)).assign(verdict=verdict)


def _subtract_shared_change(
    rounds: pd.DataFrame, names: Sequence[Any], parallel: Container[Any]
) -> pd.DataFrame:
    """Return the rounds (run, session, repeat) of these quantities without what all of their place
    share.

    The shared change of a round is the median of the other quantities, each relative to its median
    in the baseline: all runs but the last. Only single-core quantities count, if there are any.
    Each quantity follows it by a slope, which is fitted to the differences between rounds of one
    run. The last run's level is subtracted as far as the levels and the rounds of the baseline's
    runs vary: what lies beyond is left in.
    """
    is_baseline = (
        rounds.columns.get_level_values("run") < rounds.columns.get_level_values("run").max()
    )
    relative = rounds.sub(rounds.loc[:, is_baseline].median(axis=1), axis=0)
    within = relative - relative.T.groupby(level="run").transform("median").T
    result = relative.reindex(names).copy()
    for name in names:
        others = [other for other in relative.index if other[:2] == name[:2] and other != name]
        peers = [other for other in others if other not in parallel] or others
        if len(peers) < MIN_PEERS or name not in relative.index:
            continue
        shared = relative.loc[peers].median()
        steps = within.loc[peers].median()
        slope = (steps * within.loc[name]).sum() / ((steps**2).sum() or 1.0)
        levels = shared.groupby(level="run").median()
        excess = _level_beyond(levels.iloc[:-1], shared[is_baseline], levels.iloc[-1])
        result.loc[name] -= min(max(slope, 0.0), MAX_SLOPE) * (
            shared - np.where(is_baseline, 0.0, excess)
        )
    return result


def _level_beyond(levels: pd.Series, rounds: pd.Series, level: float) -> float:
    """Return by how much a level lies beyond those that the baseline's runs and rounds make likely;
    0: it does not."""
    freedom = max(len(levels) - 1, 0)
    reach = (
        float(stdtrit(freedom, 0.975) * levels.std() * math.sqrt(1 + 1 / len(levels)))
        if freedom
        else 0.0
    )
    low, high = rounds.quantile(list(RANGE))
    return level - min(max(level, levels.mean() - reach, low), levels.mean() + reach, high)


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


def differences(baseline: Run, run: Run, *, decisive: bool) -> list[str]:
    """Return how two runs differ in the facts that forbid a comparison, or in others that may have
    caused a change."""
    facts = pd.DataFrame([_facts(baseline), _facts(run)]).T.fillna("none").replace("", "none")
    return [
        f"{name}: {then} in the baseline, {now} now"
        for name, then, now in facts.itertuples()
        if then != now and (name in DECISIVE) == decisive
    ]


def _facts(run: Run) -> dict[str, Any]:
    machine = run.header.machine
    threads = timed_rows(run)["threads"].max()
    quota = "" if machine.cpu_quota is None else f" (quota {machine.cpu_quota:g})"
    gpus = ", ".join(f"{count}x {gpu.name}" for count, gpu in machine.gpu_counts)
    return {
        "set of quantities": max(
            (point.get("number") or 0 for point in run.header.planned.values()), default=0
        ),
        "processor": machine.cpu,
        "cores": f"{machine.cores}{quota}",
        "GPUs": gpus or machine.no_gpu_reason,
        **machine.versions,
        "host": machine.host,
        "system": machine.system,
        "Python": machine.python,
        "labkit": str(machine.source),
        "links of GPUs": machine.gpu_links,
        f"threads ({THREADS})": None if math.isnan(threads) else f"{threads:.0f}",
    }


def has_lost_hardware(baseline: Run, run: Run) -> bool:
    """Return whether ranks have fewer cores, threads or GPUs than before; another processor is
    another machine."""
    amounts = []
    for one in (baseline, run):
        machine = one.header.machine
        threads = timed_rows(one)["threads"].max()  # NaN without rows
        amounts.append(
            (machine.cores, machine.cpu_quota or machine.cores, len(machine.gpus), threads)
        )
    has_less = any(now < then for then, now in zip(*amounts, strict=True))
    return has_less and baseline.header.machine.cpu == run.header.machine.cpu
