"""Messages of any length between two ranks, through shared memory, with a note for each.

Each rank has in its mailbox, for each other rank, two semaphores and a ring of notes; and an outbox, which is memory
for messages.

    send      copy the part into a free slot of the own outbox, write a note (where, how many bytes) for the target,
              post its semaphore `filled`
    receive   wait for `filled`, read the note, copy or add from the sender's memory straight into place,
              post `taken`

A slot is free again when every rank it was sent to has posted `taken`. A long part that lies in shared memory already
(`SharedTransport.allocate`: the buckets of a data-parallel wrapper) is not copied: the note points to it, and the step
is complete when it has been taken. Either way an addition reads the other rank's memory directly.

Why no rank reads what is half written. All that passes between two ranks this way is ordered by two semaphores, of
which POSIX and the C library promise that what happened before a post is seen after the wait that took it
(`semaphores.py`):

* Note and message are written before `filled` is posted, and read after it has been taken.
* They are written again only after `taken` has been taken, which the reader posts when it has read them.

The counters of either side are its own and never shared. Nothing depends on the order in which a processor makes
stores visible, nor on how many bytes it stores at once.

Why nothing waits for ever. A rank blocks only for the step that is its oldest unfinished one: for that step's
message, or for the slot or note its own message needs, which older messages hold until their readers, at older steps
still, have taken them. So of all ranks the one whose oldest unfinished step is the oldest can always go on. Sends of
later steps, up to `depth`, are tried, never waited for.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Mapping, Sequence

import torch

from labkit.parallel.transport import signals
from labkit.parallel.transport.contract import Step, taken_in
from labkit.parallel.transport.errors import refuse_length, refuse_part
from labkit.parallel.transport.mapping import Allocation
from labkit.parallel.transport.semaphores import Semaphores
from labkit.parallel.transport.swaps import Wait

NOTES = 16  # from one rank to another, not yet taken
NOTE_WORDS = 8  # of 8 bytes, so that no two notes share a cache line: allocation, offset, bytes
SLOTS = 4
SLOT_BYTES = 512 << 10
# Sent by reference from this size on: below, a copy costs less than waiting until the message has been taken.
REFERENCE_BYTES = 32 << 10
KEPT_VIEWS = 4096
OUTBOXES = 0  # the allocation that comes with the mailboxes
NOTHING_STAGED: tuple[torch.Tensor | None, int, int, list[tuple[int, int]]] = (None, 0, 0, [])

Sent = tuple[int, int]
"""A message that may not have been taken yet: to which rank, and its number among those sent there, from 0."""


def note_bytes(world_size: int) -> int:
    """Bytes of a rank's notes."""
    return world_size * NOTES * NOTE_WORDS * 8


