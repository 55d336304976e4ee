"""Sharding: each data-parallel rank holds 1/p of the training state instead of a copy (ZeRO, arXiv:1910.02054).

``optimizer``  `ShardedOptimizer`, ZeRO-1: optimizer state, and the work of its step
``fsdp``       `FSDP`, ZeRO-3: gradients and parameters, too; ZeRO-2 if parameters stay whole
``gather``     when FSDP gathers, releases and averages: `UnitScheduler._run_unit` runs a unit with whole parameters
``unit``       parameters that are gathered together, whole and in shards, and their gradients
``partition``  how a model is cut into units
``rows``       `plan_gather` and `average_rows`: the messages
``sharded``    a rank's rows as DTensors, and in state dicts

`shard` builds them and torch's by name. Classes are imported on first use: torch's DTensor takes half a second.
"""

import inspect
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeGuard

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from labkit.parallel.data_parallel import BucketedDDP
from labkit.parallel.transport import AUTO

if TYPE_CHECKING:
    from labkit.parallel.sharding.fsdp import FSDP
    from labkit.parallel.sharding.optimizer import ShardedOptimizer

__all__ = ["FSDP", "ShardedOptimizer", "shard"]

_MODULES = {"FSDP": "fsdp", "ShardedOptimizer": "optimizer"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return _load(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _load(name: str) -> Any:
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)


OptimizerClass = type[Optimizer]
Wrap = Callable[[nn.Module, str], nn.Module]
MakeOptimizer = Callable[..., Optimizer]


def _torch_zero3(model: nn.Module, _: str) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from labkit.parallel.sharding.partition import find_units

    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    for unit in find_units(model, None):  # the model itself comes last
        if unit is model or any(parameter.dim() > 1 for parameter in unit.parameters()):  # norms belong to the model
            fully_shard(unit, mesh=mesh)
    return model


def _plain(model: nn.Module, optimizer: OptimizerClass, transport: str, **settings: Any) -> Optimizer:
    return optimizer(model.parameters(), **settings)


def _foreach(model: nn.Module, optimizer: OptimizerClass, transport: str, **settings: Any) -> Optimizer:
    # As ShardedOptimizer: operators of DTensors are called once for all parameters, which takes less time.
    from labkit.parallel.sharding.optimizer import may_use_foreach

    built = _plain(model, optimizer, transport, **settings)
    for group in filter(may_use_foreach, built.param_groups):
        group["foreach"] = True
    return built


def _sharded(model: nn.Module, optimizer: OptimizerClass, transport: str, **settings: Any) -> Optimizer:
    sharded: Optimizer = _load("ShardedOptimizer")(model.parameters(), optimizer, transport=transport, **settings)
    return sharded


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
    "zero2": (
        lambda model, transport: _load("FSDP")(model, transport=transport, reshard_after_backward=False),
        _foreach,
    ),
    "zero3": (lambda model, transport: _load("FSDP")(model, transport=transport), _plain),
    "torch_ddp": (_torch_ddp, _plain),
    "torch_zero1": (_torch_ddp, _torch_sharded),
    "torch_zero3": (_torch_zero3, _plain),
}
"""Functions that wrap the model, and that build the optimizer, by name. `register` adds a user's."""
TORCHS = tuple(name for name in IMPLEMENTATIONS if name.startswith("torch_"))
LABKITS = tuple(name for name in IMPLEMENTATIONS if name not in TORCHS)


def register(name: str, alternative: Callable[..., Any]) -> dict[str, tuple[Wrap, MakeOptimizer]]:
    """Add a user's sharded optimizer, or wrapper. ValueError for a name that is taken.

    A sharded optimizer is called with (parameters, optimizer class, **settings), is a `torch.optim.Optimizer`, and
    works with labkit's DDP. A wrapper is called with (model) and returns a module, whose parameters are optimized. Its
    `finish_gradient_synchronization()`, if any, is called after each backward pass. If it shards parameters other than
    by DTensors, its `gather_full_parameters()` returns whole ones by the model's names.
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
    parameters = inspect.signature(alternative).parameters.values()
    return sum(each.default is each.empty and each.kind < each.VAR_POSITIONAL for each in parameters) > 1


def shard(
    name: str, model: nn.Module, optimizer: OptimizerClass, *, transport: str = AUTO, **settings: Any
) -> tuple[nn.Module, Optimizer]:
    """Return the wrapped model and `optimizer(..., **settings)` of what this rank updates. A collective.

    `transport` of labkit's strategies. ValueError for a name that is not in `IMPLEMENTATIONS`.
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"expected one of {', '.join(IMPLEMENTATIONS)}, got {name!r}")
    wrap, make = IMPLEMENTATIONS[name]
    wrapped = wrap(model, transport)
    return wrapped, make(wrapped, optimizer, transport, **settings)


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return whole parameters of a wrapped model, by the bare model's names, on every rank. A collective."""
    if callable(gather := getattr(model, "gather_full_parameters", None)):
        return dict(gather())
    parameters = getattr(model, "module", model).named_parameters()
    detached = {name: value.detach() for name, value in parameters}  # torch 2.11 gathers no other without autograd
    return {name: value.full_tensor() if _is_distributed(value) else value for name, value in detached.items()}


def held_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, list[Tensor]]:
    """Return the tensors that this rank holds between steps: parameters, their gradients, the optimizer's state."""
    inner = [each for each in tree_leaves(vars(optimizer)) if isinstance(each, Optimizer)]  # of a sharded optimizer
    leaves = [leaf for each in (optimizer, *inner) for leaf in tree_leaves(list(each.state.values()))]
    values = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    parameters = list(model.parameters())
    gradients = [p.grad for p in parameters if p.grad is not None]
    return {"parameters": _local(parameters), "gradients": _local(gradients), "optimizer": _local(values)}


def n_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the tensors' storages, each counted once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def _local(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.to_local() if _is_distributed(tensor) else tensor for tensor in tensors]


def _is_distributed(tensor: Tensor) -> TypeGuard[Any]:
    return hasattr(tensor, "full_tensor")  # a DTensor, whose import takes half a second
