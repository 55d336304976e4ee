"""Shared memory: order under stress, failures of ranks, memory that leaves nothing behind, falling
back, compiling.

What algorithms compute over it is in `test_collectives.py`.
"""

from __future__ import annotations

import functools
import os
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from labkit.parallel.collectives import all_gather, all_reduce, butterfly_all_reduce
from labkit.parallel.exchange import exchange
from labkit.parallel.launch import run_ranks
from labkit.parallel.messages import gather_json
from labkit.parallel.transport import (
    POINT_TO_POINT,
    SHARED,
    find_transport,
    library,
    shared_memory,
    transport_in_use,
)
from labkit.parallel.transport.base import SharedMemoryUnavailable, Transfer
from labkit.parallel.transport.shared_memory import SharedTransport
from tests.parallel.shared_ranks import on_ranks

WHY_NOT = library.unavailable_reason()
pytestmark = pytest.mark.skipif(WHY_NOT is not None, reason=str(WHY_NOT))

CPU = torch.device("cpu")
NOTES = 16  # messages that one rank may send another before they are taken
# The full number of rounds for every number of ranks is `make stress`.
STRESS_ROUNDS = int(os.environ.get("LABKIT_STRESS_ROUNDS", "0"))


def _replace_process(transport: Any, rank: int) -> None:
    """Let a process that has ended stand in for a rank, which must live for the launcher's sake."""
    child = os.fork()
    if child == 0:
        os._exit(7)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    ended = os.pidfd_open(child)
    os.dup2(ended, transport._processes[rank])
    os.close(ended)


def in_group(check: Callable[[dist.ProcessGroup], None]) -> Callable[[], None]:
    """Run a check in a group of its own, which is destroyed after it with all of its memory."""

    @functools.wraps(check)
    def run() -> None:
        before = _count_mappings()
        group = dist.new_group()
        check(group)
        dist.barrier()
        dist.destroy_process_group(group)
        del group
        assert _count_mappings() == before

    return run


@on_ranks(3)
@in_group
def test_death(group: dist.ProcessGroup) -> None:
    """A rank that dies ends the wait of the others with its number."""
    transport = find_transport(group, CPU, SHARED)
    if dist.get_rank() < 2:
        _replace_process(transport, 2)
        for expected in ("rank 2 ended", "cut short"):  # and the group is of no use afterwards
            with pytest.raises(RuntimeError, match=expected):
                transport.run([[Transfer(None, 0, torch.empty(3), 2)]])


@on_ranks(2)
@in_group
def test_leaving(group: dist.ProcessGroup) -> None:
    """What a rank sent before it left still arrives."""
    transport = find_transport(group, CPU, SHARED)
    received = torch.zeros(3)
    if dist.get_rank() == 0:
        transport.run([[Transfer(torch.ones(3), 1, None, 0)]])
    dist.barrier(group)
    if dist.get_rank() == 1:
        _replace_process(transport, 0)
        transport.run([[Transfer(None, 0, received, 0)]])
        assert received.tolist() == [1.0] * 3


@on_ranks(2)
@in_group
def test_left_group(group: dist.ProcessGroup) -> None:
    """A rank whose group is destroyed ends the wait of the others, long before the time-out."""
    left = dist.new_group([0, 1], use_local_synchronization=True)
    transport = find_transport(left, CPU, SHARED)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="rank 1 ended"):
            transport.run([[Transfer(None, 0, torch.empty(3), 1)]])
    dist.destroy_process_group(left)


@on_ranks(2)
@in_group
def test_time_out(group: dist.ProcessGroup) -> None:
    """A rank that does not come ends the wait at the time-out."""
    transport = SharedTransport(group, 0.5)
    if dist.get_rank() == 0:
        with pytest.raises(TimeoutError, match="rank 1"):
            all_reduce(torch.ones(10), group, transport=transport)
    dist.barrier(group)


@on_ranks(2)
@in_group
def test_parts(group: dist.ProcessGroup) -> None:
    """Parts that cannot be sent are refused before any message."""
    transport = find_transport(group, CPU, SHARED)
    x = torch.ones(3)
    other = 1 - transport.rank
    for part, add in ((torch.arange(200.0)[::2], False), (torch.ones(3, dtype=torch.int32), True)):
        with pytest.raises(ValueError, match="expected"):
            transport.run(
                [
                    [
                        Transfer(torch.ones(1), other, torch.ones(1), other),
                        Transfer(part, other, part, other, add),
                    ]
                ]
            )
    transport.run([[Transfer(x, other, x, other, True)]])
    assert x.tolist() == [2.0] * 3


