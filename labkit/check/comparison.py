"""Compare a run of the fixed set with a machine's baseline: which quantities changed, by how much.

A session gives one number per quantity: the logarithm of a low quantile (`QUANTILE`) of the slowest rank's samples. A
run gives the mean of its sessions, each in new processes. Runs of one machine differ by more than the sessions within
one do. So a baseline may have several runs, and a change must exceed their variation. Each quantity's variance is
shrunk towards the median of all (moderated t-statistics: Smyth 2004, section 3). Intervals hold for all quantities of a
check together (Bonferroni).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from scipy.special import fdtri, stdtrit

from labkit.bench.statistics import MIN_RELEVANT_DIFFERENCE
from labkit.check.worker import THREADS
from labkit.lab.runs.store import Run
from labkit.lab.units import counted, join_words

QUANTITY = ["device", "world_size", "quantity"]
DRIFT, DRIFT_FREEDOM = 0.05, 10
"""Assumed standard deviation of a run's mean logarithm, and its degrees of freedom, if the baseline has fewer than
`FEW_RUNS` runs. It is the median over thirteen quantities in eleven checks of a two-core virtual machine in ten
minutes."""
FEW_RUNS = 3
"""Baseline runs from which a machine's variation between runs is estimated."""
QUANTILE = 0.25
"""Quantile of a session's samples: other programs only add time, and the minimum is an outlier."""
FALSE_ALARMS = 0.01
"""Share of checks on an unchanged machine that report any change."""
MIN_SESSIONS = 3
"""Undisturbed sessions per quantity and run."""
PRIOR_FREEDOM = 4.0
"""Weight, in degrees of freedom, of the assumption that all quantities have the same variance."""
DECISIVE = ("set of quantities", "processor", "cores", "GPUs", "torch")
"""Facts in which two runs must agree, or their times are not comparable."""

Name = tuple[Any, ...]
Verdict = Literal["slower", "faster", "no change shown", "not comparable"]


@dataclass(frozen=True)
class Change:
    """Change of one quantity since the baseline. Ratios are seconds now over seconds then: above 1 is slower."""

    device: str
    ranks: int
    quantity: str
    verdict: Verdict
    seconds: float | None = None
    """Per sample, now."""
    rate: float | None = None
    """Work per second now, in `unit`; None if only the time counts."""
    unit: str = "s"
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    smallest_change: float | None = None
    """Smallest ratio above 1 that would have counted as a change."""
    reason: str | None = None
    """Why it is not comparable."""

    @property
    def place(self) -> str:
        return f"{counted(self.ranks, 'rank')}, {self.device}"

    @property
    def verdict_text(self) -> str:
        """The verdict, with its reason if there is one."""
        return self.verdict if self.reason is None else f"{self.verdict}: {self.reason}"


def compare(baseline: Sequence[Run], now: Run) -> list[Change]:
    """Return the change of each quantity of `now` or the baseline; without a baseline none is comparable."""
    here, then = _Sessions(now), [_Sessions(run) for run in baseline]
    blocker = incomparable_reason(baseline[-1], now) if baseline else "there is no baseline"
    names = list(dict.fromkeys(name for each in (here, *then) for name in each.names))
    means = {name: [each.logs[name].mean() for each in then if each.missing_reason(name) is None] for name in names}
    variances = {name: float(np.var(values, ddof=1)) for name, values in means.items() if len(values) >= FEW_RUNS}
    changes = []
    for name in names:
        device, ranks, quantity = name
        facts: dict[str, Any] = here.speed(name)
        reason = blocker or here.missing_reason(name)
        if reason is None and not means[name]:
            reason = f"{then[-1].missing_reason(name)}, in the baseline"
        if reason is None:
            others = [(value, len(means[other]) - 1) for other, value in variances.items() if other != name]
            facts |= _judge(here.logs[name], here.noise[name], means[name], others, len(names))
        changes.append(Change(device, ranks, quantity, **{"verdict": "not comparable"} | facts, reason=reason))
    return changes


class _Sessions:
    """Times of a run's undisturbed sessions. `logs`: one logarithm per session; `noise`: distance of the two turns."""

    def __init__(self, run: Run) -> None:
        self._run, rows = run, timed_rows(run)
        self.names: list[Name] = list(rows[QUANTITY].drop_duplicates().itertuples(index=False, name=None))
        self._rows = rows = rows[~rows["point"].isin(list(run.busy))]
        slowest = rows.groupby([*QUANTITY, "session", "turn", "repeat"], sort=False)["seconds"].max()
        self._quick = slowest.groupby(QUANTITY, sort=False).quantile(QUANTILE)
        turns = np.log(slowest).groupby([*QUANTITY, "session", "turn"], sort=False).quantile(QUANTILE).unstack("turn")
        groups = dict(list(turns.groupby(QUANTITY)))
        self.logs: dict[Name, Any] = {name: group.mean(axis=1).to_numpy() for name, group in groups.items()}
        self.noise = {name: abs(group.mean().diff().iloc[-1]) for name, group in groups.items()}

    def speed(self, name: Name) -> dict[str, Any]:
        """Return the seconds per sample, and the rate of its work."""
        if name not in self.logs:
            return {}
        seconds, first = float(self._quick[name]), self._rows.set_index(QUANTITY).loc[[name]].iloc[0]
        rate = float(first["work"]) / seconds if first["unit"] != "s" else None
        return {"seconds": seconds, "rate": rate, "unit": str(first["unit"])}

    def missing_reason(self, name: Name) -> str | None:
        """Return why there are too few undisturbed sessions, or None."""
        if len(self.logs.get(name, ())) >= MIN_SESSIONS:
            return None
        points = self._run.coverage()
        points = points[(points["device"] == name[0]) & (points["world_size"] == name[1])]
        busy = [f"busy: {self._run.busy[point]}" for point in points["point"] if point in self._run.busy]
        failed = points.loc[points["status"] != "ok", "reason"].dropna().tolist()
        return str([*busy, *failed, "it was not measured"][0])


