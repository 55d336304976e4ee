"""Record the messages of an all-reduce from a run of the real function: who sends what to whom, in which round.

Ranks are threads, and their transport notes what it carries. A rank's share of the sum is a power of two, so every
element shows whose shares it holds; rounds are counted as if each message took one, however long it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import NamedTuple

import torch

from labkit.parallel.collectives import power_of_two_ranks
from labkit.parallel.transport.base import Step, Transport

MAX_RANKS = 32  # whose powers of two float64 adds exactly, and a picture shows
MAX_WAIT_S = 10.0  # for a message that may never come: the function may have raised on another rank

_Item = tuple[int, int, torch.Tensor]  # the round in which a part is sent, its first element, the part
_Queues = Sequence[Sequence[SimpleQueue[_Item]]]  # [source][target]


class Message(NamedTuple):
    """Elements `start` to `stop` of the vector, sent by rank `source` to rank `target` in round `round`, from 1 up."""

    round: int
    source: int
    target: int
    start: int
    stop: int


class Schedule(NamedTuple):
    """All messages, and the vectors' content after each round."""

    elements: int
    """Length of the vector: as few as give every rank a shard of the same length."""
    messages: list[Message]
    held: list[list[list[int]]]
    """By round (0: before the first), rank and element: whose shares it holds, one bit per rank."""


def record_schedule(all_reduce: Callable[..., None], world_size: int) -> Schedule:
    """Run `all_reduce(tensor, group, op, transport=...)` on `world_size` ranks, 1 to `MAX_RANKS`; return its messages.

    Raises ValueError for another number of ranks, and whatever the function raises.
    """
    if not 1 <= world_size <= MAX_RANKS:
        raise ValueError(f"expected 1 to {MAX_RANKS} ranks, got {world_size}")
    elements = math.lcm(world_size, len(power_of_two_ranks(world_size)))
    queues = [[SimpleQueue[_Item]() for _ in range(world_size)] for _ in range(world_size)]
    ranks = [_RecordingTransport(rank, queues, elements) for rank in range(world_size)]
    with ThreadPoolExecutor(world_size) as threads:
        ends = [threads.submit(all_reduce, rank.vector, None, "sum", transport=rank) for rank in ranks]
    if errors := [error for end in ends if (error := end.exception())]:
        raise next((error for error in errors if not isinstance(error, Empty)), errors[0])  # others only waited for it
    rounds = max(rank.round for rank in ranks)
    return Schedule(
        elements,
        sorted(message for rank in ranks for message in rank.received),
        [[rank.shares_after(number) for rank in ranks] for number in range(rounds + 1)],
    )


class _RecordingTransport(Transport):
    """Messages between threads. `round`: the last one of this rank."""

    name = "recorded"

    def __init__(self, rank: int, queues: _Queues, elements: int) -> None:
        super().__init__(rank, len(queues), torch.device("cpu"))
        self.vector = torch.full((elements,), 2.0**rank, dtype=torch.float64)
        self.round = 0
        self.received: list[Message] = []
        self._queues = queues
        self._snapshots: dict[int, torch.Tensor] = {}

    def piece_bytes(self, depth: int) -> int:
        return 1 << 20

    def run(self, steps: Sequence[Step], depth: int = 1) -> None:
        self._snapshot(self.round)
        ends: list[int] = []
        for number, step in enumerate(steps):
            start = end = self.round if number < depth else max(self.round, ends[number - depth])
            if step.outgoing is not None and len(step.outgoing):
                part = step.outgoing
                self._queues[self.rank][step.target].put((start, int(part.storage_offset()), part.clone()))
                end = start + 1
            if step.incoming is not None and len(step.incoming):
                end = max(end, self._receive(step, start))
            ends.append(end)
            self._snapshot(end)
        self.round = max([self.round, *ends])

    def shares_after(self, number: int) -> list[int]:
        """Return whose shares each element holds after a round. Called once the all-reduce has returned."""
        self._snapshot(self.round)
        last = max((end for end in self._snapshots if end <= number), default=0)
        return [int(value) for value in self._snapshots[last]]

    def _snapshot(self, end: int) -> None:
        """Keep the vector after a round; a step that changes it later in that round replaces it."""
        self._snapshots[end] = self.vector.clone()

    def _receive(self, step: Step, start: int) -> int:
        """Store or add a step's message; return the round in which it arrived."""
        incoming = step.incoming
        assert incoming is not None
        sent, at, part = self._queues[step.source][self.rank].get(timeout=MAX_WAIT_S)
        end = max(start, sent) + 1
        self.received.append(Message(end, step.source, self.rank, at, at + len(part)))
        result = incoming if step.into is None else step.into
        result.copy_((incoming + part if step.add else part) / step.divisor)
        return end
