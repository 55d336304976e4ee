"""What every rank shows to all others through shared memory: nobody reads it too early, nobody waits for ever."""

from __future__ import annotations

import os
import time
from contextlib import suppress
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from labkit.parallel.collectives import all_reduce
from labkit.parallel.core.build import VARIABLE
from labkit.parallel.launch import run_ranks
from labkit.parallel.transport import POINT_TO_POINT, SHARED, find_transport, signals
from labkit.parallel.transport.boards import KEPT_LENGTHS, MOST_BYTES
from labkit.parallel.transport.contract import Step
from labkit.parallel.transport.semaphores import Semaphores
from tests.cases import thinned
from tests.parallel.versions import COMPILED, MIXED, PYTHON, VERSIONS, shared_transport
from tests.parallel.waiting import until_asleep

pytestmark = [
    pytest.mark.usefixtures("workers_travel_by_value"),
    pytest.mark.skipif(bool(Semaphores.unavailable()), reason=Semaphores.unavailable() or "there are some"),
]

CPU = torch.device("cpu")
# The whole number of rounds for every number of ranks is `make stress`.
STRESS_ROUNDS = int(os.environ.get("LABKIT_STRESS_ROUNDS", "0"))
# Versions, numbers of ranks and rounds: of `make test`, and of `make test-all`.
QUICK = [(COMPILED, 2, 400), (PYTHON, 2, 400), (COMPILED, 4, 100), (MIXED, 4, 100)]
ROUNDS = [(version, *case) for version in VERSIONS for case in ((2, 4_000), (3, 2_000), (4, 1_000), (5, 800), (8, 400))]


@pytest.mark.parametrize(("version", "world_size", "rounds"), thinned([*QUICK, *ROUNDS], lambda *case: case in QUICK))
def test_boards_among_messages_are_neither_overwritten_nor_read_before_they_are_written(
    version: str, world_size: int, rounds: int
) -> None:
    wrong = run_ranks(
        _show_in_turns, version, STRESS_ROUNDS or rounds, world_size=world_size, threads=1, timeout_s=3000
    )
    assert [text for of_rank in wrong for text in of_rank] == []


def _show_in_turns(version: str, rounds: int) -> list[str]:
    """Everything shown differs from all before it in every element; now and then a message goes between."""
    transport = shared_transport(version)
    rank, p = transport.rank, transport.world_size
    lengths = (1, 7, 64, 500, 3000)
    wrong: list[str] = []
    for round_ in range(rounds):
        n = MOST_BYTES // 8 if round_ % 200 == 0 else lengths[round_ % 5]
        mine = torch.full((n,), round_ * p + rank)
        parts = transport.show(mine)
        mine.fill_(-1)  # as the caller may, now
        if round_ % 11 == rank:  # read late, when the others may have come to the next
            time.sleep(0.0005)
        found = [(int(part.min()), int(part.max())) for part in parts]
        if found != [(round_ * p + other, round_ * p + other) for other in range(p)]:
            wrong.append(f"rank {rank}, round {round_}: {found}")
        if round_ % 7 == 0:  # a swap between two ranks, notes among more
            sent, received = torch.full((3,), round_ + rank), torch.zeros(3, dtype=torch.int64)
            source = (rank - 1) % p
            transport.run([Step(sent, (rank + 1) % p, received, source, False)])
            if received.tolist() != [round_ + source] * 3:
                wrong.append(f"rank {rank}, round {round_}: {received.tolist()} by message")
    return wrong[:5]  # and no sooner: the others would wait for a rank that stops


def test_nobody_is_counted_while_another_counts() -> None:
    assert run_ranks(_count_alone, world_size=3, timeout_s=60)[0] == [0, 0, 3.0]


def _count_alone() -> list[float]:
    """The count while this rank has the lock, before and after the others have come for it, and what all show then."""
    transport: Any = find_transport(None, CPU, SHARED)
    boards, x = transport._boards, torch.ones(1)
    counts: list[float] = []
    if dist.get_rank() == 0:
        assert boards._lock() == 0
        counts.append(boards._arrived[0])
    dist.barrier()
    if dist.get_rank() == 0:
        until_asleep(transport, 0, signals.lock(3), ranks=2)
        counts.append(boards._arrived[0])
        boards._unlock()
    return [*counts, sum(float(part) for part in transport.show(x))]


@pytest.mark.parametrize("world_size", [2, 3])
def test_more_lengths_than_are_kept_and_types_of_one_length(world_size: int) -> None:
    assert run_ranks(_show_every_length, world_size=world_size) == [[]] * world_size


def _show_every_length() -> list[str]:
    transport, wrong = find_transport(None, CPU, SHARED), []
    ranks = range(transport.world_size)
    for n in range(1, KEPT_LENGTHS + 20):
        for dtype in (torch.float32, torch.int32):
            found = transport.show(torch.full((n,), n + transport.rank, dtype=dtype))
            if [part.tolist() for part in found] != [[n + rank] * n for rank in ranks] or found[0].dtype != dtype:
                wrong.append(f"{n} of {dtype}")
    return wrong


@pytest.mark.parametrize("transport", [SHARED, POINT_TO_POINT])
def test_what_is_too_long_to_show_is_refused(transport: str) -> None:
    for said in run_ranks(_show_too_much, transport, world_size=2):
        assert said == ["expected a part of 1 to", "expected a part of 1 to", "[1.0, 1.0]"]


