"""Messages between ranks of one host, through memory that all of them map.

Each rank has a mailbox: one file, mapped by all (`mapping.py`), with semaphores and what each of these needs:

    messages.py   messages of any length, with a note for each
    swaps.py      short messages that two ranks send each other at the same step: a shorter way
    boards.py     what every rank shows to all

The three are there twice: in Python, to be read, and compiled (`parallel/core`), which runs where it could be built.
"""

from __future__ import annotations

import mmap
import os
import warnings
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from labkit.parallel.core import build
from labkit.parallel.transport import boards, signals
from labkit.parallel.transport.boards import Boards, board_bytes
from labkit.parallel.transport.contract import SHARED, Step, check_shown
from labkit.parallel.transport.errors import refuse_kind, refuse_length, refuse_part
from labkit.parallel.transport.mapping import Allocation, SharedMemoryUnavailable, map_together
from labkit.parallel.transport.messages import (
    NOTES,
    OUTBOXES,
    REFERENCE_BYTES,
    SLOT_BYTES,
    SLOTS,
    Messages,
    note_bytes,
)
from labkit.parallel.transport.peers import Peers
from labkit.parallel.transport.semaphores import SEMAPHORE_BYTES, Semaphores
from labkit.parallel.transport.swaps import Swaps, longest_swap, swap_bytes

ADDED_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64)  # by the compiled core


