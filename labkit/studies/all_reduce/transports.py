"""The same all-reduce over each transport, gloo's own, and the floor under all of them, in turns.

    torch                     dist.all_reduce
    chosen over messages      labkit's, point to point by torch.distributed
    chosen over shared        labkit's, through shared memory; the tensor is copied there
    floor                     the additions and copies alone, on memory of the rank's own

(`chosen`, or an algorithm by name.) The floor is what a rank has to do to n bytes if the p-1 others' are
simply there: add p-1 parts of n/p to its own, a piece at a time so that sums stay in the cache, and copy p-1 parts of
n/p. No messages, no waiting. All ranks do it at the same time, since they share the memory.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from labkit.parallel.collectives import ALGORITHMS, all_reduce
from labkit.parallel.transport import POINT_TO_POINT, SHARED, transport_in_use
from labkit.studies.all_reduce.exact import gate
from labkit.studies.shared.alternatives import row_of, timed_rows

TORCH = "torch"
CHOSEN = "chosen"
FLOOR = "floor"
MESSAGES, SHARED_MEMORY = "messages", "shared"
ROUTES = (MESSAGES, SHARED_MEMORY)
OVER = " over "
PIECE_BYTES = 512 << 10  # sums of that length stay in the cache


def alternative(algorithm: str, route: str) -> str:
    """The name of an algorithm over a transport, "ring over shared"."""
    return f"{algorithm}{OVER}{route}"


def measure_transports(
    names: Sequence[str], base: torch.Tensor, own: torch.Tensor, **options: Any
) -> Iterator[dict[str, Any]]:
    """One row an alternative; without a time if it is wrong, or if the ranks cannot share memory.

    `options`: how many rounds, and the seed of their order.
    """
    in_use, reason = transport_in_use()
    refused = {} if in_use == SHARED else {SHARED_MEMORY: reason}
    tensor = torch.empty_like(own)
    rows: dict[str, dict[str, Any]] = {}
    calls: dict[str, Callable[[], None]] = {}
    for name in names:
        algorithm, _, route = name.partition(OVER)
        row = {"algorithm": algorithm, "transport": route or algorithm, "n_bytes": own.nbytes}
        if why := refused.get(route):
            yield row | {"not_measured": why}
            continue
        if name == FLOOR:
            rows[name], calls[name] = row, partial(_floor, tensor, own, base)
            continue
        reduce = collective(algorithm, route)
        found = row_of(name, partial(_check, reduce, tensor.copy_(own), base), device=str(own.device))
        rows[name], calls[name] = row | found, partial(reduce, tensor, op="sum")

    options |= {"device": str(own.device), "prepare": lambda _: tensor.copy_(own), "before": dist.barrier}
    yield from timed_rows(rows, calls, **options)


def _check(reduce: Callable[..., None], tensor: torch.Tensor, base: torch.Tensor) -> dict[str, Any]:
    reduce(tensor, op="mean")
    error, verdict = gate(reduce, tensor, base)
    return {"error": error, "check": verdict}


def collective(algorithm: str, route: str) -> Callable[..., None]:
    """The all-reduce by that name, torch's or one of labkit's, over that transport."""
    if algorithm == TORCH:
        return _torch_all_reduce
    function = all_reduce if algorithm == CHOSEN else ALGORITHMS[algorithm]
    return partial(function, transport=POINT_TO_POINT if route == MESSAGES else SHARED)


def _torch_all_reduce(tensor: torch.Tensor, *, op: str) -> None:
    """`dist.all_reduce`, and the division for a mean: gloo has none in every version of torch."""
    dist.all_reduce(tensor)
    if op == "mean":
        tensor.div_(dist.get_world_size())


def _floor(tensor: torch.Tensor, others: torch.Tensor, result: torch.Tensor) -> None:
    """Add p-1 parts of `others` to the first of p parts, piece by piece; copy the others from `result`."""
    p = dist.get_world_size()
    size = tensor.numel() // p
    piece = PIECE_BYTES // tensor.itemsize
    for start in range(0, size, piece):
        end = min(start + piece, size)
        for part in range(1, p):
            tensor[start:end].add_(others[part * size + start : part * size + end])
    for part in range(1, p):
        tensor[part * size : (part + 1) * size].copy_(result[part * size : (part + 1) * size])
