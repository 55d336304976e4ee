"""Collectives on nodes of GPUs, and pipelines: rings and the time of a call; layers per stage and the schedule.

Ranks are numbered tensor first, then context, data, pipeline (Megatron-LM's order), so that a group of n ranks a
stride apart has min(n, link_gpus / stride) of them in a domain of fast links, which is a node or a rack of them. A ring
moves (n-1)/n of the bytes over each link in n-1 steps (nccl-tests, PERFORMANCE.md).
"""

from dataclasses import dataclass

import numpy as np

from labkit.scaling.constants import Rows
from labkit.scaling.model import Numbers
from labkit.scaling.runs import Runs

GREEDY = ("nanotron",)
"""Frameworks that fill one stage after the other by cost. Others give every stage equally many layers."""


@dataclass(frozen=True)
class Group:
    """One group of ranks per run: members, the domains of fast links they span, bytes/s around their ring."""

    size: Numbers
    nodes: Numbers
    bytes_per_s: Numbers


def group(runs: Runs, constants: Rows, size: Numbers, stride: Numbers) -> Group:
    """Groups of ranks `stride` apart. All groups share a node's network; each has its members' links."""
    domain = np.maximum(runs.link_gpus, runs.gpus_per_node)
    local = np.clip(np.floor(domain / stride), 1, np.minimum(size, domain))
    nodes = np.ceil(size / local)
    inside = runs.link_gb_s * 1e9 * constants["link_efficiency"]
    across = network_bytes_per_s(runs, constants) * local / runs.gpus_per_node
    return Group(size, nodes, np.where(nodes > 1, np.minimum(inside, across), inside))


def network_bytes_per_s(runs: Runs, constants: Rows) -> Numbers:
    return runs.network_gbps / 8 * 1e9 * constants["network_efficiency"]


def half_ring_s(group: Group, constants: Rows, n_bytes: Numbers, calls: Numbers | float = 1.0) -> Numbers:
    """All-gather or reduce-scatter of n_bytes (whole tensor) in `calls` calls: n-1 steps, (n-1)/n of the bytes.

    In a ring over several nodes, every step waits for the slowest link.
    """
    outside = np.where(group.nodes > 1, (group.size - 1) * constants["network_step_s"], 0.0)
    latency = _call_s(constants, np.ceil(group.size / group.nodes)) / 2 + outside
    moved = n_bytes * (group.size - 1) / np.maximum(group.size, 1)
    return np.where(group.size > 1, calls * latency + moved / group.bytes_per_s, 0.0)


def all_reduce_s(group: Group, constants: Rows, n_bytes: Numbers, calls: Numbers | float = 1.0) -> Numbers:
    """Two half rings; across nodes, NCCL's tree needs 2 log2(nodes) steps."""
    rounds = 2 * np.ceil(np.log2(np.maximum(group.nodes, 1)))
    latency = _call_s(constants, group.size / group.nodes) + rounds * constants["network_step_s"]
    moved = 2 * n_bytes * (group.size - 1) / np.maximum(group.size, 1)
    return np.where(group.size > 1, calls * latency + moved / group.bytes_per_s, 0.0)


def _call_s(constants: Rows, ranks: Numbers) -> Numbers:
    """Latency of an all-reduce over this many ranks inside a node; half of it for half a ring."""
    return constants["nccl_call_s"] * (1 + constants["nccl_rank_share"] * ranks)


def layers_per_stage(runs: Runs) -> Numbers:
    """Layers of each stage, (n, stages); 0 beyond a row's pp.

    nanotron's `build_and_set_rank`: a layer costs 4h^2 + 3hf, the head Vh, the embedding nothing; a stage takes layers
    until the costs so far reach its share. Published memory peaks confirm it to four digits. Other frameworks split
    evenly, or count embedding and loss as layers (`layout.counts_ends_as_layers`).
    """
    stages = int(runs.pp.max())
    index = np.arange(stages)[None, :]
    pp, layers = runs.pp[:, None], runs.layers[:, None]
    cost = (4 * runs.hidden**2 + 3 * runs.hidden * runs.ffn)[:, None]
    total = layers * cost + (runs.vocab * runs.hidden)[:, None]
    filled = total * (index + 1) / pp / cost
    tie = np.where(runs.has("old_pipeline"), 1e-9, -1e-9)[:, None]  # reaching its share filled a stage only later
    greedy = np.minimum(np.ceil(filled + tie), layers)
    chunks, ends = pp * runs.vp[:, None], 2 * (index + 1) / pp
    with_ends = (pp > 1) & (layers % chunks != 0) & ((layers + 2) % chunks == 0)
    even = np.floor(layers * (index + 1) / pp + np.where(with_ends, ends, 0)) - with_ends
    through = np.where(np.isin(runs.framework, GREEDY)[:, None], greedy, even)
    through = np.where(index >= pp - 1, layers, through)
    return np.diff(through, axis=1, prepend=0.0)


def schedule_s(runs: Runs, stage_s: Numbers) -> tuple[Numbers, Numbers]:
    """Seconds of all micro-batches in the slowest stage, and of the bubble; `stage_s` per micro-batch, (n, stages).

    The step of 1F1B, and of GPipe, is m times the slowest stage plus once through all others; vp chunks per stage
    divide that by vp (arXiv:2104.04473, section 2.2).
    """
    slowest = stage_s.max(axis=1)
    return runs.micro_batches * slowest, (stage_s.sum(axis=1) - slowest) / runs.vp
