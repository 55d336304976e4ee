"""Answers of the precision lab on made-up frames: textbook, contrary, noisy, and with rows missing."""

from functools import partial

import numpy as np
import pandas as pd
import pytest

from labkit.studies.precision import analysis
from labkit.studies.precision.numerics import NORM_STEPS
from labkit.studies.precision.study import STUDY
from labkit.studies.precision.worker import BOTH, FORWARD
from tests.studies.answering import answers_of

_answers = partial(answers_of, STUDY)

SUMS = {"fp32": 10.000134, "fp16": 9.953125, "fp16_into_fp32": 10.002136, "bf16": 4.0, "bf16_into_fp32": 10.009766}
STORED = {"fp32": 10.0, "fp16": 10.002136, "fp16_into_fp32": 10.002136, "bf16": 10.009766, "bf16_into_fp32": 10.009766}


def _sums(sums=None):
    return [
        {"part": "accumulation", "device": "cpu", "variant": name, "additions": count}
        | {
            "sum": total if count == 1000 else min(total, count * 0.01),
            "exact_sum": count * 0.01,
            "stored_sum": STORED[name] * count / 1000,
        }
        for name, total in (SUMS | (sums or {})).items()
        for count in (100, 500, 1000)
    ]


def _dtypes(norm="float32", device="cuda"):
    return [
        {"part": "dtypes", "device": device, "model": model, "precision": "bfloat16"}
        | {"quantity": quantity, "observed": observed}
        for model in ("toy model", "Transformer")
        for quantity, observed in {"parameters": "float32", "norm": norm, "logits": "bfloat16"}.items()
    ]


def _norm(errors=None, overflowing="squares"):
    """Steps for small inputs, which lose nothing, and for large ones, of which one step overflows."""
    rows = []
    for precision in ("float16", "bfloat16"):
        for arithmetic in (precision, "float32"):
            for offset, scale in ((0.0, 1.0), (0.0, 300.0), (1000.0, 1.0)):
                for step in NORM_STEPS:
                    error = (errors or {}).get((arithmetic, offset, step), 1e-3)
                    over = step == overflowing and scale == 300 and arithmetic == "float16"
                    rows.append(
                        {"part": "norm", "device": "cpu", "precision": precision, "arithmetic": arithmetic}
                        | {"offset": offset, "scale": scale, "step": step, "underflowed": 0.0}
                        | {"error": None if over else error, "own_error": 0.0 if step == "centered" else error}
                        | {"overflowed": 0.4 if over else 0.0}
                    )
    return rows


def _textbook(model, mode, precision):
    full = {"nano": 0.01, "mini": 0.1, "small": 1.0}[model] * (3 if mode == BOTH else 1)
    gain = {"nano": 1.1, "mini": 0.6, "small": 0.3}[model]
    return full * (gain if precision == "bfloat16" else 1)


def _speed(seconds=_textbook, *, noise=0.01, repeats=12, gate="ok", seed=0):
    generator = np.random.default_rng(seed)
    rows = []
    for model in ("nano", "mini", "small"):
        for mode in (FORWARD, BOTH):
            for precision in ("float32", "bfloat16"):
                base = {"part": "speed", "device": "cpu", "model": model, "mode": mode, "alternative": precision}
                base |= {"gate": gate if precision == "bfloat16" else "ok", "error": 1e-2, "loss_error": 1e-5}
                for repeat in range(repeats):
                    time = seconds(model, mode, precision) * np.exp(generator.normal(0, noise))
                    rows.append(base | {"repeat": repeat, "seconds": time})
    return rows


def _rates(ratio=4.0):
    return [
        {"part": "rates", "device": "cpu", "alternative": name, "repeat": repeat, "flops_per_s": rate}
        for name, rate in (("float32", 1e12), ("bfloat16", ratio * 1e12))
        for repeat in range(6)
    ]


def _frame(*parts):
    return pd.DataFrame([row for rows in parts or (_sums(), _dtypes(), _norm(), _rates(), _speed()) for row in rows])


def test_every_question_is_answered_from_a_full_frame():
    assert all(answer.verdict != "not measured" for answer in _answers(_frame()).values())