class Messages:
    """The notes and outboxes of all ranks, in mailboxes that all of them map."""

    def __init__(
        self,
        mailboxes: Sequence[mmap.mmap],
        offset: int,
        rank: int,
        semaphores: Sequence[Semaphores],
        wait: Wait,
        allocations: Mapping[int, Allocation],
    ) -> None:
        """`offset`: where in a mailbox the notes begin. `allocations`: what messages may lie in, now and later."""
        self.rank, self.world_size = rank, len(mailboxes)
        p = self.world_size
        self._semaphores = semaphores
        self._wait = wait
        self._allocations = allocations
        self._notes = [memoryview(mailbox)[offset : offset + note_bytes(p)].cast("q") for mailbox in mailboxes]
        self._sent, self._taken, self._received = [0] * p, [0] * p, [0] * p
        self._free_slots = deque(range(SLOTS))
        self._used_slots: deque[tuple[int, list[Sent]]] = deque()
        # The part copied last into a slot, at which step, where, and the messages that point there.
        self._staged: tuple[torch.Tensor | None, int, int, list[Sent]] = NOTHING_STAGED
        self._referenced: deque[tuple[int, Sent]] = deque()
        self._views: dict[tuple[int, int, int, int, torch.dtype], torch.Tensor] = {}

    def run(self, steps: Sequence[Step], depth: int) -> None:
        try:
            self._carry_out(steps, depth)
        finally:
            self._staged = NOTHING_STAGED  # it holds the caller's tensor

    def forget_views(self) -> None:
        """They would keep memory that is given back."""
        self._views.clear()

    def _carry_out(self, steps: Sequence[Step], depth: int) -> None:
        if len(steps) == 1:  # short vectors: the same without a window
            self._send(steps[0], 0, 1, wait=True)
            self._receive(steps[0])
            self._await_references()
            return
        sent = 0
        for number, step in enumerate(steps):
            while sent <= number:
                self._send(steps[sent], sent, depth, wait=True)
                sent += 1
            while sent < min(len(steps), number + depth) and self._send(steps[sent], sent, depth, wait=False):
                sent += 1
            # What this step writes may have been sent by one that should be complete by now.
            while self._referenced and self._referenced[0][0] <= number - depth:
                self._is_taken(*self._referenced.popleft()[1], wait=True)
            self._receive(step)
        self._await_references()

    def _await_references(self) -> None:
        """What was sent without a copy may be changed by the caller now: once it has been taken."""
        while self._referenced:
            self._is_taken(*self._referenced.popleft()[1], wait=True)

    # Sending. Of a short message this is most of the time: few calls, few objects.

    def _send(self, step: Step, number: int, depth: int, *, wait: bool) -> bool:
        """Send the part of a step, if there is one; False if that would mean to wait, and `wait` is False."""
        part, target = step.outgoing, step.target
        if part is None or not (n_bytes := part.nbytes):
            return True
        oldest = self._sent[target] - NOTES  # whose note this one overwrites
        if self._taken[target] <= oldest and not self._is_taken(target, oldest, wait=wait):
            return False
        if n_bytes >= REFERENCE_BYTES and len(self._allocations) > 1 and (place := self._place(step)):
            self._referenced.append((number, self._post(target, *place, n_bytes)))
            return True
        staged, at_step, offset, messages = self._staged
        if part is not staged or number - at_step >= depth:
            if n_bytes > SLOT_BYTES:
                refuse_part(n_bytes, SLOT_BYTES)
            slot = self._free_slot(wait=wait)
            if slot is None:
                return False
            offset, messages = slot * SLOT_BYTES, []
            self._view(self.rank, OUTBOXES, offset, n_bytes, part.dtype).copy_(part)
            self._staged = (part, number, offset, messages)
            self._used_slots.append((slot, messages))
        # One copy serves all targets; the steps between cannot have changed the part.
        messages.append(self._post(target, OUTBOXES, offset, n_bytes))
        return True

    def _post(self, target: int, allocation: int, offset: int, n_bytes: int) -> Sent:
        """Tell a rank of a message, which is where it says."""
        notes, count = self._notes[self.rank], self._sent[target]
        at = (target * NOTES + count % NOTES) * NOTE_WORDS
        notes[at], notes[at + 1], notes[at + 2] = allocation, offset, n_bytes
        self._semaphores[self.rank].post(signals.filled(target))
        self._sent[target] = count + 1
        return target, count

    def _place(self, step: Step) -> tuple[int, int] | None:
        """Allocation and offset of the outgoing part, if it lies in shared memory and this step does not change it."""
        assert step.outgoing is not None
        pointer, incoming = step.outgoing.data_ptr(), step.incoming
        if incoming is not None and 0 < pointer + step.outgoing.nbytes - incoming.data_ptr() < (
            step.outgoing.nbytes + incoming.nbytes
        ):
            return None
        for number, allocation in self._allocations.items():
            if 0 <= (offset := pointer - allocation.pointer) < allocation.n_bytes:
                return number, offset
        return None

    def _free_slot(self, *, wait: bool) -> int | None:
        """A slot of the outbox that nobody reads any more."""
        if not self._free_slots:
            slot, messages = self._used_slots[0]
            for target, number in messages:
                if not self._is_taken(target, number, wait=wait):
                    return None
            self._used_slots.popleft()
            return slot
        return self._free_slots.popleft()

    def _is_taken(self, target: int, number: int, *, wait: bool) -> bool:
        """Whether the message of that number to that rank has been taken; if `wait`, once it has."""
        while self._taken[target] <= number:
            if wait:
                self._wait(self.rank, signals.taken(self.world_size, target), target)
            elif not self._semaphores[self.rank].take(signals.taken(self.world_size, target)):
                return False
            self._taken[target] += 1
        return True

    # Receiving

    def _receive(self, step: Step) -> None:
        incoming, source = step.incoming, step.source
        if incoming is None or not (n_bytes := incoming.nbytes):
            return
        self._wait(source, signals.filled(self.rank), source)
        notes = self._notes[source]
        at = (self.rank * NOTES + self._received[source] % NOTES) * NOTE_WORDS
        if notes[at + 2] != n_bytes:
            refuse_length(source, notes[at + 2], self.rank, n_bytes)
        message = self._view(source, notes[at], notes[at + 1], n_bytes, incoming.dtype)
        result = taken_in(step, message)
        self._semaphores[source].post(signals.taken(self.world_size, self.rank))
        self._received[source] += 1
        if step.divisor > 1:
            result.div_(step.divisor)

    def _view(self, rank: int, allocation: int, offset: int, n_bytes: int, dtype: torch.dtype) -> torch.Tensor:
        """A rank's memory as a vector; kept, since making it takes as long as a short message."""
        key = (rank, allocation, offset, n_bytes, dtype)
        view = self._views.get(key)
        if view is None:
            if len(self._views) >= KEPT_VIEWS:
                self._views.clear()
            # Made in inference mode, it could not be written to outside it.
            with torch.inference_mode(False):
                view = self._allocations[allocation].of_rank[rank][offset : offset + n_bytes].view(dtype)
            self._views[key] = view
        return view
