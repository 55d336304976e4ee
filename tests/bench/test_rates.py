"""Products: what they count as, and which errors are no rounding."""

import pytest
import torch

from labkit.bench import rates
from labkit.bench.check import verdict


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_product_is_right_and_knows_its_arithmetic_and_traffic(dtype, batch):
    work = rates.matrix_product("cpu", dtype, 8, 4, 2, batch=batch)
    assert work.gate == "ok"
    assert work.flops == 2 * batch * 8 * 4 * 2
    assert work.n_bytes == batch * (8 * 4 + 4 * 2 + 8 * 2) * dtype.itemsize


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
    assert verdict(error, rates.rounding_limit(dtype, 8192)) == "ok"
    assert dtype != torch.float32 or error > 8 * torch.finfo(dtype).eps, "more than blocks are off by"


@pytest.mark.parametrize("wrong", [float("nan"), 2.0**-12])
def test_a_wrong_product_is_seen(monkeypatch, wrong):
    """NaN, and as far off as TF32 is."""
    right = torch.mm
    monkeypatch.setattr(rates.torch, "mm", lambda a, b, out: right(a, b, out=out).mul_(1 + wrong))
    assert rates.matrix_product("cpu", torch.float32, 64, 64, 64).gate.startswith("wrong: error")
