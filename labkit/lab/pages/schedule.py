"""The steps of an all-reduce, recorded from labkit's algorithms or a reader's code, for pictures.

A rank's share of the sum is a power of two, so every element shows whose shares it holds. A message
takes one round, however long it is, and begins once both ends ask for it.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.parallel.launch import run_ranks
from labkit.parallel.transport.base import Rounds, Transport

# Float64 adds their powers of two exactly, and a picture shows them.
MAX_RANKS = 32
# For a message that may never come: the function may have raised on another rank.
MAX_WAIT_S = 10.0
COLLECTIVES = (
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_to_all",
    "all_to_all_single",
    "broadcast",
    "gather",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
)

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

    Ranks are threads. Raises ValueError for another number of ranks than 1 to 32, and whatever the
    function raises.
    """
    if not 1 <= world_size <= MAX_RANKS:
        raise ValueError(f"expected 1 to {MAX_RANKS} ranks, got {world_size}")
    elements = _n_elements(world_size)
    queues = [[SimpleQueue[_Item]() for _ in range(world_size)] for _ in range(world_size)]
    ranks = [_RecordingTransport(rank, queues, elements) for rank in range(world_size)]
    with ThreadPoolExecutor(world_size) as threads:
        ends = [
            threads.submit(all_reduce, rank.log.vector, None, "sum", transport=rank)
            for rank in ranks
        ]
    errors = list(filter(None, (end.exception() for end in ends)))
    if errors:
        # The others only waited for the rank that failed.
        raise next((error for error in errors if not isinstance(error, Empty)), errors[0])
    return _join([rank.log.end() for rank in ranks])


def record_user_schedule(all_reduce: Callable[[Tensor], Any], world_size: int) -> MessageSchedule:
    """Run `all_reduce(tensor)` on ranks, and return its messages as `record_schedule` does.

    Messages are those of torch's `send`, `recv`, `isend`, `irecv` and `batch_isend_irecv`.

    Raises:
        RankError: if the function raises on a rank, calls one of torch's collectives, whose
            messages cannot be seen, or waits for a message that never comes.
    """
    # On processes, since it calls torch's own functions, whose groups are per process.
    return _join(run_ranks(_record_user_rank, all_reduce, world_size=world_size))


def _n_elements(world_size: int) -> int:
    """Return a length that all ranks, and the largest power of two of them, divide evenly."""
    return math.lcm(world_size, 1 << (world_size.bit_length() - 1))


# Messages that a rank received, and what its vector held: (after a round, whose shares).
_RankEnd = tuple[list[Message], list[tuple[int, list[int]]]]


def _join(ends: Sequence[_RankEnd]) -> MessageSchedule:
    """Join what the ranks have recorded."""
    histories = [dict(history) for _, history in ends]
    held = []
    for number in range(max(map(max, histories)) + 1):
        # A rank that is not part of a round holds what it held before.
        last = [max(end for end in history if end <= number) for history in histories]
        held.append([history[end] for history, end in zip(histories, last, strict=True)])
    messages = sorted(Message(*message) for received, _ in ends for message in received)
    return MessageSchedule(len(held[0][0]), messages, held)


class _RankLog:
    """What one rank receives, and what its vector holds after each of its rounds."""

    def __init__(self, rank: int, elements: int) -> None:
        self.vector = torch.full((elements,), 2.0**rank, dtype=torch.float64)
        self.round = 0
        """The last one in which the rank has sent or received."""
        self.works: list[_RecordedWork] = []
        """Kept, since a message needs its tensors even if nobody waits for it."""
        self._rank = rank
        self._messages: list[Message] = []
        self._history: dict[int, list[int]] = {}

    def first_element(self, tensor: Tensor) -> int:
        """Return the first element of a part of the vector; 0 for another tensor."""
        is_part = tensor.untyped_storage().data_ptr() == self.vector.untyped_storage().data_ptr()
        return int(tensor.storage_offset()) if is_part else 0

    def note(self) -> None:
        """Note what the vector holds now, after the rank's last round."""
        self._history[self.round] = [int(value) for value in self.vector]

    def end_send(self, posted: int) -> None:
        """Count a message that was posted after round `posted`."""
        self.round = max(self.round, posted + 1)

    def end_receive(self, posted: int, sent: int, source: int, start: int, length: int) -> None:
        """Count a message that the ends posted after these rounds, once it is in the vector."""
        end = max(posted, sent) + 1
        self.round = max(self.round, end)
        stop = min(start + length, len(self.vector))
        self._messages.append(Message(end, source, self._rank, start, stop))
        self.note()

    def end(self) -> _RankEnd:
        """Return what was recorded."""
        self.note()
        return self._messages, list(self._history.items())


