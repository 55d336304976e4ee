"""Answers of the SyncBatchNorm lab on made-up frames: textbook, contrary, noisy, and with rows missing."""

from functools import partial

import numpy as np
import pandas as pd
import pytest

from labkit.studies.sync_batchnorm import analysis, answers, predictions
from labkit.studies.sync_batchnorm.alternatives import (
    ALL_REDUCES,
    ALONE,
    ALTERNATIVES,
    BARE,
    COLLECTIVES,
    LOCAL,
    OWN,
    TORCH,
    TWO_COLLECTIVES,
    WHOLE,
)
from labkit.studies.sync_batchnorm.study import STUDY
from labkit.studies.sync_batchnorm.worker import COPY, LAYER, PHASES, PROBE
from tests.studies.answering import answers_of

_answers = partial(answers_of, STUDY)

SIZES = [(32, 128), (32, 1024), (64, 128), (64, 1024)]
# Seconds of an operator, of a byte it moves, of a collective.
OPERATOR, BYTE, ALPHA = 2e-6, 1e-11, 2e-4
OPERATORS = {OWN: 30, TWO_COLLECTIVES: 30, ALONE: 30, LOCAL: 2, WHOLE: 2, TORCH: 6}
MESSAGES = {OWN: 1, TORCH: 1, COLLECTIVES: 1, ALL_REDUCES: 1}


def _textbook(name, phase, ranks, batch, features):
    """A collective costs a message for each two ranks, operators and bytes what they should."""
    messages = MESSAGES.get(name, 0)
    if name == TWO_COLLECTIVES:
        messages = 2 if phase == "forward" else 1
    arithmetic = OPERATORS.get(name, 0) * OPERATOR + _moved(name, ranks, batch, features) * BYTE
    return messages * ALPHA * ranks / 2 + arithmetic


def _moved(name, ranks, batch, features):
    if name in BARE:
        return 0
    return 16 * features * (batch if name == WHOLE else batch / ranks)


def _frame(seconds=_textbook, *, noise=0.002, repeats=8, sizes=SIZES, worlds=(2, 4), names=ALTERNATIVES, peak=None):
    """Rows as a run would have them: two ranks report, the second is the slower one."""
    generator = np.random.default_rng(0)
    rows = []

    def add(row, value):
        for repeat in range(repeats):
            slowest = value * np.exp(generator.normal(0, noise))
            rows.extend(
                row | {"rank": rank, "repeat": repeat, "seconds": slowest * (0.9 + rank / 10)} for rank in (0, 1)
            )

    for ranks in worlds:
        machine = {"world_size": ranks, "backend": "gloo", "device": "cpu", "gate": "ok"}
        for n_bytes in (1024, 65536):
            about = machine | {"sweep": PROBE, "alternative": COPY, "moved_bytes": 2 * n_bytes}
            add(about, OPERATOR + 2 * n_bytes * BYTE)
            for phase in PHASES[:2]:
                about = machine | {"sweep": PROBE, "alternative": COLLECTIVES, "phase": phase, "sent_bytes": n_bytes}
                add(about, ALPHA * ranks / 2)
        for batch, features in sizes:
            here = machine | {"sweep": LAYER, "batch": batch, "features": features}
            for name in names:
                times = {phase: seconds(name, phase, ranks, batch, features) for phase in PHASES[:2]}
                for phase, value in (times | {"both": sum(times.values())}).items():
                    ways = 2 if phase == "both" else 1
                    row = here | {"alternative": name, "phase": phase, "error": 1e-7}
                    row |= {"operators": ways * OPERATORS.get(name, np.nan)}
                    row |= {"moved_bytes": ways * _moved(name, ranks, batch, features)}
                    sent = {"forward": 8 * (2 * features + 1), "backward": 8 * features}
                    if name in BARE:
                        row |= {"sent_bytes": sent.get(phase, sum(sent.values()))}
                    add(row, value)
                if name not in BARE:
                    n_bytes = 4 * features * batch // (1 if name == WHOLE else ranks)
                    saved = {"saved_bytes": n_bytes + 16 * features, "beside_input_bytes": 16 * features}
                    peaks = {"peak_bytes": peak(name, n_bytes) if peak else 4 * n_bytes}
                    rows.append(here | {"alternative": name, "rank": 0, "repeat": 0} | saved | peaks)
    return pd.DataFrame(rows)


