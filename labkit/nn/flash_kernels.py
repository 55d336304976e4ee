"""Triton kernel of the FlashAttention-2 forward pass.

Source: Dao 2023, FlashAttention-2 (arXiv:2307.08691), algorithm 1; `flash_launch.py` launches
it. Read `tiled_attention.py` first: the same in plain PyTorch, with the same names.

Dimension letters (see `attention.py` for the definition of causal):

    Q  queries    BLOCK_Q  queries in a tile      D  head dimension, HEAD_DIM
    K  keys       BLOCK_K  keys in a tile         BLOCK_D  the power of two that holds it

All tensors are contiguous: (heads, Q, D) or (heads / GROUP, K, D), with all leading dimensions in
one. GROUP query heads share a head of keys and values. The logsumexp and delta are (heads, Q) in
float32; the logsumexp is in base 2.

Techniques beyond the algorithm:

* exp2: the hardware's exponential has base 2. Scores are scaled as the maximum is subtracted, in
  one multiply-add.
* Hidden blocks, above the diagonal, are not visited, and the longest rows start first.
* A loop over full blocks neither masks scores nor checks bounds. A second loop visits the diagonal
  and the ragged end, in blocks half as large, which leave registers for the mask.
* Scores one block ahead (AHEAD): the tensor cores compute the next block's scores while the softmax
  of this one runs. It takes registers for both.
* Operands of `tl.dot` keep their dtype (tensor cores); everything else is float32.
* Specialized warps (WARP_SPECIALIZE): on data center Blackwell (1), some warps only load, in the
  loop over full blocks. On Hopper (2), one group of warps loads by tensor descriptors (TMA) and two
  compute 64 queries each. Triton 3.7 compiles that only if the kernel has a single loop and no
  other `tl.dot`, so every block is masked there.
"""

# mypy: ignore-errors
# as in flash_parts.py

import triton
import triton.language as tl

from labkit.nn.flash_parts import (
    LENGTHS,
    LOG2_E,
    describe,
    dot,
    edge,
    is_visible,
    key_ranges,
    load_tile,
    program,
    store_tile,
)


