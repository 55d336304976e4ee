"""Verdicts of comparisons, checks and reports: made-up frames, and the claims that noise must not
make."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from labkit.lab.answers import Check, Compare, Report
from labkit.lab.facts import Note, Region
from labkit.lab.metric import Metric, Results
from labkit.lab.phrases import find_change
from labkit.lab.wording import advice, headline, overall, scope
from tests.cases import thinned

METRIC = Metric("seconds", "way", ("size",))
ROUNDS = 20


def frame(ratios, noise=0.02, rounds=ROUNDS, seed=0):
    """Samples of a baseline and of alternatives: `ratios[alternative][size]` is the time over the
    baseline's."""
    rng = np.random.default_rng(seed)
    rows = []
    for way, by_size in {"base": [1.0] * len(next(iter(ratios.values()))), **ratios}.items():
        for size, ratio in enumerate(by_size):
            for repeat in range(rounds):
                seconds = ratio * np.exp(rng.normal(0, noise))
                rows.append(
                    {"size": size, "way": way, "rank": 0, "repeat": repeat, "seconds": seconds}
                )
    return pd.DataFrame(rows)


def ask(table, **options):
    question = Compare(
        id="q",
        text="Is it faster?",
        metric=METRIC,
        baseline="base",
        advice="Use {name}{where}.",
        **options,
    )
    return question.answer(Results(table))


@pytest.mark.parametrize(
    ("ratios", "verdict", "covered", "has_advice"),
    [
        ({"a": [0.5, 0.5, 0.5]}, "yes", "all 3 configurations", True),
        ({"a": [0.5, 0.5, 1.0]}, "yes", "faster in 2 of 3 configurations", True),
        ({"a": [0.5, 1.0, 1.0]}, "it depends", "faster in 1 of 3 configurations", True),
        (
            {"a": [0.5, 1.0, 2.0]},
            "it depends",
            "faster in 1 of 3 configurations, slower in 1",
            False,
        ),
        ({"a": [1.0, 1.0, 1.0]}, "no clear difference", "all 3 configurations", False),
        ({"a": [1.0, 1.0, 2.0]}, "no", "slower in 1 of 3 configurations", False),
        ({"a": [2.0, 2.0, 2.0]}, "no", "all 3 configurations", False),
        ({"a": [2.0, 2.0], "b": [0.5, 0.6]}, "yes", "both configurations", True),
        ({"a": [1.0], "c": [1.0], "d": [1.0]}, "no clear difference", "all 3 comparisons", False),
    ],
)
def test_a_comparison_says_where_something_is_faster(ratios, verdict, covered, has_advice):
    answer = ask(frame(ratios))
    assert answer.verdict == verdict
    assert scope(answer).startswith(covered)
    assert (answer.advice is not None) == has_advice
    assert len(headline(answer).split()) <= 25
    if "b" in ratios:
        assert answer.subject == "b"


def test_too_few_rounds_are_undecided_and_no_rows_are_not_measured():
    assert ask(frame({"a": [0.5]}, rounds=2)).verdict == "undecided"
    assert ask(pd.DataFrame()).verdict == "not measured"
    notes = (Note("skipped", "needs 51 GiB", points=2),)
    answer = Compare(id="q", text="?", metric=METRIC, baseline="base").answer(
        Results(pd.DataFrame(), missing=notes)
    )
    assert answer.notes == notes


def test_an_alternative_with_wrong_results_is_named_and_not_compared():
    table = frame({"a": [0.5]})
    wrong = pd.DataFrame(
        [{"size": 0, "way": "b", "rank": 0, "repeat": 0, "status": "wrong", "reason": "rank 1"}]
    )
    answer = ask(pd.concat([table, wrong]))
    assert answer.verdict == "yes"
    assert answer.notes == (Note("wrong", "rank 1", names=("b",)),)


