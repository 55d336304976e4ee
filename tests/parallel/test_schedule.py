"""Recorded schedules of all-reduces: as many messages in a row, and as many bytes, as the formulas say."""

from collections import Counter

import pytest

from labkit.costs import communication
from labkit.parallel import schedule
from labkit.parallel.collectives import ALGORITHMS
from labkit.parallel.schedule import record_schedule


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("world_size", range(1, 9))
def test_a_schedule_is_what_its_cost_formula_counts(name, world_size):
    elements, messages, held = record_schedule(ALGORITHMS[name], world_size)
    cost = getattr(communication, name)(world_size, elements)
    assert len(held) - 1 == cost.messages
    sent = Counter()
    for message in messages:
        sent[message.round, message.source] += message.stop - message.start
    busiest = [max(sent[number, rank] for rank in range(world_size)) for number in range(1, len(held))]
    assert sum(busiest) == pytest.approx(cost.n_bytes)
    assert held[0] == [[1 << rank] * elements for rank in range(world_size)]
    assert held[-1] == [[2**world_size - 1] * elements] * world_size


@pytest.mark.parametrize("name", ALGORITHMS)
def test_what_a_rank_holds_after_a_step_came_with_its_messages(name):
    _, messages, held = record_schedule(ALGORITHMS[name], 6)
    for number in range(1, len(held)):
        came = {(m.target, at, m.source) for m in messages if m.round == number for at in range(m.start, m.stop)}
        for rank, elements in enumerate(held[number]):
            for at, who in enumerate(elements):
                possible = held[number - 1][rank][at]
                for target, place, source in came:
                    if (target, place) == (rank, at):
                        possible |= held[number - 1][source][at]
                assert who & ~possible == 0


def test_what_one_rank_raises_is_told_and_not_that_the_others_wait_in_vain(monkeypatch):
    def broken_on_one(tensor, group=None, op="mean", *, transport):
        if transport.rank == 1:
            raise ZeroDivisionError
        transport.show(tensor)

    monkeypatch.setattr(schedule, "LONGEST_WAIT_S", 0.01)
    with pytest.raises(ZeroDivisionError):
        record_schedule(broken_on_one, 3)


def test_a_function_of_the_readers_is_recorded_and_what_it_raises_comes_through():
    def everybody_shows(tensor, group=None, op="mean", *, transport):
        parts = list(transport.show(tensor))
        tensor.copy_(sum(parts[1:], parts[0]))

    recorded = record_schedule(everybody_shows, 3)
    assert [message.round for message in recorded.messages] == [1] * 6
    assert recorded.held[-1] == [[7] * recorded.elements] * 3

    def broken(tensor, group=None, op="mean", *, transport):
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        record_schedule(broken, 2)
    for wrong in (0, 33):
        with pytest.raises(ValueError, match="1 to 32 ranks"):
            record_schedule(broken, wrong)
