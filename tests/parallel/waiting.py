"""Wait until something is so."""

import time
from collections.abc import Callable

import psutil


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
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
