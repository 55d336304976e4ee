"""Short messages that two ranks send each other at the same step, through shared memory: the fastest there is.

Recursive doubling of a short vector is nothing but swaps, and a swap needs neither note nor acknowledgment: both ranks
know that it comes, how long it is, and where it lies. For each other rank there are two slots, used in turn:

    swap number k    copy the part into slot k mod 2, post; wait for the other's post, read its slot k mod 2

Why no slot is overwritten before it has been read: this rank writes for swap k after it has received the other's
message of swap k-1, which the other sent after it had read this rank's of swap k-2, the last one in that slot. The
semaphores order writing and reading as in `shared.py`.

How fast this is depends on how little Python runs. Between two all-reduces a program has done other things, so code
and objects come from the farthest cache, and a call of a method costs microseconds.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from labkit.parallel.transport import signals
from labkit.parallel.transport.contract import Step, taken_in
from labkit.parallel.transport.errors import refuse_length
from labkit.parallel.transport.semaphores import Semaphores

MOST_BYTES = 512 << 10
BUDGET_BYTES = 1 << 20  # of what slots hold, in each mailbox
HEADER_BYTES = 64  # before a slot, the length of what is in it; a cache line
KEPT_PLACES = 1024
LOOKS = 200  # for a message, 0.2 us each: ranks that began together come within less

Wait = Callable[[int, int, int], None]
"""Wait for a semaphore: whose, its number, and who posts it."""


class _Place(NamedTuple):
    """Where messages of one length between this rank and another lie, at every other swap."""

    own: torch.Tensor
    others: torch.Tensor
    own_header: memoryview
    others_header: memoryview
    post: Callable[[], int]
    take: Callable[[], int]


class Swaps:
    """The slots of all ranks, in mailboxes that all of them map."""

    def __init__(
        self,
        mailboxes: Sequence[mmap.mmap],
        offset: int,
        rank: int,
        semaphores: Sequence[Semaphores],
        wait: Wait,
        *,
        spin: bool,
    ) -> None:
        """`offset`: where in a mailbox the slots begin.

        `spin`: look for the message a while before waiting; right where every rank has a core of its own.
        """
        self._rank, self._world_size = rank, len(mailboxes)
        self.most_bytes = longest_swap(self._world_size)
        self._memories = [memoryview(mailbox)[offset : offset + swap_bytes(self._world_size)] for mailbox in mailboxes]
        self._semaphores = semaphores
        self._wait = wait
        self._looks = LOOKS if spin else 0
        self._turns = [0] * self._world_size
        self._places: dict[tuple[int, int, int, int, torch.dtype], _Place] = {}

    def swap(self, step: Step) -> bool:
        """Carry out a step in which two ranks send each other something short; False, on both, if it is none."""
        outgoing, other, incoming, source = step[:4]
        if other != source or outgoing is None or incoming is None:
            return False
        sent, expected = outgoing.nbytes, incoming.nbytes
        if not 0 < sent <= self.most_bytes or not 0 < expected <= self.most_bytes:
            return False
        turn = self._turns[other]
        self._turns[other] = 1 - turn
        key = (other, turn, sent, expected, incoming.dtype)
        place = self._places.get(key) or self._make(key)
        own, others, own_header, others_header, post, take = place
        own.copy_(outgoing)
        own_header[0] = sent
        post()
        looks = self._looks
        while take():
            looks -= 1
            if looks < 0:
                self._wait(other, signals.swapped(self._world_size, self._rank), other)
                break
        if others_header[0] != expected:
            refuse_length(other, others_header[0], self._rank, expected)
        result = taken_in(step, others)
        if step.divisor > 1:
            result.div_(step.divisor)
        return True

    def _make(self, key: tuple[int, int, int, int, torch.dtype]) -> _Place:
        other, turn, sent_bytes, received_bytes, dtype = key
        if len(self._places) >= KEPT_PLACES:
            self._places.clear()
        header, own = self._slot(self._rank, other, turn, sent_bytes, dtype)
        others_header, others = self._slot(other, self._rank, turn, received_bytes, dtype)
        p = self._world_size
        post = self._semaphores[self._rank].poster(signals.swapped(p, other))
        take = self._semaphores[other].taker(signals.swapped(p, self._rank))
        place = self._places[key] = _Place(own, others, header, others_header, post, take)
        return place

    def _slot(
        self, owner: int, target: int, turn: int, n_bytes: int, dtype: torch.dtype
    ) -> tuple[memoryview, torch.Tensor]:
        """Header and content of a slot."""
        number = 2 * ((target - owner - 1) % self._world_size) + turn
        start = number * (HEADER_BYTES + self.most_bytes)
        slot = self._memories[owner][start : start + HEADER_BYTES + n_bytes]
        # Made in inference mode, it could not be written to outside it.
        with torch.inference_mode(False):
            content = torch.from_numpy(np.frombuffer(slot, dtype=np.uint8, offset=HEADER_BYTES)).view(dtype)
        return slot[:8].cast("q"), content


def longest_swap(world_size: int) -> int:
    """Bytes of the longest part that is swapped: fewer where many ranks need slots for one another."""
    n_bytes = MOST_BYTES
    while _slots(world_size) * n_bytes > BUDGET_BYTES:
        n_bytes //= 2
    return n_bytes


def swap_bytes(world_size: int) -> int:
    """Bytes of all slots of a rank."""
    return _slots(world_size) * (HEADER_BYTES + longest_swap(world_size))


def _slots(world_size: int) -> int:
    return 2 * (world_size - 1)
