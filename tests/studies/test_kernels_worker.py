"""What a rank measures of the kernels lab: sums that add up, ranges where they should be, a trace that opens."""

import json
import math
from dataclasses import replace

import pytest
import torch

from labkit.bench.kernel_names import FAMILIES
from labkit.bench.memory import record_allocations
from labkit.bench.trace import read_events
from labkit.machine import describe_machine
from labkit.nn.attention import naive_attention
from labkit.nn.training import PHASES, TrainingStep
from labkit.nn.transformer import shape_named
from labkit.studies.kernels import worker
from labkit.studies.kernels.attention import PARTS, attention_in_parts
from labkit.studies.kernels.study import STUDY, KernelsConfig, needed_bytes
from labkit.studies.kernels.traces import decode_trace
from labkit.studies.kernels.worker import INFERENCE, OTHERS, STEP, KernelsPoint, measure_point, run_with_nvtx

SMALL = KernelsPoint(device="cpu", model="nano", batch=1, context_length=8, warmup=1, passes=2, keep_trace=True)


@pytest.fixture(scope="module")
def rows():
    return list(measure_point(SMALL))


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_attention_in_parts_is_the_oracle_bit_for_bit(causal, dtype):
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, 3, n, 16, dtype=dtype, generator=generator, requires_grad=True) for n in (7, 9, 9)]
    outputs = [attend(*inputs, causal) for attend in (attention_in_parts, naive_attention)]
    torch.testing.assert_close(*outputs, rtol=0, atol=0)
    found, expected = (torch.autograd.grad(output.square().sum(), inputs) for output in outputs)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_attention_in_parts_refuses_what_the_oracle_refuses():
    with pytest.raises(ValueError, match="one head_dim"):
        attention_in_parts(torch.zeros(2, 4), torch.zeros(2, 5), torch.zeros(2, 5))


def test_each_mode_has_its_clock_and_operators(rows):
    clocks = [row for row in rows if row["record"] == "clock"]
    assert [row["mode"] for row in clocks] == [INFERENCE, STEP]
    for row in clocks:
        assert row["check"] == "ok"
        assert row["error"] == 0
        assert all(
            len(row[name]) == SMALL.passes for name in ("clock_s", "profiled_s", "events_s", "host_s", "recorded")
        )
        assert all(0 < events <= seconds for events, seconds in zip(row["events_s"], row["profiled_s"], strict=True))


def test_operators_add_up_to_all_events_of_each_pass(rows):
    for clock in (row for row in rows if row["record"] == "clock"):
        operators = [row for row in rows if row["record"] == "operator" and row["mode"] == clock["mode"]]
        for index, total in enumerate(clock["events_s"]):
            assert sum(row["self_s"][index] for row in operators) == pytest.approx(total)
        assert {row["family"] for row in operators} <= set(FAMILIES)


def test_phases_and_parts_of_attention_are_told_apart(rows):
    operators = [row for row in rows if row["record"] == "operator"]
    assert {row["phase"] for row in operators if row["mode"] == INFERENCE} == {"forward"}
    assert {row["phase"] for row in operators if row["mode"] == STEP} == set(PHASES)
    assert {row["within"] for row in operators if row["phase"] == "forward"} == {"", *PARTS}
    assert {row["within"] for row in operators if row["phase"] != "forward"} == {""}


def test_matrix_products_are_as_many_as_the_model_has(rows):
    layers = shape_named("nano").n_layers
    products = {
        (row["mode"], row["phase"]): row["calls"]
        for row in rows
        if row["record"] == "operator" and row["operator"] == "aten::mm"
    }
    assert products[INFERENCE, "forward"] == [7 * layers + 1] * 2
    assert products[STEP, "backward"] == [2 * (7 * layers + 1)] * 2


def test_small_operators_are_summed_up_under_one_name(rows, monkeypatch):
    assert any(row.get("operator") == OTHERS for row in rows)
    monkeypatch.setattr(worker, "LEAST_SHARE", 0.0)
    assert not any(row.get("operator") == OTHERS for row in measure_point(SMALL))


def test_the_trace_of_a_step_is_kept_and_rows_are_json(rows):
    (row,) = [row for row in rows if row["record"] == "trace"]
    events = read_events(decode_trace(row["trace"]))
    assert {event.within(PHASES) for event in events} == set(PHASES)
    json.dumps(rows)


def test_a_trace_that_is_too_large_is_left_out_with_a_reason(monkeypatch):
    monkeypatch.setattr(worker, "MOST_TRACE_BYTES", 1000)
    (row,) = [row for row in measure_point(SMALL) if row["record"] == "trace"]
    assert "trace" not in row
    assert "more than the 1000 B" in row["left_out"]


class _WrongGradient(torch.autograd.Function):
    """The identity, with a gradient that is off."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 1.5 * grad


def test_a_wrong_attention_gets_no_time(monkeypatch):
    def wrong(q, k, v, causal):
        return attention_in_parts(q, k, _WrongGradient.apply(v), causal)

    monkeypatch.setattr(worker, "attention_in_parts", wrong)
    (row,) = measure_point(SMALL)
    assert row["check"].startswith("wrong: attention in parts is off by 5.0e-01")


def test_nan_is_wrong(monkeypatch):
    monkeypatch.setattr(worker, "attention_in_parts", lambda *inputs: math.nan * attention_in_parts(*inputs))
    (row,) = measure_point(SMALL)
    assert row["check"] == "wrong: attention in parts is off by nan"


@pytest.mark.skipif(torch.cuda.is_available(), reason="says so only without CUDA")
def test_marks_for_nsight_need_a_gpu():
    with pytest.raises(RuntimeError, match="need a CUDA device"):
        run_with_nvtx("nano")


@pytest.mark.parametrize("profile", ["smoke", "quick", "standard", "paper"])
def test_no_point_is_planned_twice_and_the_smallest_model_keeps_its_trace(profile):
    points = STUDY.points(STUDY.profiles[profile], describe_machine())
    assert len({point.id for point in points}) == len(points)
    assert [point.keep_trace for point in points] == [True] + [False] * (len(points) - 1)
    assert [STUDY.series(point)[1] for point in points] == sorted(STUDY.series(point)[1] for point in points)


@pytest.mark.parametrize("context", [8, 512])
def test_what_a_model_needs_is_predicted(context):
    point = replace(SMALL, context_length=context)
    with record_allocations("cpu") as record:
        step = TrainingStep(shape_named("nano"), batch=1, context_length=context, attention=attention_in_parts)
        step.run()
        with record.window("step"):
            step.run()
        del step
    assert 0.8 * needed_bytes(point) <= record.windows["step"].peak_bytes <= needed_bytes(point)


def test_what_this_machine_cannot_do_has_a_reason():
    machine = describe_machine()
    huge = KernelsPoint(device="cpu", model="10B", batch=4096)
    assert "needs" in STUDY.skip_reason(huge, machine)
    if not torch.cuda.is_available():
        points = STUDY.points(KernelsConfig(models=["nano"], device="cuda"), machine)
        assert {STUDY.skip_reason(point, machine) for point in points} == {"needs a CUDA device, and there is none"}
