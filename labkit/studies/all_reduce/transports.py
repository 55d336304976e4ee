"""The same all-reduce over each transport, gloo's own, and the floor under all of them, in turns.

    torch                     dist.all_reduce
    chosen over messages      labkit's, point to point by torch.distributed
    chosen over shared        labkit's, through shared memory; the tensor is copied there
    chosen over registered    the same, on a tensor that lies in shared memory already
    copy                      the floor: every rank copies as many bytes as an all-reduce brings to it

(`chosen`, or one of the four algorithms by name.) The floor: of its own chunk of n/p bytes a rank must take in what
p-1 others have, and of the other p-1 chunks the result. That is 2n(p-1)/p bytes read elsewhere and written at home, as
a copy does. All ranks copy at the same time, since they share the memory.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from labkit.bench.clock import time_interleaved
from labkit.parallel.collectives import ALGORITHMS, all_reduce
from labkit.parallel.transport import POINT_TO_POINT, SHARED, empty_for_all_reduce, transport_in_use
from labkit.studies.all_reduce.exact import gate

TORCH = "torch"
CHOSEN = "chosen"
COPY = "copy"
MESSAGES, SHARED_MEMORY, REGISTERED = "messages", "shared", "registered"
ROUTES = (MESSAGES, SHARED_MEMORY, REGISTERED)
OVER = " over "


def alternative(algorithm: str, route: str) -> str:
    """The name of an algorithm over a transport, "ring over shared"."""
    return f"{algorithm}{OVER}{route}"


def measure_transports(
    names: Sequence[str], base: torch.Tensor, own: torch.Tensor, *, warmup: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """One row an alternative; without a time if it is wrong, or if the ranks cannot share memory."""
    _, why_not = transport_in_use()
    tensors = {name: torch.empty_like(own) for name in (COPY, MESSAGES)}
    tensors[REGISTERED] = empty_for_all_reduce(own.numel(), own.dtype)
    rows: dict[str, dict[str, Any]] = {}
    calls: dict[str, Callable[[], None]] = {}
    for name in names:
        algorithm, _, route = name.partition(OVER)
        row = {"algorithm": algorithm, "transport": route or algorithm, "n_bytes": own.nbytes}
        if route in (SHARED_MEMORY, REGISTERED) and transport_in_use()[0] != SHARED:
            yield row | {"not_measured": why_not}
            continue
        if name == COPY:
            rows[name], calls[name] = row, partial(_copy, tensors[COPY], base, tensors[MESSAGES], own)
            continue
        tensor = tensors[REGISTERED if route == REGISTERED else MESSAGES]
        reduce = _collective(algorithm, route)
        reduce(tensor.copy_(own), op="mean")
        error, verdict = gate(tensor, base)
        row |= {"error": error, "gate": verdict}
        if verdict == "ok":
            rows[name], calls[name] = row, partial(reduce, tensor, op="sum")
        else:
            yield row

    def prepare() -> None:
        for tensor in tensors.values():
            tensor.copy_(own)
        dist.barrier()

    for name, seconds in time_interleaved(calls, warmup=warmup, repeats=repeats, before=prepare).items():
        yield rows[name] | {"seconds": seconds}


def _collective(algorithm: str, route: str) -> Callable[..., None]:
    if algorithm == TORCH:
        return torch_all_reduce
    function = all_reduce if algorithm == CHOSEN else ALGORITHMS[algorithm]
    return partial(function, transport=POINT_TO_POINT if route == MESSAGES else SHARED)


def torch_all_reduce(tensor: torch.Tensor, *, op: str) -> None:
    """`dist.all_reduce`, and the division for a mean: gloo has none in every version of torch."""
    dist.all_reduce(tensor)
    if op == "mean":
        tensor.div_(dist.get_world_size())


def _copy(first: torch.Tensor, of_first: torch.Tensor, second: torch.Tensor, of_second: torch.Tensor) -> None:
    """The bytes of the two phases, n(p-1)/p each, between tensors that have nothing in common."""
    p = dist.get_world_size()
    moved = first.numel() * (p - 1) // p
    first[:moved].copy_(of_first[:moved])
    second[:moved].copy_(of_second[:moved])
