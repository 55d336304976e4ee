"""What is said of ratios: the verdict, and a headline that keeps to what the rule of significance lets pass."""

import re

import numpy as np
import pandas as pd
import pytest

from labkit.lab.as_predicted import agreement
from labkit.lab.claims import claim, exact, lies_within, published
from labkit.lab.comparing import MEMORY, TIME, compared, contest
from labkit.lab.findings import at_the_cost_of, without_verdict
from labkit.lab.places import place_of_best, reach_of
from labkit.lab.rows import Measured, exactly_over, select

TIMES = Measured(("model", "n_bytes"), "name")


def _frame(factors, noise=0.01, repeats=12, seed=0):
    """Samples of a baseline and of alternatives, whose time in a setting is {(name, n_bytes): factor} of it."""
    generator = np.random.default_rng(seed)
    sizes = sorted({n for _, n in factors})
    rows = [
        {"model": "mini", "n_bytes": n, "name": name, "rank": 0, "repeat": i}
        | {"seconds": factors.get((name, n), 1.0) * np.exp(generator.normal(0, noise))}
        for name in ("torch", *dict.fromkeys(name for name, _ in factors))
        for n in sizes
        for i in range(repeats)
    ]
    return pd.DataFrame(rows)


def _ratios(factors, **noise):
    return TIMES.over(_frame(factors, **noise), "torch")


def _sizes(*factors):
    return {("ring", 2**20 * 4**index): factor for index, factor in enumerate(factors)}


@pytest.mark.parametrize(
    ("factors", "verdict", "headline"),
    [
        ((0.8, 0.8), "yes", "Yes: the ring takes 20 % less time than torch."),
        ((0.8,), "yes", "Yes: the ring takes 20 % less time than torch."),
        ((1.5,), "no", "No: the ring takes 50 % longer than torch."),
        ((0.25, 0.5), "yes", "Yes: the ring is 2 to 4 times faster than torch."),
        ((1.5, 1.5), "no", "No: the ring takes 50 % longer than torch."),
        ((3.0, 2.0), "no", "No: the ring takes 2 to 3 times as long as torch."),
        (
            (1.0, 1.0),
            "no clear difference",
            "No clear difference in time between the ring and torch in any of 2 settings.",
        ),
        ((1.0, 0.7, 0.7), "yes", "Yes from 4 MiB on: the ring takes 30 % less time than torch."),
        ((0.7, 1.0, 1.0), "it depends", "Only at 1 MiB: the ring takes 30 % less time than torch."),
        ((1.0, 0.7, 1.0), "it depends", "Only at 4 MiB: the ring takes 30 % less time than torch."),
        ((0.7, 1.0, 0.7, 1.0), "it depends", "Only in some settings: the ring takes 30 % less time than torch."),
        ((1.0, 1.5, 1.0), "no", "No: the ring is never measurably faster than torch, and slower in 1 of 3 settings."),
        ((1.5, 0.7), "it depends", "It depends: the ring is faster than torch at 4 MiB, slower at 1 MiB."),
        (
            (0.5, 0.5, 1.0, 1.5, 0.5, 0.5, 0.25),
            "it depends",
            "It depends: from 256 MiB on the ring is up to 4 times faster than torch, elsewhere not always.",
        ),
    ],
)
def test_verdict_and_headline_say_what_the_rows_show(factors, verdict, headline):
    finding = compared(_ratios(_sizes(*factors), noise=0.001), "the ring", "torch", axis=("n_bytes",))
    assert (finding.verdict, finding.headline) == (verdict, headline)
    assert finding.significant == (verdict != "no clear difference")
    assert [effect.verdict for effect in finding.effects] == finding.table["verdict"].tolist()
    assert finding.effects[0].setting == "mini, 1 MiB"


