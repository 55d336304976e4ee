"""Compare a run of the fixed set with a machine's baseline: which quantities changed, by how much.

All quantities of a place share the speed of the cores, which depends on what else a virtual
machine's host runs. This shared change is estimated and subtracted, as far as it varies in the
baseline (`_subtract_shared_change`). What remains is compared as any two sets of runs are
(`bench.changes`).

A host may move the cores of a virtual machine. Cores without a common cache exchange data at a
third of the rate, and have more memory bandwidth together. So quantities of several cores are
compared only with runs whose cores exchanged data as fast (`MOVED_FACTOR`).
"""

import math
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from scipy.special import stdtrit

from labkit.bench.changes import compare_levels
from labkit.bench.statistics import MIN_RELEVANT_DIFFERENCE, NO_DIFFERENCE_SHOWN
from labkit.check.facts import differences
from labkit.check.sessions import MIN_SESSIONS, SessionTimes
from labkit.lab.runs.store import Run
from labkit.lab.units import counted, join_words

# Standard deviation of a run beyond what its sessions explain. It is assumed while the baseline
# has too few runs to show its own.
DRIFT = 0.05
# Standard error of a median times the root of the sample size, over the median absolute deviation:
# a median varies 1.25 times as much as a mean, and a normal deviation is 1.4826 MAD.
ERROR_OVER_MAD = 1.25 * 1.4826
# The median of fewer other quantities would be one or two of them, not what all share.
MIN_PEERS = 3
# A shared change is subtracted within these quantiles of the baseline's rounds: beyond them it is
# news about the machine, not its usual variation.
RANGE = (0.02, 0.98)
# Slope of a quantity against the shared change, in logarithms: 1 follows it, and a fit to noise
# may be anything.
MAX_SLOPE = 2.0
# Moved cores differ by more in the time of an exchange, relative to a call on one core.
MOVED_FACTOR = 1.4

NOT_COMPARABLE = "not comparable"
Verdict = Literal["slower", "faster", "no difference shown", "not comparable"]


@dataclass(frozen=True)
class Change:
    """Change of a quantity since the baseline: seconds now over seconds then, above 1 is slower.

    The new run took `seconds` per sample, at a `rate` of work per second (NaN if only the time
    counts); `speed` is text. `ratio` and its interval are what remains without `shared`.
    """

    quantity: str
    place: str
    """Ranks and device: "2 ranks, cpu"."""
    verdict: Verdict
    reason: str = ""
    """Why it is not comparable."""
    seconds: float = math.nan
    rate: float = math.nan
    speed: str = ""
    ratio: float = math.nan
    low: float = math.nan
    high: float = math.nan
    shared: float = math.nan
    """Part of the change that the whole place shares, as if a host slows all cores."""
    smallest_change: float = math.nan
    """Smallest ratio above 1 that would have counted as a change."""


def compare(baseline: Sequence[Run], run: Run) -> list[Change]:
    """Return the change of each quantity that the run or its baseline has."""
    current = SessionTimes(run)
    earlier = [SessionTimes(saved) for saved in baseline]
    factors = [current.exchange / times.exchange for times in earlier]
    # NaN, of a run without the exchange, is not larger: nothing shows that its cores have moved.
    is_moved = np.abs(np.log(factors)) > np.log(MOVED_FACTOR)
    unmoved = [times for times, moved in zip(earlier, is_moved, strict=True) if not moved]
    blocker = _blocker(baseline, run)
    names = list(dict.fromkeys(name for times in (current, *earlier) for name in times.names))
    parallel = {name for times in (current, *earlier) for name in times.parallel}
    judged: dict[Any, dict[str, Any]] = {}
    # A single core does not feel where the others are, so it keeps the whole baseline.
    for group, runs in ((parallel, unmoved), (set(names) - parallel, earlier)):
        if runs and group and not blocker:
            table = _judge(current, runs, sorted(group), parallel, len(names))
            judged |= table.to_dict("index")
    changes = []
    for name in names:
        reason = blocker or current.missing_reason(name)
        if not reason and name not in judged:
            slower = f"{factors[-1]:.1f} times as long as in the baseline"
            reason = (
                f"cores exchange data for {slower}: the host moved them; `labkit check --save` adds"
                " this state"
            )
        elif not reason and math.isnan(judged[name]["ratio"]):
            reasons = filter(None, (times.missing_reason(name) for times in earlier))
            reason = f"{next(reasons, 'it was not measured')}, in the baseline"
        facts: dict[str, Any] = {"verdict": NOT_COMPARABLE, "reason": reason}
        if not reason:
            facts = judged[name]
        place = f"{counted(name[1], 'rank')}, {name[0]}"
        changes.append(Change(name[2], place, **current.speed(name), **facts))
    return changes


def _blocker(baseline: Sequence[Run], run: Run) -> str:
    """Return why nothing can be compared, or ""."""
    if not baseline:
        return "there is no baseline"
    # With the newest: it is what the machine was like before.
    facts = [fact for fact in differences(baseline[-1], run) if fact.forbids]
    texts = [f"{fact.name}: {fact.before} in the baseline, {fact.now} now" for fact in facts]
    return join_words(texts)


