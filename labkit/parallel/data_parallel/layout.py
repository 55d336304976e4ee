"""How gradients lie in memory: collectives move them in that order, so it must be the same one on all ranks."""

import torch
from torch import Tensor


def gradient_in_layout(parameter: Tensor) -> Tensor:
    """The parameter's gradient (zeros if it has none), in the strides of the parameter: equal on all ranks."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    elif parameter.grad.stride() != strides_like(parameter) or parameter.grad.is_conj() or parameter.grad.is_neg():
        parameter.grad = torch.empty_like(parameter).copy_(parameter.grad)
    return parameter.grad


def gradient_to_write(parameter: Tensor) -> Tensor:
    """The same, in memory that is no other tensor's gradient, too.

    Where autograd gets a gradient as a view, it gives several leaves the same memory: the offset's in
    `x.flatten(1) + offset.view(1, -1)` and the input's are one. A part of a larger vector is left where it is: who has
    put it there wants it there.
    """
    gradient = gradient_in_layout(parameter)
    if shares_memory(gradient) and gradient.untyped_storage().nbytes() == gradient.nbytes:
        parameter.grad = gradient = gradient.clone()
    return gradient


def shares_memory(tensor: Tensor) -> bool:
    """Whether there are other tensors in the storage, those that autograd still has to read among them."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) > 2  # the tensor, and Python's storage


def check_gradient(name: str, gradient: Tensor | None) -> None:
    """ValueError for what cannot be averaged."""
    if gradient is None:
        raise ValueError(
            f"a hook took the gradient of {name} away before it was averaged over ranks: expected hooks that leave it "
            "there, and updates when backward() is over"
        )
    if gradient.is_sparse:
        raise ValueError(f"expected dense gradients, got a sparse one for {name}")
    if gradient.requires_grad:
        raise ValueError(
            f"expected backward() without create_graph, got a gradient with a graph for {name}: graphs are not "
            "averaged over ranks; for a gradient penalty take torch.autograd.grad(..., create_graph=True)"
        )


def flat_view(dense: Tensor) -> Tensor:
    """All elements of a dense tensor in the order in which they lie in memory, (n,): collectives want that."""
    return dense.as_strided((dense.numel(),), (1,), dense.storage_offset())


def strides_like(parameter: Tensor) -> tuple[int, ...]:
    """The strides of a tensor made like this one: its own where it is dense, else those of a contiguous one."""
    return torch.empty_like(parameter, device="meta").stride()
