"""Counting what autograd keeps."""

import torch

from labkit.bench.saved_tensors import saved_for_backward


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
