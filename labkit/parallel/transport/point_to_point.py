"""Messages by torch.distributed's send and recv, between ranks on any machines.

StreamTransport   gloo, CPU memory: each message is a call of its own, moved in the background
BatchTransport    NCCL, CUDA memory: messages that wait for each other must be launched as one batch
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from labkit.parallel.transport.base import POINT_TO_POINT, Step, Transport

# Keeps these messages apart from the caller's own send and recv on the same group, which count from
# tag 0.
TAG = 0x6C6B
# a step, where its message arrives, what to wait for
_Started = tuple[Step, torch.Tensor | None, list[dist.Work]]


class _GroupTransport(Transport):
    """Parts that two ranks send each other, within a budget of scratch memory for messages that are
    to be added."""

    name = POINT_TO_POINT
    scratch_limit_bytes: int

    def piece_bytes(self, depth: int) -> int:
        return max(1024, self.scratch_limit_bytes // max(2, depth) // 1024 * 1024)

    def _landings(self, steps: Sequence[Step], depth: int) -> list[torch.Tensor | None]:
        """Return scratch vectors for the messages that are to be added, one per step in flight;
        None without any."""
        added = [step.incoming for step in steps if step.add and step.incoming is not None]
        numel = max([part.numel() for part in added], default=0)
        return [*self.scratch(depth, numel, added[0].dtype)] if numel else [None] * depth


class StreamTransport(_GroupTransport):
    """Messages that move in the background, each on its own: gloo.

    The receive of a step is posted before its send: gloo moves a message when both sides have
    announced it, and a receive that already waits saves a round trip.
    """

    scratch_limit_bytes = 2 << 20

    def __init__(self, group: dist.ProcessGroup, tag: int = TAG, reason: str = "") -> None:
        super().__init__(group.rank(), group.size(), torch.device("cpu"))
        self._tag = tag
        self.reason = reason
        # The backend's own methods take group ranks and skip the dispatcher and the checks of
        # `dist.isend`.
        # torch types it as the base class, which has neither
        backend: Any = group._get_backend(self.device)
        self._send = backend.send
        self._receive = backend.recv

    def run(self, steps: list[Step], depth: int = 1) -> None:
        landings = self._landings(steps, min(depth, len(steps)))
        in_flight: deque[_Started] = deque()
        for number, step in enumerate(steps):
            if number >= depth:
                _finish(*in_flight.popleft())
            in_flight.append(self._start(step, landings[number % depth]))
        for started in in_flight:
            _finish(*started)

    def start(self, step: Step) -> Callable[[], None]:
        started = self._start(step, None)
        return lambda: _finish(*started)

    def _start(self, step: Step, landing: torch.Tensor | None) -> _Started:
        place = _place_message(step, landing)
        works = []
        if place is not None:
            works.append(self._receive([place], step.source, self._tag))
        if step.outgoing is not None and step.outgoing.numel():
            works.append(self._send([step.outgoing], step.target, self._tag))
        return step, place, works


class BatchTransport(_GroupTransport):
    """Messages launched together and moved by the GPU, in the order of its streams: NCCL.

    Steps that may be in flight together are one batch. Waiting makes the GPU's stream wait, not the
    CPU.
    """

    reason = "NCCL moves CUDA tensors"
    scratch_limit_bytes = 32 << 20

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group.rank(), group.size(), device)
        self._group = weakref.ref(group)
        # NCCL wants every rank of the group in its first batch; the first step of an algorithm may
        # leave some out.
        token = torch.zeros(2, device=device)
        right = (self.rank + 1) % self.world_size
        left = (self.rank - 1) % self.world_size
        if self.world_size > 1:
            self.run([Step(token[:1], right, token[1:], left)])

    def run(self, steps: list[Step], depth: int = 1) -> None:
        landings = self._landings(steps, min(depth, len(steps)))
        for start in range(0, len(steps), depth):
            for started in self._launch(steps[start : start + depth], landings):
                _finish(*started)

    def start(self, step: Step) -> Callable[[], None]:
        (started,) = self._launch([step], [None])
        return lambda: _finish(*started)

    def _launch(
        self, steps: Sequence[Step], landings: Sequence[torch.Tensor | None]
    ) -> list[_Started]:
        options: dict[str, Any] = {"group": self._group(), "tag": TAG}
        places = [
            _place_message(step, landing) for step, landing in zip(steps, landings, strict=False)
        ]
        messages: list[dist.P2POp] = []
        for step, place in zip(steps, places, strict=True):
            if place is not None:
                messages.append(dist.P2POp(dist.irecv, place, group_peer=step.source, **options))
            if step.outgoing is not None and step.outgoing.numel():
                messages.append(
                    dist.P2POp(dist.isend, step.outgoing, group_peer=step.target, **options)
                )
        # all of them before the first is added
        works = dist.batch_isend_irecv(messages) if messages else []
        return [
            (step, place, [] if i else works)
            for i, (step, place) in enumerate(zip(steps, places, strict=True))
        ]


def _place_message(step: Step, landing: torch.Tensor | None) -> torch.Tensor | None:
    """Return where a step's message arrives: in place, or in scratch memory if it is to be added;
    None: no message."""
    if step.incoming is None or step.incoming.numel() == 0:
        return None
    if not step.add:
        return step.incoming
    assert landing is not None, "there is scratch memory for messages that are added"
    return landing if landing.numel() == step.incoming.numel() else landing[: step.incoming.numel()]


def _finish(step: Step, place: torch.Tensor | None, works: Sequence[dist.Work]) -> None:
    """Wait for a step's messages; add the one that has arrived, if it is to be added."""
    for work in works:
        work.wait()  # once: a second one would not return before gloo's time-out
    if place is None or not step.add or step.incoming is None:
        return
    result = (
        step.incoming.add_(place)
        if step.into is None
        else torch.add(step.incoming, place, out=step.into)
    )
    if step.divisor > 1:
        result.div_(step.divisor)
