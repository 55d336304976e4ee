"""The model of a step: what must hold of any prediction, whatever its constants."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.scaling.constants import load_constants
from labkit.scaling.hardware import HARDWARE
from labkit.scaling.layout import RECOMPUTE, SHARDS, why_impossible
from labkit.scaling.model import Model
from labkit.scaling.prediction import predict, predict_runs
from labkit.scaling.runs import Run, Runs
from labkit.scaling.step_time import PARTS, breakdown, soft_maximum, step_s
from tests.scaling.conftest import GPT_1B, LLAMA_8B, LLAMA_70B, faster, ideal_constants, run

FRAMEWORKS = ("generic", "nanotron", "vtrain", "mosaic", "nemo", "maxtext", "megatron", "torchtitan", "fms")


def powers(largest):
    return st.sampled_from([2**exponent for exponent in range(largest.bit_length())])


@st.composite
def possible_runs(draw):
    """Runs that `why_impossible` has nothing against."""
    model = draw(st.sampled_from([GPT_1B, LLAMA_8B, LLAMA_70B]))
    tp, pp, cp, dp = draw(powers(8)), draw(powers(8)), draw(powers(2)), draw(powers(64))
    micro_batch = draw(powers(4))
    one = run(
        model,
        draw(st.sampled_from(sorted(HARDWARE))),
        seq_len=draw(st.sampled_from([512, 2048, 8192])),
        framework=draw(st.sampled_from(FRAMEWORKS)),
        tp=tp,
        sequence_parallel=draw(st.booleans()),
        pp=pp,
        vp=draw(powers(2)) if pp > 1 else 1,
        cp=cp,
        dp=dp,
        shard=draw(st.sampled_from(SHARDS)),
        micro_batch=micro_batch,
        global_batch=micro_batch * dp * draw(powers(16)),
        recompute=draw(st.sampled_from(RECOMPUTE)),
        precision=draw(st.sampled_from(["bf16", "fp16", "fp8"])),
        compiled=draw(st.booleans()),
    )
    assert why_impossible(one.layout, one.model, one.seq_len) is None
    return one


def seconds(one, constants=None):
    runs = Runs.of([one])
    return float(step_s(breakdown(runs, (constants or load_constants()).rows(runs)))[0])


def part(one, name, constants=None):
    runs = Runs.of([one])
    return float(breakdown(runs, (constants or load_constants()).rows(runs))[name][0])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(possible_runs())
def test_every_breakdown_adds_up_and_nothing_is_negative(one):
    found = predict(one.model, one.hardware, one.layout, seq_len=one.seq_len, framework=one.framework)
    assert np.isfinite(found.step_s)
    assert found.step_s > 0
    assert sum(found.parts_s.values()) == pytest.approx(found.step_s, rel=1e-9)
    assert min(found.parts_s.values()) >= -1e-12 * found.step_s
    assert min(found.hidden_s.values()) >= -1e-12 * found.step_s
    assert len(found.memory_gib) == one.layout.pp
    assert max(sum(stage.values()) for stage in found.memory_gib) == pytest.approx(found.peak_gib, rel=1e-9)
    assert all(value >= -1e-9 for stage in found.memory_gib for value in stage.values())
    low, high = found.interval_90
    assert low <= found.interval_80[0] <= found.step_s <= found.interval_80[1] <= high
    assert 0 <= found.out_of_memory <= 1
    assert 0 < found.mfu < 1


@settings(max_examples=40, deadline=None, derandomize=True)
@given(possible_runs(), st.sampled_from(["peak", "memory", "link", "network"]), st.floats(1.01, 50))
def test_better_hardware_is_never_slower(one, name, factor):
    assert seconds(faster(one, **{name: factor})) <= seconds(one) * (1 + 1e-9)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(possible_runs(), st.floats(0.1, 10))
def test_seconds_are_seconds(one, factor):
    """All rates times k and all times over k is the same machine with another clock: the step is k times shorter."""
    constants = load_constants()
    table = {quantity: dict(values) for quantity, values in constants.table.items()}
    for quantity in table:
        if quantity.endswith("_s"):
            table[quantity] = {key: value / factor for key, value in table[quantity].items()}
    other = faster(one, peak=factor, memory=factor, link=factor, network=factor)
    assert seconds(other, replace(constants, table=table)) * factor == pytest.approx(seconds(one), rel=1e-9)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(possible_runs(), st.sampled_from(["layers", "ffn", "vocab"]))
def test_larger_models_take_longer_and_more_memory(one, name):
    larger = replace(one, model=replace(one.model, **{name: 2 * getattr(one.model, name)}))
    small, large = (predict_runs(Runs.of([either])) for either in (one, larger))
    assert large.step_s[0] > small.step_s[0]
    assert large.peak_gib[0] >= small.peak_gib[0] * (1 - 1e-9)


@settings(max_examples=30, deadline=None, derandomize=True)
@given(possible_runs())
def test_a_row_does_not_depend_on_its_neighbors(one):
    others = [run(LLAMA_70B, "a100", tp=8, pp=16, framework="megatron", global_batch=64), run(GPT_1B)]
    alone, among = predict_runs(Runs.of([one])), predict_runs(Runs.of([*others, one]))
    assert among.step_s[2] == pytest.approx(alone.step_s[0], rel=1e-12)
    assert among.peak_gib[2] == pytest.approx(alone.peak_gib[0], rel=1e-12)


@pytest.mark.parametrize("layout", [{"tp": 8}, {"dp": 8, "global_batch": 8}, {"pp": 8, "global_batch": 8}])
def test_infinite_bandwidth_leaves_no_communication(layout):
    endless = faster(run(seq_len=2048, **layout), link=1e12, network=1e12)
    parts = ("tensor_parallel_s", "data_parallel_s", "gather_s", "pipeline_transfer_s")
    assert sum(part(endless, name, ideal_constants()) for name in parts) < 1e-9


def test_one_gpu_communicates_nothing():
    runs = Runs.of([run(GPT_1B)])
    parts = breakdown(runs, load_constants().rows(runs))
    silent = (
        "tensor_parallel_s",
        "context_parallel_s",
        "data_parallel_s",
        "gather_s",
        "pipeline_transfer_s",
        "bubble_s",
        "straggler_s",
    )
    assert {name: float(parts[name][0]) for name in silent} == dict.fromkeys(silent, 0.0)


def test_at_the_peak_a_step_takes_its_flops_over_the_peak():
    """Ideal constants, endless memory bandwidth, one GPU: only arithmetic is left (half of attention's scores)."""
    one = faster(run(seq_len=2048), memory=1e12)
    runs = Runs.of([one])
    matrices = LLAMA_8B.layers * (runs.layer_parameters[0] - 2 * LLAMA_8B.hidden) + runs.embedding_parameters[0]
    attention = LLAMA_8B.layers * 3.5 * 4 * 2048**2 * LLAMA_8B.hidden / 2
    expected = (6 * 2048 * matrices + attention) / (one.hardware.peak_tflops * 1e12)
    assert seconds(one, ideal_constants()) == pytest.approx(expected, rel=1e-3)


def test_without_overlap_all_data_parallel_communication_is_exposed():
    """Megatron-LM of 2021 reduces after the last backward pass; the others hide a share of the same time."""
    alone, overlapping = (
        run(GPT_1B, "a100", dp=8, global_batch=64, framework=framework) for framework in ("megatron", "generic")
    )
    assert part(alone, "hidden_data_parallel_s") == 0
    assert part(alone, "data_parallel_s") > 0
    assert part(overlapping, "hidden_data_parallel_s") > 0


def test_recomputation_costs_a_forward_pass():
    """Full recomputation makes three passes four: 4/3 of the products' time.

    Where it stops early, the last product runs but once: of 2 h (h + kv) + 3 h f columns, all but h f again.
    """
    kept, again = (part(run(recompute=how, framework="megatron"), "gemm_s") for how in ("none", "full"))
    assert again / kept == pytest.approx(4 / 3, rel=0.02)
    kept, again = (part(run(recompute=how), "gemm_s") for how in ("none", "full"))
    h, kv, f = LLAMA_8B.hidden, LLAMA_8B.hidden / 4, LLAMA_8B.ffn
    last = h * f / (2 * h * (h + kv) + 3 * h * f)
    assert again / kept == pytest.approx((4 - last) / 3, rel=0.02)


def test_a_pipeline_of_more_micro_batches_idles_less():
    shares = [
        part(one, "bubble_s") / seconds(one)
        for one in (run(pp=4, global_batch=batch, framework="megatron") for batch in (4, 16, 64))
    ]
    assert shares == sorted(shares, reverse=True)


def test_the_soft_maximum_is_never_below_the_maximum():
    a, b = np.array([1.0, 0.0, 5.0]), np.array([1.0, 2.0, 1e-3])
    assert (soft_maximum(a, b) >= np.maximum(a, b)).all()
    assert soft_maximum(a, b)[1] == 2.0


def test_an_impossible_layout_is_refused_with_its_reason():
    one = run(tp=3)
    with pytest.raises(ValueError, match="32 heads"):
        predict(one.model, one.hardware, one.layout, seq_len=one.seq_len)


def test_all_parts_are_named():
    runs = Runs.of([run()])
    parts = breakdown(runs, load_constants().rows(runs))
    assert set(PARTS) == {name for name in parts if not name.startswith("hidden_")}
    assert {field.name for field in fields(Run)} == {"model", "hardware", "layout", "seq_len", "framework"}


def test_a_tied_model_has_one_matrix_less():
    tied = replace(LLAMA_8B, tied=True)
    smaller, larger = (predict_runs(Runs.of([run(model)])).peak_gib[0] for model in (tied, LLAMA_8B))
    assert smaller < larger
    assert isinstance(tied, Model)
