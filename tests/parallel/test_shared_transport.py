"""The shared-memory transport: order under stress, memory that leaves nothing behind, and falling back.

What the algorithms compute over it is in `test_collectives.py`.
"""

from __future__ import annotations

import os
import resource
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

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
    signals,
    transport_in_use,
)
from labkit.parallel.transport.contract import Step
from labkit.parallel.transport.messages import NOTES, OUTBOXES, SLOT_BYTES
from labkit.parallel.transport.semaphores import Semaphores
from tests import shared_memory
from tests.cases import thinned
from tests.parallel.versions import COMPILED, MIXED, PYTHON, VERSIONS, shared_transport
from tests.parallel.waiting import until_asleep

pytestmark = [
    pytest.mark.usefixtures("workers_travel_by_value"),
    pytest.mark.skipif(bool(Semaphores.unavailable()), reason=Semaphores.unavailable() or "there are some"),
]

CPU = torch.device("cpu")
UNTOUCHED = 171  # of an outbox that is full of it
# The whole number of rounds for every number of ranks is `make stress`.
STRESS_ROUNDS = int(os.environ.get("LABKIT_STRESS_ROUNDS", "0"))


def check_on_ranks(check: Callable[..., list[str]], *args: Any, world_size: int, **options: Any) -> None:
    wrong = run_ranks(check, *args, world_size=world_size, **options)
    assert [text for of_rank in wrong for text in of_rank] == []


# Order

# Versions, numbers of ranks and rounds: of `make test`, and of `make test-all`.
QUICK = [(COMPILED, 2, 2_000), (PYTHON, 2, 2_000), (COMPILED, 4, 200), (MIXED, 4, 200)]
ROUNDS = [
    (version, *case) for version in VERSIONS for case in ((2, 20_000), (3, 3_000), (4, 2_000), (6, 1_000), (8, 600))
]


@pytest.mark.parametrize(("version", "world_size", "rounds"), thinned([*QUICK, *ROUNDS], lambda *case: case in QUICK))
def test_no_message_is_read_before_it_is_written_or_written_before_it_is_read(
    version: str, world_size: int, rounds: int
) -> None:
    check_on_ranks(_check_stress, version, STRESS_ROUNDS or rounds, world_size=world_size, threads=1, timeout_s=3000)


