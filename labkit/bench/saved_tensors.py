"""What autograd keeps from the forward pass for the backward pass, counted and not estimated."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

Result = TypeVar("Result")


@dataclass(frozen=True)
class SavedTensor:
    """One piece of memory that the backward pass will read."""

    shape: tuple[int, ...]
    """Of the first tensor that was saved in it; others may be views of the same memory."""
    dtype: str
    n_bytes: int
    address: int


def saved_for_backward(function: Callable[[], Result]) -> tuple[Result, list[SavedTensor]]:
    """Call `function` and list the distinct storages that autograd saved, inputs of the function among them.

    Works on every device, because it counts what is handed to autograd instead of watching an allocator. A
    storage that several operations save counts once. What Python keeps alive by a name of its own does not count.
    """
    by_address: dict[int, SavedTensor] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            dtype = str(tensor.dtype).removeprefix("torch.")
            saved = SavedTensor(tuple(tensor.shape), dtype, storage.nbytes(), storage.data_ptr())
            by_address.setdefault(saved.address, saved)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = function()
    return result, list(by_address.values())
