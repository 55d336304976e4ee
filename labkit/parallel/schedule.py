"""The messages of an all-reduce, recorded from a run of the real function: who sends what to whom, in which round.

Ranks are threads, and the transport writes down what it carries. A rank's part of the sum is a power of two of its own,
so every element tells whose contributions it holds; rounds are counted as if each message took one, however long it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import NamedTuple

import torch

from labkit.parallel.phases import survivors
from labkit.parallel.transport.contract import Step, add_up

MOST_RANKS = 32  # whose powers of two float64 adds exactly, and a picture shows
LONGEST_WAIT_S = 10.0  # for a message that may never come: the function may have raised on another rank


class Message(NamedTuple):
    """Elements `start` to `stop` of the vector, sent by rank `source` to rank `target` in round `round`, from 1 on."""

    round: int
    source: int
    target: int
    start: int
    stop: int


class Schedule(NamedTuple):
    """What happened in which round."""

    elements: int
    """Of the vector: as few as give every rank a shard of the same length."""
    messages: list[Message]
    held: list[list[list[int]]]
    """By round (0: before the first), rank and element: the ranks whose contributions it holds, a bit each."""


def record_schedule(all_reduce: Callable[..., None], world_size: int) -> Schedule:
    """The schedule of `all_reduce(tensor, group, op, transport=...)` over `world_size` ranks, 1 to `MOST_RANKS`.

    ValueError for another number of ranks; whatever the function raises.
    """
    if not 1 <= world_size <= MOST_RANKS:
        raise ValueError(f"expected 1 to {MOST_RANKS} ranks, got {world_size}")
    elements = math.lcm(world_size, len(survivors(world_size)))
    channels = [[SimpleQueue[tuple[int, torch.Tensor]]() for _ in range(world_size)] for _ in range(world_size)]
    ranks = [_RecordingTransport(rank, channels, elements) for rank in range(world_size)]
    with ThreadPoolExecutor(world_size) as threads:
        ends = [threads.submit(all_reduce, via.vector, None, "sum", transport=via) for via in ranks]
    if errors := [error for end in ends if (error := end.exception())]:
        raise next((error for error in errors if not isinstance(error, Empty)), errors[0])  # others only waited for it
    rounds = max(via.now for via in ranks)
    return Schedule(
        elements,
        sorted(message for via in ranks for message in via.received),
        [[via.held_after(number) for via in ranks] for number in range(rounds + 1)],
    )


class _RecordingTransport:
    """What algorithms need of a transport (`contract.Transport`), between threads. `now`: its last round."""

    name = "recorded"
    device = torch.device("cpu")
    piece_bytes = shown_bytes = 1 << 20

    def __init__(
        self, rank: int, channels: Sequence[Sequence[SimpleQueue[tuple[int, torch.Tensor]]]], elements: int
    ) -> None:
        self.rank, self.world_size = rank, len(channels)
        self.vector = torch.full((elements,), 2.0**rank, dtype=torch.float64)
        self.now = 0
        self.received: list[Message] = []
        self._channels = channels
        self._held: dict[int, torch.Tensor] = {}

    def run(self, steps: Sequence[Step], depth: int = 1) -> None:
        self._note()
        ends: list[int] = []
        for number, step in enumerate(steps):
            begin = end = self.now if number < depth else max(self.now, ends[number - depth])
            if step.outgoing is not None and len(step.outgoing):
                self._send(begin, step.outgoing, step.target)
                end = begin + 1
            if step.incoming is not None and len(step.incoming):
                came, part = self._receive(begin, step.source, step.incoming)
                end = max(end, came)
                step.incoming.copy_((step.incoming + part if step.add else part) / step.divisor)
            ends.append(end)
            self._note(end)
        self.now = max([self.now, *ends])

    def show(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        self._note()
        others = [rank for rank in range(self.world_size) if rank != self.rank]
        for rank in others:
            self._send(self.now, part, rank)
        shown = {rank: self._receive(self.now, rank, part) for rank in others}
        self.now = max([self.now, *(came for came, _ in shown.values())])
        return [part.clone() if rank == self.rank else shown[rank][1] for rank in range(self.world_size)]

    def add_shown(self, part: torch.Tensor, start: int, stop: int, divisor: int) -> None:
        add_up(self.show(part), part, start, stop, divisor)

    def held_after(self, number: int) -> list[int]:
        """Whose contributions each element holds after a round. Called once the all-reduce has returned."""
        self._note()
        last = max((when for when in self._held if when <= number), default=0)
        return [int(value) for value in self._held[last]]

    def _note(self, when: int | None = None) -> None:
        """What the vector holds after a round; what a step changes later in that round replaces it."""
        self._held[self.now if when is None else when] = self.vector.clone()

    def _send(self, begin: int, part: torch.Tensor, target: int) -> None:
        self._channels[self.rank][target].put((begin, part.clone()))

    def _receive(self, begin: int, source: int, place: torch.Tensor) -> tuple[int, torch.Tensor]:
        """The round in which it came, and what came; `place` is where the vector has what is sent."""
        sent, part = self._channels[source][self.rank].get(timeout=LONGEST_WAIT_S)
        came, start = max(begin, sent) + 1, int(place.storage_offset())
        self.received.append(Message(came, source, self.rank, start, start + len(part)))
        return came, part
