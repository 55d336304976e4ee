"""Operators, their FLOPs and their bytes."""

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from labkit.bench.operators import record_operators


def test_operators_move_what_they_read_and_write_and_views_do_not():
    x, y, target = torch.zeros(3, 10, 10)
    calls = record_operators(
        lambda: (
            (x + y).view(100).t().mul_(2.0),
            x.copy_(y),
            x.fill_(1.0),
            torch.sub(x, y, out=target),  # into a tensor that exists, and is not read
            torch._foreach_mul_([x, y], 2.0),
            torch._foreach_copy_([x, y], [y, x]),
            torch._foreach_add([x, y], 2.0),
        )
    )
    moved = {"add": 3, "mul_": 2, "copy_": 2, "fill_": 1, "sub": 3}
    moved |= dict.fromkeys(("_foreach_mul_", "_foreach_copy_", "_foreach_add"), 4)
    assert {call.name: call.n_bytes / 400 for call in calls} == moved
    assert all(call.flops == 0 for call in calls)


def test_matmuls_have_flops_and_lookups_read_their_rows_only():
    table = torch.zeros(1000, 10)
    rows = torch.tensor([1, 2])
    weights = torch.ones(10, 8)
    calls = record_operators(
        lambda: (
            torch.embedding(table, rows),
            torch.mm(table.T, table),
            table.view(10, 100, 10) @ weights,
        )
    )
    lookup, product, batch = (call for call in calls if call.name in ("embedding", "mm"))
    assert lookup.n_bytes == 16 + 2 * 2 * 40
    assert (product.flops, product.dtype) == (2 * 10 * 1000 * 10, "float32")
    # rows in batches are one
    assert (batch.name, batch.n_bytes) == ("mm", 4 * (1000 * 10 + 10 * 8 + 1000 * 8))


def test_a_backward_pass_on_fake_tensors_counts_too():
    with FakeTensorMode():
        x = torch.zeros(10, requires_grad=True)
        forward = record_operators(lambda: x.sin())
        y = x.sin()
        backward = record_operators(lambda: torch.autograd.grad(y, x, torch.ones(10)))
    assert [one.name for one in forward] == ["sin"]
    assert {"cos", "mul"} <= {one.name for one in backward}
