"""Rounding of products: let pass whatever the order of additions; TF32 is seen."""

import pytest
import torch

from labkit.bench.gate import verdict
from labkit.bench.rates import rounding_limit


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
    assert verdict(error, rounding_limit(dtype, 8192)) == "ok"
    assert dtype != torch.float32 or error > 8 * torch.finfo(dtype).eps, "more than blocks are off by"


@pytest.mark.parametrize("wrong", [float("nan"), 2.0**-12])
def test_a_wrong_product_is_seen(wrong):
    """NaN, and as far off as TF32 is."""
    assert verdict(wrong, rounding_limit(torch.float32, 64)) != "ok"
