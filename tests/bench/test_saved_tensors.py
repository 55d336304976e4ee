"""Counting what autograd keeps, in all and by operator."""

import torch

from labkit.bench.saved_tensors import saved_by_operator, saved_for_backward


def test_a_storage_saved_twice_counts_once():
    x = torch.randn(10, 10, requires_grad=True)
    result, saved = saved_for_backward(lambda: (x * x).sum() + (x.T @ x).sum())
    assert [tensor.n_bytes for tensor in saved] == [400]
    assert saved[0].dtype == "float32"
    result.backward()
    assert x.grad is not None


def test_a_view_counts_with_all_its_memory():
    x = torch.randn(100, requires_grad=True)
    _, saved = saved_for_backward(lambda: x[:10].square())
    assert [tensor.n_bytes for tensor in saved] == [400]


def test_nothing_is_kept_without_a_gradient():
    assert saved_for_backward(lambda: torch.randn(5).exp())[1] == []


def test_what_is_saved_is_named_by_its_operators():
    x = torch.randn(8, 8, requires_grad=True)
    w = torch.randn(8, 8, requires_grad=True)
    _, saved = saved_by_operator(lambda: torch.softmax(x @ w, -1).exp(), own=[w], inputs=[x])
    assert {storage.operators: (storage.n_bytes, storage.is_input) for storage in saved} == {
        ("mm",): (256, True),
        ("softmax",): (256, False),
        ("exp",): (256, False),
    }


def test_an_operator_of_two_words_is_written_as_it_is_called():
    x, where = torch.randn(8, 8, requires_grad=True), torch.eye(8).bool()
    _, saved = saved_by_operator(lambda: x.masked_fill(where, 0.0), inputs=[x, where])
    assert [storage.operators for storage in saved] == [("masked_fill",)]


def test_a_storage_that_two_operators_read_counts_once():
    x = torch.randn(8, requires_grad=True)
    _, saved = saved_by_operator(lambda: (x * 2).exp().square(), inputs=[x])
    assert [(storage.n_bytes, storage.operators) for storage in saved] == [(32, ("pow", "exp"))]
