"""The check of the attention labs: right results pass, also in half precision; a single wrong row
fails."""

from functools import cache
from itertools import product
from types import SimpleNamespace

import pytest
import torch

from labkit.nn import attention_problem
from labkit.nn.attention import naive_attention
from labkit.nn.attention_implementations import IMPLEMENTATIONS
from labkit.nn.attention_problem import ROWS_AT_ONCE, AttentionProblem, Passes, check
from labkit.studies.attention.worker import FLOAT64_FLOP_PER_S, AttentionPoint
from tests.cases import thinned

LONG = ROWS_AT_ONCE + 37
F64 = torch.float64
F32 = torch.float32
BF16 = torch.bfloat16
F16 = torch.float16
# Every length with and without a mask, each dtype with each length; `make test-all` has them all
# with each other.
TOGETHER = [(50, False, F32), (50, True, BF16), (50, True, F64), (50, False, F16)]
TOGETHER += [(LONG, True, F32), (LONG, False, BF16)]
EVERY = thinned(
    product([50, LONG], [False, True], [F64, F32, BF16, F16]), lambda *case: case in TOGETHER
)
FEW_ROWS = [(16, True, F32), (16, False, BF16), (16, True, F16)]


@cache
def _problem(sequence, causal, dtype):
    return AttentionProblem((2, sequence, 32), dtype, "cpu", causal=causal)


def _verdict(attend, sequence, causal, dtype):
    problem = _problem(sequence, causal, dtype)
    return check(problem, Passes(problem, attend).run_checked())[1]


RIGHT = product([16, 50, LONG], [False, True], [F32, BF16, F16])


@pytest.mark.parametrize(
    ("sequence", "causal", "dtype"), thinned(RIGHT, lambda *case: case in [*TOGETHER, *FEW_ROWS])
)
@pytest.mark.parametrize("name", ["explicit", "tiled", "sdpa_math", "sdpa"])
def test_right_results_pass(name, dtype, sequence, causal):
    assert _verdict(IMPLEMENTATIONS[name], sequence, causal, dtype) is None
    reference = _problem(sequence, causal, dtype).reference
    assert reference.limit < 0.02
    assert reference.row_limit < 0.1


NAN = float("nan")
ROWS = [((0, row), value) for row in (-1, 7) for value in (0.0, NAN)]
# of rows, a head, all
CHANGES = [*ROWS, ((0, 7), (0, 6)), (1, 0.0), (1, NAN), (..., 0.0), (..., NAN)]


@pytest.mark.parametrize(("sequence", "causal", "dtype"), EVERY)
def test_a_row_or_head_that_is_missing_no_number_or_another_one_fails(sequence, causal, dtype):
    problem = _problem(sequence, causal, dtype)
    right = Passes(problem, naive_attention).run_checked()
    for tensor, (place, value) in product(range(4), CHANGES):
        results = [x.clone() for x in right]
        results[tensor][place] = results[tensor][value] if isinstance(value, tuple) else value
        verdict = check(problem, results)[1]
        assert verdict is not None, (tensor, place, value)
        if isinstance(place, tuple) and dtype == F64:
            assert f", sequence 0, row {place[1] % sequence}," in verdict


def _masked(q, k, v, hidden):
    scores = (q @ k.transpose(-2, -1)) / q.shape[-1] ** 0.5
    return torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ v


def _a_block_of_keys_forgotten(q, k, v, causal):
    keys = torch.arange(k.shape[1])
    start = min(128, k.shape[1] // 2)
    hidden = (keys >= start) & (keys < start + 16)
    return _masked(q, k, v, hidden | ((keys > torch.arange(q.shape[1])[:, None]) & causal))


WRONG = {
    "a block of keys is forgotten": _a_block_of_keys_forgotten,
    "the last key is forgotten": lambda q, k, v, causal: naive_attention(
        q, k[:, :-1], v[:, :-1], causal
    ),
    "the scale": lambda q, k, v, causal: naive_attention(q * 1.02, k, v, causal),
    "the gradient of k": lambda q, k, v, causal: naive_attention(
        q, k.detach() + 0.97 * (k - k.detach()), v, causal
    ),
    "the mask is off by one": lambda q, k, v, _: _masked(
        q, k, v, torch.ones(q.shape[1], k.shape[1]).triu(2) > 0
    ),
}


@pytest.mark.parametrize(("sequence", "causal", "dtype"), EVERY)
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_results_fail(wrong, dtype, causal, sequence):
    assert _verdict(WRONG[wrong], sequence, causal, dtype) is not None


def test_another_shape_fails_and_a_problem_is_the_same_on_every_call():
    first, second = (
        AttentionProblem((2, 30, 16), torch.float32, "cpu", causal=True, seed=3) for _ in range(2)
    )
    assert torch.equal(first.q, second.q)
    assert not torch.equal(first.q, first.k)
    _, verdict = check(first, [first.inputs[0][:, :-1]])
    assert "expected the shape (2, 30, 16), got (2, 29, 16)" in verdict


def test_a_gpu_with_few_units_for_float64_compares_the_last_and_some_other_heads(monkeypatch):
    problem = AttentionProblem((5, 30, 16), torch.float32, "cpu", causal=True)
    assert set(problem.reference.heads.tolist()) == set(range(5))
    few = AttentionProblem((5, 30, 16), torch.float32, "cpu", causal=True)
    monkeypatch.setattr(
        attention_problem, "_heads_to_compare", lambda problem: torch.tensor([4, 1])
    )
    results = Passes(few, naive_attention).run_checked()
    assert check(few, results)[1] is None
    results[2][4, 7] += 1
    assert "gradient of k, sequence 4, row 7" in check(few, results)[1]


@pytest.mark.parametrize(("sequence", "n_heads"), [(512, 64), (4096, 11), (65536, 1)])
def test_heads_that_such_a_gpu_compares_are_few_and_planned(sequence, n_heads, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 6))
    q = SimpleNamespace(shape=(64, sequence, 128), is_cuda=True, device="cuda:0")
    heads = attention_problem._heads_to_compare(SimpleNamespace(q=q)).tolist()
    assert heads[0] == 63
    assert len(set(heads)) == len(heads) == n_heads
    point = AttentionPoint(
        batch=64, sequence=sequence, head_dim=128, device="cuda", implementations=("tiled",)
    )
    flop = n_heads * 16 * sequence**2 * 128  # eight matmuls per head
    check_s = point.planned_s - super(AttentionPoint, point).planned_s
    assert check_s == pytest.approx(flop / FLOAT64_FLOP_PER_S)
