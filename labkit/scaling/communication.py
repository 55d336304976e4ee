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
        """Return seconds of an all-gather or reduce-scatter; n_bytes is the whole tensor."""
        # In a ring over several nodes, every step waits for the slowest link (nccl-tests,
        # PERFORMANCE.md).
        steps = np.where(self.domains > 1, self.size - 1, 0.0)
        return self._seconds(1, n_bytes, calls, steps)

    def all_reduce_s(self, n_bytes: Numbers, calls: Numbers | float = 1.0) -> Numbers:
        """Return seconds of an all-reduce: the bytes of two half rings, the steps of a tree."""
        # Across nodes NCCL has a tree for short messages, of 2 log2(nodes) steps.
        steps = 2 * np.ceil(np.log2(np.maximum(self.domains, 1)))
        return self._seconds(2, n_bytes, calls, steps)

    def _seconds(
        self, half_rings: int, n_bytes: Numbers, calls: Numbers | float, steps: Numbers
    ) -> Numbers:
        """Return seconds of latency and transfer; nothing for a lone rank."""
        local_ranks = np.ceil(self.size / self.domains)
        call_s = self.runs["nccl_call_s"] * (1 + self.runs["nccl_rank_share"] * local_ranks)
        latency = half_rings / 2 * call_s + steps * self.runs["network_step_s"]
        moved = half_rings * n_bytes * (self.size - 1) / np.maximum(self.size, 1)
        return np.where(self.size > 1, calls * latency + moved / self.bytes_per_s, 0.0)


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
    """Return seconds in which keys and values go around a ring (arXiv:2310.01889, section 3)."""
    n_bytes = BF16 * 2 * runs.tokens * runs.kv_width / runs.tp * (runs.cp - 1)
    # Once forward, and backward again, with their gradients.
    return 3 * n_bytes / Group(runs, runs.cp, runs.tp).bytes_per_s


def parameter_gather_s(runs: Runs) -> Numbers:
    """Return seconds of a layer's gathers and scatters, per micro-batch."""
    ranks = Group(runs, runs.shard_ranks, runs.tp)
    once = ranks.half_ring_s(BF16 * runs.layer_parameters / runs.tp)
    # Parameters are gathered forward and backward, and gradients scattered.
    return np.where(runs.gathers_parameters, 3 * once, 0.0)


def pipeline_transfer_s(runs: Runs) -> Numbers:
    """Return seconds of sending a micro-batch's T h per chunk on, and its gradients back."""
    ranks = Group(runs, runs.pp, runs.gpus / runs.pp)
    seconds = BF16 * runs.tokens * runs.hidden / runs.tp / ranks.bytes_per_s
    return np.where(runs.pp > 1, 2 * runs.vp * seconds, 0.0)


def rank_parameters(runs: Runs) -> Numbers:
    """Return parameters of a rank in the fullest stage."""
    layers = runs.stage_layers.max(axis=1) * runs.layer_parameters
    # A stage at an end has the embedding or the head.
    return (layers + runs.embedding_parameters) / runs.tp


def data_parallel_s(runs: Runs, stage_s: Numbers) -> Numbers:
    """Return seconds of reducing gradients; some hide behind the last backward (zero2: each)."""
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
