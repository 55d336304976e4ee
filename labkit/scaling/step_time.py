"""The time of one optimizer step as a sum of named parts.

    step = m x slowest stage + (other stages) / vp + optimizer
         + exposed data-parallel communication
         + what nanotron's pipeline lost before a fix

Letters in formulas: m micro-batches; T tokens and b sequences in one micro-batch on one rank; S
tokens in a sequence; h hidden width; q width of all query heads; V vocabulary; t tensor-parallel
ranks.
"""

import numpy as np

from labkit.scaling.communication import (
    BF16,
    context_ring_s,
    data_parallel_s,
    parameter_gather_s,
    pipeline_transfer_s,
    rank_parameters,
    tensor_parallel_s,
)
from labkit.scaling.models import Numbers
from labkit.scaling.runs import Runs


def breakdown(runs: Runs) -> dict[str, Numbers]:
    """Return seconds of each part of the step, in sum the step; of collectives, exposed time."""
    layer = _layer_s(runs)
    head = _head_s(runs)
    transfer = pipeline_transfer_s(runs)
    counts = runs.stage_layers
    index = np.arange(counts.shape[1])[None, :]
    is_last = index == runs.pp[:, None] - 1
    exists = index < runs.pp[:, None]
    # Seconds of every stage, (n, stages): its layers, the head in the last one, its messages.
    stage = (
        counts * np.sum(list(layer.values()), axis=0)[:, None]
        + is_last * head[:, None]
        + exists * transfer[:, None]
    )
    # The slowest stage of each run sets the pace: its layers and head count m times.
    slowest = np.arange(len(runs)), stage.argmax(axis=1)
    m = runs.micro_batches
    parts = {name: m * counts[slowest] * seconds for name, seconds in layer.items()}
    _, bubble = schedule_s(runs, stage)
    updated = rank_parameters(runs) / runs.shard_ranks
    # What nanotron's pipeline lost before a fix: per micro-batch and neighbor, and once through the
    # stages.
    is_old = runs.has("old_pipeline") & (runs.pp > 1)
    exchanges = m * np.minimum(runs.pp - 1, 2) + runs.pp - 2
    engine = np.where(is_old, runs["old_pipeline_s"] * exchanges, 0.0)
    return parts | {
        "output head": m * head * is_last[slowest],
        "pipeline": bubble + m * transfer + engine,
        "optimizer": updated * runs["optimizer_traffic"] / _memory_bytes_per_s(runs),
        "gradient reduction": data_parallel_s(runs, stage[slowest]),
    }


def predict_step_s(runs: Runs) -> Numbers:
    """Return seconds of a step, (n,)."""
    return np.sum(list(breakdown(runs).values()), axis=0)


def schedule_s(runs: Runs, stage_s: Numbers) -> tuple[Numbers, Numbers]:
    """Return seconds of all micro-batches in the slowest stage, and of the bubble.

    `stage_s` is per micro-batch, (n, stages). The step of 1F1B, and of GPipe, is m times the
    slowest stage plus once through all others; vp chunks per stage divide that by vp
    (arXiv:2104.04473, section 2.2).
    """
    slowest = stage_s.max(axis=1)
    return runs.micro_batches * slowest, (stage_s.sum(axis=1) - slowest) / runs.vp


def _layer_s(runs: Runs) -> dict[str, Numbers]:
    """Return seconds of one layer and micro-batch, forward and backward, by part.

    The CPU launches kernels ahead: a layer takes the longer of its device time and of the CPU time
    that launches it. nanotron's engine adds CPU time per tensor-parallel rank to pipelines with
    tensor parallelism on several nodes.
    """
    # Full recomputation runs every forward twice, selective only attention's (arXiv:2205.05198,
    # section 5).
    forwards = 1.0 + (runs.recompute == "full")
    attention_forwards = 1.0 + (runs.recompute != "none")
    device = {
        "matmuls": matmuls_s(runs, forwards),
        "attention": attention_s(runs, attention_forwards),
        "elementwise": _elementwise_s(runs, forwards),
        "tensor parallelism": tensor_parallel_s(runs, forwards) * runs["tp_exposed"],
    }
    # Keys and values travel while attention computes with those before.
    device["context parallelism"] = np.maximum(context_ring_s(runs) - device["attention"], 0.0)
    running = np.sum(list(device.values()), axis=0)
    is_wide = (runs.pp > 1) & (runs.tp > 1) & (runs.gpus > runs.gpus_per_node)
    engine = np.where(is_wide, runs["engine_tp_s"] * runs.tp, 0.0)
    # `launch_s` is of a forward and a backward pass; a forward has a third of their kernels.
    launching = runs["launch_s"] * (1 + (forwards - 1) / 3) + engine
    # A blocking launch waits for the device, so the two times add up.
    busy = np.where(
        runs.has("blocking_launch"), running + launching, np.maximum(running, launching)
    )
    # The next layer's parameters are gathered while this one computes.
    gathering = np.maximum(parameter_gather_s(runs) - busy, 0.0)
    return device | {"CPU launches": busy - running, "parameter gathers": gathering}


