"""The check of the attention labs: right results pass, also in half precision; a single wrong row fails."""

from functools import cache
from itertools import product

import pytest
import torch

from labkit.nn.attention import naive_attention
from labkit.nn.attention_implementations import IMPLEMENTATIONS
from labkit.nn.attention_problem import ROWS_AT_ONCE, AttentionProblem, Passes, check
from tests.cases import thinned

LONG = ROWS_AT_ONCE + 37
FLOAT64, FLOAT32, BFLOAT16, FLOAT16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
# Every length with and without a mask, each dtype with each length; `make test-all` has them all with each other.
TOGETHER = [
    (50, False, FLOAT32),
    (50, True, BFLOAT16),
    (50, True, FLOAT64),
    (50, False, FLOAT16),
    (LONG, True, FLOAT32),
    (LONG, False, BFLOAT16),
]
EVERY = thinned(
    product([50, LONG], [False, True], [FLOAT64, FLOAT32, BFLOAT16, FLOAT16]), lambda *case: case in TOGETHER
)
FEW_ROWS = [(16, True, FLOAT32), (16, False, BFLOAT16), (16, True, FLOAT16)]


@cache
def _problem(sequence, causal, dtype):
    return AttentionProblem((2, sequence, 32), dtype, "cpu", causal=causal)


def _verdict(attend, sequence, causal, dtype):
    problem = _problem(sequence, causal, dtype)
    return check(problem, Passes(problem, attend).run_checked())[1]


RIGHT = product([16, 50, LONG], [False, True], [FLOAT32, BFLOAT16, FLOAT16])


@pytest.mark.parametrize(("sequence", "causal", "dtype"), thinned(RIGHT, lambda *case: case in [*TOGETHER, *FEW_ROWS]))
@pytest.mark.parametrize("name", ["explicit", "tiled", "sdpa_math", "sdpa"])
def test_right_results_pass(name, dtype, sequence, causal):
    assert _verdict(IMPLEMENTATIONS[name], sequence, causal, dtype) == "ok"
    reference = _problem(sequence, causal, dtype).reference
    assert reference.limit < 0.02
    assert reference.row_limit < 0.1


class _Spoiled(torch.autograd.Function):
    """The identity; a function changes its output, and one its gradient."""

    @staticmethod
    def forward(ctx, x, change_output, change_gradient):
        ctx.change_gradient = change_gradient
        return change_output(x.clone())

    @staticmethod
    def backward(ctx, gradient):
        return ctx.change_gradient(gradient.clone()), None, None


def _same(x):
    return x


def _spoiled_attention(what, change):
    """Naive attention whose output, or gradient of "q", "k" or "v", a function changes."""

    def attend(q, k, v, causal):
        inputs = zip((q, k, v), "qkv", strict=True)
        q, k, v = (_Spoiled.apply(x, _same, change if what == letter else _same) for x, letter in inputs)
        return _Spoiled.apply(naive_attention(q, k, v, causal), change if what == "output" else _same, _same)

    return attend


def _set_row(where, value):
    """Set one row of the first sequence to a number, or to the row beside it."""

    def change(x):
        x[0, where] = x[0, where + 1 if where < 0 else where - 1] if value is None else value
        return x

    return change


def _set_head(value):
    def change(x):
        x[1] = value
        return x

    return change


CHANGES = {
    **{f"row {where} is {value}": _set_row(where, value) for where in (-1, 7) for value in (0.0, float("nan"))},
    "row 7 is row 6": _set_row(7, None),
    "a head is missing": _set_head(0.0),
    "a head is no number": _set_head(float("nan")),
    "all is missing": torch.zeros_like,
    "all is no number": lambda x: x * float("nan"),
}


@pytest.mark.parametrize(("sequence", "causal", "dtype"), EVERY)
def test_a_row_or_head_that_is_missing_no_number_or_another_one_fails(sequence, causal, dtype):
    for what in ("output", "q", "k", "v"):
        for name, change in CHANGES.items():
            verdict = _verdict(_spoiled_attention(what, change), sequence, causal, dtype)
            assert verdict.startswith("wrong: "), (what, name)
            if name.startswith("row") and dtype == FLOAT64:
                assert f", sequence 0, row {name.split()[1].replace('-1', str(sequence - 1))}," in verdict


def _unscaled(q, k, v, causal):
    return naive_attention(q * 1.02, k, v, causal)


def _last_key_forgotten(q, k, v, causal):
    return naive_attention(q, k[:, :-1], v[:, :-1], causal)


def _wrong_gradient_of_k(q, k, v, causal):
    return naive_attention(q, k.detach() + 0.97 * (k - k.detach()), v, causal)


def _another_shape(q, k, v, causal):
    return naive_attention(q, k, v, causal)[:, :-1]


def _masked(q, k, v, hidden):
    scores = (q @ k.transpose(-2, -1)) / q.shape[-1] ** 0.5
    return torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ v


def _mask_off_by_one(q, k, v, causal):
    return _masked(q, k, v, torch.arange(k.shape[1]) > torch.arange(q.shape[1])[:, None] + 1)


def _a_block_of_keys_forgotten(q, k, v, causal):
    keys, start = torch.arange(k.shape[1]), min(128, k.shape[1] // 2)
    hidden = (keys >= start) & (keys < start + 16)
    return _masked(q, k, v, hidden | ((keys > torch.arange(q.shape[1])[:, None]) & causal))


WRONG = [_a_block_of_keys_forgotten, _unscaled, _last_key_forgotten, _wrong_gradient_of_k, _mask_off_by_one]


@pytest.mark.parametrize(("sequence", "causal", "dtype"), EVERY)
@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_results_fail(wrong, dtype, causal, sequence):
    assert _verdict(wrong, sequence, causal, dtype).startswith("wrong: ")


def test_another_shape_fails_and_a_problem_is_the_same_on_every_call():
    first, second = (AttentionProblem((2, 30, 16), torch.float32, "cpu", causal=True, seed=3) for _ in range(2))
    assert torch.equal(first.q, second.q)
    assert not torch.equal(first.q, first.k)
    _, verdict = check(first, [_another_shape(*first.inputs, True)])
    assert "expected the shape (2, 30, 16), got (2, 29, 16)" in verdict