def test_every_question_is_answered_from_a_full_frame():
    assert all(answer.verdict != "not measured" for answer in _answers(_frame()).values())


@pytest.mark.parametrize("frame", [pd.DataFrame(), _frame().iloc[:0]], ids=["no columns", "no rows"])
def test_without_rows_every_question_is_not_measured_and_says_why(frame):
    answers = _answers(frame, "needs 51 GiB, 22 GiB available")
    assert {answer.verdict for answer in answers.values()} == {"not measured"}
    assert all("needs 51 GiB" in answer.text for answer in answers.values())


def test_the_parts_add_up_to_the_price():
    table = analysis.price_table(_frame(noise=0)).set_index(["world_size", "batch", "features"]).loc[4, 64, 1024]
    assert table["collectives_s"] == pytest.approx(2 * 2 * ALPHA)
    assert table["arithmetic_s"] == pytest.approx(2 * 28 * OPERATOR)
    assert table["waiting and waking_s"] == pytest.approx(0, abs=1e-12)
    assert table["price_s"] == pytest.approx(2 * 2 * ALPHA + 2 * 28 * OPERATOR)


def test_a_textbook_machine_pays_for_messages():
    answers = _answers(_frame())
    assert "With 4 ranks instead of 2 it adds 1.7" in answers["price"].text
    assert "(shown to be more in 4 of 4)" in answers["price"].text
    assert "worth it only where the rows of one rank are too few" in answers["price"].recommendation
    assert answers["split"].text.count("The largest part is collectives in every setting.") == 2
    assert answers["one_collective"].verdict == "yes"
    assert answers["prediction"].verdict == "yes"
    assert "30" not in answers["prediction"].text.split("operators")[0]
    assert "runs 60 operators beside its collectives, a plain one 4" in answers["prediction"].text


def test_numbers_in_the_text_come_from_the_frame():
    text = _answers(_frame(noise=0, sizes=[(64, 1024)], worlds=(2,)))["price"].text
    assert "forward and backward of a layer take 530 µs" in text
    assert "Synchronizing adds 512 µs" in text
    assert "instead of" not in text  # one size alone shows no growth


def test_the_bound_is_plain_batchnorm_and_twice_two_all_reduces():
    def seconds(name, *_):
        return {OWN: 5e-4, LOCAL: 1e-4, ALL_REDUCES: 1e-4}.get(name, 1e-4)

    bounds = analysis.bounds(_frame(seconds, noise=0))
    assert bounds["ratio"].tolist() == pytest.approx([5 / 3] * 8)
    assert (
        "shown not to exceed it in 0 of 8 settings, and to exceed it in 8." in _answers(_frame(seconds))["split"].text
    )
    assert "shown not to exceed it in 8 of 8 settings, and to exceed it in 0." in _answers(_frame())["split"].text


def test_where_arithmetic_is_the_larger_part_it_is_said():
    def slow_arithmetic(name, *setting):
        return _textbook(name, *setting) + (1e-3 if name in (OWN, TWO_COLLECTIVES, ALONE) else 0)

    assert "The largest part is arithmetic in every setting." in _answers(_frame(slow_arithmetic))["split"].text


def test_two_collectives_that_are_as_fast_as_one_or_faster_are_not_talked_round():
    def alike(name, *setting):
        return _textbook(OWN if name == TWO_COLLECTIVES else name, *setting)

    def faster(name, *setting):
        return alike(name, *setting) * (0.5 if name == TWO_COLLECTIVES else 1)

    assert _answers(_frame(alike, noise=0.02))["one_collective"].verdict == "no difference shown"
    assert _answers(_frame(faster))["one_collective"].verdict == "no"


def test_a_part_that_is_largest_everywhere_is_named_though_not_every_interval_shows_it():
    def near_in_one(name, phase, ranks, batch, features):
        close = (batch, features) == SIZES[0] and ranks == 2 and name in (OWN, TWO_COLLECTIVES, ALONE)
        return _textbook(name, phase, ranks, batch, features) + (1.4e-4 if close else 0)

    text = _answers(_frame(near_in_one, noise=0.05))["split"].text
    assert "The largest median is that of collectives everywhere; intervals show it in 3 of 4." in text


