"""What a rank measures of the precision lab: the numbers are known by hand, and a wrong precision gets no time."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch

from labkit.bench.memory import record_allocations
from labkit.machine import describe_machine
from labkit.nn.training import TrainingStep
from labkit.nn.transformer import shape_named
from labkit.studies.precision import worker
from labkit.studies.precision.dtypes import QUANTITIES, observed_dtypes
from labkit.studies.precision.numerics import ACCUMULATIONS, NORM_STEPS, accumulate, checkpoints, norm_steps
from labkit.studies.precision.study import STUDY, PrecisionConfig, needed_bytes
from labkit.studies.precision.worker import BOTH, FORWARD, PrecisionPoint, measure_point

SPEED = PrecisionPoint(
    part="speed",
    device="cpu",
    model="nano",
    precisions=("float32", "bfloat16"),
    batch=1,
    context_length=8,
    warmup=0,
    repeats=2,
)


def _rounded(value, bits):
    """The nearest number with that many significant bits, ties to even, in exact arithmetic."""
    if value == 0:
        return Fraction(0)
    unit = Fraction(2) ** (math.frexp(float(value))[1] - bits)
    return round(value / unit) * unit


@pytest.mark.parametrize(("name", "sum_bits", "term_bits"), [("fp32", 24, 24), ("fp16", 11, 11), ("bf16", 8, 8)])
def test_sums_are_those_of_exact_arithmetic_rounded_after_every_addition(name, sum_bits, term_bits):
    term, total = _rounded(Fraction("0.01"), term_bits), Fraction(0)
    for _ in range(1000):
        total = _rounded(total + term, sum_bits)
    assert list(accumulate(name, term=0.01, additions=1000, device="cpu"))[-1]["sum"] == float(total)


def test_casting_a_term_before_it_is_added_changes_nothing_in_an_fp32_sum():
    plain, cast = (
        list(accumulate(name, term=0.01, additions=300, device="cpu"))
        for name in ("fp16_into_fp32", "fp16_cast_to_fp32")
    )
    assert [row["sum"] for row in plain] == [row["sum"] for row in cast]
    assert set(ACCUMULATIONS) >= {"fp32", "fp16", "fp16_into_fp32", "fp16_cast_to_fp32"}


def test_sums_are_looked_at_along_the_way():
    assert sorted(checkpoints(30)) == [1, 2, 5, 10, 20, 30]
    assert sorted(checkpoints(1000))[-1] == 1000
    assert checkpoints(2) == {1, 2}


@pytest.mark.parametrize("model", ["toy model", "Transformer"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_dtypes_are_read_off_the_running_model(model, precision):
    seen = {row["quantity"]: row["observed"] for row in observed_dtypes(model, precision, device="cpu", seed=0)}
    assert list(seen) == list(QUANTITIES)
    assert seen["parameters"] == seen["gradients"] == "float32"
    assert seen["first linear"] == seen["logits"] == precision


def _steps(dtype, offset, scale):
    rows = list(norm_steps(dtype, offset=offset, scale=scale, device="cpu", seed=0))
    assert len(rows) == 2 * len(NORM_STEPS)
    return {(row["step"], row["arithmetic"] == "float32"): row for row in rows}


def test_squares_overflow_in_float16_alone():
    half = _steps("float16", 0.0, 300.0)
    assert 0.2 < half["squares", False]["overflowed"] < 0.6  # |normal| > 256 / 300
    assert half["squares", False]["error"] is None
    assert half["mean", False]["overflowed"] == half["centered", False]["overflowed"] == 0
    assert half["rsqrt", False]["overflowed"] == 0  # of infinity, which is where it went wrong
    assert all(row["overflowed"] == 0 for (_, is_wide), row in half.items() if is_wide)
    assert all(row["overflowed"] == 0 for row in _steps("bfloat16", 0.0, 300.0).values())


def test_small_squares_underflow_in_float16_alone():
    assert _steps("float16", 0.0, 1e-4)["squares", False]["underflowed"] > 0.5
    assert _steps("bfloat16", 0.0, 1e-4)["squares", False]["underflowed"] == 0


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_subtracting_a_large_mean_is_exact_and_uncovers_its_rounding(dtype):
    steps = _steps(dtype, 1000.0, 1.0)
    assert steps["centered", False]["own_error"] == 0
    assert steps["centered", False]["error"] > 10 * steps["mean", False]["error"]
    assert steps["output", True]["error"] < steps["output", False]["error"]


def test_float32_steps_have_float32_errors():
    steps = _steps("float16", 0.0, 1.0)
    assert all(row["error"] < 1e-5 for (step, is_wide), row in steps.items() if is_wide and step != "output")
    assert steps["output", True]["error"] <= 2**-11


def test_every_precision_is_checked_and_timed():
    rows = list(measure_point(SPEED))
    assert [(row["mode"], row["alternative"]) for row in rows] == [
        (mode, name) for mode in (FORWARD, BOTH) for name in SPEED.precisions
    ]
    for row in rows:
        assert row["check"] == "ok"
        assert len(row["seconds"]) == 2
        assert (row["error"] == 0) == (row["alternative"] == "float32")


def test_a_wrong_precision_gets_no_time(monkeypatch):
    monkeypatch.setattr(worker, "GRADIENT_BOUND", 1e-9)
    rows = list(measure_point(SPEED))
    wrong = [row for row in rows if row["alternative"] == "bfloat16"]
    assert len(wrong) == 1
    assert wrong[0]["check"].startswith("wrong: loss off by")
    assert "seconds" not in wrong[0]
    assert len(rows) == 3


def test_a_precision_that_the_device_does_not_have_leaves_the_others_alone(monkeypatch):
    def refuse(action, name):
        def call(*arguments, **options):
            if name in map(str, (*arguments, *options.values())):
                raise RuntimeError("no such instructions")
            return action(*arguments, **options)

        return call

    monkeypatch.setattr(worker, "_loss_and_gradients", refuse(worker._loss_and_gradients, "bfloat16"))
    rows = list(measure_point(SPEED))
    (gate,) = (row["check"] for row in rows if row["alternative"] == "bfloat16")
    assert gate.startswith("failed: RuntimeError: no such instructions")
    assert any("seconds" in row for row in rows if row["alternative"] == "float32")


@pytest.mark.parametrize(("model", "context"), [("mini", 8), ("nano", 256)])
def test_what_the_check_needs_is_predicted(model, context):
    """At few tokens the sets of gradients decide: a third one would not fit into the prediction."""
    point = replace(SPEED, model=model, context_length=context)
    with record_allocations("cpu") as record:
        step = TrainingStep(shape_named(model), batch=1, context_length=context)
        with record.window("check"):
            assert [row["check"] for row in worker._check(step, point.precisions, "cpu")] == ["ok", "ok"]
        del step
    assert 0.8 * needed_bytes(point) <= record.windows["check"].peak_bytes <= needed_bytes(point)


def test_an_unknown_part_is_refused():
    with pytest.raises(ValueError, match="no part 'speeed'"):
        list(measure_point(PrecisionPoint(part="speeed", device="cpu")))


@pytest.mark.parametrize("profile", ["smoke", "quick", "standard", "paper"])
def test_no_point_is_planned_twice_and_small_models_come_first(profile):
    points = STUDY.points(STUDY.profiles[profile], describe_machine())
    assert len({point.id for point in points}) == len(points)
    sizes = [STUDY.series(point)[1] for point in points if point.part == "speed"]
    assert sizes == sorted(sizes)


def test_what_this_machine_cannot_do_has_a_reason():
    machine = describe_machine()
    huge = PrecisionPoint(part="speed", device="cpu", model="10B", batch=4096)
    assert "needs" in STUDY.skip_reason(huge, machine)
    if not torch.cuda.is_available():
        points = STUDY.points(PrecisionConfig(models=["nano"], device="cuda"), machine)
        assert {STUDY.skip_reason(point, machine) for point in points} == {"needs a CUDA device, and there is none"}
