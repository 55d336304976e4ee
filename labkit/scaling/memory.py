"""Memory of every pipeline stage by part, from parameters to buffers.

Activations follow Korthikanti et al. 2022, "Reducing activation recomputation" (arXiv:2205.05198,
section 4), made general for grouped queries, gated feed-forward parts and tiled attention.
PyTorch's allocator reserves more, by its share of fragmentation.

Legend: s sequence, b sequences, h hidden, f ffn, a heads, t tensor-parallel ranks, V vocabulary;
bytes.
"""

from collections.abc import Mapping

import numpy as np

from labkit.scaling.models import Numbers
from labkit.scaling.runs import Runs

GIB = 2**30
MAX_HELD_SHARE = 0.2


def peak_gib(stages: Mapping[str, Numbers]) -> Numbers:
    """Return the peak of the fullest stage, (n,)."""
    return np.sum(list(stages.values()), axis=0).max(axis=1) / GIB


def layer_activations(runs: Runs, unfused: Numbers, fused: Numbers) -> tuple[Numbers, Numbers]:
    """Return bytes that a layer keeps of a micro-batch, and those it recomputes, (n,) each.

    Table 2 of the paper and its sum, s b h (10 + 24/t + 5as/(ht)): 10 are inputs of norms and of
    both column-parallel products and two dropout masks, which sequence parallelism divides by t; 24
    are query, key, value, attention output (8) and the feed-forward part (16); 5as are scores,
    absent with tiled attention and selective recomputation.
    """
    gated = np.where(fused > 0, 2.0, 4.0) * runs.ffn_gated
    inside = 4 * runs.query_width + 4 * runs.kv_width + (4 + gated) * runs.ffn
    # Selective recomputation drops the scores, and tiled attention never has them.
    keeps_scores = (unfused > 0) & (runs.recompute == "none")
    scores = np.where(keeps_scores, 5 * runs.heads * runs.seq_len / runs.cp, 0.0)
    around = np.where(fused > 0, 8, 10) * runs.hidden
    saved = around * runs.sequence_share + (inside + scores) / runs.tp
    # torchtitan's selective recomputation keeps every second matmul; its 17 rows say so of memory.
    saved = np.where(runs.has("op_recompute"), 0.5 * saved, saved)
    only_input = 2 * runs.hidden * runs.sequence_share
    again = np.where(runs.recompute == "full", runs.tokens * saved, 0.0)
    return runs.tokens * np.where(runs.recompute == "full", only_input, saved), again


def micro_batches_alive(runs: Runs) -> Numbers:
    """Return micro-batches whose activations a stage holds at once, (n, stages).

    min(m, pp - i) of stage i under 1F1B; interleaved, 1 + (pp - 1)/(pp vp) times as much
    (arXiv:2205.05198, section 4.2.3).
    """
    stages = int(runs.pp.max())
    index = np.arange(stages)[None, :]
    pp = runs.pp[:, None]
    vp = runs.vp[:, None]
    alive = np.minimum(pp - index, runs.micro_batches[:, None])
    interleaved = np.where(vp > 1, 1 + (pp - 1) / (pp * vp), 1.0)
    return np.where(index < pp, alive * interleaved, 0.0)


def stage_bytes(runs: Runs) -> dict[str, Numbers]:
    """Return reserved bytes of every stage by part, (n, stages); 0 beyond a run's pp."""
    layers = runs.stage_layers
    index = np.arange(layers.shape[1])[None, :]
    is_first = index == 0
    is_last = index == runs.pp[:, None] - 1
    exists = index < runs.pp[:, None]
    # A tied model of several stages has the embedding at both ends.
    has_head = is_last & ((runs.tied == 0) | (runs.pp > 1))[:, None]
    ends = is_first.astype(float) + has_head
    on_stage = layers * runs.layer_parameters[:, None] + ends * runs.embedding_parameters[:, None]
    parameters = on_stage / runs.tp[:, None]
    sharded = runs.shard_ranks[:, None]
    is_gathered = runs.gathers_parameters[:, None]
    # In bf16, 2 bytes each: all parameters, or two gathered layers, the current and the next.
    two_layers = 4 * (runs.layer_parameters / runs.tp)[:, None]
    is_scattered = is_gathered | (runs.shard == "zero2")[:, None]
    gradients = runs["gradient_bytes"][:, None] * parameters
    saved, again = layer_activations(runs, runs["unfused_attention"], runs["fused_operators"])
    activations = (saved * runs["activation_scale"])[:, None] * layers * micro_batches_alive(runs)
    columns = (runs.tokens * runs.vocab / runs.tp)[:, None]
    buffers = 2 * runs.tokens * runs.hidden + again
    parts = {
        "parameters": np.where(is_gathered, two_layers, 2 * parameters),
        "gradients": gradients / np.where(is_scattered, sharded, 1.0),
        # Master weights in float32 and AdamW's two states.
        "optimizer": 12 * parameters / sharded,
        "activations": activations + _held_gathers(runs)[:, None] * (layers > 0),
        "logits": np.where(is_last, runs["logit_bytes"][:, None] * columns, 0.0),
        "buffers": np.broadcast_to(buffers[:, None], layers.shape),
    }
    parts = {name: np.where(exists, value, 0.0) for name, value in parts.items()}
    total = np.sum(list(parts.values()), axis=0)
    share = np.where(runs.tp > 1, runs["stream_fragmentation"], runs["fragmentation"]) - 1
    parts["fragmentation"] = share[:, None] * total
    parts["runtime"] = np.where(exists, runs["runtime_bytes"][:, None], 0.0)
    return parts


def _held_gathers(runs: Runs) -> Numbers:
    """Return bytes of gathered activations that wait for the communication stream.

    They wait if the CPU runs ahead of a slow network. Seen with tensor parallelism across nodes and
    no pipeline; without the term, intervals of memory are too wide to answer for BigScience. The
    allocator takes them back when memory is short: they never are more than a share of it.
    """
    waits = (runs.pp == 1) & (runs.tp > runs.gpus_per_node)
    held = runs["held_gathers"] * runs.tokens * runs.hidden * runs.layers
    return np.where(waits, np.minimum(held, MAX_HELD_SHARE * runs.memory_gib * GIB), 0.0)
