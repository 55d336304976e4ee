"""Runs simulated on the points of recorded ones: with their noise, and as many rounds as a pilot
asks for within the time of `quick`."""

from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pandas as pd

from labkit.bench.clock import PILOT_ROUNDS, SET_UP_SHARE, plan_rounds
from labkit.lab.answers import Compare, Question
from labkit.lab.metric import Results
from labkit.studies import load_lab
from tests.pages.cells import recorded


@dataclass(frozen=True)
class Series:
    """Alternatives of one point that are timed together, for one question."""

    rows: pd.DataFrame
    """One row per alternative, of one rank and repeat."""
    is_baseline: np.ndarray
    medians: np.ndarray
    """Logarithm of each alternative's median."""
    noise: np.ndarray
    """Logarithms around it, (alternatives, rounds)."""
    round_s: float
    budget_s: float
    most: int

    def samples(self, rng, gain, spread):
        """Logarithms of times, (alternatives, rounds), of alternatives that are `gain` faster.

        None: as much as in the recorded run. `spread` is the standard deviation of made-up noise;
        None: the recorded noise.
        """
        times = np.exp(self._draw(rng, PILOT_ROUNDS + max(self.most, PILOT_ROUNDS), spread))
        if gain is None:
            times *= np.exp(self.medians - self.medians.mean())[:, None]
        else:
            times[~self.is_baseline] *= 1 - gain
        if self.most <= PILOT_ROUNDS:
            return times[:, : self.most]
        pilot = {str(n): {"": list(one[:PILOT_ROUNDS])} for n, one in enumerate(times)}
        seconds = (PILOT_ROUNDS * self.round_s, 0.0)
        plan = plan_rounds(pilot, *seconds, gain=0.1, rounds_s=self.budget_s, most=self.most)
        start = 0 if plan.keeps_pilot else PILOT_ROUNDS
        return times[:, start : PILOT_ROUNDS + plan.rounds]

    def _draw(self, rng, rounds, spread):
        if spread is not None:
            return rng.normal(0, spread, (len(self.rows), rounds))
        n = self.noise.shape[1]
        # Whole rounds, so that a disturbance hits all alternatives of one; symmetric, so that no
        # ratio differs from 1 in the mean or the median.
        drawn = self.noise[:, rng.integers(n, size=rounds)] * rng.choice([-1.0, 1.0], size=rounds)
        # A recorded round that is drawn twice is no new round: six drawn of six spread less than
        # six others, and 5.5% of questions claimed a difference. Each draw gets noise of the
        # recorded covariance, too (Silverman and Young 1987, "The bootstrap: to smooth or not to
        # smooth?").
        width = n**-0.2
        smooth = self.noise @ rng.normal(0, width / n**0.5, (n, rounds))
        return (drawn + smooth) / np.hypot(1, width)


@cache
def series_of(lab, question_id):
    """The series of a `Compare`; none for counts, and where its baseline was not measured."""
    run = recorded(lab)
    question = load_lab(lab).question(question_id)
    metric = question.metric
    frame = metric.select(run.frame())
    if metric.exact or frame.empty:
        return ()
    frame = frame.dropna(subset=[metric.value])
    names = {question.baseline, *(question.among or frame[metric.compare].unique())}
    frame = frame[frame[metric.compare].isin(names)]
    sessions = {"session"} & set(frame)
    columns = [*metric.configuration, *sessions]
    elapsed_s = run.coverage().set_index("point")["elapsed_s"]
    config = run.header.config
    series = []
    for _, rows in frame.groupby(columns, dropna=False, sort=False):
        if not (rows[metric.compare] == question.baseline).any():
            continue
        slowest = rows.pivot_table(
            index=metric.compare, columns="repeat", values=metric.value, aggfunc="max"
        ).dropna(axis="columns")
        first = rows.drop_duplicates(metric.compare).set_index(metric.compare, drop=False)
        first = first.loc[slowest.index].assign(rank=0)
        logs = np.log(slowest.to_numpy())
        n = logs.shape[1]
        noise = logs - np.median(logs, axis=1, keepdims=True)
        noise *= np.sqrt(n / max(1, n - 1))  # draws from n rounds spread less than new rounds
        timed = run.frame()
        for name in metric.configuration:
            if name in timed:
                timed = timed[timed[name] == rows[name].iloc[0]]
        timed = timed[timed["rank"] == 0]
        points = timed["point"].unique()
        timed_s = timed["seconds"].sum() if "seconds" in timed else 0.0
        set_up_s = max(0.0, elapsed_s[points].sum() - timed_s) / max(1, len(points))
        is_by_clock = metric.value == "seconds"
        series.append(
            Series(
                rows=first,
                is_baseline=(first[metric.compare] == question.baseline).to_numpy(),
                medians=np.median(logs, axis=1),
                noise=noise,
                round_s=max(1e-6, float(np.exp(np.median(logs, axis=1)).sum())),
                budget_s=max(config.get("rounds_s") or np.inf, SET_UP_SHARE * set_up_s),
                most=config["repeats"] if is_by_clock and "repeats" in config else n,
            )
        )
    return tuple(series)


def simulate(lab, question: Question, seed, *, gain=0.0, spread=None):
    """Answer a `Compare` on one simulated run in which alternatives are `gain` faster; None if
    nothing was measured."""
    assert isinstance(question, Compare)
    rng = np.random.default_rng(seed)
    frames = []
    for one in series_of(lab, question.id):
        samples = one.samples(rng, gain, spread)
        n = samples.shape[1]
        rows = one.rows.loc[one.rows.index.repeat(n)].reset_index(drop=True)
        repeats = np.tile(np.arange(n), len(one.rows))
        frames.append(rows.assign(repeat=repeats, **{question.metric.value: samples.ravel()}))
    if not frames:
        return None
    # Its rows are samples already, and lack columns that only measured rows have.
    metric = replace(question.metric, prepare=lambda rows: rows, where={})
    asked = replace(question, metric=metric)
    return asked.answer(Results(pd.concat(frames, ignore_index=True)))
