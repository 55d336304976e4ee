"""What operators save, where it is known by heart."""

import torch

from labkit.bench.saved_by_operator import saved_by_operator


def test_what_is_saved_is_named_by_its_operators():
    x = torch.randn(8, 8, requires_grad=True)
    w = torch.randn(8, 8, requires_grad=True)
    _, saved = saved_by_operator(lambda: torch.softmax(x @ w, -1).exp(), own=[w], inputs=[x])
    assert {storage.operators: (storage.n_bytes, storage.is_input) for storage in saved} == {
        ("mm",): (256, True),
        ("softmax",): (256, False),
        ("exp",): (256, False),
    }


def test_a_storage_that_two_operators_read_counts_once():
    x = torch.randn(8, requires_grad=True)
    _, saved = saved_by_operator(lambda: (x * 2).exp().square(), inputs=[x])
    assert [(storage.n_bytes, storage.operators) for storage in saved] == [(32, ("pow", "exp"))]
