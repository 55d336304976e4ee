"""The formulas of memory against what autograd saves and what the ledger counts."""

import pytest

from labkit.costs.memory import (
    PHASES,
    activation_bytes,
    best_segment,
    peak_bytes,
    residual_stream_bytes,
    saved_by_layer,
    state_bytes,
)
from labkit.costs.transformer import TransformerShape, n_parameters
from labkit.nn.transformer import shape_named
from labkit.studies.memory.counting import count_phases

SHAPE = TransformerShape(d_model=48, d_ff=112, n_layers=2, n_heads=3, vocabulary=300)


def test_sixteen_bytes_a_parameter():
    assert sum(state_bytes(SHAPE).values()) == 16 * n_parameters(SHAPE)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_activations_are_counted_tensor_by_tensor(precision):
    counted = count_phases(("full_step",), shape=SHAPE, batch=2, context_length=24, precision=precision)
    start = counted.spans["backward"][0]
    alive = [a for a in counted.ledger.allocations if a.born < start and (a.freed is None or a.freed >= start)]
    activations = sum(a.n_bytes for a in alive if a.category == "activations")
    expected = activation_bytes(SHAPE, 2, 24, precision)
    assert 0 <= activations - expected <= 16  # the loss and its total weight


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("context", [16, 128, 512])
def test_predicted_peaks_are_near_the_counted_ones(phase, precision, context):
    shape = shape_named("nano")
    counted = count_phases((phase,), shape=shape, batch=4, context_length=context, precision=precision)
    predicted = peak_bytes(shape, 4, context, phase=phase, precision=precision)
    assert predicted == pytest.approx(counted.peak(phase).n_bytes, rel=0.05)


@pytest.mark.parametrize("segment", [1, 2, 4])
def test_predicted_peaks_with_checkpointing_are_near_the_counted_ones(segment):
    shape = shape_named("nano")
    counted = count_phases(("full_step",), shape=shape, batch=4, context_length=512, checkpoint_segment=segment).peak(
        "full_step"
    )
    assert peak_bytes(shape, 4, 512, checkpoint_segment=segment) == pytest.approx(counted.n_bytes, rel=0.1)


def test_the_best_segment_is_the_root_of_the_layers_where_a_layer_keeps_what_it_passes_on():
    shape = shape_named("xl")
    ratio = residual_stream_bytes(shape, 4, 512) / sum(saved_by_layer(shape, 4, 512).values())
    assert best_segment(shape, 4, 512) == pytest.approx((shape.n_layers * ratio) ** 0.5)


def test_an_unknown_phase_is_named():
    with pytest.raises(ValueError, match="phase among"):
        peak_bytes(SHAPE, 1, 8, phase="backward")