@on_ranks(3)
@in_group
def test_mappings(group: dist.ProcessGroup) -> None:
    """Nothing has a name, and there is a mapping for each rank of the group."""
    before = _count_mappings()
    all_reduce(torch.ones(200_000), group, transport=SHARED)
    assert _count_mappings() == before + 3
    assert "/dev/shm/" not in Path("/proc/self/maps").read_text()


def _count_mappings() -> int:
    return sum("memfd:labkit" in line for line in Path("/proc/self/maps").read_text().splitlines())


Call = Callable[[dist.ProcessGroup], None]


def _reduce(length: int, op: str = "sum", dtype: torch.dtype = torch.float32) -> Call:
    return lambda group: all_reduce(torch.ones(length, dtype=dtype), group, op, transport=SHARED)


def _gather(length: int) -> Call:
    return lambda group: all_gather(torch.ones(length), group, transport=SHARED)


def _exchange(length: int) -> Call:
    other = 1 - dist.get_rank()
    tensors = torch.ones(3 << 17), torch.ones(length)
    return lambda group: exchange(tensors[0], other, tensors[1], other, group, transport=SHARED)


DIFFERENT_CALLS: dict[str, Callable[[], list[Call]]] = {
    "lengths": lambda: [_reduce(10), _reduce(11)],
    "long": lambda: [_reduce(100_000), _reduce(200_000)],
    "one of three": lambda: [_reduce(10), _reduce(11), _reduce(10)],
    "one of four, long": lambda: [_reduce(10), _reduce(1_000_000), _reduce(10), _reduce(10)],
    "gathers": lambda: [_gather(4), _gather(5)],
    "mean and sum": lambda: [_reduce(4, "mean"), _reduce(4)],
    "dtypes of one size": lambda: [
        _reduce(4, "mean", torch.float16),
        _reduce(4, "mean", torch.bfloat16),
    ],
    "another collective": lambda: [_gather(8), _reduce(4)],
    "exchange": lambda: [_exchange(3 << 17), _exchange(2 << 17)],
    "nothing": lambda: [_reduce(4), _reduce(0)],
    "gathers, one of three": lambda: [_gather(1), _gather(1), _gather(2)],
    "no such op": lambda: [_reduce(4), _reduce(4, "max"), _reduce(4)],
    "no such dtype": lambda: [_reduce(4), _reduce(4, "mean", torch.int64)],
}
"""Calls of two to four ranks, one each, that do not fit together."""


def _error_text(call: Call, group: dist.ProcessGroup) -> str:
    """The error of this rank's call, or of the next one."""
    try:
        call(group)
        all_reduce(torch.ones(1), group, transport=SHARED)
        return ""
    except (RuntimeError, ValueError) as error:
        return str(error)


@on_ranks(4)
@pytest.mark.parametrize("case", DIFFERENT_CALLS)
def test_ranks_that_make_different_calls_say_so(case: str) -> None:
    calls = DIFFERENT_CALLS[case]()
    group = dist.new_group(range(len(calls)))
    text = _error_text(calls[dist.get_rank()], group) if dist.get_rank() < len(calls) else None
    errors = [error for error in gather_json(text) if error is not None]
    assert any("the same call, with one shape and dtype" in error for error in errors)
    known = "same call|ended or failed|op must be|dtypes float64"
    assert all(re.search(known, error) for error in errors), errors


WAITING_AT_THE_END = """
import sys, threading, time
import torch, torch.distributed as dist
from labkit.parallel.transport.base import Transfer
from labkit.parallel.transport.shared_memory import SharedTransport
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
transport = SharedTransport(dist.group.WORLD, 400.0)
rounds = [[Transfer(None, 0, torch.zeros(4), 0)]]
threading.Thread(target=transport.run, args=(rounds,), daemon=True).start()
time.sleep(0.3)
dist.destroy_process_group()
sys.exit(3)
"""


