"""What is said of an error before anything is timed."""

import math

import pytest

from labkit.bench.gate import verdict


@pytest.mark.parametrize("error", [0.0, 1e-9, 1e-3])
def test_an_error_up_to_the_limit_is_ok(error):
    assert verdict(error, 1e-3) == "ok"


@pytest.mark.parametrize("error", [1.1e-3, math.inf, math.nan])
def test_a_larger_one_or_none_at_all_is_wrong_and_says_by_how_much(error):
    assert verdict(error, 1e-3) == f"wrong: error {error:.1e}, at most 1.0e-03 expected"
