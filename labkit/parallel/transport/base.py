"""The contract between algorithms and transports: steps, and what either side promises.

An algorithm is a list of steps. A step sends a part of a vector to one rank and receives a part
from another, which is stored, or added to what is there. `Transport.run` carries the steps out.

An algorithm promises:

* A message has the same step number on both sides, in runs of equally many steps. So among the
  oldest unfinished steps of all ranks there is always one that both its sides have started, and
  nothing waits forever.
* The two parts of a message have the same length and dtype. An empty part is not sent.
* Steps come in rounds of `depth`. A step sends nothing that the `depth - 1` steps before it write,
  and writes nothing that they send. Several steps may add to the same memory. Within a step the
  same memory may be sent and added to.
* Parts that are cut stay in order: what a step sends from element i on, the round before has
  written from i on.

A transport promises:

* Messages between two ranks arrive in the order sent, and are added in the order of steps. Ranks
  may run ahead of each other through any number of calls. One call at a time per group and rank:
  two threads need two transports.
* Scratch memory is made on first use and kept between calls, because touching fresh pages costs as
  much as copying. It is bounded whatever the size of the tensors, and it goes when the group goes.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import torch

POINT_TO_POINT = "point_to_point"
SHARED = "shared"
TRANSPORTS = (POINT_TO_POINT, SHARED)
_ALIGNMENT_BYTES = 64


class SharedMemoryUnavailable(RuntimeError):
    """The ranks of a group cannot share memory; the message says why."""


class Step(NamedTuple):
    """Send `outgoing` to group rank `target`; receive `incoming` from group rank `source`.

    Parts are contiguous vectors; None is no message. With `add`, the message is added to
    `incoming`, the sum divided by `divisor`, and the result put into `into`, if there is one, else
    into `incoming`.
    """

    outgoing: torch.Tensor | None
    target: int
    incoming: torch.Tensor | None
    source: int
    add: bool = False
    divisor: int = 1
    into: torch.Tensor | None = None


@lru_cache(1024)
def checksum(*call: object) -> int:
    """Return a number for a call, described by names, sizes and dtypes, that is the same in every
    process."""
    return zlib.crc32(repr(call).encode())


class Transport(ABC):
    """Messages between the ranks of a group. `device`: of the memory that it moves."""

    name: str
    reason: str = ""
    """Why it is not shared memory."""

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.call_checksum = 0
        """Checksum of the collective that `run` is part of: through shared memory, ranks compare
        it."""
        self.n_ended = 0
        self._scratch = torch.empty(0, dtype=torch.uint8, device=device)
        self._vectors: list[torch.Tensor] = []
        self._shape: tuple[int, int, torch.dtype] | None = None

    @abstractmethod
    def run(self, steps: list[Step], depth: int = 1) -> None:
        """Carry out `steps`. Step i, or piece k of it, may start once step i - `depth`, or its
        piece k, is complete."""

    def start(self, step: Step) -> Callable[[], None]:
        """Start a step of any length, without `add`; return a function that completes it.

        Steps that were started complete in that order, before any that `run` carries out
        afterwards. Here a step starts when it is to be completed.
        """
        return lambda: self.run([step])

    def end_call(self) -> None:
        """Count a collective that is over on this rank, or refused: through shared memory, no rank
        waits for it."""
        self.n_ended += 1

    @abstractmethod
    def piece_bytes(self, depth: int) -> int:
        """Return the bytes of the longest parts that it takes with `depth` steps in flight; the
        same on all ranks."""

    def scratch(self, count: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
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
