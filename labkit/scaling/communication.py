"""The communication of a step: seconds of its collectives and messages, by kind of parallelism.

Ranks are numbered tensor first, then context, data, pipeline (Megatron-LM's order), so that a group
of n ranks a stride apart has min(n, link_gpus / stride) of them in a domain of fast links, which is
a node or a rack of them.

Letters in formulas: T tokens in one micro-batch on one rank; h hidden width; n ranks of a group.
"""

import numpy as np

from labkit.scaling.models import Numbers
from labkit.scaling.runs import Runs

# Bytes of an activation, and of a parameter that is sent.
BF16 = 2


class Group:
    """One group of ranks per run, `stride` apart: its size, domains of fast links, and bytes/s."""

    def __init__(self, runs: Runs, size: Numbers, stride: Numbers | float) -> None:
        domain = np.maximum(runs.link_gpus, runs.gpus_per_node)
        local = np.clip(np.floor(domain / stride), 1, np.minimum(size, domain))
        inside = runs.link_gb_s * 1e9 * runs["link_efficiency"]
        # A measured ring keeps every link of a node busy, as that of all ranks does.
        node = np.where(
            runs.bus_gb_s > 0,
            runs.bus_gb_s * 1e9,
            runs.network_gbps / 8 * 1e9 * runs["network_efficiency"],
        )
        # Members inside a node share its network with the node's other groups.
        across = node * local / runs.gpus_per_node
        self.runs = runs
        self.size = size
        self.domains = np.ceil(size / local)
        self.bytes_per_s = np.where(self.domains > 1, np.minimum(inside, across), inside)

    def half_ring_s(self, n_bytes: Numbers, calls: Numbers | float = 1.0) -> Numbers:
        """Return seconds of an all-gather or reduce-scatter of n_bytes in `calls` calls.

        n_bytes is the whole tensor: n-1 steps, (n-1)/n of the bytes.
        """
        # In a ring over several nodes, every step waits for the slowest link (nccl-tests,
        # PERFORMANCE.md).
        outside = np.where(self.domains > 1, (self.size - 1) * self.runs["network_step_s"], 0.0)
        latency = self._call_s() / 2 + outside
        return self._seconds(1, n_bytes, calls * latency)

    def all_reduce_s(self, n_bytes: Numbers, calls: Numbers | float = 1.0) -> Numbers:
        """Return seconds of an all-reduce: the bytes of two half rings, the steps of a tree."""
        # Across nodes NCCL has a tree for short messages, of 2 log2(nodes) steps.
        rounds = 2 * np.ceil(np.log2(np.maximum(self.domains, 1)))
        latency = self._call_s() + rounds * self.runs["network_step_s"]
        return self._seconds(2, n_bytes, calls * latency)

    def _call_s(self) -> Numbers:
        """Return the latency of an all-reduce inside a domain; half a ring has half of it."""
        local_ranks = np.ceil(self.size / self.domains)
        return self.runs["nccl_call_s"] * (1 + self.runs["nccl_rank_share"] * local_ranks)

    def _seconds(self, half_rings: int, n_bytes: Numbers, latency: Numbers) -> Numbers:
        """Return seconds of latency and transfer; nothing for a lone rank."""
        moved = half_rings * n_bytes * (self.size - 1) / np.maximum(self.size, 1)
        return np.where(self.size > 1, latency + moved / self.bytes_per_s, 0.0)


def tensor_parallel_s(runs: Runs, forwards: Numbers) -> Numbers:
    """Return seconds of two all-reduces of T h per layer forward, and two backward.

    Source: arXiv:1909.08053. With sequence parallelism each is an all-gather and a reduce-scatter,
    and backward gathers the inputs of both matmuls again, since only a share of them is kept
    (arXiv:2205.05198, section 4.2.2).
    """
    ranks = Group(runs, runs.tp, 1)
    n_bytes = BF16 * runs.tokens * runs.hidden
    reduced = ranks.all_reduce_s(n_bytes) * 2 * (1 + forwards)
    halves = ranks.half_ring_s(n_bytes) * (4 * (1 + forwards) + 2)
    return np.where(runs.sequence_parallel > 0, halves, reduced)


def context_ring_s(runs: Runs) -> Numbers:
    """Return seconds in which keys and values go around a ring of cp ranks.

    Each block travels while attention computes with the one before (arXiv:2310.01889, section 3).
    """
    n_bytes = BF16 * 2 * runs.tokens * runs.kv_width / runs.tp * (runs.cp - 1)
    # Once forward, and backward again, with their gradients.
    return 3 * n_bytes / Group(runs, runs.cp, runs.tp).bytes_per_s


def parameter_gather_s(runs: Runs) -> Numbers:
    """Return seconds of a layer's gathers and scatters under zero3 and hsdp, per micro-batch."""
    ranks = Group(runs, runs.shard_ranks, runs.tp)
    once = ranks.half_ring_s(BF16 * runs.layer_parameters / runs.tp)
    # Parameters are gathered forward and backward, and gradients scattered.
    return np.where(np.isin(runs.shard, ("zero3", "hsdp")), 3 * once, 0.0)


def pipeline_transfer_s(runs: Runs) -> Numbers:
    """Return seconds of sending a micro-batch to the next stage and its gradients back.

    Each is T h per chunk of layers.
    """
    ranks = Group(runs, runs.pp, runs.gpus / runs.pp)
    seconds = BF16 * runs.tokens * runs.hidden / runs.tp / ranks.bytes_per_s
    seconds = seconds + np.where(ranks.domains > 1, runs["network_step_s"], 0.0)
    return np.where(runs.pp > 1, 2 * runs.vp * seconds, 0.0)


def rank_parameters(runs: Runs) -> Numbers:
    """Return parameters of a rank in the fullest stage."""
    layers = runs.stage_layers.max(axis=1) * runs.layer_parameters
    # A stage at an end has the embedding or the head.
    return (layers + runs.embedding_parameters) / runs.tp


def data_parallel_s(runs: Runs, stage_s: Numbers) -> Numbers:
    """Return exposed seconds of reducing gradients.

    A share of them may hide behind the last backward pass.
    """
    ranks = Group(runs, runs.dp * runs.cp, runs.tp)
    parameters = rank_parameters(runs)
    n_bytes = parameters * runs["gradient_bytes"]
    calls = np.ceil(n_bytes / runs["bucket_bytes"])
    # zero2 keeps only its own shard of the gradients, and so must reduce those of every
    # micro-batch, behind as many backward passes (arXiv:1910.02054, section 5.2).
    passes = np.where(runs.shard == "zero2", runs.micro_batches, 1.0)
    gathered = ranks.half_ring_s(BF16 * parameters, calls)
    sharded = passes * ranks.half_ring_s(n_bytes, calls) + gathered
    # hsdp reduces among the copies of a node's shards; inside a node it scatters layer by layer,
    # as zero3 does everywhere (`parameter_gather_s`).
    copies = Group(runs, runs.dp * runs.cp / runs.shard_ranks, runs.gpus_per_node)
    across = copies.all_reduce_s(n_bytes / np.maximum(runs.gpus_per_node / runs.tp, 1), calls)
    whole = ranks.all_reduce_s(n_bytes, calls)
    kinds = [runs.shard == kind for kind in ("none", "zero3", "hsdp")]
    seconds = np.select(kinds, [whole, np.zeros(len(runs)), across], sharded)
    # Backward is two thirds of a stage: a matmul has two gradients.
    return seconds - runs["dp_overlap"] * np.minimum(seconds, 2 / 3 * passes * stage_s)
