"""The gate of the attention labs: lets what is right pass, also in half precision, and stops what is not."""

from itertools import product

import pytest
import torch

from labkit.nn.attention import naive_attention
from labkit.nn.attention_implementations import IMPLEMENTATIONS
from labkit.nn.attention_problem import CHECKED, AttentionProblem, check
from tests.cases import thinned

LONG = 2 * CHECKED + 37
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
EVERY = list(product([50, LONG], [False, True], [FLOAT64, FLOAT32, BFLOAT16, FLOAT16]))


def _checked(attend, sequence, causal, dtype=torch.float32):
    problem = AttentionProblem((2, sequence, 32), dtype, "cpu", causal=causal)
    return check(problem, problem.passes(attend).run_checked())


RIGHT = product([16, 50, LONG], [False, True], [FLOAT32, BFLOAT16, FLOAT16])


@pytest.mark.parametrize(
    ("sequence", "causal", "dtype"),
    thinned(RIGHT, lambda *case: case in [*TOGETHER, (16, True, FLOAT32), (16, False, BFLOAT16), (16, True, FLOAT16)]),
)
@pytest.mark.parametrize("name", ["explicit", "tiled", "sdpa_math", "sdpa"])
def test_what_is_right_passes(name, dtype, sequence, causal):
    checked = _checked(IMPLEMENTATIONS[name].attend, sequence, causal, dtype)
    assert checked.is_right, checked
    assert checked.limit < 0.02
    assert checked.row_limit < 0.1


def _unscaled(q, k, v, causal):
    return naive_attention(q * 1.02, k, v, causal)


def _last_key_forgotten(q, k, v, causal):
    return naive_attention(q, k[:, :-1], v[:, :-1], causal)


def _wrong_gradient_of_k(q, k, v, causal):
    return naive_attention(q, k.detach() + 0.97 * (k - k.detach()), v, causal)


def _not_a_number(q, k, v, causal):
    return naive_attention(q, k, v, causal) * float("nan")


def _mask_off_by_one(q, k, v, causal):
    rows, keys = torch.arange(q.shape[1]), torch.arange(k.shape[1])
    scores = (q @ k.transpose(-2, -1)) / q.shape[-1] ** 0.5
    return torch.softmax(scores.masked_fill(keys[None] > rows[:, None] + 1, -torch.inf), -1) @ v


def _a_block_of_keys_forgotten(q, k, v, causal):
    start = min(128, k.shape[1] // 2)
    kept = torch.cat([torch.arange(start), torch.arange(start + 16, k.shape[1])])
    scores = (q @ k[:, kept].transpose(-2, -1)) / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(kept > torch.arange(q.shape[1])[:, None], -torch.inf)
    return torch.softmax(scores, -1) @ v[:, kept]


class _Spoiled(torch.autograd.Function):
    """Its argument; output or gradient go through a function."""

    @staticmethod
    def forward(ctx, x, of_output, of_gradient):
        ctx.of_gradient = of_gradient
        return of_output(x.clone())

    @staticmethod
    def backward(ctx, gradient):
        return ctx.of_gradient(gradient.clone()), None, None


def _same(x):
    return x


def _spoiling(where, number):
    """Something that sets one row of one sequence to zero, NaN, or another row."""

    def spoil(x):
        x[0, where] = x[0, where + 1 if where < 0 else where - 1] if number is None else number
        return x

    return spoil


# The last row, and one that is not among those compared with float64; as the gate reaches them.
SPOILED = {
    f"{what} {where} {number}": (what, where, number)
    for what in ("output", "q", "k", "v")
    for where in (-1, 7)
    for number in (0.0, float("nan"), None)
    if not (where == -1 and number is None)
}


@pytest.mark.parametrize(("sequence", "causal", "dtype"), thinned(EVERY, lambda *case: case in TOGETHER))
def test_a_single_row_that_is_zero_no_number_or_another_ones_is_seen(sequence, causal, dtype):
    for name, (what, where, number) in SPOILED.items():
        spoil = _spoiling(where, number)

        def attend(q, k, v, causal, what=what, spoil=spoil):
            q, k, v = (
                _Spoiled.apply(x, _same, spoil if what == letter else _same)
                for x, letter in zip((q, k, v), "qkv", strict=True)
            )
            output = naive_attention(q, k, v, causal)
            return _Spoiled.apply(output, spoil if what == "output" else _same, _same)

        unseen = what == "q" and number == 0 and where == 7 and sequence == LONG  # no gradient there to lose
        assert _checked(attend, sequence, causal, dtype).is_right == unseen, name


@pytest.mark.parametrize("dtype", [FLOAT64, FLOAT32, BFLOAT16, FLOAT16])
@pytest.mark.parametrize("letter", "qkv")
@pytest.mark.parametrize("number", [0.0, float("nan")])
def test_a_gradient_or_that_of_one_head_that_is_missing_or_no_number_is_seen(letter, number, dtype):
    def whole(x):
        return x * number

    def one_head(x):
        x[1] = number
        return x

    for spoil in (whole, one_head):

        def attend(q, k, v, causal, spoil=spoil):
            inputs = (
                _Spoiled.apply(x, _same, spoil if name == letter else _same)
                for x, name in zip((q, k, v), "qkv", strict=True)
            )
            return naive_attention(*inputs, causal)

        assert not _checked(attend, 50, True, dtype).is_right


WRONG = [
    _a_block_of_keys_forgotten,
    _unscaled,
    _last_key_forgotten,
    _wrong_gradient_of_k,
    _not_a_number,
    _mask_off_by_one,
]


@pytest.mark.parametrize(("sequence", "causal", "dtype"), thinned(EVERY, lambda *case: case in TOGETHER))
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_does_not(wrong, dtype, causal, sequence):
    assert not _checked(wrong, sequence, causal, dtype).is_right


def test_the_queries_that_are_checked_reach_from_the_first_to_the_last():
    rows = AttentionProblem((1, LONG, 16), torch.float32, "cpu", causal=True).checked_rows()
    assert (int(rows[0]), int(rows[-1]), len(set(rows.tolist()))) == (0, LONG - 1, CHECKED)


def test_a_problem_is_the_same_on_every_call():
    first, second = (AttentionProblem((2, 30, 16), torch.float32, "cpu", causal=True, seed=3) for _ in range(2))
    assert torch.equal(first.q, second.q)
    assert not torch.equal(first.q, first.k)