def test_a_program_that_ends_while_a_thread_waits_ends_with_its_status() -> None:
    """Python ends such a thread as it comes back, which some C++ destructors would take the process
    down for."""
    result = subprocess.run(
        [sys.executable, "-c", WAITING_AT_THE_END], capture_output=True, text=True, timeout=200
    )
    assert (result.returncode, result.stderr) == (3, "")


@on_ranks(3)
def test_ranks_that_cannot_share_memory_send_point_to_point_and_say_why() -> None:
    """One of three ranks lacks what shared memory needs, one thing after another."""
    denied = _refuse(PermissionError, "not allowed")
    closed = "rank 1: another rank's memory or process cannot be opened: not allowed"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for place, name, replaced, expected in (
        (
            shared_memory,
            "load_library",
            _refuse(SharedMemoryUnavailable, "none here"),
            "rank 1: none here",
        ),
        (
            shared_memory,
            "available_memory_bytes",
            lambda: 0,
            "rank 1: 3 ranks need 6 MiB, 0 MiB are",
        ),
        (shared_memory, "host_identity", lambda: "another", "several hosts"),
        (shared_memory, "_open_mailbox", denied, closed),
        (os, "pidfd_open", denied, closed),
        (resource, "RLIMIT_FSIZE", resource.RLIMIT_FSIZE, "rank 1: [Errno 27] File too large"),
    ):
        group = dist.new_group()
        with pytest.MonkeyPatch.context() as patched:
            if dist.get_rank() == 1:
                patched.setattr(place, name, replaced)
                resource.setrlimit(
                    resource.RLIMIT_FSIZE, (2**20 if place is resource else soft, hard)
                )
            try:
                _check_fallback(group, expected)
            finally:  # the ranks serve other tests, too
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _check_fallback(group: dist.ProcessGroup, expected: str) -> None:
    before = _count_mappings()
    name, reason = transport_in_use(group)
    assert name == POINT_TO_POINT
    assert expected in reason
    x = torch.full((1000,), float(dist.get_rank()))
    all_reduce(x, group)
    assert (x == 1).all()
    with pytest.raises(ValueError, match=f"cannot share memory.*{re.escape(expected)}"):
        butterfly_all_reduce(x, group, transport=SHARED)
    assert _count_mappings() == before


def _refuse(kind: type[Exception], reason: str) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise kind(reason)

    return refuse


@on_ranks(2, 4)
def test_no_message_is_read_too_early_or_written_over() -> None:
    pass_messages({2: 2_000, 4: 200}[dist.get_world_size()])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "rounds"), [(2, 20_000), (3, 3_000), (4, 2_000), (6, 1_000), (8, 600)]
)
def test_no_message_is_read_before_it_is_written_in_many_rounds(
    world_size: int, rounds: int
) -> None:
    run_ranks(pass_messages, STRESS_ROUNDS or rounds, world_size=world_size, timeout_s=3000)