@triton.jit
def _scores(
    q, k, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Q K^T of a tile, (BLOCK_Q, BLOCK_K), not scaled."""
    zeros = tl.zeros((BLOCK_Q, BLOCK_K), tl.float32)
    return dot(q, tl.trans(k), zeros, q.dtype, PRECISION, INTERPRETED)


@triton.jit
def _add_block(
    accumulator, row_max, row_sum, scores, v, exponent_scale,
    dtype: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Update the online softmax with the scores and values of a block of keys."""
    new_max = tl.maximum(row_max, tl.max(scores, 1) * exponent_scale)
    probabilities = tl.exp2(scores * exponent_scale - new_max[:, None])  # not normalized yet
    # To rescale only where the maximum grew by more than 8 takes a branch. Triton 3.7 then waits
    # for all products at the end of a trip, which costs more than the multiplications.
    rescale = tl.exp2(row_max - new_max)
    row_sum = row_sum * rescale + tl.sum(probabilities, 1)
    accumulator = accumulator * rescale[:, None]
    accumulator = dot(probabilities, v, accumulator, dtype, PRECISION, INTERPRETED)
    return accumulator, new_max, row_sum


@triton.jit
def _forward_blocks(
    accumulator, row_max, row_sum, q, k_source, v_source, first, last, q_start, keys,
    exponent_scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr, MASKED: tl.constexpr, WARP_SPECIALIZE: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Update the online softmax with the keys from `first` up to `last`, block by block.

    `k_source` and `v_source` are descriptors if WARP_SPECIALIZE is 2, else pointers.
    """
    for k_start in tl.range(first, last, BLOCK_K, warp_specialize=WARP_SPECIALIZE > 0):
        if WARP_SPECIALIZE == 2:
            k = k_source.load([k_start, 0])
        else:
            k = load_tile(k_source, k_start, keys, BLOCK_K, HEAD_DIM, BLOCK_D, MASKED)
        scores = _scores(q, k, BLOCK_Q, BLOCK_K, PRECISION, INTERPRETED)
        if MASKED:
            scores = tl.where(
                is_visible(q_start, k_start, keys, BLOCK_Q, BLOCK_K, CAUSAL), scores, -float("inf")
            )
        if WARP_SPECIALIZE == 2:
            v = v_source.load([k_start, 0])
        else:
            v = load_tile(v_source, k_start, keys, BLOCK_K, HEAD_DIM, BLOCK_D, MASKED)
        accumulator, row_max, row_sum = _add_block(
            accumulator, row_max, row_sum, scores, v, exponent_scale,
            q.dtype, PRECISION, INTERPRETED,
        )  # fmt: skip
    return accumulator, row_max, row_sum


@triton.jit
def _full_blocks_ahead(
    accumulator, row_max, row_sum, q, k_ptr, v_ptr, last, keys, exponent_scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Update the online softmax with the full blocks up to `last`, each block's scores one ahead.

    The compiler moves the softmax between the start of the next scores and the wait for them.
    """
    dtype: tl.constexpr = q.dtype
    if last > 0:
        k = load_tile(k_ptr, 0, keys, BLOCK_K, HEAD_DIM, BLOCK_D, False)
        scores = _scores(q, k, BLOCK_Q, BLOCK_K, PRECISION, INTERPRETED)
        for k_start in range(0, last - BLOCK_K, BLOCK_K):
            k = load_tile(k_ptr, k_start + BLOCK_K, keys, BLOCK_K, HEAD_DIM, BLOCK_D, False)
            next_scores = _scores(q, k, BLOCK_Q, BLOCK_K, PRECISION, INTERPRETED)
            v = load_tile(v_ptr, k_start, keys, BLOCK_K, HEAD_DIM, BLOCK_D, False)
            accumulator, row_max, row_sum = _add_block(
                accumulator, row_max, row_sum, scores, v, exponent_scale,
                dtype, PRECISION, INTERPRETED,
            )  # fmt: skip
            scores = next_scores
        v = load_tile(v_ptr, last - BLOCK_K, keys, BLOCK_K, HEAD_DIM, BLOCK_D, False)
        accumulator, row_max, row_sum = _add_block(
            accumulator, row_max, row_sum, scores, v, exponent_scale, dtype, PRECISION, INTERPRETED
        )
    return accumulator, row_max, row_sum


@triton.jit(do_not_specialize=LENGTHS)
def forward_kernel(
    q_ptr, k_ptr, v_ptr, output_ptr, logsumexp_ptr, queries, keys, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr = 0, AHEAD: tl.constexpr = 0,
):  # fmt: skip
    """One program: the output and the logsumexp in base 2 of BLOCK_Q queries."""
    q_start, head = program(queries, BLOCK_Q, LAST_FIRST=CAUSAL)
    q_ptr += head * queries * HEAD_DIM
    k_ptr += head // GROUP * keys * HEAD_DIM
    v_ptr += head // GROUP * keys * HEAD_DIM

    if WARP_SPECIALIZE == 2:
        k_source = describe(k_ptr, keys, BLOCK_K, HEAD_DIM, BLOCK_D)
        v_source = describe(v_ptr, keys, BLOCK_K, HEAD_DIM, BLOCK_D)
        q = describe(q_ptr, queries, BLOCK_Q, HEAD_DIM, BLOCK_D).load([q_start, 0])
    else:
        q = load_tile(q_ptr, q_start, queries, BLOCK_Q, HEAD_DIM, BLOCK_D, RAGGED=True)
    accumulator = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    row_max = tl.full((BLOCK_Q,), -float("inf"), tl.float32)  # of the scaled scores
    row_sum = tl.zeros((BLOCK_Q,), tl.float32)
    exponent_scale = scale * LOG2_E

    # Every query sees the first key of the first block visited: row_max is finite from there on.
    full_end, visible_end = key_ranges(q_start, keys, BLOCK_Q, BLOCK_K, CAUSAL)
    EDGE_K: tl.constexpr = edge(BLOCK_K)
    if AHEAD:
        accumulator, row_max, row_sum = _full_blocks_ahead(
            accumulator, row_max, row_sum, q, k_ptr, v_ptr, full_end, keys, exponent_scale,
            HEAD_DIM, BLOCK_D, BLOCK_Q, BLOCK_K, PRECISION, INTERPRETED,
        )  # fmt: skip
    elif WARP_SPECIALIZE == 0:
        accumulator, row_max, row_sum = _forward_blocks(
            accumulator, row_max, row_sum, q, k_ptr, v_ptr, 0, full_end, q_start, keys,
            exponent_scale,
            HEAD_DIM, BLOCK_D, BLOCK_Q, BLOCK_K, CAUSAL, False, 0, PRECISION, INTERPRETED,
        )  # fmt: skip
    if WARP_SPECIALIZE < 2:
        accumulator, row_max, row_sum = _forward_blocks(
            accumulator, row_max, row_sum, q, k_ptr, v_ptr, full_end, visible_end, q_start, keys,
            exponent_scale,
            HEAD_DIM, BLOCK_D, BLOCK_Q, EDGE_K, CAUSAL, True, 0, PRECISION, INTERPRETED,
        )  # fmt: skip
    else:
        accumulator, row_max, row_sum = _forward_blocks(
            accumulator, row_max, row_sum, q, k_source, v_source, 0, visible_end, q_start, keys,
            exponent_scale,
            HEAD_DIM, BLOCK_D, BLOCK_Q, BLOCK_K, CAUSAL, True, 2, PRECISION, INTERPRETED,
        )  # fmt: skip
    # Triton specializes warps in a kernel's last loop only, so the full blocks come last here.
    if WARP_SPECIALIZE == 1:
        accumulator, row_max, row_sum = _forward_blocks(
            accumulator, row_max, row_sum, q, k_ptr, v_ptr, 0, full_end, q_start, keys,
            exponent_scale,
            HEAD_DIM, BLOCK_D, BLOCK_Q, BLOCK_K, CAUSAL, False, 1, PRECISION, INTERPRETED,
        )  # fmt: skip

    output = accumulator / row_sum[:, None]
    output_ptr += head * queries * HEAD_DIM
    store_tile(output_ptr, output, q_start, queries, HEAD_DIM, BLOCK_D, INTERPRETED)
    rows = q_start + tl.arange(0, BLOCK_Q)
    tl.store(logsumexp_ptr + head * queries + rows, row_max + tl.log2(row_sum), mask=rows < queries)
