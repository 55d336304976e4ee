"""Operators of a call, with FLOPs and bytes: a machine's rates predict their time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.flop_counter import flop_registry

from labkit.torch_private import TorchDispatchMode, tree_leaves

# They read only the indexed rows of their first tensor, or none of it.
LOOKUPS = frozenset({"embedding", "gather", "index", "index_select", "nll_loss_forward"})
ALLOCATIONS = ("empty", "new_empty")
# They compute and move nothing, as views do, without being declared as such.
FREE = frozenset(
    {"_unsafe_view", "_reshape_alias", "lift_fresh", "resize_", "set_", "promote_types"}
)
# Their target is not read; nor is an argument `out`.
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
        name = func.overloadpacket.__name__
        if func.namespace != "aten" or func.is_view or name in FREE or name.startswith(ALLOCATIONS):
            return result
        read, written = _read_and_written(func, args, kwargs)
        targets = {id(tensor) for tensor in written}
        inputs = _tensors((args, kwargs))
        outputs = [one for one in _tensors(result) if id(one) not in targets]
        moved = (
            [*inputs[1:], *outputs, *outputs] if name in LOOKUPS else [*read, *written, *outputs]
        )
        count = flop_registry.get(func.overloadpacket)
        flops = float(count(*args, **kwargs, out_val=result)) if count else 0.0
        n_bytes = float(sum(tensor.numel() * tensor.itemsize for tensor in moved))
        dtype = (
            str((inputs or outputs)[0].dtype).removeprefix("torch.") if inputs or outputs else ""
        )
        self.calls.append(OperatorCall(name, flops, n_bytes, dtype))
        return result


def _read_and_written(func: Any, args: Any, kwargs: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The argument tensors that an operator reads, and those that it writes into, by its schema."""
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