@pytest.mark.parametrize(("high", "in_every"), [(3.0, True), (5.0, False), (float("nan"), False)])
def test_the_largest_part_is_shown_only_above_every_other_interval(high, in_every):
    """The third median has an interval that may reach higher than that of the second."""
    setting = {"world_size": 2, "backend": "gloo", "device": "cpu", "batch": 32, "features": 128}
    intervals = {
        analysis.PRICE: (7.0, 6.0, 8.0),
        "collectives": (4.5, 4.0, 5.0),
        "arithmetic": (2.0, 1.9, 2.1),
        "waiting and waking": (1.0, 0.5, high),
    }
    rows = [
        setting | {"part": part, "seconds": m, "low": low, "high": top} for part, (m, low, top) in intervals.items()
    ]
    told = answers._largest_part(pd.DataFrame(rows))
    assert (told == ["The largest part is collectives in every setting."]) == in_every
    assert in_every or told == ["No one part is shown to be the largest everywhere."]


def test_noise_claims_nothing():
    answers = _answers(_frame(lambda *_: 1e-3, noise=0.5))
    assert answers["one_collective"].verdict == "no difference shown"
    assert "its price is not shown in every setting" in answers["price"].recommendation
    assert "No one part is shown to be the largest everywhere." in answers["split"].text
    assert "shown to be more" not in answers["price"].text


def test_too_few_repeats_claim_nothing():
    answers = _answers(_frame(repeats=3, worlds=(2,)))
    assert answers["one_collective"].verdict == "no difference shown"
    assert answers["against_torch"].verdict == "no difference shown"
    assert "its price is not shown" in answers["price"].recommendation
    assert answers["published_trends"].text.count("time here): not shown here") == 3


@pytest.mark.parametrize(
    ("factor", "verdict", "advice"), [(2.0, "yes", "labkit's layer"), (0.5, "no", "torch's layer")]
)
def test_torch_is_compared_where_it_was_measured(factor, verdict, advice):
    def seconds(name, *setting):
        return _textbook(OWN, *setting) * factor if name == TORCH else _textbook(name, *setting)

    answer = _answers(_frame(seconds))["against_torch"]
    assert answer.verdict == verdict
    assert advice in answer.recommendation
    assert answer.is_shown
    assert "over torch's layer: " in answer.evidence


def test_what_torch_refuses_is_quoted():
    frame = _frame(names=[name for name in ALTERNATIVES if name != TORCH], worlds=(2,), sizes=SIZES[:1])
    refused = {"sweep": LAYER, "alternative": TORCH, "refused": "expected input tensor to be on GPU"}
    answer = _answers(pd.concat([frame, pd.DataFrame([refused])]))["against_torch"]
    assert answer.verdict == "not measured"
    assert "expected input tensor to be on GPU" in answer.text
    assert _answers(frame, "why not")["against_torch"].text.endswith("Reasons recorded: why not.")


def test_a_machine_that_costs_more_than_is_counted_contradicts_the_prediction():
    answer = _answers(_frame(lambda name, *setting: 5 * _textbook(name, *setting) + 1e-3))["prediction"]
    assert answer.verdict == "no"
    assert "within a factor of two in 0 of 8" in answer.text


def test_costs_are_those_of_single_collectives_and_copies():
    found = predictions.costs(_frame(noise=0))[4, "gloo", "cpu"]
    assert found.operators.alpha_s == pytest.approx(OPERATOR)
    assert found.operators.beta_s_per_byte == pytest.approx(BYTE)
    assert found.collectives["backward"].alpha_s == pytest.approx(2 * ALPHA)
    table = predictions.predictions(_frame(noise=0))
    assert table["measured_over_predicted"].tolist() == pytest.approx([1.0] * len(table), rel=1e-3)


