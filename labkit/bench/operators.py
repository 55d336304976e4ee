"""What something does, operator by operator: products and bytes, of which a machine's rates make a time."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

# They read of their first tensor only what their indices say, or nothing at all.
LOOKUPS = frozenset({"embedding", "gather", "index", "index_select", "nll_loss_forward"})
ALLOCATIONS = ("empty", "new_empty")


@dataclass(frozen=True)
class OperatorCall:
    """One call: FLOPs if it multiplies matrices, else 0; bytes of the tensors that it reads and writes."""

    name: str
    flops: float
    n_bytes: float
    dtype: str


class OperatorRecord(TorchDispatchMode):
    """Records PyTorch's operators that run while it is entered, those of a backward pass included, in `calls`.

    Whatever an operator does inside, it moves about the tensors that it is given and returns. Views move nothing and
    are left out, and so are allocations. Works on fake tensors, too, where nothing is computed. `all_reduces` are the
    bytes of each of torch.distributed's that begins.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[OperatorCall] = []
        self.all_reduces: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if func.namespace == "aten" and not func.is_view and not name.startswith(ALLOCATIONS):
            given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
            made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
            moved = [*given[1:], *made, *made] if name in LOOKUPS else [*given, *made]
            count = flop_registry.get(func.overloadpacket)
            flops = count(*args, **(kwargs or {}), out_val=result) if count else 0
            n_bytes = _bytes_of(moved)
            dtype = str((given or made)[0].dtype).removeprefix("torch.") if given or made else ""
            self.calls.append(OperatorCall(name, float(flops), float(n_bytes), dtype))
        elif func.namespace == "c10d" and "allreduce" in name:
            self.all_reduces.append(_bytes_of([leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]))
        return result


def _bytes_of(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


def operators_of(action: Callable[[], Any]) -> tuple[OperatorCall, ...]:
    """Those that a call of `action` runs."""
    with OperatorRecord() as record:
        action()
    return tuple(record.calls)
