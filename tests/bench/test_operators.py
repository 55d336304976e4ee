"""Operators and bytes, counted."""

import torch

from labkit.bench.operators import OperatorCount


def test_operators_count_with_the_bytes_they_are_given_and_return_and_views_do_not():
    x, y = torch.zeros(2, 10, 10)
    with OperatorCount() as count:
        z = x + y
        z.view(100).t().mul_(2.0)
    assert count.operators == 2
    assert count.moved_bytes == 3 * 400 + 2 * 400  # two read and one written; one read and written in place


def test_operators_of_a_backward_pass_count():
    x = torch.zeros(10, requires_grad=True)
    with OperatorCount() as count:
        y = x.sin()
    assert count.operators == 1
    with OperatorCount() as count:
        torch.autograd.grad(y, x, torch.ones(10))
    assert count.operators >= 2  # a cosine and a product, besides the ones
