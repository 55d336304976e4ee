"""Memory that all ranks of a group map, without a name anywhere.

Each rank makes an anonymous file (`memfd_create`) and tells the others its process id and descriptor; they open it
through /proc and map it. The memory exists as long as one process has it open or mapped: when all have exited, in
whatever way, the kernel has taken it back. Nothing is ever in /dev/shm, and a small or full /dev/shm does not matter.

Pages are reserved before anybody touches them. A file that could not be backed by memory would otherwise end the
process with SIGBUS in the middle of a copy.
"""

from __future__ import annotations

import mmap
import os
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from labkit.machine.cgroups import available_memory_bytes
from labkit.parallel.ranks.hosts import host_identity
from labkit.parallel.ranks.messages import gather_json


class SharedMemoryUnavailable(RuntimeError):
    """The ranks of a group cannot share memory; the message says why, the same on every rank."""


Ready = Callable[[Sequence[mmap.mmap], Sequence[int]], None]


def map_together(
    group: dist.ProcessGroup, n_bytes: int, unfit: str = "", get_ready: Ready | None = None
) -> list[mmap.mmap]:
    """Each rank of `group` gives `n_bytes` of zeroed memory; everybody's, by rank. A collective.

    `unfit`: why this rank cannot take part, if so. `get_ready` is called with the mappings and the process ids, and
    may raise OSError. Raises SharedMemoryUnavailable on all ranks or on none: nobody goes on alone.
    """
    own, memory = -1, None
    if not unfit:
        try:
            own, memory = _make(n_bytes, group.size())
        except OSError as error:
            unfit = f"{n_bytes / 2**20:.0f} MiB of shared memory could not be had: {error.strerror or error}"
    try:
        inode = os.fstat(own).st_ino if own >= 0 else 0
        about = {"host": host_identity(), "pid": os.getpid(), "fd": own, "inode": inode}
        notes = _exchange(group, about, unfit)
        if len({note["host"] for note in notes}) > 1:
            raise SharedMemoryUnavailable("the ranks are on several hosts")
        assert memory is not None, "a rank that is not unfit has made its memory"
        mapped: list[mmap.mmap] = []
        failure = ""
        try:
            for rank, note in enumerate(notes):
                mapped.append(memory if rank == group.rank() else _open(note, n_bytes))
            if get_ready is not None:
                get_ready(mapped, [note["pid"] for note in notes])
        except OSError as error:
            of_whom = f"the memory of rank {len(mapped)}" if len(mapped) < len(notes) else "what is mapped"
            failure = f"{of_whom} cannot be used: {error}"
        _exchange(group, {}, failure)
        return mapped
    finally:
        if own >= 0:
            os.close(own)


def _make(n_bytes: int, ranks: int) -> tuple[int, mmap.mmap]:
    """An anonymous file of `n_bytes`, its pages in memory, and a mapping of it. Raises OSError."""
    if not hasattr(os, "memfd_create"):
        raise OSError(f"{sys.platform} has no anonymous files")
    # All ranks take as much at this moment. Beyond what there is, the kernel would end processes, not refuse.
    available = available_memory_bytes()
    if n_bytes * ranks > available:
        raise OSError(f"{available / 2**20:.0f} MiB are available to {ranks} ranks")
    descriptor = os.memfd_create("labkit", os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, n_bytes)
        return descriptor, _map(descriptor, n_bytes)
    except BaseException:
        os.close(descriptor)
        raise


def _open(note: dict[str, Any], n_bytes: int) -> mmap.mmap:
    """Map the file that another rank has announced."""
    descriptor = os.open(f"/proc/{note['pid']}/fd/{note['fd']}", os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(descriptor).st_ino != note["inode"]:
            raise OSError("another file than was announced")
        return _map(descriptor, n_bytes)
    finally:
        os.close(descriptor)


def _map(descriptor: int, n_bytes: int) -> mmap.mmap:
    # Populated: all page faults now, none in the first collective.
    return mmap.mmap(descriptor, n_bytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)


def _exchange(group: dist.ProcessGroup, note: dict[str, Any], unfit: str) -> list[dict[str, Any]]:
    """Every rank's note, by group rank; SharedMemoryUnavailable, on all, with the first reason why one is unfit."""
    notes = gather_json(note | {"unfit": unfit}, group)
    for rank, of_rank in enumerate(notes):
        if of_rank["unfit"]:
            raise SharedMemoryUnavailable(f"rank {rank}: {of_rank['unfit']}")
    return notes


class Allocation:
    """Memory of equal size on every rank, as vectors of bytes; this rank's part can be lent."""

    def __init__(self, memories: Sequence[mmap.mmap], own_rank: int, offset: int) -> None:
        """`offset`: where in each mapping it begins."""
        self._arrays = [np.frombuffer(memory, dtype=np.uint8)[offset:] for memory in memories]
        self._own = self._arrays[own_rank]
        self._lent: weakref.ref[Any] | None = None
        with torch.inference_mode(False):
            self.of_rank = [torch.from_numpy(array) for array in self._arrays]
        self.n_bytes = self._own.nbytes
        self.pointer = self.of_rank[own_rank].data_ptr()

    def addresses(self) -> tuple[tuple[int, ...], int]:
        """Where each rank's memory is, and its bytes."""
        return tuple(memory.data_ptr() for memory in self.of_rank), self.n_bytes

    def lend(self) -> torch.Tensor:
        """This rank's memory, (n_bytes,) uint8."""
        # A tensor made from an array holds it as long as any tensor of that storage lives.
        array = self._own[:]
        self._lent = weakref.ref(array)
        with torch.inference_mode(False):
            return torch.from_numpy(array)

    def is_used(self) -> bool:
        """Whether a tensor of what was lent last still lives on this rank."""
        return self._lent is not None and self._lent() is not None
