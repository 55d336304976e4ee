"""Operators, their products and their bytes."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from labkit.bench.operators import record_operators


def test_operators_move_what_they_are_given_and_return_and_views_do_not():
    x, y = torch.zeros(2, 10, 10)
    add, multiply = record_operators(lambda: (x + y).view(100).t().mul_(2.0))
    assert (add.name, add.n_bytes, add.flops) == ("add", 3 * 400, 0)
    assert (multiply.name, multiply.n_bytes) == ("mul_", 2 * 400)


def test_a_product_of_rows_in_batches_is_one_operator():
    layer = torch.nn.Linear(4, 8, bias=False)
    rows = torch.zeros(2, 3, 4)
    (product,) = record_operators(lambda: layer(rows))
    assert (product.name, product.n_bytes) == ("mm", 4 * (6 * 4 + 4 * 8 + 6 * 8))


def test_what_is_written_into_counts_as_written_and_as_read_only_where_it_is():
    x, y, there = torch.zeros(3, 10, 10)
    of_name = {
        "mul_": 2 * 400,
        "copy_": 2 * 400,
        "fill_": 400,
        "add": 3 * 400,  # into a tensor that is there, which is not read
        "_foreach_mul_": 2 * 800,
        "_foreach_copy_": 2 * 800,
        "_foreach_add": 2 * 800,
    }
    found = record_operators(
        lambda: (
            x.mul_(2.0),
            x.copy_(y),
            x.fill_(1.0),
            torch.add(x, y, out=there),
            torch._foreach_mul_([x, y], 2.0),
            torch._foreach_copy_([x, y], [y, x]),
            torch._foreach_add([x, y], 2.0),
        )
    )
    assert {one.name: one.n_bytes for one in found} == of_name


def test_products_have_flops_and_lookups_read_their_rows_only():
    table, rows = torch.zeros(1000, 10), torch.tensor([1, 2])
    (lookup,) = record_operators(lambda: torch.embedding(table, rows))
    assert lookup.n_bytes == 16 + 2 * 2 * 40
    (product,) = record_operators(lambda: torch.mm(table.T, table))
    assert (product.flops, product.dtype) == (2 * 10 * 1000 * 10, "float32")


def test_operators_of_a_backward_pass_count_on_tensors_that_hold_nothing_too():
    with FakeTensorMode():
        x = torch.zeros(10, requires_grad=True)
        forward = record_operators(lambda: x.sin())
        y = x.sin()
        backward = record_operators(lambda: torch.autograd.grad(y, x, torch.ones(10)))
    assert [one.name for one in forward] == ["sin"]
    assert {"cos", "mul"} <= {one.name for one in backward}
