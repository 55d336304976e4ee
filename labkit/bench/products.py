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
    flags, precisions = (cudnn.deterministic, cudnn.benchmark), [unit.fp32_precision for unit in _units()]
    cudnn.allow_tf32 = False  # the old name of the same: reading it raises if it contradicts the others
    cudnn.deterministic, cudnn.benchmark = True, False
    for unit in _units():
        unit.fp32_precision = IEEE
    try:
        yield
    finally:
        cudnn.allow_tf32 = "tf32" in precisions[1:]
        cudnn.deterministic, cudnn.benchmark = flags
        for unit, precision in zip(_units(), precisions, strict=True):
            unit.fp32_precision = precision


def _units() -> tuple[Any, ...]:
    return torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn
