"""The fixed small set of quantities that a check times: on one rank, and on all ranks together.

Every quantity is timed twice per round; the distance of these two turns is noise. The set depends
on no parameter: a baseline would be of other quantities.
"""

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from labkit.bench.clock import time_interleaved
from labkit.costs.memory import HEADROOM, peak_bytes
from labkit.costs.transformer import SIZES
from labkit.lab.point import SessionPoint
from labkit.nn.attention_implementations import IMPLEMENTATIONS, has_triton, unavailable_reason
from labkit.nn.attention_problem import AttentionProblem, Passes
from labkit.nn.training import Trainer, TrainingStep, build_workload
from labkit.parallel.collectives import all_reduce
from labkit.parallel.data_parallel import BucketedDDP
from labkit.parallel.ranks.worker import use_device
from labkit.parallel.transport import POINT_TO_POINT, SHARED, transport_in_use

# Raise it with any change of a quantity or a size below: runs of other sets are not compared.
SET = 2
TURNS = ("first", "again")
THREADS = "OMP_NUM_THREADS"
PARALLEL_FLOATS = 2**18  # in an operation that starts all threads
CALLS = 1000
SHORT_CALLS = 20  # of an operator on one element, and of a short all-reduce
HEAD_DIM = 64
SHORT_BYTES = 4096
LONG_BYTES = 4 * 2**20
# What a rank holds at most: long all-reduces and a training step of the smallest model.
ALL_RANKS_BYTES = 2**28
FLOPS = "FLOP/s"
BYTES = "B/s"


@dataclass(frozen=True, kw_only=True)
class CheckPoint(SessionPoint):
    """The fixed set on one rank or all ranks of a device."""

    device: str = "cpu"
    sizes: str = "cpu"
    """Name of its sizes in `SIZES_ON`."""
    number: int = SET

    @property
    def needed_bytes(self) -> float:
        """Memory of all quantities of one rank, which are held at once."""
        if self.world_size > 1:
            return ALL_RANKS_BYTES
        sizes = SIZES_ON[self.sizes]
        matmuls = (4 + 2) * 4 * sizes.product**2  # two inputs, the result and what it replaces
        attention = 12 * sizes.heads * sizes.sequence * HEAD_DIM * 4  # with gradients and float64
        step = peak_bytes(SIZES[sizes.model], sizes.batch, sizes.context, device=self.device)
        return HEADROOM * (matmuls + 2 * sizes.n_bytes + attention + step)


class Sizes(NamedTuple):
    """Sizes that are large enough on a device to measure more than launches."""

    product: int
    n_bytes: int
    attention: str
    heads: int
    sequence: int
    model: str
    batch: int
    context: int


SIZES_ON = {
    "cpu": Sizes(512, 64_000_000, "tiled", 4, 512, "nano", 2, 32),
    "cuda": Sizes(8192, 2**30, "flash", 32, 4096, "small", 8, 512),
    "small cuda": Sizes(4096, 2**28, "flash", 8, 4096, "mini", 8, 512),
}
# The large set must leave a quarter of a GPU's memory to libraries and a desktop.
MAX_SHARE = 0.75


def sizes_on(memory_bytes: int) -> str:
    """Return the name of the sizes for a GPU of this memory."""
    # By all of it, not by what is free now: sizes other than the baseline's cannot be compared.
    large = CheckPoint(device="cuda", sizes="cuda")
    if large.needed_bytes <= MAX_SHARE * memory_bytes:
        return large.sizes
    return "small cuda"


class Quantity(NamedTuple):
    """An action that is timed, and the work of one sample of it."""

    action: Callable[[], Any]
    calls: int = 1
    """Of the action in a sample."""
    work: float = 0.0
    unit: str = "s"
    """Of the work per second; "s": only time counts."""
    uses_all_threads: bool = False
    """Whether it depends on where a host places the cores, which exchange data."""

    def sample(self) -> None:
        for _ in range(self.calls):
            self.action()