def _judge(
    sessions: Any, noise: float, means: Sequence[float], others: Sequence[tuple[float, int]], comparisons: int
) -> dict[str, Any]:
    """Return verdict and interval of a quantity with these logarithms per session now, and means of baseline runs.

    `others`: variance and degrees of freedom of the other quantities' baseline means.
    """
    within, runs = float(np.var(sessions, ddof=1)) / len(sessions), len(means)
    if runs < FEW_RUNS:
        variance, freedom = DRIFT**2 + within, float(DRIFT_FREEDOM)
    else:
        own = float(np.var(means, ddof=1))
        typical = [value / float(fdtri(count, PRIOR_FREEDOM, 0.5)) for value, count in others or [(own, runs - 1)]]
        freedom = PRIOR_FREEDOM + runs - 1
        variance = (PRIOR_FREEDOM * float(np.median(typical)) + (runs - 1) * own) / freedom
    error = math.sqrt(max(variance, within) + variance / runs)
    reach = float(stdtrit(freedom, 1 - FALSE_ALARMS / comparisons / 2)) * error
    difference = float(np.mean(sessions)) - float(np.mean(means))
    least = max(reach, math.log1p(MIN_RELEVANT_DIFFERENCE), noise)
    verdict: Verdict = "slower" if difference > least else "faster" if difference < -least else "no change shown"
    ends = (difference, difference - reach, difference + reach, least)
    ratios = dict(zip(("ratio", "low", "high", "smallest_change"), map(math.exp, ends), strict=True))
    return {"verdict": verdict, **ratios}


def timed_rows(run: Run) -> pd.DataFrame:
    """Return the rows that have times."""
    columns = [*QUANTITY, "turn", "session", "repeat", "point", "rank", "seconds", "unit", "work", "threads"]
    return run.frame().reindex(columns=columns).dropna(subset="seconds")


def incomparable_reason(baseline: Run, now: Run) -> str | None:
    """Return why no times of these runs are comparable: another fixed set, processor, core count, GPU or torch."""
    return join_words([f"{name}: {text}" for name, text in _differences(baseline, now) if name in DECISIVE]) or None


def circumstances(baseline: Run, now: Run) -> list[str]:
    """Return what else differs and may have caused a change; times are compared all the same."""
    return [f"{name}: {text}" for name, text in _differences(baseline, now) if name not in DECISIVE]


def _differences(baseline: Run, now: Run) -> list[tuple[str, str]]:
    then, here = _facts(baseline), _facts(now)
    pairs = {name: (then.get(name) or "none", here.get(name) or "none") for name in then | here}
    return [(name, f"{old} in the baseline, {new} now") for name, (old, new) in pairs.items() if old != new]


def _facts(run: Run) -> dict[str, Any]:
    machine, rows = run.header.machine, timed_rows(run)
    quota = "" if machine.cpu_quota is None else f" (quota {machine.cpu_quota:g})"
    gpus = ", ".join(f"{count}x {gpu.name}" for count, gpu in machine.gpu_counts)
    threads = rows.loc[rows["world_size"] == 1, "threads"].min()
    return {
        "set of quantities": max((point.get("number") or 0 for point in run.header.planned.values()), default=0),
        "processor": machine.cpu,
        "cores": f"{machine.cores}{quota}",
        "GPUs": gpus or machine.no_gpu_reason,
        **machine.versions,
        "host": machine.host,
        "system": machine.system,
        "Python": machine.python,
        "labkit": str(machine.source),
        "links of GPUs": machine.gpu_links,
        f"threads of one rank ({THREADS})": None if math.isnan(threads) else int(threads),
    }


def has_lost_hardware(baseline: Run, now: Run) -> bool:
    """Return whether the machine has fewer cores or GPUs than it had; another processor is another machine."""
    then, here = baseline.header.machine, now.header.machine
    cores, now_cores = ((machine.cores, machine.cpu_quota or machine.cores) for machine in (then, here))
    is_less = now_cores[0] < cores[0] or now_cores[1] < cores[1] or len(here.gpus) < len(then.gpus)
    return then.cpu == here.cpu and is_less
