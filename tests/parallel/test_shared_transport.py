"""The shared-memory transport: order under stress, memory that leaves nothing behind, and falling back.

What the algorithms compute over it is in `test_collectives.py`.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from labkit.parallel import collectives
from labkit.parallel.collectives import all_reduce, butterfly_all_reduce, ring_all_reduce
from labkit.parallel.launch import run_ranks
from labkit.parallel.transport import (
    POINT_TO_POINT,
    SHARED,
    empty_for_all_reduce,
    find_transport,
    mapping,
    shared,
    transport_in_use,
)
from labkit.parallel.transport.contract import Step
from labkit.parallel.transport.semaphores import Semaphores

pytestmark = pytest.mark.skipif(bool(Semaphores.unavailable()), reason=Semaphores.unavailable() or "there are some")

CPU = torch.device("cpu")
# The whole number of rounds for every number of ranks is `make stress`.
STRESS_ROUNDS = int(os.environ.get("LABKIT_STRESS_ROUNDS", "0"))


@pytest.fixture(scope="module", autouse=True)
def _workers_travel_by_value() -> Iterator[None]:
    """So that ranks need not import this module, and pytest with it."""
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def check_on_ranks(check: Callable[..., list[str]], *args: Any, world_size: int, **options: Any) -> None:
    wrong = run_ranks(check, *args, world_size=world_size, **options)
    assert [text for of_rank in wrong for text in of_rank] == []


# Order


@pytest.mark.parametrize(("world_size", "rounds"), [(2, 100_000), (3, 6_000), (5, 3_000), (8, 1_500)])
def test_no_message_is_read_before_it_is_written_or_written_before_it_is_read(world_size: int, rounds: int) -> None:
    check_on_ranks(_check_stress, STRESS_ROUNDS or rounds, world_size=world_size, threads=1, timeout_s=1800)


def _check_stress(rounds: int) -> list[str]:
    """Every message differs from all before it in every element, so that one torn or stale byte is seen."""
    transport = find_transport(None, CPU, SHARED)
    rank, p = transport.rank, transport.world_size
    right, left = (rank + 1) % p, (rank - 1) % p
    lengths = (1, 7, 64, 500, 3000)
    outgoing = {n: torch.empty(n, dtype=torch.int64) for n in lengths}
    registered = empty_for_all_reduce(2 * 6000, torch.int64)
    for round_ in range(rounds):
        if round_ % 500 == 0:
            by_reference, landing = registered[:6000], registered[6000:]
            by_reference.fill_(round_ * p + rank)
            transport.run([Step(by_reference, right, landing, left, False)])
            by_reference.fill_(-1)  # it has been taken, or this would be seen
            if not bool((landing == round_ * p + left).all()):
                return [f"rank {rank}: round {round_}, by reference: {landing.unique().tolist()}"]
        n = lengths[round_ % len(lengths)]
        outgoing[n].fill_(round_ * p + rank)
        incoming = torch.full((n,), -2, dtype=torch.int64)
        transport.run([Step(outgoing[n], right, incoming, left, False)])
        if int(incoming.min()) != round_ * p + left or int(incoming.max()) != round_ * p + left:
            return [f"rank {rank}: round {round_}, {n} values: {incoming.unique().tolist()}"]
    return []


@pytest.mark.parametrize("world_size", [2, 4])
def test_ranks_may_run_ahead_until_the_notes_are_full(world_size: int) -> None:
    check_on_ranks(_check_run_ahead, world_size=world_size)


def _check_run_ahead() -> list[str]:
    """Rank 0 only sends, many more messages than there are notes and slots, to ranks that begin late."""
    transport = find_transport(None, CPU, SHARED)
    wrong = []
    for number in range(10 * shared.NOTES):
        x = torch.full((100,), float(number))
        if transport.rank == 0:
            steps = [Step(x, target, None, 0, False) for target in range(1, transport.world_size)]
            transport.run(steps, depth=transport.world_size)
            continue
        if number == 0:
            time.sleep(0.2)
        y = torch.empty(100)
        transport.run([Step(None, 0, y, 0, False)])
        if not torch.equal(x, y):
            wrong.append(f"rank {transport.rank}: message {number} is {y[0]}")
    return wrong


# Memory


@pytest.mark.parametrize("world_size", [2, 3])
def test_memory_made_for_it_is_sent_without_a_copy_and_reduced_alike(world_size: int) -> None:
    check_on_ranks(_check_allocated, world_size=world_size)


def _check_allocated() -> list[str]:
    wrong = []
    p, rank = dist.get_world_size(), dist.get_rank()
    transport: Any = find_transport(None, CPU, SHARED)
    for length in (5, 10_000, 700_001):
        buffer = empty_for_all_reduce(length, torch.float32)
        for name, function in {**collectives.ALGORITHMS, "chooser": all_reduce}.items():
            for start in (0, length // 3):  # a part of it, too
                buffer.copy_(torch.arange(float(length)) + rank)
                part = buffer[start:]
                used_slots = []
                transport._free_slot, kept = _noting(transport._free_slot, used_slots), transport._free_slot
                function(part, op="sum", transport=SHARED)
                transport._free_slot = kept
                if not torch.equal(part, p * torch.arange(float(length))[start:] + p * (p - 1) / 2):
                    wrong.append(f"rank {rank}: {name} {length} from {start}")
                if name in ("ring", "butterfly") and length > 500_000 and used_slots:
                    wrong.append(f"rank {rank}: {name} {length}: copied {len(used_slots)} times")
    return wrong


def _noting(function: Callable[..., Any], calls: list[Any]) -> Callable[..., Any]:
    def noted(**options: Any) -> Any:
        calls.append(options)
        return function(**options)

    return noted


def test_allocations_are_used_again_once_no_rank_uses_them_and_given_back_otherwise() -> None:
    check_on_ranks(_check_reuse, world_size=2)


def _check_reuse() -> list[str]:
    transport: Any = find_transport(None, CPU, SHARED)
    found = {}
    first = empty_for_all_reduce(1000, torch.float64)
    pointer, view = first.data_ptr(), first[10:20]
    del first
    second = empty_for_all_reduce(1000, torch.float64)
    found["a view keeps it"] = second.data_ptr() != pointer and len(transport._allocations) == 3
    del view
    third = empty_for_all_reduce(1000, torch.float64)
    found["used again"] = third.data_ptr() == pointer and len(transport._allocations) == 3
    if dist.get_rank() == 0:
        del second  # rank 1 keeps its own
    fourth = empty_for_all_reduce(2000, torch.float64)
    found["kept for the other rank"] = len(transport._allocations) == 4
    del third, fourth
    second = None
    fifth = empty_for_all_reduce(3000, torch.float64)
    found["the rest is given back"] = len(transport._allocations) == 2
    fifth.fill_(dist.get_rank() + 1.0)
    ring_all_reduce(fifth, op="sum")
    found["and works"] = bool((fifth == 3).all())
    return [f"rank {dist.get_rank()}: {name}" for name, is_right in found.items() if not is_right]


def test_nothing_has_a_name_while_it_is_used_and_mappings_go_with_the_group() -> None:
    before = _names()
    check_on_ranks(_check_names, before, world_size=3)
    assert _names() <= before


def _names() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


def _check_names(before: set[str]) -> list[str]:
    group = dist.new_group([0, 1, 2])
    x = torch.ones(100_000)
    ring_all_reduce(x, group, transport=SHARED)
    buffer = empty_for_all_reduce(100_000, torch.float32, group=group)
    wrong = [f"/dev/shm/{name}" for name in _names() - before]
    if _mapped() != 6:
        wrong.append(f"{_mapped()} mappings, not a mailbox and an allocation of each of three ranks")
    dist.destroy_process_group(group)
    del group, buffer
    return wrong + ([f"{_mapped()} mappings are left"] if _mapped() else [])


def _mapped() -> int:
    return sum("memfd:labkit" in line for line in Path("/proc/self/maps").read_text().splitlines())


# Failures


def test_a_rank_that_dies_ends_the_wait_of_the_others_with_its_number() -> None:
    # what the launcher says of it is in test_launch; here the ranks that are left say it
    check_on_ranks(_check_death, world_size=3)


def _check_death() -> list[str]:
    """A process that has ended stands in for rank 2, which must live for the launcher's sake."""
    transport: Any = find_transport(None, CPU, SHARED)
    wrong = []
    if dist.get_rank() < 2:
        child = os.fork()
        if child == 0:
            os._exit(7)
        transport._peers._descriptors[2] = os.pidfd_open(child)
        try:
            transport.run([Step(None, 0, torch.empty(3), 2, False)])
            wrong.append("no error")
        except RuntimeError as error:
            if "rank 2 ended" not in str(error):
                wrong.append(str(error))
    dist.barrier()
    return wrong


