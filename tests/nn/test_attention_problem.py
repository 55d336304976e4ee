"""The gate of the attention labs: lets what is right pass, also in half precision, and stops what is not."""

import pytest
import torch

from labkit.nn.attention import IMPLEMENTATIONS, explicit_attention
from labkit.nn.attention_problem import CHECKED, AttentionProblem, check

LONG = 2 * CHECKED + 37


def _checked(attend, sequence, causal, dtype=torch.float32):
    problem = AttentionProblem((2, sequence, 32), dtype, "cpu", causal=causal)
    return check(problem, problem.passes(attend).run_checked())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sequence", [16, 50, LONG])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["explicit", "tiled", "sdpa_math", "sdpa"])
def test_what_is_right_passes(name, dtype, sequence, causal):
    checked = _checked(IMPLEMENTATIONS[name].attend, sequence, causal, dtype)
    assert checked.error <= checked.limit
    assert checked.limit < 0.02


def _unscaled(q, k, v, causal):
    return explicit_attention(q * 1.02, k, v, causal)


def _last_key_forgotten(q, k, v, causal):
    return explicit_attention(q, k[:, :-1], v[:, :-1], causal)


def _wrong_gradient_of_k(q, k, v, causal):
    return explicit_attention(q, k.detach() + 0.97 * (k - k.detach()), v, causal)


def _not_a_number(q, k, v, causal):
    return explicit_attention(q, k, v, causal) * float("nan")


def _mask_off_by_one(q, k, v, causal):
    rows, keys = torch.arange(q.shape[1]), torch.arange(k.shape[1])
    scores = (q @ k.transpose(-2, -1)) / q.shape[-1] ** 0.5
    return torch.softmax(scores.masked_fill(keys[None] > rows[:, None] + 1, -torch.inf), -1) @ v


WRONG = [_unscaled, _last_key_forgotten, _wrong_gradient_of_k, _not_a_number, _mask_off_by_one]


@pytest.mark.parametrize("sequence", [50, LONG])
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_does_not(wrong, sequence):
    checked = _checked(wrong, sequence, True)
    assert checked.error > checked.limit


def test_the_queries_that_are_checked_reach_from_the_first_to_the_last():
    rows = AttentionProblem((1, LONG, 16), torch.float32, "cpu", causal=True).checked_rows()
    assert (int(rows[0]), int(rows[-1]), len(set(rows.tolist()))) == (0, LONG - 1, CHECKED)


def test_a_problem_is_the_same_on_every_call():
    first, second = (AttentionProblem((2, 30, 16), torch.float32, "cpu", causal=True, seed=3) for _ in range(2))
    assert torch.equal(first.q, second.q)
    assert not torch.equal(first.q, first.k)
