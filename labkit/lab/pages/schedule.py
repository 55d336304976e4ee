"""The steps of an all-reduce, recorded from the algorithm itself, for pictures of it."""

import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from labkit.parallel.transport.base import Rounds, Transport

# Float64 adds their powers of two exactly, and a picture shows them.
MAX_RANKS = 32
# For a message that may never come: the function may have raised on another rank.
MAX_WAIT_S = 10.0

# The round in which a part is sent, its first element, the part.
_Item = tuple[int, int, Tensor]
_Queues = Sequence[Sequence[SimpleQueue[_Item]]]  # [source][target]


class Message(NamedTuple):
    """Elements `start` to `stop`, from rank `source`; `target` has them after `round` (from 1)."""

    round: int
    source: int
    target: int
    start: int
    stop: int


class MessageSchedule(NamedTuple):
    """All messages, and the vectors' content after each round."""

    # Length of the vector: as few as shards, and halves of halves, of the same length need.
    elements: int
    messages: list[Message]
    # By round (0: before the first), rank and element: whose shares, one bit per rank.
    held: list[list[list[int]]]


def record_schedule(all_reduce: Callable[..., None], world_size: int) -> MessageSchedule:
    """Run `all_reduce(tensor, group, op, transport=...)` on `world_size` ranks and record it.

    Ranks are threads. A rank's share of the sum is a power of two, so every element shows whose
    shares it holds. Each message takes one round, however long it is. Raises ValueError for another
    number of ranks, and whatever the function raises.
    """
    if not 1 <= world_size <= MAX_RANKS:
        raise ValueError(f"expected 1 to {MAX_RANKS} ranks, got {world_size}")
    elements = math.lcm(world_size, 1 << (world_size.bit_length() - 1))
    queues = [[SimpleQueue[_Item]() for _ in range(world_size)] for _ in range(world_size)]
    ranks = [_RecordingTransport(rank, queues, elements) for rank in range(world_size)]
    with ThreadPoolExecutor(world_size) as threads:
        ends = [
            threads.submit(all_reduce, rank.vector, None, "sum", transport=rank) for rank in ranks
        ]
    errors = list(filter(None, (end.exception() for end in ends)))
    if errors:
        # The others only waited for the rank that failed.
        raise next((error for error in errors if not isinstance(error, Empty)), errors[0])
    rounds = max(rank.round for rank in ranks)
    return MessageSchedule(
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
        self._history: dict[int, Tensor] = {}  # as they are after a round

    def run(self, rounds: Rounds, call: int = 0) -> None:
        self._history[self.round] = self.vector.clone()
        for transfers in rounds:
            start = self.round
            # All sends of a round come before its first receive: no ranks wait in a circle.
            for transfer in transfers:
                if transfer.outgoing is not None and len(transfer.outgoing):
                    sent = transfer.outgoing
                    item = (start, int(sent.storage_offset()), sent.clone())
                    self._queues[self.rank][transfer.target].put(item)
                    self.round = max(self.round, start + 1)
            for transfer in transfers:
                if transfer.incoming is not None and len(transfer.incoming):
                    queue = self._queues[transfer.source][self.rank]
                    sent_in, at, message = queue.get(timeout=MAX_WAIT_S)
                    end = max(start, sent_in) + 1
                    self.round = max(self.round, end)
                    self.received.append(
                        Message(end, transfer.source, self.rank, at, at + len(message))
                    )
                    total = transfer.incoming + message if transfer.add else message
                    result = transfer.incoming if transfer.into is None else transfer.into
                    result.copy_(total / transfer.divisor)
                    self._history[end] = self.vector.clone()

    def shares_after(self, number: int) -> list[int]:
        """Return whose shares each element holds after a round, once the all-reduce has ended."""
        self._history[self.round] = self.vector
        last = max((end for end in self._history if end <= number), default=0)
        return [int(value) for value in self._history[last]]
