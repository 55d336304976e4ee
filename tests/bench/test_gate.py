"""What is said of an error before anything is timed."""

import math

import pytest
import torch

from labkit.bench.gate import largest_difference, verdict


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