def _check_stress(version: str, rounds: int) -> list[str]:
    """Every message differs from all before it in every element, so that one torn or stale byte is seen."""
    transport = shared_transport(version)
    rank, p = transport.rank, transport.world_size
    registered = empty_for_all_reduce((p + 1) * 6000, torch.int64)
    lengths = (1, 7, 64, 500, 3000)
    wrong = []
    for round_ in range(rounds):
        n, value = lengths[round_ % 5], round_ * p
        if round_ % 97 == 0:  # by reference, and changed as soon as it may be
            parts = registered.split(6000)
            parts[p].fill_(value + rank)
            everybody = [(parts[(rank - s) % p], (rank + s) % p, (rank - s) % p) for s in range(1, p)]
            transport.run(_by_notes([Step(parts[p], to, part, source, False) for part, to, source in everybody]), p)
            parts[p].fill_(-1)
            found = [(parts[source], value + source) for _, _, source in everybody]
        elif round_ % 5 == 0:  # a stream one way, while its readers are behind: more than there are notes and slots
            sender = (round_ // 5) % p
            stream = [torch.full((n,), value + number) for number in range(2 * NOTES)]
            if rank == sender:
                targets = [target for target in range(p) if target != sender]
                transport.run([Step(x, to, None, 0, False) for x in stream for to in targets], depth=len(targets))
                for x in stream:
                    x.fill_(-1)
                found = []
            else:
                landed = [torch.full((n,), -2) for _ in stream]
                transport.run([Step(None, 0, x, sender, False) for x in landed])
                found = [(x, value + number) for number, x in enumerate(landed)]
        else:  # everybody to everybody, added: one copy serves all targets
            mine, total = torch.full((n,), value + rank), torch.zeros(n, dtype=torch.int64)
            turns = [((rank + s) % p, (rank - s) % p) for s in range(1, p)]
            transport.run(_by_notes([Step(mine, to, total, source, True) for to, source in turns]), p)
            found = [(total, sum(value + other for other in range(p) if other != rank))]
        for x, expected in found:
            if int(x.min()) != expected or int(x.max()) != expected:
                wrong.append(f"rank {rank}: round {round_}: {x.unique()[:5].tolist()}, not {expected}")
    return wrong[:5]


def _by_notes(steps: list[Step]) -> list[Step]:
    """The steps, so that none is a swap (`test_swaps.py`): between two ranks a single one would be."""
    if len(steps) > 1:
        return steps
    (step,) = steps
    return [step._replace(incoming=None, add=False), step._replace(outgoing=None)]


@pytest.mark.parametrize(
    ("version", "world_size"),
    thinned(product(VERSIONS, [2, 4]), lambda version, world_size: (version == COMPILED) != (world_size == 2)),
)
def test_ranks_may_run_ahead_until_the_notes_are_full(version: str, world_size: int) -> None:
    check_on_ranks(_check_run_ahead, version, world_size=world_size)


def _check_run_ahead(version: str) -> list[str]:
    """Rank 0 only sends, many more messages than there are notes and slots, to ranks that begin late."""
    transport = shared_transport(version)
    rank, wrong = transport.rank, []

    def until_it_is_full() -> None:
        until_asleep(transport, 0, signals.taken(transport.world_size, rank))

    for number in range(10 * NOTES):
        x = torch.full((100,), float(number))
        if rank == 0:
            steps = [Step(x, target, None, 0, False) for target in range(1, transport.world_size)]
            transport.run(steps, depth=transport.world_size)
            continue
        if number == 0:
            until_it_is_full()
        y = torch.empty(100)
        transport.run([Step(None, 0, y, 0, False)])
        if not torch.equal(x, y):
            wrong.append(f"rank {rank}: message {number} is {y[0]}")
    # By reference there are no slots to wait for: only the notes are counted.
    number = 3 * NOTES
    parts = empty_for_all_reduce(number * 10_000, torch.float32).split(10_000)
    for index, part in enumerate(parts):
        part.fill_(index if rank == 0 else -1)
    if rank == 0:
        transport.run([Step(part, 1, None, 0, False) for part in parts], depth=number)
    elif rank == 1:
        until_it_is_full()
        transport.run([Step(None, 0, part, 0, False) for part in parts])
        wrong += [
            f"by reference, {index}: {part[0]}" for index, part in enumerate(parts) if not bool((part == index).all())
        ]
    return wrong


# Memory


@pytest.mark.parametrize(
    ("version", "world_size"),
    thinned(product(VERSIONS, [2, 3]), lambda version, world_size: (version == COMPILED) == (world_size == 3)),
)
def test_memory_made_for_it_is_sent_without_a_copy_and_reduced_alike(version: str, world_size: int) -> None:
    check_on_ranks(_check_allocated, version, world_size=world_size)


def _check_allocated(version: str) -> list[str]:
    wrong = []
    p, rank = dist.get_world_size(), dist.get_rank()
    transport: Any = shared_transport(version)
    outbox = transport._allocations[OUTBOXES].of_rank[rank]
    for length in (5, 10_000, 700_001):
        buffer = empty_for_all_reduce(length, torch.float32)
        for name, function in {**collectives.ALGORITHMS, "chooser": all_reduce}.items():
            for start in (0, length // 3):  # a part of it, too
                buffer.copy_(torch.arange(float(length)) + rank)
                part = buffer[start:]
                dist.barrier()  # others have read what was in it
                outbox.fill_(UNTOUCHED)
                function(part, op="sum", transport=SHARED)
                if not torch.equal(part, p * torch.arange(float(length))[start:] + p * (p - 1) / 2):
                    wrong.append(f"rank {rank}: {name} {length} from {start}")
                if name in ("ring", "butterfly") and length > 500_000 and bool((outbox != UNTOUCHED).any()):
                    wrong.append(f"rank {rank}: {name} {length}: copied")
    return wrong


def test_allocations_are_used_again_once_no_rank_uses_them_and_given_back_otherwise() -> None:
    check_on_ranks(_check_reuse, world_size=2)


def _check_reuse() -> list[str]:
    transport: Any = find_transport(None, CPU, SHARED)
    found = {}
    first = empty_for_all_reduce(1000, torch.float64)
    first.zero_()
    ring_all_reduce(first)  # keeps no part of it
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
    before = shared_memory.names()
    check_on_ranks(_check_names, world_size=3)
    assert shared_memory.left_behind(before) == set()


def _check_names() -> list[str]:
    before = shared_memory.mapped_here()
    group = dist.new_group([0, 1, 2])
    x = torch.ones(200_000)
    for length in (200_000, 10):  # by messages, and by what all show to all
        all_reduce(x[:length], group, transport=SHARED)
    buffer = empty_for_all_reduce(100_000, torch.float32, group=group)
    wrong = [*(shared_memory.mapped_here() - before)]
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


def test_a_rank_that_has_done_its_part_may_leave_while_others_still_wait() -> None:
    check_on_ranks(_check_leaving, world_size=3)


def _check_leaving() -> list[str]:
    """Rank 0 sends and is gone, as far as rank 1 can see, while rank 1 waits for rank 2."""
    transport: Any = find_transport(None, CPU, SHARED)
    rank, x, y = dist.get_rank(), torch.ones(3), torch.zeros(3)
    if rank == 1:
        child = os.fork()
        if child == 0:
            os._exit(0)
        transport._peers._descriptors[0] = os.pidfd_open(child)
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        check = transport._peers.check

        def look_and_tell(*arguments: Any) -> None:
            transport._peers.check = check
            check(*arguments)
            dist.send(torch.ones(1), 2)

        transport._peers.check = look_and_tell
        steps = [Step(None, 0, y, 2, False), Step(None, 0, x, 0, False)]
        transport.run(steps)  # what rank 0 had sent before it left is there, too
    else:
        if rank == 2:
            dist.recv(torch.ones(1), 1)  # rank 1 has looked who is there
        transport.run([Step(x + rank, 1, None, 0, False)])
    dist.barrier()
    return [] if rank != 1 or (x.tolist(), y.tolist()) == ([1.0] * 3, [3.0] * 3) else [f"{x} {y}"]


def test_a_rank_that_does_not_come_ends_the_wait_at_the_time_out_and_the_group_is_of_no_use_then() -> None:
    check_on_ranks(_check_time_out, world_size=2)


def _check_time_out() -> list[str]:
    transport: Any = find_transport(None, CPU, SHARED)
    transport._peers._timeout_s = 0.5
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


@pytest.mark.parametrize("version", [COMPILED, PYTHON])
@pytest.mark.parametrize("part", ["long", "strided"])
def test_a_part_that_no_algorithm_may_send_is_refused_or_sent_right(version: str, part: str) -> None:
    check_on_ranks(_check_part, version, part, world_size=2)


def _check_part(version: str, part: str) -> list[str]:
    transport = shared_transport(version)
    n = 5 * SLOT_BYTES // 4  # more than all slots
    sent = torch.arange(float(n)) if part == "long" else torch.arange(200.0)[::2]
    received = torch.zeros(len(sent))
    try:
        transport.run([Step(sent, 1 - transport.rank, received, 1 - transport.rank, False)])
    except ValueError as error:
        return [] if "expected" in str(error) else [str(error)]
    return [] if torch.equal(received, sent) else [f"got {received[:4].tolist()}"]


def test_memory_of_different_sizes_is_refused_on_every_rank_and_the_transport_works_on() -> None:
    check_on_ranks(_check_sizes_of_memory, world_size=2, timeout_s=60)


def _check_sizes_of_memory() -> list[str]:
    rank, wrong = dist.get_rank(), []
    kept = empty_for_all_reduce(100_000, torch.float32)
    del kept  # free, so that one rank could use it again, and the other makes a new one
    for here in (100_000 + rank, 50_000 * (2 - rank), 100_000 * rank):
        try:
            empty_for_all_reduce(here, torch.float32)
            wrong.append(f"rank {rank}: {here} was accepted")
        except ValueError as error:
            if f"({4 * here} here)" not in str(error):
                wrong.append(str(error))
    buffer = empty_for_all_reduce(100_000, torch.float32)
    buffer.fill_(rank)
    ring_all_reduce(buffer, op="sum", transport=SHARED)
    return wrong if bool((buffer == 1).all()) else [*wrong, f"rank {rank}: wrong afterwards"]


def test_a_tensor_of_inference_mode_is_refused_outside_of_it_and_the_transport_works_on() -> None:
    check_on_ranks(_check_inference, world_size=2, timeout_s=60)


def _check_inference() -> list[str]:
    with torch.inference_mode():
        x = torch.ones(10)
    wrong = []
    for algorithm in (*collectives.ALGORITHMS.values(), all_reduce):
        try:
            algorithm(x, transport=SHARED)
            wrong.append(f"{algorithm.__name__} accepted it")
        except ValueError:
            pass
    y = torch.ones(10)
    all_reduce(y, op="sum", transport=SHARED)
    with torch.inference_mode():
        all_reduce(x, op="sum", transport=SHARED)
        found = (x + y).tolist()
    return wrong if found == [4.0] * 10 else [*wrong, f"{found}"]


# Falling back


@pytest.mark.parametrize("cause", ["semaphores", "memory", "limit", "hosts", "open", "processes"])
def test_where_memory_cannot_be_shared_messages_go_point_to_point_and_the_reason_is_known(cause: str) -> None:
    check_on_ranks(_check_fallback, cause, world_size=3)


def _check_fallback(cause: str) -> list[str]:
    rank = dist.get_rank()
    expected = {
        "semaphores": "rank 1: none here",
        "memory": "rank 1: 4 MiB of shared memory could not be had: 0 MiB are available to 3 ranks",
        "limit": "rank 1: 4 MiB of shared memory could not be had: File too large",
        "hosts": "several hosts",
        "open": "rank 1: the memory of rank 0 cannot be used: not allowed",
        "processes": "rank 1: what is mapped cannot be used: not allowed",
    }[cause]
    if rank == 1:
        if cause == "semaphores":
            Semaphores.unavailable = staticmethod(lambda: "none here")  # type: ignore[method-assign]
        elif cause == "memory":
            mapping.available_memory_bytes = lambda: 0  # type: ignore[assignment]
        elif cause == "limit":
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
        elif cause == "hosts":
            mapping.host_identity = lambda: "another"  # type: ignore[assignment]
        elif cause == "open":
            mapping._open = _refuse  # type: ignore[assignment]
        else:
            os.pidfd_open = _refuse
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


def _refuse(*_: Any) -> Any:
    raise PermissionError("not allowed")


def test_too_large_an_allocation_falls_back_to_memory_that_is_copied() -> None:
    check_on_ranks(_check_large, world_size=2)


def _check_large() -> list[str]:
    rank = dist.get_rank()
    all_reduce(torch.ones(3))
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, resource.RLIM_INFINITY))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        x = empty_for_all_reduce(2**20, torch.float32)
    x.fill_(rank)
    all_reduce(x, op="sum")
    transport: Any = find_transport(None, CPU)
    found = {
        "sum": bool((x == 1).all()),
        "not shared": len(transport._allocations) == 1,
        "reason": "File too large" in transport.why_copied,
        "warned": any("File too large" in str(warning.message) for warning in seen),
    }
    return [f"rank {rank}: {name}" for name, is_right in found.items() if not is_right]


def test_an_unknown_transport_is_refused() -> None:
    check_on_ranks(_check_unknown, world_size=1)


def _check_unknown() -> list[str]:
    try:
        all_reduce(torch.ones(3), transport="pigeon")
    except ValueError as error:
        return [] if "auto, point_to_point, shared" in str(error) else [str(error)]
    return ["accepted"]