def test_counts_need_no_interval_and_the_largest_rank_stands_for_all():
    metric = Metric("peak_bytes", "way", ("size",), exact=True)
    rows = [
        {"size": 1, "way": way, "rank": rank, "repeat": 0, "peak_bytes": n_bytes + rank}
        for way, n_bytes in (("base", 2**20), ("a", 2**19))
        for rank in range(2)
    ]
    question = Compare(id="q", text="?", metric=metric, baseline="base")
    answer = question.answer(Results(pd.DataFrame(rows)))
    assert answer.verdict == "yes"
    assert answer.effect == pytest.approx((2**19 + 1) / (2**20 + 1))


def test_sessions_that_disagree_show_no_difference():
    """A gain in one set of processes, and the same loss in another, is chance."""
    one = frame({"a": [0.8]}, seed=1)
    other = frame({"a": [1.25]}, seed=2)
    both = pd.concat([one.assign(session=1), other.assign(session=2)])
    assert ask(both).verdict in ("no clear difference", "undecided")
    agree = pd.concat([one.assign(session=1), frame({"a": [0.8]}, seed=2).assign(session=2)])
    assert ask(agree).verdict == "yes"


@pytest.mark.parametrize(
    ("measured", "verdict"),
    [
        ([1.0, 1.2, 0.9], "yes"),
        ([1.0, 1.2, 2.0], "it depends"),
        ([3.0, 2.0, 1.0], "no"),
        ([0.0, 1.0, 9.0], "no"),
    ],
)
def test_a_check_counts_the_rows_within_its_factor(measured, verdict):
    table = pd.DataFrame({"measured": measured, "predicted": 1.0})
    check = Check(
        id="q",
        text="?",
        table=lambda results: table,
        measured="measured",
        predicted="predicted",
        within=1.5,
    )
    assert check.answer(Results(pd.DataFrame())).verdict == verdict


def test_a_report_fills_its_sentence_with_units():
    table = pd.DataFrame(
        {"size": ["nano", "mini"], "seconds": [0.001, 0.002], "peak_bytes": [2**20, 2**30]}
    )
    report = Report(
        id="q",
        text="?",
        table=lambda results: table,
        says="{size} takes {seconds} and {peak_bytes}.",
    )
    answer = report.answer(Results(pd.DataFrame()))
    assert answer.verdict == "measured"
    assert headline(answer) == "Mini takes 2 ms and 1 GiB."


def with_spread(ratios, noise):
    """Samples whose noise differs by size."""
    parts = [
        frame({way: [by_size[size]] for way, by_size in ratios.items()}, noise=one).assign(
            size=size
        )
        for size, one in enumerate(noise)
    ]
    return pd.concat(parts)


def test_advice_to_keep_the_baseline_needs_intervals_that_exclude_a_gain_of_10_percent():
    keep = "Keep the baseline."
    assert advice(ask(frame({"a": [1.0, 1.0]}), keep=keep)) == keep
    wide = ask(frame({"a": [1.0]}, noise=0.4), keep=keep)
    assert wide.verdict == "undecided"
    assert wide.advice is None
    # slower in one configuration, but the other one may gain
    assert ask(with_spread({"a": [1.2, 0.97]}, noise=[0.02, 0.4]), keep=keep).advice is None


def timed(ratios, **options):
    """Samples of one point."""
    return frame(ratios, **options).assign(point="p", is_sum=None)


def test_seconds_are_named_only_if_a_gain_is_neither_shown_nor_excluded():
    assert ask(timed({"a": [1.0]})).seconds_more == 0
    assert ask(timed({"a": [0.5]})).seconds_more == 0
    assert ask(timed({"a": [1.0]})).verdict == "no clear difference"
    assert ask(timed({"a": [1.0]}, noise=0.4)).verdict == "undecided"
    # Without times nobody knows how long; that there were too few repeats would be wrong.
    untimed = headline(ask(frame({"a": [1.0]}, noise=0.4)))
    assert untimed != headline(ask(frame({"a": [1.0]}, noise=0.4, rounds=4)))
    few = ask(timed({"a": [1.0]}, noise=0.4)).seconds_more
    more = ask(timed({"a": [1.0]}, noise=0.8)).seconds_more
    assert ROUNDS < few < more  # a round takes two seconds
    # rounds of a sum are none of their own
    total = timed({"a": [1.0]}, noise=0.4).assign(is_sum=True, size=9)
    both = pd.concat([timed({"a": [1.0]}, noise=0.4), total])
    question = Compare(id="q", text="?", metric=replace(METRIC, where={"size": 0}), baseline="base")
    assert question.answer(Results(both)).seconds_more == pytest.approx(few)
    # Samples that are added up from rows no longer name their point.
    added = replace(METRIC, prepare=lambda rows: rows.drop(columns="point"))
    question = Compare(id="q", text="?", metric=added, baseline="base")
    answer = question.answer(Results(timed({"a": [1.0]}, noise=0.4)))
    assert answer.seconds_more == pytest.approx(few)