@pytest.mark.parametrize("frame", [pd.DataFrame(), _frame().iloc[:0]], ids=["no columns", "no rows"])
def test_without_rows_every_question_is_not_measured_and_says_why(frame):
    answers = _answers(frame, "needs 51 GiB, 22 GiB available")
    assert {answer.verdict for answer in answers.values()} == {"not measured"}
    assert all("needs 51 GiB" in answer.text for answer in answers.values())


@pytest.mark.parametrize("part", ["accumulation", "dtypes", "norm", "speed"])
def test_a_part_without_rows_leaves_the_other_answers(part):
    frame = _frame()
    missing = [a.question.id for a in _answers(frame[frame["part"] != part]).values() if a.verdict == "not measured"]
    names = {"accumulation": "accumulation", "dtypes": "dtypes", "norm": "layer_norm", "speed": "autocast_speed"}
    assert missing == [names[part]]


def test_the_sources_of_an_error_are_told_apart():
    text = _answers(_frame())["accumulation"].text
    assert "1000 additions should come to 10; they come to 10.000134 in fp32, 9.953125 in fp16" in text
    assert "In fp16, +0.00214 of the error is the term" in text
    assert "-0.049 is the rounding of the sum; in an fp32 sum it is 0." in text
    assert "The sum in bf16 stands still at 4, from at most 500 additions on." in text
    assert "fp16 stands still" not in text


def test_sums_that_are_not_the_published_ones_contradict_them():
    assert "contradicted here" not in _answers(_frame(_sums()))["published_trends"].text
    other = _answers(_frame(_sums({"fp16": 9.9})))["published_trends"]
    assert "2 of 3 agree in every printed digit): contradicted here" in other.text
    assert other.verdict == "no"


def test_dtypes_are_told_by_model_and_devices_that_differ_are_named():
    text = _answers(_frame(_dtypes(), _dtypes("bfloat16", "cpu")))["dtypes"].text
    assert text.startswith("Parameters stay in float32 in every model.")
    assert "Under autocast to bfloat16 on cuda: float32 for parameters and norm" in text
    assert "on cpu: float32 for parameters, bfloat16 for norm and logits" in text
    assert "Devices differ for toy model under bfloat16: norm." in text


def test_the_step_that_overflows_is_named_whichever_it_is():
    answer = _answers(_frame(_norm()))["layer_norm"]
    assert "float16: the squares overflow for inputs 0 ± 300 (40 % of values)" in answer.text
    assert "bfloat16: no step overflows, and none underflows" in answer.text
    assert "the mean overflows" in _answers(_frame(_norm(overflowing="mean")))["layer_norm"].text
    assert "float16: no step overflows" in _answers(_frame(_norm(overflowing=None)))["layer_norm"].text


def test_the_step_that_loses_digits_is_the_one_of_the_frame():
    errors = {(dtype, 1000.0, step): 0.1 for dtype in ("float16", "bfloat16") for step in NORM_STEPS[1:]}
    answer = _answers(_frame(_norm(errors)))["layer_norm"]
    assert "most digits go in the step centered for inputs 1000 ± 1" in answer.text
    assert "the step itself is exact" in answer.text
    assert "instead of 1.0 correct digits of the output in bfloat16" in answer.recommendation
    late = {("bfloat16", 1000.0, "rsqrt"): 0.1, ("bfloat16", 1000.0, "output"): 0.1}
    assert "in the step rsqrt for inputs 1000 ± 1" in _answers(_frame(_norm(late)))["layer_norm"].text


def test_no_norm_in_float32_is_recommended_where_it_gains_nothing():
    assert _answers(_frame(_norm(overflowing=None)))["layer_norm"].recommendation is None


def test_a_textbook_machine_gains_with_size():
    answer = _answers(_frame())["autocast_speed"]
    assert answer.verdict == "mixed"
    told = "The ratio is shown to be smaller at the largest size, small, than at the smallest, nano"
    assert f"{told}, and time is saved there." in answer.text
    assert "autocast to bfloat16 for mini and small on cpu" in answer.recommendation
    assert "stay with float32 rather than bfloat16 for nano" in answer.recommendation
    assert answer.is_shown
    trends = _answers(_frame())["published_trends"].text
    assert "2 of 2 steps from a size to the next shown): holds here" in trends


