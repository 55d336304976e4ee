"""Answers of the end-to-end lab on made-up frames: textbook, contrary, noisy, and with rows missing."""

from functools import partial

import numpy as np
import pandas as pd
import pytest

from labkit.costs.transformer import backward_flops, forward_flops, n_parameters
from labkit.lab import figures
from labkit.nn.transformer import SIZES
from labkit.studies.end_to_end import analysis
from labkit.studies.end_to_end.study import STUDY
from tests.studies.answering import answers_of

_answers = partial(answers_of, STUDY)

RATE, BANDWIDTH = 1e11, 1e10
POINT = {"device": "cpu", "precision": "float32", "batch": 4, "context_length": 128, "gate": "ok", "trial": 0}


def _textbook(size, phase):
    """Exactly what FLOPs and bytes say."""
    forward, backward = (sum(f(SIZES[size], 4, 128).values()) / RATE for f in (forward_flops, backward_flops))
    return {
        "inference": forward,
        "forward": forward,
        "backward": backward,
        "optimizer": 28 * n_parameters(SIZES[size]) / BANDWIDTH,
    }[phase]


def _frame(
    seconds=_textbook,
    *,
    first=3.0,
    compiled=0.5,
    noise=0.001,
    sizes=("nano", "mini"),
    repeats=12,
    precision="float32",
    peak=None,
    sweeps=("rates", "phases", "warmup", "compile"),
):
    generator = np.random.default_rng(0)
    point = POINT | {"precision": precision, "peak_flops_per_s": peak}
    rows = []

    def add(sweep, count, value, column="seconds", **fields):
        for repeat in range(count):
            jitter = np.exp(generator.normal(0, noise))
            rows.append(point | fields | {"sweep": sweep, "repeat": repeat, column: value(repeat) * jitter})

    add("rates", 10, lambda _: RATE, "per_s", rate="matmul")
    add("rates", 10, lambda _: BANDWIDTH, "per_s", rate="copy")
    for size in sizes:
        for phase in ("inference", "forward", "backward", "optimizer"):
            add("phases", repeats, lambda _, s=size, p=phase: seconds(s, p), size=size, phase=phase)
        step = sum(seconds(size, phase) for phase in ("forward", "backward", "optimizer"))
        for trial in range(8):
            add("warmup", 15, lambda n, t=step: t * (first if n == 0 else 1), size=size, phase="step", trial=trial)
        for phase in ("inference", "step"):
            for name, factor in (("eager", 1), ("compiled", compiled)):
                extra = {"compile_s": 10.0, "error": 1e-6} if name == "compiled" else {}
                add(
                    "compile",
                    repeats,
                    lambda _, f=factor, t=step: t * f,
                    size=size,
                    phase=phase,
                    implementation=name,
                    **extra,
                )
    frame = pd.DataFrame(rows)
    return frame[frame["sweep"].isin(sweeps)]


def test_a_textbook_machine_is_answered_in_full():
    answers = _answers(_frame())
    assert {key: answer.verdict for key, answer in answers.items()} == {
        "step_times": "measured",
        "warmup": "yes",
        "predicted": "yes",
        "compile": "yes",
        "published_trends": "yes",
    }
    assert "throw away the first step of" in answers["warmup"].recommendation
    assert answers["warmup"].is_shown
    assert "nano, mean after 0 warm-up steps over steady: 1.2" in answers["warmup"].evidence
    assert "takes 0.50 of eager's time (nano and mini)" in answers["compile"].recommendation


@pytest.mark.parametrize("frame", [pd.DataFrame(), _frame().iloc[:0]], ids=["no columns", "no rows"])
def test_without_rows_every_question_is_not_measured_and_says_why(frame):
    answers = _answers(frame, "parameters need 51 GiB, 22 GiB available")
    assert {answer.verdict for answer in answers.values()} == {"not measured"}
    assert all("51 GiB" in answer.text for answer in answers.values())


@pytest.mark.parametrize("missing", ["rates", "phases", "warmup", "compile"])
def test_a_missing_sweep_leaves_the_other_answers(missing):
    sweeps = [sweep for sweep in ("rates", "phases", "warmup", "compile") if sweep != missing]
    verdicts = {key: answer.verdict for key, answer in _answers(_frame(sweeps=sweeps)).items()}
    silent = {
        "rates": {"predicted"},
        "phases": {"step_times", "predicted"},
        "warmup": {"warmup"},
        "compile": {"compile"},
    }[missing]
    assert {key for key, verdict in verdicts.items() if verdict == "not measured"} == silent


def test_the_step_is_the_sum_of_its_parts_repeat_by_repeat():
    table = analysis.phases(_frame(noise=0)).set_index(["size", "phase"])["seconds"]
    parts = sum(table["mini", phase] for phase in ("forward", "backward", "optimizer"))
    assert table["mini", "step"] == pytest.approx(parts)
    only_forward = _frame()[lambda rows: rows["phase"].isin(["inference", "forward"])]
    assert "step" not in set(analysis.phases(only_forward)["phase"])