class _RecordingTransport(Transport):
    """Messages between threads."""

    name = "recorded"

    def __init__(self, rank: int, queues: _Queues, elements: int) -> None:
        super().__init__(rank, len(queues), torch.device("cpu"))
        self.log = _RankLog(rank, elements)
        self._queues = queues

    def run(self, rounds: Rounds, call: int = 0) -> None:
        log = self.log
        log.note()
        for transfers in rounds:
            posted = log.round
            # All sends of a round come before its first receive: no ranks wait in a circle.
            for transfer in transfers:
                if transfer.outgoing is not None and len(transfer.outgoing):
                    content = transfer.outgoing
                    item = (posted, int(content.storage_offset()), content.clone())
                    self._queues[self.rank][transfer.target].put(item)
                    log.end_send(posted)
            for transfer in transfers:
                if transfer.incoming is not None and len(transfer.incoming):
                    queue = self._queues[transfer.source][self.rank]
                    sent, start, content = queue.get(timeout=MAX_WAIT_S)
                    total = transfer.incoming + content if transfer.add else content
                    result = transfer.incoming if transfer.into is None else transfer.into
                    result.copy_(total / transfer.divisor)
                    log.end_receive(posted, sent, transfer.source, start, len(content))


def _record_user_rank(all_reduce: Callable[[Tensor], Any]) -> _RankEnd:
    """Run on every rank."""
    log = _RankLog(dist.get_rank(), _n_elements(dist.get_world_size()))
    with _recorded_calls(log):
        all_reduce(log.vector)
    return log.end()


@contextmanager
def _recorded_calls(log: _RankLog) -> Iterator[None]:
    """Replace torch's functions in this process, which is a rank and ends after the call."""
    isend = partial(_RecordedWork, log, dist.isend, None)
    irecv = partial(_RecordedWork, log, dist.irecv, ("src", "group_src"))
    replaced: dict[str, Any] = {name: partial(_refuse, name) for name in COLLECTIVES}
    replaced |= {"isend": isend, "irecv": irecv}
    replaced["send"] = lambda *args, **options: isend(*args, **options).wait()
    replaced["recv"] = lambda *args, **options: irecv(*args, **options).wait()
    # P2POp looks for `isend` where torch defines it.
    modules = (dist, dist.distributed_c10d)
    patches = [patch.multiple(module, **replaced) for module in modules]
    with patches[0], patches[1]:
        yield


def _refuse(name: str, *args: Any, **options: Any) -> None:
    raise ValueError(
        f"expected an all-reduce of sends and receives, which have steps; {name} is one call"
    )


class _RecordedWork:
    """A message of a reader's code under way; it counts once it is waited for."""

    def __init__(
        self,
        log: _RankLog,
        post: Callable[..., Any],
        names: tuple[str, ...] | None,
        tensor: Tensor,
        *args: Any,
        **options: Any,
    ) -> None:
        """Post a message; `names` are those of torch's argument for the source, None for a send."""
        log.note()
        log.works.append(self)
        self._log = log
        self._posted = log.round
        self._tensor = tensor
        self._source: int | None = None
        if names is not None:
            sources = (*args[:1], *(options.get(name) for name in names))
            self._source = next(rank for rank in sources if rank is not None)
        # Sent before the message: the sender's round and place, which its receiver cannot know.
        self._header = torch.tensor([log.round, log.first_element(tensor)])
        self._works = [post(part, *args, **options) for part in (self._header, tensor)]

    def wait(self, *args: Any) -> Any:
        results = [work.wait(*args) for work in self._works]
        if self._source is None:
            self._log.end_send(self._posted)
            return results[-1]
        sent, start = self._header.tolist()
        # One end may use a buffer: the other one knows the place in the vector.
        start = self._log.first_element(self._tensor) or start
        length = self._tensor.numel()
        self._log.end_receive(self._posted, sent, self._source, start, length)
        return results[-1]

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)
