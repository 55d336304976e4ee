"""Messages by torch.distributed's send and recv, between ranks on any machines.

StreamTransport   gloo, CPU memory: each message is a call of its own, moved in the background
BatchTransport    NCCL, CUDA memory: messages that wait for each other must be launched as one batch
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from itertools import groupby
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.parallel.transport.base import (
    POINT_TO_POINT,
    Rounds,
    Transfer,
    Transport,
    cut_rounds,
)

# Keeps these messages apart from the caller's own send and recv on the same group, which count from
# tag 0.
TAG = 0x6C6B
# a transfer, where its message arrives, what to wait for
_Started = tuple[Transfer, Tensor | None, Sequence[dist.Work]]


class _GroupTransport(Transport):
    """Messages in chunks, as many of them at once as there is scratch memory to add them from."""

    name = POINT_TO_POINT
    scratch_limit_bytes: int

    def __init__(self, rank: int, world_size: int, device: torch.device) -> None:
        super().__init__(rank, world_size, device)
        # A rank may have messages to all others in flight, or two to the same one, so that one
        # travels while the other is added.
        self.in_flight = max(2, world_size - 1)

    @property
    def chunk_bytes(self) -> int:
        """Bytes of a chunk, the same on all ranks."""
        # Multiples of 1024 bytes hold whole elements of every dtype.
        return max(1024, self.scratch_limit_bytes // self.in_flight // 1024 * 1024)

    def _landings(self, count: int, transfers: Sequence[Transfer]) -> Sequence[Tensor | None]:
        """Return `count` scratch vectors for the messages of these transfers that are added."""
        added = [each.incoming for each in transfers if each.add and each.incoming is not None]
        numel = max([incoming.numel() for incoming in added], default=0)
        return self.scratch(count, numel, added[0].dtype) if numel else [None] * count


class StreamTransport(_GroupTransport):
    """Messages that move in the background, each on its own: gloo.

    The receive of a transfer is posted before its send: gloo moves a message when both sides have
    announced it, and a receive that already waits saves a round trip.
    """

    scratch_limit_bytes = 2 << 20

    def __init__(self, group: dist.ProcessGroup, tag: int = TAG, reason: str = "") -> None:
        super().__init__(group.rank(), group.size(), torch.device("cpu"))
        self._tag = tag
        self.reason = reason
        # The backend's own methods take group ranks and skip the dispatcher and the checks of
        # `dist.isend`. torch types it as the base class, which has neither.
        backend: Any = group._get_backend(self.device)
        self._send = backend.send
        self._receive = backend.recv

    def run(self, rounds: Rounds, call: int = 0) -> None:
        chunks = cut_rounds(rounds, self.chunk_bytes)
        window = min(self.in_flight, len(chunks))
        landings = self._landings(window, [chunk.transfer for chunk in chunks])
        started: deque[_Started] = deque()
        for number, chunk in enumerate(chunks):
            # A landing is free once its message is added, and what is sent on must have arrived.
            while len(started) == window or number - len(started) < chunk.after:
                _finish(*started.popleft())
            started.append(self._start(chunk.transfer, landings[number % window]))
        while started:
            _finish(*started.popleft())

    def start(self, transfer: Transfer) -> Callable[[], None]:
        started = self._start(transfer, None)
        return lambda: _finish(*started)

    def _start(self, transfer: Transfer, landing: Tensor | None) -> _Started:
        place = _place_message(transfer, landing)
        works = []
        if place is not None:
            works.append(self._receive([place], transfer.source, self._tag))
        if transfer.outgoing is not None and transfer.outgoing.numel():
            works.append(self._send([transfer.outgoing], transfer.target, self._tag))
        return transfer, place, works


class BatchTransport(_GroupTransport):
    """Messages launched together and moved by the GPU, in the order of its streams: NCCL.

    A wave of chunks is one batch, since ranks must launch the same messages together. Waiting makes
    the GPU's stream wait, not the CPU.
    """

    reason = "NCCL moves CUDA tensors"
    scratch_limit_bytes = 32 << 20

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, *, has_collectives: bool
    ) -> None:
        super().__init__(group.rank(), group.size(), device)
        # The group keeps its transports: a reference back would keep both alive for good.
        self._group = weakref.ref(group)
        self._has_collectives = has_collectives
        # NCCL wants every rank of the group in its first batch; the first round of an algorithm may
        # leave some out.
        token = torch.zeros(2, device=device)
        right = (self.rank + 1) % self.world_size
        left = (self.rank - 1) % self.world_size
        if self.world_size > 1:
            self.run([[Transfer(token[:1], right, token[1:], left)]])

    @property
    def collective_group(self) -> dist.ProcessGroup | None:  # type: ignore[override]
        return self._group() if self._has_collectives else None

    def run(self, rounds: Rounds, call: int = 0) -> None:
        for _, wave in groupby(cut_rounds(rounds, self.chunk_bytes), attrgetter("wave")):
            transfers = [chunk.transfer for chunk in wave]
            scratch = iter(self._landings(sum(each.add for each in transfers), transfers))
            landings = [next(scratch) if each.add else None for each in transfers]
            for started in self._launch(transfers, landings):
                _finish(*started)

    def start(self, transfer: Transfer) -> Callable[[], None]:
        (started,) = self._launch([transfer], [None])
        return lambda: _finish(*started)

    def _launch(
        self, transfers: Sequence[Transfer], landings: Sequence[Tensor | None]
    ) -> list[_Started]:
        options: dict[str, Any] = {"group": self._group(), "tag": TAG}
        places = []
        messages: list[dist.P2POp] = []
        for transfer, landing in zip(transfers, landings, strict=True):
            place = _place_message(transfer, landing)
            if place is not None:
                receive = dist.P2POp(dist.irecv, place, group_peer=transfer.source, **options)
                messages.append(receive)
            if transfer.outgoing is not None and transfer.outgoing.numel():
                outgoing = transfer.outgoing
                send = dist.P2POp(dist.isend, outgoing, group_peer=transfer.target, **options)
                messages.append(send)
            places.append(place)
        works = dist.batch_isend_irecv(messages) if messages else []
        started = list[_Started]()
        for transfer, place in zip(transfers, places, strict=True):
            # The first one waits for all messages of the batch.
            started.append((transfer, place, [] if started else works))
        return started


def _place_message(transfer: Transfer, landing: Tensor | None) -> Tensor | None:
    """Return where a message arrives, None if there is none.

    That is scratch memory if it is to be added, else its place.
    """
    if transfer.incoming is None or transfer.incoming.numel() == 0:
        return None
    if not transfer.add:
        return transfer.incoming
    assert landing is not None, "there is scratch memory for messages that are added"
    # A slice costs a microsecond, and all messages of a short call have one length.
    numel = transfer.incoming.numel()
    return landing if landing.numel() == numel else landing[:numel]


def _finish(transfer: Transfer, place: Tensor | None, works: Sequence[dist.Work]) -> None:
    """Wait for a transfer's messages; add the one that has arrived, if it is to be added."""
    for work in works:
        work.wait()  # once: a second one would not return before gloo's time-out
    if place is None or not transfer.add or transfer.incoming is None:
        return
    if transfer.into is None:
        result = transfer.incoming.add_(place)
    else:
        result = torch.add(transfer.incoming, place, out=transfer.into)
    if transfer.divisor > 1:
        result.div_(transfer.divisor)
