"""The two phases of an all-reduce on their own, over each transport, and gloo's own, in turns.

Gated as an all-reduce: torch's own other phase makes one of each. What they send is counted once before: labkit's where
messages are handed to the transport, torch's at its sockets, with gloo's headers.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from labkit.parallel.collectives import all_gather, reduce_scatter
from labkit.parallel.traffic import recorded_traffic, tcp_bytes_sent
from labkit.parallel.transport import POINT_TO_POINT, SHARED, transport_in_use
from labkit.studies.all_reduce.exact import gate
from labkit.studies.all_reduce.transports import CHOSEN, MESSAGES, SHARED_MEMORY, TORCH
from labkit.studies.shared.alternatives import row_of, timed_rows

REDUCE_SCATTER, ALL_GATHER = "reduce-scatter", "all-gather"
PHASES = (REDUCE_SCATTER, ALL_GATHER)
Run = Callable[[torch.Tensor, str], Any]
# Newer versions of torch warn of the older names.
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def measure_phases(base: torch.Tensor, own: torch.Tensor, *, seed: str, **options: Any) -> Iterator[dict[str, Any]]:
    """One row per phase and transport; without a time if it is wrong, or if the ranks cannot share memory.

    `options`: how many rounds; `seed`: of their order.
    """
    ranks, device = dist.get_world_size(), str(own.device)
    numel = own.numel() // ranks * ranks  # torch's knows even shards only
    base, own, tensor = base[:numel], own[:numel], torch.empty_like(own[:numel])
    about = {"n_bytes": own.nbytes, "formula_bytes": own.nbytes * (1 - 1 / ranks)}
    options |= {"device": device, "prepare": lambda _: tensor.copy_(own), "before": dist.barrier}
    for phase in PHASES:
        rows, calls = dict[str, dict[str, Any]](), dict[str, Callable[[], Any]]()
        for route in (TORCH, MESSAGES, SHARED_MEMORY):
            name, run = f"{phase} over {route}", phase_by(phase, route)
            row = {"algorithm": TORCH if route == TORCH else CHOSEN, "transport": route, "collective": phase} | about
            if route == SHARED_MEMORY and transport_in_use()[0] != SHARED:
                yield row | {"not_measured": transport_in_use()[1]}
                continue
            found = row_of(name, partial(_check, phase, run, tensor, own, base), device=device)
            rows[name], calls[name] = row | found, partial(run, tensor, "sum")
        yield from timed_rows(rows, calls, seed=seed + phase, **options)


def _check(
    phase: str, run: Run, tensor: torch.Tensor, own: torch.Tensor, base: torch.Tensor
) -> dict[str, float | str | None]:
    sent_bytes = _sent_bytes(partial(run, tensor.copy_(own), "sum"))
    whole = partial(_all_reduce, phase, run)
    whole(tensor.copy_(own), op="mean")
    error, verdict = gate(whole, tensor, base)
    return {"sent_bytes": sent_bytes, "error": error, "check": verdict}


def phase_by(phase: str, route: str) -> Run:
    """`run(tensor, op)`: the phase in place, by torch or by labkit over that transport."""
    if route == TORCH:
        return torchs_reduce_scatter if phase == REDUCE_SCATTER else torchs_all_gather
    transport = POINT_TO_POINT if route == MESSAGES else SHARED
    if phase == REDUCE_SCATTER:
        return lambda tensor, op: reduce_scatter(tensor, op=op, transport=transport)
    return lambda tensor, _: all_gather(tensor, transport=transport)


def torchs_reduce_scatter(tensor: torch.Tensor, op: str = "sum") -> None:
    """In and out of one tensor, as labkit's."""
    shard = _own_shard(tensor)
    _reduce_scatter(shard, tensor)
    if op == "mean":
        shard.div_(dist.get_world_size())


def torchs_all_gather(tensor: torch.Tensor, _: str = "") -> None:
    """The same."""
    _all_gather(tensor, _own_shard(tensor))


def _own_shard(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def _all_reduce(phase: str, run: Run, tensor: torch.Tensor, op: str) -> None:
    """Of which `run` is one phase, and torch's own the other."""
    (run if phase == REDUCE_SCATTER else torchs_reduce_scatter)(tensor, op)
    (run if phase == ALL_GATHER else torchs_all_gather)(tensor, op)


def _sent_bytes(call: Callable[[], Any]) -> float | None:
    """By one call, mean over ranks; None where what sockets sent cannot be read."""
    dist.barrier()
    before = tcp_bytes_sent()
    with recorded_traffic() as traffic:
        call()
    after = tcp_bytes_sent()
    if traffic:
        own = float(sum(each.sent_bytes for each in traffic))
    else:
        own = float("nan") if before is None or after is None else float(after - before)
    sent = torch.tensor(own, dtype=torch.float64)
    dist.all_reduce(sent)
    return None if sent.isnan() else float(sent) / dist.get_world_size()