def test_all_configurations_together_show_what_none_shows_alone():
    rows = frame({"a": [0.9] * 8}, noise=0.12, rounds=8)
    answer = ask(rows)
    assert not answer.counts.better
    assert answer.verdict == "yes"
    assert answer.direction == "better"
    assert answer.is_overall
    assert advice(answer) == "Use a."
    assert answer.overall.n == 8
    assert answer.overall.low < 0.9 < answer.overall.high < 1
    assert f"{100 * (1 - answer.overall.ratio):.0f}%" in headline(answer)
    assert f"{100 * (1 - answer.overall.low):.0f}" in overall(answer)


def test_a_gain_in_a_few_configurations_is_none_over_all():
    """Also if it is so large that the mean over all shows it."""
    answer = ask(frame({"a": [0.2, 0.2, 1.0, 1.0, 1.0, 1.0, 1.0]}))
    assert answer.overall.direction == "better"
    assert answer.verdict == "it depends"
    assert answer.high < 0.3
    opposite = ask(frame({"a": [0.2, 0.2, 0.2, 1.3]}))
    assert opposite.verdict == "it depends"
    assert opposite.overall is None
    assert ask(frame({"a": [0.5]})).overall is None


def test_a_loss_over_all_configurations_is_no_gain():
    rows = frame({"a": [1.1] * 8}, noise=0.12, rounds=8, seed=1)
    answer = ask(rows, keep="Keep the baseline.")
    assert answer.verdict == "no"
    assert answer.direction == "worse"
    # "Slower in some configurations" would name none.
    assert not answer.counts.worse
    assert f"{100 * (answer.overall.ratio - 1):.0f}%" in headline(answer)
    assert answer.advice is None or answer.table["low"].min() >= 0.9


def test_what_some_configurations_lose_is_not_the_size_of_the_answer():
    """It would be read as what all of them lose."""
    answer = ask(frame({"a": [1.1, 1.1, 1.1, 1.5]}, noise=0.15, rounds=8))
    assert answer.verdict == "no"
    assert 0 < answer.counts.worse < answer.counts.total
    assert find_change(answer).text == f"{100 * (answer.overall.ratio - 1):.0f}%"
    unknown = replace(answer, is_overall=False, low=1.5, high=1.5)
    assert find_change(unknown) is None
    assert "50%" not in headline(unknown)


def test_a_gain_over_all_and_a_loss_in_one_are_told_apart():
    gains = frame({"a": [0.85] * 16}, noise=0.22, rounds=8)
    loss = frame({"a": [1.06]}, noise=0.02, rounds=8).assign(size=16)
    answer = ask(pd.concat([gains, loss]))
    assert answer.verdict == "it depends"
    assert (answer.counts.better, answer.counts.worse) == (0, 1)
    assert (answer.direction, answer.is_overall) == ("better", True)
    assert f"{100 * (1 - answer.overall.ratio):.0f}% less" in headline(answer)
    assert "slower in 1" in scope(answer)
    assert answer.advice is None


def test_counts_over_all_configurations_have_no_interval():
    metric = Metric("peak_bytes", "way", ("size",), exact=True)
    rows = [
        {"size": size, "way": way, "rank": 0, "repeat": 0, "peak_bytes": n_bytes * (1 + size)}
        for way, n_bytes in (("base", 2**20), ("a", 2**19))
        for size in range(3)
    ]
    question = Compare(id="q", text="?", metric=metric, baseline="base")
    answer = question.answer(Results(pd.DataFrame(rows)))
    assert answer.overall.ratio == answer.overall.low == answer.overall.high == pytest.approx(0.5)
    assert "[" not in overall(answer)


