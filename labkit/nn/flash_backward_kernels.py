"""Triton kernels of the FlashAttention-2 backward pass.

Source: Dao 2023, FlashAttention-2 (arXiv:2307.08691), algorithm 2, split in three: `delta_kernel`
(its line 4), `grad_kv_kernel` over key blocks and `grad_q_kernel` over query blocks. Scores are
computed once more that way, but nothing is added atomically: the gradients are deterministic.
Letters, layout and techniques as in `flash_kernels.py`; the same in plain PyTorch: `tiled_backward`
in `tiled_attention.py`. For each tile:

    P = exp2(scale * log2(e) * Q K^T - logsumexp)
    dS = P * (dO V^T - delta)      delta = rowsum(dO * O)
    dV += P^T dO      dQ += scale * dS K      dK += scale * dS^T Q
"""

# mypy: ignore-errors
# as in flash_parts.py

import triton
import triton.language as tl

from labkit.nn.flash_parts import (
    LENGTHS,
    LOG2_E,
    dot,
    edge,
    is_visible,
    key_ranges,
    load_rows,
    load_tile,
    program,
    store_tile,
)


@triton.jit(do_not_specialize=LENGTHS)
def delta_kernel(
    output_ptr, grad_output_ptr, delta_ptr, queries,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dO * O), (heads, Q)."""
    q_start, head = program(queries, BLOCK_Q, LAST_FIRST=False)
    output_ptr += head * queries * HEAD_DIM
    grad_output_ptr += head * queries * HEAD_DIM
    output = load_tile(output_ptr, q_start, queries, BLOCK_Q, HEAD_DIM, BLOCK_D, RAGGED=True)
    grad = load_tile(grad_output_ptr, q_start, queries, BLOCK_Q, HEAD_DIM, BLOCK_D, RAGGED=True)
    delta = tl.sum(output.to(tl.float32) * grad.to(tl.float32), 1)
    rows = q_start + tl.arange(0, BLOCK_Q)
    tl.store(delta_ptr + head * queries + rows, delta, mask=rows < queries)


@triton.jit
def _grad_kv_blocks(
    grad_k, grad_v, k, v, q_ptr, grad_output_ptr, logsumexp_ptr, delta_ptr, first, last, k_start,
    queries, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    DIAGONAL: tl.constexpr, RAGGED: tl.constexpr, PRECISION: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Add the query blocks [first, last). Tiles are transposed: (BLOCK_K, BLOCK_Q)."""
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    for q_start in range(first, last, BLOCK_Q):
        q = load_tile(q_ptr, q_start, queries, BLOCK_Q, HEAD_DIM, BLOCK_D, RAGGED)
        # a row that does not exist gets logsumexp +inf, so that its probabilities are 0
        logsumexp = load_rows(logsumexp_ptr, q_start, queries, float("inf"), BLOCK_Q, RAGGED)
        zeros = tl.zeros((BLOCK_K, BLOCK_Q), tl.float32)
        scores = dot(k, tl.trans(q), zeros, dtype, PRECISION, INTERPRETED)
        grad_output = load_tile(
            grad_output_ptr, q_start, queries, BLOCK_Q, HEAD_DIM, BLOCK_D, RAGGED
        )
        # Before the exponentials, which the compiler moves beside this product on Hopper.
        grad_p = dot(v, tl.trans(grad_output), zeros, dtype, PRECISION, INTERPRETED)
        p = tl.exp2(scores * (scale * LOG2_E) - logsumexp[None, :])
        if DIAGONAL:
            # In one comparison, as in `is_visible`: a key is not after its query.
            last_visible = q_start - k_start + tl.arange(0, BLOCK_Q)
            p = tl.where(tl.arange(0, BLOCK_K)[:, None] <= last_visible[None, :], p, 0.0)
        grad_v = dot(p, grad_output, grad_v, dtype, PRECISION, INTERPRETED)
        delta = load_rows(delta_ptr, q_start, queries, 0.0, BLOCK_Q, RAGGED)
        ds = p * (grad_p - delta[None, :])
        grad_k = dot(ds, q, grad_k, dtype, PRECISION, INTERPRETED)
    return grad_k, grad_v