def test_advice_follows_the_verdict():
    def advice(*factors):
        ratios = _ratios(_sizes(*factors), noise=0.001)
        return compared(ratios, "a", "b", axis=("n_bytes",), choose="Take a", keep="Keep b").advice

    assert advice(0.5, 0.5) == "Take a."
    assert advice(1.0, 0.5, 0.5) == "Take a from 4 MiB on."
    assert advice(0.5, 1.0, 0.6, 1.0) == "Take a: it helps in 2 of 4 settings (most at 1 MiB)."
    assert advice(0.6, 1.5, 0.5, 1.0, 0.6) == "Take a: it helps in 3 of 5 settings (most at 16 MiB), and hurts in 1."
    both = "Take a only where it was measured to help, in 2 of 4 settings (most at 16 MiB); it hurts in 2."
    assert advice(0.6, 1.5, 0.5, 1.5) == both
    assert advice(0.5, 1.0, 0.5, 0.5) == "Take a from 16 MiB on."
    assert advice(1.0, 1.0) == advice(1.5, 1.5) == "Keep b."


def test_memory_is_not_called_fast():
    finding = compared(_ratios(_sizes(0.5, 0.5), noise=0.001), "SDPA", "the formula", quantity=MEMORY)
    assert finding.headline == "Yes: SDPA needs 2 times less memory than the formula."
    assert {effect.quantity for effect in finding.effects} == {"memory"}


@pytest.mark.parametrize("factor", [0.3, 0.05, 4.0, 20.0])
@pytest.mark.parametrize("settings", [1, 3])
def test_of_what_is_too_uneven_no_ratio_is_told_but_the_least_that_its_interval_allows(factor, settings):
    finding = compared(_ratios(_sizes(*[factor] * settings), noise=1.0, repeats=40), "a", "b")
    table = finding.table
    assert (table["high"] > 2 * table["low"]).all()
    (told,) = re.findall(r"at least ([\d.]+)", finding.headline)
    least = (1 / table["high"] if factor < 1 else table["low"]).min()
    share = (least - 1) / least if factor < 1 else least - 1
    assert float(told) <= (100 * share if "%" in finding.headline else least)
    assert float(told) > 0.9 * (100 * share - 1 if "%" in finding.headline else least)


def test_what_is_uneven_and_near_to_nothing_has_no_number():
    rows = pd.DataFrame({"setting": ["here"], "name": ["a"], "ratio": [0.5], "low": [0.2], "high": [0.98], "p": [1e-4]})
    assert compared(rows, "a", "b").headline == "Yes: a takes clearly less time than b."


def test_where_some_are_too_uneven_the_middle_is_told_and_no_span():
    even, uneven = _ratios(_sizes(0.5, 0.5), noise=0.001), _ratios({("ring", 1): 0.1}, noise=1.0)
    finding = compared(pd.concat([even, uneven], ignore_index=True), "a", "b")
    assert finding.verdict == "yes"
    assert "typically 2 times faster" in finding.headline


def test_the_effect_that_a_headline_quotes_is_its_lead():
    found = compared(_ratios(_sizes(0.25, 0.5, 0.8), noise=0.001), "a", "b")
    assert (found.headline, found.lead) == ("Yes: a is 1.2 to 4 times faster than b.", min(found.effects, key=_ratio))
    worst = contest(_ratios({("ring", 1): 3.0, ("tree", 1): 2.0}, noise=0.001), "name", "torch")
    assert (worst.lead.subject, round(worst.lead.ratio, 1)) == ("ring", 3.0)
    assert compared(_ratios(_sizes(1.0, 1.0), noise=0.001), "a", "b").lead is None
    some = _ratios({("ring", 1): 0.1}, noise=1.0)
    typical = compared(pd.concat([_ratios(_sizes(0.4, 0.5), noise=0.001), some], ignore_index=True), "a", "b")
    assert f"typically {1 / typical.lead.ratio:.1f} times faster" in typical.headline


def _ratio(effect):
    return effect.ratio


def test_a_finding_says_of_which_settings_it_speaks_and_where_most():
    factors = {("ring", 2**10 * 4**n): factor for n, factor in enumerate((0.5, 0.3, 1.0, 2.0))}
    one = _ratios(factors, noise=0.001).assign(backend="gloo")[["backend", *_ratios(factors).columns]]
    mixed = "faster in 2 of 4 settings, slower in 1, no difference shown in 1: gloo · mini · 1 KiB to 64 KiB"
    assert compared(one, "a", "b").where == f"{mixed} (most: 4 KiB)"
    assert compared(one[:2], "a", "b").where == "both settings: gloo · mini · 1 KiB and 4 KiB (most: 4 KiB)"
    assert compared(one[:1], "a", "b").where == "the one setting measured: gloo · mini · 1 KiB"
    assert compared(one[2:3], "a", "b", setting="batch 2").where.endswith("gloo · mini · 16 KiB · batch 2")
    others = pd.concat([one, one.assign(name="tree", ratio=1.0, p=1.0)], ignore_index=True)
    of_two = contest(others[others["n_bytes"] < 2**13], "name", "b")
    assert of_two.where == "both settings: gloo · mini · 1 KiB and 4 KiB (most: 4 KiB)"


