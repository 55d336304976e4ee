"""Sums of whole numbers over ranks: in every type the right one is exact, and each single mistake
is seen.

Ranks are rows of a matrix here: no process is needed to add them up.
"""

import math
from itertools import product

import pytest
import torch

from labkit.bench.checksums import PERIOD, fill_part, first_deviation
from tests.cases import thinned

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
WORLDS = [*range(2, 17), 22, 32, 64]
LENGTHS = [1, PERIOD + 5]
QUICK = {2, 3, 8, 16, 22, 64}  # 22 and more: parts of the narrowest type repeat


def _parts(ranks, length, dtype):
    parts = torch.empty(ranks, length, dtype=dtype)
    for rank, part in enumerate(parts):
        fill_part(part, rank, ranks)
    return parts


def _is_off(got, ranks):
    return first_deviation(got.clone(), ranks) is not None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", thinned(WORLDS, lambda ranks: ranks in QUICK))
def test_the_right_sum_is_exact_in_any_order(dtype, ranks):
    parts = _parts(ranks, 300, dtype)
    for order in (parts, parts.flip(0), parts[torch.randperm(ranks)]):
        total = torch.zeros(300, dtype=dtype)
        for part in order:
            total += part  # rounded to the type every time, if there were something to round
        assert not _is_off(total, ranks)


@pytest.mark.parametrize(
    ("ranks", "length", "dtype"),
    thinned(
        product(WORLDS, LENGTHS, DTYPES),
        lambda ranks, length, dtype: (
            ranks in QUICK and (ranks < 64 if length > 1 else dtype == torch.bfloat16)
        ),
    ),
)
def test_each_rank_left_out_counted_twice_or_in_place_of_another_is_seen_at_each_element(
    dtype, ranks, length
):
    parts = _parts(ranks, length, dtype).double()
    right = parts.sum(0)
    for rank in range(ranks):
        for change in (-parts[rank], parts[rank], parts[rank - 1 if rank else 1] - parts[rank]):
            assert (change != 0).all()
            assert _is_off((right + change).to(dtype), ranks)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 3, 8, 16])
def test_a_chunk_or_an_element_that_is_not_reduced_stale_or_in_another_place_is_seen(dtype, ranks):
    parts = _parts(ranks, 1000, dtype)
    right = parts.double().sum(0).to(dtype)
    for own in parts[:2]:
        for chunk in (*range(ranks), "last element"):
            where = (
                slice(-1, None) if chunk == "last element" else slice(chunk * 1000 // ranks, None)
            )
            for stale in (own[where], torch.zeros_like(own[where]), own[where] * math.nan):
                wrong = right.clone()
                wrong[where] = stale
                assert _is_off(wrong, ranks)
    first, second = right.tensor_split(ranks)[:2]
    length = min(len(first), len(second))
    assert _is_off(torch.cat([second[:length], first[:length], right[2 * length :]]), ranks)
    assert _is_off(right.roll(1), ranks)