def measure_quantities(point: CheckPoint) -> Iterator[dict[str, Any]]:
    """Yield one row per quantity and turn: seconds of each sample on this rank, and its work."""
    device = use_device(point.device)
    # labkit sets the threads of its ranks. What other programs would get, this variable says: "4",
    # or "4,2" for nested ones.
    limit = os.environ.get(THREADS, "").partition(",")[0]
    n_threads = torch.get_num_threads()
    if limit.isdecimal():
        n_threads = max(1, min(n_threads, int(limit)))
    before = None
    if point.world_size == 1:
        quantities = _one_rank(device, SIZES_ON[point.sizes])
    else:
        quantities = dict(_all_ranks(device))
        before = dist.barrier
    threads = dict.fromkeys(quantities, 1)
    for name, quantity in quantities.items():
        if quantity.uses_all_threads:
            threads[name] = n_threads
    # Each quantity is timed twice per round under two names, so that its turns do not follow
    # each other.
    turns = {f"{name} {turn}": (name, turn) for name in quantities for turn in TURNS}
    spread = torch.zeros(PARALLEL_FLOATS)

    def set_threads(turn: str) -> None:
        name, _ = turns[turn]
        torch.set_num_threads(threads[name])
        # The threads start here, not in the sample.
        spread.add_(1)

    samples = time_interleaved(
        {turn: quantities[name].sample for turn, (name, _) in turns.items()},
        device=device,
        prepare=set_threads,
        before=before,
        **point.rounds,
    )
    for key, (name, turn) in turns.items():
        quantity = quantities[name]
        yield {
            "quantity": name,
            "turn": turn,
            "unit": quantity.unit,
            "work": quantity.work,
            "threads": threads[name],
            "seconds": samples[key],
        }
    # Kernels are compiled alike in all sessions.
    if device != "cpu" and point.session == 1 and has_triton():
        yield from kernel_rows()


def kernel_rows() -> Iterator[dict[str, Any]]:
    """Yield registers and spilled bytes per thread of each kernel that this process compiled."""
    # Not above: Triton is not everywhere.
    from labkit.nn.flash_launch import KERNELS

    for name, function in KERNELS.items():
        for compiled, *_ in function.device_caches.values():
            for kernel in compiled.values():
                yield {"kernel": name, "registers": kernel.n_regs, "spills": kernel.n_spills}


def _one_rank(device: str, sizes: Sizes) -> Mapping[str, Quantity]:
    """Return matmuls by dtype, a copy, a call, attention in both passes, and a training step."""
    source, target = (torch.ones(sizes.n_bytes // 4, device=device) for _ in range(2))
    quantities = {
        f"matmul {dtype}": _matmul(device, dtype, sizes.product)
        for dtype in ("float32", "bfloat16")
    }
    quantities["copy"] = Quantity(
        partial(target.copy_, source), work=2.0 * sizes.n_bytes, unit=BYTES
    )
    quantities["call"] = Quantity(partial(torch.add, torch.ones(1, device=device), 1), CALLS)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    if unavailable_reason(sizes.attention, torch.device(device), dtype, HEAD_DIM) is None:
        problem = AttentionProblem(
            (sizes.heads, sizes.sequence, HEAD_DIM), dtype, device, causal=True
        )
        quantities["attention"] = Quantity(
            Passes(problem, IMPLEMENTATIONS[sizes.attention]).run_checked
        )
    step = TrainingStep(
        SIZES[sizes.model], batch=sizes.batch, context_length=sizes.context, device=device
    )
    quantities["training step"] = Quantity(step.run)
    if device == "cpu":  # a GPU has no threads to share out
        for name in ("matmul float32", "copy"):
            quantities[f"{name}, all threads"] = quantities[name]._replace(uses_all_threads=True)
    return quantities


def _matmul(device: str, dtype: str, size: int) -> Quantity:
    calls = 1
    # Many processors have no units for bfloat16: smaller matmuls, but more of them per sample.
    if device == "cpu" and dtype == "bfloat16":
        size = size // 2
        calls = 4
    a, b = (torch.randn(size, size, device=device, dtype=getattr(torch, dtype)) for _ in range(2))
    return Quantity(partial(torch.mm, a, b), calls, 2.0 * size**3 * calls, FLOPS)


def _all_ranks(device: str) -> Iterator[tuple[str, Quantity]]:
    """Yield all-reduces short and long by transport, and a training step under a wrapper."""
    reduces: dict[str, Callable[[torch.Tensor], Any]] = {
        f"torch {dist.get_backend()}": dist.all_reduce
    }
    for name, transport in {"point to point": POINT_TO_POINT, "shared memory": SHARED}.items():
        if device == "cpu" and transport in (POINT_TO_POINT, transport_in_use()[0]):
            reduces[name] = partial(all_reduce, op="sum", transport=transport)
    for name, reduce in reduces.items():
        for kind, n_bytes, calls in (("short", SHORT_BYTES, SHORT_CALLS), ("long", LONG_BYTES, 1)):
            tensor = torch.zeros(n_bytes // 4, device=device)
            yield (
                f"all-reduce {kind}, {name}",
                Quantity(partial(reduce, tensor), calls, float(n_bytes * calls), BYTES),
            )
    workload = build_workload(
        SIZES["nano"], batch=2, context_length=32, device=device, seed=dist.get_rank()
    )
    model = BucketedDDP(workload.build(), finish_in_backward=False)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=1e-4), workload.loss, device)
    yield "training step, all ranks", Quantity(trainer.run)
