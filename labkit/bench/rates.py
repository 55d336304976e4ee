"""How far a right matrix product may be off."""

import torch


def rounding_limit(dtype: torch.dtype, size: int) -> float:
    """How far rounding may put a product of `size` terms off, relative.

    A sum of K rounded terms, added one after another, is off by about sqrt(K)/6 units: every partial sum is rounded,
    by at most half a unit and in either direction. Three times that is allowed, and at least eight units for whoever
    adds in blocks and rounds once more. TF32, where somebody has allowed it for float32, is off by about 2**-12: seen.
    """
    return float(torch.finfo(dtype).eps) * max(8.0, size**0.5 / 2)
