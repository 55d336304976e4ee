"""Strategies of sharding by name, labkit's and torch's: a wrapper and an optimizer each."""

import inspect
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from labkit.parallel import data_parallel, sharding
from labkit.parallel.sharding.partition import find_units
from labkit.parallel.transport import AUTO

OptimizerClass = type[Optimizer]
Wrap = Callable[[nn.Module, str], nn.Module]
MakeOptimizer = Callable[..., Optimizer]


def _torch_zero3(model: nn.Module, _: str) -> nn.Module:
    # Seconds to import, which ranks that use another strategy need not spend.
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    for unit in find_units(model, None):  # the model itself comes last
        # A unit per norm would be a message per norm: their parameters belong to the model.
        if unit is model or any(parameter.dim() > 1 for parameter in unit.parameters()):
            fully_shard(unit, mesh=mesh)
    return model


def _plain(parameters: Any, optimizer: OptimizerClass, _: str, **settings: Any) -> Optimizer:
    return optimizer(parameters, **settings)


def _foreach(
    parameters: Any, optimizer: OptimizerClass, transport: str, **settings: Any
) -> Optimizer:
    # One call of each operator for all parameters, as ShardedOptimizer has it: otherwise ZeRO-2
    # would look slower than ZeRO-1 for its optimizer alone.
    from labkit.parallel.sharding.optimizer import may_use_foreach

    built = _plain(parameters, optimizer, transport, **settings)
    for group in filter(may_use_foreach, built.param_groups):
        group["foreach"] = True
    return built


def _sharded(
    parameters: Any, optimizer: OptimizerClass, transport: str, **settings: Any
) -> Optimizer:
    return sharding.ShardedOptimizer(parameters, optimizer, transport=transport, **settings)


def _torch_sharded(
    parameters: Any, optimizer: OptimizerClass, _: str, **settings: Any
) -> Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, optimizer, **settings)


def _ddp(model: nn.Module, transport: str) -> nn.Module:
    return data_parallel.BucketedDDP(model, all_reduce=transport)


def _zero2(model: nn.Module, transport: str) -> nn.Module:
    return sharding.FSDP(model, transport=transport, reshard_after_backward=False)


def _zero3(model: nn.Module, transport: str) -> nn.Module:
    return sharding.FSDP(model, transport=transport)


def _torch_ddp(model: nn.Module, _: str) -> nn.Module:
    return data_parallel.wrap(data_parallel.TORCH, model)


# Functions that wrap the model, and that build the optimizer, by name. `register` adds a user's.
IMPLEMENTATIONS: dict[str, tuple[Wrap, MakeOptimizer]] = {
    "ddp": (_ddp, _plain),
    "zero1": (_ddp, _sharded),
    "zero2": (_zero2, _foreach),
    "zero3": (_zero3, _plain),
    "torch_ddp": (_torch_ddp, _plain),
    "torch_zero1": (_torch_ddp, _torch_sharded),
    "torch_zero3": (_torch_zero3, _plain),
}
# Names of the strategies in sentences.
NAMES = {
    "ddp": "DDP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "FSDP (ZeRO-3)",
    "torch_ddp": "torch's DDP",
    "torch_zero1": "torch's ZeRO-1",
    "torch_zero3": "torch's FSDP",
}
TORCHS = tuple(name for name in IMPLEMENTATIONS if name.startswith("torch_"))
LABKITS = tuple(name for name in IMPLEMENTATIONS if name not in TORCHS)


def register(name: str, alternative: Callable[..., Any]) -> dict[str, tuple[Wrap, MakeOptimizer]]:
    """Add a user's sharded optimizer, or wrapper. ValueError for a name that labkit has.

    A class of optimizers, or a function with two required parameters, is a sharded optimizer. It is
    called with (parameters, optimizer class, **settings), is a `torch.optim.Optimizer`, and works
    with labkit's DDP. A wrapper is called with (model) and returns a module, whose parameters are
    optimized. Its `finish_gradient_synchronization()`, if any, is called after each backward pass.
    If it shards parameters other than by DTensors, its `gather_full_parameters()` returns whole
    ones by the model's names.
    """
    taken = (*LABKITS, *TORCHS)
    if name in taken:
        raise ValueError(f"expected a name other than {', '.join(taken)}")

    def wrap(model: nn.Module, _: str) -> nn.Module:
        return _expect(nn.Module, "an nn.Module", alternative(model))

    def make(parameters: Any, optimizer: OptimizerClass, _: str, **settings: Any) -> Optimizer:
        built = alternative(parameters, optimizer, **settings)
        return _expect(Optimizer, "a torch.optim.Optimizer", built)

    if takes_an_optimizer(alternative):
        IMPLEMENTATIONS[name] = (_ddp, make)
    else:
        IMPLEMENTATIONS[name] = (wrap, _plain)
    return IMPLEMENTATIONS


def _expect(kind: type[Any], name: str, result: Any) -> Any:
    if not isinstance(result, kind):
        raise ValueError(f"expected {name}, got {type(result).__name__}")
    return result


def takes_an_optimizer(alternative: Callable[..., Any]) -> bool:
    """Return whether a user's alternative is a sharded optimizer, not a wrapper."""
    if isinstance(alternative, type):
        return issubclass(alternative, Optimizer)
    # A wrapper needs the model alone; an optimizer needs parameters and a class.
    required = 0
    for parameter in inspect.signature(alternative).parameters.values():
        is_positional = parameter.kind < parameter.VAR_POSITIONAL
        required += is_positional and parameter.default is parameter.empty
    return required > 1


def shard(
    name: str,
    model: nn.Module,
    optimizer: OptimizerClass,
    *,
    transport: str = AUTO,
    parameters: Callable[[nn.Module], Any] = nn.Module.parameters,
    **settings: Any,
) -> tuple[nn.Module, Optimizer]:
    """Return the wrapped model and `optimizer(..., **settings)` of what this rank updates.

    A collective.

    `transport` of labkit's strategies. `parameters`: of the wrapped model, or groups of them, that
    the optimizer gets. ValueError for a name that is not in `IMPLEMENTATIONS`.
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"expected one of {', '.join(IMPLEMENTATIONS)}, got {name!r}")
    wrap, make = IMPLEMENTATIONS[name]
    wrapped = wrap(model, transport)
    return wrapped, make(parameters(wrapped), optimizer, transport, **settings)
