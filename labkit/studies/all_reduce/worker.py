"""Worker of the all-reduce lab: check each alternative, then time those that pass.

The check has two parts. Every rank holds the same random vector times a power of two, so that each
knows the exact mean over ranks, in float64. Sums of whole numbers, which no float type rounds, show
that no rank's part and no element is missing (`bench.checksums`).
"""

import inspect
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from labkit.bench.check import describe_error, max_over_ranks, status_columns
from labkit.bench.checksums import first_wrong
from labkit.lab.point import SessionPoint
from labkit.parallel.collectives import ALGORITHMS, all_reduce
from labkit.parallel.ranks.worker import use_device
from labkit.parallel.transport import POINT_TO_POINT, SHARED
from labkit.studies.shared.alternatives import check_and_time, shared_memory_refusal

TORCH = "torch"
LABKIT = "auto"
FLOOR = "floor"
RESERVED = frozenset((TORCH, LABKIT, FLOOR, *ALGORITHMS))
OVER = " over "  # "auto over shared" is labkit's all_reduce through shared memory
N_COPIES = 5  # tensors per rank: base, input, two or three results, scratch
# The host's launch is most of the time of a short one over NCCL: a sample is the mean of several.
CALLS_ON_GPU = 10
SHORT_BYTES = 2**24
CHUNK = 2**16  # elements compared at a time: their float64 copies stay in cache
FLOOR_CHUNK_BYTES = 2**19  # added and copied at a time: they stay in cache

# Called as (tensor, op="sum" or "mean"); works in place.
Collective = Callable[..., None]


@dataclass(frozen=True, kw_only=True)
class AllReducePoint(SessionPoint):
    """Alternatives that take turns on the same tensor of `n_bytes`."""

    sweep: str
    """Compared alternatives: "sizes" (algorithms), "transports", or "scheduling"."""
    n_bytes: int
    dtype: str = "float32"
    algorithms: tuple[str, ...] = ()
    """Names, with the transport if that is not point to point: "auto over shared"."""

    @property
    def device(self) -> str:
        return "cuda" if self.backend == "nccl" else "cpu"

    @property
    def needed_bytes(self) -> float:
        return N_COPIES * self.n_bytes