class SharedTransport:
    """Ranks of one host, CPU memory: see the module."""

    name = SHARED
    piece_bytes = SLOT_BYTES
    shown_bytes = boards.MOST_BYTES

    def __init__(self, group: dist.ProcessGroup, timeout_s: float) -> None:
        """A collective. SharedMemoryUnavailable, on all ranks alike, where they cannot share memory."""
        self.rank, self.world_size = group.rank(), group.size()
        self.device = torch.device("cpu")
        self._group = weakref.ref(group)
        p = self.world_size
        notes_at = signals.count(p) * SEMAPHORE_BYTES
        swaps_at = notes_at + note_bytes(p)
        boards_at = swaps_at + swap_bytes(p)
        outbox_at = -(-(boards_at + board_bytes()) // 4096) * 4096
        # Ranks of other groups want the cores, too.
        spin = dist.get_world_size() <= len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else False

        def get_ready(mailboxes: Sequence[mmap.mmap], pids: Sequence[int]) -> None:
            self._semaphores = [Semaphores(mailbox, signals.count(p), spin=spin) for mailbox in mailboxes]
            self._semaphores[self.rank].make()
            if self.rank == 0:
                self._semaphores[0].post(signals.lock(p))
            self._peers = Peers(pids, self.rank, self._semaphores, timeout_s)

        mailboxes = map_together(
            group, outbox_at + SLOTS * self.piece_bytes, Semaphores.unavailable(), get_ready
        )  # nobody posts what is not made yet: it returns when all are ready
        wait = self._peers.wait
        self._allocations = {OUTBOXES: Allocation(mailboxes, self.rank, outbox_at)}
        self._boards = Boards(mailboxes, boards_at, self.rank, self._semaphores, self._peers)
        self._link: Any = None
        self.why_python = ""
        """Why the version in Python runs, if it does."""
        try:
            self._link = build.load(timeout_s / 4).Link(
                self.rank,
                *(notes_at, swaps_at, longest_swap(p), boards_at, boards.MOST_BYTES),
                *(NOTES, SLOTS, SLOT_BYTES, REFERENCE_BYTES),
                spin,
                tuple(map(_address, mailboxes)),
                (wait, self._boards.wait, refuse_length, refuse_kind, refuse_part),
                ADDED_TYPES,
            )
        except build.CoreUnavailable as error:
            self.why_python = str(error)
            self._swap = Swaps(mailboxes, swaps_at, self.rank, self._semaphores, wait, spin=spin).swap
            self._messages = Messages(mailboxes, notes_at, self.rank, self._semaphores, wait, self._allocations)
        else:
            self._link.map(OUTBOXES, *self._allocations[OUTBOXES].addresses())
        self._is_between_calls = True
        self.why_copied = ""
        """Why the last vector asked of `empty` is copied when it is sent, if it is."""

    def scratch_bytes(self) -> int:
        return SLOTS * self.piece_bytes + swap_bytes(self.world_size) + board_bytes()

    def release_scratch(self) -> None:
        """Nothing: the outbox is part of the mailbox, which other ranks map."""

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        self.why_copied = ""
        try:
            return self.allocate(numel * dtype.itemsize).view(dtype)
        except SharedMemoryUnavailable as error:
            self.why_copied = str(error)
            warnings.warn(f"no shared memory for a buffer, which is copied instead: {error}", stacklevel=3)
        return torch.empty(numel, dtype=dtype)

    def allocate(self, n_bytes: int) -> torch.Tensor:
        """Memory of this rank, (n_bytes,) uint8, that is sent without being copied. A collective, sizes alike.

        It is given back, or used again, at a later call once no rank has a tensor in it any more. Raises
        SharedMemoryUnavailable, and ValueError for sizes that differ, on all ranks alike.
        """
        group = self._group()
        assert group is not None, "a transport is found by its group"
        kept = [number for number in self._allocations if number != OUTBOXES]
        is_free = [int(not self._allocations[number].is_used()) for number in kept]
        agreed = torch.tensor([n_bytes, -n_bytes, *is_free])
        dist.all_reduce(agreed, op=dist.ReduceOp.MIN, group=group)
        fewest, most, *everywhere_free = agreed.tolist()
        if fewest != -most:
            raise ValueError(f"expected one size on every rank, got {fewest} to {-most} bytes ({n_bytes} here)")
        if n_bytes < 1:
            return torch.empty(n_bytes, dtype=torch.uint8)
        free = [number for number, is_so in zip(kept, everywhere_free, strict=True) if is_so]
        fitting = [number for number in free if self._allocations[number].n_bytes == n_bytes]
        for number in free:
            if number not in fitting[:1]:
                del self._allocations[number]
                if self._link is not None:
                    self._link.map(number, (), 0)
        if self._link is None:
            self._messages.forget_views()
        if fitting:
            return self._allocations[fitting[0]].lend()
        memories = map_together(group, n_bytes)
        number = max(self._allocations) + 1
        self._allocations[number] = Allocation(memories, self.rank, 0)
        if self._link is not None:
            self._link.map(number, *self._allocations[number].addresses())
        return self._allocations[number].lend()

    def show(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        return self._boards.parts(self._show(part, 0, 0, 1), part)

    def add_shown(self, part: torch.Tensor, start: int, stop: int, divisor: int) -> None:
        self._show(part, start, stop, divisor)

    def _show(self, part: torch.Tensor, start: int, stop: int, divisor: int) -> int:
        """Show a part, add up what of it lies between `start` and `stop`; the number of the show."""
        check_shown(part, self.shown_bytes)
        self._begin_call()
        number = self._boards.next_number()
        if self._link is None:
            self._boards.show(part, number, start, stop, divisor)
        else:
            self._link.show(part, number, start, stop, divisor)
        self._is_between_calls = True
        return number

    def _begin_call(self) -> None:
        if not self._is_between_calls:
            raise RuntimeError(
                "another call on this group is not over: it is another thread's, or was left before its end, and its "
                "messages are still there"
            )
        self._is_between_calls = False

    def run(self, steps: Sequence[Step], depth: int = 1) -> None:
        self._begin_call()
        if self._link is not None:
            self._link.run([*steps], depth)
        elif len(steps) != 1 or not self._swap(steps[0]):
            self._messages.run(steps, depth)
        self._is_between_calls = True


def _address(mailbox: mmap.mmap) -> int:
    return int(np.frombuffer(mailbox, dtype=np.uint8).ctypes.data)