def pass_messages(rounds: int) -> None:
    """Every message differs from all before it in every element, so that one torn or stale byte is
    noticed."""
    transport = find_transport(None, CPU, SHARED)
    rank = transport.rank
    p = transport.world_size
    lengths = (1, 7, 64, 500, 3000)
    for round_ in range(rounds):
        n = lengths[round_ % 5]
        value = round_ * p
        # a stream one way, whose readers are behind: more than there are notes and slots
        if round_ % 5 == 0:
            sender = (round_ // 5) % p
            stream = [torch.full((n,), value + number) for number in range(2 * NOTES)]
            if rank == sender:
                targets = [target for target in range(p) if target != sender]
                transport.run([[Transfer(x, to, None, 0) for to in targets] for x in stream])
                received = []
            else:
                landed = [torch.full((n,), -2) for _ in stream]
                transport.run([[Transfer(None, 0, x, sender)] for x in landed])
                received = [(x, value + number) for number, x in enumerate(landed)]
            for x in stream:
                x.fill_(-1)  # as the caller may, now
        elif round_ % 5 == 1:  # a swap, with lengths that differ
            other = rank ^ 1
            if other >= p:
                continue
            sizes = (n, lengths[(round_ // 5) % 5])
            mine = torch.full((sizes[rank % 2],), value + rank)
            theirs = torch.zeros(sizes[other % 2], dtype=torch.int64)
            transport.run([[Transfer(mine, other, theirs, other)]])
            mine.fill_(-1)
            received = [(theirs, value + other)]
        else:  # everybody to everybody, added: one copy serves all targets
            mine = torch.full((n,), value + rank)
            total = torch.zeros(n, dtype=torch.int64)
            pairs = [((rank + s) % p, (rank - s) % p) for s in range(1, p)]
            transport.run([[Transfer(mine, to, total, source, True) for to, source in pairs]])
            mine.fill_(-1)
            received = [(total, sum(value + other for other in range(p) if other != rank))]
        for x, expected in received:
            assert int(x.min()) == int(x.max()) == expected, round_


# Compiling the library: once, by one process, for this user; and what happens if that fails


def _load() -> str:
    """The library's file, loaded as in a process that has not loaded it yet; or why there is
    none."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(library, "load_library", library.load_library.__wrapped__)
        return library.unavailable_reason() or str(library.load_library()._name)


def _set_compiler(patch: pytest.MonkeyPatch, folder: Path, script: str) -> str:
    """Have the library compiled by a script, which notes its calls, into an empty cache."""
    path = folder / "compiler"
    path.write_text(f"#!/bin/sh\necho called >> {folder}/calls\n{script}\n")
    path.chmod(0o700)
    patch.setenv("CXX", str(path))
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    return str(path)


@pytest.fixture
def compiled() -> str:
    """Lines of a compiler's script that takes the library from where it is compiled already."""
    file = library.load_library()._name
    return f'while [ "$1" != -o ]; do shift; done; exec cp {file} "$2"'


def test_processes_that_start_together_build_it_once_and_print_nothing(
    tmp_path: Path,
    compiled: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    _set_compiler(monkeypatch, tmp_path, f"sleep 0.2; {compiled}")
    (file,) = set(run_ranks(_load, world_size=2))
    assert _load() == file
    assert (tmp_path / "calls").read_text() == "called\n"
    assert {path.name for path in Path(file).parent.iterdir()} == {"library.so", "lock"}
    assert capfd.readouterr() == ("", "")


def test_a_failure_is_one_line_and_not_kept(
    tmp_path: Path, compiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = "cc1plus: error: cannot write: No space left on device"
    compiler = _set_compiler(
        monkeypatch, tmp_path, f'echo "In file x:"; echo "{message}" >&2; exit 1'
    )
    assert _load() == f"{compiler} failed: {message}"
    with monkeypatch.context() as patched:
        patched.setenv(library.FAILURE, "none")
        assert _load() == "none"
    assert (tmp_path / "calls").read_text() == "called\n"  # ranks take their launcher's word
    _set_compiler(monkeypatch, tmp_path, compiled)
    assert _load().endswith("library.so")


def test_a_full_temporary_folder_does_not_matter(
    tmp_path: Path, compiled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _set_compiler(
        monkeypatch, tmp_path, f'case "$TMPDIR" in */cache/labkit/*) {compiled};; esac; exit 1'
    )
    assert _load().endswith("library.so")


@pytest.mark.parametrize(
    ("missing", "package"), [("PATH", "g++"), ("CXX", "g++"), ("headers", "python3-dev")]
)
def test_what_is_missing_to_compile_is_named_with_what_to_install(
    missing: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    library.load_library.cache_clear()
    if missing == "headers":
        monkeypatch.setattr(library.sysconfig, "get_path", lambda _: str(tmp_path))
    else:
        monkeypatch.setenv(missing, "/nowhere")
    assert package in str(library.unavailable_reason())


@pytest.mark.parametrize("trouble", ["others may write", "no execution", "a file"])
def test_a_folder_that_cannot_hold_code_is_not_used(
    trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert library._cache_folder() == tmp_path / "labkit"
    if trouble == "others may write":
        (tmp_path / "labkit").chmod(0o777)
    elif trouble == "a file":
        (tmp_path / "labkit").rmdir()
        (tmp_path / "labkit").touch()
    else:
        monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_flag=os.ST_NOEXEC))
    library.load_library.cache_clear()
    reason = str(library.unavailable_reason())
    assert "XDG_CACHE_HOME" in reason
    assert "\n" not in reason
