"""The steps of a reader's own all-reduce, recorded on ranks from its sends and receives."""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.lab.pages.schedule import Message, MessageSchedule
from labkit.parallel.launch import run_ranks

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
# A send, a receive or a wait of one rank, in the order of its program.
Event = dict[str, Any]


def record_user_schedule(all_reduce: Callable[[Tensor], Any], world_size: int) -> MessageSchedule:
    """Run `all_reduce(tensor)` on ranks, and return its messages as `record_schedule` does.

    Messages are those of torch's `send`, `recv`, `isend`, `irecv` and `batch_isend_irecv`. The
    program of a rank says which of them can be under way at once.

    Raises:
        RankError: if the function raises on a rank, calls one of torch's collectives, whose
            messages cannot be seen, or waits for a message that never comes.
    """
    elements = math.lcm(world_size, 1 << (world_size.bit_length() - 1))
    # On processes, since it calls torch's own functions, whose groups are per process.
    logs = run_ranks(_record_rank, all_reduce, elements, world_size=world_size)
    replay = _Replay(logs, elements)
    held = [replay.shares_after(number) for number in range(replay.run() + 1)]
    return MessageSchedule(elements, sorted(replay.messages), held)


def _record_rank(all_reduce: Callable[[Tensor], Any], elements: int) -> list[Event]:
    """Run on every rank; return its events."""
    # A power of two per rank, so that every element shows whose shares it holds.
    recorder = _Recorder(torch.full((elements,), 2.0 ** dist.get_rank(), dtype=torch.float64))
    with recorder.recording():
        all_reduce(recorder.vector)
    recorder.add("end")
    return recorder.events


class _Recorder:
    """Stands in for torch's point-to-point functions and writes down each call."""

    def __init__(self, vector: Tensor) -> None:
        self.vector = vector
        self.events: list[Event] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Replace the functions in this process, which is a rank and ends after the call."""
        replaced: dict[str, Any] = {name: partial(self._refuse, name) for name in COLLECTIVES}
        replaced["isend"] = partial(self._post, "send", dist.isend)
        replaced["irecv"] = partial(self._post, "receive", dist.irecv)
        replaced["send"] = lambda *args, **options: replaced["isend"](*args, **options).wait()
        replaced["recv"] = lambda *args, **options: replaced["irecv"](*args, **options).wait()
        # P2POp looks for `isend` where torch defines it.
        modules = (dist, dist.distributed_c10d)
        patches = [patch.multiple(module, **replaced) for module in modules]
        with patches[0], patches[1]:
            yield

    def add(self, kind: str, **facts: Any) -> None:
        """Add an event, with the vector as it is now."""
        shares = [int(value) for value in self.vector]
        self.events.append({"kind": kind, "shares": shares, **facts})

    def _post(
        self, kind: str, post: Callable[..., Any], tensor: Tensor, *args: Any, **options: Any
    ) -> "_RecordedWork":
        # torch takes the other rank by its position, or under one of these names.
        names = {"send": ("dst", "group_dst"), "receive": ("src", "group_src")}[kind]
        arguments = (*args[:1], *(options.get(name) for name in names))
        peers = [one for one in arguments if one is not None]
        start = 0
        if self._is_in_vector(tensor):
            start = int(tensor.storage_offset())
        number = len(self.events)
        self.add(kind, peer=peers[0], number=number, start=start, stop=start + tensor.numel())
        work = post(tensor, *args, **options)
        return _RecordedWork(work, partial(self.add, "wait", number=number))

    def _is_in_vector(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() == self.vector.untyped_storage().data_ptr()

    @staticmethod
    def _refuse(name: str, *args: Any, **options: Any) -> None:
        raise ValueError(
            f"expected an all-reduce of sends and receives, which have steps; {name} is one call"
        )


class _RecordedWork:
    """A message under way: waiting for it is an event."""

    def __init__(self, work: Any, on_wait: Callable[[], None]) -> None:
        self._work = work
        self._on_wait = on_wait

    def wait(self, *args: Any) -> Any:
        result = self._work.wait(*args)
        self._on_wait()
        return result

    def is_completed(self) -> bool:
        return bool(self._work.is_completed())


class _Posted(NamedTuple):
    """A send or a receive, and the round in which its rank asked for it."""

    round: int
    event: Event


class _Replay:
    """Ranks go through their programs again. A message takes a round, once both ends ask for it."""

    def __init__(self, logs: list[list[Event]], elements: int) -> None:
        self.messages: list[Message] = []
        self._elements = elements
        self._pending = [deque(log) for log in logs]
        self._rounds = [0 for _ in logs]
        self._posted: list[dict[int, _Posted]] = [{} for _ in logs]
        # By (source, target), in the order of sending, which is that of receiving.
        self._under_way: dict[tuple[int, int], deque[_Posted]] = defaultdict(deque)
        self._history: list[dict[int, list[int]]] = [{} for _ in logs]

    def run(self) -> int:
        """Carry out all events; return the last round."""
        while any(self._pending):
            for rank, pending in enumerate(self._pending):
                # A rank stops at a message that is not sent yet: first come its sender's events.
                while pending and self._carry_out(rank, pending[0]):
                    self._history[rank][self._rounds[rank]] = pending.popleft()["shares"]
        return max(self._rounds)

    def shares_after(self, number: int) -> list[list[int]]:
        """Return by rank whose shares each element holds after a round."""
        shares = []
        for history in self._history:
            last = max(end for end in history if end <= number)
            shares.append(history[last])
        return shares

    def _carry_out(self, rank: int, event: Event) -> bool:
        """Carry out an event; return False for a wait for a message that is not sent yet."""
        if event["kind"] == "wait":
            return self._wait(rank, self._posted[rank][event["number"]])
        posted = _Posted(self._rounds[rank], event)
        if event["kind"] == "send":
            self._under_way[rank, event["peer"]].append(posted)
        if event["kind"] != "end":
            self._posted[rank][event["number"]] = posted
        return True

    def _wait(self, rank: int, posted: _Posted) -> bool:
        end = posted.round + 1
        if posted.event["kind"] == "receive":
            source = posted.event["peer"]
            if not self._under_way[source, rank]:
                return False
            sent = self._under_way[source, rank].popleft()
            end = max(posted.round, sent.round) + 1
            # One end may use a buffer: the other one knows the place in the vector.
            place = posted.event if posted.event["start"] else sent.event
            stop = min(place["stop"], self._elements)
            self.messages.append(Message(end, source, rank, place["start"], stop))
        self._rounds[rank] = max(self._rounds[rank], end)
        return True
