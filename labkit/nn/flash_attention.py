"""FlashAttention-2 in Triton: checks the inputs, chooses tiles, launches the kernels.

The forward pass saves q, k, v, the output and one float32 logsumexp a query; the backward pass recomputes the
probabilities from it.  Memory is linear in the sequence.  Source: Dao 2023, FlashAttention-2 (arXiv:2307.08691).
The kernels: `flash_kernels.py`, `flash_backward_kernels.py`.  The same in plain PyTorch: `tiled_attention.py`.

Runs on CUDA GPUs from compute capability 8.0, and anywhere under Triton's interpreter (TRITON_INTERPRET=1 set
before Triton is imported), which is for tests: correct, and thousands of times slower.

Dimension letters as in `attention.py`: (..., Q, D) queries, (..., K, D) keys and values.
"""

import functools
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from labkit.nn import flash_backward_kernels, flash_kernels
from labkit.nn.attention import KERNEL_DTYPES, check_attention_inputs, softmax_scale
from labkit.nn.flash_tiles import DELTA_TILE, INTERPRETER_TILES, Tile, kernel_constants, padded, tiles_for
from labkit.nn.triton_launches import why_triton_cannot_launch

HEAD_DIMS = range(16, 129)
"""Head dimensions the kernels take.  One that is not a power of two is padded to the next inside the kernel."""

MINIMUM_CAPABILITY = (8, 0)

INTERPRETED = not isinstance(flash_kernels.forward_kernel, triton.JITFunction)


@dataclass(frozen=True)
class Techniques:
    """Parts of the forward kernel that can be switched off, one by one, to measure what each is worth."""

    exp2: bool = True
    """Exponentials in base 2 with log2(e) folded into the scale; else `exp`, which multiplies again."""
    skip_hidden: bool = True
    """Causal: do not visit key blocks that no query of the block sees; else compute and mask them."""
    mask_only_edges: bool = True
    """Full blocks in a loop without masks; else every block is masked and its loads are bounds-checked."""


class FlashAttention(torch.autograd.Function):
    """`FlashAttention.apply(q, k, v, causal)`: q (..., Q, D), k and v (..., K, D) -> output (..., Q, D).

    float32 (TF32 tensor cores three times, near float32), bfloat16 or float16; 16 <= D <= 128.  Deterministic.
    Inputs that are not contiguous are copied.  Raises ValueError for inputs that do not fit.
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()  # here, so that backward has no need to copy again
        output, logsumexp = flash_forward(q, k, v, causal)
        ctx.save_for_backward(q, k, v, output, logsumexp)
        ctx.causal = causal
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, output, logsumexp = ctx.saved_tensors
        return *flash_backward(q, k, v, output, logsumexp, grad_output, ctx.causal), None


@torch.compiler.disable  # a compiled model calls the kernels as they are, at the price of a graph break
def flash_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool = False) -> Tensor:
    """`FlashAttention.apply` for models, compiled or not."""
    return FlashAttention.apply(q, k, v, causal)


def flash_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool = False,
    *,
    tile: Tile | None = None,
    techniques: Techniques | None = None,
) -> tuple[Tensor, Tensor]:
    """Output (..., Q, D) in the dtype of q, and its natural-log logsumexp (..., Q) in float32.

    `tile` replaces the autotuned ones, `techniques` the full set: both for ablations.
    """
    _check(q, k, v)
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    output = torch.empty_like(q)
    logsumexp = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    techniques = techniques or Techniques()
    switches = {
        "EXP2": techniques.exp2,
        "SKIP_HIDDEN": techniques.skip_hidden,
        "MASK_ONLY_EDGES": techniques.mask_only_edges,
    }
    _launch("forward", (q, k, v, output, logsumexp), q, k, causal, tile, switches)
    return output, logsumexp


def flash_backward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    grad_output: Tensor,
    causal: bool,
    *,
    grad_kv_tile: Tile | None = None,
    grad_q_tile: Tile | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v from what the forward pass saved; the tiles are for ablations."""
    _check(q, k, v)
    q, k, v, output, grad_output = (x.contiguous() for x in (q, k, v, output, grad_output))
    grad_q, grad_k, grad_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    delta = torch.empty_like(logsumexp)
    _launch_delta(output, grad_output, delta)
    inputs = (q, k, v, grad_output, logsumexp, delta)
    _launch("grad_kv", (*inputs, grad_k, grad_v), q, k, causal, grad_kv_tile)
    _launch("grad_q", (*inputs, grad_q), q, k, causal, grad_q_tile)
    return grad_q, grad_k, grad_v


