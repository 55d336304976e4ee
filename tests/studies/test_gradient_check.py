"""The gate of averaged gradients sees each rank's part of each parameter, for any number of ranks.

One process plays all ranks: their local gradients are computed one after the other, and averaged,
or nearly, here.
"""

import math

import pytest
import torch
from torch import nn

from labkit.studies.shared import checks
from labkit.studies.shared.checks import check_completeness, largest_error
from tests.cases import thinned

WORLDS = thinned([2, 3, 5, 8, 16, 32], lambda ranks: ranks in (3, 8))


class _Ranks:
    """A model whose gradients of all ranks are known while a gate looks; `mistake` changes their
    means."""

    def __init__(self, ranks, monkeypatch, dtype=torch.float32):
        self.rank = 0
        self.ranks = ranks
        monkeypatch.setattr(checks.dist, "get_rank", lambda: self.rank)
        monkeypatch.setattr(checks.dist, "get_world_size", lambda: ranks)
        monkeypatch.setattr(
            checks, "first_failing_rank", lambda report: (0, report) if report[0] >= 0 else None
        )
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 5), nn.Linear(5, 3)).to(
            dtype
        )
        self.named = dict(self.model.named_parameters())
        self.parameters = list(self.named.values())
        self.x = torch.randn(4, 6, dtype=dtype)
        self.local = []
        for self.rank in range(ranks):
            with checks._whole_numbers(self.parameters):
                self.backward()
            self.local.append(checks._take_gradients(self.parameters))
        self.rank = 0

    def backward(self):
        self.model(self.x).sum().backward()

    def verdict(self, mistake=None):
        def run():
            self.backward()  # replaced below, as a wrapper does
            for parameter, parts in zip(
                self.parameters, zip(*self.local, strict=True), strict=True
            ):
                parameter.grad = sum(parts) / self.ranks
            if mistake:
                mistake([parameter.grad for parameter in self.parameters])

        return check_completeness(self.named, run)


@pytest.mark.parametrize("ranks", WORLDS)
def test_a_mean_is_right_whenever_it_is_divided(ranks, monkeypatch):
    world = _Ranks(ranks, monkeypatch)

    def divided_first(gradients):
        for gradient, parts in zip(gradients, zip(*world.local, strict=True), strict=True):
            gradient.copy_(sum(part / ranks for part in parts))

    assert world.verdict() is None
    assert world.verdict(divided_first) is None


@pytest.mark.parametrize("ranks", WORLDS)
def test_each_rank_and_each_parameter_left_out_counted_twice_or_swapped_is_seen(ranks, monkeypatch):
    world = _Ranks(ranks, monkeypatch, torch.float64 if ranks == 8 else torch.float32)
    for rank in range(0, ranks, max(1, ranks // 8)):
        parts = world.local[rank]
        neighbors = world.local[(rank + 1) % ranks]
        few = range(len(parts)) if ranks < 4 else [rank % len(parts)]
        for index, part, neighbor in ((index, parts[index], neighbors[index]) for index in few):
            for change in (-part, part, neighbor - part):

                def one_rank(gradients, index=index, change=change):
                    gradients[index] += change / ranks

                def last_element(gradients, index=index, change=change):
                    gradients[index].view(-1)[-1] += change.view(-1)[-1] / ranks

                assert world.verdict(one_rank) is not None
                assert world.verdict(last_element) is not None


def test_a_parameter_that_is_not_reduced_lost_or_has_another_ones_gradient_is_seen(monkeypatch):
    world = _Ranks(4, monkeypatch)
    for index in range(len(world.parameters)):

        def local(gradients, index=index):
            gradients[index].copy_(world.local[0][index])

        def lost(gradients, index=index):
            world.parameters[index].grad = None

        def no_number(gradients, index=index):
            gradients[index].view(-1)[0] = math.nan

        def shifted(gradients, index=index):
            gradients[index].copy_(gradients[index].view(-1).roll(1).view_as(gradients[index]))

        for mistake in (local, lost, no_number, shifted):
            assert world.verdict(mistake) is not None, (index, mistake.__name__)

    def swapped(gradients):
        first = gradients[1].clone()
        second = gradients[3].clone()  # two biases of one length
        gradients[1].copy_(second)
        gradients[3].copy_(first)

    assert world.verdict(swapped) is not None


def test_micro_batches_are_told_apart(monkeypatch):
    world = _Ranks(1, monkeypatch)

    def twice():
        world.backward()
        world.backward()

    def first_twice():
        world.backward()
        before = [parameter.grad.clone() for parameter in world.parameters]
        world.backward()
        for parameter, gradient in zip(world.parameters, before, strict=True):
            parameter.grad = 2 * gradient

    assert check_completeness(world.named, twice) is None
    assert check_completeness(world.named, first_twice) is not None


def test_a_missing_gradient_and_nan_are_infinitely_wrong(monkeypatch):
    monkeypatch.setattr(checks, "max_over_ranks", lambda error: error)
    one = torch.ones(3)
    assert largest_error([one, one], [one, one]) == 0
    assert largest_error([one, None], [one, one]) == math.inf
    assert largest_error([one * math.nan, one], [one, one]) == math.inf