def register(name: str, alternative: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """Add a user's all-reduce: a function of a tensor that leaves the sum over all ranks in it.

    A function that takes `op` is called with op="sum" and op="mean"; otherwise the mean is the sum
    divided.
    """
    if name in RESERVED:
        raise ValueError(f"expected a name other than {', '.join(sorted(RESERVED))}")
    ALGORITHMS[name] = partial(_run_user_function, alternative)
    return ALGORITHMS


def _run_user_function(
    function: Callable[..., Any], tensor: torch.Tensor, *, op: str, **_: Any
) -> None:
    """Call a user's all-reduce as labkit's are called; it chooses its transport by itself."""
    if "op" in inspect.signature(function).parameters:
        function(tensor, op=op)
        return
    function(tensor)
    if op == "mean":
        tensor.div_(dist.get_world_size())


def measure(point: AllReducePoint) -> Iterator[dict[str, Any]]:
    """Yield one row per alternative: its error, and the seconds of each repeat.

    Seconds are this rank's, and only if the result is right.
    """
    device = use_device(point.device)
    rows = dict[str, dict[str, Any]]()
    dtype = getattr(torch, point.dtype)
    generator = torch.Generator().manual_seed(point.seed)
    base = (
        torch.rand(point.n_bytes // dtype.itemsize, generator=generator)
        .sub_(0.5)
        .to(dtype)
        .to(device)
    )
    # Multiples by powers of two are exact in every dtype, and so is each rank's expected mean:
    # nothing has to be exchanged to know it.
    own = base * _multiple(dist.get_rank())
    tensor = torch.empty_like(own)
    for name in point.algorithms:
        algorithm, _, transport = name.partition(OVER)
        rows[name] = {"algorithm": algorithm}
        if point.sweep == "transports":
            rows[name]["transport"] = transport or algorithm
        if transport == SHARED:
            rows[name] |= shared_memory_refusal()

    def check(name: str) -> tuple[dict[str, Any], Callable[[], None]]:
        algorithm, _, transport = name.partition(OVER)
        if algorithm == FLOOR:
            return {}, partial(_add_and_copy, tensor, own, base)
        reduce: Collective = _torch_all_reduce
        if algorithm != TORCH:
            labkits: dict[str, Collective] = {LABKIT: all_reduce, **ALGORITHMS}
            reduce = partial(labkits[algorithm], transport=transport or POINT_TO_POINT)
        dist.barrier()
        return _check(reduce, tensor.copy_(own), base), partial(reduce, tensor, op="sum")

    n_calls = 1
    if point.device == "cuda" and point.n_bytes <= SHORT_BYTES:
        n_calls = CALLS_ON_GPU
    clock: dict[str, Any] = {
        "prepare": lambda _: tensor.copy_(own),  # sums of sums would overflow
        "before": dist.barrier,
        "calls": n_calls,
    }
    yield from check_and_time(rows, check, device=device, **clock, **point.rounds)


def _torch_all_reduce(tensor: torch.Tensor, *, op: str) -> None:
    dist.all_reduce(tensor)
    if op == "mean":  # gloo averages in new versions of torch only
        tensor.div_(dist.get_world_size())


def _add_and_copy(tensor: torch.Tensor, others: torch.Tensor, result: torch.Tensor) -> None:
    """Do the work of an all-reduce alone: add p-1 parts of n/p elements, and copy p-1.

    No messages, and no waiting: no all-reduce through memory can be faster.
    """
    p = dist.get_world_size()
    size = tensor.numel() // p
    chunk = FLOOR_CHUNK_BYTES // tensor.itemsize
    # By chunks, whose sum stays in cache until all parts are added.
    for start in range(0, size, chunk):
        end = min(start + chunk, size)
        for part in range(1, p):
            tensor[start:end].add_(others[part * size + start : part * size + end])
    for part in range(1, p):
        of_rank = slice(part * size, (part + 1) * size)
        tensor[of_rank].copy_(result[of_rank])


def _check(reduce: Collective, tensor: torch.Tensor, base: torch.Tensor) -> dict[str, Any]:
    """Compare a mean with the exact one, then sums of whole numbers.

    All ranks get the same verdict.
    """
    reduce(tensor, op="mean")
    error = max_over_ranks(_relative_error(tensor, base))
    # One rounding per addition and one for the division, each at most eps/2 of the largest partial
    # sum; doubled.
    limit = (dist.get_world_size() + 1) * torch.finfo(tensor.dtype).eps
    # Rounding hides a missing part of small numbers; whole numbers show it.
    wrong = first_wrong(partial(reduce, op="sum"), tensor) or describe_error(error, limit)
    return {"error": error, **status_columns(wrong)}


def _relative_error(result: torch.Tensor, base: torch.Tensor) -> float:
    """Return the largest deviation from the exact mean over the largest mean.

    NaN counts as infinite.
    """
    ranks = dist.get_world_size()
    factor = sum(_multiple(rank) for rank in range(ranks)) / ranks
    deviation = 0.0
    for actual, expected in zip(result.split(CHUNK), base.split(CHUNK), strict=True):
        difference = float((actual.double() - expected.double() * factor).abs_().max())
        if math.isnan(difference):
            return math.inf
        deviation = max(deviation, difference)
    # Of the largest mean, since rounding is relative to the numbers that were added.
    largest = factor * float(base.abs().max())
    return deviation / (largest or 1.0)


def _multiple(rank: int) -> float:
    """1, 1/2, ..., 1/128, 1, ...: factors that round nothing but float16's smallest numbers."""
    return 2.0 ** -(rank % 8)
