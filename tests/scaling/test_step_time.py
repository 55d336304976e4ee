"""Properties of every prediction, whatever its constants."""

import copy
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.scaling import validate
from labkit.scaling.calibration import as_calibrated, calibrate
from labkit.scaling.constants import load_constants
from labkit.scaling.hardware import HARDWARE
from labkit.scaling.models import Model
from labkit.scaling.prediction import predict, predict_runs
from labkit.scaling.runs import SHARDS, Runs, impossible_reason
from labkit.scaling.step_time import breakdown, predict_step_s
from tests.scaling.conftest import (
    GPT_1B,
    LLAMA_8B,
    LLAMA_70B,
    at_peak,
    faster,
    ideal_constants,
    run,
)

FRAMEWORKS = (
    "generic",
    "nanotron",
    "vtrain",
    "mosaic",
    "nemo",
    "maxtext",
    "megatron",
    "torchtitan",
    "fms",
)


def powers(largest):
    return st.sampled_from([2**exponent for exponent in range(largest.bit_length())])


@st.composite
def possible_runs(draw):
    """Runs that `impossible_reason` has nothing against."""
    tp, pp, cp, dp, micro_batch = (draw(powers(largest)) for largest in (8, 8, 2, 64, 4))
    one = run(
        draw(st.sampled_from([GPT_1B, LLAMA_8B, LLAMA_70B])),
        draw(st.sampled_from(sorted(HARDWARE))),
        seq_len=draw(st.sampled_from([512, 2048, 8192])),
        framework=draw(st.sampled_from(FRAMEWORKS)),
        tp=tp,
        sequence_parallel=draw(st.booleans()),
        pp=pp,
        vp=draw(powers(2)) if pp > 1 else 1,
        cp=cp,
        dp=dp,
        shard=draw(st.sampled_from(list(SHARDS))),
        micro_batch=micro_batch,
        global_batch=micro_batch * dp * draw(powers(16)),
        recompute=draw(st.sampled_from(["none", "selective", "full"])),
        precision=draw(st.sampled_from(["bf16", "fp16", "fp8"])),
    )
    assert impossible_reason(one.layout, one.model, one.seq_len) is None
    return one


def seconds(one, constants=None):
    return float(predict_step_s(Runs([one], constants))[0])


def part(one, name, constants=None):
    return float(breakdown(Runs([one], constants))[name][0])


@settings(max_examples=30, deadline=None, derandomize=True)
@given(possible_runs())
def test_every_breakdown_adds_up_and_nothing_is_negative(one):
    prediction = predict_runs(Runs([one])).select([0])[0]
    assert sum(prediction.parts_s.values()) == pytest.approx(prediction.step_s, rel=1e-9)
    assert min(prediction.parts_s.values()) >= -1e-12 * prediction.step_s
    assert len(prediction.memory_gib) == one.layout.pp
    assert max(sum(stage.values()) for stage in prediction.memory_gib) == pytest.approx(
        prediction.peak_gib, rel=1e-9
    )
    assert all(value >= -1e-9 for stage in prediction.memory_gib for value in stage.values())
    low, high = prediction.interval_90
    assert 0 < low <= prediction.step_s <= high < np.inf
    assert 0 <= prediction.out_of_memory <= 1
    assert 0 < prediction.mfu < 1


@settings(max_examples=20, deadline=None, derandomize=True)
@given(possible_runs(), st.sampled_from(["peak", "memory", "link", "network"]), st.floats(1.01, 50))
def test_better_hardware_is_never_slower(one, name, factor):
    assert seconds(faster(one, **{name: factor})) <= seconds(one) * (1 + 1e-9)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(possible_runs(), st.floats(0.1, 10))
def test_seconds_are_seconds(one, factor):
    """All rates times k and all times over k is the same machine with another clock: the step is k
    times shorter."""
    constants = load_constants()
    table = {quantity: dict(values) for quantity, values in constants.table.items()}
    for quantity in table:
        if quantity.endswith("_s"):
            table[quantity] = {key: value / factor for key, value in table[quantity].items()}
    other = faster(one, peak=factor, memory=factor, link=factor, network=factor)
    assert seconds(other, replace(constants, table=table)) * factor == pytest.approx(
        seconds(one), rel=1e-9
    )


