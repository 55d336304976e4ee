"""Answers of the kernels lab on made-up frames: textbook, contrary, noisy, and with rows missing."""

from functools import partial

import numpy as np
import pandas as pd
import pytest

from labkit.bench.trace import encode_trace
from labkit.studies.kernels import analysis
from labkit.studies.kernels.analysis import BOTH, FORWARD
from labkit.studies.kernels.study import STUDY
from labkit.studies.kernels.worker import INFERENCE, STEP
from tests.studies.answering import answers_of

_answers = partial(answers_of, STUDY)

# (phase, within, family, operator): milliseconds and calls, as in a textbook
FORWARD_PART = {
    ("forward", "", "matmul", "aten::mm"): (50.0, 29),
    ("forward", "scores", "matmul", "aten::bmm"): (2.0, 4),
    ("forward", "values", "matmul", "aten::bmm"): (2.0, 4),
    ("forward", "softmax", "softmax", "aten::_softmax"): (6.0, 4),
    ("forward", "mask", "elementwise", "aten::masked_fill_"): (3.0, 4),
    ("forward", "", "elementwise", "aten::mul"): (20.0, 50),
    ("forward", "", "dispatch", "forward"): (10.0, 1),
    ("forward", "", "copy", "all others"): (7.0, 90),
}
STEP_PART = {
    ("backward", "", "matmul", "aten::mm"): (100.0, 58),
    ("backward", "", "elementwise", "aten::mul"): (60.0, 99),
    ("optimizer", "", "elementwise", "aten::lerp_"): (80.0, 39),
    ("optimizer", "", "dispatch", "optimizer"): (10.0, 1),
}


def _frame(change=None, *, overhead=1.5, noise=0.01, repeats=8, models=("nano", "mini"), device="cpu", seed=0):
    """Rows as a run would have them; `change` replaces times of the table above, None drops an operator."""
    generator = np.random.default_rng(seed)
    rows = []

    def noisy(value):
        return value * np.exp(generator.normal(0, noise))

    for model in models:
        base = {"device": device, "model": model, "batch": 4, "context_length": 128, "nsys": False}
        for mode, table in ((INFERENCE, FORWARD_PART), (STEP, FORWARD_PART | STEP_PART)):
            table = {key: value for key, value in (table | (change or {})).items() if value is not None}
            if mode == INFERENCE:
                table = {key: value for key, value in table.items() if key[0] == "forward"}
            for repeat in range(repeats):
                here = base | {"mode": mode, "repeat": repeat}
                total = 0.0
                for (phase, within, family, operator), (milliseconds, calls) in table.items():
                    seconds = noisy(milliseconds / 1000)
                    total += seconds
                    names = {"phase": phase, "within": within, "family": family, "operator": operator}
                    rows.append(here | {"record": "operator", "self_s": seconds, "calls": calls} | names)
                times = {"clock_s": noisy(total / overhead), "profiled_s": total, "events_s": total, "host_s": total}
                rows.append(here | {"record": "clock", "recorded": 1000} | times)
    rows += [{"record": "rate", "device": device, "repeat": r, "flops_per_s": 1e12} for r in range(repeats)]
    return pd.DataFrame(rows)


def test_every_question_is_answered_from_a_full_frame():
    assert all(answer.verdict != "not measured" for answer in _answers(_frame()).values())


@pytest.mark.parametrize("frame", [pd.DataFrame(), _frame().iloc[:0]], ids=["no columns", "no rows"])
def test_without_rows_every_question_is_not_measured_and_says_why(frame):
    answers = _answers(frame, "needs 51 GiB, 22 GiB available")
    assert {answer.verdict for answer in answers.values()} == {"not measured"}
    assert all("needs 51 GiB" in answer.text for answer in answers.values())


def test_every_table_of_an_empty_frame_is_empty_and_has_its_columns():
    for frame in (pd.DataFrame(), _frame().iloc[:0]):
        assert analysis.drawn_shares(frame).empty
        assert analysis.top_operators(frame).empty
        assert analysis.timeline(frame).empty
        assert analysis.attention_parts(frame).empty
        assert analysis.predictions(frame).empty
        assert {"mode", "seconds", "measure", "model"} <= set(analysis.clocks(frame).columns)
        assert {"model", "share_percent", "mode"} <= set(analysis.matmul_shares(frame).columns)
        assert "nsys" in analysis.nsight_note(frame)


def test_without_operators_only_the_clock_is_left():
    frame = _frame()
    left = _answers(frame[frame["record"] != "operator"])
    measured = [name for name, answer in left.items() if answer.verdict != "not measured"]
    assert measured == ["profiler_and_clock", "published_trends"]
    left = _answers(frame[frame["record"] != "clock"])
    assert left["profiler_and_clock"].verdict == "not measured"
    assert left["matmul_share"].verdict == "yes"


