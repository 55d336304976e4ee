"""What a rank runs to measure one point of the all-reduce lab. Imports torch and the instruments only."""

import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from labkit.bench.checksums import fill_message
from labkit.bench.memory import peak_memory_growth
from labkit.lab.point import SessionPoint
from labkit.lab.units import format_bytes
from labkit.parallel.collectives import ALGORITHMS, Algorithm, release_scratch, scratch_bytes
from labkit.parallel.ranks.worker import use_device
from labkit.studies.all_reduce.exact import gate, inputs
from labkit.studies.all_reduce.links import measure_links
from labkit.studies.all_reduce.phases import measure_phases
from labkit.studies.all_reduce.transports import CHOSEN, FLOOR, MESSAGES, TORCH, collective, measure_transports
from labkit.studies.shared.alternatives import row_of, timed_rows

RESERVED = frozenset((TORCH, CHOSEN, FLOOR, *ALGORITHMS))  # before a reader adds any


@dataclass(frozen=True, kw_only=True)
class AllReducePoint(SessionPoint):
    """Alternatives to time in turn on the same tensor, or (`sweep="exchange"`) the links between hosts.

    In `sweep="transports"` an alternative is an algorithm and where its messages travel, "ring over shared", or the
    floor: copying as many bytes as an all-reduce must move. In `sweep="phases"` they are reduce-scatter and all-gather.
    """

    sweep: str
    n_elements: int
    dtype: str = "float32"
    algorithms: tuple[str, ...] = ()
    most_bytes: int = 0

    @property
    def n_bytes(self) -> int:
        return self.n_elements * torch_dtype(self.dtype).itemsize

    def title(self) -> str:
        policy = f", scheduling {self.scheduling}" if self.sweep == "scheduling" else ""
        return f"{super().title()}, {self.backend}, {format_bytes(self.n_bytes)}{policy}"


def plug_in(name: str, alternative: Callable[..., Any]) -> dict[str, Algorithm]:
    """A reader's all-reduce: a function of a tensor that leaves the sum over all ranks in it.

    If it takes `op`, as labkit's do, it is called with op="sum" and op="mean"; the mean is otherwise the sum divided.
    """
    if name in RESERVED:
        raise ValueError(f"expected a name other than {', '.join(sorted(RESERVED))}")
    ALGORITHMS[name] = Algorithm(partial(_run_own, alternative))
    return ALGORITHMS


def _run_own(
    function: Callable[..., Any], tensor: torch.Tensor, group: None = None, op: str = "mean", *, transport: str = ""
) -> None:
    if "op" in inspect.signature(function).parameters:
        function(tensor, op=op)
        return
    function(tensor)
    if op == "mean":
        tensor.div_(dist.get_world_size())


def torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def measure_point(point: AllReducePoint) -> Iterator[dict[str, Any]]:
    """One row an alternative: seconds of each repeat on this rank, error, memory; "wrong" gets no time."""
    options = point.rounds
    if point.sweep == "exchange":
        message = torch.empty(point.n_elements, dtype=torch_dtype(point.dtype), device=_device(point))
        fill_message(message, dist.get_rank())
        links = measure_links(message, device=_device(point), **options)
        yield from (row | {"n_bytes": point.n_bytes} for row in links)
        return
    base, own = inputs(point.n_elements, torch_dtype(point.dtype), _device(point), point.seed)
    if point.sweep == "phases":
        yield from measure_phases(base, own, **options)
        return
    if point.sweep == "transports":
        yield from measure_transports(point.algorithms, base, own, **options)
        return
    rows: dict[str, dict[str, Any]] = {}
    tensor = torch.empty_like(own)
    for name in point.algorithms:
        release_scratch()
        dist.barrier()
        found = row_of(name, partial(_check, point, name, base, tensor.copy_(own)), device=_device(point))
        rows[name] = {"algorithm": name, "n_bytes": point.n_bytes} | found
    calls = {name: partial(collective(name, MESSAGES), tensor, op="sum") for name in rows}
    options |= {"device": _device(point), "prepare": lambda _: tensor.copy_(own), "before": dist.barrier}
    yield from timed_rows(rows, calls, **options)


def _device(point: AllReducePoint) -> str:
    return use_device("cuda" if point.backend == "nccl" else "cpu")


def _check(point: AllReducePoint, name: str, base: torch.Tensor, tensor: torch.Tensor) -> dict[str, Any]:
    """The gate: one averaging from a cold start, compared with the exact mean, its memory on the way; then a sum."""
    reduce = collective(name, MESSAGES)
    with peak_memory_growth(_device(point)) as memory:
        reduce(tensor, op="mean")
    scratch = scratch_bytes() if name != TORCH else None
    error, verdict = gate(reduce, tensor, base)
    return {"error": error, "extra_bytes": memory.growth_bytes, "scratch_bytes": scratch, "check": verdict}
