"""The time of one optimizer step as a sum of named parts.

    step = m x slowest stage + (other stages) / vp + optimizer + exposed data-parallel communication

The CPU launches kernels ahead: a layer takes the longer of its device time and of the CPU time that launches it.
"""

import numpy as np

from labkit.scaling import compute
from labkit.scaling.constants import Rows
from labkit.scaling.model import Numbers
from labkit.scaling.parallelism import (
    Group,
    all_reduce_s,
    group,
    half_ring_s,
    layers_per_stage,
    network_bytes_per_s,
    schedule_s,
)
from labkit.scaling.runs import Runs

PARTS = (
    *("gemm_s", "attention_s", "elementwise_s", "launch_s", "tensor_parallel_s", "context_parallel_s"),
    *("gather_s", "head_s", "pipeline_transfer_s", "engine_s", "bubble_s", "optimizer_s", "data_parallel_s"),
    "straggler_s",
)
"""The parts of a step; of collectives, only the exposed time."""


def soft_maximum(*values: Numbers, softness: Numbers) -> Numbers:
    """(a^p + b^p)^(1/p): the maximum where one dominates, a little more where they are alike; never below it."""
    largest = np.maximum(np.maximum.reduce(values), 1e-30)
    return largest * sum((value / largest) ** softness for value in values) ** (1 / softness)


def breakdown(runs: Runs, constants: Rows) -> dict[str, Numbers]:
    """Seconds of each part of `PARTS`, and under `hidden_...` communication that compute hides; not in the sum."""
    layer = _layer_s(runs, constants)
    head, transfer = compute.head_s(runs, constants), _pipeline_transfer_s(runs, constants)
    counts = runs.cached(layers_per_stage)
    index = np.arange(counts.shape[1])[None, :]
    is_last, exists = index == runs.pp[:, None] - 1, index < runs.pp[:, None]
    whole = sum(seconds for name, seconds in layer.items() if name in PARTS)
    stage = counts * np.asarray(whole)[:, None] + is_last * head[:, None] + exists * transfer[:, None]
    slowest = np.arange(len(runs)), stage.argmax(axis=1)
    busy, bubble = schedule_s(runs, stage)
    parameters = rank_parameters(runs)
    reduction, hidden = _data_parallel_s(runs, constants, parameters, stage[slowest])
    updated = parameters / np.where(runs.shard == "none", 1.0, runs.dp * runs.cp)
    return {name: runs.micro_batches * counts[slowest] * seconds for name, seconds in layer.items()} | {
        "head_s": runs.micro_batches * head * is_last[slowest],
        "pipeline_transfer_s": runs.micro_batches * transfer,
        "engine_s": np.where(runs.has("old_pipeline"), slow_engine_s(runs, constants), 0.0),
        "bubble_s": bubble,
        "optimizer_s": compute.optimizer_s(runs, constants, updated),
        "data_parallel_s": reduction,
        "straggler_s": _straggler_s(runs, constants, busy + bubble),
        "hidden_data_parallel_s": hidden,
    }


def _layer_s(runs: Runs, constants: Rows) -> dict[str, Numbers]:
    """One layer and micro-batch, forward and backward, by part: they add up but for what is hidden."""
    forwards = compute.repeats(runs, constants)
    device = {
        "gemm_s": compute.layer_matmuls_s(runs, constants, forwards),
        "attention_s": compute.attention_s(runs, constants, forwards.attention),
        "elementwise_s": compute.elementwise_s(runs, constants, forwards.elementwise),
        "tensor_parallel_s": _tensor_parallel_s(runs, constants, forwards),
        "context_parallel_s": _context_parallel_s(runs, constants),
    }
    running = np.sum(list(device.values()), axis=0)
    launching = constants["launch_s"] * (1 + (forwards.gemm - 1) / 3)
    launching = launching + _engine_s(runs, constants)
    busy = np.where(runs.has("blocking_launch"), running + launching, np.maximum(running, launching))
    gathering = _parameter_gather_s(runs, constants)
    layer = soft_maximum(busy, gathering, softness=constants["overlap_softness"])
    return device | {
        "launch_s": busy - running,
        "gather_s": layer - busy,
        "hidden_gather_s": gathering - (layer - busy),
    }


def predict_step_s(runs: Runs, constants: Rows) -> Numbers:
    """Seconds of a step, (n,)."""
    return step_s(breakdown(runs, constants))


def step_s(parts: dict[str, Numbers]) -> Numbers:
    return np.sum([parts[name] for name in PARTS], axis=0)


def _tensor_parallel_s(runs: Runs, constants: Rows, forwards: compute.Repeats) -> Numbers:
    """Two all-reduces of b S h a layer forward and two backward (arXiv:1909.08053); half rings if sequence-parallel.

    With sequence parallelism each all-reduce is an all-gather and a reduce-scatter, and backward gathers the inputs
    of both products again, since only a share of them is kept (arXiv:2205.05198, section 4.2.2).
    """
    ranks = group(runs, constants, runs.tp, np.ones(len(runs)))
    n_bytes = compute.BF16 * runs.tokens * runs.hidden
    reduced = all_reduce_s(ranks, constants, n_bytes) * 2 * (1 + forwards.gemm)
    halves = half_ring_s(ranks, constants, n_bytes) * (4 * (1 + forwards.gemm) + 2)
    exposed = np.where(runs.has("async_tp"), constants["async_tp_exposed"], 1.0)
    return np.where(runs.sequence_parallel > 0, halves, reduced) * exposed * constants["tp_exposed"]


