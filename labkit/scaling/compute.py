"""Device time of a Transformer layer: matmuls, attention, memory-bound operators, recomputation.

Legend: T tokens per micro-batch and rank, h hidden, q width of the query heads, f ffn, t tensor-parallel ranks,
V vocabulary, S sequence.
"""

from dataclasses import dataclass

import numpy as np

from labkit.scaling.constants import Rows
from labkit.scaling.model import Numbers
from labkit.scaling.runs import Runs

TILE = 128
BF16 = 2
FLOAT32 = 4
ALIGNED_HEAD = 8
"""Heads of a multiple of 16 bytes use tensor cores; others ran on float32 units in cuBLAS (arXiv:2401.14489)."""


@dataclass(frozen=True)
class Repeats:
    """Forward passes per step of each kind of operator: 1, or up to 2 with recomputation.

    `last` is for the matmul that ends a layer: it runs once if recomputation stops early (PyTorch's non-reentrant
    checkpoints, dead code in XLA), since backward does not need its result.
    """

    gemm: Numbers
    last: Numbers
    attention: Numbers
    elementwise: Numbers


def repeats(runs: Runs, constants: Rows) -> Repeats:
    """Full recomputation runs every forward twice; selective only attention (arXiv:2205.05198, section 5).

    `selective` differs in torchtitan, which keeps every second matmul and attention, and in fms, which recomputes a
    share of the layers. MaxText's save_qkv_proj keeps the query, key and value matmuls.
    """
    full, selective = runs.recompute == "full", runs.recompute == "selective"
    by_operator, by_layer = selective & runs.has("op_recompute"), selective & runs.has("layer_recompute")
    only_attention = selective & ~by_operator & ~by_layer
    gemm = np.select([full & runs.has("save_qkv"), full, by_operator | by_layer], [0.8, 1.0, 0.5], 0.0)
    stops = (constants["early_stop"] > 0) & ~runs.has("low_precision_master")
    return Repeats(
        gemm=1 + gemm,
        last=1 + np.where(stops & (full | by_layer), 0.0, gemm),
        attention=1 + np.select([full | only_attention, by_layer], [1.0, 0.5], 0.0),
        elementwise=1 + np.select([full | by_operator, by_layer], [1.0, 0.5], 0.0),
    )


def matmul_s(runs: Runs, constants: Rows, m: Numbers, n: Numbers, k: Numbers, *, fp8: bool = True) -> Numbers:
    """Seconds of one matmul (m, k) x (k, n): the larger of arithmetic and memory traffic.

    Arithmetic includes filling and draining: `gemm_k` more terms per sum, and `gemm_wave` more waves of 128 x 128
    tiles. Both are latency, which fp8 does not shorten.
    """
    rate = runs.peak_tflops * 1e12 * runs.clock_share * constants["gemm_efficiency"]
    faster = np.where((runs.precision == "fp8") & fp8, runs.fp8_ratio * constants["fp8_efficiency"], 1.0)
    filling = (1 + constants["gemm_k"] / k) * (1 + constants["gemm_wave"] * runs.multiprocessors * TILE**2 / (m * n))
    arithmetic = 2 * m * n * k / rate * (1 / faster + filling - 1)
    moved = BF16 * (m * k + k * n + m * n)
    return np.maximum(arithmetic, moved / memory_bytes_per_s(runs, constants))


def trained_matmul_s(
    runs: Runs, constants: Rows, m: Numbers, n: Numbers, k: Numbers, forwards: Numbers | float, *, fp8: bool = True
) -> Numbers:
    """Forward (as often as it runs), the gradient of the input, and that of the weight."""
    forward = matmul_s(runs, constants, m, n, k, fp8=fp8)
    backward = matmul_s(runs, constants, m, k, n, fp8=fp8) + matmul_s(runs, constants, k, n, m, fp8=fp8)
    return forwards * forward + backward


def memory_bytes_per_s(runs: Runs, constants: Rows) -> Numbers:
    return runs.memory_gb_s * 1e9 * constants["memory_efficiency"]


