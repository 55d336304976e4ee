"""What this device reaches at best: FLOP/s of a large matrix product, bytes/s of a large copy.

The yardsticks for everything that is predicted: a data sheet's peak exists for few devices and is reached on none.
"""

import torch

from labkit.bench.clock import time_interleaved

# Products of this size keep the units busy and fit everywhere; larger ones gain a few percent at most.
MATMUL_SIZE = {"cpu": 1024, "cuda": 8192}
COPY_BYTES = {"cpu": 2**28, "cuda": 2**30}


def matmul_flops_per_s(
    device: str, dtype: torch.dtype, *, size: int | None = None, warmup: int = 3, repeats: int = 10
) -> list[float]:
    """FLOP/s of each of `repeats` products of two square matrices of `size` (2 * size^3 FLOPs each)."""
    size = size or MATMUL_SIZE[torch.device(device).type]
    a, b = torch.randn(2, size, size, device=device).to(dtype)
    out = torch.empty_like(a)
    samples = time_interleaved(
        {"matmul": lambda: torch.mm(a, b, out=out)}, warmup=warmup, repeats=repeats, device=device
    )
    return [2 * size**3 / seconds for seconds in samples["matmul"]]


def copy_bytes_per_s(device: str, *, n_bytes: int | None = None, warmup: int = 2, repeats: int = 10) -> list[float]:
    """Bytes/s of each of `repeats` copies of a buffer, read and written bytes together."""
    source = torch.zeros(n_bytes or COPY_BYTES[torch.device(device).type], dtype=torch.uint8, device=device)
    target = torch.ones_like(source)  # written once: otherwise the first copy would wait for pages
    samples = time_interleaved({"copy": lambda: target.copy_(source)}, warmup=warmup, repeats=repeats, device=device)
    return [2 * source.numel() / seconds for seconds in samples["copy"]]
