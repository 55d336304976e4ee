"""Messages between ranks: all-reduces, and the messages that they are made of."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.bench.check import status_columns
from labkit.bench.checksums import first_wrong
from labkit.costs.calibration import ALL_REDUCE, BURST, DOUBLING, IN_A_ROW, MESSAGE, NCCL, ROW
from labkit.parallel.collectives import all_reduce
from labkit.parallel.doubling import recursive_doubling_all_reduce
from labkit.parallel.transport import SHARED, find_transport, transport_in_use
from labkit.parallel.transport.base import POINT_TO_POINT, Rounds, Transfer, Transport
from labkit.studies.shared.alternatives import row_of, timed_rows

GLOO = "gloo"
SHARED_MEMORY = "shared memory"
Call = Callable[[], Any]


def exchange_rows(
    n_bytes: int, backend: str, device: str, timing: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield the times of an all-reduce and of messages of `n_bytes`, by transport.

    One all-reduce is by recursive doubling, which shows the cost of a call.
    """
    tensor = torch.empty(max(1, n_bytes // 4), device=device)
    rows: dict[str, dict[str, Any]] = {}
    calls: dict[str, Call] = {}
    for name, (reduce, transport) in _reductions(backend, device).items():
        check = row_of(name, partial(_check, reduce, tensor), device=device)
        every: dict[str, Call] = {ALL_REDUCE: partial(reduce, tensor)}
        if check["status"] == "ok":
            every |= _message_calls(tensor, transport)
        for what, call in every.items():
            calls[f"{name}, {what}"] = call
            rows[f"{name}, {what}"] = {"way": name, "what": what, "n_bytes": n_bytes} | check
    yield from timed_rows(rows, calls, prepare=lambda _: tensor.zero_(), **timing)


def _reductions(backend: str, device: str) -> dict[str, tuple[Callable[[Tensor], Any], str]]:
    """Return a sum over ranks by name, and the transport of its messages."""
    name = NCCL if backend == "nccl" else GLOO
    reductions: dict[str, tuple[Callable[[Tensor], Any], str]]
    reductions = {name: (dist.all_reduce, POINT_TO_POINT)}
    all_reduce(torch.zeros(1, device=device), op="sum")  # the first one chooses the transport
    if transport_in_use(device=torch.device(device))[0] == SHARED:
        shared = partial(all_reduce, op="sum", transport=SHARED)
        reductions[SHARED_MEMORY] = (shared, SHARED)
    return reductions


def _message_calls(tensor: Tensor, transport: str) -> dict[str, Call]:
    connection = find_transport(None, tensor.device, transport)
    messages = _messages(connection, tensor)
    calls: dict[str, Call] = {
        what: partial(connection.run, rounds) for what, rounds in messages.items()
    }
    calls[DOUBLING] = partial(recursive_doubling_all_reduce, tensor, op="sum", transport=transport)
    return calls


def _messages(transport: Transport, tensor: Tensor) -> dict[str, Rounds]:
    """Return the rounds of one message, of several in sequence, and of one to every rank."""
    ranks = transport.world_size
    rank = transport.rank
    received = torch.zeros_like(tensor)
    to_each = [
        Transfer(tensor, (rank + s) % ranks, received, (rank - s) % ranks, add=True)
        for s in range(1, ranks)
    ]
    return {MESSAGE: [to_each[:1]], ROW: [to_each[:1]] * IN_A_ROW, BURST: [to_each]}


def _check(reduce: Callable[[Tensor], Any], tensor: Tensor) -> dict[str, str]:
    return status_columns(first_wrong(reduce, tensor))
