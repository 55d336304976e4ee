"""Which quantities of a machine have changed since its baseline, by how much, and what change would have been seen.

A session is one number per quantity: the logarithm of a short sample (`QUANTILE`) of the slowest rank; a run is the
mean of its sessions, which are other processes. Runs of one machine differ by more than their sessions do, so a
baseline may have several runs: how these vary is what a change has to exceed. Each quantity's variance is shrunk
towards the typical one of all (moderated t-statistics: Smyth 2004, section 3). Bounds hold for all quantities of a
check together (Bonferroni).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
from scipy.special import fdtri, stdtrit

from labkit.bench.statistics import MIN_RELEVANT_DIFFERENCE
from labkit.check.worker import AGAIN, FIRST, THREADS
from labkit.lab.runs.store import Run
from labkit.lab.units import counted, join_words
from labkit.machine import Machine

PLACE = ["device", "world_size"]
QUANTITY = [*PLACE, "quantity"]
DRIFT, DRIFT_FREEDOM = 0.05, 10
"""Standard deviation of a run's mean, as a logarithm, where a baseline has too few runs to say it: that of eleven
checks of a two-core virtual machine within ten minutes, median of thirteen quantities."""
FEW_RUNS = 3
"""Runs of a baseline from which on they say how much this machine varies from one to the next."""
QUANTILE = 0.25
"""Of a session's samples: other programs only add time, and the very shortest is luck."""
FALSE_ALARMS = 0.01
"""Checks of an unchanged machine in which any quantity counts as changed."""
LEAST_SESSIONS = 3
"""Undisturbed sessions that a quantity needs in a run."""
PRIOR_FREEDOM = 4.0
"""How alike the variances of quantities are assumed to be, in degrees of freedom."""

Verdict = Literal["slower", "faster", "no change shown", "not comparable"]


@dataclass(frozen=True)
class Change:
    """What became of one quantity since the baseline. Ratios are of seconds, now over then: above 1 is slower."""

    device: str
    ranks: int
    quantity: str
    verdict: Verdict
    seconds: float | None = None
    """Of one sample now."""
    rate: float | None = None
    """Work per second now, in `unit`; None where only the time counts."""
    unit: str = "s"
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    smallest_change: float | None = None
    """The smallest ratio above 1 that would have counted as a change."""
    reason: str | None = None
    """Why it is not comparable."""

    @property
    def place(self) -> str:
        return f"{counted(self.ranks, 'rank')}, {self.device}"


def compare(baseline: Sequence[Run], now: Run) -> list[Change]:
    """Each quantity of `now`, and those that only the baseline has. Without a baseline none is comparable."""
    here, then = _Quantities(now), [_Quantities(run) for run in baseline]
    reason = different_set(baseline[-1], now) if baseline else "there is no baseline"
    names = list(dict.fromkeys([*here.names, *(name for one in then for name in one.names)]))
    means = {name: [mean for one in then if (mean := one.mean(name)) is not None] for name in names}
    variances = {name: _variance(means[name]) for name in names}
    changes = []
    for name in names:
        described = dict(zip(("device", "ranks", "quantity"), name, strict=True)) | here.speed(name)
        old = [one.too_few(name) for one in then]
        if why := reason or here.too_few(name) or (f"{old[-1]}, in the baseline" if all(old) else ""):
            changes.append(Change(**described, verdict="not comparable", reason=why))
            continue
        others = [variance for other, variance in variances.items() if other != name and variance is not None]
        changes.append(Change(**described, **_judge(name, here, means[name], variances[name], others, len(names))))
    return changes