def test_predictions_are_flops_and_bytes_over_measured_rates():
    table = analysis.predictions(_frame(noise=0))
    assert table["measured_over_predicted"].tolist() == pytest.approx([1.0] * 12)
    assert table["mfu_percent"].isna().all()


def test_utilization_is_shown_only_against_the_peak_of_its_precision():
    table = analysis.predictions(_frame(noise=0, precision="bfloat16", peak=4 * RATE)).set_index(["size", "phase"])
    assert table.loc[("nano", "forward"), "mfu_percent"] == pytest.approx(25)
    assert analysis.predictions(_frame(peak=4 * RATE))["mfu_percent"].isna().all()
    assert "% of the data-sheet peak" in _answers(_frame(precision="bfloat16", peak=4 * RATE))["predicted"].text


def test_a_machine_that_contradicts_the_prediction_is_not_talked_round():
    answer = _answers(_frame(lambda size, phase: 10 * _textbook(size, phase)))["predicted"]
    assert answer.verdict == "no"
    assert "0 of 12 times" in answer.text


def test_first_steps_that_are_not_slower_show_no_difference_and_advise_nothing():
    answer = _answers(_frame(first=1.0))["warmup"]
    assert answer.verdict == "no difference shown"
    assert answer.recommendation is None


def test_first_steps_that_are_faster_are_a_difference_too():
    answer = _answers(_frame(first=0.1))["warmup"]
    assert answer.verdict == "yes"
    assert "Early steps are faster than later ones" in answer.text
    assert "pays for what happens once" not in answer.text


def test_a_loss_that_is_not_finite_is_shouted_where_it_was_measured():
    bad = POINT | {"sweep": "phases", "size": "mini", "gate": "wrong: the loss is nan"}
    frame = _frame(sizes=("nano",), sweeps=["phases"])
    answer = _answers(pd.concat([frame, pd.DataFrame([bad])], ignore_index=True))["step_times"]
    assert answer.text.startswith("WRONG RESULTS, and therefore no times: mini: wrong: the loss is nan. nano: forward")
    only_bad = _answers(pd.DataFrame([bad]))["step_times"]
    assert only_bad.verdict == "not measured"
    assert "the loss is nan" in only_bad.text


def test_utilization_is_told_however_far_a_step_goes():
    frame = _frame(precision="bfloat16", peak=4 * RATE)
    forward_only = frame[frame["phase"].isin(["inference", "forward"]) | (frame["sweep"] == "rates")]
    assert "25 % of the data-sheet peak" in _answers(forward_only)["predicted"].text


def test_many_models_are_told_by_the_smallest_and_the_largest():
    text = _answers(_frame(sizes=("nano", "mini", "small", "medium")))["step_times"].text
    assert "nano: forward" in text
    assert "medium: forward" in text
    assert "mini: forward" not in text


def test_figures_can_be_drawn_from_two_precisions():
    frame = pd.concat([_frame(), _frame(precision="bfloat16")], ignore_index=True)
    for table, y in (
        (analysis.phases(frame), "seconds"),
        (analysis.predictions(frame), "measured_over_predicted"),
        (analysis.compiled_against_eager(frame), "ratio"),
    ):
        plot = figures.bars(table, x="size", y=y, hue="phase", hue_order=analysis.PHASE_ORDER, facet="precision")
        assert len(plot.figure.axes) == 2


def test_slower_compiled_code_is_advised_against_and_noise_shows_nothing():
    slow = _answers(_frame(compiled=2.0))["compile"]
    assert slow.verdict == "no"
    assert "do not compile" in slow.recommendation
    assert "earned back" not in slow.text
    noisy = _answers(_frame(compiled=1.0, noise=0.5))["compile"]
    assert noisy.verdict == "no difference shown"
    assert "no gain is shown" in noisy.recommendation
    assert (slow.is_shown, noisy.is_shown) == (True, False)


def test_wrong_results_of_compiled_code_are_shouted():
    frame = _frame(sweeps=["phases"])
    bad = POINT | {"sweep": "compile", "size": "nano", "implementation": "compiled", "gate": "wrong: error 1e+00"}
    answer = _answers(pd.concat([frame, pd.DataFrame([bad])], ignore_index=True))["compile"]
    assert answer.verdict == "not measured"
    assert "WRONG RESULTS, and therefore no times: nano: wrong: error 1e+00" in answer.text


def test_published_trends_are_contradicted_where_they_are():
    def contrary(size, phase):
        return _textbook(size, phase) * (0.2 if phase == "backward" else 1)

    answer = _answers(_frame(contrary, compiled=2.0))["published_trends"]
    assert answer.verdict == "mixed"  # the spread is as small as published
    assert "0.40 times here): contradicted here" in answer.text
    assert "A full step is faster compiled (2.00 for nano and 2.00 for mini): contradicted here" in answer.text
    noisy = _answers(_frame(noise=0.5, compiled=1.0))["published_trends"].text
    assert "A full step is faster compiled" in noisy
    assert "holds here" not in noisy