def test_what_recording_costs_is_told_where_it_is_shown():
    text = _answers(_frame(noise=0))["profiler_and_clock"].text
    assert "nano on cpu: 66.7 ms by the clock" in text
    assert "add up to 100 ms, 1.50 [1.50, 1.50] of that" in text
    assert "recording 1000 events costs about 33.3 µs each" in text
    assert "its events cover 100 % of the clock's time." in text
    equal = _answers(_frame(overhead=1.0, noise=0.1))["profiler_and_clock"].text
    assert "That the profiler slows the pass is not shown" in equal
    assert "recording" not in equal
    assert "by the profiler's events (published: 0.73 of the clock's): contradicted here" in (
        _answers(_frame())["published_trends"].text
    )
    faster = _answers(_frame(overhead=0.5))["profiler_and_clock"].text
    assert "With the profiler on, the clock shows less" in faster


def test_a_gpu_that_waits_is_told_by_kernels_and_host():
    frame = _frame(device="cuda", noise=0)
    is_clock = frame["record"] == "clock"
    frame.loc[is_clock, "events_s"] *= 0.25
    text = _answers(frame)["profiler_and_clock"].text
    assert "the profiler's kernels add up to 25 ms, 0.38" in text
    assert "cover 25 % of the clock's time; in the rest no kernel runs (the host is in the pass for 100 ms)." in text


def test_the_largest_operator_is_the_one_of_the_frame_with_its_calls():
    text = _answers(_frame(noise=0))["largest_operator"].text
    assert "nano on cpu: forward, aten::mm takes 50 ms [50 ms, 50 ms] in 29 calls, 50 % of all" in text
    assert "forward and backward, aten::mm takes 150 ms [150 ms, 150 ms] in 87 calls, 58 % of all" in text
    assert "The same operator leads in both." in text
    other = {("backward", "", "elementwise", "aten::mul"): (900.0, 99)}
    text = _answers(_frame(other))["largest_operator"].text
    assert "forward and backward, aten::mul takes" in text
    assert "The same operator leads" not in text


def test_a_leader_within_chance_is_said_to_be():
    close = {("forward", "", "elementwise", "aten::mul"): (50.0, 50)}
    assert "(not shown to be more than" in _answers(_frame(close, noise=0.2))["largest_operator"].text
    assert "not shown" not in _answers(_frame())["largest_operator"].text


def test_what_is_worth_naming_is_named_with_its_interval():
    text = _answers(_frame(noise=0))["beside_matmul"].text
    assert (
        "nano on cpu, forward: elementwise 23 % [23 %, 23 %], dispatch 10 % [10 %, 10 %], copy 7 % [7 %, 7 %] and "
        "softmax 6 %" in text
    )
    assert "nano on cpu, full step: elementwise 24 % [24 %, 24 %], optimizer 23 %" in text
    only = dict.fromkeys([key for key in FORWARD_PART | STEP_PART if key[2] != "matmul"])
    answer = _answers(_frame(only))["beside_matmul"]
    assert answer.verdict == "no difference shown"
    assert "nothing is shown to be above 5 %" in answer.text


def test_a_step_with_an_optimizer_has_a_smaller_share_of_products_and_a_strange_one_a_larger():
    answer = _answers(_frame())["matmul_share"]
    assert answer.verdict == "yes"
    assert "54 % [5" in answer.text
    assert "smaller" in answer.text
    strange = {("backward", "", "matmul", "aten::mm"): (5000.0, 58)}
    answers = _answers(_frame(strange))
    assert answers["matmul_share"].verdict == "no"
    assert "smaller share of a full step than of inference: contradicted here" in answers["published_trends"].text


def test_equal_shares_but_for_noise_show_no_difference():
    same = dict.fromkeys(STEP_PART) | {
        ("backward", *key[1:]): value for key, value in FORWARD_PART.items() if value is not None
    }
    verdicts = [_answers(_frame(same, noise=0.2, seed=seed))["matmul_share"].verdict for seed in range(12)]
    assert verdicts.count("no difference shown") >= 11


def test_softmax_against_products_by_time_and_flops():
    text = _answers(_frame(noise=0))["softmax_in_attention"].text
    flops = 5 / (4 * 32)  # an element of the scores: 5 operations against 2 * 2 * head_dim
    assert "the softmax takes 1.50 [1.50, 1.50] times the time of the two matrix products (shown to be more)" in text
    assert f", with {flops:.3f} times their FLOPs." in text
    assert "Scaling and masking the scores takes 0.75 [0.75, 0.75] times theirs." in text
    quick = {("forward", "softmax", "softmax", "aten::_softmax"): (1.0, 4)}
    answers = _answers(_frame(quick))
    assert "(shown to be less)" in answers["softmax_in_attention"].text
    assert "The softmax takes more time than both products (published: 2.2 times the scores alone): contradicted" in (
        answers["published_trends"].text
    )


