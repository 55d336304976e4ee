"""What comes before a time: whether an error is one that rounding explains, and the ranks' agreement on it."""

import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def verdict(error: float, limit: float) -> str:
    """ "ok", or what is wrong; a NaN is."""
    return "ok" if error <= limit else f"wrong: error {error:.1e}, at most {limit:.1e} expected"


def largest(values: Tensor) -> float:
    """The largest absolute value, found in one pass; NaN if there is one, 0 of none."""
    return float(torch.linalg.vector_norm(values, math.inf)) if values.numel() else 0.0


def largest_difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Largest deviation over the largest expected value of its tensor; infinite for NaN and what one side lacks."""
    if found.keys() != expected.keys():
        return math.inf
    errors = [
        float((found[name] - one).abs().max() / one.abs().max().clamp_min(1e-30)) for name, one in expected.items()
    ]
    return math.inf if any(map(math.isnan, errors)) else max(errors, default=0.0)


def max_over_ranks(error: float) -> float:
    """The largest error of any rank, on all ranks: they must agree on what gets no time. NaN counts as infinite."""
    finite_or_inf = math.inf if math.isnan(error) else error  # a maximum may pass over NaN
    largest = torch.tensor(finite_or_inf, dtype=torch.float64, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)


def first_failing_rank(found: Sequence[float]) -> tuple[int, list[float]] | None:
    """What the first rank found whose first number is not negative, and which rank; None if none did. A collective.

    All ranks give as many numbers, and all get the same: NaN and infinities stay what they are.
    """
    own = torch.tensor(found, dtype=torch.float64, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    everybody = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, own)
    return next(((rank, of_rank.tolist()) for rank, of_rank in enumerate(everybody) if of_rank[0] >= 0), None)
