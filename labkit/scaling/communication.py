"""Collectives on nodes of GPUs: groups of ranks, the bandwidth of their rings, the time of a call.

Ranks are numbered tensor first, then context, data, pipeline (Megatron-LM's order), so that a group of n ranks a
stride apart has min(n, gpus_per_node / stride) of them in a node. A ring moves (n-1)/n of the bytes over each link in
n-1 steps (nccl-tests, PERFORMANCE.md).
"""

from dataclasses import dataclass

import numpy as np

from labkit.scaling.constants import Rows
from labkit.scaling.model import Numbers
from labkit.scaling.runs import Runs


@dataclass(frozen=True)
class Group:
    """One group of ranks per run: members, the nodes they span, bytes/s around their ring."""

    size: Numbers
    nodes: Numbers
    bytes_per_s: Numbers


def group(runs: Runs, constants: Rows, size: Numbers, stride: Numbers) -> Group:
    """Groups of ranks `stride` apart. All groups share a node's network; each has its members' links."""
    local = np.clip(runs.gpus_per_node / stride, 1, np.minimum(size, runs.gpus_per_node))
    nodes = np.ceil(size / local)
    inside = runs.link_gb_s * 1e9 * constants["link_efficiency"]
    across = network_bytes_per_s(runs, constants) * local / runs.gpus_per_node
    return Group(size, nodes, np.where(nodes > 1, np.minimum(inside, across), inside))


def network_bytes_per_s(runs: Runs, constants: Rows) -> Numbers:
    return runs.network_gbps / 8 * 1e9 * constants["network_efficiency"]


def half_ring_s(group: Group, constants: Rows, n_bytes: Numbers, calls: Numbers | float = 1.0) -> Numbers:
    """All-gather or reduce-scatter of n_bytes (whole tensor) in `calls` calls: n-1 steps, (n-1)/n of the bytes."""
    steps = group.size - 1
    inside = constants["nccl_call_s"] * (1 + constants["nccl_rank_share"] * group.size) / 2
    latency = np.where(group.nodes > 1, steps * constants["network_step_s"], inside)
    moved = n_bytes * steps / np.maximum(group.size, 1)
    return np.where(group.size > 1, calls * latency + moved / group.bytes_per_s, 0.0)


def all_reduce_s(group: Group, constants: Rows, n_bytes: Numbers, calls: Numbers | float = 1.0) -> Numbers:
    """Two half rings; across nodes, NCCL's tree needs 2 log2(nodes) steps if that is fewer."""
    inside = constants["nccl_call_s"] * (1 + constants["nccl_rank_share"] * group.size)
    rounds = np.minimum(2 * (group.size - 1), 2 * np.ceil(np.log2(np.maximum(group.nodes, 1))))
    latency = np.where(group.nodes > 1, inside + rounds * constants["network_step_s"], inside)
    moved = 2 * n_bytes * (group.size - 1) / np.maximum(group.size, 1)
    return np.where(group.size > 1, calls * latency + moved / group.bytes_per_s, 0.0)
