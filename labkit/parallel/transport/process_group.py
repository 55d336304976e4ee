"""Messages by torch.distributed's own send and recv, between ranks on any machines.

StreamTransport   gloo, CPU memory: each message is a call of its own, moved in the background
BatchTransport    NCCL, CUDA memory: messages that wait for each other must be launched as one batch
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from labkit.parallel.transport.contract import POINT_TO_POINT, Step, add_up, check_shown, taken_in

# Keeps our messages apart from the caller's own send/recv on the same group, which count from tag 0.
TAG = 0x6C6B

ALIGNMENT_BYTES = 64


class Scratch:
    """Memory kept between calls: one allocation, cut into equal slots of whatever type is asked for."""

    def __init__(self, device: torch.device, limit_bytes: int) -> None:
        self._device = device
        self._limit_bytes = limit_bytes
        self._memory = torch.empty(0, dtype=torch.uint8, device=device)
        self._slots: list[torch.Tensor] = []
        self._shape: tuple[int, int, torch.dtype] | None = None

    @property
    def nbytes(self) -> int:
        return self._memory.numel()

    def slots(self, count: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """Vectors of `numel` elements: `count`, or as many as fit into the limit, and one at least."""
        if self._shape != (count, numel, dtype):  # cutting takes 10 us, a tenth of a small all-reduce
            self._shape = (count, numel, dtype)
            self._slots = self._cut(count, numel, dtype)
        return self._slots

    def release(self) -> None:
        self._memory = self._memory.new_empty(0)
        self._slots = []
        self._shape = None

    def _cut(self, count: int, numel: int, dtype: torch.dtype) -> list[torch.Tensor]:
        slot_bytes = -(-numel * dtype.itemsize // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        count = max(1, min(count, self._limit_bytes // slot_bytes))
        if self.nbytes < count * slot_bytes:
            # Made in inference mode, the memory could not be written to outside it.
            with torch.inference_mode(False):
                self._memory = torch.empty(count * slot_bytes, dtype=torch.uint8, device=self._device)
        slots = self._memory[: count * slot_bytes].view(dtype).split(slot_bytes // dtype.itemsize)
        return [slot[:numel] for slot in slots]


class _GroupTransport:
    """What the two transports over torch.distributed have in common."""

    name = POINT_TO_POINT
    piece_bytes: int
    scratch_limit_bytes: int

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.rank = group.rank()
        self.world_size = group.size()
        self.device = device
        self._scratch = Scratch(device, self.scratch_limit_bytes)
        self.shown_bytes = self.scratch_limit_bytes // self.world_size // ALIGNMENT_BYTES * ALIGNMENT_BYTES

    def run(self, steps: Sequence[Step], depth: int = 1) -> None:
        raise NotImplementedError

    def show(self, part: torch.Tensor) -> Sequence[torch.Tensor]:
        check_shown(part, self.shown_bytes)
        p, r = self.world_size, self.rank
        parts = self._scratch.slots(p, part.numel(), part.dtype)
        parts[r].copy_(part)
        turns = [((r + s) % p, (r - s) % p) for s in range(1, p)]
        self.run([Step(part, target, parts[source], source, False) for target, source in turns], depth=p)
        return parts

    def add_shown(self, part: torch.Tensor, start: int, stop: int, divisor: int) -> None:
        add_up(self.show(part), part, start, stop, divisor)

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device=self.device)

    def scratch_bytes(self) -> int:
        return self._scratch.nbytes

    def release_scratch(self) -> None:
        self._scratch.release()

    def _slots(self, steps: Sequence[Step], depth: int) -> list[torch.Tensor]:
        added = [step.incoming for step in steps if step.add and step.incoming is not None]
        numel = max([part.numel() for part in added], default=0)
        return self._scratch.slots(min(depth, len(steps)), numel, added[0].dtype) if numel else []

    def _slot(self, step: Step) -> torch.Tensor | None:
        if not step.add or step.incoming is None or not (numel := step.incoming.numel()):
            return None
        return self._scratch.slots(1, numel, step.incoming.dtype)[0]


class StreamTransport(_GroupTransport):
    """Messages that move in the background, each on its own: gloo.

    The receive of a step is posted before its send: gloo moves a message when both sides have announced it, and
    a receive that already waits saves a round trip.
    """

    piece_bytes = 1 << 20
    scratch_limit_bytes = 2 * piece_bytes

    def __init__(self, group: dist.ProcessGroup, tag: int = TAG) -> None:
        device = torch.device("cpu")
        super().__init__(group, device)
        self._tag = tag
        # The backend's own methods take group ranks and skip the dispatcher and the checks of `dist.isend`.
        backend: Any = group._get_backend(device)  # torch types it as the base class, which has neither
        self._send, self._receive = backend.send, backend.recv

    def run(self, steps: Sequence[Step], depth: int = 1) -> None:
        if len(steps) == 1:  # short vectors: the same without a queue, which would cost 10 of 150 us
            self._start(steps[0], self._slot(steps[0])).finish()
            return
        slots = self._slots(steps, depth)
        depth = len(slots) or depth
        in_flight: deque[_Started] = deque()
        for number, step in enumerate(steps):
            if number >= depth:
                in_flight.popleft().finish()
            in_flight.append(self._start(step, slots[number % depth] if slots else None))
        for started in in_flight:
            started.finish()

    def _start(self, step: Step, slot: torch.Tensor | None) -> _Started:
        outgoing, target, _, source = step[:4]
        landing = _landing(step, slot)
        arrival = None if landing is None else self._receive([landing], source, self._tag)
        is_empty = outgoing is None or outgoing.numel() == 0
        departure = None if is_empty else self._send([outgoing], target, self._tag)
        return _Started(departure, arrival, step, landing)


class BatchTransport(_GroupTransport):
    """Messages launched together and moved by the GPU, in the order of its streams: NCCL.

    Steps that may be in flight together are one batch. Waiting makes the GPU's stream wait, not the CPU.
    """

    piece_bytes = 16 << 20  # a GPU adds faster than links deliver: pieces only bound the scratch memory here
    scratch_limit_bytes = 2 * piece_bytes

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, device)
        self._group = weakref.ref(group)
        # NCCL wants every rank of the group in its first batch; the first step of an algorithm may leave some out.
        token = torch.zeros(2, device=device)
        right, left = (self.rank + 1) % self.world_size, (self.rank - 1) % self.world_size
        if self.world_size > 1:
            self.run([Step(token[:1], right, token[1:], left, False)])

    def run(self, steps: Sequence[Step], depth: int = 1) -> None:
        # Ranks must cut their steps alike, so a rank's own lengths may not count.
        depth = min(depth, self.scratch_limit_bytes // self.piece_bytes)
        slots = self._slots(steps, depth)
        for start in range(0, len(steps), depth):
            self._run_batch(steps[start : start + depth], slots)

    def _run_batch(self, steps: Sequence[Step], slots: Sequence[torch.Tensor]) -> None:
        group = self._group()
        messages: list[dist.P2POp] = []
        received: list[tuple[Step, torch.Tensor]] = []
        for number, step in enumerate(steps):
            landing = _landing(step, slots[number] if slots else None)
            if landing is not None:
                messages.append(dist.P2POp(dist.irecv, landing, group=group, tag=TAG, group_peer=step.source))
                received.append((step, landing))
            if step.outgoing is not None and step.outgoing.numel():
                messages.append(dist.P2POp(dist.isend, step.outgoing, group=group, tag=TAG, group_peer=step.target))
        for work in dist.batch_isend_irecv(messages) if messages else []:
            work.wait()
        for step, landing in received:
            _settle(step, landing)


class _Started(NamedTuple):
    """A step whose messages are on their way."""

    departure: dist.Work | None
    arrival: dist.Work | None
    step: Step
    landing: torch.Tensor | None

    def finish(self) -> None:
        # Each wait() once: a second one would not return before gloo's time-out.
        if self.departure is not None:
            self.departure.wait()
        if self.arrival is not None:
            self.arrival.wait()
            _settle(self.step, self.landing)


def _landing(step: Step, slot: torch.Tensor | None) -> torch.Tensor | None:
    """Where the message of a step arrives: its own place, or a slot if it is to be added; None if there is none."""
    incoming = step.incoming
    if incoming is None or incoming.numel() == 0:
        return None
    if not step.add:
        return incoming
    assert slot is not None
    return slot if slot.numel() == incoming.numel() else slot[: incoming.numel()]


def _settle(step: Step, landing: torch.Tensor | None) -> None:
    """What is left to do when a message has come."""
    if landing is None:
        return
    result = taken_in(step, landing) if step.add else landing
    if step.divisor > 1:
        result.div_(step.divisor)