@triton.jit(do_not_specialize=LENGTHS)
def grad_kv_kernel(
    q_ptr, k_ptr, v_ptr, grad_output_ptr, logsumexp_ptr, delta_ptr, grad_k_ptr, grad_v_ptr,
    queries, keys, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One program: dK and dV of BLOCK_K keys, summed over queries and all GROUP heads."""
    # the first keys are seen by most queries
    k_start, head = program(keys, BLOCK_K, LAST_FIRST=False)
    k_ptr += head * keys * HEAD_DIM
    v_ptr += head * keys * HEAD_DIM
    k = load_tile(k_ptr, k_start, keys, BLOCK_K, HEAD_DIM, BLOCK_D, RAGGED=True)
    v = load_tile(v_ptr, k_start, keys, BLOCK_K, HEAD_DIM, BLOCK_D, RAGGED=True)
    grad_k = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    grad_v = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)

    # [first, full_start) is the diagonal, [full_start, full_end) needs no mask, [full_end, queries)
    # is ragged
    first = 0
    full_start = 0
    full_end = queries // BLOCK_Q * BLOCK_Q
    EDGE_Q: tl.constexpr = edge(BLOCK_Q) if CAUSAL else BLOCK_Q
    if CAUSAL:
        first = k_start // EDGE_Q * EDGE_Q
        full_start = tl.cdiv(k_start + BLOCK_K - 1, BLOCK_Q) * BLOCK_Q
        full_end = tl.maximum(full_start, full_end)
    for index in range(GROUP):
        first_row = (head * GROUP + index) * queries
        q_rows = q_ptr + first_row * HEAD_DIM
        grad_rows = grad_output_ptr + first_row * HEAD_DIM
        logsumexp_rows = logsumexp_ptr + first_row
        delta_rows = delta_ptr + first_row
        if CAUSAL:
            grad_k, grad_v = _grad_kv_blocks(
                grad_k, grad_v, k, v, q_rows, grad_rows, logsumexp_rows, delta_rows,
                first, tl.minimum(full_start, queries), k_start, queries, scale,
                HEAD_DIM, BLOCK_D, EDGE_Q, BLOCK_K, True, True, PRECISION, INTERPRETED,
            )  # fmt: skip
        grad_k, grad_v = _grad_kv_blocks(
            grad_k, grad_v, k, v, q_rows, grad_rows, logsumexp_rows, delta_rows,
            full_start, full_end, k_start, queries, scale,
            HEAD_DIM, BLOCK_D, BLOCK_Q, BLOCK_K, False, False, PRECISION, INTERPRETED,
        )  # fmt: skip
        grad_k, grad_v = _grad_kv_blocks(
            grad_k, grad_v, k, v, q_rows, grad_rows, logsumexp_rows, delta_rows,
            full_end, queries, k_start, queries, scale,
            HEAD_DIM, BLOCK_D, EDGE_Q, BLOCK_K, False, True, PRECISION, INTERPRETED,
        )  # fmt: skip

    grad_k_ptr += head * keys * HEAD_DIM
    grad_v_ptr += head * keys * HEAD_DIM
    store_tile(grad_k_ptr, grad_k * scale, k_start, keys, HEAD_DIM, BLOCK_D, INTERPRETED)
    store_tile(grad_v_ptr, grad_v, k_start, keys, HEAD_DIM, BLOCK_D, INTERPRETED)


@triton.jit
def _grad_q_blocks(
    grad_q, q, grad_output, logsumexp, delta, k_ptr, v_ptr, first, last, q_start, keys, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Add the contribution of the key blocks [first, last)."""
    dtype: tl.constexpr = k_ptr.dtype.element_ty
    for k_start in range(first, last, BLOCK_K):
        k = load_tile(k_ptr, k_start, keys, BLOCK_K, HEAD_DIM, BLOCK_D, MASKED)
        zeros = tl.zeros((BLOCK_Q, BLOCK_K), tl.float32)
        scores = dot(q, tl.trans(k), zeros, dtype, PRECISION, INTERPRETED)
        p = tl.exp2(scores * (scale * LOG2_E) - logsumexp[:, None])
        if MASKED:
            p = tl.where(is_visible(q_start, k_start, keys, BLOCK_Q, BLOCK_K, CAUSAL), p, 0.0)
        v = load_tile(v_ptr, k_start, keys, BLOCK_K, HEAD_DIM, BLOCK_D, MASKED)
        grad_p = dot(grad_output, tl.trans(v), zeros, dtype, PRECISION, INTERPRETED)
        ds = p * (grad_p - delta[:, None])
        grad_q = dot(ds, k, grad_q, dtype, PRECISION, INTERPRETED)
    return grad_q


@triton.jit(do_not_specialize=LENGTHS)
def grad_q_kernel(
    q_ptr, k_ptr, v_ptr, grad_output_ptr, logsumexp_ptr, delta_ptr, grad_q_ptr, queries, keys,
    scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """One program: dQ of BLOCK_Q queries, summed over the keys that they see."""
    q_start, head = program(queries, BLOCK_Q, LAST_FIRST=CAUSAL)
    q_ptr += head * queries * HEAD_DIM
    k_ptr += head // GROUP * keys * HEAD_DIM
    v_ptr += head // GROUP * keys * HEAD_DIM
    grad_output_ptr += head * queries * HEAD_DIM

    q = load_tile(q_ptr, q_start, queries, BLOCK_Q, HEAD_DIM, BLOCK_D, RAGGED=True)
    grad_output = load_tile(
        grad_output_ptr, q_start, queries, BLOCK_Q, HEAD_DIM, BLOCK_D, RAGGED=True
    )
    logsumexp = load_rows(
        logsumexp_ptr + head * queries, q_start, queries, float("inf"), BLOCK_Q, RAGGED=True
    )
    delta = load_rows(delta_ptr + head * queries, q_start, queries, 0.0, BLOCK_Q, RAGGED=True)
    grad_q = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)

    full_end, visible_end = key_ranges(q_start, keys, BLOCK_Q, BLOCK_K, CAUSAL)
    EDGE_K: tl.constexpr = edge(BLOCK_K)
    grad_q = _grad_q_blocks(
        grad_q, q, grad_output, logsumexp, delta, k_ptr, v_ptr, 0, full_end, q_start, keys, scale,
        HEAD_DIM, BLOCK_D, BLOCK_Q, BLOCK_K, CAUSAL, False, PRECISION, INTERPRETED,
    )  # fmt: skip
    grad_q = _grad_q_blocks(
        grad_q, q, grad_output, logsumexp, delta, k_ptr, v_ptr, full_end, visible_end, q_start,
        keys, scale,
        HEAD_DIM, BLOCK_D, BLOCK_Q, EDGE_K, CAUSAL, True, PRECISION, INTERPRETED,
    )  # fmt: skip

    grad_q_ptr += head * queries * HEAD_DIM
    store_tile(grad_q_ptr, grad_q * scale, q_start, queries, HEAD_DIM, BLOCK_D, INTERPRETED)