def test_a_rank_that_does_not_come_ends_the_wait_at_the_time_out_and_the_group_is_of_no_use_then() -> None:
    check_on_ranks(_check_time_out, world_size=2)


def _check_time_out() -> list[str]:
    transport: Any = find_transport(None, CPU, SHARED)
    transport._timeout_s = 0.5
    wrong = []
    if dist.get_rank() == 0:
        for expected in ("waited too long for rank 1", "left before its end"):
            try:
                all_reduce(torch.ones(10), transport=SHARED)
                wrong.append("no error")
            except (TimeoutError, RuntimeError) as error:
                if expected not in str(error):
                    wrong.append(str(error))
    dist.barrier()
    return wrong


def test_tensors_of_different_sizes_are_an_error_that_names_them() -> None:
    check_on_ranks(_check_sizes, world_size=2)


def _check_sizes() -> list[str]:
    rank = dist.get_rank()
    try:
        all_reduce(torch.ones(10 + rank), transport=SHARED)
    except RuntimeError as error:
        return [] if f"sent {44 - 4 * rank} bytes" in str(error) else [str(error)]
    return ["no error"]


# Falling back


@pytest.mark.parametrize("cause", ["semaphores", "memory", "limit", "hosts", "open"])
def test_where_memory_cannot_be_shared_messages_go_point_to_point_and_the_reason_is_known(cause: str) -> None:
    check_on_ranks(_check_fallback, cause, world_size=3)


