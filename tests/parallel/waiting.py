"""When a rank sleeps for another: what a test waits for, instead of a time by which it should."""

import ctypes
import time

from labkit.parallel.transport.shared import SharedTransport

MOST_S = 60.0


def until_asleep(transport: SharedTransport, owner: int, number: int, *, ranks: int = 1) -> None:
    """Returns when so many ranks sleep for the semaphore of that number in the mailbox of `owner`."""
    address = transport._semaphores[owner]._addresses[number]
    end = time.monotonic() + MOST_S
    while _sleeping(address) < ranks:
        assert time.monotonic() < end, "nobody came to wait"
        time.sleep(0.001)


def _sleeping(address: int) -> int:
    """glibc's `struct new_sem` on 64 bits: the value in the lower half of the first word, in the upper who waits."""
    return ctypes.c_uint64.from_address(address).value >> 32
