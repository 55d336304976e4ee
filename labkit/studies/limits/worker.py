"""Worker of the limits lab: matmuls, memory, threads, operators, and messages between ranks."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional

from labkit.bench.check import (
    Work,
    matrix_product,
    max_over_ranks,
    refusal_columns,
    status_columns,
)
from labkit.bench.checksums import first_wrong
from labkit.bench.clock import time_interleaved
from labkit.costs.memory import STATES_BYTES, activation_bytes
from labkit.costs.transformer import SIZES, n_parameters
from labkit.lab.point import ModelPoint
from labkit.lab.units import format_seconds
from labkit.parallel.ranks.worker import use_device
from labkit.studies.limits.messages import exchange_rows
from labkit.studies.shared.alternatives import time_guarded, timed_rows

MIN_ROUNDS = 3  # for which a matmul must leave time
MIN_FLOPS_PER_S = 2e8  # a CPU reaches more even if it converts every number: less is a stall
MIN_LIMIT_S = 0.5  # for a matmul, however short rounds are
CALLS = "calls"
SAMPLE_S = 1e-3  # short calls are repeated until a sample takes about this long
MAX_CALLS = 200
CHAINS = (2, 16, 64)  # operators, each with another one in the backward pass
ATTENTION_BATCH = 8  # a batched matmul has the sides of the largest, divided by this


@dataclass(frozen=True, kw_only=True)
class LimitPoint(ModelPoint):
    """A sweep whose calls are interleaved: matmuls, copies and additions, threads, operators."""

    sweep: str
    dtype: str = "float32"
    sizes: tuple[int, ...] = ()
    """Rows of square matrices, or bytes."""
    model: str = ""

    @property
    def rounds(self) -> dict[str, Any]:
        """Options of the clock; ranks start together, so that all compute while one is timed."""
        options = super().rounds | {"device": self.device}
        if self.world_size > 1:
            options["before"] = dist.barrier
        return options

    @property
    def contests(self) -> int:
        return len(self.sizes) if self.sweep == "exchange" else 1

    @property
    def needed_bytes(self) -> float:
        if self.sweep == "operators":
            # Operators of one layer, and AdamW on as many parameters as it has.
            shape = SIZES[self.model]
            activations = activation_bytes(
                replace(shape, n_layers=1), self.batch, self.context_length
            )
            # Twice: operands of matmuls are tensors of their own, not one the other's result.
            return STATES_BYTES * n_parameters(shape) / shape.n_layers + 2 * activations
        largest = max(self.sizes, default=0)
        if self.sweep == "products":
            largest = 8 * largest**2  # at most float64
        return 3 * largest  # two operands and a result


def measure(point: LimitPoint) -> Iterator[dict[str, Any]]:
    """Yield rows with `seconds` of one call in each repeat, and the call's `flops` and `bytes`."""
    torch.manual_seed(point.seed)
    yield from _SWEEPS[point.sweep](point, use_device(point.device))


def _timed(
    point: LimitPoint, works: dict[str, Work], column: str, **options: Any
) -> Iterator[dict[str, Any]]:
    """Yield a row per work, named in `column`.

    A sample is the mean of enough calls to take `SAMPLE_S`.
    """
    right = {name: work for name, work in works.items() if work.wrong is None}
    # One call each, to know how many fill a sample: short ones would show the clock's own cost.
    singly = {name: {CALLS: work.run} for name, work in right.items()}
    once, failed = time_guarded(singly, device=point.device, warmup=1, repeats=1, seed=point.id)
    n_calls: dict[str, int] = {}
    for name, parts in once.items():
        call_s = max(parts[CALLS][0], 1e-9)
        n_calls[name] = max(1, min(MAX_CALLS, int(SAMPLE_S / call_s)))
    repeated = {name: partial(_repeat, right[name].run, n) for name, n in n_calls.items()}
    rows: dict[str, dict[str, Any]] = {}
    for name, work in works.items():
        status = failed.get(name, status_columns(work.wrong))
        rows[name] = {column: name, "flops": work.flops, "bytes": work.n_bytes, **status}
    for row in timed_rows(rows, repeated, **point.rounds, **options):
        if "seconds" in row:
            row["seconds"] = [seconds / n_calls[row[column]] for seconds in row["seconds"]]
        yield row


def _repeat(run: Callable[[], Any], number: int) -> None:
    for _ in range(number):
        run()