def _show_too_much(transport: str) -> list[str]:
    """What is said of too long a part and of an empty one, and what is shown afterwards."""
    via, said = find_transport(None, CPU, transport), []
    for length in (via.shown_bytes + 1, 0):
        try:
            via.show(torch.zeros(length, dtype=torch.uint8))
        except ValueError as error:
            said.append(str(error)[:23])
    return [*said, str([float(part) for part in via.show(torch.ones(1))])]


@pytest.mark.parametrize("lengths", [(10, 11, 10), (10, 1_000_000, 10), (1_000_000, 10, 1_000_000)])
def test_ranks_with_different_lengths_say_so(lengths: tuple[int, ...]) -> None:
    """Of which some show what they have, and others send messages."""
    said = run_ranks(_reduce_of_own_length, lengths, world_size=3, timeout_s=60)
    # A rank that has noticed leaves, and others may find it gone first.
    assert all("one shape and type" in text or "ended while" in text for text in said), said
    assert any("one shape and type" in text for text in said)


def _reduce_of_own_length(lengths: tuple[int, ...]) -> str:
    try:
        all_reduce(torch.ones(lengths[dist.get_rank()]), transport=SHARED)
    except RuntimeError as error:
        return str(error)
    return "nothing was noticed"


PLACES = ["before it comes", "with the lock", "before it is counted", "before it lets the others through"]


@pytest.mark.parametrize(
    ("place", "last"),
    thinned(product(PLACES, range(3)), lambda place, last: PLACES.index(place) % 3 == last),
)
def test_a_rank_that_dies_ends_the_wait_of_the_others(place: str, last: int) -> None:
    """Whoever was the last to come to the show before."""
    for said in run_ranks(_die_at, place, last, world_size=3, timeout_s=60)[:2]:
        assert said == "rank 2 ended while this rank waited for it"


def _die_at(place: str, last: int) -> str:
    """A process that has ended stands in for rank 2, which must live for the launcher's sake."""
    if dist.get_rank() == 2:
        os.environ[VARIABLE] = PYTHON  # which can be stopped in the middle
    transport: Any = find_transport(None, CPU, SHARED)
    boards, x = transport._boards, torch.ones(3)
    while dist.get_rank() == last and boards._arrived[0] < 2:
        time.sleep(0.01)
    transport.show(x)
    assert boards._arrived[1] == last
    if dist.get_rank() == 2:
        if place == "with the lock":
            boards._lock()
        dist.barrier()
        if place == "before it is counted":
            boards._meet = lambda: None
        if place == "before it lets the others through":
            boards._open = []
            while boards._arrived[0] < 2:
                time.sleep(0.01)
        if place in PLACES[2:]:
            with suppress(RuntimeError):  # where it has not waited for the others
                transport.show(x)
        dist.barrier()
        return ""
    child = os.fork()
    if child == 0:
        os._exit(7)
    transport._peers._descriptors[2] = os.pidfd_open(child)
    dist.barrier()
    try:
        transport.show(x)
        return "no error"
    except RuntimeError as error:
        return str(error)
    finally:
        dist.barrier()


@pytest.mark.parametrize(
    ("place", "awaited"),
    [("before it comes", "rank 2"), ("before it is counted", "a rank that has come, but has not been counted")],
)
def test_a_rank_that_does_not_come_ends_the_wait_at_the_time_out(place: str, awaited: str) -> None:
    assert run_ranks(_wait_in_vain, place, world_size=3)[:2] == [f"waited too long for {awaited}"] * 2


def _wait_in_vain(place: str) -> str:
    if dist.get_rank() == 2:
        os.environ[VARIABLE] = PYTHON
    transport: Any = find_transport(None, CPU, SHARED)
    transport._peers._timeout_s = 1.0  # it is to pass: and no sooner than the ranks have met on a loaded machine
    said = ""
    if dist.get_rank() == 2 and place == "before it is counted":
        transport._boards._meet = lambda: None
        with suppress(RuntimeError):  # it has not waited for the others
            transport.show(torch.ones(10))
    dist.barrier()
    if dist.get_rank() < 2:
        try:
            transport.show(torch.ones(10))
        except TimeoutError as error:
            said = str(error)
    dist.barrier()
    return said


def test_a_rank_that_is_let_through_late_is_not_confused_by_those_that_went_on() -> None:
    assert run_ranks(_let_through_late, world_size=3, timeout_s=60) == [[1.0], [0.0], []]


def _let_through_late() -> list[float]:
    """Rank 2 lets rank 0 through, and rank 1 much later; meanwhile rank 0 sends rank 1 a message."""
    transport: Any = find_transport(None, CPU, SHARED)
    rank, boards = transport.rank, transport._boards
    if rank == 2:
        to_0, to_1 = boards._open
        # Rank 0 has sent its message when it waits for one of rank 1's.
        boards._open = [to_0, lambda: (until_asleep(transport, 1, signals.filled(0)), to_1())]
        while boards._arrived[0] < 2:
            time.sleep(0.01)
    transport.show(torch.ones(3))
    if rank == 2:
        return []
    received = torch.full((1,), -1.0)
    transport.run([Step(torch.full((1,), float(rank)), 1 - rank, received, 1 - rank, False)])
    return received.tolist()


def test_groups_take_turns_in_inference_mode_and_out_of_it() -> None:
    assert run_ranks(_show_in_groups, world_size=3) == [[True] * 4] * 3


def _show_in_groups() -> list[bool]:
    groups, found = (None, dist.new_group([0, 1, 2])), []
    for inference in (True, False):
        for number, group in enumerate(groups):
            with torch.inference_mode(inference):
                x = torch.full((5,), dist.get_rank() + 10.0 * number)
                all_reduce(x, group, op="sum", transport=SHARED)
                found.append(x.tolist() == [3.0 + 30 * number] * 5)
    return found
