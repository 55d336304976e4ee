"""Triton kernel of the FlashAttention-2 forward pass, and helpers that the backward kernels share.

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
* Operands of `tl.dot` keep their dtype (tensor cores); everything else is float32.
* Specialized warps (WARP_SPECIALIZE): on data center Blackwell (1), some warps only load, in the
  loop over full blocks. On Hopper (2), one group of warps loads by tensor descriptors (TMA) and two
  compute 64 queries each. Triton 3.7 compiles that only if the kernel has a single loop and no
  other `tl.dot`, so every block is masked there.
"""

# mypy: ignore-errors
# Triton's language is typed for its compiler, not for mypy: inside a kernel everything is a
# tl.tensor.

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)

LENGTHS = ("queries", "keys")
"""Arguments that Triton must not specialize for.

The alignment of rows depends on HEAD_DIM only.
"""


@triton.jit
def program(length, BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr):
    """First position of this program's block, and its head.

    Programs of a head are neighbors: they share it in L2.
    """
    blocks = tl.cdiv(length, BLOCK)
    program = tl.program_id(0)
    block = program % blocks
    if LAST_FIRST:
        block = blocks - 1 - block
    return block * BLOCK, (program // blocks).to(tl.int64)


@triton.jit
def tile_offsets(start, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Offsets of the rows start.. of one head, (BLOCK, BLOCK_D)."""
    return (start + tl.arange(0, BLOCK))[:, None] * HEAD_DIM + tl.arange(0, BLOCK_D)[None, :]


@triton.jit
def in_bounds(
    start,
    length,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Mask of existing elements.

    False beyond the last row (if RAGGED) and in the padded dimensions.
    """
    rows = (start + tl.arange(0, BLOCK))[:, None]
    dims = tl.arange(0, BLOCK_D)[None, :]
    if RAGGED and BLOCK_D != HEAD_DIM:
        return (rows < length) & (dims < HEAD_DIM)
    elif RAGGED:
        return rows < length
    else:
        return dims < HEAD_DIM


@triton.jit
def describe(pointer, length, BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Tensor descriptor of one head, (length, HEAD_DIM).

    It loads (BLOCK, BLOCK_D), zero out of bounds.

    The pointer and HEAD_DIM must be multiples of 16 bytes.
    """
    return tl.make_tensor_descriptor(pointer, [length, HEAD_DIM], [HEAD_DIM, 1], [BLOCK, BLOCK_D])


@triton.jit
def load_tile(
    pointer,
    start,
    length,
    BLOCK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    RAGGED: tl.constexpr,
):
    """Rows start.. of one head, (BLOCK, BLOCK_D), zero out of bounds.

    Without RAGGED all rows must exist.
    """
    pointers = pointer + tile_offsets(start, BLOCK, HEAD_DIM, BLOCK_D)
    if RAGGED or BLOCK_D != HEAD_DIM:
        return tl.load(
            pointers, mask=in_bounds(start, length, BLOCK, HEAD_DIM, BLOCK_D, RAGGED), other=0.0
        )
    else:
        return tl.load(pointers)


@triton.jit
def load_rows(pointer, start, length, other, BLOCK: tl.constexpr, RAGGED: tl.constexpr):
    """One float32 per row, (BLOCK,); `other` beyond the end."""
    rows = start + tl.arange(0, BLOCK)
    if RAGGED:
        return tl.load(pointer + rows, mask=rows < length, other=other)
    else:
        return tl.load(pointer + rows)


@triton.jit
def store_tile(
    pointer,
    values,
    start,
    length,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INTERPRETED: tl.constexpr,
):
    """Store the rows and dimensions that exist, rounded to the dtype of the pointer."""
    BLOCK: tl.constexpr = values.shape[0]
    values = round_to(values, pointer.dtype.element_ty, INTERPRETED)
    exists = in_bounds(start, length, BLOCK, HEAD_DIM, BLOCK_D, True)
    tl.store(pointer + tile_offsets(start, BLOCK, HEAD_DIM, BLOCK_D), values, mask=exists)


@triton.jit
def round_to(x, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """Convert x to `dtype`.

    The interpreter's bfloat16 can neither round nor be multiplied: there, round by hand and stay in
    float32.
    """
    if not INTERPRETED:
        return x.to(dtype)
    elif dtype == tl.bfloat16:
        bits = x.to(tl.float32).to(tl.uint32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000  # to nearest, ties to even
        return bits.to(tl.float32, bitcast=True)
    else:
        return x.to(dtype).to(tl.float32)


@triton.jit
def dot(a, b, accumulator, dtype: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr):
    """accumulator + a b, with operands rounded to `dtype`.

    PRECISION matters for float32 only.
    """
    a = round_to(a, dtype, INTERPRETED)
    b = round_to(b, dtype, INTERPRETED)
    return tl.dot(a, b, accumulator, input_precision=PRECISION)


@triton.constexpr_function
def edge(block):
    """Size of the blocks at the edges; 16 is the least that `tl.dot` takes."""
    return max(16, block // 2)


@triton.jit
def is_visible(
    q_start, k_start, keys, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr
):
    """Mask of the keys that each query of a tile sees, in one comparison.

    (BLOCK_Q, BLOCK_K) or (1, BLOCK_K).
    """
    columns = tl.arange(0, BLOCK_K)[None, :]
    if CAUSAL:
        return columns < tl.minimum(q_start + 1 + tl.arange(0, BLOCK_Q), keys)[:, None] - k_start
    else:
        return columns < keys - k_start


@triton.jit
def key_ranges(q_start, keys, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, CAUSAL: tl.constexpr):
    """Ends of the key blocks that need no mask, and of the visible keys."""
    if CAUSAL:
        return tl.minimum(q_start, keys) // BLOCK_K * BLOCK_K, tl.minimum(q_start + BLOCK_Q, keys)
    else:
        return keys // BLOCK_K * BLOCK_K, keys


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
    dtype: tl.constexpr = q.dtype
    for k_start in tl.range(first, last, BLOCK_K, warp_specialize=WARP_SPECIALIZE > 0):
        if WARP_SPECIALIZE == 2:
            k = k_source.load([k_start, 0])
        else:
            k = load_tile(k_source, k_start, keys, BLOCK_K, HEAD_DIM, BLOCK_D, MASKED)
        scores = dot(
            q, tl.trans(k), tl.zeros((BLOCK_Q, BLOCK_K), tl.float32), dtype, PRECISION, INTERPRETED
        )
        if MASKED:
            scores = tl.where(
                is_visible(q_start, k_start, keys, BLOCK_Q, BLOCK_K, CAUSAL), scores, -float("inf")
            )
        new_max = tl.maximum(row_max, tl.max(scores, 1) * exponent_scale)
        probabilities = tl.exp2(scores * exponent_scale - new_max[:, None])  # not normalized yet
        rescale = tl.exp2(row_max - new_max)
        row_max = new_max
        row_sum = row_sum * rescale + tl.sum(probabilities, 1)
        if WARP_SPECIALIZE == 2:
            v = v_source.load([k_start, 0])
        else:
            v = load_tile(v_source, k_start, keys, BLOCK_K, HEAD_DIM, BLOCK_D, MASKED)
        accumulator = accumulator * rescale[:, None]
        accumulator = dot(probabilities, v, accumulator, dtype, PRECISION, INTERPRETED)
    return accumulator, row_max, row_sum


@triton.jit(do_not_specialize=LENGTHS)
def forward_kernel(
    q_ptr, k_ptr, v_ptr, output_ptr, logsumexp_ptr, queries, keys, scale,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, GROUP: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    CAUSAL: tl.constexpr, PRECISION: tl.constexpr, INTERPRETED: tl.constexpr,
    WARP_SPECIALIZE: tl.constexpr = 0,
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
    if WARP_SPECIALIZE == 0:
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
    # Triton can do this in a kernel's last loop only, so the full blocks come last
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
