"""What every all-reduce does before its first message and after its last: checks, a vector to work on, pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

import torch
import torch.distributed as dist

from labkit.parallel.transport.choice import find_transport
from labkit.parallel.transport.contract import Transport

FLOAT_TYPES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
OPS = ("mean", "sum")
DENSE = torch.strided


class Reduction:
    """The tensor as a vector the transport can move, the transport, and what to divide the sum by.

    The vector is the tensor's own memory if that is contiguous and where the transport works; otherwise a copy, copied
    back at the end. Autograd sees nothing of it.
    """

    # A class, not a generator: at 4 KB every 10 us of Python count, and code that runs once a call is never warm.
    __slots__ = ("copy_to", "divisor", "transport", "vector")

    def __init__(
        self, tensor: torch.Tensor, group: dist.ProcessGroup | None, op: str, transport: str | Transport
    ) -> None:
        if op not in OPS or tensor.dtype not in FLOAT_TYPES or tensor.layout is not DENSE:
            _refuse(tensor, op)
        if tensor.is_inference() and not torch.is_inference_mode_enabled():
            raise ValueError("expected a tensor made outside of torch.inference_mode, or a call inside of it")
        self.transport = find_transport(group, tensor.device, transport)
        if tensor.requires_grad:
            tensor = tensor.detach()
        self.copy_to: torch.Tensor | None = None
        if tensor.is_contiguous() and tensor.device == self.transport.device:
            self.vector = tensor if tensor.dim() == 1 else tensor.view(-1)
        else:
            if not tensor.is_contiguous():
                _check_no_overlap(tensor)
            self.copy_to = tensor
            self.vector = tensor.to(self.transport.device).contiguous().view(-1)
        self.divisor = self.transport.world_size if op == "mean" else 1
        if self.divisor > 1 and tensor.dtype == torch.float16:
            self.vector.div_(self.divisor)
            self.divisor = 1

    def __enter__(self) -> tuple[torch.Tensor, Transport, int]:
        return self.vector, self.transport, self.divisor

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if kind is None and self.copy_to is not None:
            self.copy_to.copy_(self.vector.view(self.copy_to.shape))


def _refuse(tensor: torch.Tensor, op: str) -> NoReturn:
    if op not in OPS:
        raise ValueError(f'op must be "mean" or "sum", got {op!r}')
    names = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOAT_TYPES)
    raise ValueError(f"tensor must be dense, of one of the types {names}; got {tensor.dtype}, {tensor.layout}")


def _check_no_overlap(tensor: torch.Tensor) -> None:
    if any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        raise ValueError("several elements of tensor share memory, as after expand(); clone() it first")


def cut(chunks: Sequence[torch.Tensor], via: Transport) -> list[tuple[torch.Tensor, ...]]:
    """Each chunk in as many pieces as the longest, the first, needs."""
    number = -(-chunks[0].nbytes // via.piece_bytes)
    return [chunk.tensor_split(number) if number > 1 else (chunk,) for chunk in chunks]
