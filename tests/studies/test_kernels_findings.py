"""Findings of the kernels lab on made-up frames: textbook, contrary, noisy, and with rows missing."""

from functools import partial

import numpy as np
import pandas as pd
import pytest

from labkit.studies.kernels import tables
from labkit.studies.kernels.study import STUDY
from labkit.studies.kernels.tables import BOTH, FORWARD
from labkit.studies.kernels.traces import encode_trace
from labkit.studies.kernels.worker import INFERENCE, STEP
from tests.calibrated import made_up
from tests.studies.answering import answers_of

_findings = partial(answers_of, STUDY)

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
    return pd.DataFrame(rows)


def test_every_question_is_answered_from_a_full_frame():
    assert all(finding.verdict != "not measured" for finding in _findings(_frame()).values())


def test_every_table_of_an_empty_frame_is_empty_and_has_its_columns():
    for frame in (pd.DataFrame(), _frame().iloc[:0]):
        for table in (tables.drawn_shares, tables.top_operators, tables.timeline, tables.attention_parts):
            assert table(frame).empty
        assert tables.predictions(frame, made_up()).empty
        assert {"mode", "seconds", "measure", "model"} <= set(tables.clocks(frame).columns)
        assert {"model", "share_percent", "mode", "family"} <= set(tables.shares(frame).columns)
        assert "nsys" in tables.nsight_note(frame)


def test_without_operators_only_the_clock_is_left():
    frame = _frame()
    left = _findings(frame[frame["record"] != "operator"])
    measured = [name for name, finding in left.items() if finding.verdict != "not measured"]
    assert measured == ["profiler_and_clock", "published_trends"]
    left = _findings(frame[frame["record"] != "clock"])
    assert left["profiler_and_clock"].verdict == "not measured"
    assert left["matmul_share"].verdict == "yes"


def test_what_recording_costs_is_told_where_it_shows():
    finding = _findings(_frame(noise=0))["profiler_and_clock"]
    assert finding.headline == "No: a forward pass by the profiler's events takes 50 % longer than by the clock."
    assert finding.why == "Recording an event costs 33.3 µs."
    assert finding.table["clock_s"].tolist() == pytest.approx([0.1 / 1.5] * 2)
    equal = _findings(_frame(overhead=1.0, noise=0.1))["profiler_and_clock"]
    assert (equal.verdict, equal.why) == ("no clear difference", None)
    faster = _findings(_frame(overhead=0.5))["profiler_and_clock"]
    assert (faster.verdict, faster.why) == ("no", None), "which is no agreement either"
    one = _frame(noise=0.001, overhead=1.0)
    one.loc[(one["record"] == "clock") & (one["model"] == "nano"), "clock_s"] /= 1.5
    told = "No: a forward pass by the profiler's events takes 50 % longer than by the clock with nano."
    assert _findings(one)["profiler_and_clock"].headline == told
    one.loc[(one["record"] == "clock") & (one["model"] == "mini"), "clock_s"] *= 2
    both = _findings(one)["profiler_and_clock"]
    assert (both.verdict, both.lead is not None) == ("no", True)
    assert both.headline.endswith("shorter than by the clock for mini, longer for nano.")


def test_a_gpu_that_waits_is_told_by_its_kernels():
    frame = _frame(device="cuda", noise=0)
    frame.loc[frame["record"] == "clock", "events_s"] *= 0.25
    finding = _findings(frame)["profiler_and_clock"]
    assert finding.verdict == "no"
    assert "2.7 times less time than by the clock" in finding.headline
    assert finding.table["ratio"].tolist() == pytest.approx([0.375] * 2)
    assert "No kernel runs in 75 % of the time under the profiler." in finding.why


def test_attention_that_is_wrong_is_shouted():
    bad = {"record": "check", "device": "cpu", "model": "nano", "check": "wrong: attention in parts is off by 1.0e+00"}
    finding = _findings(pd.DataFrame([bad]))["profiler_and_clock"]
    assert finding.verdict == "not measured"
    assert finding.caveat.startswith("WRONG RESULTS, and so no times, from nano: wrong: attention")


