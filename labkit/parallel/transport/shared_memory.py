"""Messages between the ranks of one host, through memory that all of them map.

Each rank makes an anonymous file (memfd_create) and tells the others its process id and descriptor;
they open it through /proc and map it. The memory exists as long as a process has it open or mapped,
and has no name: when all ranks have ended, in whatever way, nothing is left, and a small or full
/dev/shm does not matter.

`shared_memory.cpp` copies messages and adds them; `library.py` compiles it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from labkit.machine.cgroups import available_memory_bytes
from labkit.parallel.messages import gather_json
from labkit.parallel.ranks.torchrun import host_identity
from labkit.parallel.transport.base import (
    SHARED,
    Rounds,
    SharedMemoryUnavailable,
    Transfer,
    Transport,
    checksum,
)
from labkit.parallel.transport.library import load_library

# In the order of `COMBINE` in C++.
_ADDED_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64)
# Sent before any is received: with all SLOTS of the C++ taken, a ring of ranks would deadlock.
SLOTS_AHEAD = 6


class SharedTransport(Transport):
    """CPU memory of ranks on one host. A rank that waits for one that has ended raises
    RuntimeError."""

    name = SHARED

    def __init__(self, group: dist.ProcessGroup, timeout_s: float | None = None) -> None:
        """Connect the ranks of the group; `timeout_s` of a message is the group's if None. A
        collective.

        Raises SharedMemoryUnavailable, with one reason, on all ranks or on none.
        """
        super().__init__(group.rank(), group.size(), torch.device("cpu"))
        backend: Any = group._get_backend(self.device)
        timeout_s = timeout_s or backend.options._timeout.total_seconds()
        self._n_ended = 0  # collectives that are over on this rank, as the library counts them
        self._rest: Callable[[], None] | None = None  # of a message that was started
        with ExitStack() as stack:
            notes = _on_all_ranks(group, partial(self._make_mailbox, stack))
            if len({note["host"] for note in notes}) > 1:
                raise SharedMemoryUnavailable("the ranks are on several hosts")
            # A second agreement: a rank that cannot open another's memory leaves nobody waiting.
            # Nobody sends before every rank has made its semaphores.
            _on_all_ranks(group, partial(self._connect, notes, timeout_s))

    def _make_mailbox(self, stack: ExitStack) -> dict[str, Any]:
        """Make this rank's mailbox, whose descriptor `stack` closes; return where the others find
        it."""
        self._library = load_library()
        self._bytes_ahead = SLOTS_AHEAD * self._library.slot_bytes()
        n_bytes = self._library.mailbox_bytes(self.world_size)
        p = self.world_size
        # All ranks take as much at this moment. Beyond what there is, the kernel would end
        # processes, not refuse.
        if n_bytes * p > (available := available_memory_bytes()):
            raise OSError(
                f"{p} ranks need {n_bytes * p >> 20} MiB, {available >> 20} MiB are available"
            )
        descriptor = os.memfd_create("labkit", os.MFD_CLOEXEC)
        stack.callback(os.close, descriptor)
        os.posix_fallocate(descriptor, 0, n_bytes)  # else a copy could end the process with SIGBUS
        self._mailbox = _map(descriptor, n_bytes)
        inode = os.fstat(descriptor).st_ino
        return {
            "host": host_identity(),
            "pid": os.getpid(),
            "descriptor": descriptor,
            "inode": inode,
        }

    def _connect(self, notes: Sequence[Mapping[str, Any]], timeout_s: float) -> None:
        """Map the other ranks' mailboxes, and open their processes, to see when one ends."""
        own = self._mailbox
        library = self._library
        self._processes = list[int]()
        try:
            self._mailboxes = [
                own if r == self.rank else _open_mailbox(each, len(own))
                for r, each in enumerate(notes)
            ]
            for note in notes:
                # A descriptor, and not the number, which the kernel gives to another process later.
                self._processes.append(process := os.pidfd_open(note["pid"]))
                weakref.finalize(self, os.close, process).atexit = False
        except OSError as error:
            raise OSError(f"another rank's memory or process cannot be opened: {error}") from error
        addresses = [
            np.frombuffer(mailbox, dtype=np.uint8).ctypes.data for mailbox in self._mailboxes
        ]
        # ranks of other groups want cores, too
        has_own_core = dist.get_world_size() <= len(os.sched_getaffinity(0))
        longs = ctypes.c_long * self.world_size
        places = self.world_size, self.rank, longs(*addresses), longs(*self._processes)
        self._link = library.connect_mailboxes(*places, timeout_s, has_own_core, _ADDED_DTYPES)
        # Not when the interpreter ends: a thread may still wait for a message.
        weakref.finalize(self, library.disconnect_mailboxes, self._link).atexit = False

    def run(self, rounds: Rounds, call: int = 0) -> None:
        if self._rest is not None:
            self._finish()
        # The number tells a message from that of an earlier or later call of the same kind.
        numbered = call + (self._n_ended << 32)  # checksums have 32 bits
        self._library.run_rounds(self._link, rounds, numbered, numbered)

    def end_call(self) -> None:
        self._n_ended += 1
        self._library.end_call(self._link)

    def leave(self) -> None:
        self._library.leave_group(self._link)

    def start(self, transfer: Transfer) -> Callable[[], None]:
        """Copy the message into slots; what does not fit follows while the other one arrives."""
        self._finish()
        run = partial(self._library.run_rounds, self._link)
        # Both ranks of a message compute its checksum, which has no number: only two ranks know
        # of it.
        calls = [
            0 if vector is None else checksum("exchange", len(vector), vector.dtype)
            for vector in (transfer.outgoing, transfer.incoming)
        ]
        outgoing = transfer.outgoing
        if outgoing is not None:
            n_ahead = self._bytes_ahead // outgoing.itemsize
            run([[Transfer(outgoing[:n_ahead], transfer.target, None, 0)]], *calls)
            transfer = transfer._replace(outgoing=outgoing[n_ahead:])
        self._rest = rest = partial(run, [[transfer]], *calls)
        return lambda: self._finish() if self._rest is rest else None

    def _finish(self) -> None:
        """Complete the message that was started: messages are taken in the order in which they were
        sent."""
        if (rest := self._rest) is not None:
            self._rest = None
            rest()


def _open_mailbox(note: Mapping[str, Any], n_bytes: int) -> mmap.mmap:
    descriptor = os.open(f"/proc/{note['pid']}/fd/{note['descriptor']}", os.O_RDWR | os.O_CLOEXEC)
    try:
        # The number may name another process here: of another container, or one that came later.
        if os.fstat(descriptor).st_ino != note["inode"]:
            raise OSError("it is another file than announced")
        return _map(descriptor, n_bytes)
    finally:
        os.close(descriptor)


def _map(descriptor: int, n_bytes: int) -> mmap.mmap:
    # all page faults now
    return mmap.mmap(descriptor, n_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _on_all_ranks(
    group: dist.ProcessGroup, action: Callable[[], dict[str, Any] | None]
) -> list[dict[str, Any]]:
    """Return every rank's result of an action; raise the first rank's failure on all ranks."""
    try:
        note = {"failure": "", **(action() or {})}
    except (SharedMemoryUnavailable, OSError) as error:
        note = {"failure": str(error)}
    notes = gather_json(note, group)
    for rank, other in enumerate(notes):
        if other["failure"]:
            raise SharedMemoryUnavailable(f"rank {rank}: {other['failure']}")
    return notes
