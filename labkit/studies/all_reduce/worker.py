"""What a rank runs to measure one point of the all-reduce lab. Imports torch and the instruments only.

Inputs: every rank holds the same random base vector times its own power of two, so that the mean over ranks is
the base times one known number, exactly, in float64, without knowing the other ranks' tensors. A contribution
that is missing, doubled or of the wrong chunk is off by far more than rounding.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from labkit.bench.clock import time_interleaved
from labkit.bench.memory import peak_memory_growth
from labkit.lab.point import Point
from labkit.lab.units import format_bytes
from labkit.parallel.collectives import ALGORITHMS, all_reduce, release_scratch, scratch_bytes

TORCH = "torch"
CHOSEN = "chosen"
OWN = (*ALGORITHMS, CHOSEN)
CHECKED_AT_ONCE = 2**16  # elements compared with the oracle at a time, so that their float64 copies stay in cache


@dataclass(frozen=True, kw_only=True)
class AllReducePoint(Point):
    """Alternatives to time in turn on the same tensor, or (`sweep="exchange"`) one step around a ring."""

    sweep: str
    n_elements: int
    dtype: str = "float32"
    algorithms: tuple[str, ...] = ()
    warmup: int = 2
    repeats: int = 10
    most_bytes: int = 0
    seed: int = 0

    @property
    def n_bytes(self) -> int:
        return self.n_elements * torch_dtype(self.dtype).itemsize

    def title(self) -> str:
        return f"{super().title()}, {self.backend}, {format_bytes(self.n_bytes)}"


def torch_dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def measure_point(point: AllReducePoint) -> Iterator[dict[str, Any]]:
    """One row an alternative: seconds of each repeat on this rank, error, memory; "wrong" gets no time."""
    base, own = _inputs(point)
    if point.sweep == "exchange":
        yield _time_exchange(point, own)
        return
    right, tensor = {}, torch.empty_like(own)
    for name in point.algorithms:
        row = _check(point, name, base, tensor.copy_(own))
        if row["gate"] == "ok":
            right[name] = row
        else:
            yield row
    if right:
        for name, seconds in _time(point, list(right), own, tensor).items():
            yield right[name] | {"seconds": seconds}


def _inputs(point: AllReducePoint) -> tuple[torch.Tensor, torch.Tensor]:
    """The base vector and this rank's multiple of it."""
    generator = torch.Generator().manual_seed(point.seed)
    base = torch.rand(point.n_elements, generator=generator).sub_(0.5).to(torch_dtype(point.dtype))
    base = base.to(_device(point))
    return base, base * _multiple(dist.get_rank())


def _multiple(rank: int) -> float:
    """1, 1/2, ... 1/128, 1, ...: multiplying by it is exact."""
    return 2.0 ** -(rank % 8)


def _device(point: AllReducePoint) -> str:
    return f"cuda:{dist.get_rank() % torch.cuda.device_count()}" if point.backend == "nccl" else "cpu"


def _collective(name: str) -> Callable[..., None]:
    if name == TORCH:
        return _torch_all_reduce
    return all_reduce if name == CHOSEN else ALGORITHMS[name]


def _torch_all_reduce(tensor: torch.Tensor, *, op: str) -> None:
    dist.all_reduce(tensor)
    if op == "mean":
        tensor.div_(dist.get_world_size())


def _check(point: AllReducePoint, name: str, base: torch.Tensor, tensor: torch.Tensor) -> dict[str, Any]:
    """The gate: one averaging from a cold start, compared with the exact mean; its memory on the way."""
    release_scratch()
    dist.barrier()
    with peak_memory_growth(_device(point)) as memory:
        _collective(name)(tensor, op="mean")
    error = _worst(_relative_error(tensor, base))
    # one rounding a sum and one for the scaling, each at most eps/2 of the largest partial result; doubled
    bound = (dist.get_world_size() + 1) * torch.finfo(tensor.dtype).eps
    return {
        "algorithm": name,
        "n_bytes": point.n_bytes,
        "error": error,
        "extra_bytes": memory.growth_bytes,
        "scratch_bytes": scratch_bytes() if name in OWN else None,
        "gate": "ok" if error <= bound else f"wrong: error {error:.1e}, at most {bound:.1e} expected",
    }


def _worst(error: float) -> float:
    """The largest error of any rank, on all ranks: they must agree on what gets no time."""
    worst = torch.tensor(error, dtype=torch.float64, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(worst, op=dist.ReduceOp.MAX)
    return float(worst)


def _relative_error(result: torch.Tensor, base: torch.Tensor) -> float:
    """Largest deviation from the exact mean over the largest mean; NaN counts as infinite."""
    ranks = dist.get_world_size()
    factor = sum(_multiple(rank) for rank in range(ranks)) / ranks
    deviation = 0.0
    for got, of_base in zip(result.split(CHECKED_AT_ONCE), base.split(CHECKED_AT_ONCE), strict=True):
        difference = float((got.double() - of_base.double() * factor).abs_().max())
        deviation = max(deviation, math.inf if math.isnan(difference) else difference)
    largest = factor * float(base.abs().max())
    return deviation / largest if largest else deviation


def _time(point: AllReducePoint, names: list[str], own: torch.Tensor, tensor: torch.Tensor) -> dict[str, list[float]]:
    """Sums, the operation all alternatives have in common, from fresh inputs behind a barrier."""

    def prepare() -> None:
        tensor.copy_(own)
        dist.barrier()

    return time_interleaved(
        {name: _call(name, tensor) for name in names},
        warmup=point.warmup,
        repeats=point.repeats,
        device=_device(point),
        before=prepare,
    )


def _call(name: str, tensor: torch.Tensor) -> Callable[[], None]:
    collective = _collective(name)
    return lambda: collective(tensor, op="sum")


def _time_exchange(point: AllReducePoint, own: torch.Tensor) -> dict[str, Any]:
    """One step around a ring: send to the right neighbor while receiving from the left."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    received = torch.empty_like(own)
    expected = own * (_multiple((rank - 1) % ranks) / _multiple(rank))  # powers of two: exact

    def exchange() -> None:
        operations = [
            dist.P2POp(dist.irecv, received, (rank - 1) % ranks),
            dist.P2POp(dist.isend, own, (rank + 1) % ranks),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    exchange()
    row = {"algorithm": "exchange", "n_bytes": point.n_bytes}
    if _worst(0.0 if torch.equal(received, expected) else math.inf):
        return row | {"gate": "wrong: the neighbor's tensor did not arrive"}
    samples = time_interleaved(
        {"exchange": exchange},
        warmup=point.warmup,
        repeats=point.repeats,
        device=_device(point),
        before=dist.barrier,
    )
    return row | {"gate": "ok", "seconds": samples["exchange"]}