def _context_parallel_s(runs: Runs, constants: Rows) -> Numbers:
    """Keys and values go around a ring of cp ranks, forward once and backward with gradients (arXiv:2310.01889)."""
    ranks = group(runs, constants, runs.cp, runs.tp)
    n_bytes = compute.BF16 * 2 * runs.tokens * runs.kv_width / runs.tp * (runs.cp - 1)
    return np.where(runs.cp > 1, 3 * n_bytes / ranks.bytes_per_s * constants["cp_exposed"], 0.0)


def _sharded_group(runs: Runs, constants: Rows) -> Group:
    inside = np.maximum(runs.gpus_per_node / (runs.tp * runs.cp), 1)
    size = np.where(runs.shard == "hsdp", np.minimum(runs.dp, inside), runs.dp) * runs.cp
    size = np.minimum(size, constants["largest_shard_group"])
    return group(runs, constants, size, runs.tp)


def _parameter_gather_s(runs: Runs, constants: Rows) -> Numbers:
    """zero3: every layer gathers its parameters forward and backward and scatters its gradients, each micro-batch."""
    n_bytes = compute.BF16 * runs.layer_parameters / runs.tp
    once = half_ring_s(_sharded_group(runs, constants), constants, n_bytes)
    return np.where(np.isin(runs.shard, ("zero3", "hsdp")), 3 * once, 0.0)


def _pipeline_transfer_s(runs: Runs, constants: Rows) -> Numbers:
    """A micro-batch's activations to the next stage and gradients back, b S h, each chunk; over its share of links."""
    n_bytes = compute.BF16 * runs.tokens * runs.hidden / runs.tp
    stride = runs.tp * runs.cp * runs.dp
    across = stride * runs.pp > runs.gpus_per_node
    link = runs.link_gb_s * 1e9 * constants["link_efficiency"]
    network = network_bytes_per_s(runs, constants) / runs.gpus_per_node
    seconds = n_bytes / np.where(across, network, link) + np.where(across, constants["network_step_s"], 0.0)
    return np.where(runs.pp > 1, 2 * runs.vp * seconds * constants["p2p_exposed"], 0.0)


def _engine_s(runs: Runs, constants: Rows) -> Numbers:
    """What an engine adds to a layer of a pipeline with tensor parallelism on several nodes, per tensor rank."""
    return np.where((runs.pp > 1) & (runs.tp > 1) & (runs.nodes > 1), constants["engine_tp_s"] * runs.tp, 0.0)


def slow_engine_s(runs: Runs, constants: Rows) -> Numbers:
    """Seconds that nanotron's pipeline lost before a fix: per micro-batch and neighbor, and once through the stages."""
    exchanges = runs.micro_batches * np.minimum(runs.pp - 1, 2) + runs.pp - 2
    return np.where(runs.pp > 1, constants["old_pipeline_s"] * exchanges, 0.0)


def _straggler_s(runs: Runs, constants: Rows, busy_s: Numbers) -> Numbers:
    """All wait for the slowest node: of n whose times vary by a share s, it is late by about s sqrt(2 ln n)."""
    return constants["node_spread"] * np.sqrt(2 * np.log(np.maximum(runs.nodes, 1))) * busy_s


def rank_parameters(runs: Runs) -> Numbers:
    """Parameters that the fullest pipeline stage of a rank has; the head or the embedding is in one stage."""
    counts = runs.cached(layers_per_stage).max(axis=1)
    return (counts * runs.layer_parameters + runs.embedding_parameters) / runs.tp


def _data_parallel_s(runs: Runs, constants: Rows, parameters: Numbers, stage_s: Numbers) -> tuple[Numbers, Numbers]:
    """Exposed and hidden seconds of reducing gradients; a share of it may hide behind the last backward pass.

    zero2 keeps only its own shard of the gradients, and so must reduce those of every micro-batch, behind as many
    backward passes (arXiv:1910.02054, section 5.2).
    """
    ranks = group(runs, constants, runs.dp * runs.cp, runs.tp)
    n_bytes = parameters * constants["gradient_bytes"]
    calls = np.ceil(
        n_bytes / np.where(runs.shard == "none", constants["bucket_bytes"], constants["shard_bucket_bytes"])
    )
    whole = all_reduce_s(ranks, constants, n_bytes, calls)
    passes = np.where(runs.shard == "zero2", runs.micro_batches, 1.0)
    sharded = passes * half_ring_s(ranks, constants, n_bytes, calls) + half_ring_s(
        ranks, constants, compute.BF16 * parameters, calls
    )
    copies = group(runs, constants, runs.dp * runs.cp / _sharded_group(runs, constants).size, runs.gpus_per_node)
    across = all_reduce_s(copies, constants, n_bytes / np.maximum(runs.gpus_per_node / runs.tp, 1), calls)
    seconds = np.select(
        [runs.shard == "none", runs.shard == "zero3", runs.shard == "hsdp"],
        [whole, np.zeros(len(runs)), across],
        sharded,
    )
    hidden = constants["dp_overlap"] * np.minimum(seconds, 2 / 3 * passes * stage_s)
    return seconds - hidden, hidden
