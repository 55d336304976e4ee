"""How many operators something runs and how many bytes they move: what overhead and bandwidth should make it cost."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class OperatorCount(TorchDispatchMode):
    """Counts PyTorch's operators that run while it is entered, those of a backward pass included.

    `moved_bytes` adds up the tensors that each is given and returns: whatever it does inside, it moves about these.
    Views move nothing and are not counted, nor are collectives.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0
        self.moved_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and not func.is_view:
            self.operators += 1
            tensors = [leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, Tensor)]
            self.moved_bytes += sum(tensor.numel() * tensor.itemsize for tensor in tensors)
        return result
