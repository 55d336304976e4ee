"""`lab.check`: right, wrong, fails, hangs or not allowed, and what it says about each."""

import json
import threading
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import all_reduce

from labkit.lab.config import ParameterError
from labkit.lab.notebook import OpenLab
from labkit.lab.user_checks import check_alternative, check_file
from labkit.parallel.collectives import ring_all_reduce
from labkit.parallel.exchange import exchange
from labkit.studies import load_lab

STATUS = ["right", "wrong", "fails", "hangs", "not allowed"]


def _neighbors():
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    return (rank + 1) % ranks, (rank - 1) % ranks


def _passes_around(tensor):
    to, source = _neighbors()
    part = tensor.clone()
    for _ in range(dist.get_world_size() - 1):
        other = torch.empty_like(part)
        sending = dist.isend(part, to)
        dist.recv(other, source)
        sending.wait()
        tensor += other
        part = other


def _adds_its_neighbor_only(tensor):
    to, source = _neighbors()
    other = torch.empty_like(tensor)
    exchange(tensor, to, other, source)
    tensor.add_(other)


def _raises(tensor):
    raise KeyError("no")


def _waits_for_ever(tensor):
    if dist.get_rank() == 1:
        dist.recv(tensor, 0)


def _lets_torch_do_it(tensor):
    dist.all_reduce(tensor)


def _lets_labkit_do_it(tensor):
    ring_all_reduce(tensor, op="sum")


def _lets_a_functional_collective_do_it(tensor):
    tensor.copy_(all_reduce(tensor, "sum", dist.group.WORLD))


def _lets_a_thread_do_it(tensor):
    to, source = _neighbors()
    sending = dist.isend(torch.zeros(1), to)
    dist.recv(torch.zeros(1), source)
    sending.wait()
    thread = threading.Thread(target=dist.all_reduce, args=(tensor,))
    thread.start()
    thread.join()


def _gathers_and_scatters(tensor):
    ranks = dist.get_world_size()
    parts = [torch.empty_like(tensor) for _ in range(ranks)] if dist.get_rank() == 0 else None
    dist.gather(tensor, parts)
    sums = [sum(parts)] * ranks if parts else None
    dist.scatter(tensor, sums)


@pytest.mark.parametrize(
    ("own", "verdict", "where"),
    [
        (_passes_around, "right", "3 x send, 3 x receive"),
        (_adds_its_neighbor_only, "wrong", "rank 1's input is missing"),
        (_raises, "fails", "KeyError"),
        (_waits_for_ever, "hangs", "rank 1 waits in receive, line"),
        (_lets_torch_do_it, "not allowed", "it calls all_reduce"),
        (_lets_labkit_do_it, "not allowed", "it calls labkit's ring"),
        (_lets_a_functional_collective_do_it, "not allowed", "it calls all_reduce"),
        (_lets_a_thread_do_it, "not allowed", "something else does the work"),
        (_gathers_and_scatters, "not allowed", "it calls gather, scatter"),
    ],
)
def test_an_own_all_reduce_is_judged_and_told_why(own, verdict, where, monkeypatch):
    deadline_s = 6.0 if verdict == "hangs" else 60.0
    monkeypatch.setattr("labkit.lab.user_checks.DEADLINE_S", deadline_s)
    result = check_alternative(load_lab("all_reduce"), own)
    assert (result.verdict, bool(result), result.status) == (
        verdict,
        verdict == "right",
        STATUS.index(verdict),
    )
    assert where in result.details


class _AveragesAtOnce(torch.nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module
        for parameter in module.parameters():
            dist.broadcast(parameter.data, 0)

    def forward(self, *inputs):
        return self.module(*inputs)

    def finish_gradient_synchronization(self):
        self._average([parameter.grad for parameter in self.module.parameters()])

    def _average(self, gradients):
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients]) / dist.get_world_size()
        dist.all_reduce(flat)
        parts = flat.split([gradient.numel() for gradient in gradients])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))


class _AveragesOneByOne(_AveragesAtOnce):
    def _average(self, gradients):
        for gradient in gradients:
            super()._average([gradient])


@pytest.mark.parametrize(
    ("own", "verdict", "where"),
    [
        (_AveragesAtOnce, "right", "all_reduce"),
        (_AveragesOneByOne, "not allowed", "collectives per pass; this task allows 1"),
    ],
)
def test_a_wrapper_may_average_once_per_pass(own, verdict, where):
    result = check_alternative(load_lab("data_parallel"), own)
    assert result.verdict == verdict
    assert where in result.details


def _slow(q, k, v, causal):
    time.sleep(1.2)  # longer than all rounds may take
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)


def test_a_slow_attention_is_right_and_torchs_own_is_named(home):
    result = check_alternative(load_lab("attention"), _slow)
    assert result.verdict == "right"
    assert "too slow to time" in result.details
    assert "scaled_dot_product" in result.details


def test_the_last_check_is_kept_with_its_code(home):
    lab = load_lab("all_reduce")
    OpenLab(lab, SimpleNamespace()).check(_raises)
    record = json.loads(check_file("all_reduce").read_text())
    assert record["verdict"] == "fails"
    assert 'raise KeyError("no")' in record["code"]


def test_a_lab_that_compares_nothing_refuses_an_own_function():
    with pytest.raises(ParameterError, match="limits"):
        check_alternative(load_lab("limits"), _raises)
