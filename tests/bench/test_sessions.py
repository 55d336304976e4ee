"""Ratios from several sessions are as uncertain as the sessions differ, each setting by itself."""

from itertools import product

import numpy as np
import pandas as pd
import pytest

from labkit.bench.statistics import NO_DIFFERENCE_SHOWN as NONE
from labkit.bench.statistics import combine_sessions, with_verdicts
from tests.cases import thinned

WITHIN = 0.04  # standard error of a logarithm, by the rounds of one session
COLUMNS = ["setting", "alternative", "session", "ratio", "low", "high", "p"]
SPREADS = {
    "none": lambda rng, n: np.zeros(n),
    "alike": lambda rng, n: np.full(n, 0.2),
    "log-normal": lambda rng, n: 0.06 * np.exp(rng.normal(0, 1, n)),
    "every fifth is large": lambda rng, n: np.where(rng.random(n) < 0.2, 0.4, 0.04),
    "one is large": lambda rng, n: np.where(np.arange(n) == 1, 0.5, 0.04),
}


def _frame(logs):
    """Rows with these logarithms, (settings, sessions, alternatives)."""
    places = np.array(list(np.ndindex(logs.shape)))[:, [0, 2, 1]]
    bounds = [np.exp(logs.ravel() + z * WITHIN) for z in (0, -1.96, 1.96)]
    return pd.DataFrame([(*place, *row, 0.5) for place, row in zip(places, zip(*bounds,
    strict=True), strict=True)],
                        columns=COLUMNS)  # fmt: skip


def _logs(spread, true=0.0, settings=15, alternatives=6, sessions=2, seed=0):
    """Logarithms of ratios whose variance between sessions is half the baseline's."""
    rng = np.random.default_rng(seed)
    deviation = SPREADS[spread](rng, settings)[:, None, None] / np.sqrt(2)
    shape = (settings, sessions, alternatives)
    return (
        true
        + deviation * (rng.normal(size=(*shape[:2], 1)) + rng.normal(size=shape))
        + rng.normal(0, WITHIN, shape)
    )


def _combined(logs):
    return with_verdicts(combine_sessions(_frame(logs), ["setting"], "alternative"))


@pytest.mark.parametrize(
    ("spread", "settings", "alternatives"),
    thinned(
        [(spread, *shape) for spread, shape in product(SPREADS, [(1, 3), (4, 3), (6, 2), (15, 6)])],
        lambda spread, settings, _: (spread, settings) == ("every fifth is large", 6),
    ),
)
def test_at_most_5_percent_of_frames_without_a_difference_claim_any(spread, settings, alternatives):
    tries = 200
    tables = [
        _combined(_logs(spread, settings=settings, alternatives=alternatives, seed=s))
        for s in range(tries)
    ]
    claiming = np.mean([(table["verdict"] != NONE).any() for table in tables])
    assert claiming <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / tries)
    covered = np.mean([((table["low"] < 1) & (table["high"] > 1)).mean() for table in tables])
    assert covered >= 0.95


@pytest.mark.parametrize("passes", [2, 3])
def test_a_setting_that_differs_between_sessions_does_not_hide_the_others(passes):
    """Sessions at 2048 tokens contradict one another; at 4096 they take 0.66 and 0.72, at 256 a
    half and 0.58."""
    ratios = {
        256: (0.5, 0.58),
        512: (0.93, 0.98),
        1024: (0.82, 0.76),
        2048: (0.55, 1.8),
        4096: (0.66, 0.72),
    }
    logs = np.repeat(np.log(list(ratios.values()))[:, :, None], passes, axis=2)
    table = _combined(logs + np.array([-0.01, 0.0, 0.01])[:passes])
    verdicts = table.groupby("setting")["verdict"].agg(set).tolist()
    assert [verdicts[index] for index in (0, 3, 4)] == [{"faster"}, {NONE}, {"faster"}]


def test_a_true_difference_beyond_the_variance_is_found():
    table = _combined(_logs("log-normal", true=np.log(0.6)))
    assert (table["verdict"] == "faster").mean() > 0.9
    assert table["ratio"].mean() == pytest.approx(0.6, rel=0.05)


def test_a_setting_with_one_session_keeps_its_intervals():
    both = _frame(_logs("alike", settings=3))
    one = _frame(_logs("none", settings=1, sessions=1)).assign(setting=9)
    table = combine_sessions(pd.concat([both, one], ignore_index=True), ["setting"], "alternative")
    columns = ["alternative", "ratio", "low", "high", "p"]
    assert np.allclose(table.loc[table["setting"] == 9, columns], one[columns])


def test_an_alternative_with_one_session_is_as_uncertain_as_its_setting():
    ratios = _frame(_logs("alike"))
    alone = (ratios["alternative"] == 0) & (ratios["session"] == 1)
    table = combine_sessions(ratios[~alone], ["setting"], "alternative")
    # (settings, alternatives)
    width = np.log(table["high"] / table["low"]).to_numpy().reshape(-1, 6)
    assert (width[:, :1] > width[:, 1:]).all()


def test_too_few_rounds_in_one_session_show_nothing():
    ratios = _frame(_logs("none", true=-1.0, settings=2))
    ratios.loc[0, ["low", "high", "p"]] = np.nan
    table = with_verdicts(combine_sessions(ratios, ["setting"], "alternative"))
    assert table["verdict"].tolist() == [NONE, *["faster"] * 11]
    assert table.loc[0, ["low", "high", "p"]].isna().all()
    assert list(combine_sessions(ratios.iloc[:0], ["setting"], "alternative")) == [
        c for c in COLUMNS if c != "session"
    ]
