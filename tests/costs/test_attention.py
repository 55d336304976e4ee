"""Formulas for attention against numbers worked out by hand, and against what autograd saves."""

import pytest
import torch

from labkit.bench.memory import saved_for_backward
from labkit.costs.attention import explicit_peak, explicit_saved, forward_flops, tiled_saved
from labkit.nn.attention import naive_attention
from labkit.nn.tiled_attention import TiledAttention


def test_flops_of_the_textbook_case():
    """16 heads, 16384 tokens, head dimension 64: 2 products of 2 s^2 d operations a head."""
    full = forward_flops(16, 16384, 64, causal=False)
    assert full == 16 * 2 * 2 * 16384**2 * 64
    assert forward_flops(16, 16384, 64, causal=True) == full / 2


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_explicit_and_tiled_attention_save_is_what_autograd_counts(causal, dtype):
    q, k, v = (torch.randn(3, 40, 16, dtype=dtype).requires_grad_() for _ in range(3))
    _, saved = saved_for_backward(lambda: naive_attention(q, k, v, causal))
    assert sorted(saved.values()) == sorted(
        explicit_saved(3, 40, 16, dtype.itemsize, causal=causal).values()
    )
    _, saved = saved_for_backward(lambda: TiledAttention.apply(q, k, v, causal))
    assert sorted(saved.values()) == sorted(tiled_saved(3, 40, 16, dtype.itemsize).values())


def test_the_peak_holds_three_matrices_and_what_was_saved():
    peak = explicit_peak(2, 100, 8, 4, causal=False)
    assert sum(n == 2 * 100 * 100 * 4 for n in peak.values()) == 3
    assert explicit_saved(2, 100, 8, 4, causal=False).items() <= peak.items()
