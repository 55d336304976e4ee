"""Sharding: what data-parallel ranks would all hold alike, each holds a share of (ZeRO, arXiv:1910.02054).

``optimizer``    `ShardedOptimizer`, ZeRO-1: the optimizer's state, and the work of its step
``partition``    which rank has which elements
``splitting``    may an optimizer's parameters be cut at any element, at their borders only, or not at all?
``gathering``    updated parameters for everybody, in flat buckets
``checkpoint``   the state of all shards in torch's own layout, and a shard of such a state
"""

from labkit.parallel.sharding.optimizer import ShardedOptimizer

__all__ = ["ShardedOptimizer"]
