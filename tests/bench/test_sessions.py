"""Ratios from several groups of ranks are known as well as the groups agree."""

from itertools import product

import numpy as np
import pandas as pd
import pytest

from labkit.bench.sessions import combine_sessions
from labkit.bench.statistics import with_verdicts
from tests.cases import thinned

WITHIN = 0.04  # standard error of a logarithm, by the rounds of one turn


def _measured(luck, true=0.0, settings=15, alternatives=6, turns=2, seed=0):
    """Ratios whose logarithms are `true` and the luck of their group of ranks, half of it the baseline's."""
    rng = np.random.default_rng(seed)
    rows = []
    for setting in range(settings):
        for turn in range(1, turns + 1):
            of_baseline = rng.normal(0, luck / np.sqrt(2))
            for alternative in range(alternatives):
                log = true + of_baseline + rng.normal(0, luck / np.sqrt(2)) + rng.normal(0, WITHIN)
                rows.append(
                    (setting, alternative, turn, *np.exp([log, log - 1.96 * WITHIN, log + 1.96 * WITHIN]), 0.5, 8)
                )
    return pd.DataFrame(rows, columns=["setting", "alternative", "turn", "ratio", "low", "high", "p", "rounds"])


def _over(ratios):
    return combine_sessions(ratios, ["setting"], "alternative")


@pytest.mark.parametrize(
    ("luck", "settings"),
    thinned(product([0.0, 0.05, 0.2], [3, 15]), lambda luck, settings: (settings == 3) == (luck == 0.05)),
)
def test_luck_of_a_group_of_ranks_is_not_a_difference(luck, settings):
    tables = [_over(_measured(luck, settings=settings, seed=seed)) for seed in range(100)]
    covered = np.mean([((found["low"] < 1) & (found["high"] > 1)).mean() for found in tables])
    claiming = np.mean([(with_verdicts(found)["verdict"] != "no difference shown").any() for found in tables])
    assert covered >= 0.95
    assert claiming <= 0.025 + 3 * np.sqrt(0.025 * 0.975 / 100)


def test_one_turn_would_claim_much_of_it():
    one = _measured(luck=0.2, sessions=1)
    assert ((one["low"] > 1) | (one["high"] < 1)).mean() > 0.4


def test_a_true_difference_beyond_luck_is_found():
    found = with_verdicts(_over(_measured(luck=0.05, true=np.log(0.7))))
    assert (found["verdict"] == "faster").mean() > 0.95
    assert found["ratio"].mean() == pytest.approx(0.7, rel=0.03)


def test_a_setting_of_one_turn_keeps_its_intervals():
    both, one = _measured(luck=0.2, settings=3), _measured(luck=0.0, settings=1, sessions=1).assign(setting=9)
    found = _over(pd.concat([both, one], ignore_index=True))
    kept = found[found["setting"] == 9].drop(columns="setting").reset_index(drop=True)
    columns = ["alternative", "ratio", "low", "high", "p"]
    assert np.allclose(kept[columns].to_numpy(), one[columns].to_numpy())


def test_what_has_one_turn_is_known_no_better_than_turns_of_its_setting_agree():
    ratios = _measured(luck=0.2)
    alone = (ratios["alternative"] == 0) & (ratios["turn"] == 2)
    found = _over(ratios[~alone])
    width = np.log(found["high"] / found["low"]).to_numpy().reshape(-1, 6)  # (settings, alternatives)
    assert (width[:, :1] > width[:, 1:]).all()


def test_too_few_rounds_in_one_turn_show_nothing():
    ratios = _measured(luck=0.0, true=-1.0, settings=2)
    ratios.loc[0, ["low", "high", "p"]] = np.nan
    found = with_verdicts(_over(ratios))
    assert found["verdict"].tolist() == ["no difference shown", *["faster"] * 11]
    assert found.loc[0, ["low", "high", "p"]].isna().all()


def test_nothing_measured():
    columns = ["setting", "alternative", "ratio", "low", "high", "p", "rounds"]
    assert list(_over(_measured(luck=0.0).iloc[:0]).columns) == columns
