"""FlashAttention-2 in Triton, differentiable: checks the inputs and runs the kernels.

The forward pass saves q, k, v, the output and one float32 logsumexp per query, from which the
backward pass recomputes the probabilities: memory is linear in the sequence. Source: Dao 2023,
FlashAttention-2 (arXiv:2307.08691).

Runs on CUDA GPUs of compute capability 8.0 and above, and for tests under Triton's interpreter
(TRITON_INTERPRET=1 set before Triton is imported), thousands of times slower.

Tiles are in `flash_tiles.py`. Before a tile's first use on a device `flash_checks.py` compares its
results with float64; one that is wrong, does not compile or does not return is left out.

Dimension letters as in `attention.py`: (..., Q, D) queries, (..., K, D) keys and values.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from labkit.nn import attention
from labkit.nn.attention import KERNEL_DTYPES, VersionWatch, dtype_name, query_group
from labkit.nn.flash_checks import Case, usable_tiles
from labkit.nn.flash_launch import INTERPRETED, delta, launch
from labkit.nn.flash_tiles import DESCRIPTOR_ALIGNMENT, INTERPRETER_TILES, Tile

# Head dimensions of the kernels, which pad one that is not a power of two.
HEAD_DIMS = range(16, 257)
MAX_FLOAT32_HEAD_DIM = 128
# The first whose tensor cores take bfloat16 and TF32.
MIN_CAPABILITY = (8, 0)


class FlashAttention(torch.autograd.Function):
    """`FlashAttention.apply(q, k, v, causal, scale)` -> output (..., Q, D).

    q is (..., Q, D), k and v are (..., K, D).

    float32 (TF32 tensor cores three times, near float32), bfloat16 or float16; 16 <= D <= 256 (128
    on GPUs in float32). Deterministic. Inputs that are not contiguous are copied. ValueError for
    inputs that do not fit together.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool = False, scale: float | None = None
    ) -> Tensor:
        attention.check_attention_inputs(q, k, v, scale=scale, dtypes=KERNEL_DTYPES)
        reason = unavailable_reason(q.device, q.dtype, q.shape[-1])
        if reason is not None:
            raise ValueError(reason)
        q = q.contiguous()
        k = k.contiguous()
        v = v.contiguous()  # here, so that backward has no need to copy again
        output, logsumexp = run_kernel("forward", (q, k, v), causal, scale)
        ctx.save_for_backward(q, k, v, output.data, logsumexp)
        ctx.watch = VersionWatch(output)
        ctx.causal = causal
        ctx.scale = scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        q, k, v, output, logsumexp = ctx.saved_tensors
        if ctx.watch.is_modified:
            # A caller has changed the output in place, as `y += x` does.
            output, _ = run_kernel("forward", (q, k, v), ctx.causal, ctx.scale)
        grad_output = grad_output.contiguous()
        inputs = (q, k, v, grad_output, logsumexp, delta(output, grad_output))
        return *_run_backward(inputs, ctx.causal, ctx.scale), None, None


# a compiled model calls the kernels as they are, at the price of a graph break
@torch.compiler.disable
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, *, scale: float | None = None
) -> Tensor:
    """Compute attention on the GPU, differentiably. `scale` defaults to 1 / sqrt(D)."""
    return FlashAttention.apply(q, k, v, causal, scale)


def flash_forward(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> tuple[Tensor, Tensor]:
    """Return output (..., Q, D) in q's dtype, and float32 logsumexp (..., Q) in natural logs.

    As `tiled_attention.tiled_forward`, for attention whose keys come block by block.
    """
    inputs = [x.contiguous() for x in (q, k, v)]
    output, logsumexp = run_kernel("forward", inputs, causal, None)
    # The kernels work in powers of two, for which GPUs have an instruction.
    return output, logsumexp * math.log(2)


def flash_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    grad_output: Tensor,
    causal: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return gradients of q, k and v in their dtypes, as `tiled_attention.tiled_backward`.

    The output and logsumexp may be those of more keys than these.
    """
    q, k, v, output, grad_output = (x.contiguous() for x in (q, k, v, output, grad_output))
    logsumexp = logsumexp.contiguous() / math.log(2)
    inputs = (q, k, v, grad_output, logsumexp, delta(output, grad_output))
    return _run_backward(inputs, causal, None)


def _run_backward(
    inputs: Sequence[Tensor], causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    (grad_q,) = run_kernel("grad_q", inputs, causal, scale)
    grad_k, grad_v = run_kernel("grad_kv", inputs, causal, scale)
    return grad_q, grad_k, grad_v


def unavailable_reason(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Return why the kernels cannot run there, or None if they can."""
    if dtype not in KERNEL_DTYPES:
        return f"the kernels take float32, bfloat16 and float16, not {dtype_name(dtype)}"
    if head_dim not in HEAD_DIMS:
        return (
            f"the kernels take head dimensions from {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}, not"
            f" {head_dim}"
        )
    if INTERPRETED:
        return None
    if dtype == torch.float32 and head_dim > MAX_FLOAT32_HEAD_DIM:
        return (
            f"the float32 kernels take head dimensions to {MAX_FLOAT32_HEAD_DIM}, not {head_dim}:"
            " registers run out"
        )
    if device.type != "cuda":
        return (
            f"Triton kernels need a CUDA GPU (or TRITON_INTERPRET=1, for tests), not {device.type}"
        )
    capability = torch.cuda.get_device_capability(device)
    if capability < MIN_CAPABILITY:
        return (
            f"the kernels need compute capability 8.0 or newer, not {capability[0]}.{capability[1]}"
        )
    return None


def run_kernel(
    name: str, inputs: Sequence[Tensor], causal: bool, scale: float | None
) -> list[Tensor]:
    """Run one kernel (see `flash_launch.launch`) with the fastest tile that is right here."""
    # Under the interpreter, which is thousands of times slower, no tiles are tried.
    tiles: tuple[Tile, ...] = (INTERPRETER_TILES[name],)
    if not INTERPRETED:
        q, k = inputs[:2]
        case = Case(name, q.shape[-1], query_group(q, k), q.dtype, causal, q.device)
        tiles = usable_tiles(case)
        # Views may begin anywhere; results come from the allocator, which aligns them.
        if any(x.data_ptr() % DESCRIPTOR_ALIGNMENT for x in inputs):
            tiles = tuple(tile for tile in tiles if not tile.has_descriptors)
    return launch(name, inputs, causal, scale, tiles)