def _products(point: LimitPoint, device: str) -> Iterator[dict[str, Any]]:
    """Time square matmuls, and a tall and a batched one with the FLOPs of the largest."""
    dtype = getattr(torch, point.dtype)
    sizes, limit_s = _sizes_in_time(point, device, dtype)
    largest = max(sizes)
    small = largest // ATTENTION_BATCH
    # Batch, and the sides m, k and n of (m, k) @ (k, n).
    squares = {f"square {size}": (1, size, size, size) for size in sizes}
    others = {
        # Many tokens by a narrow weight, and many small matmuls as attention's.
        "tall": (1, 16 * largest, largest // 4, largest // 4),
        "batched": (ATTENTION_BATCH**3, small, small, small),
    }
    shapes = squares | others
    calls = {
        name: matrix_product(device, dtype, *sides, batch=batch)
        for name, (batch, *sides) in shapes.items()
    }
    for row in _timed(point, calls, "shape"):
        shape = row["shape"]
        batch, m, k, n = shapes[shape]
        dimensions = f"{batch} x {m} x {k} x {n}"
        yield row | {"size": m if shape in squares else None, "dimensions": dimensions}
    for size in point.sizes:
        if size not in sizes:
            reason = f"one would take longer than {format_seconds(limit_s)}"
            yield {"shape": f"square {size}", **refusal_columns(reason)}


def _sizes_in_time(point: LimitPoint, device: str, dtype: torch.dtype) -> tuple[list[int], float]:
    """Return the sizes of square matmuls that rounds have time for, and the seconds one may take.

    Each size predicts the next one's time. A CPU without instructions for 16-bit numbers multiplies
    them a hundred times slower than float32: 2048 rows take 20 s.
    """
    limit_s = max(point.rounds["rounds_s"] / MIN_ROUNDS, MIN_LIMIT_S)
    sizes = sorted(point.sizes)
    in_time = sizes[:1]
    for size, next_size in pairwise(sizes):
        call = matrix_product(device, dtype, size, size, size).run
        seconds = time_interleaved({"": call}, warmup=0, repeats=MIN_ROUNDS, device=device)[""]
        # The best of a few, since one may meet a stall; the slowest rank's, so that all ranks time
        # the same sizes.
        predicted_s = max_over_ranks(min(seconds)) * (next_size / size) ** 3
        # A prediction that is slower than any CPU is of a stall.
        slowest_s = 2 * next_size**3 / MIN_FLOPS_PER_S
        if min(slowest_s, predicted_s) > limit_s:
            break
        in_time.append(next_size)
    return in_time, limit_s


def _memory(point: LimitPoint, device: str) -> Iterator[dict[str, Any]]:
    """Time copies and additions of arrays of each number of bytes."""
    calls = {
        f"{name} {n}": work for n in point.sizes for name, work in _elementwise(n, device).items()
    }
    for row in _timed(point, calls, "call"):
        operation, n_bytes = row.pop("call").split()
        yield row | {"operation": operation, "n_bytes": int(n_bytes)}


def _elementwise(n_bytes: int, device: str) -> dict[str, Work]:
    """Return a copy, an addition, and one into a new tensor, of float32 arrays."""
    # "new" allocates its result, as operators of a model do: predictions use that curve.
    n = max(1, n_bytes // 4)
    a, b, out = (torch.ones(n, device=device) for _ in range(3))
    return {
        "copy": Work(partial(out.copy_, a), 0, 8.0 * n),
        "add": Work(partial(torch.add, a, b, out=out), n, 12.0 * n),
        "new": Work(partial(torch.add, a, b), n, 12.0 * n),
    }


def _threads(point: LimitPoint, device: str) -> Iterator[dict[str, Any]]:
    """Time a matmul, a copy and an addition with one thread, two, four, up to all of them."""
    all_threads = torch.get_num_threads()
    size, n_bytes = point.sizes
    numbers = sorted({*(2**power for power in range(all_threads.bit_length())), all_threads})
    product = matrix_product(device, torch.float32, size, size, size)
    work = {"product": product, **_elementwise(n_bytes, device)}
    calls = {f"{name} {n}": work[name] for name in ("copy", "add", "product") for n in numbers}

    def set_threads(call: str) -> None:
        torch.set_num_threads(int(call.split()[1]))

    try:
        # All rows before the first is yielded: until the caller asks for the next one, it would
        # run with the thread count of the last call.
        rows = list(_timed(point, calls, "call", prepare=set_threads))
    finally:
        torch.set_num_threads(all_threads)
    for row in rows:
        operation, threads = row.pop("call").split()
        yield row | {"operation": operation, "threads": int(threads)}


def _autograd(point: LimitPoint, device: str) -> Iterator[dict[str, Any]]:
    """Time passes over chains of tiny operators, forward and backward."""
    ones = torch.ones(1, device=device)
    weight = torch.ones(1, device=device, requires_grad=True)

    def pass_over(operators: int) -> None:
        value = weight
        for _ in range(operators):
            value = value * ones
        value.backward()

    passes = {str(n): partial(pass_over, n) for n in CHAINS}
    # A long copy empties the caches between the passes, as a model would.
    empty_caches = {"copy": _elementwise(point.sizes[0], device)["copy"].run}
    samples = time_interleaved(passes | empty_caches, **point.rounds)
    for n in CHAINS:
        # Each operator has another one in the backward pass.
        yield {"operators": 2 * n, "status": "ok", "seconds": samples[str(n)]}


def _itself(point: LimitPoint, device: str) -> Iterator[dict[str, Any]]:
    """Time an operator in turns with itself: two alternatives that do not differ."""
    size, n_bytes = point.sizes
    if point.world_size > 1:
        tensor = torch.zeros(max(1, n_bytes // 4))
        wrong = first_wrong(dist.all_reduce, tensor)
        calls = {"all-reduce": Work(partial(dist.all_reduce, tensor), 0, tensor.nbytes, wrong)}
    else:
        product = matrix_product(device, getattr(torch, point.dtype), size, size, size)
        calls = {"product": product, "addition": _elementwise(n_bytes, device)["add"]}
    for operation, call in calls.items():
        about = {"operation": operation, "flops": call.flops, "bytes": call.n_bytes}
        about |= status_columns(call.wrong)
        rows = {turn: about | {"repetition": turn} for turn in ("first", "second")}
        timing = point.rounds | {"seed": f"{point.id} {operation}"}
        yield from timed_rows(rows, dict.fromkeys(rows, call.run), **timing)


def _operators(point: LimitPoint, device: str) -> Iterator[dict[str, Any]]:
    """Time each operator of a named model's step in float32; FLOPs and bytes counted by hand."""
    shape = SIZES[point.model]
    batch = point.batch
    context = point.context_length
    tensor = partial(torch.randn, device=device)
    tokens = batch * context
    d = shape.d_model
    f = shape.d_ff
    v = shape.vocabulary
    hidden = tensor(tokens, d)
    wide = tensor(tokens, f)
    logits = tensor(tokens, v)
    scores = tensor(batch * shape.n_heads, context, context)
    weight = torch.ones(d, device=device)
    labels = torch.zeros(tokens, dtype=torch.int64, device=device)
    # One layer's share: all parameters of a large model would not fit.
    parameter = tensor(n_parameters(shape) // shape.n_layers).requires_grad_()
    parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW([parameter], foreach=True)
    gated = torch.empty_like(wide)
    n_hidden, n_wide, n_logits, n_scores = (x.numel() for x in (hidden, wide, logits, scores))
    # Batch, and the sides m, k and n of (m, k) @ (k, n).
    products = {
        "attention projection": (1, tokens, d, d),
        "feed-forward product": (1, tokens, d, f),
        "output product": (1, tokens, d, v),
        "attention scores": (batch * shape.n_heads, context, shape.head_dim, context),
    }
    works = {
        name: matrix_product(device, torch.float32, *sides, batch=b)
        for name, (b, *sides) in products.items()
    }
    # FLOPs, and the least bytes that are read and written: fused kernels read their inputs once.
    works |= {
        "softmax": Work(partial(torch.softmax, scores, -1), 5 * n_scores, 8 * n_scores),
        "RMS norm": Work(
            partial(functional.rms_norm, hidden, (d,), weight), 4 * n_hidden, 8 * n_hidden
        ),
        "SwiGLU": Work(
            lambda: torch.mul(functional.silu(wide), wide, out=gated), 6 * n_wide, 12 * n_wide
        ),
        "residual addition": Work(partial(torch.add, hidden, hidden), n_hidden, 8 * n_hidden),
        "cross-entropy": Work(
            partial(functional.cross_entropy, logits, labels), 5 * n_logits, 4 * n_logits
        ),
        # Reads parameter, gradient and two states, and writes all but the gradient.
        "AdamW": Work(optimizer.step, 12 * parameter.numel(), 28 * parameter.numel()),
    }
    yield from _timed(point, works, "operator")


def _exchange(point: LimitPoint, device: str) -> Iterator[dict[str, Any]]:
    """Time all-reduces and single messages between ranks."""
    for n_bytes in point.sizes:
        # Each size has rounds in an order of its own.
        timing = point.rounds | {"seed": f"{point.id} {n_bytes}"}
        yield from exchange_rows(n_bytes, str(point.backend), device, timing)


_SWEEPS: dict[str, Callable[[LimitPoint, str], Iterator[dict[str, Any]]]] = {
    "products": _products,
    "memory": _memory,
    "threads": _threads,
    "autograd": _autograd,
    "itself": _itself,
    "exchange": _exchange,
    "operators": _operators,
}
