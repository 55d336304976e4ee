"""How gradients lie in memory: collectives move them in that order, so it must be the same one on all ranks."""

import torch
from torch import Tensor


def gradient_in_layout(parameter: Tensor) -> Tensor:
    """Return the parameter's gradient, zeros if it has none, in the parameter's strides, equal on all ranks."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    elif parameter.grad.stride() != strides_like(parameter) or parameter.grad.is_conj() or parameter.grad.is_neg():
        parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
    return parameter.grad


def gradient_to_write(parameter: Tensor) -> Tensor:
    """Return `gradient_in_layout`, in memory that is no other tensor's. For when backward is over.

    Where autograd gets a gradient as a view, several leaves have the same memory: the gradients of `offset` and `x` in
    `x.flatten(1) + offset.view(1, -1)` are one. A part of a larger vector stays: somebody wants it there.
    """
    gradient = gradient_in_layout(parameter)
    # the tensor itself, and Python's object for its storage
    if count_references(gradient) > 2 and gradient.untyped_storage().nbytes() == gradient.nbytes:
        parameter.grad = gradient = gradient.clone()
    return gradient


def count_references(tensor: Tensor) -> int:
    """Count the tensors in the storage, autograd's among them, and the storage's Python object."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata)


def flat_view(dense: Tensor) -> Tensor:
    """Return all elements of a dense tensor in the order of memory, (n,): collectives take contiguous vectors."""
    return dense.as_strided((dense.numel(),), (1,), dense.storage_offset())


def strides_like(parameter: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor made like this one: its own if it is dense, else those of a contiguous one."""
    return torch.empty_like(parameter, device="meta").stride()
