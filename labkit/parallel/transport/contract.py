"""What an algorithm and a transport promise each other.

What an algorithm promises:

* A message has the same step number on both sides, in runs of equally many steps. So among the oldest unfinished steps
  of all ranks there is always one that both its sides have started, and nothing waits for ever.
* Both sides know its length and its type, which the two parts of a step have in common. An empty part is not sent.
* With `depth` steps in flight, a step reads and writes nothing that the `depth - 1` steps before it write, and writes
  nothing that they send. Within a step the same memory may be sent and added to (recursive doubling does so).

What a transport promises:

* Messages between two ranks arrive in the order sent, so ranks may run ahead of each other through any number of
  calls. One call at a time on a group and a rank, however: two threads need two groups.
* Scratch memory is made on first use and kept between calls, because touching fresh pages costs as much as copying the
  data. It is bounded whatever the size of the tensors, and it goes when the group goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

POINT_TO_POINT = "point_to_point"
SHARED = "shared"
TRANSPORTS = (POINT_TO_POINT, SHARED)


class Step(NamedTuple):
    """Send `outgoing` to group rank `target`; receive `incoming` from group rank `source`, and add it if `add`.

    Parts are contiguous vectors; None is no message. The sum goes to `into` if there is one, and to `incoming` if not,
    and is divided by `divisor`: here, because now it is in the cache.
    """

    outgoing: torch.Tensor | None
    target: int
    incoming: torch.Tensor | None
    source: int
    add: bool
    divisor: int = 1
    into: torch.Tensor | None = None


def taken_in(step: Step, message: torch.Tensor) -> torch.Tensor:
    """Where the message of a step is from now on, added or copied; still to be divided."""
    incoming, into = step.incoming, step.into
    assert incoming is not None, "a message is for somebody"
    if not step.add:
        return incoming.copy_(message)
    return incoming.add_(message) if into is None else torch.add(incoming, message, out=into)


class Transport(Protocol):
    """What an all-reduce needs of the machinery below it."""

    name: str
    rank: int
    world_size: int
    device: torch.device  # of the memory it moves
    piece_bytes: int  # parts up to this size move best
    shown_bytes: int  # parts up to this size can be shown to all

    def run(self, steps: Sequence[Step], depth: int = 1) -> None:
        """Carry out `steps`; one starts as soon as the one `depth` before it is complete, or later."""

    def show(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        """Every rank's part by rank, this one's too: to be read until the next call. A collective.

        Parts are contiguous vectors of one length and type, of 1 to `shown_bytes`; ValueError for others.
        """

    def add_shown(self, part: torch.Tensor, start: int, stop: int, divisor: int) -> None:
        """Show it, and make its elements `start` to `stop` the sum of every rank's, in the order of ranks, divided."""

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A vector, (numel,), in the memory that it sends best. A collective, sizes alike."""

    def scratch_bytes(self) -> int:
        """Bytes of scratch memory kept now."""

    def release_scratch(self) -> None:
        """Give back what scratch memory can be made again by this rank alone."""


def add_up(shown: Sequence[torch.Tensor], part: torch.Tensor, start: int, stop: int, divisor: int) -> None:
    """`Transport.add_shown`, once every rank's part is shown."""
    if start >= stop:
        return
    if stop - start < len(part):
        part, shown = part[start:stop], [of_rank[start:stop] for of_rank in shown]
    first, second, *others = shown
    torch.add(first, second, out=part)
    for other in others:
        part.add_(other)
    if divisor > 1:
        part.div_(divisor)


def check_shown(part: torch.Tensor, shown_bytes: int) -> None:
    """ValueError for a part that is too long to be shown, or empty: before anything is done."""
    if not 0 < part.nbytes <= shown_bytes:
        raise ValueError(f"expected a part of 1 to {shown_bytes} bytes to show to all ranks, got {part.nbytes}")
