"""Messages between the ranks of one host, through memory that all of them map (`shared_memory.cpp`).

Each rank makes an anonymous file (memfd_create) and tells the others its process id and descriptor; they open it
through /proc and map it. The memory exists as long as a process has it open or mapped, and has no name: when all ranks
have ended, in whatever way, nothing is left, and a small or full /dev/shm does not matter.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from labkit.machine.cgroups import available_memory_bytes
from labkit.parallel.ranks.hosts import host_identity
from labkit.parallel.ranks.messages import gather_json
from labkit.parallel.transport import build
from labkit.parallel.transport.base import SHARED, SharedMemoryUnavailable, Step, Transport

_ADDED_DTYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64)  # `COMBINE` in C++

PIECES_AHEAD = 3
"""Pieces of a message that are sent before any is received: with all slots taken, a ring of ranks would deadlock."""


class SharedTransport(Transport):
    """CPU memory of ranks on one host. A rank that waits for one that has ended raises RuntimeError."""

    name = SHARED

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        """A collective; raises SharedMemoryUnavailable, with one reason, on all ranks or on none."""
        super().__init__(group.rank(), group.size(), torch.device("cpu"))
        self._slot_bytes, descriptor, failure = 0, -1, ""
        self._started: list[Step] = []
        try:
            self._library = _declare(build.load(timeout_s / 4))
            self._slot_bytes = self._library.slot_bytes()
            descriptor, memory = _make_mailbox(self._library.mailbox_bytes(self.world_size), self.world_size)
        except (SharedMemoryUnavailable, OSError) as error:
            failure = str(error)
        try:
            inode = os.fstat(descriptor).st_ino if descriptor >= 0 else 0
            note = {"host": host_identity(), "pid": os.getpid(), "descriptor": descriptor, "inode": inode}
            notes = _agree(group, note, failure)
            if len({note["host"] for note in notes}) > 1:
                raise SharedMemoryUnavailable("the ranks are on several hosts")
            try:
                self._connect(memory, notes, timeout_s)
            except OSError as error:
                failure = f"another rank's memory or process cannot be opened: {error}"
            _agree(group, {}, failure)  # nobody sends before every rank has made its semaphores
        finally:
            if descriptor >= 0:
                os.close(descriptor)

    def _connect(self, own: mmap.mmap, notes: Sequence[Mapping[str, Any]], timeout_s: float) -> None:
        """Map the other ranks' mailboxes, and open their processes, to see when one ends."""
        p, library = self.world_size, self._library
        self._mailboxes = [own if r == self.rank else _open_mailbox(note, own.size()) for r, note in enumerate(notes)]
        self._processes: list[int] = []
        weakref.finalize(self, _close, self._processes).atexit = False
        for note in notes:
            self._processes.append(os.pidfd_open(note["pid"]))
        addresses = [np.frombuffer(mailbox, dtype=np.uint8).ctypes.data for mailbox in self._mailboxes]
        has_own_core = dist.get_world_size() <= len(os.sched_getaffinity(0))  # ranks of other groups want cores, too
        longs = ctypes.c_long * p
        self._link = library.connect_mailboxes(
            p, self.rank, longs(*addresses), longs(*self._processes), timeout_s, has_own_core, _ADDED_DTYPES
        )
        # Not when the interpreter ends: a thread may still wait for a message.
        weakref.finalize(self, library.disconnect_mailboxes, self._link).atexit = False

    def run(self, steps: Sequence[Step], depth: int = 1) -> None:
        if self._started:
            self._finish()
        self._library.run_steps(self._link, [*steps], depth)

    def start(self, step: Step) -> Callable[[], None]:
        """Copy the message into slots; what does not fit follows while pieces of the other message arrive."""
        outgoing, incoming = map(self._cut, (step.outgoing, step.incoming))
        self.run([Step(piece, step.target, None, 0) for piece in outgoing[:PIECES_AHEAD]])
        pairs = zip_longest(outgoing[PIECES_AHEAD:], incoming)
        self._started = rest = [Step(sent, step.target, received, step.source) for sent, received in pairs]
        return lambda: self._finish() if self._started is rest else None

    def _finish(self) -> None:
        """Complete the message that was started: messages are taken in the order in which they were sent."""
        rest, self._started = self._started, []
        self.run(rest, depth=2)

    def _cut(self, part: torch.Tensor | None) -> Sequence[torch.Tensor]:
        return part.split(self._slot_bytes // part.itemsize) if part is not None and part.numel() else ()

    def piece_bytes(self, depth: int) -> int:
        return self._slot_bytes


def _declare(library: ctypes.PyDLL) -> Any:
    longs = ctypes.POINTER(ctypes.c_long)
    library.mailbox_bytes.argtypes, library.mailbox_bytes.restype = [ctypes.c_long], ctypes.c_long
    library.slot_bytes.restype = ctypes.c_long
    library.connect_mailboxes.restype = ctypes.c_void_p
    library.connect_mailboxes.argtypes = [ctypes.c_long, ctypes.c_long, longs, longs]
    library.connect_mailboxes.argtypes += [ctypes.c_double, ctypes.c_bool, ctypes.py_object]
    library.disconnect_mailboxes.argtypes, library.disconnect_mailboxes.restype = [ctypes.c_void_p], None
    library.run_steps.argtypes = [ctypes.c_void_p, ctypes.py_object, ctypes.c_long]
    library.run_steps.restype = ctypes.py_object
    return library


def _make_mailbox(n_bytes: int, ranks: int) -> tuple[int, mmap.mmap]:
    """Return the descriptor of an anonymous file, all its pages reserved, and a mapping of it; raise OSError."""
    # All ranks take as much at this moment. Beyond what there is, the kernel would end processes, not refuse.
    if n_bytes * ranks > (available := available_memory_bytes()):
        raise OSError(f"{ranks} ranks need {n_bytes * ranks >> 20} MiB, {available >> 20} MiB are available")
    descriptor = os.memfd_create("labkit", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, n_bytes)  # else a copy could end the process with SIGBUS
        return descriptor, _map(descriptor, n_bytes)
    except BaseException:
        os.close(descriptor)
        raise


def _open_mailbox(note: Mapping[str, Any], n_bytes: int) -> mmap.mmap:
    descriptor = os.open(f"/proc/{note['pid']}/fd/{note['descriptor']}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_ino != note["inode"]:
            raise OSError("it is another file than announced")
        return _map(descriptor, n_bytes)
    finally:
        os.close(descriptor)


def _map(descriptor: int, n_bytes: int) -> mmap.mmap:
    return mmap.mmap(descriptor, n_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)  # all page faults now


def _agree(group: dist.ProcessGroup, note: Mapping[str, Any], failure: str) -> list[dict[str, Any]]:
    """Return every rank's note; raise the first rank's failure on all ranks."""
    notes = gather_json({**note, "failure": failure}, group)
    for rank, other in enumerate(notes):
        if other["failure"]:
            raise SharedMemoryUnavailable(f"rank {rank}: {other['failure']}")
    return notes


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)