def test_an_alternative_that_beats_the_named_one_somewhere_is_named_with_the_region():
    """SDPA wins more often, and tiled attention where it matters in bfloat16."""
    ratios = {"sdpa": [0.5, 0.5, 0.5, 0.5], "tiled": [1.2, 1.2, 1.2, 0.2]}
    answer = ask(frame(ratios))
    assert answer.subject == "sdpa"
    assert answer.overtaken == (("tiled", Region("size", "equal", (3,))),)
    assert "tiled" in advice(answer)
    assert ask(frame({"sdpa": [0.5] * 4, "tiled": [0.6] * 4})).overtaken == ()


@pytest.mark.parametrize(("other", "is_named"), [(0.772, False), (0.7, True)])
def test_a_count_that_is_hardly_smaller_overtakes_nothing(other, is_named):
    """Every layer 0.778 and every fourth 0.772: "lighter still", by 0.8%."""
    peaks = {"base": [1.0, 1.0], "a": [0.6, 0.778], "b": [0.7, other]}
    rows = [
        {"size": size, "way": way, "rank": 0, "repeat": 0, "peak_bytes": 1e6 * peak}
        for way, by_size in peaks.items()
        for size, peak in enumerate(by_size)
    ]
    metric = Metric("peak_bytes", "way", ("size",), exact=True)
    question = Compare(id="q", text="?", metric=metric, baseline="base")
    answer = question.answer(Results(pd.DataFrame(rows)))
    assert answer.subject == "a"
    assert bool(answer.overtaken) is is_named


def test_alternatives_that_are_as_good_are_named():
    """Tensor parallelism by either transport, 0.748 and 0.752: no answer may call the other
    faster."""
    answer = ask(frame({"torch": [0.748], "shared": [0.752]}))
    assert {answer.subject, *answer.ties} == {"torch", "shared"}


@pytest.mark.parametrize("among", [("a",), ()])
def test_an_alternative_of_the_readers_own_takes_part_in_every_comparison(among):
    rows = frame({"a": [0.9], "mine": [0.5], "b": [0.1]})
    question = Compare(
        id="q", text="?", metric=METRIC, baseline="base", among=among, advice="Use {name}."
    )
    answer = question.answer(Results(rows, user_alternatives=("mine",)))
    assert answer.subject == "mine"
    assert set(answer.table["way"]) == {*among, "mine"}


def test_a_busy_machine_recommends_nothing():
    question = Compare(
        id="q", text="?", metric=METRIC, baseline="base", advice="Use {name}.", keep="Keep it."
    )
    for ratios in ({"a": [0.5]}, {"a": [1.0]}):
        assert question.answer(Results(frame(ratios))).advice is not None
        assert question.answer(Results(frame(ratios), is_busy=True)).advice is None


@pytest.mark.parametrize("noise", thinned([0.1, 0.4], lambda noise: noise == 0.4))
def test_noise_claims_next_to_nothing(noise):
    """Of 60 questions on runs in which nothing differs, 12 comparisons each, at most 5 %, beyond
    chance, claim one."""
    same = {"a": [1.0] * 4, "b": [1.0] * 4, "c": [1.0] * 4}
    answers = [ask(frame(same, noise=noise, seed=seed)).verdict for seed in range(60)]
    claimed = [one for one in answers if one not in ("no clear difference", "undecided")]
    assert len(claimed) <= 60 * 0.05 + 4


def test_the_median_of_several_sessions_has_an_interval_over_all_of_them():
    one = frame({"a": [0.8, 0.8]}, seed=1)
    other = frame({"a": [1.2, 1.2]}, seed=2)
    both = METRIC.medians(pd.concat([one.assign(session=1), other.assign(session=2)]))
    alone = METRIC.medians(one.assign(session=1))
    merged = both.merge(alone, on=METRIC.columns, suffixes=("", "_alone"))
    assert len(both) == 4
    assert (merged["low"] <= merged["low_alone"]).all()
    assert (merged["high"] > merged["high_alone"])[merged["way"] == "a"].all()
