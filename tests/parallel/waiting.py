"""What a test waits for: that something is so, or that a rank sleeps for another."""

import ctypes
import time
from collections.abc import Callable

import psutil

from labkit.parallel.transport.shared import SharedTransport


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    """Whether it comes true in time."""
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def is_gone(pid: int) -> bool:
    """Whether the process has ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def until_asleep(transport: SharedTransport, owner: int, number: int, *, ranks: int = 1) -> None:
    """Returns when so many ranks sleep for the semaphore of that number in the mailbox of `owner`."""
    address = transport._semaphores[owner]._addresses[number]
    assert wait_until(lambda: _sleeping(address) >= ranks), "nobody came to wait"


def _sleeping(address: int) -> int:
    """glibc's `struct new_sem` on 64 bits: the value in the lower half of the first word, in the upper who waits."""
    return ctypes.c_uint64.from_address(address).value >> 32