@settings(max_examples=15, deadline=None, derandomize=True)
@given(possible_runs(), st.sampled_from(["layers", "ffn", "vocab"]))
def test_larger_models_take_longer_and_more_memory(one, name):
    larger = replace(one, model=replace(one.model, **{name: 2 * getattr(one.model, name)}))
    small, large = (predict_runs(Runs([either])) for either in (one, larger))
    assert large.step_s[0] > small.step_s[0]
    assert large.peak_gib[0] >= small.peak_gib[0] * (1 - 1e-9)


@settings(max_examples=15, deadline=None, derandomize=True)
@given(possible_runs())
def test_a_row_does_not_depend_on_its_neighbors(one):
    others = [
        run(LLAMA_70B, "a100", tp=8, pp=16, framework="megatron", global_batch=64),
        run(GPT_1B),
    ]
    alone = predict_runs(Runs([one]))
    among = predict_runs(Runs([*others, one]))
    for name in ("step_s", "peak_gib", "distance"):
        assert getattr(among, name)[2] == pytest.approx(getattr(alone, name)[0], rel=1e-12)
    assert among.select([2])[0].interval_90 == pytest.approx(alone.select([0])[0].interval_90)


def test_one_gpu_communicates_nothing():
    parts = predict(run(GPT_1B)).parts_s
    compute = {"matmuls", "attention", "elementwise", "CPU launches", "output head", "optimizer"}
    assert {name for name, value in parts.items() if value} <= compute


def test_at_the_peak_a_step_takes_its_flops_over_the_peak():
    """Ideal constants, endless memory bandwidth, one GPU: only arithmetic is left (half of
    attention's scores)."""
    one = at_peak(faster(run(seq_len=2048), memory=1e12))
    runs = Runs([one])
    matrices = (
        LLAMA_8B.layers * (runs.layer_parameters[0] - 2 * LLAMA_8B.hidden)
        + runs.embedding_parameters[0]
    )
    attention = LLAMA_8B.layers * 3.5 * 4 * 2048**2 * LLAMA_8B.hidden / 2
    expected = (6 * 2048 * matrices + attention) / (one.hardware.peak_tflops * 1e12)
    assert seconds(one, ideal_constants()) == pytest.approx(expected, rel=1e-3)


def test_recomputation_costs_a_forward_pass():
    """Full recomputation makes three passes four: 4/3 of the matmuls' time."""
    kept, again = (part(run(recompute=how), "matmuls") for how in ("none", "full"))
    assert again / kept == pytest.approx(4 / 3, rel=0.02)


@pytest.mark.parametrize("framework", ["generic", "nemo", "torchtitan"])
def test_a_gather_over_thousands_of_ranks_waits_for_as_many_steps(framework):
    few, many = (
        part(run(framework=framework, dp=dp, global_batch=dp, shard="zero3"), "parameter gathers")
        for dp in (512, 8192)
    )
    # Two gathers and a scatter in each of 32 layers, in steps of 2.7 us; half may be hidden.
    assert many - few > 0.5 * 3 * 32 * 8192 * 2.7e-6


def test_zero2_reduces_the_gradients_of_every_micro_batch():
    sharded, gradients = (
        part(faster(run(dp=32, global_batch=256, shard=shard), network=0.01), "gradient reduction")
        for shard in ("zero1", "zero2")
    )
    assert gradients > 4 * sharded