def test_what_is_uneven_is_never_quoted_although_it_is_in_the_middle():
    rows = pd.DataFrame({"n_bytes": [1, 2], "name": "a", "ratio": [0.9, 0.2], "low": [0.88, 0.1], "high": [0.92, 0.4]})
    found = compared(rows.assign(p=1e-6), "a", "b")
    assert (found.headline, found.lead.ratio) == ("Yes: a takes typically 10 % less time than b.", 0.9)


def test_a_headline_with_long_names_tells_how_much_is_gained_and_that_something_is_lost():
    mixed = _ratios({("ring", 1): 0.8, ("ring", 2): 1.3, ("ring", 3): 0.9, ("ring", 4): 1.2}, noise=0.001)
    short, long = (
        compared(mixed, subject, "torch").headline for subject in ("the ring", f"the {'very ' * 12}long ring")
    )
    assert short.endswith("20 % less time than torch in some settings, takes up to 30 % longer in others.")
    assert long.endswith("less time than torch in some settings, slower in others.")


def test_too_few_repeats_decide_nothing():
    finding = compared(_ratios(_sizes(0.5), repeats=3), "a", "b", choose="Take a", keep="Keep b")
    assert (finding.verdict, finding.advice, finding.significant) == ("undecided", None, False)


def test_the_winner_of_a_contest_is_named_and_its_losses_are_not_hidden():
    factors = {("ring", 2**20): 0.5, ("ring", 2**22): 2.0, ("tree", 2**20): 0.8, ("tree", 2**22): 0.8}
    finding = contest(_ratios(factors, noise=0.001), "name", "torch", choose=lambda name: f"Take {name}")
    assert finding.headline == "Yes: tree takes 20 % less time than torch."
    assert finding.advice == "Take tree."
    assert {effect.subject for effect in finding.effects} == {"ring", "tree"}
    alone = contest(_ratios({key: f for key, f in factors.items() if key[0] == "ring"}, noise=0.001), "name", "torch")
    assert alone.verdict == "it depends"


def test_advice_for_a_winner_counts_the_winners_settings_alone():
    """The other alternative gains nothing anywhere, and has as many settings."""
    factors = {("ring", 4**n): factor for n, factor in enumerate((0.5, 1.0, 0.4, 1.0))}
    ratios = _ratios(factors | {("tree", size): 1.0 for _, size in factors}, noise=0.001)
    finding = contest(ratios, "name", "torch", axis=("n_bytes",), choose=lambda name: f"Take {name}")
    assert finding.advice == "Take ring: it helps in 2 of 4 settings (most at 16 B)."


@pytest.mark.parametrize(
    ("axis", "place"),
    [(("workload", "world_size"), "for nano"), (("world_size",), "with 4 ranks"), (("device",), None), ((), None)],
)
def test_the_best_place_is_that_of_the_smallest_ratio(axis, place):
    table = pd.DataFrame(
        {
            "workload": ["nano", "mini", "nano", "mini"],
            "world_size": [2, 2, 4, 4],
            "device": "cpu",
            "ratio": [0.9, 0.8, 0.5, 1.2],
        }
    )
    assert place_of_best(table, table[table["ratio"] < 1], axis) == place


