"""Short vectors that every rank shows to all others at once, through shared memory: one wait, however many ranks.

Each rank has two boards in its mailbox, used in turn:

    show number k    write the part on board k mod 2; wait until everybody has; read all boards k mod 2

Who shows last knows it, since arrivals are counted, and lets the others through, each by a semaphore of its own. So a
rank sleeps once at most, where messages between two ranks would let it sleep for each of them: that is what counts
where ranks are more than cores, and a sleeping rank takes 50 to 150 us to wake.

Why no rank reads what is half written. A rank writes its board before it counts itself, and counts under a lock, a
semaphore with one token. So the last one takes the lock after all others have posted it, sees what they wrote
(`semaphores.py`), and posts; who is let through sees what the last one saw.

Why no board is overwritten before it has been read: a rank writes for show k after it was let through at show k-1, so
after everybody had come to show k-1, which each did after reading the boards of show k-2, the last on that side.

Why nobody waits for a rank that has ended. Until a show is complete nobody can have left: whoever has ended is missed.
Once it is, only the last to come is waited for, which lets the others through one after the other.

A central counter is the oldest of barriers (Mellor-Crummey & Scott 1991, "Algorithms for scalable synchronization on
shared-memory multiprocessors", section 3.1). Trees and the like save traffic between many cores; here it is the ranks
beyond the cores that wait.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

import numpy as np
import torch

from labkit.parallel.transport import signals
from labkit.parallel.transport.contract import add_up
from labkit.parallel.transport.errors import refuse_kind, refuse_length, report_ended, report_late
from labkit.parallel.transport.peers import Peers
from labkit.parallel.transport.semaphores import Semaphores

MOST_BYTES = 512 << 10
HEADER_BYTES = 64  # before a board: which show, and how many bytes; a cache line
KEPT_LENGTHS = 256
_SIDE_BYTES = HEADER_BYTES + MOST_BYTES
# Looks for the gate before sleeping, the core given up between them to whoever can use it. Short vectors, 4 and 8 ranks
# on 2 cores: none takes .27 of gloo's time at 4 KiB, 30 take .22, and so do 400.
YIELDS = 30


class Boards:
    """The boards of all ranks, in mailboxes that all of them map."""

    def __init__(
        self,
        mailboxes: Sequence[mmap.mmap],
        offset: int,
        rank: int,
        semaphores: Sequence[Semaphores],
        peers: Peers,
    ) -> None:
        """`offset`: where in a mailbox the boards begin. Somebody has posted the lock once."""
        self._rank = rank
        self._world_size = p = len(mailboxes)
        self._peers = peers
        sides = [offset + side * _SIDE_BYTES for side in range(2)]
        self._headers = [[_words(mailbox, at, 2) for mailbox in mailboxes] for at in sides]
        # Made in inference mode, they could not be written to outside it.
        with torch.inference_mode(False):
            self._boards = [[_content(mailbox, at + HEADER_BYTES) for mailbox in mailboxes] for at in sides]
        # How many have come; who was the last to come, ever; and to which show.
        self._arrived = _words(mailboxes[0], offset + 2 * _SIDE_BYTES, 3)
        self._lock, self._unlock = semaphores[0].taker(signals.lock(p)), semaphores[0].poster(signals.lock(p))
        self._gate = semaphores[rank].taker(signals.gate(p))
        self._open = [semaphores[other].poster(signals.gate(p)) for other in range(p) if other != rank]
        peers.watch(self._is_ahead)
        self._number = 0
        self._parts: dict[tuple[int, int, torch.dtype], list[torch.Tensor]] = {}

    def show(self, part: torch.Tensor, number: int, start: int = 0, stop: int = 0, divisor: int = 1) -> None:
        """Show a part in the show of that number, and add up what all show from element `start` to `stop`.

        Parts are contiguous vectors of one length and type, of up to `MOST_BYTES`. RuntimeError if lengths differ or a
        rank has ended, TimeoutError if one does not come.
        """
        n_bytes, parts = part.nbytes, self.parts(number, part)
        parts[self._rank].copy_(part)
        headers = self._headers[number & 1]
        own = headers[self._rank]
        own[0], own[1] = number, n_bytes
        self._meet()
        for rank, (shown, length) in enumerate(headers):
            if length != n_bytes:
                refuse_length(rank, length, self._rank, n_bytes)
            if shown != number:
                refuse_kind(rank, self._rank)
        add_up(parts, part, start, stop, divisor)

    def next_number(self) -> int:
        """The number of the show that begins now."""
        self._number += 1
        return self._number

    def parts(self, number: int, part: torch.Tensor) -> list[torch.Tensor]:
        """Where every rank's part is in the show of that number, by rank; to be read until this rank shows the next."""
        side, n_bytes, dtype = number & 1, part.nbytes, part.dtype
        return self._parts.get((side, n_bytes, dtype)) or self._cut(side, n_bytes, dtype)

    def wait(self, owner: int, number: int) -> None:
        """Take a semaphore of the rank `owner`, as long as there is hope."""
        self._peers.wait_for_any(owner, number, self._look)

    def _meet(self) -> None:
        """Return when every rank has come here as often as this one."""
        if self._lock():
            self.wait(0, signals.lock(self._world_size))
        arrived = self._arrived[0] + 1
        if arrived == self._world_size:
            self._arrived[0], self._arrived[1], self._arrived[2] = 0, self._rank, self._number
            self._unlock()
            for let_through in self._open:
                let_through()
            return
        self._arrived[0] = arrived
        self._unlock()
        yields = YIELDS
        while self._gate():
            yields -= 1
            if yields < 0:
                self.wait(self._rank, signals.gate(self._world_size))
                return
            os.sched_yield()

    def _look(self, is_late: bool) -> None:
        """RuntimeError if this wait is in vain, TimeoutError if it is late."""
        # In this order: who has ended has done before whatever it will ever do, and so has who has sent a message.
        ended, senders = self._peers.ended(), self._peers.senders()
        last, completed = self._arrived[1], self._arrived[2]
        if completed == self._number:
            elsewhere, ended, awaited = [], [rank for rank in ended if rank == last], f"rank {last}"
        else:
            headers = self._headers[self._number & 1]
            missing = [rank for rank, header in enumerate(headers) if header[0] != self._number]
            elsewhere = [rank for rank in missing if rank in senders]
            awaited = f"rank {missing[0]}" if missing else "a rank that has come, but has not been counted"
        for rank in elsewhere:
            refuse_kind(rank, self._rank)
        for rank in ended:
            report_ended(rank)
        if is_late:
            report_late(awaited)

    def _is_ahead(self, rank: int) -> bool:
        """Whether that rank shows something, while this one is not showing anything."""
        return bool(self._headers[(self._number + 1) & 1][rank][0] == self._number + 1)

    def _cut(self, side: int, n_bytes: int, dtype: torch.dtype) -> list[torch.Tensor]:
        if len(self._parts) >= KEPT_LENGTHS:
            self._parts.clear()
        with torch.inference_mode(False):
            parts = [board[:n_bytes].view(dtype) for board in self._boards[side]]
        self._parts[side, n_bytes, dtype] = parts
        return parts


def board_bytes() -> int:
    """Bytes of a rank's boards, and of the count of arrivals."""
    return 2 * _SIDE_BYTES + HEADER_BYTES


def _words(mailbox: mmap.mmap, offset: int, count: int) -> memoryview:
    return memoryview(mailbox)[offset : offset + 8 * count].cast("q")


def _content(mailbox: mmap.mmap, offset: int) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(mailbox, dtype=np.uint8, offset=offset, count=MOST_BYTES))
