"""Short messages between two ranks through shared memory: none is torn, stale or out of turn."""

from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist

from labkit.parallel.collectives import all_reduce
from labkit.parallel.launch import run_ranks
from labkit.parallel.transport import SHARED, find_transport
from labkit.parallel.transport.contract import Step
from labkit.parallel.transport.semaphores import Semaphores
from labkit.parallel.transport.swaps import BUDGET_BYTES, KEPT_PLACES, MOST_BYTES, longest_swap
from tests.cases import thinned
from tests.parallel.versions import COMPILED, MIXED, PYTHON, VERSIONS, shared_transport

pytestmark = [
    pytest.mark.usefixtures("workers_travel_by_value"),
    pytest.mark.skipif(bool(Semaphores.unavailable()), reason=Semaphores.unavailable() or "there are some"),
]

CPU = torch.device("cpu")
# The whole number of rounds for every number of ranks is `make stress`.
STRESS_ROUNDS = int(os.environ.get("LABKIT_STRESS_ROUNDS", "0"))
# Versions, numbers of ranks and rounds: of `make test`, and of `make test-all`.
QUICK = [(COMPILED, 2, 600), (PYTHON, 2, 600), (COMPILED, 4, 100), (MIXED, 4, 100)]
ROUNDS = [(version, *case) for version in VERSIONS for case in ((2, 6_000), (3, 2_000), (4, 1_000), (5, 500), (8, 200))]


@pytest.mark.parametrize(("version", "world_size", "rounds"), thinned([*QUICK, *ROUNDS], lambda *case: case in QUICK))
def test_swaps_among_other_messages_are_neither_overwritten_nor_overtaken(
    version: str, world_size: int, rounds: int
) -> None:
    wrong = run_ranks(
        _swap_in_turns, version, STRESS_ROUNDS or rounds, world_size=world_size, threads=1, timeout_s=3000
    )
    assert [text for of_rank in wrong for text in of_rank] == []


def _swap_in_turns(version: str, rounds: int) -> list[str]:
    """Every message differs from all before it in every element; now and then one takes the longer way."""
    transport = shared_transport(version)
    rank, p = transport.rank, transport.world_size
    most = longest_swap(p) // 8  # elements
    lengths = (1, 7, 64, 500, 3000)
    wrong: list[str] = []
    for round_ in range(rounds):
        for distance in (1, 2, 4):
            other = rank ^ distance
            if other >= p:
                continue
            # The two lengths may differ, but both sides know both.
            n_low, n_high = lengths[round_ % 5], lengths[(round_ // 5 + distance) % 5]
            if round_ % 50 == 0:
                n_low = n_high = most
            sent, received = (n_low, n_high) if rank < other else (n_high, n_low)
            value = (3 * round_ + distance) * p
            mine, theirs = torch.full((sent,), value + rank), torch.full((received,), -value)
            is_added = round_ % 3 == 0
            steps = [Step(mine, other, theirs, other, is_added)]
            if round_ % 7 == 0:  # two messages at once are none that are swapped
                steps = [Step(mine, other, None, other, False), Step(None, other, theirs, other, is_added)]
            transport.run(steps)
            mine.fill_(-1)  # as the caller may, now
            expected = other if is_added else value + other
            if int(theirs.min()) != expected or int(theirs.max()) != expected:
                found = theirs.unique()[:5].tolist()
                wrong.append(f"rank {rank} from {other}, round {round_}: {found}, not {expected}")
    return wrong[:5]  # and no sooner: the others would wait for a rank that stops


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_swap_adds_in_place_and_divides(dtype: torch.dtype) -> None:
    assert run_ranks(_add_and_divide, dtype, world_size=2) == [[1.5] * 6] * 2


def _add_and_divide(dtype: torch.dtype) -> list[float]:
    transport = find_transport(None, CPU, SHARED)
    other = 1 - transport.rank
    once = torch.full((3,), 1.0 + transport.rank, dtype=dtype)
    transport.run([Step(once, other, once, other, True, 2)])
    kept, total = torch.full((3,), 1.0 + transport.rank, dtype=dtype), torch.full((3,), 2.0 - other, dtype=dtype)
    transport.run([Step(kept, other, total, other, True, 2)])
    assert kept.tolist() == [1.0 + transport.rank] * 3
    return [*once.tolist(), *total.tolist()]


def test_lengths_that_do_not_fit_are_an_error_on_both_ranks() -> None:
    first, second = run_ranks(_swap_of_wrong_lengths, world_size=2)
    assert (
        first
        == "rank 1 sent 44 bytes to rank 0, which expected 40: every rank must call with a tensor of one shape and type"
    )
    assert second.startswith("rank 0 sent 40 bytes to rank 1, which expected 44")


def _swap_of_wrong_lengths() -> str:
    transport = find_transport(None, CPU, SHARED)
    other, x = 1 - transport.rank, torch.ones(10 + transport.rank)
    try:
        transport.run([Step(x, other, x, other, True)])
    except RuntimeError as error:
        return str(error)
    return "nothing was noticed"


@pytest.mark.parametrize(("world_size", "lengths"), [(2, (10, 1_000_000)), (2, (100_000, 200_000)), (4, (10, 100_000))])
def test_where_one_rank_swaps_and_the_other_does_not_both_say_why(world_size: int, lengths: tuple[int, int]) -> None:
    said = run_ranks(_reduce_of_wrong_lengths, lengths, world_size=world_size, timeout_s=60)
    # A rank that has noticed leaves, and others may find it gone first.
    assert all("one shape and type" in text or "ended while" in text for text in said)
    assert any("one shape and type" in text for text in said)


def _reduce_of_wrong_lengths(lengths: tuple[int, int]) -> str:
    x = torch.ones(lengths[dist.get_rank() % 2])
    try:
        all_reduce(x, transport=SHARED)
    except RuntimeError as error:
        return str(error)
    return "nothing was noticed"


def test_more_lengths_than_places_are_kept() -> None:
    assert run_ranks(_swap_every_length, world_size=2) == [[], []]


def _swap_every_length() -> list[int]:
    transport = find_transport(None, CPU, SHARED)
    other, wrong = 1 - transport.rank, []
    for n in range(1, KEPT_PLACES + 50):
        x = torch.full((n,), float(n * (1 + transport.rank)))
        transport.run([Step(x, other, x, other, True)])
        if not bool((x == 3 * n).all()):
            wrong.append(n)
    return wrong


def test_slots_of_many_ranks_stay_within_their_budget() -> None:
    assert longest_swap(2) == MOST_BYTES
    for world_size in range(2, 129):
        n_bytes = longest_swap(world_size)
        assert 2 * (world_size - 1) * n_bytes <= BUDGET_BYTES
        assert n_bytes >= 4096
        assert n_bytes & (n_bytes - 1) == 0  # a whole number of elements, of any type
