"""Record what collectives send: the bytes of each call within a block.

    with recorded_traffic() as traffic:
        loss.backward()
    sum(each.sent_bytes for each in traffic if each.collective == "all_gather")

All groups, transports and threads of the process count. Bytes are those that an algorithm hands to
its transport; what a transport adds to a message, and a program's own collectives of
`torch.distributed`, are not counted.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from labkit.parallel.failures import explain_failure
from labkit.parallel.transport.base import Rounds, Transfer, Transport


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


_records: list[Any] = []  # of the open blocks


@contextmanager
def recorded_traffic(listener: Any = None) -> Iterator[Any]:
    """Yield a list to which the collectives that begin inside are added, in that order; or append
    them to a `listener` instead."""
    record: Any = listener
    if listener is None:
        record = []
    _records.append(record)
    try:
        yield record
    finally:
        # `remove` would take the first of several records that are equal, such as empty ones.
        _records[:] = [each for each in _records if each is not record]


def record_collective(
    collective: str, algorithm: str, tensors: Sequence[Tensor], sent_bytes: float = 0
) -> Collective | None:
    """Record a call with `tensors` of one dtype in the open blocks; None if there are none."""
    if not _records:
        return None
    dtype = str(tensors[0].dtype).removeprefix("torch.")
    n_bytes = sum(tensor.nbytes for tensor in tensors)
    call = Collective(collective, algorithm, dtype, n_bytes, int(sent_bytes))
    for record in _records:
        record.append(call)
    return call


class Call:
    """One call of a collective on this rank, as its algorithm sees it.

    `rank` and `world_size` are those of the group, `scratch` is the transport's.
    """

    def __init__(
        self,
        transport: Transport,
        collective: str,
        algorithm: str,
        tensors: Sequence[Tensor],
        checksum: int,
    ) -> None:
        """`tensors` of one dtype. `checksum`: of all that must be the same on all ranks."""
        self.rank = transport.rank
        self.world_size = transport.world_size
        self.scratch = transport.scratch
        self._transport = transport
        self._checksum = checksum
        self._record = record_collective(collective, algorithm, tensors)

    def run(self, rounds: Rounds) -> None:
        """Carry out rounds of transfers, as `Transport.run`, and count their bytes."""
        for transfers in rounds:
            self._count(transfers)
        try:
            self._transport.run(rounds, self._checksum)
        except RuntimeError as error:
            explain_failure(error, self._transport.store)
            raise

    def start(self, transfer: Transfer) -> Callable[[], None]:
        """Start a transfer, as `Transport.start`, and count its bytes."""
        self._count([transfer])
        finish = self._transport.start(transfer)
        return partial(self._finish, finish)

    def _finish(self, finish: Callable[[], None]) -> None:
        try:
            finish()
        except RuntimeError as error:
            explain_failure(error, self._transport.store)
            raise

    def _count(self, transfers: Sequence[Transfer]) -> None:
        if self._record is not None:
            sent = [each.outgoing for each in transfers if each.outgoing is not None]
            self._record.sent_bytes += sum(outgoing.nbytes for outgoing in sent)
