"""Counting semaphores in memory that several processes map: how one rank tells another that a message is there.

They are the C library's (`sem_t`, POSIX), reached by ctypes, because they give three things at once:

* Order. POSIX counts `sem_post` and the waits among the functions that synchronize memory (Base Definitions, "Memory
  Synchronization"): whatever one process wrote before it posted, another sees after its wait. glibc's post adds with
  release order, its waits take with acquire order, so this holds on processors that reorder stores, too. Neither
  Python's interpreter nor torch's copies can move across a call into the C library.
* Sleep. A rank that finds nothing sleeps in the kernel until the post, so ranks beyond the cores cost nothing.
* No name. They lie in the mapping, so nothing is left when every process that maps it has died.

Linux with glibc 2.30 or newer. macOS has no semaphores of this kind, and musl no wait by the monotonic clock.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

SEMAPHORE_BYTES = 64  # a sem_t has 32 on 64-bit Linux; one a cache line, so that waiting for one disturbs no other
CLOCK_MONOTONIC = 1
# A post is seen after a microsecond by who looks, after 50 to 150 by who sleeps in a virtual machine.
SPIN_S = 500e-6
# While asleep, look this often whether the other one still lives.
GLANCE_S = 0.2


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


@cache
def _library() -> tuple[Any, Any]:
    """The C library twice: for calls that return at once, and for those during which other threads may run Python."""
    if not sys.platform.startswith("linux"):
        raise OSError(f"{sys.platform} has no unnamed semaphores between processes")
    quick, sleeping = ctypes.PyDLL(None), ctypes.CDLL(None)
    if not hasattr(sleeping, "sem_clockwait"):
        raise OSError("the C library has no sem_clockwait (glibc has it since 2.30)")
    for function in (quick.sem_post, quick.sem_trywait):
        function.argtypes = [ctypes.c_void_p]
    quick.sem_getvalue.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_int)]
    quick.sem_init.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_uint]
    sleeping.sem_clockwait.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(_Timespec)]
    return quick, sleeping


class Semaphores:
    """`count` semaphores at the start of a shared mapping, by number."""

    def __init__(self, memory: mmap.mmap, count: int, *, spin: bool) -> None:
        """`spin`: look for a while before sleeping; right where every rank has a core of its own.

        Raises OSError where the system has no such semaphores.
        """
        self._quick, self._sleeping = _library()
        self._anchor = (ctypes.c_char * (count * SEMAPHORE_BYTES)).from_buffer(memory)
        start = ctypes.addressof(self._anchor)
        self._addresses = [start + number * SEMAPHORE_BYTES for number in range(count)]
        self._spin_s = SPIN_S if spin else 0.0

    @staticmethod
    def unavailable() -> str:
        """Why there are none here; empty if there are."""
        try:
            _library()
        except OSError as error:
            return str(error)
        return ""

    def make(self) -> None:
        """Set all to zero; by one process, before any other uses them."""
        for address in self._addresses:
            if self._quick.sem_init(address, 1, 0) != 0:
                raise OSError("sem_init refused a semaphore between processes")

    def post(self, number: int) -> None:
        """Add one; wakes who waits."""
        self._quick.sem_post(self._addresses[number])

    def take(self, number: int) -> bool:
        """Subtract one if there is one."""
        return self._quick.sem_trywait(self._addresses[number]) == 0

    def is_posted(self, number: int) -> bool:
        """Whether there is one to subtract, which stays."""
        value = ctypes.c_int()
        self._quick.sem_getvalue(self._addresses[number], ctypes.byref(value))
        return value.value > 0

    def poster(self, number: int) -> Callable[[], int]:
        """`post` of one semaphore, as one call into the C library."""
        return partial(self._quick.sem_post, self._addresses[number])

    def taker(self, number: int) -> Callable[[], int]:
        """`take` of one semaphore, as one call into the C library: zero if there was one."""
        return partial(self._quick.sem_trywait, self._addresses[number])

    def wait(self, number: int, glance: Callable[[], None]) -> None:
        """Subtract one, as soon as there is one. `glance` is called now and then meanwhile, and may raise.

        What was posted before whoever posts it ended is taken all the same.
        """
        address = self._addresses[number]
        take = self._quick.sem_trywait
        if take(address) == 0:
            return
        # Yielding lets a rank on the same core go on, if there is one after all.
        end = time.perf_counter() + self._spin_s
        while time.perf_counter() < end:
            if take(address) == 0:
                return
            os.sched_yield()
        while True:
            deadline = time.clock_gettime_ns(time.CLOCK_MONOTONIC) + int(GLANCE_S * 1e9)
            until = _Timespec(deadline // 10**9, deadline % 10**9)
            # Anything but 0 is the time-out or a signal, whose handler Python has run by now.
            if self._sleeping.sem_clockwait(address, CLOCK_MONOTONIC, ctypes.byref(until)) == 0:
                return
            try:
                glance()
            except BaseException:
                if take(address) != 0:
                    raise
                return
