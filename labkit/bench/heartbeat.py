"""The heartbeat: a fixed small computation, timed now and then beside what is measured: how steady the machine is.

A measurement listens (`listening`); the clock beats before a round, outside of every timed region, and a rank
at the start of a point and between its rows (`lab/runs/heard.py`). Where nobody listens, nothing beats: a beat starts
BLAS and its threads, and a point whose ranks have to be new is measured without one.

A beat is a chain of float32 products with the threads that the process computes with. It takes about a millisecond
on a 2-core machine, and touches 128 KiB, which fit into a core's own cache. Beats take at most `MOST_OF_TIME`.
"""

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch

SIDE, PRODUCTS = 128, 32
MOST_OF_TIME = 0.02

Beat = tuple[int, int, float]
"""Of which call of the clock (0: none), before which of its rounds (warm-up below 0), seconds."""


class Heartbeat:
    """The beats of one process while it measures one point; the first one beats at once."""

    def __init__(self) -> None:
        self.beats: list[Beat] = []
        self._call, self._rounds = 0, 0
        self._threads = torch.get_num_threads()
        # Not random: the generator is the measurement's.
        self._values = torch.full((SIDE, SIDE), 1 / SIDE, dtype=torch.float32, device="cpu")
        self._products = torch.empty_like(self._values)
        self._work()  # the first time is that of fresh memory
        self._next = 0.0
        self.beat()

    def begin_rounds(self) -> None:
        """The clock begins: beats and rows from now on are of this call of it."""
        self._call, self._rounds = self._call + 1, 0

    def end_round(self, number: int) -> None:
        """The round of that number is over."""
        self._rounds = number + 1

    def beat(self, round_number: int | None = None) -> None:
        """One beat, unless the last one was so short a while ago that they would take too much of the time.

        Nor while the process computes with another number of threads than at first. Without a number it is after the
        last round of the call.
        """
        number = self._rounds if round_number is None else round_number
        start = time.perf_counter()
        if start < self._next or torch.get_num_threads() != self._threads:
            return
        self._work()
        end = time.perf_counter()
        self.beats.append((self._call, number, round(end - start, 7)))
        self._next = end + (end - start) / MOST_OF_TIME

    def call_of(self, values: Mapping[str, Any]) -> int | None:
        """The call of the clock whose samples a row has: the last one, if their number is that of its rounds."""
        has_samples = any(isinstance(value, list) and len(value) == self._rounds for value in values.values())
        return self._call if has_samples and self._call else None

    def _work(self) -> None:
        with torch.no_grad():
            for _ in range(PRODUCTS):
                torch.mm(self._values, self._values, out=self._products)


_HEARD: ContextVar[Heartbeat | None] = ContextVar("labkit_heartbeat", default=None)


@contextmanager
def listening() -> Iterator[Heartbeat]:
    """Have the clock beat meanwhile, in this thread; yields what it notes."""
    heartbeat = Heartbeat()
    token = _HEARD.set(heartbeat)
    try:
        yield heartbeat
    finally:
        _HEARD.reset(token)


def heartbeat_heard() -> Heartbeat | None:
    """The one that is listened to, if anybody listens."""
    return _HEARD.get()