def layer_matmuls_s(runs: Runs, constants: Rows, forwards: Repeats) -> Numbers:
    """Query, key and value; output; into and out of the feed-forward part; and casts to fp8."""
    tokens, h, q, f, t = runs.tokens, runs.hidden, runs.query_width, runs.ffn, runs.tp
    qkv = trained_matmul_s(runs, constants, tokens, (q + 2 * runs.kv_width) / t, h, forwards.gemm)
    output = trained_matmul_s(runs, constants, tokens, h, q / t, forwards.gemm)
    into = trained_matmul_s(runs, constants, tokens, (1 + runs.ffn_gated) * f / t, h, forwards.gemm)
    out = trained_matmul_s(runs, constants, tokens, h, f / t, forwards.last)
    matmuls = (qkv + output + into + out) * constants["slowdown"]
    return matmuls + np.where(runs.precision == "fp8", _casts_s(runs, constants, forwards), 0.0)


def _casts_s(runs: Runs, constants: Rows, forwards: Repeats) -> Numbers:
    """Casts to fp8, memory-bound: weights each micro-batch; with a scale per row, every input and gradient as well.

    Tensor-wise scales need no pass of their own: the cast is fused into the operator before it.
    """
    h, q, f, t = runs.hidden, runs.query_width, runs.ffn, runs.tp
    weights = runs.layer_parameters / t * constants["fp8_cast_traffic"]
    inputs = 2 * h + (q + f) / t
    gradients = 2 * h + (q + 2 * runs.kv_width + (1 + runs.ffn_gated) * f) / t
    rows = runs.tokens * (inputs * forwards.gemm + gradients) * constants["fp8_rowwise_traffic"]
    return (weights + np.where(runs.has("fp8_rowwise"), rows, 0.0)) / memory_bytes_per_s(runs, constants)


def attention_s(runs: Runs, constants: Rows, forwards: Numbers) -> Numbers:
    """Scores, softmax and values of one layer: tiled (FlashAttention), or with the matrix of scores in memory.

    Tiled: 4 S^2 q FLOPs per sequence forward, half of them causal, 2.5 times that backward (arXiv:2307.08691).
    Unfused: all S^2 scores, 11 bytes per score forward and 17 backward for masks, softmax and dropout.
    """
    scores = runs.micro_batch * runs.seq_len**2 / (runs.cp * runs.tp)
    flops = 4 * scores * runs.query_width
    peak = runs.peak_tflops * 1e12 * runs.clock_share
    short = 1 + constants["attention_head"] / runs.head_dim
    tiled = 0.5 * flops * (forwards + 2.5) * short / (peak * constants["attention_efficiency"])
    aligned = np.where(runs.head_dim % ALIGNED_HEAD == 0, 1.0, constants["unaligned_rate"])
    rate = peak * constants["gemm_efficiency"] * aligned
    matmuls = flops * (forwards + 2) * (1 + constants["gemm_k"] / runs.head_dim) / rate
    moved = scores * runs.heads * (11 * forwards + 17) * constants["score_traffic"]
    unfused = matmuls + moved / memory_bytes_per_s(runs, constants)
    return np.where(constants["unfused_attention"] > 0, unfused, tiled) * constants["attention_slowdown"]


def elementwise_s(runs: Runs, constants: Rows, forwards: Numbers) -> Numbers:
    """Norms, residuals, dropout, activation, rotation: bound by memory. Backward moves twice the bytes of forward."""
    wide = BF16 * 12 * runs.hidden * runs.sequence_share
    narrow = BF16 * ((4 + 2 * runs.ffn_gated) * runs.ffn + 4 * (runs.query_width + runs.kv_width)) / runs.tp
    moved = runs.tokens * (wide + narrow) * (forwards + 2) * constants["elementwise_traffic"]
    compiled = np.where(runs.compiled > 0, constants["compiled_traffic"], 1.0)
    return moved * compiled / memory_bytes_per_s(runs, constants)


def head_s(runs: Runs, constants: Rows) -> Numbers:
    """Output matrix and loss: a matmul with V/t columns, then passes over logits in float32."""
    columns = runs.vocab / runs.tp
    matmul = trained_matmul_s(runs, constants, runs.tokens, columns, runs.hidden, 1.0, fp8=False)
    logits = runs.tokens * columns * constants["loss_traffic"]
    return matmul * constants["slowdown"] + logits / memory_bytes_per_s(runs, constants)


def optimizer_s(runs: Runs, constants: Rows, parameters: Numbers) -> Numbers:
    """AdamW in mixed precision on the parameters that a rank updates."""
    return parameters * constants["optimizer_traffic"] / memory_bytes_per_s(runs, constants)
