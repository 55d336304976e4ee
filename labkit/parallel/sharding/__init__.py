"""Sharding: each data-parallel rank holds 1/p of the training state instead of a copy (ZeRO,
arXiv:1910.02054).

``optimizer``  `ShardedOptimizer`, ZeRO-1: optimizer state, and the work of its step
``fsdp``       `FSDP`, ZeRO-3: gradients and parameters, too; ZeRO-2 if parameters stay whole
``gather``     the messages: `plan_gather` completes tensors of which each rank has rows, `average_rows` averages
``scheduler``  when FSDP gathers, releases and averages: `UnitScheduler._run_unit` runs a unit with whole parameters
``unit``       parameters that are gathered together, whole and in shards, and their gradients
``partition``  how a model is cut into units
``sharded``    a rank's rows as DTensors, and in state dicts

Classes are imported on first use: torch's DTensor takes half a second.
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
    """Return whole parameters of a wrapped model, by the bare model's names, on every rank. A
    collective."""
    if callable(gather := getattr(model, "gather_full_parameters", None)):
        return dict(gather())
    parameters = getattr(model, "module", model).named_parameters()
    # torch 2.11 gathers no other without autograd
    detached = {name: value.detach() for name, value in parameters}
    return {
        name: value.full_tensor() if is_distributed(value) else value
        for name, value in detached.items()
    }


def is_distributed(tensor: Tensor) -> TypeGuard[Any]:
    """Return whether it is a DTensor, without importing that class."""
    return hasattr(tensor, "full_tensor")
