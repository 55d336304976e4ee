"""Ways to train data-parallel, from whole copies to everything in shards, under one call: labkit's and torch's.

Torch's sharding is imported by those who use it: on each of several ranks that takes a second.
"""

import inspect
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeGuard

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from labkit.parallel.data_parallel import BucketedDDP
from labkit.parallel.sharding.fsdp import FSDP
from labkit.parallel.sharding.optimizer import ShardedOptimizer
from labkit.parallel.sharding.reduce_scatter_ddp import ReduceScatterDDP
from labkit.parallel.sharding.units import find_units
from labkit.parallel.transport import AUTO

OptimizerClass = type[Optimizer]
Made = tuple[nn.Module, Optimizer]


def _ddp(model: nn.Module, optimizer: OptimizerClass, transport: str, **settings: Any) -> Made:
    wrapped = BucketedDDP(model, all_reduce=transport)
    return wrapped, optimizer(wrapped.parameters(), **settings)


def _zero1(model: nn.Module, optimizer: OptimizerClass, transport: str, **settings: Any) -> Made:
    wrapped = BucketedDDP(model, all_reduce=transport)
    return wrapped, ShardedOptimizer(wrapped.parameters(), optimizer, transport=transport, **settings)


def _zero2(model: nn.Module, optimizer: OptimizerClass, transport: str, **settings: Any) -> Made:
    wrapped = ReduceScatterDDP(model, all_reduce=transport)
    sharded = ShardedOptimizer(wrapped.parameters(), optimizer, wrapper=wrapped, transport=transport, **settings)
    return wrapped, sharded


def _zero3(model: nn.Module, optimizer: OptimizerClass, transport: str, **settings: Any) -> Made:
    wrapped = FSDP(model, transport=transport)
    return wrapped, optimizer(wrapped.parameters(), **settings)


def _torch_ddp(model: nn.Module, optimizer: OptimizerClass, _: str, **settings: Any) -> Made:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, optimizer(wrapped.parameters(), **settings)


def _torch_zero1(model: nn.Module, optimizer: OptimizerClass, _: str, **settings: Any) -> Made:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), optimizer, **settings)


def _torch_zero3(model: nn.Module, optimizer: OptimizerClass, _: str, **settings: Any) -> Made:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    device = next(model.parameters()).device.type
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for unit in find_units(model, None):  # the model itself comes last
        if unit is model or any(parameter.dim() > 1 for parameter in unit.parameters()):  # norms belong to the model
            fully_shard(unit, mesh=mesh)
    return model, optimizer(model.parameters(), **settings)


IMPLEMENTATIONS: dict[str, Callable[..., Made]] = {
    "ddp": _ddp,
    "zero1": _zero1,
    "zero2": _zero2,
    "zero3": _zero3,
    "torch_ddp": _torch_ddp,
    "torch_zero1": _torch_zero1,
    "torch_zero3": _torch_zero3,
}
"""labkit's by what they share out; torch's DDP, that with its sharded optimizer, and fully_shard. A reader may
add to it (`register`)."""
TORCHS = tuple(name for name in IMPLEMENTATIONS if name.startswith("torch_"))
LABKITS = tuple(name for name in IMPLEMENTATIONS if name not in TORCHS)


def register(name: str, alternative: Callable[..., Any]) -> dict[str, Callable[..., Made]]:
    """Add a reader's sharded optimizer, or wrapper. ValueError for a name that is taken.

    A sharded optimizer is called with (parameters, optimizer class, **settings), is a `torch.optim.Optimizer`, and
    works beside labkit's DDP. A wrapper is called with (model) and returns a module; the optimizer is made of its
    parameters. If it has a method `finish_gradient_synchronization`, that is called after each backward pass; if it
    keeps shards of parameters, `gather_full_parameters()` returns the whole ones, by the model's names.
    """
    if name in (taken := (*LABKITS, *TORCHS)):
        raise ValueError(f"expected a name other than {', '.join(taken)}")
    IMPLEMENTATIONS[name] = partial(_own_optimizer if _takes_an_optimizer(alternative) else _own_wrapper, alternative)
    return IMPLEMENTATIONS


def _takes_an_optimizer(alternative: Callable[..., Any]) -> bool:
    if isinstance(alternative, type):
        return issubclass(alternative, Optimizer)
    try:
        parameters = inspect.signature(alternative).parameters.values()
    except ValueError:  # some of those that are written in C
        return False
    needed = [one for one in parameters if one.default is one.empty and one.kind < one.VAR_POSITIONAL]
    return len(needed) > 1


def _own_optimizer(
    make: Callable[..., Any], model: nn.Module, optimizer: OptimizerClass, transport: str, **settings: Any
) -> Made:
    wrapped = BucketedDDP(model, all_reduce=transport)
    sharded = make(wrapped.parameters(), optimizer, **settings)
    if not isinstance(sharded, Optimizer):
        raise ValueError(f"expected a torch.optim.Optimizer, got {type(sharded).__name__}")
    return wrapped, sharded


def _own_wrapper(
    wrap: Callable[..., Any], model: nn.Module, optimizer: OptimizerClass, _: str, **settings: Any
) -> Made:
    wrapped = wrap(model)
    if not isinstance(wrapped, nn.Module):
        raise ValueError(f"expected an nn.Module, got {type(wrapped).__name__}")
    return wrapped, optimizer(wrapped.parameters(), **settings)


def shard(name: str, model: nn.Module, optimizer: OptimizerClass, *, transport: str = AUTO, **settings: Any) -> Made:
    """A model under its wrapper, and `optimizer(..., **settings)` of what this rank updates. A collective.

    `transport` is what labkit's ways send by. ValueError for a name that is none of `IMPLEMENTATIONS`.
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"expected one of {', '.join(IMPLEMENTATIONS)}, got {name!r}")
    return IMPLEMENTATIONS[name](model, optimizer, transport, **settings)


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Whole parameters of a wrapped model, by the bare one's names, on every rank. A collective."""
    if callable(gather := getattr(model, "gather_full_parameters", None)):
        return dict(gather())
    bare = getattr(model, "module", model)
    return {
        name: (value.full_tensor() if _is_distributed(value) else value).detach()
        for name, value in bare.named_parameters()
    }


def held_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, list[Tensor]]:
    """What this rank keeps from step to step: its parameters, their gradients, the optimizer's state."""
    inside = [one for one in tree_leaves(vars(optimizer)) if isinstance(one, Optimizer)]  # as torch's sharded one has
    states = [(of, state) for one in (optimizer, *inside) for of, state in one.state.items()]
    parameters = list(model.parameters())
    updated = [*parameters, *(of for of, _ in states)]  # pieces of parameters have gradients of their own
    gradients = [tensor.grad for tensor in dict.fromkeys(updated) if tensor.grad is not None]
    values = [value for _, state in states for value in tree_leaves(state) if isinstance(value, Tensor)]
    return {"parameters": _local(parameters), "gradients": _local(gradients), "optimizer": _local(values)}


def n_bytes(tensors: Iterable[Tensor]) -> int:
    """Of their storages, each once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def _local(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.to_local() if _is_distributed(tensor) else tensor for tensor in tensors]


def _is_distributed(tensor: Tensor) -> TypeGuard[Any]:
    """Whether it is a `torch.distributed.tensor.DTensor`."""
    return hasattr(tensor, "full_tensor")
