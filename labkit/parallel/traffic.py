"""Record the collectives of this rank: bytes sent and times of each call within a block.

    with recorded_traffic() as traffic:
        loss.backward()
    sum(each.sent_bytes for each in traffic if each.collective == "all_gather")

All groups, transports and threads of the process count. Bytes are those that an algorithm hands to its transport; what
a transport adds to a message, and collectives of `torch.distributed`, are not counted.
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
"""Offset in Linux's `struct tcp_info` of the bytes sent, followed by the bytes retransmitted."""
SENT_AND_RETRANSMITTED = struct.Struct("QQ")


@dataclass
class Collective:
    """One call on this rank. Times are those of `time.perf_counter`; on a GPU they end with the launch."""

    collective: str
    """"all_reduce", "reduce_scatter", "all_gather" or "exchange"."""
    algorithm: str
    dtype: str
    n_bytes: int
    """Bytes of the tensor."""
    sent_bytes: int = 0
    """Bytes sent to all other ranks."""
    start_s: float = field(default_factory=time.perf_counter)
    end_s: float = 0.0
    needed_s: float | None = None
    """When the caller began to wait for a collective in the background."""

    @property
    def waited_s(self) -> float:
        """Seconds that the caller waited: all of its time for a collective in the foreground."""
        since = self.start_s if self.needed_s is None else max(self.needed_s, self.start_s)
        return max(0.0, self.end_s - since)


_records: list[list[Collective]] = []  # of the blocks that are open
_thread = threading.local()


@contextmanager
def recorded_traffic() -> Iterator[list[Collective]]:
    """Yield a list to which the collectives that begin inside are added, in that order."""
    record: list[Collective] = []
    _records.append(record)
    try:
        yield record
    finally:
        _records.remove(record)


def count_traffic(transport: Transport, collective: str, algorithm: str, tensors: Sequence[Tensor]) -> Transport:
    """Return the transport for one collective of tensors of one dtype: it counts, inside of `recorded_traffic`."""
    if not _records:
        return transport
    dtype, n_bytes = str(tensors[0].dtype).removeprefix("torch."), sum(tensor.nbytes for tensor in tensors)
    call = Collective(collective, algorithm, dtype, n_bytes)
    for record in (*_records, *getattr(_thread, "records", ())):
        record.append(call)
    return _Counting(transport, call)


@contextmanager
def calls_in_this_thread() -> Iterator[list[Collective]]:
    """Yield the same for one thread; it stays empty outside of `recorded_traffic`."""
    _thread.records = [[]]
    try:
        yield _thread.records[0]
    finally:
        del _thread.records


def tcp_bytes_sent() -> int | None:
    """Return the bytes that this process's open TCP connections have sent so far; None if the system does not say.

    Bytes that TCP sent a second time do not count: it takes late answers on a busy machine for losses. Source: Linux's
    `tcp_info.tcpi_bytes_sent` and `tcpi_bytes_retrans`, since 4.19.
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
                needed = TCPI_BYTES_SENT + SENT_AND_RETRANSMITTED.size
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, needed)
                if len(info) < needed:
                    return None
                sent, retransmitted = SENT_AND_RETRANSMITTED.unpack_from(info, TCPI_BYTES_SENT)
                total += sent - retransmitted
    return total


def _socket_at(descriptor: int) -> socket.socket:
    """Duplicate the descriptor as a socket; raise OSError if it is none, or closed."""
    duplicate = os.dup(descriptor)
    try:
        return socket.socket(fileno=duplicate)
    except OSError:
        os.close(duplicate)
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
