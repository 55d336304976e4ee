"""Sharding: a data-parallel rank holds 1/p of the training state (ZeRO, arXiv:1910.02054).

``optimizer``  `ShardedOptimizer`, ZeRO-1: optimizer state, and the work of its step
``fsdp``       `FSDP`, ZeRO-3: gradients and parameters, too; ZeRO-2 if parameters stay in memory
``state``      when FSDP communicates: hooks of modules and autograd, in the order of a step
``agreement``  what ranks compare when a pass begins or ends
``hooks``      what it puts into autograd's graph
``unit``       parameters that are communicated together: unshard, reshard, post_backward
``parameter``  one of them: sharded, unsharded, and their gradients
``partition``  which parameters belong to which unit
``penalty``    losses that are computed from shards
``sharded``    a rank's rows as DTensors, and in state dicts
``gather``     the messages: all-gather of rows, reduce-scatter of gradients

Calls go down this list, and never up. Classes are imported on first use: torch's DTensor takes half
a second.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeGuard

from torch import Tensor, nn

if TYPE_CHECKING:
    from labkit.parallel.sharding.fsdp import FSDP
    from labkit.parallel.sharding.optimizer import ShardedOptimizer

__all__ = ["FSDP", "ShardedOptimizer", "whole_parameters"]

_MODULES = {"FSDP": "fsdp", "ShardedOptimizer": "optimizer"}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Return a wrapped model's whole parameters by the bare model's names. A collective.

    A wrapper of the user's may have a method `gather_full_parameters` for it.
    """
    gather = getattr(model, "gather_full_parameters", None)
    if callable(gather):
        return dict(gather())
    parameters = getattr(model, "module", model).named_parameters()
    # torch 2.11 gathers no parameter that autograd would follow.
    detached = {name: value.detach() for name, value in parameters}
    return {
        name: value.full_tensor() if is_distributed(value) else value
        for name, value in detached.items()
    }


def is_distributed(tensor: Tensor) -> TypeGuard[Any]:
    """Return whether it is a DTensor, without importing that class."""
    return hasattr(tensor, "full_tensor")
