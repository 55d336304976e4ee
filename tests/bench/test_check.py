"""What is said of an error before anything is timed."""

import math

import pytest
import torch
import torch.distributed as dist

from labkit.bench.check import first_failing_rank, largest_difference, max_over_ranks, verdict
from labkit.parallel.launch import run_ranks


@pytest.mark.parametrize("error", [0.0, 1e-9, 1e-3])
def test_an_error_up_to_the_limit_is_ok(error):
    assert verdict(error, 1e-3) == "ok"


@pytest.mark.parametrize("error", [1.1e-3, math.inf, math.nan])
def test_a_larger_one_or_none_at_all_is_wrong_and_says_by_how_much(error):
    assert verdict(error, 1e-3) == f"wrong: error {error:.1e}, at most 1.0e-03 expected"


def test_one_tensor_that_is_missing_zero_or_no_number_is_seen_among_many():
    right = {str(index): torch.arange(1.0, 4.0) * 10.0**-index for index in range(6)}
    assert largest_difference(right, right) == 0
    for name, tensor in right.items():
        assert largest_difference({key: value for key, value in right.items() if key != name}, right) == math.inf
        assert largest_difference(right | {name: tensor * 0}, right) == 1
        assert largest_difference(right | {name: tensor * math.nan}, right) == math.inf


def _agreed():
    rank = dist.get_rank()
    return {
        "largest": max_over_ranks(float(rank)),
        "no number": max_over_ranks(math.nan if rank == 1 else 0.0),
        "found by the last": first_failing_rank([0.0, math.inf] if rank == 2 else [-1.0, 0.0]),
        "found by two": first_failing_rank([float(rank), 5.0] if rank else [-1.0, 0.0]),
        "found by none": first_failing_rank([-1.0, 0.0]),
    }


def test_ranks_agree_on_what_any_of_them_found():
    found = run_ranks(_agreed, world_size=3)
    assert found[0] == found[1] == found[2]
    assert found[0] == {
        "largest": 2.0,
        "no number": math.inf,
        "found by the last": [2, [0.0, math.inf]],
        "found by two": [1, [1.0, 5.0]],
        "found by none": None,
    }
