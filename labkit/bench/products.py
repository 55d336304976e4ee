"""How float32 products and convolutions are rounded on a GPU, while a gate looks at them.

torch's defaults are IEEE for products and TF32, 10 bits of 23, for convolutions (`labkit.machine.Machine` has them).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

IEEE = "ieee"
cudnn: Any = torch.backends.cudnn  # a module that types do not know all of


@contextmanager
def settled_products() -> Iterator[None]:
    """Inside, the same inputs give the same gradients on CUDA: IEEE float32, deterministic convolutions.

    For gates: what is compared is computed twice, and rounding alone can grow large on the way, as in batch norm over
    two values. On a CPU nothing changes.
    """
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.deterministic, cudnn.benchmark
    matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.deterministic, cudnn.benchmark = IEEE, IEEE, True, False
    try:
        yield
    finally:
        matmul.fp32_precision, cudnn.conv.fp32_precision, cudnn.deterministic, cudnn.benchmark = before