def _check_fallback(cause: str) -> list[str]:
    rank = dist.get_rank()
    expected = {
        "semaphores": "rank 1: none here",
        "memory": "rank 1: 2 MiB of shared memory could not be had: 0 MiB are available",
        "limit": "rank 1: 2 MiB of shared memory could not be had: File too large",
        "hosts": "several hosts",
        "open": "rank 1 cannot map the memory of rank 0",
    }[cause]
    if rank == 1:
        if cause == "semaphores":
            Semaphores.unavailable = staticmethod(lambda: "none here")  # type: ignore[method-assign]
        elif cause == "memory":
            mapping.psutil = _NoMemory  # type: ignore[assignment]
        elif cause == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
        elif cause == "hosts":
            mapping.host_identity = lambda: "another"  # type: ignore[assignment]
        else:
            mapping._open = _refuse  # type: ignore[assignment]
    wrong = []
    name, why = transport_in_use()
    if name != POINT_TO_POINT or expected not in why:
        wrong.append(f"rank {rank}: {name}, {why}")
    x = torch.full((1000,), float(rank))
    all_reduce(x)
    if not bool((x == 1).all()) or empty_for_all_reduce(10, torch.float16).shape != (10,):
        wrong.append(f"rank {rank}: wrong after falling back")
    try:
        butterfly_all_reduce(x, transport=SHARED)
        wrong.append("shared memory was had after all")
    except ValueError as error:
        if "cannot share memory" not in str(error) or expected not in str(error):
            wrong.append(str(error))
    if _mapped():
        wrong.append(f"rank {rank}: {_mapped()} mappings are left")
    return wrong


class _NoMemory:
    @staticmethod
    def virtual_memory() -> Any:
        return type("Memory", (), {"available": 0})


def _refuse(note: dict[str, Any], n_bytes: int) -> Any:
    raise PermissionError("not allowed")


def test_too_large_an_allocation_falls_back_to_memory_that_is_copied() -> None:
    check_on_ranks(_check_large, world_size=2)


def _check_large() -> list[str]:
    rank = dist.get_rank()
    all_reduce(torch.ones(3))
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
    x = empty_for_all_reduce(2**20, torch.float32)
    x.fill_(rank)
    all_reduce(x, op="sum")
    transport: Any = find_transport(None, CPU)
    return [] if bool((x == 1).all()) and len(transport._allocations) == 1 else [f"rank {rank}"]


def test_an_unknown_transport_is_refused() -> None:
    check_on_ranks(_check_unknown, world_size=1)


def _check_unknown() -> list[str]:
    try:
        all_reduce(torch.ones(3), transport="pigeon")
    except ValueError as error:
        return [] if "auto, point_to_point, shared" in str(error) else [str(error)]
    return ["accepted"]
