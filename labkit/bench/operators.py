"""Operators of a call, with FLOPs and bytes: a machine's rates predict their time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from labkit.torch_private import TorchDispatchMode, tree_leaves

# Of their first tensor, these read as many elements as they return.
LOOKUPS = frozenset({"embedding", "gather", "index", "index_select", "nll_loss_forward"})
ALLOCATIONS = ("empty", "new_empty")
# These compute and move nothing, as views do, without being declared as such.
FREE = frozenset(
    {"_unsafe_view", "_reshape_alias", "lift_fresh", "resize_", "set_", "promote_types"}
)
# The target of these is not read; nor is an argument `out`.
OVERWRITES = frozenset(
    {"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "exponential_", "bernoulli_"}
)


@dataclass(frozen=True)
class OperatorCall:
    """One call: FLOPs of a matmul, else 0; bytes of the tensors that it reads and writes."""

    name: str
    flops: float
    n_bytes: float
    dtype: str


def record_operators(action: Callable[[], Any]) -> tuple[OperatorCall, ...]:
    """Call `action` and list its operators, those of a backward pass included.

    An operator moves the tensors that it reads, that its schema says it writes into, and that it
    creates. Views and allocations move nothing and are left out. Works on fake tensors, too.
    """
    with _OperatorRecord() as record:
        action()
    return tuple(record.calls)


class _OperatorRecord(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[OperatorCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not _moves_nothing(func):
            self.calls.append(_describe_call(func, args, kwargs, result))
        return result


def _moves_nothing(func: Any) -> bool:
    name = func.overloadpacket.__name__
    return func.namespace != "aten" or func.is_view or name in FREE or name.startswith(ALLOCATIONS)


def _describe_call(func: Any, args: Any, kwargs: Any, result: Any) -> OperatorCall:
    moved = _moved_tensors(func, args, kwargs, result)
    n_bytes = float(sum(tensor.numel() * tensor.itemsize for tensor in moved))
    count = flop_registry.get(func.overloadpacket)
    flops = float(count(*args, **kwargs, out_val=result)) if count else 0.0
    tensors = _tensors((args, kwargs, result))
    dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
    return OperatorCall(func.overloadpacket.__name__, flops, n_bytes, dtype)


def _moved_tensors(func: Any, args: Any, kwargs: Any, result: Any) -> list[Tensor]:
    """Return the tensors that a call reads or writes, each as often as it does."""
    read, written = _read_and_written(func, args, kwargs)
    targets = {id(tensor) for tensor in written}
    # An operator in place returns its target.
    outputs = [tensor for tensor in _tensors(result) if id(tensor) not in targets]
    if func.overloadpacket.__name__ in LOOKUPS:
        # Of the table it reads as many elements as it returns.
        indices = _tensors((args, kwargs))[1:]
        return [*indices, *outputs, *outputs]
    return [*read, *written, *outputs]


def _read_and_written(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """Return the argument tensors that an operator's schema says it reads, and writes into."""
    overwrites = func.overloadpacket.__name__.removeprefix("_foreach_") in OVERWRITES
    read = []
    written = []
    for place, argument in enumerate(func._schema.arguments):
        tensors = _tensors(args[place] if place < len(args) else kwargs.get(argument.name))
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        if is_written:
            written += tensors
        if not is_written or not (argument.is_out or overwrites):
            read += tensors
    return read, written


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
