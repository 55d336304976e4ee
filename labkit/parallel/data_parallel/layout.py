"""How gradients lie in memory: collectives move them in that order, so it must be the same one on all ranks."""

import torch
from torch import Tensor


def gradient_in_layout(parameter: Tensor) -> Tensor:
    """The parameter's gradient (zeros if it has none), in the strides of the parameter: equal on all ranks."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    elif parameter.grad.stride() != strides_like(parameter):
        parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
    return parameter.grad


def flat_view(dense: Tensor) -> Tensor:
    """All elements of a dense tensor in the order in which they lie in memory, (n,): collectives want that."""
    return dense.as_strided((dense.numel(),), (1,), dense.storage_offset())


def strides_like(parameter: Tensor) -> tuple[int, ...]:
    """The strides of a tensor made like this one: its own where it is dense, else those of a contiguous one."""
    return torch.empty_like(parameter, device="meta").stride()
