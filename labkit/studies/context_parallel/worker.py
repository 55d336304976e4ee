"""Worker of the lab on context parallelism: checks against float64, then times."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.bench.check import status_columns
from labkit.bench.memory import measure_second_peak
from labkit.costs.communication import context_parallel_calls, sent_bytes
from labkit.lab.point import DevicePoint
from labkit.nn.attention_implementations import IMPLEMENTATIONS
from labkit.nn.attention_problem import AttentionProblem, check
from labkit.parallel.context import gather_attention, join_sequence, ring_attention, split_sequence
from labkit.parallel.ranks.worker import use_device
from labkit.studies.shared.alternatives import (
    ALL_CORES,
    check_and_time,
    cores_of_all_ranks,
    count_traffic,
    row_of,
)

WHOLE = "one rank"
RING = "ring, zigzag"
RING_CONTIGUOUS = "ring, contiguous"
GATHERED = "gathered, zigzag"
# Tiled attention to the whole sequence, with the cores of all ranks or its own.
ON_ONE_RANK = (ALL_CORES, WHOLE)
# Attention across ranks, and the layout of their positions.
LAYOUTS = {RING: "zigzag", RING_CONTIGUOUS: "contiguous", GATHERED: "zigzag"}
WAYS = (*ON_ONE_RANK, *LAYOUTS)
# Of q on a rank: inputs, outputs and gradients of every way, and the exact ones in float64.
N_COPIES = 24


@dataclass(frozen=True, kw_only=True)
class ContextParallelPoint(DevicePoint):
    """Causal attention to q, k, v, each (heads, sequence, head dimension) over all ranks."""

    ways: tuple[str, ...]
    sequence: int
    heads: int
    head_dim: int
    dtype: str = "float32"

    @property
    def q_bytes(self) -> int:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return self.heads * self.sequence * self.head_dim * dtype.itemsize

    @property
    def needed_bytes(self) -> float:
        return N_COPIES * self.q_bytes


def _attend_whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    # Tiled, as each rank's block of a ring is.
    return IMPLEMENTATIONS["tiled"](q, k, v, True)


class Passes:
    """Forward and backward of one way on this rank's positions.

    With the whole sequence, on the first rank only.
    """

    def __init__(self, problem: AttentionProblem, way: str) -> None:
        self.layout = LAYOUTS.get(way)
        self.has_all_cores = way == ALL_CORES
        self.is_idle = way in ON_ONE_RANK and dist.get_rank() > 0
        self.is_ring = way in (RING, RING_CONTIGUOUS)
        tensors = [x.detach() for x in (*problem.inputs, problem.grad_output)]
        self.attend: Callable[..., Tensor] = _attend_whole
        if self.layout is not None:
            tensors = [split_sequence(x, 1, layout=self.layout) for x in tensors]
            attend = ring_attention if self.is_ring else gather_attention
            self.attend = partial(attend, layout=self.layout)
        # Cloned: a view would keep the whole sequence in this rank's peak.
        *inputs, self.gradient = (x.clone() for x in tensors)
        self.inputs = [x.requires_grad_() for x in inputs]

    def run(self) -> list[Tensor]:
        """Return output and gradients of q, k and v."""
        if self.is_idle:
            return []
        with cores_of_all_ranks() if self.has_all_cores else nullcontext():
            output = self.attend(*self.inputs)
            return [output.detach(), *torch.autograd.grad(output, self.inputs, self.gradient)]

    def joined(self) -> list[Tensor]:
        """Return the same of the whole sequence, on every rank. A collective."""
        results = self.run()
        if self.layout is not None:
            return [join_sequence(x, 1, layout=self.layout) for x in results]
        if self.is_idle:
            results = [torch.empty_like(x) for x in (*self.inputs, self.gradient)]
        for result in results:
            dist.broadcast(result, src=0)
        return results


def measure(point: ContextParallelPoint) -> Iterator[dict[str, Any]]:
    """Yield rows of one point, by strategy: seconds of both passes, bytes, and peak."""
    device = use_device(point.device)
    shape = (point.heads, point.sequence, point.head_dim)
    dtype = getattr(torch, point.dtype)
    problem = AttentionProblem(shape, dtype, device, causal=True, seed=point.seed)
    right = []

    def examine(way: str) -> tuple[dict[str, Any], Callable[[], Any]]:
        passes = Passes(problem, way)
        error, wrong = check(problem, passes.joined())
        columns = {"error": error, **status_columns(wrong)}
        if passes.layout is not None:
            columns |= _count_traffic(point, passes)
        return columns, passes.run

    rows = {way: {"way": way} for way in point.ways}
    for row in check_and_time(rows, examine, device=device, before=dist.barrier, **point.rounds):
        if "seconds" in row:
            right.append(row["way"])
        yield row
    for way in right:
        dist.barrier()
        make = partial(Passes, problem, way)
        peak = partial(measure_second_peak, make, Passes.run, device=device)
        yield {"way": way} | row_of(way, peak, device=device)


def _count_traffic(point: ContextParallelPoint, passes: Passes) -> dict[str, Any]:
    """Count collectives and bytes of both passes, with the formula."""
    p = dist.get_world_size()
    row, _ = count_traffic(passes.run)
    block_bytes = 2 * point.q_bytes / p  # of keys and values
    # Their gradients are added up in float32 as they go around, whatever the inputs are.
    widening = 4 / getattr(torch, point.dtype).itemsize
    formula = context_parallel_calls(block_bytes, widening * block_bytes, p, is_ring=passes.is_ring)
    return row | {"formula_sent_bytes": sent_bytes(formula, p)}
