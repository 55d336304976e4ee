"""Recorded schedules of all-reduces: as many messages in a row, and as many bytes, as the formulas
say."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist

from labkit.costs.communication import ALL_REDUCE_COSTS
from labkit.lab.pages import schedule
from labkit.lab.pages.schedule import record_schedule, record_user_schedule
from labkit.parallel.collectives import ALGORITHMS
from labkit.parallel.launch import RankError
from labkit.parallel.transport.base import Transfer


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("world_size", range(1, 9))
def test_a_schedule_is_what_its_cost_formula_counts(name, world_size):
    elements, messages, held = record_schedule(ALGORITHMS[name], world_size)
    cost = ALL_REDUCE_COSTS[name](world_size, elements)
    assert len(held) - 1 == cost.messages
    sent = Counter()
    for message in messages:
        sent[message.round, message.source] += message.stop - message.start
    busiest = [
        max(sent[number, rank] for rank in range(world_size)) for number in range(1, len(held))
    ]
    assert sum(busiest) == pytest.approx(cost.n_bytes)
    assert held[0] == [[1 << rank] * elements for rank in range(world_size)]
    assert held[-1] == [[2**world_size - 1] * elements] * world_size


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_a_rank_holds_after_a_step_came_with_its_messages(name):
    _, messages, held = record_schedule(ALGORITHMS[name], 6)
    for number in range(1, len(held)):
        came = {
            (m.target, at, m.source)
            for m in messages
            if m.round == number
            for at in range(m.start, m.stop)
        }
        for rank, elements in enumerate(held[number]):
            for at, who in enumerate(elements):
                possible = held[number - 1][rank][at]
                for target, place, source in came:
                    if (target, place) == (rank, at):
                        possible |= held[number - 1][source][at]
                assert who & ~possible == 0


def test_a_readers_function_is_recorded_and_what_it_raises_on_one_rank_comes_through(monkeypatch):
    def send_around(tensor, group=None, op="mean", *, transport):
        rank = transport.rank
        p = transport.world_size
        part = tensor.clone()
        for _ in range(p - 1):
            received = torch.zeros_like(part)
            transport.run([[Transfer(part, (rank + 1) % p, received, (rank - 1) % p)]])
            tensor += received
            part = received

    recorded = record_schedule(send_around, 3)
    assert [message.round for message in recorded.messages] == [1] * 3 + [2] * 3
    assert recorded.held[-1] == [[7] * recorded.elements] * 3

    def broken_on_one(tensor, group=None, op="mean", *, transport):
        if transport.rank == 1:
            raise ZeroDivisionError
        send_around(tensor, transport=transport)

    monkeypatch.setattr(schedule, "MAX_WAIT_S", 0.01)
    with pytest.raises(ZeroDivisionError):
        record_schedule(broken_on_one, 3)
    for wrong in (0, 33):
        with pytest.raises(ValueError, match="1 to 32 ranks"):
            record_schedule(send_around, wrong)


def ring(tensor):
    rank = dist.get_rank()
    p = dist.get_world_size()
    chunks = list(tensor.chunk(p))
    for step in range(2 * (p - 1)):
        sent = chunks[(rank - step - 1) % p]
        received = chunks[(rank - step - 2) % p]
        buffer = torch.empty_like(received)
        work = dist.isend(sent, (rank + 1) % p)
        dist.recv(buffer, (rank - 1) % p)
        work.wait()
        if step < p - 1:
            received += buffer
        else:
            received.copy_(buffer)


def in_turns(tensor):
    """Rank 0 collects and hands out, one message after another."""
    if dist.get_rank() > 0:
        dist.send(tensor, 0)
        dist.recv(tensor, src=0)
        return
    for other in range(1, dist.get_world_size()):
        received = torch.empty_like(tensor)
        dist.recv(received, other)
        tensor += received
    for other in range(1, dist.get_world_size()):
        dist.send(tensor, dst=other)


def pairwise(tensor):
    other = 1 - dist.get_rank()
    received = torch.empty_like(tensor)
    calls = [dist.P2POp(dist.isend, tensor, other), dist.P2POp(dist.irecv, received, other)]
    for work in dist.batch_isend_irecv(calls):
        work.wait()
    tensor += received


def test_a_readers_sends_and_receives_are_recorded_as_those_of_labkit():
    theirs = record_user_schedule(ring, 3)
    assert theirs.held == record_schedule(ALGORITHMS["ring"], 3).held
    assert theirs.messages == record_schedule(ALGORITHMS["ring"], 3).messages


def test_messages_that_wait_for_one_another_are_in_rounds_of_their_own():
    recorded = record_user_schedule(in_turns, 3)
    assert [(one.round, one.source, one.target) for one in recorded.messages] == [
        (1, 1, 0),
        (2, 2, 0),
        (3, 0, 1),
        (4, 0, 2),
    ]
    assert recorded.held[-1] == [[7] * recorded.elements] * 3
    both = record_user_schedule(pairwise, 2)
    assert [one.round for one in both.messages] == [1, 1]
    assert both.held[-1] == [[3] * both.elements] * 2


def test_a_collective_has_no_steps():
    with pytest.raises(RankError, match="all_reduce is one call"):
        record_user_schedule(lambda tensor: dist.all_reduce(tensor), 2)