@pytest.mark.parametrize(
    ("gains", "place"),
    [
        ([True, False, True, True], "at 4 MiB"),  # of the largest size only, nothing is said of larger ones
        ([False, False, True, True, True, True], "from 4 MiB on"),
        ([True, True, False, True], "at 1 MiB"),
        ([True, True, True, True, False, False], "up to 4 MiB"),
    ],
)
def test_where_a_gain_reaches_is_no_further_than_was_measured(gains, place):
    table = pd.DataFrame({"n_bytes": [2**20 * 4 ** (at // 2) for at in range(len(gains))]})
    reach = reach_of(table, table[gains], ("n_bytes",))
    assert reach is not None
    assert reach[0] == place


def test_a_gain_that_is_not_everywhere_is_told_by_name_where_it_is():
    table = pd.DataFrame({"way": ["ring", "ring", "tree", "tree"], "n_bytes": [1, 2, 1, 2]})
    place, rows = reach_of(table, table[[True, True, False, True]], ("way",))
    assert (place, list(rows.index)) == ("for ring", [0, 1])
    assert reach_of(table, table[[True, False, False, True]], ("way",)) is None


def test_tables_below_one_another_are_told_apart():
    mixed = {("ring", 2**20): 0.7, ("ring", 2**22): 1.5}
    pieces = [_ratios(factors).assign(way=way) for way, factors in (("a", mixed), ("b", _sizes(0.5, 0.5)))]
    assert list(pieces[0].index) == list(pieces[1].index)
    finding = compared(pd.concat(pieces), "the ring", "torch", axis=("way", "n_bytes"))
    assert finding.headline == "It depends: for b the ring is 2 times faster than torch, elsewhere not always."
    assert len(finding.effects) == 4


def test_a_contest_that_nobody_wins():
    slower = {("ring", 1): 2.0, ("tree", 1): 1.0}
    finding = contest(_ratios(slower, noise=0.001), "name", "torch", keep="Keep torch")
    assert finding.verdict == "no"
    assert "at worst ring takes 2 times as long as torch" in finding.headline
    assert finding.advice == "Keep torch."
    alike = contest(_ratios({("ring", 1): 1.0, ("tree", 1): 1.0}), "name", "torch")
    assert alike.verdict == "no clear difference"


def test_a_question_of_its_own_is_not_answered_by_differences_of_others():
    """A ring equal to torch, among algorithms that are all slower: what is said of the ring stays right."""
    claims, tries = 0, 100
    others = {(name, n): 1.5 for name in "abc" for n in range(8)}
    for seed in range(tries):
        ratios = _ratios({("ring", n): 1.0 for n in range(8)} | others, noise=0.1, seed=seed)
        claims += compared(select(ratios, name="ring"), "the ring", "torch").verdict != "no clear difference"
    assert claims / tries <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / tries)


def test_without_rows_there_is_no_finding():
    empty = TIMES.over(pd.DataFrame(), "torch")
    assert compared(empty, "a", "b") is None
    assert contest(empty, "name", "torch") is None
    for finding in (compared(empty, "a", "b", caveat="WRONG"), contest(empty, "name", "torch", caveat="WRONG")):
        assert (finding.verdict, finding.caveat) == ("not measured", "WRONG")
    assert claim("A is faster", empty, "faster") is None
    assert published([None]) is None


def test_a_claim_holds_is_contradicted_or_open():
    def outcome(*trends):
        return [told.outcome for told in published(trends).claims]

    alone = [outcome(claim("", _ratios(_sizes(f, f)), "faster"))[0] for f in (0.5, 2.0, 1.0)]
    assert alone == ["holds here", "is contradicted here", "is not shown here"]
    assert outcome(claim("", _ratios(_sizes(0.5, 1.0)), "faster")) == ["is not shown here"]
    assert exact("", [True, True], [False, False]).outcome == "holds here"


@pytest.mark.parametrize("agrees", [0.5, 1.0])
def test_a_claim_that_one_setting_contradicts_and_another_does_not_is_contradicted_in_some(agrees):
    mixed = published([claim("", _ratios(_sizes(agrees, 2.0)), "faster")])
    assert (mixed.verdict, mixed.claims[0].outcome) == ("it depends", "is contradicted in some settings")
    assert exact("", [True, False], [False, True]).outcome == "is contradicted in some settings"


@pytest.mark.parametrize(
    ("low", "high", "outcome"),
    [
        (0.9, 1.1, "holds here"),
        (0.9, 1.4, "is not shown here"),
        (1.5, 2.0, "is contradicted here"),
        (1, 1, "holds here"),
    ],
)
def test_a_range_is_kept_by_whole_intervals_and_left_by_significant_ratios(low, high, outcome):
    table = pd.DataFrame({"ratio": [(low * high) ** 0.5], "low": [low], "high": [high]})
    trend = lies_within("", table, 0.8, 1.25)
    assert trend.where_equal == "holds here"
    assert published([trend]).claims[0].outcome == outcome
    unknown = table.assign(low=np.nan, high=np.nan)
    assert published([lies_within("", unknown, 0.8, 1.25)]).claims[0].outcome == "is not shown here"


def test_published_claims_are_judged_together():
    """A p-value that alone says something says nothing beside many that do not."""
    row = pd.DataFrame({"ratio": [0.5], "low": [0.3], "high": [0.9], "p": [0.02]})
    others = [claim("", row.assign(ratio=1.0, p=0.9), "faster")] * 9
    assert published([claim("", row, "faster")]).claims[0].outcome == "holds here"
    assert published([claim("", row, "faster"), *others]).claims[0].outcome == "is not shown here"


def test_the_verdict_on_published_claims():
    hold, against, noise = (claim("", _ratios(_sizes(f)), "faster") for f in (0.5, 2.0, 1.0))
    verdicts = [published(found).verdict for found in ([hold], [against], [noise], [hold, against], [hold, noise])]
    assert verdicts == ["yes", "no", "undecided", "it depends", "it depends"]
    named = published([claim(text, _ratios(_sizes(f)), "faster") for text, f in (("A", 0.5), ("B", 2.0), ("C", 0.5))])
    assert named.where == "holds here: A; C · contradicted here: B"


@pytest.mark.parametrize(
    ("ratios", "verdict"), [([1.1, 0.9], "yes"), ([1.1, 1.2, 5.0], "it depends"), ([3.0, 4.0], "no"), ([0.2], "no")]
)
def test_a_prediction_is_right_near_it_or_wrong(ratios, verdict):
    assert agreement(pd.DataFrame({"measured_over_predicted": ratios}), "times", "the model").verdict == verdict


def test_a_prediction_of_counts_has_to_be_nearer():
    def verdict(*ratios):
        return agreement(pd.DataFrame({"measured_over_predicted": ratios}), "peaks", "those counted", close=1.05)

    assert verdict(1.0, 1.0).headline == "Yes: all peaks are exactly those counted."
    assert verdict(1.0, 1.001).headline == "Yes: all peaks are within 1 % of those counted."
    assert [verdict(1.0, 1.2).verdict, verdict(1.2, 1.2).verdict] == ["it depends", "no"]
    assert verdict(1.02).headline == "Yes: all peaks are within 2 % of those counted."
    assert verdict(3.0, 3.0).headline == "No: peaks are 3 times those counted."
    assert (
        verdict(0.5, 0.25, 0.5).headline == "No: peaks are typically 50 % less than those counted, at worst 75 % less."
    )
    assert verdict(-0.3, -0.2, 0.0).headline.endswith("at worst 130 % less.")
    assert verdict(1.0, 1.0, 0.5).headline.endswith("the worst is 50 % less than that.")
    assert verdict(3.0, 4.0, 5.0).headline == "No: peaks are typically 4 times those counted, at worst 5 times."


def test_to_which_side_a_prediction_is_off_is_told_where_all_are():
    def where(*ratios):
        table = pd.DataFrame({"world_size": [2, 4, 4][: len(ratios)], "measured_over_predicted": ratios})
        return agreement(table, "times", "the model", settings=("world_size", "batch"), setting="float32").where

    assert where(1.1, 1.2) == "2 compared, all more than the model: 2 and 4 ranks · float32"
    assert where(0.9, 0.8).startswith("2 compared, all less than the model")
    assert where(0.9, 1.2, 1.1) == "3 compared: 2 and 4 ranks · float32"
    assert where(1.1) == "the one setting measured: 2 ranks · float32"


def test_a_gain_is_told_with_its_cost():
    gain = compared(_ratios(_sizes(0.5, 0.5)), "a", "b", quantity=MEMORY)
    cost = compared(_ratios(_sizes(2.0, 2.0)), "a", "b")
    both = at_the_cost_of(gain, cost)
    assert (both.verdict, both.headline, both.also) == ("yes", gain.headline, "A takes 2 times as long as b.")
    assert {effect.quantity for effect in both.effects} == {"memory", "time"}
    assert at_the_cost_of(None, cost) is None
    assert at_the_cost_of(gain, None) == gain


def test_a_prediction_of_nothing_says_nothing():
    assert agreement(pd.DataFrame({"measured_over_predicted": [float("nan")]}), "times", "the model") is None


def test_rows_that_a_frame_lacks_are_an_empty_table_with_their_columns():
    assert list(select(pd.DataFrame(), ["seconds"], sweep="sizes").columns) == ["seconds", "sweep"]
    frame = pd.DataFrame({"sweep": ["a", "b", "c"], "n": [1, 2, 3]})
    assert select(frame, sweep=["a", "b"], n=2)["sweep"].tolist() == ["b"]
    assert TIMES.medians(frame).empty


def test_the_p_that_is_shown_is_the_one_the_verdict_rests_on():
    ratios = _ratios(_sizes(0.9, 1.0, 1.0, 1.0), noise=0.1)
    shown = compared(ratios, "the ring", "torch").table
    assert (shown["p"] >= ratios["p"]).all()
    assert (shown["p"] > ratios["p"]).any()
    assert ((shown["p"] <= 0.025) >= (shown["verdict"] != "no difference shown")).all()


def test_counts_are_compared_exactly():
    table = pd.DataFrame({"n": [1, 1, 2], "name": ["torch", "own", "own"], "bytes": [100, 98, 7]})
    ratios = exactly_over(table, ["n"], "name", "bytes", "torch")
    assert ratios[["name", "ratio", "low", "high", "p"]].to_numpy().tolist() == [["own", 0.98, 0.98, 0.98, 0.0]]
    assert contest(ratios, "name", "torch", quantity=MEMORY).verdict == "no clear difference"


def test_a_median_of_two_turns_reaches_over_the_intervals_of_both():
    one = _frame(_sizes(0.5), noise=0.01)
    both = pd.concat([one.assign(session=1), one.assign(session=2, seconds=1.3 * one["seconds"])], ignore_index=True)
    alone, found = TIMES.medians(one), TIMES.medians(both)
    assert (found["low"] <= alone["low"]).all()
    assert (found["high"] >= 1.3 * alone["high"]).all()


def test_the_slowest_rank_counts():
    frame = _frame(_sizes(0.5), noise=0)
    both = pd.concat([frame, frame.assign(rank=1, seconds=2 * frame["seconds"])])
    assert TIMES.medians(both)["seconds"].tolist() == [1.0, 2.0]


def test_of_two_that_are_alike_the_first_in_the_table_wins():
    both = {("ring", 2**20): 0.5, ("ring_two", 2**20): 0.498}
    assert contest(_ratios(both, noise=0.001), "name", "torch").headline.startswith("Yes: ring is 2 times")


@pytest.mark.parametrize(("quantity", "marks"), [(TIME, ["faster", "slower"]), (MEMORY, ["less", "more"])])
def test_rows_are_marked_in_the_words_of_what_is_compared(quantity, marks):
    ratios = _ratios(_sizes(0.5, 2.0))
    for finding in (compared(ratios, "a", "b", quantity=quantity), contest(ratios, "name", "b", quantity=quantity)):
        assert list(finding.table["verdict"]) == marks
        assert [effect.verdict for effect in finding.effects] == ["faster", "slower"]


@pytest.mark.parametrize(
    ("headline", "sentence"),
    [
        ("Yes: the ring takes 20 % less time.", "The ring takes 20 % less time."),
        ("No: the ring takes 50 % longer.", "The ring takes 50 % longer."),
        ("Yes, in most settings: the ring takes less.", "In most settings: the ring takes less."),
        ("It depends: the ring takes longer here.", "The ring takes longer here."),
        ("Yes from 64 KiB on: the ring takes less.", "Yes from 64 KiB on: the ring takes less."),
    ],
)
def test_a_headline_without_its_verdict_is_a_sentence(headline, sentence):
    assert without_verdict(headline) == sentence