@pytest.mark.parametrize("missing", [PROBE, LOCAL, TWO_COLLECTIVES, ALONE, WHOLE, COLLECTIVES, "memory", "forward"])
def test_with_rows_missing_every_question_still_has_an_answer(missing):
    frame = _frame(worlds=(2,), sizes=SIZES[:2])
    if missing == PROBE:
        frame = frame[frame["sweep"] != PROBE]
    elif missing == "memory":
        frame = frame[frame["saved_bytes"].isna()]
    else:
        frame = frame[(frame["alternative"] != missing) & (frame["phase"] != missing)]
    answers = _answers(frame)
    absent = {PROBE: "prediction", LOCAL: "price", TWO_COLLECTIVES: "one_collective", ALONE: "split"}
    absent |= {COLLECTIVES: "split", "memory": "memory", "forward": "one_collective"}
    if missing in absent:
        assert answers[absent[missing]].verdict == "not measured"
    assert set(answers) == {question.id for question in STUDY.questions}


def test_wrong_results_are_shouted():
    bad = {"sweep": LAYER, "alternative": OWN, "gate": "wrong: error 5.0e-01, at most 1.0e-04 expected", "error": 0.5}
    names = [name for name in ALTERNATIVES if name != OWN]
    answer = _answers(pd.concat([_frame(names=names), pd.DataFrame([bad])]))["price"]
    assert answer.verdict == "not measured"
    assert answer.text == "WRONG RESULTS, and therefore no times: labkit."


def test_the_published_trends_hold_in_the_published_numbers():
    """Fed to the lab as if measured, the self-made layer in labkit's place, they show what is claimed of them."""
    table = analysis.published().set_index(["alternative", "batch", "features"])

    def seconds(name, phase, ranks, batch, features):
        which = {OWN: "self-made", TORCH: TORCH}.get(name)
        return float(table.loc[(which, batch, features), "seconds"]) / 2 if which else 1e-4

    frame = _frame(seconds, noise=0.0005, worlds=(2,))
    for name, which in ((OWN, "self-made"), (TORCH, TORCH)):
        for batch, features in SIZES:
            here = (frame["alternative"] == name) & (frame["batch"] == batch) & (frame["features"] == features)
            frame.loc[here & frame["peak_bytes"].notna(), "peak_bytes"] = table.loc[
                (which, batch, features), "peak_bytes"
            ]
    answer = _answers(frame)["published_trends"]
    assert answer.text.count("holds here") == 5
    assert answer.verdict == "yes"


def test_a_machine_that_does_the_contrary_contradicts_the_published_trends():
    def contrary(name, phase, ranks, batch, features):
        return 1e-6 * batch * features * (2 if name == OWN else 1)

    text = _answers(_frame(contrary, peak=lambda name, n_bytes: n_bytes**2))["published_trends"].text
    assert text.count(": contradicted here") == 5


def test_trends_are_of_two_ranks():
    assert _answers(_frame(worlds=(4,)))["published_trends"].verdict == "not measured"


def test_a_setting_in_which_one_alternative_is_wrong_is_left_out_of_the_split():
    frame = _frame(worlds=(2,))
    wrong = (frame["alternative"] == ALONE) & (frame["batch"] == 64) & (frame["features"] == 1024)
    answers = _answers(frame[~wrong])
    assert "The largest part is collectives in every setting" in answers["split"].text
    nowhere_whole = _answers(frame[~((frame["alternative"] == ALONE) & (frame["batch"] == 64))])
    assert nowhere_whole["split"].verdict == "measured"


def test_a_price_that_is_not_shown_to_be_above_zero_has_no_ratio_and_no_share():
    def free(name, *_):
        return 1e-5 if name in (COLLECTIVES, ALL_REDUCES) else 1e-3

    frame = _frame(free, noise=0.02)
    growth = analysis.growth(frame)
    assert len(growth)
    assert growth["ratio"].isna().sum() > len(growth) / 2
    answers = _answers(frame)
    assert "no ratio, as what it adds is not shown to be above zero" in answers["price"].text
    assert "elsewhere what it adds is not shown to be above zero" in answers["split"].text
    assert "The largest part is" not in answers["split"].text
    assert " %)" not in _answers(_frame(free, repeats=3))["split"].text
    assert analysis.growth(_frame())["ratio"].notna().all()
