"""What this rank sends, by collective: labkit's collectives within a block, each with its bytes and its times.

    with recorded_traffic() as traffic:
        loss.backward()
    sum(each.sent_bytes for each in traffic if each.collective == "all_gather")

Of all groups, transports and threads of the process. Bytes are those that an algorithm hands to its transport for other
ranks; what a transport adds to a message, and collectives of `torch.distributed`, are not seen.
"""

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from labkit.parallel.transport.base import Step, Transport

OPEN_FILES = Path("/proc/self/fd")
TCPI_BYTES_SENT = 200
"""Where that is in Linux's `struct tcp_info`; behind it is how many of them were sent again."""
SENT_AND_AGAIN = struct.Struct("QQ")


@dataclass
class Collective:
    """One call on this rank. Times are of `time.perf_counter`; on a GPU those of launching it."""

    collective: str
    """"all_reduce", "reduce_scatter" or "all_gather"."""
    algorithm: str
    dtype: str
    n_bytes: int
    """Of the tensor."""
    sent_bytes: int = 0
    """To all other ranks."""
    start_s: float = field(default_factory=time.perf_counter)
    end_s: float = 0.0
    needed_s: float | None = None
    """When somebody began to wait for it, of one in the background."""

    @property
    def waited_s(self) -> float:
        """How long its result was missing: all of its time, for one in the foreground."""
        since = self.start_s if self.needed_s is None else max(self.needed_s, self.start_s)
        return max(0.0, self.end_s - since)


_records: list[list[Collective]] = []  # open ones
_of_thread = threading.local()


@contextmanager
def recorded_traffic() -> Iterator[list[Collective]]:
    """A list that fills with the collectives that begin inside, in the order in which they do."""
    record: list[Collective] = []
    _records.append(record)
    try:
        yield record
    finally:
        _records.remove(record)


def watched(via: Transport, collective: str, algorithm: str, vector: Tensor) -> Transport:
    """The transport, for one collective: one that counts, if anybody records."""
    if not _records:
        return via
    call = Collective(collective, algorithm, str(vector.dtype).removeprefix("torch."), vector.nbytes)
    for record in (*_records, *getattr(_of_thread, "open", ())):
        record.append(call)
    return _Counting(via, call)


@contextmanager
def calls_in_this_thread() -> Iterator[list[Collective]]:
    """The same of one thread: nothing while nobody records."""
    _of_thread.open = [[]]
    try:
        yield _of_thread.open[0]
    finally:
        del _of_thread.open


def tcp_bytes_sent() -> int | None:
    """Bytes that this process's open TCP connections have sent so far; None where the system does not say.

    Without those that TCP sent a second time, as it does on a busy machine, where it takes a late answer for a loss.
    Linux says both by connection (`tcp_info.tcpi_bytes_sent` and `tcpi_bytes_retrans`, since 4.19). A difference of two
    counts is what was sent between them, if no connection was closed.
    """
    if not hasattr(socket, "TCP_INFO") or not OPEN_FILES.is_dir():
        return None
    total = 0
    for path in list(OPEN_FILES.iterdir()):
        try:
            connection = _socket_at(int(path.name))
        except OSError:  # no socket, or closed by another thread since it was listed
            continue
        with connection:
            if connection.type == socket.SOCK_STREAM and connection.family in (socket.AF_INET, socket.AF_INET6):
                needed = TCPI_BYTES_SENT + SENT_AND_AGAIN.size
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, needed)
                if len(info) < needed:
                    return None
                sent, again = SENT_AND_AGAIN.unpack_from(info, TCPI_BYTES_SENT)
                total += sent - again
    return total


def _socket_at(descriptor: int) -> socket.socket:
    """A descriptor of its own of the same socket; OSError if that is none, or closed."""
    own = os.dup(descriptor)
    try:
        return socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise


class _Counting(Transport):
    """A transport that notes what it sends."""

    def __init__(self, transport: Transport, call: Collective) -> None:
        super().__init__(transport.rank, transport.world_size, transport.device)
        self.name, self._transport, self._call = transport.name, transport, call

    def run(self, steps: Sequence[Step], depth: int = 1) -> None:
        self._call.sent_bytes += sum(step.outgoing.nbytes for step in steps if step.outgoing is not None)
        self._transport.run(steps, depth)
        self._call.end_s = time.perf_counter()

    def piece_bytes(self, depth: int) -> int:
        return self._transport.piece_bytes(depth)

    def scratch(self, count: int, numel: int, dtype: torch.dtype) -> list[Tensor]:
        return self._transport.scratch(count, numel, dtype)
