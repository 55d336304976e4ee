"""Waiting for another rank of a host, as long as it lives."""

from __future__ import annotations

import os
import select
import time
import weakref
from collections.abc import Callable, Sequence

from labkit.parallel.transport import signals
from labkit.parallel.transport.errors import refuse_kind, report_ended, report_late
from labkit.parallel.transport.semaphores import Semaphores


class Peers:
    """The processes of the other ranks, by group rank, and the semaphores of all."""

    def __init__(self, pids: Sequence[int], own_rank: int, semaphores: Sequence[Semaphores], timeout_s: float) -> None:
        """OSError where the system does not show other processes."""
        self._own_rank = own_rank
        self._semaphores = semaphores
        self._timeout_s = timeout_s
        self._for_this_rank = signals.filled(own_rank), signals.swapped(len(semaphores), own_rank)
        self._is_elsewhere: Callable[[], Callable[[int], bool] | None] = lambda: None
        if not hasattr(os, "pidfd_open"):
            raise OSError("this system has no descriptors of processes")
        self._descriptors: dict[int, int] = {}
        weakref.finalize(self, _close, self._descriptors)
        for rank, pid in enumerate(pids):
            if rank != own_rank:
                self._descriptors[rank] = os.pidfd_open(pid)

    def wait(self, owner: int, number: int, peer: int) -> None:
        """Take a semaphore of the rank `owner`, which `peer` posts. Errors as `check`.

        RuntimeError also if the peer has sent something else meanwhile, a swap, say, instead of a message with a note:
        that is how tensors of very different sizes meet.
        """
        semaphores = self._semaphores[owner]
        if semaphores.take(number):
            return
        end = time.monotonic() + self._timeout_s
        filled, swapped = self._for_this_rank
        unexpected = filled if number == swapped else swapped

        def look() -> None:
            is_elsewhere = self._is_elsewhere()
            if self._semaphores[peer].is_posted(unexpected) or (is_elsewhere and is_elsewhere(peer)):
                refuse_kind(peer, self._own_rank)
            self.check(peer, end)

        semaphores.wait(number, look)

    def wait_for_any(self, owner: int, number: int, look: Callable[[bool], None]) -> None:
        """Take a semaphore of the rank `owner`, which any rank may post.

        `look(is_late)` is called now and then meanwhile, and may raise; from the time-out on, it is late.
        """
        end = time.monotonic() + self._timeout_s
        self._semaphores[owner].wait(number, lambda: look(time.monotonic() > end))

    def watch(self, is_elsewhere: Callable[[int], bool]) -> None:
        """From now on, waiting for a rank's message fails if `is_elsewhere(rank)`: it is where none comes from.

        A method, whose object is not kept alive by it: mappings go with the transport, not with the next collection.
        """
        self._is_elsewhere = weakref.WeakMethod(is_elsewhere)

    def senders(self) -> list[int]:
        """The ranks of which a message for this one lies ready."""
        return [rank for rank, posts in enumerate(self._semaphores) if any(map(posts.is_posted, self._for_this_rank))]

    def ended(self) -> list[int]:
        """The ranks whose processes have ended."""
        return [rank for rank in self._descriptors if self._has_ended(rank)]

    def check(self, waited_for: int, end: float) -> None:
        """RuntimeError if that rank has ended, TimeoutError after `end` of the monotonic clock.

        Only that rank: others may have done their part and left.
        """
        if self._has_ended(waited_for):
            report_ended(waited_for)
        if time.monotonic() > end:
            report_late(f"rank {waited_for}")

    def _has_ended(self, rank: int) -> bool:
        poll = select.poll()
        poll.register(self._descriptors[rank], select.POLLIN)
        return bool(poll.poll(0))


def _close(descriptors: dict[int, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)