def matmuls_s(runs: Runs, forwards: Numbers) -> Numbers:
    """Return seconds of a layer's matmuls: query, key, value; output; the feed-forward part."""
    hidden = runs.hidden
    query = runs.query_width / runs.tp
    ffn = runs.ffn / runs.tp
    shapes = [
        (query + 2 * runs.kv_width / runs.tp, hidden),
        (hidden, query),
        ((1 + runs.ffn_gated) * ffn, hidden),
        (hidden, ffn),
    ]
    seconds = sum(_training_matmul_s(runs, n, k, forwards) for n, k in shapes)
    return seconds * runs["slowdown"]


def _training_matmul_s(
    runs: Runs, n: Numbers, k: Numbers, forwards: Numbers, *, fp8: bool = True
) -> Numbers:
    """Return seconds of a matmul of T tokens by (k, n), `forwards` times, and of its gradients."""
    tokens = runs.tokens
    forward = _matmul_s(runs, tokens, n, k, fp8=fp8)
    of_input = _matmul_s(runs, tokens, k, n, fp8=fp8)
    of_weight = _matmul_s(runs, k, n, tokens, fp8=fp8)
    return forwards * forward + of_input + of_weight


def _matmul_s(runs: Runs, m: Numbers, n: Numbers, k: Numbers, *, fp8: bool) -> Numbers:
    """Return seconds of one matmul (m, k) x (k, n), with filling and draining.

    These are `gemm_k` more terms per sum, and `gemm_wave` more waves of 128 x 128 tiles: latency,
    which fp8 does not shorten. Operands are loaded meanwhile; no published run waits for them.
    """
    rate = _large_matmul_flops(runs)
    faster = np.where((runs.precision == "fp8") & fp8, runs.fp8_ratio * runs["fp8_efficiency"], 1.0)
    filling = (1 + runs["gemm_k"] / k) * (
        1 + runs["gemm_wave"] * runs.multiprocessors * 128**2 / (m * n)
    )
    return 2 * m * n * k / rate * (1 / faster + filling - 1)


def _large_matmul_flops(runs: Runs) -> Numbers:
    """Return FLOP/s of large bf16 matmuls: a share of the highest published rate."""
    return runs.matmul_tflops * 1e12 * runs["gemm_efficiency"]


def _memory_bytes_per_s(runs: Runs) -> Numbers:
    return runs.memory_gb_s * 1e9 * runs["memory_efficiency"]


def attention_s(runs: Runs, forwards: Numbers) -> Numbers:
    """Return seconds of scores, softmax and values of one layer.

    Tiled (FlashAttention): 4 S^2 q FLOPs per sequence forward, half of that because the mask is
    causal, 2.5 times that backward (arXiv:2307.08691). Unfused, with the matrix of scores in
    memory: all S^2 scores, 11 bytes per score forward and 17 backward for masks, softmax and
    dropout.
    """
    scores = runs.micro_batch * runs.seq_len**2 / (runs.cp * runs.tp)
    flops = 4 * scores * runs.query_width
    best = runs.matmul_tflops * 1e12 * runs["attention_efficiency"]
    tiled = 0.5 * flops * (forwards + 2.5) / best
    # Head dimensions that are no multiple of 16 bytes ran on float32 units in cuBLAS
    # (arXiv:2401.14489).
    aligned = np.where(runs.head_dim % 8 == 0, 1.0, runs["unaligned_rate"])
    rate = _large_matmul_flops(runs) * aligned
    matmuls = flops * (forwards + 2) * (1 + runs["gemm_k"] / runs.head_dim) / rate
    moved = scores * runs.heads * (11 * forwards + 17)
    unfused = matmuls + moved / _memory_bytes_per_s(runs)
    return np.where(runs["unfused_attention"] > 0, unfused, tiled) * runs["attention_slowdown"]


def _elementwise_s(runs: Runs, forwards: Numbers) -> Numbers:
    """Return seconds of norms, residuals, dropout, activation and rotation, bound by memory."""
    # Norms, residuals and dropouts are on every rank unless the sequence is divided, too.
    around = 12 * runs.hidden * runs.sequence_share
    inside = (4 + 2 * runs.ffn_gated) * runs.ffn + 4 * (runs.query_width + runs.kv_width)
    n_bytes = BF16 * runs.tokens * (around + inside / runs.tp)
    # Backward moves twice the bytes of forward.
    moved = n_bytes * (forwards + 2) * runs["elementwise_traffic"]
    return moved / _memory_bytes_per_s(runs)


def _head_s(runs: Runs) -> Numbers:
    """Return seconds of a matmul with V/t columns, then of passes over logits in float32."""
    columns = runs.vocab / runs.tp
    # The head stays in bf16 where layers are in fp8.
    matmul = _training_matmul_s(runs, columns, runs.hidden, np.ones(len(runs)), fp8=False)
    logits = runs.tokens * columns * runs["loss_traffic"]
    return matmul * runs["slowdown"] + logits / _memory_bytes_per_s(runs)
