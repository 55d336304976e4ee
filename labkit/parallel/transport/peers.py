"""Waiting for another rank of a host, as long as it lives."""

from __future__ import annotations

import os
import select
import time
import weakref
from collections.abc import Sequence

from labkit.parallel.transport.semaphores import Semaphores


class Peers:
    """The processes of the other ranks, by group rank, and the semaphores of all."""

    def __init__(self, pids: Sequence[int], own_rank: int, semaphores: Sequence[Semaphores], timeout_s: float) -> None:
        """OSError where the system does not show other processes."""
        self._own_rank = own_rank
        self._semaphores = semaphores
        self._timeout_s = timeout_s
        if not hasattr(os, "pidfd_open"):
            raise OSError("this system has no descriptors of processes")
        self._descriptors: dict[int, int] = {}
        weakref.finalize(self, _close, self._descriptors)
        for rank, pid in enumerate(pids):
            if rank != own_rank:
                self._descriptors[rank] = os.pidfd_open(pid)

    def wait(self, owner: int, number: int, peer: int) -> None:
        """Take a semaphore of the rank `owner`, which `peer` posts. Errors as `check`.

        RuntimeError also if the peer has sent something else meanwhile: a swap instead of a message with a note, or
        the reverse, which is how tensors of very different sizes meet.
        """
        semaphores = self._semaphores[owner]
        if semaphores.take(number):
            return
        end = time.monotonic() + self._timeout_s
        swapped = 2 * len(self._semaphores) + self._own_rank
        filled = self._own_rank
        unexpected = filled if number == swapped else swapped

        def look() -> None:
            if self._semaphores[peer].is_posted(unexpected):
                raise RuntimeError(
                    f"rank {peer} sent rank {self._own_rank} another message than it expected: "
                    "every rank must call with a tensor of one shape and type"
                )
            self.check(peer, end)

        semaphores.wait(number, look)

    def check(self, waited_for: int, end: float) -> None:
        """RuntimeError if that rank has ended, TimeoutError after `end` of the monotonic clock.

        Only that rank: others may have done their part and left.
        """
        poll = select.poll()
        poll.register(self._descriptors[waited_for], select.POLLIN)
        if poll.poll(0):
            raise RuntimeError(f"rank {waited_for} ended while this rank waited for it")
        if time.monotonic() > end:
            raise TimeoutError(f"waited too long for rank {waited_for}")


def _close(descriptors: dict[int, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)
