"""How many operators something runs and how many bytes they move: what overhead and bandwidth should make it cost."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class OperatorCount(TorchDispatchMode):
    """Counts PyTorch's operators that run while it is entered, those of a backward pass included.

    `moved_bytes` adds up the tensors that each is given and returns: whatever it does inside, it moves about these.
    Views move nothing and are not counted. Of torch.distributed's all-reduces, `collectives` is how many begin, and
    `collective_bytes` what they add up.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operators = 0
        self.moved_bytes = 0
        self.collectives = 0
        self.collective_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.namespace == "aten" and not func.is_view:
            self.operators += 1
            self.moved_bytes += _bytes_of((args, kwargs, result))
        elif func.namespace == "c10d" and "allreduce" in func.name():
            self.collectives += 1
            self.collective_bytes += _bytes_of((args, kwargs))
        return result


def _bytes_of(tree: Any) -> int:
    return sum(leaf.numel() * leaf.itemsize for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))
