"""When parallelism pays: margins against cases worked by hand, their limits, and what hypothesis finds."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit.scaling.constants import load_constants
from labkit.scaling.paying import KINDS, margins, tokens_needed
from labkit.scaling.runs import Runs
from labkit.scaling.step_time import PARTS
from tests.scaling.conftest import GPT_1B, LLAMA_8B, faster, ideal_constants, run
from tests.scaling.test_step_time import possible_runs


def _margins(one, constants=None):
    runs = Runs.of([one])
    found = margins(runs, (constants or ideal_constants()).rows(runs))
    return {name: float(values[0]) for name, values in found.items()}


def test_sharding_needs_peak_over_bandwidth_tokens():
    """The scaling book, "Training", FSDP: compute-bound above C/W tokens a chip; here 989.4e12 / 450e9 = 2199."""
    runs = Runs.of([run(dp=8, shard="zero3", global_batch=8)])
    needed = tokens_needed(runs, ideal_constants().rows(runs))["sharding"]
    assert needed[0] == pytest.approx(2199 * 7 / 8, rel=0.01)  # (n-1)/n of a ring of eight


def test_data_parallelism_needs_two_thirds_of_that_a_step_with_gradients_of_two_bytes():
    """4 P bytes to 6 P T FLOPs: T = 2 C / 3 W; our gradients have four bytes unless a framework says otherwise."""
    runs = Runs.of([run(dp=8, global_batch=64, framework=name) for name in ("generic", "mosaic")])
    needed = tokens_needed(runs, ideal_constants().rows(runs))["data"]
    assert needed == pytest.approx([2 * 2 / 3 * 2199 * 7 / 8, 2 / 3 * 2199 * 7 / 8], rel=0.01)


def test_tensor_parallelism_of_llama_8b_on_nvlink():
    """6 * 218.1e6 FLOPs a token and layer, 8 half rings of 2 * 4096 bytes: 9.08 other ranks at the declared peaks."""
    assert _margins(run(LLAMA_8B, tp=2))["tensor"] == pytest.approx(9.08, rel=0.01)
    assert _margins(run(LLAMA_8B, tp=8))["tensor"] == pytest.approx(9.08 / 7, rel=0.01)


def test_the_pipeline_of_megatron_idles_63_of_512():
    """arXiv:2104.04473, section 2.2: (p - 1) / m, over v if interleaved."""
    one = run(replace(GPT_1B, layers=128), "a100", pp=64, global_batch=512)
    assert _margins(one)["pipeline"] == pytest.approx(512 / 63)
    assert _margins(replace(one, layout=replace(one.layout, vp=2)))["pipeline"] == pytest.approx(1024 / 63)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(possible_runs(), st.floats(1.1, 50))
def test_margins_are_numbers_without_a_unit_and_grow_with_bandwidth(one, factor):
    constants = load_constants()
    here, again = _margins(one, constants), _margins(faster(one, peak=factor, link=factor, network=factor), constants)
    wider = _margins(faster(one, link=factor, network=factor), constants)
    slower = _margins(faster(one, peak=factor), constants)
    for name, margin in here.items():
        if name == "pipeline":
            continue
        assert again[name] == pytest.approx(margin, rel=1e-9, nan_ok=True)
        assert wider[name] == pytest.approx(factor * margin, rel=1e-9, nan_ok=True)
        assert slower[name] == pytest.approx(margin / factor, rel=1e-9, nan_ok=True)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(possible_runs())
def test_what_is_not_used_has_no_margin(one):
    layout, found = one.layout, _margins(one)
    replicas, gathers = layout.dp * layout.cp > 1, layout.shard in ("zero3", "hsdp")
    used = {"data": replicas and not gathers, "sharding": replicas and gathers, "tensor": layout.tp > 1}
    used |= {"context": layout.cp > 1, "pipeline": layout.pp > 1}
    assert {name for name, margin in found.items() if np.isfinite(margin)} == {name for name in used if used[name]}


def test_every_kind_costs_a_part_of_the_step():
    assert {kind.part for kind in KINDS} <= set(PARTS)