def test_the_largest_operator_is_the_one_of_the_frame_with_its_calls():
    finding = _findings(_frame(noise=0))["largest_operator"]
    assert finding.headline == "aten::mm takes most time: 50 to 58 % of a pass."
    assert finding.where == "nano and mini · forward / forward and backward · cpu · batch 4 · 128 tokens"
    assert finding.table["calls"].max() == 149  # of aten::mul, forward and backward
    assert finding.table["self_s"].max() == pytest.approx(0.15)
    other = {("backward", "", "elementwise", "aten::mul"): (900.0, 99)}
    assert "aten::mm in forward and aten::mul in forward and backward" in (
        _findings(_frame(other))["largest_operator"].headline
    )
    kernel = {("forward", "", "matmul", "void cutlass::Kernel2<cutlass_80_simt_sgemm, 4>(Params)"): (900.0, 9)}
    assert "cutlass::Kernel2 takes most time" in _findings(_frame(kernel))["largest_operator"].headline


def test_a_leader_within_chance_is_said_to_be():
    close = {("forward", "", "elementwise", "aten::mul"): (50.0, 50)}
    assert "Not clearly more than" in _findings(_frame(close, noise=0.2))["largest_operator"].caveat
    assert _findings(_frame())["largest_operator"].caveat is None


def test_what_is_worth_naming_is_named():
    finding = _findings(_frame(noise=0))["beside_matmul"]
    assert (
        "a full step of the model mini spends 24 % on elementwise operators and 23 % on the optimizer"
        in finding.headline
    )
    named = finding.table.query("model == 'nano' and mode == 'forward'").set_index("family")["share_percent"]
    assert named.to_dict() == pytest.approx({"softmax": 6, "elementwise": 23, "copy": 7, "dispatch": 10})
    only = dict.fromkeys([key for key in FORWARD_PART | STEP_PART if key[2] != "matmul"])
    nothing = _findings(_frame(only))["beside_matmul"]
    assert nothing.headline == "Nothing else clearly exceeds 5 % of a full step of the model mini."
    assert nothing.table.empty


def test_a_step_with_an_optimizer_has_a_smaller_share_of_products_and_a_strange_one_a_larger():
    finding = _findings(_frame())["matmul_share"]
    assert finding.verdict == "yes"
    assert finding.why == "The optimizer takes 23 % of a full step and multiplies no matrices."
    strange = _findings(_frame({("backward", "", "matmul", "aten::mm"): (5000.0, 58)}))
    assert strange["matmul_share"].verdict == "no"
    outcomes = {claim.text: claim.outcome for claim in strange["published_trends"].claims}
    assert outcomes["Matrix products have a smaller share of a full step than of inference"] == "is contradicted here"


def test_equal_shares_but_for_noise_show_no_difference():
    same = dict.fromkeys(STEP_PART) | {("backward", *key[1:]): value for key, value in FORWARD_PART.items()}
    verdicts = [_findings(_frame(same, noise=0.2, seed=seed))["matmul_share"].verdict for seed in range(12)]
    assert verdicts.count("no clear difference") >= 11


def test_softmax_against_products_by_time_and_flops():
    finding = _findings(_frame(noise=0))["softmax_in_attention"]
    assert finding.headline == "It depends: the softmax takes 50 % longer than the two matrix products."
    assert finding.verdict == "it depends"
    flops = 5 / (4 * 32)  # per element of the scores: 5 operations against 2 * 2 * head_dim
    assert finding.table["flop_ratio"].dropna().tolist() == pytest.approx([flops, 5 / (4 * 64)])
    assert finding.why == "By FLOPs the softmax would take 2 to 4 % of their time."
    assert finding.also == "Scaling and masking take 25 % less time than the two matrix products."
    ratios = finding.table.groupby("part")["ratio"].max()
    assert ratios.to_dict() == pytest.approx({"softmax": 1.5, "scale and mask": 0.75})
    quick = _findings(_frame({("forward", "softmax", "softmax", "aten::_softmax"): (1.0, 4)}))
    assert quick["softmax_in_attention"].verdict == "yes"
    outcomes = {claim.text: claim.outcome for claim in quick["published_trends"].claims}
    assert outcomes["The softmax takes more time than the product of queries and keys"] == "is contradicted here"