def _judge(
    current: SessionTimes,
    earlier: Sequence[SessionTimes],
    names: Sequence[Any],
    parallel: Container[Any],
    n_compared: int,
) -> pd.DataFrame:
    """Return ratio, interval, smallest change and verdict of these quantities; NaN if missing."""
    n_runs = len(earlier)
    rounds = pd.concat(
        [times.rounds for times in (*earlier, current)],
        axis=1,
        keys=range(n_runs + 1),
        names=["run"],
    )
    remaining = _subtract_shared_change(rounds, names, parallel)
    sessions = remaining.T.groupby(level=["run", "session"]).median()
    by_run = sessions.groupby(level="run")
    # A run with too few sessions has no level, but its rounds show how quantities vary together.
    levels = by_run.median().where(by_run.count() >= MIN_SESSIONS).reindex(range(n_runs + 1))
    deviations = sessions.sub(levels, level="run").abs().groupby(level="run").median()
    explained = ((ERROR_OVER_MAD * deviations) ** 2 / by_run.count()).mean()
    # The noise within a round is no change either.
    table = judge_levels(levels.T, explained, current.noise.reindex(names), n_compared=n_compared)
    total = current.medians - pd.concat([times.medians for times in earlier], axis=1).mean(axis=1)
    return table.assign(shared=np.exp(total.reindex(names)) / table["ratio"])


def judge_levels(
    levels: pd.DataFrame, explained: pd.Series, noise: pd.Series, *, n_compared: int
) -> pd.DataFrame:
    """Compare the last run with those before it; return ratio, interval and verdict by quantity.

    Args:
        levels: logarithms of seconds, one row per quantity and one column per run; NaN if a run
            lacks it.
        explained: variance of a level that its repeats explain, by quantity.
        noise: changes up to this logarithm are none, by quantity.
        n_compared: quantities of the whole comparison, for which the intervals hold together.
    """
    table = compare_levels(
        levels.iloc[:, :-1], levels.iloc[:, -1:], explained, drift=DRIFT, n_compared=n_compared
    )
    change = table["change"]
    # Differences that nobody would act on are no change.
    least = np.maximum(table["reach"], np.maximum(noise, math.log1p(MIN_RELEVANT_DIFFERENCE)))
    logs = {
        "ratio": change,
        "low": change - table["reach"],
        "high": change + table["reach"],
        "smallest_change": least,
    }
    verdict = np.select(
        [change > least, change < -least], ["slower", "faster"], NO_DIFFERENCE_SHOWN
    )
    return np.exp(pd.DataFrame(logs)).assign(verdict=verdict)


def _subtract_shared_change(
    rounds: pd.DataFrame, names: Sequence[Any], parallel: Container[Any]
) -> pd.DataFrame:
    """Return the rounds of these quantities without what all of their place share.

    Columns are run, session and repeat. The shared change of a round is the median of the other
    quantities, each relative to its median in the baseline: all runs but the last. Only single-core
    quantities count, if there are any. Each quantity follows it by a slope, which is fitted to the
    differences between rounds of one run. The last run's level is subtracted as far as the levels
    and the rounds of the baseline's runs vary: what lies beyond is left in.
    """
    runs = rounds.columns.get_level_values("run")
    is_baseline = runs < runs.max()
    relative = rounds.sub(rounds.loc[:, is_baseline].median(axis=1), axis=0)
    within = relative - relative.T.groupby(level="run").transform("median").T
    result = relative.reindex(names).copy()
    for name in names:
        others = [other for other in relative.index if other[:2] == name[:2] and other != name]
        # Where the host puts the cores moves quantities of several cores, and no others.
        peers = [other for other in others if other not in parallel] or others
        if len(peers) < MIN_PEERS or name not in relative.index:
            continue
        shared = relative.loc[peers].median()
        steps = within.loc[peers].median()
        # Least squares through zero; `or`: rounds that never differ have no slope.
        slope = (steps * within.loc[name]).sum() / ((steps**2).sum() or 1.0)
        levels = shared.groupby(level="run").median()
        excess = _level_beyond(levels.iloc[:-1], shared[is_baseline], levels.iloc[-1])
        result.loc[name] -= min(max(slope, 0.0), MAX_SLOPE) * (
            shared - np.where(is_baseline, 0.0, excess)
        )
    return result


def _level_beyond(levels: pd.Series, rounds: pd.Series, level: float) -> float:
    """Return by how much a level lies beyond what the baseline makes likely; 0: it does not."""
    # The prediction interval (Student's t) of one more run, widened to the rounds that were seen.
    reach = 0.0
    if len(levels) > 1:
        quantile = float(stdtrit(len(levels) - 1, 0.975))
        reach = quantile * levels.std() * math.sqrt(1 + 1 / len(levels))
    low, high = rounds.quantile(list(RANGE))
    return level - min(max(level, levels.mean() - reach, low), levels.mean() + reach, high)
