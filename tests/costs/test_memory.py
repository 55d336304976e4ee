"""The formulas of memory against what autograd saves and what the ledger counts."""

import math
from dataclasses import replace
from itertools import product

import pytest
import torch

from labkit.costs.memory import activation_bytes, peak_bytes, state_bytes
from labkit.costs.transformer import SIZES, TransformerShape, n_parameters
from labkit.nn import training
from labkit.nn.attention import softmax_scale
from labkit.studies.memory.counting import count_phases
from tests.cases import thinned

SHAPE = TransformerShape(d_model=48, d_ff=112, n_layers=2, n_heads=3, vocabulary=300)


def _softmax_in_float32(q, k, v, causal):
    """Explicit attention as CUDA's autocast has it, which CPU autocast leaves to whoever casts."""
    scores = (q @ k.transpose(-2, -1)) * softmax_scale(q)
    seen = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    return torch.softmax(scores.masked_fill(~seen, -math.inf).float(), dim=-1) @ v


def _count(
    phase="full_step", precision="float32", source=SHAPE, batch=2, context_length=24, **others
):
    return count_phases(
        (phase,),
        source=source,
        batch=batch,
        context_length=context_length,
        precision=precision,
        **others,
    )


def _activations(counted):
    start = min(a.born for a in counted.ledger.allocations if a.phase == "backward")
    alive = [
        a
        for a in counted.ledger.allocations
        if a.born < start and (a.freed is None or a.freed >= start)
    ]
    return sum(a.n_bytes for a in alive if a.category == "activations")


@pytest.mark.parametrize(
    ("stage", "n_bytes"), [("ddp", 16), ("zero1", 10), ("zero2", 8), ("zero3", 4)]
)
def test_bytes_per_parameter_on_four_ranks(stage, n_bytes):
    assert sum(state_bytes(100, stage, 4).values()) == 100 * n_bytes


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_activations_are_counted_tensor_by_tensor(precision):
    expected = activation_bytes(SHAPE, 2, 24, precision)
    # the loss and its total weight
    assert 0 <= _activations(_count(precision=precision)) - expected <= 16


def test_on_cuda_autocast_keeps_the_softmax_in_float32_and_a_copy():
    counted = _count(precision="bfloat16", attention=_softmax_in_float32)
    expected = activation_bytes(SHAPE, 2, 24, "bfloat16", device="cuda")
    assert 0 <= _activations(counted) - expected <= 16
    assert expected > activation_bytes(SHAPE, 2, 24, "bfloat16")
    assert activation_bytes(SHAPE, 2, 24, device="cuda") == activation_bytes(SHAPE, 2, 24)
    long = {"batch": 4, "sequence": 512, "precision": "bfloat16"}
    peak = _count(
        precision="bfloat16",
        source=SIZES["nano"],
        batch=4,
        context_length=512,
        attention=_softmax_in_float32,
    )
    assert peak_bytes(SIZES["nano"], **long, device="cuda") == pytest.approx(
        peak.peak("full_step").n_bytes, rel=0.02
    )


def test_the_optimizer_of_cuda_has_temporaries_of_all_parameters(monkeypatch):
    own = training.adamw
    monkeypatch.setattr(
        training, "adamw", lambda parameters, device: own(parameters, torch.device("cuda"))
    )
    counted = _count()
    assert any(a.phase == "optimizer" for a in counted.peak("full_step").live)
    expected = peak_bytes(SHAPE, 2, 24, device="cuda")
    assert expected >= 20 * n_parameters(SHAPE)
    assert counted.peak("full_step").n_bytes == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(
    ("precision", "context"),
    thinned(
        product(("float32", "bfloat16"), (16, 128, 512)),
        lambda *case: case in (("float32", 16), ("bfloat16", 512)),
    ),
)
def test_predicted_peaks_are_near_the_counted_ones(precision, context):
    shape = SIZES["nano"]
    phases = {"forward": False, "full_step": True}
    counted = count_phases(
        [*phases], source=shape, batch=4, context_length=context, precision=precision
    )
    for phase, is_full_step in phases.items():
        predicted = peak_bytes(shape, 4, context, is_full_step=is_full_step, precision=precision)
        assert predicted == pytest.approx(counted.peak(phase).n_bytes, rel=0.05), phase


@pytest.mark.parametrize(
    ("vocabulary", "segment"),
    thinned(
        [(10_000, 1), (10_000, 2), (10_000, 4), (300, 4)], lambda vocabulary, _: vocabulary == 300
    ),
)
def test_predicted_peaks_with_checkpointing_are_near_the_counted_ones(vocabulary, segment):
    """With few words the segment that is computed again decides."""
    shape = replace(SIZES["nano"], vocabulary=vocabulary)
    counted = count_phases(
        ("full_step",), source=shape, batch=4, context_length=512, checkpoint_segment=segment
    ).peak("full_step")
    assert peak_bytes(shape, 4, 512, checkpoint_segment=segment) == pytest.approx(
        counted.n_bytes, rel=0.1
    )
