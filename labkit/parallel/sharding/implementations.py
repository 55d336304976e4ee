"""Strategies of data-parallel training, from whole copies to everything in shards: labkit's and torch's, by name.

Those in shards are imported where they are used: on each of several ranks, torch's DTensor takes half a second.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, TypeGuard

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from labkit.parallel.data_parallel import BucketedDDP
from labkit.parallel.sharding.units import find_units
from labkit.parallel.transport import AUTO

OptimizerClass = type[Optimizer]
Wrap = Callable[[nn.Module, str], nn.Module]
MakeOptimizer = Callable[..., Optimizer]


def _zero2(model: nn.Module, transport: str) -> nn.Module:
    from labkit.parallel.sharding.reduce_scatter_ddp import ReduceScatterDDP

    return ReduceScatterDDP(model, transport=transport)


def _zero3(model: nn.Module, transport: str) -> nn.Module:
    from labkit.parallel.sharding.fsdp import FSDP

    return FSDP(model, transport=transport)


def _torch_zero3(model: nn.Module, _: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    for unit in find_units(model, None):  # the model itself comes last
        if unit is model or any(parameter.dim() > 1 for parameter in unit.parameters()):  # norms belong to the model
            fully_shard(unit, mesh=mesh)
    return model


def _plain(model: nn.Module, optimizer: OptimizerClass, transport: str, **settings: Any) -> Optimizer:
    return optimizer(model.parameters(), **settings)


def _sharded(model: nn.Module, optimizer: OptimizerClass, transport: str, **settings: Any) -> Optimizer:
    from labkit.parallel.sharding.optimizer import ShardedOptimizer

    return ShardedOptimizer(model.parameters(), optimizer, transport=transport, **settings)


def _torch_sharded(model: nn.Module, optimizer: OptimizerClass, _: str, **settings: Any) -> Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(model.parameters(), optimizer, **settings)


def _ddp(model: nn.Module, transport: str) -> nn.Module:
    return BucketedDDP(model, all_reduce=transport)


def _torch_ddp(model: nn.Module, _: str) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


IMPLEMENTATIONS: dict[str, tuple[Wrap, MakeOptimizer]] = {
    "ddp": (_ddp, _plain),
    "zero1": (_ddp, _sharded),
    "zero2": (_zero2, _sharded),
    "zero3": (_zero3, _plain),
    "torch_ddp": (_torch_ddp, _plain),
    "torch_zero1": (_torch_ddp, _torch_sharded),
    "torch_zero3": (_torch_zero3, _plain),
}
"""A wrapper of the model, and what makes the optimizer of its parameters. `register` adds a user's."""
TORCHS = tuple(name for name in IMPLEMENTATIONS if name.startswith("torch_"))
LABKITS = tuple(name for name in IMPLEMENTATIONS if name not in TORCHS)


def register(name: str, alternative: Callable[..., Any]) -> dict[str, tuple[Wrap, MakeOptimizer]]:
    """Add a user's sharded optimizer, or wrapper. ValueError for a name that is taken.

    A sharded optimizer is called with (parameters, optimizer class, **settings), is a `torch.optim.Optimizer`, and
    works with labkit's DDP. A wrapper is called with (model) and returns a module; the optimizer is made of its
    parameters. If it has a method `finish_gradient_synchronization`, that is called after each backward pass; if it
    keeps shards of parameters, `gather_full_parameters()` returns the whole ones, by the model's names.
    """
    if name in (taken := (*LABKITS, *TORCHS)):
        raise ValueError(f"expected a name other than {', '.join(taken)}")

    def wrap(model: nn.Module, _: str) -> nn.Module:
        return _expect(nn.Module, "an nn.Module", alternative(model))

    def make(model: nn.Module, optimizer: OptimizerClass, _: str, **settings: Any) -> Optimizer:
        return _expect(Optimizer, "a torch.optim.Optimizer", alternative(model.parameters(), optimizer, **settings))

    IMPLEMENTATIONS[name] = (_ddp, make) if _takes_an_optimizer(alternative) else (wrap, _plain)
    return IMPLEMENTATIONS


def _expect(kind: type[Any], name: str, result: Any) -> Any:
    if not isinstance(result, kind):
        raise ValueError(f"expected {name}, got {type(result).__name__}")
    return result


def _takes_an_optimizer(alternative: Callable[..., Any]) -> bool:
    if isinstance(alternative, type):
        return issubclass(alternative, Optimizer)
    try:
        parameters = inspect.signature(alternative).parameters.values()
    except ValueError:  # some functions that are written in C
        return False
    return len([one for one in parameters if one.default is one.empty and one.kind < one.VAR_POSITIONAL]) > 1


def shard(
    name: str, model: nn.Module, optimizer: OptimizerClass, *, transport: str = AUTO, **settings: Any
) -> tuple[nn.Module, Optimizer]:
    """A model under its wrapper, and `optimizer(..., **settings)` of what this rank updates. A collective.

    `transport` is what labkit's strategies send by. ValueError for a name that is none of `IMPLEMENTATIONS`.
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"expected one of {', '.join(IMPLEMENTATIONS)}, got {name!r}")
    wrap, make = IMPLEMENTATIONS[name]
    wrapped = wrap(model, transport)
    return wrapped, make(wrapped, optimizer, transport, **settings)


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Whole parameters of a wrapped model, by the bare one's names, on every rank. A collective."""
    if callable(gather := getattr(model, "gather_full_parameters", None)):
        return dict(gather())
    parameters = getattr(model, "module", model).named_parameters()
    return {name: (value.full_tensor() if _is_distributed(value) else value).detach() for name, value in parameters}


def held_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, list[Tensor]]:
    """What this rank keeps from step to step: its parameters, their gradients, the optimizer's state."""
    inside = [one for one in tree_leaves(vars(optimizer)) if isinstance(one, Optimizer)]  # in a sharded one
    states = [(p, state) for one in (optimizer, *inside) for p, state in one.state.items()]
    parameters = list(model.parameters())
    updated = [*parameters, *(p for p, _ in states)]  # pieces of parameters have gradients, too
    gradients = [tensor.grad for tensor in dict.fromkeys(updated) if tensor.grad is not None]
    values = [value for _, state in states for value in tree_leaves(state) if isinstance(value, Tensor)]
    return {"parameters": _local(parameters), "gradients": _local(gradients), "optimizer": _local(values)}


def n_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of their storages, each once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def _local(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.to_local() if _is_distributed(tensor) else tensor for tensor in tensors]


def _is_distributed(tensor: Tensor) -> TypeGuard[Any]:
    """Whether it is a `torch.distributed.tensor.DTensor`."""
    return hasattr(tensor, "full_tensor")
