"""Layouts that cannot run, and why."""

import pytest

from labkit.scaling.hardware import HARDWARE, find_hardware
from labkit.scaling.layout import Layout, why_impossible
from labkit.scaling.model import Model
from tests.scaling.conftest import LLAMA_8B


@pytest.mark.parametrize(
    ("layout", "reason"),
    [
        ({"tp": 3}, "32 heads"),
        ({"pp": 64}, "more than 32 layers"),
        ({"pp": 8, "vp": 8}, "more than 32 layers"),
        ({"vp": 2}, "pp is 1"),
        ({"dp": 3, "global_batch": 8}, "divided over dp = 3"),
        ({"dp": 2, "global_batch": 6, "micro_batch": 2}, "3 sequences a replica"),
        ({"cp": 3}, "cp = 3"),
        ({"tp": 0}, "tp of 1 or more"),
        ({"micro_batch": 0}, "micro_batch of 1 or more"),
        ({"shard": "zero4"}, "shard among"),
        ({"precision": "int8"}, "precision among"),
        ({"recompute": "some"}, "recompute among"),
        ({"tp": 16, "sequence_parallel": True, "cp": 1}, "sequence parallelism"),
    ],
)
def test_why_a_layout_is_impossible(layout, reason):
    assert reason in why_impossible(Layout(**layout), LLAMA_8B, 4040)


def test_nothing_is_wrong_with_a_possible_one():
    assert why_impossible(Layout(tp=8, pp=4, dp=2, global_batch=16, sequence_parallel=True), LLAMA_8B, 4096) is None


@pytest.mark.parametrize("wrong", [{"hidden": 100}, {"layers": 0}, {"kv_heads": 5}])
def test_models_that_do_not_exist(wrong):
    sizes = {"layers": 2, "hidden": 96, "heads": 32, "ffn": 256, "vocab": 1000} | wrong
    with pytest.raises(ValueError, match="expected"):
        Model(**sizes)


def test_hardware_is_found_by_short_names_and_never_guessed():
    assert find_hardware("H100").name == "H100-SXM-80GB"
    assert find_hardware("a100-sxm-40gb").memory_gib == 40
    assert find_hardware("NVIDIA A100-SXM").name == "A100-SXM-80GB"
    assert find_hardware("rtx 4090").name == find_hardware("4090").name == "RTX-4090-24GB"
    assert find_hardware("B200-SXM-192GB").memory_gib == 192
    assert find_hardware("B200-192GB").peak_tflops == find_hardware("b200").peak_tflops
    assert find_hardware("A100-PCIe-80GB").link_gb_s == 32
    assert all(find_hardware(name) is card and card.source for name, card in HARDWARE.items())


@pytest.mark.parametrize("name", ["H900", "", "h", "h100-800gb", "-80gb", "A100-SXM-9999999GB", "tpu"])
def test_hardware_that_is_not_declared(name):
    with pytest.raises(ValueError, match="unknown GPU"):
        find_hardware(name)


def test_the_sequences_of_a_replica_are_cut_into_micro_batches():
    assert Layout(dp=4, micro_batch=2, global_batch=48).micro_batches == 6
