"""Runs that several tests ask about."""

from dataclasses import replace

import pytest

from labkit.scaling.constants import load_constants
from labkit.scaling.hardware import find_hardware
from labkit.scaling.models import Model
from labkit.scaling.published import load_published
from labkit.scaling.runs import Layout, Run

GPT_1B = Model(layers=24, hidden=2048, heads=16, ffn=8192, vocab=51200, ffn_gated=False, tied=True)
LLAMA_8B = Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256)
LLAMA_70B = Model(layers=80, hidden=8192, heads=64, kv_heads=8, ffn=28672, vocab=128256)


def run(model=LLAMA_8B, gpu="h100", *, seq_len=4096, framework="generic", **layout):
    """A run by the parts in which it differs from an 8B model on one H100."""
    return Run(model, find_hardware(gpu), Layout(**layout), seq_len, framework)


def faster(one, **changes):
    """The same run on other hardware; `peak`, `memory`, `link` and `network` are factors."""
    names = {
        "peak": "peak_tflops",
        "memory": "memory_gb_s",
        "link": "link_gb_s",
        "network": "network_gbps",
    }
    values = {
        names[name]: getattr(one.hardware, names[name]) * factor for name, factor in changes.items()
    }
    if "peak" in changes:
        values["matmul_tflops"] = one.hardware.matmul_tflops * changes["peak"]
    return replace(one, hardware=replace(one.hardware, **values))


def at_peak(one):
    """The same run on a GPU whose best matmuls reach its peak."""
    return replace(one, hardware=replace(one.hardware, matmul_tflops=one.hardware.peak_tflops))


ONES = {
    "slowdown",
    "attention_slowdown",
    "gemm_efficiency",
    "attention_efficiency",
}
ONES |= {"link_efficiency", "network_efficiency", "memory_efficiency"}
ZEROS = {
    "gemm_k",
    "gemm_wave",
    "nccl_call_s",
    "network_step_s",
    "launch_s",
}


def ideal_constants():
    """Everything reaches its peak, and nothing has a latency."""
    constants = load_constants()
    ideal = {name: {"default": 1.0} for name in ONES} | {name: {"default": 0.0} for name in ZEROS}
    return replace(constants, table={**constants.table, **ideal})


@pytest.fixture(scope="session")
def published():
    return load_published()
