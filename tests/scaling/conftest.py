"""Runs that several tests ask about."""

from dataclasses import replace
from pathlib import Path

import pytest

from labkit.scaling.constants import Constants, table_of
from labkit.scaling.declared import PARENTS
from labkit.scaling.hardware import find_hardware
from labkit.scaling.layout import Layout
from labkit.scaling.model import Model
from labkit.scaling.runs import Run, Runs
from labkit.scaling.table import read_rows

DATA = Path(__file__).parents[2] / "data" / "reference" / "scaling"

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
    values = {names[name]: getattr(one.hardware, names[name]) * factor for name, factor in changes.items()}
    return replace(one, hardware=replace(one.hardware, **values))


def ideal_constants():
    """Everything reaches its peak, and nothing has a latency."""
    ones = ("gemm_efficiency", "attention_efficiency", "link_efficiency", "network_efficiency", "memory_efficiency")
    zeros = ("gemm_k", "gemm_wave", "attention_head", "nccl_call_s", "network_step_s", "launch_s", "launch_tp_s")
    zeros = (*zeros, "node_spread")
    table = {quantity: dict(values) for quantity, values in table_of({}).items()}
    for names, value in ((ones, 1.0), (zeros, 0.0)):
        for name in names:
            table[name] = dict.fromkeys(table[name], value)
    quantiles = {"never seen": [-0.1, -0.05, 0.05, 0.1], "calibrated": [-0.1, -0.05, 0.05, 0.1]}
    seen = {
        "architectures": ["ampere", "hopper"],
        "frameworks": [],
        "gpus": 1e9,
        "seq_len": 1e9,
        "cp": 1e9,
        "shards": [],
    }
    return Constants(table, quantiles, seen, PARENTS)


@pytest.fixture(scope="session")
def published_rows():
    return read_rows(DATA / "training_runs.csv")


@pytest.fixture(scope="session")
def published_runs(published_rows):
    return Runs.of([row.run for row in published_rows])
