"""Sharding: what data-parallel ranks would all hold alike, each holds a share of (ZeRO, arXiv:1910.02054).

``optimizer``    `ShardedOptimizer`, ZeRO-1: the optimizer's state, and the work of its step
``reduce_scatter_ddp``    `ReduceScatterDDP`, with that optimizer ZeRO-2: gradients as well
``fsdp``         `FSDP`, ZeRO-3: parameters as well
``units``        which of a model's modules are gathered together, and what belongs to which
``gather``       a unit: its parameters gathered, whole, and given back
``schedule``     when units are gathered and given back
``gradients``    a backward pass: gradients averaged in one order on all ranks
``line``         collectives in the background, the same ones on all ranks
``rows``         which rank has which rows, and how they travel
``state_dicts``  states whole, and in shards
``implementations``    all of it, and torch's, by name

The classes are imported when they are first used: torch's DTensor, on which they stand, takes half a second.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.parallel.sharding.fsdp import FSDP
    from labkit.parallel.sharding.optimizer import ShardedOptimizer
    from labkit.parallel.sharding.reduce_scatter_ddp import ReduceScatterDDP

__all__ = ["FSDP", "ReduceScatterDDP", "ShardedOptimizer"]

_MODULES = {"FSDP": "fsdp", "ReduceScatterDDP": "reduce_scatter_ddp", "ShardedOptimizer": "optimizer"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
