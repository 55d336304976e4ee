"""Messages by torch.distributed's send and recv, between ranks on any machines.

StreamTransport   gloo, CPU memory: each message is a call of its own, moved in the background
BatchTransport    NCCL, CUDA memory: messages that wait for each other must be launched as one batch
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from labkit.parallel.transport.base import POINT_TO_POINT, Step, Transport

# Keeps these messages apart from the caller's own send and recv on the same group, which count from tag 0.
TAG = 0x6C6B


class _GroupTransport(Transport):
    """Parts that two ranks send each other, within a budget of scratch memory for messages that are to be added."""

    name = POINT_TO_POINT
    scratch_limit_bytes: int

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group.rank(), group.size(), device)

    def piece_bytes(self, depth: int) -> int:
        return max(1024, self.scratch_limit_bytes // max(2, depth) // 1024 * 1024)

    def _landings(self, steps: Sequence[Step], depth: int) -> list[torch.Tensor]:
        """Return scratch vectors for the messages that are to be added: one per step in flight, or none."""
        added = [step.incoming for step in steps if step.add and step.incoming is not None]
        numel = max([part.numel() for part in added], default=0)
        return self.scratch(min(depth, len(steps)), numel, added[0].dtype) if numel else []


class StreamTransport(_GroupTransport):
    """Messages that move in the background, each on its own: gloo.

    The receive of a step is posted before its send: gloo moves a message when both sides have announced it, and a
    receive that already waits saves a round trip.
    """

    scratch_limit_bytes = 2 << 20

    def __init__(self, group: dist.ProcessGroup, tag: int = TAG) -> None:
        device = torch.device("cpu")
        super().__init__(group, device)
        self._tag = tag
        # The backend's own methods take group ranks and skip the dispatcher and the checks of `dist.isend`.
        backend: Any = group._get_backend(device)  # torch types it as the base class, which has neither
        self._send, self._receive = backend.send, backend.recv

    def run(self, steps: Sequence[Step], depth: int = 1) -> None:
        landings = self._landings(steps, depth)
        in_flight: deque[_Started] = deque()
        for number, step in enumerate(steps):
            if number >= depth:
                in_flight.popleft().finish()
            in_flight.append(self._start(step, landings[number % depth] if landings else None))
        for started in in_flight:
            started.finish()

    def start(self, step: Step) -> Callable[[], None]:
        return self._start(step, None).finish

    def _start(self, step: Step, landing: torch.Tensor | None) -> _Started:
        place, outgoing = _place_message(step, landing), step.outgoing
        arrival = None if place is None else self._receive([place], step.source, self._tag)
        is_empty = outgoing is None or outgoing.numel() == 0
        departure = None if is_empty else self._send([outgoing], step.target, self._tag)
        return _Started(departure, arrival, step, place)


class BatchTransport(_GroupTransport):
    """Messages launched together and moved by the GPU, in the order of its streams: NCCL.

    Steps that may be in flight together are one batch. Waiting makes the GPU's stream wait, not the CPU.
    """

    scratch_limit_bytes = 32 << 20

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self._group = weakref.ref(group)
        # NCCL wants every rank of the group in its first batch; the first step of an algorithm may leave some out.
        token = torch.zeros(2, device=device)
        right, left = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
        if self.world_size > 1:
            self.run([Step(token[:1], right, token[1:], left)])

    def run(self, steps: Sequence[Step], depth: int = 1) -> None:
        landings = self._landings(steps, depth)
        for start in range(0, len(steps), depth):
            self._launch(steps[start : start + depth], landings)()

    def start(self, step: Step) -> Callable[[], None]:
        return self._launch([step], [])

    def _launch(self, steps: Sequence[Step], landings: Sequence[torch.Tensor]) -> Callable[[], None]:
        group = self._group()
        messages: list[dist.P2POp] = []
        received: list[tuple[Step, torch.Tensor]] = []
        for number, step in enumerate(steps):
            place = _place_message(step, landings[number] if landings else None)
            if place is not None:
                messages.append(dist.P2POp(dist.irecv, place, group=group, tag=TAG, group_peer=step.source))
                received.append((step, place))
            if step.outgoing is not None and step.outgoing.numel():
                messages.append(dist.P2POp(dist.isend, step.outgoing, group=group, tag=TAG, group_peer=step.target))
        works = dist.batch_isend_irecv(messages) if messages else []

        def finish() -> None:
            for work in works:
                work.wait()
            for step, place in received:
                _apply_message(step, place)

        return finish


class _Started(NamedTuple):
    """A step whose messages are on their way."""

    departure: dist.Work | None
    arrival: dist.Work | None
    step: Step
    place: torch.Tensor | None

    def finish(self) -> None:
        # Each wait() once: a second one would not return before gloo's time-out.
        if self.departure is not None:
            self.departure.wait()
        if self.arrival is not None and self.place is not None:
            self.arrival.wait()
            _apply_message(self.step, self.place)


def _place_message(step: Step, landing: torch.Tensor | None) -> torch.Tensor | None:
    """Return where a step's message arrives: in place, or in scratch memory if it is to be added; None: no message."""
    incoming = step.incoming
    if incoming is None or incoming.numel() == 0:
        return None
    if not step.add:
        return incoming
    assert landing is not None, "there is scratch memory for messages that are added"
    return landing if landing.numel() == incoming.numel() else landing[: incoming.numel()]


def _apply_message(step: Step, message: torch.Tensor) -> None:
    """Add a message that has come, if it is to be added."""
    if not step.add or step.incoming is None:
        return
    result = step.incoming.add_(message) if step.into is None else torch.add(step.incoming, message, out=step.into)
    if step.divisor > 1:
        result.div_(step.divisor)