def test_published_observations_hold_on_a_textbook_machine_and_few_passes_show_nothing():
    assert _findings(_frame(overhead=0.9))["published_trends"].verdict == "yes"
    few = _findings(_frame(repeats=3))
    for name in ("published_trends", "matmul_share", "beside_matmul"):
        assert few[name].verdict == "undecided"


def test_shares_of_a_pass_add_up_to_a_hundred_percent():
    frame = _frame(noise=0.3)
    sums = tables.family_samples(frame).groupby(["model", "mode", "repeat"])["share_percent"].sum()
    assert sums.tolist() == pytest.approx([100.0] * len(sums))
    drawn = tables.drawn_shares(frame)
    assert drawn.groupby(["model", "mode"])["share_percent"].sum().tolist() == pytest.approx([100.0] * 8)
    assert list(dict.fromkeys(drawn["mode"])) == [INFERENCE, FORWARD, BOTH, STEP]
    assert list(dict.fromkeys(drawn["model"])) == ["nano", "mini"]


def test_operators_of_the_optimizer_are_a_family_of_their_own():
    shares = tables.shares(_frame(noise=0)).set_index(["model", "mode", "family"])["share_percent"]
    assert shares["nano", STEP, "optimizer"] == pytest.approx(8000 / 350)
    assert shares["nano", BOTH, "elementwise"] == pytest.approx(8300 / 260)


def test_products_should_take_their_flops_at_the_machines_rate():
    machine = made_up(flops_per_s=1e12, bytes_per_s=1e30, call_s=1e-30)
    table = tables.predictions(_frame(noise=0), machine).set_index(["model", "mode"])
    assert table["gflop"]["nano", STEP] == pytest.approx(3 * table["gflop"]["nano", INFERENCE])
    assert table["predicted_s"]["nano", FORWARD] == pytest.approx(table["gflop"]["nano", FORWARD] / 1000, rel=0.01)
    assert table["self_s"]["nano", FORWARD] == pytest.approx(0.054)
    assert tables.predictions(_frame(noise=0), None).empty


def test_the_trace_is_written_and_drawn(tmp_path):
    event = {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 5.0, "dur": 2e6, "tid": 1}
    text = encode_trace({"traceEvents": [event, event | {"name": "forward", "cat": "user_annotation", "dur": 3e6}]})
    row = {"record": "trace", "device": "cpu", "model": "nano", "mode": STEP, "repeat": 0, "trace": text}
    frame = pd.concat([_frame(), pd.DataFrame([row])], ignore_index=True)
    boxes = tables.timeline(frame)
    assert boxes.to_dict("records") == [
        {"start_s": 0.0, "duration_s": 2.0, "family": "matmul", "phase": "forward", "operator": "aten::mm"}
    ]
    (saved,) = tables.save_trace(frame, tmp_path / "new").to_dict("records")
    assert (tmp_path / "new" / "nano-step.trace.json.gz").stat().st_size == saved["n_bytes"] > 0


def test_the_command_for_nsight_is_given_where_it_is_installed():
    cuda = _frame(device="cuda")
    assert "is not on this machine" in tables.nsight_note(cuda)
    command = tables.nsight_note(cuda.assign(nsys=True, batch=8, context_length=256))
    assert "nsys profile --trace=cuda,nvtx" in command
    assert "run_with_nvtx('nano', batch=8, context_length=256)" in command, "the run's own sizes"


def test_no_command_for_a_gpu_stands_on_a_page_of_a_cpu():
    note = tables.nsight_note(_frame().assign(nsys=True))
    assert "this run used none" in note
    assert "nsys profile" not in note
