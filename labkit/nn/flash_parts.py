"""Parts that the FlashAttention kernels share: loads, stores, masks and products of tiles.

Letters and layout as in `flash_kernels.py`.
"""

# mypy: ignore-errors
# Triton's language is typed for its compiler, not for mypy: inside a kernel everything is a
# tl.tensor.

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)

# Arguments that Triton must not specialize for. The alignment of rows depends on HEAD_DIM only.
LENGTHS = ("queries", "keys")


@triton.jit
def program(length, BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr):
    """First position of this program's block, and its head.

    Programs of a head are neighbors: they share it in L2.
    """
    blocks = tl.cdiv(length, BLOCK)
    program = tl.program_id(0)
    block = program % blocks
    if LAST_FIRST:
        # Under a causal mask these see the most keys: begun last, they would run alone.
        block = blocks - 1 - block
    # In 64 bits, since elements before a head may be more than 2^31.
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
