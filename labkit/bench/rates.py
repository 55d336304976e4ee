"""What a device reaches at best: an operator to time, with its arithmetic, its traffic, and whether it is right.

A data sheet's peak exists for few devices and is reached on none.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from labkit.bench.check import verdict


@dataclass(frozen=True)
class Work:
    """An operation, its FLOPs, the least bytes that it reads and writes, and "ok" or the error of its result."""

    run: Callable[[], Any]
    flops: float
    n_bytes: float
    check: str = "ok"
    error: float = 0.0
    """Relative, where the check has measured it."""


def matrix_product(device: str, dtype: torch.dtype, m: int, k: int, n: int, *, batch: int = 1) -> Work:
    """(m, k) by (k, n), normal, or a `batch` of them: run once, and a row of the result held against float64."""
    left, right = (torch.randn(batch, *sides, device=device).to(dtype) for sides in ((m, k), (k, n)))
    out = torch.empty(batch, m, n, dtype=dtype, device=device)
    run = partial(torch.mm, left[0], right[0], out=out[0]) if batch == 1 else partial(torch.bmm, left, right, out=out)
    run()
    exact = left[-1, m // 2].double() @ right[-1].double()
    error = float((out[-1, m // 2].double() - exact).norm() / exact.norm())
    n_bytes = left.nbytes + right.nbytes + out.nbytes
    return Work(run, 2.0 * batch * m * k * n, n_bytes, verdict(error, rounding_limit(dtype, k)), error)


def rounding_limit(dtype: torch.dtype, terms: int) -> float:
    """How far rounding may put a product off, relative, whose elements are sums of so many terms.

    A sum of K rounded terms, added one after another, is off by about sqrt(K)/6 units: every partial sum is rounded,
    by at most half a unit and in either direction. Three times that is allowed, and at least eight units for whoever
    adds in blocks and rounds once more. TF32, where somebody has allowed it for float32, is off by about 2**-12: seen.
    """
    return float(torch.finfo(dtype).eps) * max(8.0, terms**0.5 / 2)
