"""What algorithms and transports promise each other.

An algorithm is a list of rounds, and a round a list of transfers. A `Transfer` sends a vector to
one rank and receives one from another, which is stored, or added to what is there. `Transport.run`
carries the rounds out. It cuts long messages into chunks, so that a chunk is added or sent on while
the next one travels.

An algorithm promises:

* A message has the same place on both sides: in runs of equally many rounds, in the round of one
  number, among the messages between these two ranks. A round may be empty.
* The two vectors of a message have the same length and dtype. An empty vector is not sent.
* Transfers of a round do not depend on each other: none writes what another one sends. Several may
  add to the same memory. Within one transfer the same memory may be sent and added to.
* Rounds go through memory from its start to its end: what a round sends from element i of a vector
  on, the round before has written from element i of a vector on. What a round writes from element i
  on, the round before sends from element i on. So a round of a whole vector and one of its shards
  are in two runs: else a shard would leave before it is written.

A transport promises:

* Chunk k of a round starts once chunk k of the round before is complete. Chunks are taken in the
  same order on all ranks (`cut_rounds`). So the oldest unfinished chunk of all ranks is one that
  both its sides have started, and nothing waits forever.
* Messages between two ranks arrive in the order sent, and are added in the order of transfers.
* Ranks may run ahead of each other through any number of calls. One call at a time per group and
  rank: two threads need two transports.
* Scratch memory is made on first use and kept between calls, because touching fresh pages costs as
  much as copying. It is bounded whatever the size of the tensors, and it goes when the group goes.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

POINT_TO_POINT = "point_to_point"
SHARED = "shared"
TRANSPORTS = (POINT_TO_POINT, SHARED)
_ALIGNMENT_BYTES = 64


class SharedMemoryUnavailable(RuntimeError):
    """The ranks of a group cannot share memory; the message says why."""


class Transfer(NamedTuple):
    """Send `outgoing` to group rank `target`; receive `incoming` from group rank `source`.

    Both are contiguous vectors; None is no message. With `add`, the message is added to `incoming`,
    the sum divided by `divisor`, and the result put into `into`, if there is one, else into
    `incoming`.
    """

    outgoing: Tensor | None
    target: int
    incoming: Tensor | None
    source: int
    add: bool = False
    divisor: int = 1
    into: Tensor | None = None

    def chunks(self, chunk_bytes: int) -> list[Transfer]:
        """Return a transfer per chunk of the longer message."""
        is_short = self.outgoing is None or self.outgoing.nbytes <= chunk_bytes
        if is_short and (self.incoming is None or self.incoming.nbytes <= chunk_bytes):
            return [self]
        # One side may be longer: the rest of it travels alone. So both ranks of a message cut it
        # alike, whatever else each of them sends.
        vectors = (self.outgoing, self.incoming, self.into)
        chunks = [() if x is None else x.split(chunk_bytes // x.itemsize) for x in vectors]
        return [
            Transfer(outgoing, self.target, incoming, self.source, self.add, self.divisor, into)
            for outgoing, incoming, into in zip_longest(*chunks)
        ]


Rounds = list[list[Transfer]]


class Chunk(NamedTuple):
    """A transfer of one chunk, which may start once the first `after` chunks are complete.

    Chunks of a `wave` do not depend on each other.
    """

    transfer: Transfer
    wave: int
    after: int


def cut_rounds(rounds: Rounds, chunk_bytes: int) -> list[Chunk]:
    """Return all chunks as transports take them: chunk k of round i in wave i + k.

    So while chunk k of a round is sent on, chunk k + 1 of the round before arrives.
    """
    cut = [[transfer.chunks(chunk_bytes) for transfer in transfers] for transfers in rounds]
    most = max([len(chunks) for transfers in cut for chunks in transfers], default=1)
    result: list[Chunk] = []
    ends = [0] * len(rounds)  # by round: how many chunks are complete once its last one so far is
    for wave in range(len(rounds) + most - 1):
        # Of the waves before: chunks of one wave do not wait for each other.
        ends_before = ends.copy()
        for i in range(max(0, wave - most + 1), min(wave + 1, len(rounds))):
            k = wave - i
            after = ends_before[i - 1] if i else 0
            for chunks in cut[i]:
                if k < len(chunks):
                    result.append(Chunk(chunks[k], wave, after))
            ends[i] = len(result)
    return result


@lru_cache(1024)
def checksum(*call: object) -> int:
    """Return 32 bits for a call, from names, sizes and dtypes, the same in every process."""
    # Not `hash`, which is salted in each process.
    return zlib.crc32(repr(call).encode())


class Transport(ABC):
    """Messages between the ranks of a group. `device`: of the memory that it moves."""

    name: str
    reason: str = ""
    """Why it is not shared memory."""
    collective_group: dist.ProcessGroup | None = None
    """The group whose backend has collectives that wrappers use in place of messages.

    NCCL's, unless messages are requested: they know the machine's links.
    """

    store: Any = None
    """The group's, in which ranks say why a message does not come."""

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        # Bytes, since calls of all dtypes use the same memory in turn.
        self._scratch = torch.empty(0, dtype=torch.uint8, device=device)
        self._vectors: list[Tensor] = []
        self._shape: tuple[int, int, torch.dtype] | None = None

    @abstractmethod
    def run(self, rounds: Rounds, call: int = 0) -> None:
        """Carry out the rounds of a call; return when all messages to this rank have arrived.

        `call`: its `checksum`. Through shared memory a message of another call raises.
        """

    def start(self, transfer: Transfer) -> Callable[[], None]:
        """Start a transfer of any length, without `add`; return a function that completes it.

        Transfers that were started complete in that order, before any that `run` carries out
        afterwards. Here one starts when it is to be completed.
        """
        return lambda: self.run([[transfer]])

    def end_call(self) -> None:  # noqa: B027 - most transports have nothing to note
        """Note that a collective is over on this rank, or was refused.

        Through shared memory, ranks that still wait for its messages raise.
        """

    def leave(self) -> None:  # noqa: B027 - connections of the group are closed by themselves
        """Leave the group: ranks that wait for this one raise, also from another thread."""

    def scratch(self, count: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
        """Return `count` vectors, (numel,), whose content is lost at the next call."""
        # cutting takes 10 us, a tenth of a short all-reduce
        if self._shape != (count, numel, dtype):
            n_bytes = -(-numel * dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
            # else the memory could not be written to outside of it
            with torch.inference_mode(False):
                if self._scratch.numel() < count * n_bytes:
                    self._scratch = torch.empty(
                        count * n_bytes, dtype=torch.uint8, device=self.device
                    )
                memory = self._scratch[: count * n_bytes].view(dtype)
                self._vectors = [
                    vector[:numel] for vector in memory.split(max(1, n_bytes // dtype.itemsize))
                ]
            self._shape = (count, numel, dtype)
        return self._vectors