def test_published_observations_hold_on_a_textbook_machine_and_few_passes_show_nothing():
    textbook = _answers(_frame(overhead=0.9))["published_trends"]
    assert textbook.verdict == "yes", textbook.text
    few = _answers(_frame(repeats=3))
    assert few["published_trends"].verdict == "not shown"
    assert few["matmul_share"].verdict == "no difference shown"
    assert "Too few passes for intervals." in few["beside_matmul"].text


def test_shares_of_a_pass_add_up_to_one_and_drawn_ones_to_a_hundred_percent():
    frame = _frame(noise=0.3)
    sums = analysis.family_samples(frame).groupby(["model", "mode", "repeat"])["share"].sum()
    assert sums.tolist() == pytest.approx([1.0] * len(sums))
    drawn = analysis.drawn_shares(frame)
    assert drawn.groupby(["model", "mode"])["share_percent"].sum().tolist() == pytest.approx([100.0] * 8)
    assert list(dict.fromkeys(drawn["mode"])) == [INFERENCE, FORWARD, BOTH, STEP]
    assert list(dict.fromkeys(drawn["model"])) == ["nano", "mini"]
    assert set(analysis.published_shares(drawn)["family"]) <= set(drawn["family"]) | {"other"}


def test_operators_of_the_optimizer_are_a_family_of_their_own():
    drawn = analysis.shares(_frame(noise=0)).set_index(["model", "mode", "family"])["share"]
    assert drawn["nano", STEP, "optimizer"] == pytest.approx(80 / 350)
    assert drawn["nano", BOTH, "elementwise"] == pytest.approx(83 / 260)


def test_predictions_are_flops_over_the_measured_rate():
    table = analysis.predictions(_frame(noise=0)).set_index(["model", "mode"])
    assert table["gflop"]["nano", STEP] == pytest.approx(3 * table["gflop"]["nano", INFERENCE])
    assert table["predicted_s"]["nano", FORWARD] == pytest.approx(table["gflop"]["nano", FORWARD] / 1000)
    assert table["profiled_s"]["nano", FORWARD] == pytest.approx(0.054)


def test_the_trace_is_written_and_drawn(tmp_path):
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 5.0, "dur": 2e6, "tid": 1}
    text = encode_trace({"traceEvents": [event, event | {"name": "forward", "cat": "user_annotation", "dur": 3e6}]})
    row = {"record": "trace", "device": "cpu", "model": "nano", "mode": STEP, "repeat": 0, "trace": text}
    frame = pd.concat([_frame(), pd.DataFrame([row])], ignore_index=True)
    boxes = analysis.timeline(frame)
    assert boxes.to_dict("records") == [
        {"start_s": 0.0, "duration_s": 2.0, "family": "matmul", "phase": "forward", "operator": "aten::mm"}
    ]
    (saved,) = analysis.save_trace(frame, tmp_path / "new").to_dict("records")
    assert (tmp_path / "new" / "nano-step.trace.json.gz").stat().st_size == saved["n_bytes"] > 0


def test_the_command_for_nsight_is_given_where_it_is_installed():
    cuda = _frame(device="cuda")
    assert "is not on this machine" in analysis.nsight_note(cuda)
    command = analysis.nsight_note(cuda.assign(nsys=True, batch=8, context_length=256))
    assert "nsys profile --trace=cuda,nvtx" in command
    assert "run_with_nvtx('nano', batch=8, context_length=256)" in command, "the run's own sizes"


def test_no_command_for_a_gpu_stands_on_a_page_of_a_cpu():
    note = analysis.nsight_note(_frame().assign(nsys=True))
    assert "this run used none" in note
    assert "nsys profile" not in note


def test_of_many_models_the_smallest_and_the_largest_are_told():
    frame = _frame(models=("nano", "mini", "small", "medium"))
    answers = _answers(frame)
    for name in ("profiler_and_clock", "largest_operator", "beside_matmul", "softmax_in_attention"):
        text = answers[name].text
        assert "nano on cpu" in text
        assert "medium on cpu" in text
        assert "mini" not in text
        assert "small on" not in text
        assert len(text.split(". ")) <= 6, text
    assert set(analysis.clocks(frame)["model"]) == {"nano", "mini", "small", "medium"}, "the figure has all"


def test_the_question_ids_are_the_published_ones():
    assert [question.id for question in STUDY.questions] == [
        "profiler_and_clock",
        "largest_operator",
        "beside_matmul",
        "matmul_share",
        "softmax_in_attention",
        "published_trends",
    ]