def test_a_machine_on_which_bf16_is_slow_is_not_talked_round():
    slow = _frame(_speed(lambda model, mode, p: 3.0 if p == "bfloat16" else 1.0))
    answer = _answers(slow)["autocast_speed"]
    assert answer.verdict == "no"
    assert answer.recommendation.startswith("stay with float32 rather than bfloat16 for nano, mini and small")
    assert "No trend with size is shown." in answer.text


def test_a_trend_in_the_other_direction_contradicts_the_published_one():
    gains = {"nano": 0.3, "mini": 0.6, "small": 0.9}
    frame = _frame(_speed(lambda model, mode, p: gains[model] if p == "bfloat16" else 1.0))
    answers = _answers(frame)
    told = "The ratio is shown to be larger at the largest size, small, than at the smallest, nano."
    assert told in answers["autocast_speed"].text
    assert "The larger the model" in answers["published_trends"].text
    assert "0 of 2 steps from a size to the next shown): contradicted here" in answers["published_trends"].text


def test_a_loss_that_shrinks_with_size_is_no_gain():
    losses = {"nano": 4.0, "mini": 3.0, "small": 2.0}
    answers = _answers(_frame(_speed(lambda model, mode, p: losses[model] if p == "bfloat16" else 1.0)))
    speed, trends = answers["autocast_speed"], answers["published_trends"].text
    assert speed.verdict == "no"
    assert (
        "smaller at the largest size, small, than at the smallest, nano, and time is lost there all the" in speed.text
    )
    assert "gain" not in speed.text
    assert "0 of 2 steps from a size to the next shown): not shown here" in trends


def test_equal_times_but_for_noise_show_no_difference():
    answers = _answers(_frame(_speed(lambda *_: 1.0, noise=0.3, seed=1)))
    assert answers["autocast_speed"].verdict == "no difference shown"
    assert "stay with float32" in answers["autocast_speed"].recommendation
    assert not answers["autocast_speed"].is_shown
    assert "[" in answers["autocast_speed"].evidence
    assert answers["published_trends"].verdict == "not shown"


def test_few_repeats_claim_nothing():
    answer = _answers(_frame(_speed(repeats=3)))["autocast_speed"]
    assert answer.verdict == "no difference shown"
    assert "too few repeats" in answer.text


def test_a_single_size_shows_no_trend():
    frame = _frame()
    answer = _answers(frame[frame["model"].isin(["mini"]) | (frame["part"] != "speed")])["autocast_speed"]
    assert "One size shows no trend." in answer.text


def test_wrong_results_are_shouted():
    rows = [row for row in _speed(gate="wrong: loss off by 1") if row["gate"] == "ok"]
    wrong = {"part": "speed", "device": "cpu", "model": "nano", "alternative": "bfloat16", "error": 9.0}
    frame = _frame(rows, [wrong | {"loss_error": 1.0, "gate": "wrong: loss off by 1.0e+00"}])
    answer = _answers(frame)["autocast_speed"]
    assert answer.verdict == "not measured"
    assert "WRONG RESULTS, and therefore no times, from bfloat16" in answer.text


def test_predictions_are_ratios_of_rates():
    table = analysis.predictions(_frame(_rates(4.0), _speed(noise=0)))
    assert set(table["predicted_ratio"]) == {0.25}
    assert table.set_index(["model", "mode"])["ratio"]["mini", BOTH] == pytest.approx(0.6)
    assert analysis.predictions(_frame(_speed())).empty


def test_correct_digits():
    assert analysis.correct_digits(1e-2, "float16") == pytest.approx(2)
    assert analysis.correct_digits(0.0, "bfloat16") == pytest.approx(2.408, abs=1e-3)
    assert analysis.correct_digits(None, "float16") == analysis.correct_digits(5.0, "float16") == 0


def test_the_question_ids_are_the_published_ones():
    assert [question.id for question in STUDY.questions] == [
        "accumulation",
        "dtypes",
        "layer_norm",
        "autocast_speed",
        "published_trends",
    ]
