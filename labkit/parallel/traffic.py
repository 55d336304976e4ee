"""Record what collectives send: the bytes of each call within a block.

    with recorded_traffic() as traffic:
        loss.backward()
    sum(each.sent_bytes for each in traffic if each.collective == "all_gather")

All groups, transports and threads of the process count. Bytes are those that an algorithm hands to
its transport; what a transport adds to a message, and collectives of `torch.distributed`, are not
counted.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from labkit.parallel.transport.base import Step, Transport


@dataclass
class Collective:
    """One call on this rank."""

    collective: str  # "all_reduce", "reduce_scatter", "all_gather" or "exchange"
    algorithm: str
    dtype: str
    n_bytes: int  # of the tensor
    sent_bytes: int = 0  # to all other ranks

    @property
    def is_payload(self) -> bool:
        """Return whether it carries numbers of a model: integers are notes by which ranks agree."""
        return "int" not in self.dtype


_records: list[list[Collective]] = []  # of the open blocks


@contextmanager
def recorded_traffic() -> Iterator[list[Collective]]:
    """Yield a list to which the collectives that begin inside are added, in that order."""
    record: list[Collective] = []
    _records.append(record)
    try:
        yield record
    finally:
        # `remove` would take the first of several records that are equal, such as empty ones.
        _records[:] = [each for each in _records if each is not record]


def count_traffic(
    transport: Transport, collective: str, algorithm: str, tensors: Sequence[Tensor]
) -> Any:
    """Return the transport for one collective of tensors of one dtype; it counts bytes inside
    `recorded_traffic`."""
    if not _records:
        return transport
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    n_bytes = sum(tensor.nbytes for tensor in tensors)
    call = Collective(collective, algorithm, dtype, n_bytes)
    for record in _records:
        record.append(call)
    return _Counting(transport, call)


class _Counting:
    """A transport that counts the bytes it sends."""

    def __init__(self, transport: Transport, call: Collective) -> None:
        self._transport = transport
        self._call = call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def run(self, steps: list[Step], depth: int = 1) -> None:
        self._call.sent_bytes += sum(
            step.outgoing.nbytes for step in steps if step.outgoing is not None
        )
        self._transport.run(steps, depth)

    def start(self, step: Step) -> Callable[[], None]:
        self._call.sent_bytes += 0 if step.outgoing is None else step.outgoing.nbytes
        return self._transport.start(step)
