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
from labkit.parallel.transport.base import POINT_TO_POINT, Transfer
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
    for name, (reduce, transport) in _find_all_reduces(backend, device).items():
        check = row_of(name, partial(_check, reduce, tensor), device=device)
        by_kind: dict[str, Call] = {ALL_REDUCE: partial(reduce, tensor)}
        # Single messages have no check of their own: they go the way of a right all-reduce.
        if check["status"] == "ok":
            by_kind |= _message_calls(tensor, transport)
        for what, call in by_kind.items():
            calls[f"{name}, {what}"] = call
            rows[f"{name}, {what}"] = {"way": name, "what": what, "n_bytes": n_bytes} | check
    # Sums of sums would overflow after some hundred calls.
    yield from timed_rows(rows, calls, prepare=lambda _: tensor.zero_(), **timing)


def _find_all_reduces(backend: str, device: str) -> dict[str, tuple[Callable[[Tensor], Any], str]]:
    """Return an all-reduce and the transport of its messages, by the name of the connection."""
    name = NCCL if backend == "nccl" else GLOO
    reductions: dict[str, tuple[Callable[[Tensor], Any], str]]
    reductions = {name: (dist.all_reduce, POINT_TO_POINT)}
    all_reduce(torch.zeros(1, device=device), op="sum")  # the first one chooses the transport
    if transport_in_use(device=torch.device(device))[0] == SHARED:
        shared = partial(all_reduce, op="sum", transport=SHARED)
        reductions[SHARED_MEMORY] = (shared, SHARED)
    return reductions


def _message_calls(tensor: Tensor, transport_name: str) -> dict[str, Call]:
    """Return calls of one message, of several in sequence, of one to each rank, and an all-reduce.

    From one message and several follows what the call costs by itself.
    """
    transport = find_transport(None, tensor.device, transport_name)
    ranks = transport.world_size
    rank = transport.rank
    received = torch.zeros_like(tensor)
    # Added to what is there, as the messages of an all-reduce are.
    to_each = [
        Transfer(tensor, (rank + s) % ranks, received, (rank - s) % ranks, add=True)
        for s in range(1, ranks)
    ]
    to_neighbor = to_each[:1]
    return {
        MESSAGE: partial(transport.run, [to_neighbor]),
        ROW: partial(transport.run, [to_neighbor] * IN_A_ROW),
        BURST: partial(transport.run, [to_each]),
        DOUBLING: partial(
            recursive_doubling_all_reduce, tensor, op="sum", transport=transport_name
        ),
    }


def _check(reduce: Callable[[Tensor], Any], tensor: Tensor) -> dict[str, str]:
    return status_columns(first_wrong(reduce, tensor))
