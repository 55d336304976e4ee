"""Sharding: what data-parallel ranks would all hold alike, each holds a share of (ZeRO, arXiv:1910.02054).

``optimizer``    `ShardedOptimizer`, ZeRO-1: the optimizer's state, and the work of its step
``share``        a rank's share of the parameters, as that optimizer updates it
``gathering``    updated parameters for everybody, in flat buckets
``splitting``    may an optimizer's parameters be cut at any element, at their borders only, or not at all?
``reduce_scatter_ddp``    `ReduceScatterDDP`, with that optimizer ZeRO-2: gradients as well
``fsdp``         `FSDP`, ZeRO-3: parameters as well
``units``        which of a model's modules are gathered together, and what belongs to which
``building``     from modules to units
``unit``         a unit, and how far it is in a pass
``flat``         its parameters of one kind: whole and in shards
``schedule``     when units are gathered, given back and averaged
``gradients``    averaging them, in one order on all ranks
``saving``       parameters and an optimizer's state, whole
``norms``        clipping by a norm over all shards
``checks``       what the optimizer refuses, and what ranks compare
``partition``    which rank has which elements
``checkpoint``   the state of all shards in torch's own layout, and a shard of such a state
``implementations``    all of it, and torch's own, by name
"""

from labkit.parallel.sharding.fsdp import FSDP
from labkit.parallel.sharding.optimizer import ShardedOptimizer
from labkit.parallel.sharding.reduce_scatter_ddp import ReduceScatterDDP

__all__ = ["FSDP", "ReduceScatterDDP", "ShardedOptimizer"]
