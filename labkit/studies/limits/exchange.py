"""Messages between ranks, and all-reduces made of them, over gloo, shared memory or NCCL."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from labkit.bench.checksums import first_wrong
from labkit.costs.calibration import ALL_REDUCE, BURST, DOUBLING, IN_A_ROW, MESSAGE, NCCL, ROW
from labkit.lab.point import TimedPoint
from labkit.parallel.collectives import all_reduce, recursive_doubling_all_reduce
from labkit.parallel.transport import SHARED, find_transport, transport_in_use
from labkit.parallel.transport.base import POINT_TO_POINT, Step, Transport
from labkit.studies.shared.alternatives import row_of, timed_rows

GLOO, SHARED_MEMORY = "gloo", "shared memory"


def exchange(point: TimedPoint, sizes: Sequence[int], device: str) -> Iterator[dict[str, Any]]:
    """Time all-reduces, one by recursive doubling to show the cost of a call; messages in a row, and at once."""
    by_torch = NCCL if point.backend == "nccl" else GLOO
    ways: dict[str, Callable[[torch.Tensor], Any]] = {by_torch: dist.all_reduce}
    all_reduce(torch.zeros(1, device=device), op="sum")  # the first one chooses the transport
    transports = {by_torch: POINT_TO_POINT}
    if transport_in_use(device=torch.device(device))[0] == SHARED:
        ways[SHARED_MEMORY] = partial(all_reduce, op="sum", transport=SHARED)
        transports[SHARED_MEMORY] = SHARED
    for n_bytes in sizes:
        tensor = torch.empty(max(1, n_bytes // 4), device=device)
        rows, calls = dict[str, dict[str, Any]](), dict[str, Callable[[], Any]]()
        for name, way in ways.items():
            check = row_of(name, partial(_check, way, tensor), device=device)
            every = {ALL_REDUCE: partial(way, tensor)}
            if check["check"] == "ok":
                via = find_transport(None, torch.device(device), transports[name])
                for what, (steps, depth) in _messages(via, tensor).items():
                    every[what] = partial(via.run, steps, depth)
                doubling = partial(recursive_doubling_all_reduce, op="sum", transport=transports[name])
                every[DOUBLING] = partial(doubling, tensor)
            for what, call in every.items():
                calls[f"{name}, {what}"] = call
                rows[f"{name}, {what}"] = {"way": name, "what": what, "n_bytes": n_bytes} | check
        timing = point.rounds | {"seed": f"{point.id} {n_bytes}", "prepare": lambda _, tensor=tensor: tensor.zero_()}
        yield from timed_rows(rows, calls, **timing)


def _messages(via: Transport, tensor: torch.Tensor) -> dict[str, tuple[list[Step], int]]:
    """Steps and their depth: a message to the next rank, several in a row, one to every rank; long ones in pieces."""
    ranks, rank = via.world_size, via.rank
    length = via.piece_bytes(ranks) // tensor.itemsize
    sent, received = tensor.split(length), torch.zeros_like(tensor).split(length)

    def steps(*distances: int) -> list[Step]:
        return [
            Step(outgoing, (rank + distance) % ranks, incoming, (rank - distance) % ranks, add=True)
            for outgoing, incoming in zip(sent, received, strict=True)
            for distance in distances
        ]

    depth = min(2, len(sent))
    return {
        MESSAGE: (steps(1), depth),
        ROW: (steps(1) * IN_A_ROW, depth),
        BURST: (steps(*range(1, ranks)), ranks),
    }


def _check(way: Callable[[torch.Tensor], Any], tensor: torch.Tensor) -> dict[str, str]:
    return {"check": first_wrong(way, tensor) or "ok"}
