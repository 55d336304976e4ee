"""Checks results before anything is timed: errors, limits, agreement of ranks."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

backends: Any = torch.backends  # modules whose types are incomplete
cudnn = backends.cudnn


OK = {"status": "ok"}


def status_columns(wrong: str | None) -> dict[str, str]:
    """Return the columns of a row that was checked: right (None), or what is wrong."""
    return dict(OK) if wrong is None else {"status": "wrong", "reason": wrong}


def refusal_columns(reason: str) -> dict[str, str]:
    """Return the columns of a row of something that cannot be measured here."""
    return {"status": "refused", "reason": reason}


def describe_error(error: float, limit: float) -> str | None:
    """Say that an error is above its limit, or is NaN; None if it is not."""
    return None if error <= limit else f"error {error:.1e}, at most {limit:.1e} expected"


def largest(values: Tensor) -> float:
    """Return the largest absolute value, in one pass; NaN if there is one, 0 without values."""
    return float(torch.linalg.vector_norm(values, math.inf)) if values.numel() else 0.0


def largest_difference(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], *, floor: float = 0.0
) -> float:
    """Return the largest deviation, relative to the largest expected value of its tensor.

    That value counts as at least `floor` times the largest of all tensors. Infinite for NaN and for
    missing tensors.
    """
    if actual.keys() != expected.keys():
        return math.inf
    scales = {name: largest(one) for name, one in expected.items()}
    least = max(floor * max(scales.values(), default=0.0), 1e-30)
    errors = [
        largest(actual[name] - one) / max(scales[name], least) for name, one in expected.items()
    ]
    return math.inf if any(map(math.isnan, errors)) else max(errors, default=0.0)


def norm_difference(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return the norm of all deviations, relative to that of all expected values.

    For 16 bits, in which a single element may be off by as much as it is large. Infinite for NaN
    and for missing tensors.
    """
    if actual.keys() != expected.keys():
        return math.inf
    errors = (float((actual[name] - one).norm()) for name, one in expected.items())
    norm = math.hypot(*(float(one.norm()) for one in expected.values()))
    error = math.hypot(*errors) / max(norm, 1e-30)
    return math.inf if math.isnan(error) else error


def gather_numbers(numbers: Sequence[float]) -> list[list[float]]:
    """Return the numbers of all ranks, equally many on each, by rank. A collective."""
    if not dist.is_initialized():
        return [list(numbers)]
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    local = torch.tensor(numbers, dtype=torch.float64, device=device)
    gathered = local.new_empty(dist.get_world_size(), len(numbers))
    dist.all_gather([*gathered], local)
    return gathered.tolist()


def max_over_ranks(error: float) -> float:
    """Return the largest error of any rank, on all ranks. A collective. NaN counts as infinite."""
    # All ranks get it: one that alone found an error would leave the others in the timed call.
    errors = [error_of_rank for (error_of_rank,) in gather_numbers([error])]
    return max(math.inf if math.isnan(each) else each for each in errors)


def first_failing_rank(report: Sequence[float]) -> tuple[int, list[float]] | None:
    """Return the first rank that has a failure, and its report; None if there is none.

    A report has a failure if its first number is at least 0. A collective: all ranks pass equally
    many numbers and get the same result. NaN and infinities are kept.
    """
    for rank, numbers in enumerate(gather_numbers(report)):
        if numbers[0] >= 0:
            return rank, numbers
    return None


@contextmanager
def deterministic_math() -> Iterator[None]:
    """Compute without TF32 and with deterministic convolutions on CUDA, within the block.

    A check computes everything twice, and rounding alone can grow large, as in batch norm over two
    values.
    """
    units = (backends.cuda.matmul, backends.mkldnn.matmul, cudnn.conv, cudnn.rnn)
    precisions = [unit.fp32_precision for unit in units]
    cudnn_had_tf32 = "tf32" in (cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision)
    was_deterministic = cudnn.deterministic
    was_benchmark = cudnn.benchmark
    # The older names set the newer ones too, and must be set first: torch.compile reads them, which
    # raises where the newer ones alone were changed. TORCH_ALLOW_TF32_CUBLAS_OVERRIDE sets both.
    matmuls = "high" if backends.cuda.matmul.fp32_precision == "tf32" else "highest"
    with suppress(RuntimeError):
        matmuls = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    cudnn.allow_tf32 = False
    cudnn.deterministic = True
    cudnn.benchmark = False
    for unit in units:
        unit.fp32_precision = "ieee"
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(matmuls)
        cudnn.allow_tf32 = cudnn_had_tf32
        cudnn.deterministic = was_deterministic
        cudnn.benchmark = was_benchmark
        for unit, precision in zip(units, precisions, strict=True):
            unit.fp32_precision = precision


# Relative error of a matmul whose operands have TF32's ten bits. Rounding them is off by 2**-12,
# truncating them, as some GPUs do, by twice that.
TF32_LIMIT = 2.0**-10


@dataclass(frozen=True)
class Work:
    """An operation to time: its FLOPs, the least bytes that it moves, and what is wrong with it."""

    run: Callable[[], Any]
    flops: float
    n_bytes: float
    wrong: str | None = None


def matrix_product(
    device: str, dtype: torch.dtype, m: int, k: int, n: int, *, batch: int = 1
) -> Work:
    """Return a matmul of normal (m, k) and (k, n), or a `batch` of them.

    One row of a first result is checked in float64.
    """
    left = torch.randn(batch, m, k, device=device).to(dtype)
    right = torch.randn(batch, k, n, device=device).to(dtype)
    out = torch.empty(batch, m, n, dtype=dtype, device=device)
    if batch == 1:  # mm and bmm are other kernels
        run = partial(torch.mm, left[0], right[0], out=out[0])
    else:
        run = partial(torch.bmm, left, right, out=out)
    run()
    exact = left[-1, m // 2].double() @ right[-1].double()
    error = float((out[-1, m // 2].double() - exact).norm() / exact.norm())
    n_bytes = left.nbytes + right.nbytes + out.nbytes
    limit = rounding_limit(dtype, k)
    if dtype == torch.float32 and left.is_cuda and backends.cuda.matmul.fp32_precision == "tf32":
        limit = max(limit, TF32_LIMIT)
    return Work(run, 2.0 * batch * m * k * n, n_bytes, describe_error(error, limit))


def rounding_limit(dtype: torch.dtype, terms: int) -> float:
    """Return the relative error that rounding explains in sums of `terms` products.

    Successive additions of K terms are off by about sqrt(K)/6 units. Three times that is allowed,
    and at least eight units for libraries that add in blocks. TF32 is off by about 2**-12, which is
    wrong where float32 was asked for.
    """
    return float(torch.finfo(dtype).eps) * max(8.0, terms**0.5 / 2)
