"""Correctness checks before anything is timed: an error that rounding explains, and the ranks' agreement on it."""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def verdict(error: float, limit: float) -> str:
    """ "ok", or the error that is wrong; NaN is."""
    return "ok" if error <= limit else f"wrong: error {error:.1e}, at most {limit:.1e} expected"


def largest(values: Tensor) -> float:
    """The largest absolute value, in one pass; NaN if there is one, 0 without values."""
    return float(torch.linalg.vector_norm(values, math.inf)) if values.numel() else 0.0


def largest_difference(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Largest deviation relative to the largest expected value of its tensor; infinite for NaN or missing tensors."""
    if actual.keys() != expected.keys():
        return math.inf
    errors = [
        float((actual[name] - one).abs().max() / one.abs().max().clamp_min(1e-30)) for name, one in expected.items()
    ]
    return math.inf if any(map(math.isnan, errors)) else max(errors, default=0.0)


def max_over_ranks(error: float) -> float:
    """The largest error of any rank, on all ranks, which must agree on what is timed. NaN counts as infinite."""
    finite_or_inf = math.inf if math.isnan(error) else error  # a maximum may pass over NaN
    largest = torch.tensor(finite_or_inf, dtype=torch.float64, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def first_failing_rank(report: Sequence[float]) -> tuple[int, list[float]] | None:
    """The first rank whose report begins with a number that is not negative, and its report; None if no rank's does.

    A collective: all ranks give as many numbers, and all get the same. NaN and infinities stay.
    """
    local = torch.tensor(report, dtype=torch.float64, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    reports = [torch.empty_like(local) for _ in range(dist.get_world_size())]
    dist.all_gather(reports, local)
    return next(((rank, numbers.tolist()) for rank, numbers in enumerate(reports) if numbers[0] >= 0), None)
