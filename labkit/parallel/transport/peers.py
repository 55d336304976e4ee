"""Whether the other ranks of a host still live: what a rank looks at while it waits for one of them."""

from __future__ import annotations

import os
import select
import time
import weakref
from collections.abc import Sequence


class Peers:
    """The processes of the other ranks, by group rank. Raises OSError where the system does not show them."""

    def __init__(self, pids: Sequence[int], own_rank: int) -> None:
        if not hasattr(os, "pidfd_open"):
            raise OSError("this system has no descriptors of processes")
        self._descriptors: dict[int, int] = {}
        weakref.finalize(self, _close, self._descriptors)
        for rank, pid in enumerate(pids):
            if rank != own_rank:
                self._descriptors[rank] = os.pidfd_open(pid)

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
