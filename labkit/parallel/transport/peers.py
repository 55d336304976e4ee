"""Waiting for another rank of a host, as long as it lives."""

from __future__ import annotations

import os
import select
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NoReturn

from labkit.parallel.transport import signals
from labkit.parallel.transport.semaphores import Semaphores


class Peers:
    """The processes of the other ranks, by group rank, and the semaphores of all."""

    def __init__(self, pids: Sequence[int], own_rank: int, semaphores: Sequence[Semaphores], timeout_s: float) -> None:
        """OSError where the system does not show other processes."""
        self._own_rank = own_rank
        self._semaphores = semaphores
        self._timeout_s = timeout_s
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
        filled, swapped = signals.filled(self._own_rank), signals.swapped(len(self._semaphores), self._own_rank)
        unexpected = filled if number == swapped else swapped

        def look() -> None:
            is_elsewhere = self._is_elsewhere()
            if self._semaphores[peer].is_posted(unexpected) or (is_elsewhere and is_elsewhere(peer)):
                self._refuse(peer)
            self.check(peer, end)

        semaphores.wait(number, look)

    def wait_for_any(self, owner: int, number: int, awaited: Callable[[], Iterable[int]]) -> None:
        """Take a semaphore of the rank `owner`, which any rank may post. Errors as `check`, for each rank `awaited`.

        RuntimeError also if a rank has sent a message instead.
        """
        end = time.monotonic() + self._timeout_s
        filled, swapped = signals.filled(self._own_rank), signals.swapped(len(self._semaphores), self._own_rank)

        def look() -> None:
            for peer, semaphores in enumerate(self._semaphores):
                if semaphores.is_posted(filled) or semaphores.is_posted(swapped):
                    self._refuse(peer)
            for peer in awaited():
                self.check(peer, end)

        self._semaphores[owner].wait(number, look)

    def watch(self, is_elsewhere: Callable[[int], bool]) -> None:
        """From now on, waiting for a rank's message fails if `is_elsewhere(rank)`: it is where none comes from.

        A method, whose object is not kept alive by it: mappings go with the transport, not with the next collection.
        """
        self._is_elsewhere = weakref.WeakMethod(is_elsewhere)

    def _refuse(self, peer: int) -> NoReturn:
        raise RuntimeError(
            f"rank {peer} sent rank {self._own_rank} another message than it expected: "
            "every rank must call with a tensor of one shape and type"
        )

    def check(self, waited_for: int, end: float) -> None:
        """RuntimeError if that rank has ended, TimeoutError after `end` of the monotonic clock.

        Only that rank: others may have done their part and left. This rank itself lives.
        """
        if waited_for == self._own_rank:
            return
        poll = select.poll()
        poll.register(self._descriptors[waited_for], select.POLLIN)
        if poll.poll(0):
            raise RuntimeError(f"rank {waited_for} ended while this rank waited for it")
        if time.monotonic() > end:
            raise TimeoutError(f"waited too long for rank {waited_for}")


def _close(descriptors: dict[int, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)