# ------------------------------------------------------------------------------------------- checks


def why_unavailable(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the kernels cannot run there, or None if they can."""
    if dtype not in KERNEL_DTYPES:
        return f"the kernels take float32, bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if head_dim not in HEAD_DIMS:
        return f"the kernels take head dimensions from {HEAD_DIMS[0]} to {HEAD_DIMS[-1]}, not {head_dim}"
    if INTERPRETED:
        return None
    if device.type != "cuda":
        return f"Triton kernels need a CUDA GPU (or TRITON_INTERPRET=1, for tests), not {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < MINIMUM_CAPABILITY:
        return f"the kernels need compute capability 8.0 or newer, not {capability[0]}.{capability[1]}"
    return why_triton_cannot_launch()


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    check_attention_inputs(q, k, v, dtypes=KERNEL_DTYPES)
    reason = why_unavailable(q.device, q.dtype, q.shape[-1])
    if reason is not None:
        raise ValueError(reason)


# ------------------------------------------------------------------------------------------- launch

_KERNELS: dict[str, Any] = {
    "forward": flash_kernels.forward_kernel,
    "grad_kv": flash_backward_kernels.grad_kv_kernel,
    "grad_q": flash_backward_kernels.grad_q_kernel,
}


def _launch(
    name: str,
    tensors: tuple[Tensor, ...],
    q: Tensor,
    k: Tensor,
    causal: bool,
    tile: Tile | None,
    switches: dict[str, bool] | None = None,
) -> None:
    """Start one program for every block of queries (of keys for "grad_kv") of every head."""
    queries, head_dim = q.shape[-2:]
    keys = k.shape[-2]
    heads = q.numel() // (queries * head_dim)
    length, block = (keys, "BLOCK_K") if name == "grad_kv" else (queries, "BLOCK_Q")

    def grid(constants: dict[str, Any]) -> tuple[int]:
        return (heads * triton.cdiv(length, constants[block]),)

    constants = kernel_constants(head_dim, q.dtype, causal, interpreted=INTERPRETED) | (switches or {})
    arguments = (*tensors, queries, keys, softmax_scale(q), _tuning_length(queries, keys))
    with torch.cuda.device_of(q):  # Triton launches on the current device
        if tile is None and not INTERPRETED:
            capability = torch.cuda.get_device_capability(q.device)
            tiles = tiles_for(name, dtype=q.dtype, head_dim=head_dim, capability=capability)
            _autotuned(name, tiles)[grid](*arguments, **constants)
        else:
            tile = tile or INTERPRETER_TILES[name]
            _KERNELS[name][grid](*arguments, **constants, **tile.launch_options())


@functools.cache
def _autotuned(name: str, tiles: tuple[Tile, ...]) -> Any:
    """The kernel with Triton's autotuner: times each tile once for a tuning length, mask, head dim and dtype."""
    configs = [triton.Config(t.blocks(), num_warps=t.warps, num_stages=t.stages) for t in tiles]
    return triton.autotune(configs, key=["tuning_length", "CAUSAL", "HEAD_DIM"])(_KERNELS[name])


def _tuning_length(queries: int, keys: int) -> int:
    """Lengths that share a tuning: the power of two at or above, from 512 to 8192; the best tile varies slowly."""
    return min(max(512, triton.next_power_of_2(max(queries, keys))), 8192)


def _launch_delta(output: Tensor, grad_output: Tensor, delta: Tensor) -> None:
    queries, head_dim = output.shape[-2:]
    programs = delta.numel() // queries * triton.cdiv(queries, DELTA_TILE.block_q)
    constants = {"HEAD_DIM": head_dim, "BLOCK_D": padded(head_dim), "BLOCK_Q": DELTA_TILE.block_q}
    with torch.cuda.device_of(output):
        flash_backward_kernels.delta_kernel[(programs,)](
            output, grad_output, delta, queries, **constants, num_warps=DELTA_TILE.warps
        )
