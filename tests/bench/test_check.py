"""Correctness checks before anything is timed: errors, what ranks agree on, matmuls."""

import math

import pytest
import torch
import torch.distributed as dist

from labkit.bench import check
from labkit.bench.check import (
    describe_error,
    first_failing_rank,
    largest_difference,
    matrix_product,
    max_over_ranks,
)
from tests.parallel.shared_ranks import on_ranks


def test_an_error_up_to_the_limit_is_ok_and_a_larger_one_or_none_is_wrong():
    assert [describe_error(error, 1e-3) for error in (0.0, 1e-9, 1e-3)] == [None] * 3
    for error in (1.1e-3, math.inf, math.nan):
        assert describe_error(error, 1e-3) == f"error {error:.1e}, at most 1.0e-03 expected"


def test_one_tensor_that_is_missing_zero_or_no_number_is_seen_among_many():
    right = {str(index): torch.arange(1.0, 4.0) * 10.0**-index for index in range(6)}
    assert largest_difference(right, right) == 0
    for name, tensor in right.items():
        assert (
            largest_difference({key: value for key, value in right.items() if key != name}, right)
            == math.inf
        )
        assert largest_difference(right | {name: tensor * 0}, right) == 1
        assert largest_difference(right | {name: tensor * math.nan}, right) == math.inf


@on_ranks(3)
def test_ranks_agree_on_what_any_of_them_found():
    rank = dist.get_rank()
    assert max_over_ranks(float(rank)) == 2.0
    assert max_over_ranks(math.nan if rank == 1 else 0.0) == math.inf
    assert first_failing_rank([0.0, math.inf] if rank == 2 else [-1.0, 0.0]) == (2, [0.0, math.inf])
    assert first_failing_rank([float(rank), 5.0] if rank else [-1.0, 0.0]) == (1, [1.0, 5.0])
    assert first_failing_rank([-1.0, 0.0]) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("batch", [1, 3])
def test_a_matmul_is_right_and_knows_its_arithmetic_and_traffic(dtype, batch, monkeypatch):
    work = matrix_product("cpu", dtype, 8, 4, 2, batch=batch)
    expected = (None, 2 * batch * 8 * 4 * 2, batch * (8 * 4 + 4 * 2 + 8 * 2) * dtype.itemsize)
    assert (work.wrong, work.flops, work.n_bytes) == expected
    right = torch.mm
    for wrong in (math.nan, 2.0**-12):  # as far off as TF32 is
        monkeypatch.setattr(
            check.torch, "mm", lambda a, b, out, wrong=wrong: right(a, b, out=out).mul_(1 + wrong)
        )
        assert matrix_product("cpu", torch.float32, 64, 64, 64).wrong.startswith("error")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_check_lets_rounding_pass_whatever_the_order_of_additions(dtype):
    """A float32 sum of 8192 products, one after another, as some processors and libraries have
    it."""
    generator = torch.Generator().manual_seed(1)
    rows, columns = torch.randn(2, 64, 8192, generator=generator).to(dtype)
    one_by_one = torch.zeros(64)
    for k in range(8192):
        one_by_one += rows[:, k].float() * columns[:, k].float()
    exact = (rows.double() * columns.double()).sum(dim=1)
    error = float((one_by_one.to(dtype).double() - exact).norm() / exact.norm())
    assert describe_error(error, check.rounding_limit(dtype, 8192)) is None
    assert dtype != torch.float32 or error > 8 * torch.finfo(dtype).eps, (
        "more than blocks are off by"
    )
