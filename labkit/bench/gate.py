"""What comes before a time: whether an error is one that rounding explains, and the ranks' agreement on it."""

import math

import torch
import torch.distributed as dist


def verdict(error: float, limit: float) -> str:
    """ "ok", or what is wrong; a NaN is."""
    return "ok" if error <= limit else f"wrong: error {error:.1e}, at most {limit:.1e} expected"


def worst_of_ranks(error: float) -> float:
    """The largest error of any rank, on all ranks: they must agree on what gets no time. NaN counts as infinite."""
    finite_or_inf = math.inf if math.isnan(error) else error  # a maximum may pass over NaN
    largest = torch.tensor(finite_or_inf, dtype=torch.float64, device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return float(largest)