class _Quantities:
    """The quantities of a run: logarithms of seconds by quantity, turn and undisturbed session."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self.logs: dict[tuple[Any, ...], pd.Series] = {}
        frame = timed(run)
        self.names: list[tuple[Any, ...]] = list(frame[QUANTITY].drop_duplicates().itertuples(index=False, name=None))
        frame = frame[~frame["point"].isin(list(run.busy))]
        keys = [*QUANTITY, "point", "session", "turn"]
        self._rows = frame
        self._slowest = frame.groupby([*keys, "repeat"], sort=False)["seconds"].max()
        quick = np.log(self._slowest).groupby(keys, sort=False).quantile(QUANTILE)
        self.logs = {name: group.droplevel(QUANTITY) for name, group in quick.groupby(QUANTITY, sort=False)}

    def sessions(self, name: tuple[Any, ...]) -> np.ndarray:
        """One logarithm per undisturbed session."""
        if name not in self.logs:
            return np.empty(0)
        return self.logs[name].groupby("session").mean().to_numpy()

    def mean(self, name: tuple[Any, ...]) -> float | None:
        """The mean logarithm of the sessions; None with too few."""
        sessions = self.sessions(name)
        return float(sessions.mean()) if len(sessions) >= LEAST_SESSIONS else None

    def noise(self, name: tuple[Any, ...]) -> float:
        """How far apart the two turns are over all sessions: nothing smaller can be a change."""
        turns = self.logs[name].groupby("turn").mean()
        return abs(float(turns[FIRST] - turns[AGAIN]))

    def speed(self, name: tuple[Any, ...]) -> dict[str, Any]:
        """Seconds of a sample, and the rate of its work."""
        if name not in self.logs:
            return {}
        seconds = float(self._slowest.xs(name, level=QUANTITY).quantile(QUANTILE))
        first = self._rows[(self._rows[QUANTITY] == list(name)).all(axis=1)].iloc[0]
        rate = float(first["work"]) / seconds if first["unit"] != "s" else None
        return {"seconds": seconds, "rate": rate, "unit": str(first["unit"])}

    def too_few(self, name: tuple[Any, ...]) -> str | None:
        """Why there are too few undisturbed sessions, or None."""
        if len(self.sessions(name)) >= LEAST_SESSIONS:
            return None
        points = self._run.coverage()
        points = points[(points["device"] == name[0]) & (points["world_size"] == name[1])]
        busy = [self._run.busy[point] for point in points["point"] if point in self._run.busy]
        reasons = points.loc[points["status"] != "ok", "reason"].dropna().tolist()
        return f"busy: {busy[0]}" if busy else reasons[0] if reasons else "it was not measured"


def different_set(baseline: Run, now: Run) -> str | None:
    """Why nothing of these runs is comparable: another set, processor, number of cores or GPUs, or torch; or None."""
    then, here = baseline.header.machine, now.header.machine
    numbers = [{point.get("number") for point in run.header.planned.values()} for run in (baseline, now)]
    differences = [
        f"{name}: {old} in the baseline, {new} now"
        for name, old, new in (
            ("set of quantities", *(max(filter(None, each), default=0) for each in numbers)),
            ("processor", then.cpu, here.cpu),
            ("cores", _cores(then), _cores(here)),
            ("GPUs", _gpus(then), _gpus(here)),
            ("torch", then.versions.get("torch"), here.versions.get("torch")),
        )
        if old != new
    ]
    return join_words(differences) or None


def lost_hardware(baseline: Run, now: Run) -> bool:
    """Whether the machine has fewer cores or GPUs than it had; another machine has lost nothing."""
    then, here = baseline.header.machine, now.header.machine
    if then.cpu != here.cpu:
        return False
    quotas = [machine.cpu_quota or machine.cores for machine in (then, here)]
    return here.cores < then.cores or quotas[1] < quotas[0] or len(here.gpus) < len(then.gpus)


def circumstances(baseline: Run, now: Run) -> Iterator[str]:
    """Yield what else is not as it was, and may be the cause of a change; times are compared all the same."""
    then, here = baseline.header.machine, now.header.machine
    names = [*then.versions, *(name for name in here.versions if name not in then.versions)]
    pairs: dict[str, tuple[Any, Any]] = {
        name: (then.versions.get(name), here.versions.get(name)) for name in names if name != "torch"
    }
    pairs |= {
        "host": (then.host, here.host),
        "system": (then.system, here.system),
        "Python": (then.python, here.python),
        "labkit": (str(then.source), str(here.source)),
        "links of GPUs": (then.gpu_links, here.gpu_links),
        "threads of one rank": (_threads(baseline), _threads(now)),
    }
    for name, (old, new) in pairs.items():
        if old != new:
            note = f" ({THREADS})" if name.startswith("threads") else ""
            yield f"{name}{note}: {old or 'none'} in the baseline, {new or 'none'} now"


def _threads(run: Run) -> int | None:
    frame = timed(run)
    threads = frame.loc[frame["world_size"] == 1, "threads"]
    return int(threads.min()) if len(threads) else None


def _cores(machine: Machine) -> str:
    return f"{machine.cores}" if machine.cpu_quota is None else f"{machine.cores} (quota {machine.cpu_quota:g})"


def _gpus(machine: Machine) -> str:
    counts = [f"{count}x {gpu.name}" for count, gpu in machine.gpu_counts]
    return ", ".join(counts) or machine.no_gpu_reason or "none"


def timed(run: Run) -> pd.DataFrame:
    """The rows that have times."""
    columns = [*QUANTITY, "turn", "session", "repeat", "point", "rank", "seconds", "unit", "work", "threads"]
    return run.frame().reindex(columns=columns).dropna(subset="seconds")


def _variance(means: Sequence[float]) -> tuple[float, int] | None:
    """Variance of runs' means and its degrees of freedom; None with fewer than `FEW_RUNS`."""
    return (float(np.var(means, ddof=1)), len(means) - 1) if len(means) >= FEW_RUNS else None


def _judge(
    name: tuple[Any, ...],
    here: _Quantities,
    means: Sequence[float],
    own: tuple[float, int] | None,
    others: Sequence[tuple[float, int]],
    comparisons: int,
) -> dict[str, Any]:
    """Verdict and interval of one quantity, whose runs in the baseline have these means and this variance.

    `others` are the variances of the other quantities.
    """
    sessions = here.sessions(name)
    within = float(sessions.var(ddof=1)) / len(sessions)
    if own is None:
        variance, freedom = DRIFT**2 + within, float(DRIFT_FREEDOM)
    else:
        typical = [value / float(fdtri(of, PRIOR_FREEDOM, 0.5)) for value, of in (others or [own])]
        freedom = PRIOR_FREEDOM + own[1]
        variance = (PRIOR_FREEDOM * float(np.median(typical)) + own[1] * own[0]) / freedom
    error = math.sqrt(max(variance, within) + variance / len(means))
    reach = float(stdtrit(freedom, 1 - FALSE_ALARMS / comparisons / 2)) * error
    difference = float(sessions.mean()) - float(np.mean(means))
    least = max(reach, math.log1p(MIN_RELEVANT_DIFFERENCE), here.noise(name))
    verdict: Verdict = "no change shown"
    if abs(difference) > least:
        verdict = "slower" if difference > 0 else "faster"
    ends = (difference, difference - reach, difference + reach, least)
    ratio, low, high, smallest = (math.exp(end) for end in ends)
    return {"verdict": verdict, "ratio": ratio, "low": low, "high": high, "smallest_change": smallest}
