"""What this device reaches at best: FLOP/s of a large matrix product.

A data sheet's peak exists for few devices and is reached on none.
"""

from dataclasses import dataclass

import torch

from labkit.bench.clock import time_interleaved
from labkit.bench.gate import verdict

# Products of this size keep the units busy and fit everywhere; larger ones gain a few percent at most.
MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}
# In a row for a sample: the launch of a single one is a few percent of it on the fastest devices.
CALLS = {"cpu": 1, "cuda": 5}


@dataclass(frozen=True)
class MatmulTimes:
    """Products of two square matrices: seconds of each, and the relative error of one row against float64."""

    dtype: torch.dtype
    size: int
    seconds: list[float]
    error: float
    limit: float
    """The largest error that rounding explains."""

    @property
    def gate(self) -> str:
        """ "ok", or what is wrong; a NaN is."""
        return verdict(self.error, self.limit)

    @property
    def flops_per_s(self) -> list[float]:
        """Of each product, 2 * size^3 FLOPs in all. ArithmeticError for a wrong one."""
        if self.gate != "ok":
            raise ArithmeticError(f"a product of two {self.dtype} matrices is {self.gate}")
        return [2 * self.size**3 / seconds for seconds in self.seconds]


def time_matmul(
    device: str, dtype: torch.dtype, *, size: int | None = None, warmup: int = 3, repeats: int = 10, seed: int = 0
) -> MatmulTimes:
    """Time `repeats` products of two normal square matrices of `size`; None: that of the device."""
    kind = torch.device(device).type
    size = size or MATMUL_SIZE[kind]
    generator = torch.Generator(device).manual_seed(seed)
    product = _Product(torch.randn(2, size, size, device=device, generator=generator), dtype)
    samples = time_interleaved(
        {"product": product.run}, warmup=warmup, repeats=repeats, device=device, calls=CALLS[kind]
    )
    return MatmulTimes(dtype, size, samples["product"], product.error, rounding_limit(dtype, size))


class _Product:
    """Of two square matrices in one dtype, and how wrong one row of it is."""

    def __init__(self, factors: torch.Tensor, dtype: torch.dtype):
        self._a, self._b = factors.to(dtype)
        self._out = torch.empty_like(self._a)

    def run(self) -> None:
        torch.mm(self._a, self._b, out=self._out)

    @property
    def error(self) -> float:
        row = len(self._a) // 2
        exact = self._a[row].double() @ self._b.double()
        return float((self._out[row].double() - exact).norm() / exact.norm())


def rounding_limit(dtype: torch.dtype, size: int) -> float:
    """How far rounding may put a product of `size` terms off, relative.

    A sum of K rounded terms, added one after another, is off by about sqrt(K)/6 units: every partial sum is rounded,
    by at most half a unit and in either direction. Three times that is allowed, and at least eight units for whoever
    adds in blocks and rounds once more. TF32, where somebody has allowed it for float32, is off by about 2**-12: seen.
    """
    return float(torch.finfo(dtype).eps) * max(8.0, size**0.5 / 2)