def test_zero2_hides_the_gradients_of_a_micro_batch_behind_its_backward_pass():
    once, gradients = (
        part(run(dp=8, global_batch=64, shard=shard), "gradient reduction")
        for shard in ("zero1", "zero2")
    )
    # As large a share of eight reductions is exposed as of one; only one gather follows.
    assert once < gradients < 8 * once


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ({"tp": 3}, "32 heads"),
        ({"pp": 64}, "more than 32 layers"),
        ({"pp": 8, "vp": 8}, "more than 32 layers"),
        ({"vp": 2}, "pp is 1"),
        ({"dp": 3, "global_batch": 8}, "divided over dp = 3"),
        ({"dp": 2, "global_batch": 6, "micro_batch": 2}, "3 sequences per replica"),
        ({"cp": 3}, "cp = 3"),
        ({"tp": 16, "sequence_parallel": True}, "sequence parallelism"),
        ({"tp": 0}, "expected tp to be greater"),
        ({"dp": 0}, "expected dp to be greater"),
        ({"shard": "zero4"}, "expected shard to be 'none'"),
        ({"shard": "fsdp"}, "expected shard to be 'none'"),
        ({"precision": "int8"}, "expected precision to be 'bf16'"),
        ({"recompute": "some"}, "expected recompute to be 'none'"),
    ],
)
def test_impossible_layouts_are_refused_with_the_reason(layout, reason):
    with pytest.raises(ValueError, match=reason):
        predict(run(seq_len=4040, **layout))


@pytest.mark.parametrize("wrong", [{"hidden": 100}, {"layers": 0}, {"heads": 0}, {"kv_heads": 5}])
def test_models_that_do_not_exist(wrong):
    sizes = {"layers": 2, "hidden": 96, "heads": 32, "ffn": 256, "vocab": 1000} | wrong
    with pytest.raises(ValueError, match="expected"):
        validate(Model, sizes)


@pytest.mark.parametrize(
    ("wrong", "reason"), [({"ffn": -1}, "ffn"), ({"head_dim": -8}, "head_dim")]
)
def test_sizes_below_zero_are_not_predicted(wrong, reason):
    with pytest.raises(ValueError, match=f"expected {reason} to be greater"):
        predict(run(replace(LLAMA_8B, **wrong)))


def test_a_sequence_has_tokens():
    with pytest.raises(ValueError, match="expected seq_len of 1 or more, got 0"):
        predict(run(seq_len=0))


LAYOUTS = [
    {"dp": 8, "global_batch": 64, "shard": "zero3"},
    {"tp": 8, "global_batch": 16, "sequence_parallel": True},
    {"tp": 2, "dp": 4, "global_batch": 32, "micro_batch": 2, "sequence_parallel": True},
    {"tp": 4, "pp": 2, "global_batch": 32, "sequence_parallel": True},
]


def _runs(framework):
    return [
        run(model, framework=framework, **layout)
        for model in (LLAMA_8B, LLAMA_70B)
        for layout in LAYOUTS
    ]


def test_three_runs_calibrate_a_slower_site():
    theirs = load_constants().with_profile(
        "theirs", "generic", {"slowdown": 1.5, "tp_exposed": 0.6}
    )
    measured = predict_runs(Runs(_runs("theirs"), theirs)).step_s
    calibrated = calibrate(_runs("generic")[:3], measured[:3].tolist())
    mine = predict_runs(as_calibrated(_runs("generic"), calibrated))
    before = predict_runs(Runs(_runs("generic")))
    errors, blind = (np.abs(one.step_s / measured - 1) for one in (mine, before))
    assert np.median(errors) < np.median(blind) / 3
    widths = [high / low for low, high in (mine.interval_90(), before.interval_90())]
    assert (widths[0] < widths[1]).all()


@pytest.mark.parametrize("times", [[1.0, 2.0], [1.0, 2.0, -3.0], [1.0, 2.0, float("nan")], [1.0]])
def test_calibration_refuses_too_few_runs_and_impossible_times(times):
    with pytest.raises(ValueError, match="3 runs or more"):
        calibrate(_runs("generic")[: max(len(times), 2)], times)


def test_runs_can_be_copied():
    runs = Runs([run(LLAMA_8B)])
    assert copy.copy(runs).layers == copy.deepcopy(runs).layers == runs.layers
