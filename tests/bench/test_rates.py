"""Rates: as many samples as asked for, of the size asked for."""

import math

import pytest
import torch

from labkit.bench import rates


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_matmul_rate_is_flops_over_seconds(monkeypatch, dtype):
    def timed(actions, **_):
        for action in actions.values():
            action()
        return {name: [0.5, 0.25] for name in actions}

    monkeypatch.setattr(rates, "time_interleaved", timed)
    assert rates.time_matmul("cpu", dtype, size=8, repeats=2).flops_per_s == [2 * 8**3 / 0.5, 2 * 8**3 / 0.25]


def test_rates_are_measured():
    samples = rates.time_matmul("cpu", torch.float32, size=64, repeats=2).flops_per_s
    assert len(samples) == 2
    assert all(math.isfinite(rate) and rate > 0 for rate in samples)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_gate_lets_rounding_pass_whatever_the_order_of_additions(dtype):
    """A float32 sum of 8192 products, one after another, as some processors and libraries have it."""
    generator = torch.Generator().manual_seed(1)
    rows, columns = torch.randn(2, 64, 8192, generator=generator).to(dtype)
    one_by_one = torch.zeros(64)
    for k in range(8192):
        one_by_one += rows[:, k].float() * columns[:, k].float()
    exact = (rows.double() * columns.double()).sum(dim=1)
    error = float((one_by_one.to(dtype).double() - exact).norm() / exact.norm())
    assert rates.MatmulTimes(dtype, 8192, [1.0], error, rates.rounding_limit(dtype, 8192)).gate == "ok"
    assert dtype != torch.float32 or error > 8 * torch.finfo(dtype).eps, "more than blocks are off by"


@pytest.mark.parametrize("wrong", [float("nan"), 2.0**-12])
def test_a_wrong_product_has_no_rate(monkeypatch, wrong):
    """NaN, and as far off as TF32 is."""
    right = torch.mm
    monkeypatch.setattr(rates.torch, "mm", lambda a, b, out: right(a, b, out=out).mul_(1 + wrong))
    with pytest.raises(ArithmeticError, match=r"float32 matrices is wrong: error"):
        _ = rates.time_matmul("cpu", torch.float32, size=64, repeats=1).flops_per_s
