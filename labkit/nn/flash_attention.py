"""FlashAttention-2 in Triton: checks the inputs, chooses tiles, launches the kernels.

The forward pass saves q, k, v, the output and one float32 logsumexp per query, from which the
backward pass recomputes the probabilities: memory is linear in the sequence. Source: Dao 2023,
FlashAttention-2 (arXiv:2307.08691).

Runs on CUDA GPUs of compute capability 8.0 and above, and for tests under Triton's interpreter
(TRITON_INTERPRET=1 set before Triton is imported), thousands of times slower.

Tiles are in `flash_tiles.py`. Before a tile's first use on a device its results are compared with
float64; one that is wrong or does not compile is left out.

Dimension letters as in `attention.py`: (..., Q, D) queries, (..., K, D) keys and values.
"""

import functools
import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from labkit.nn import attention, flash_backward_kernels, flash_kernels
from labkit.nn.attention import KERNEL_DTYPES, VersionWatch, dtype_name, query_group
from labkit.nn.flash_tiles import (
    DELTA_TILE,
    DESCRIPTOR_ALIGNMENT,
    INTERPRETER_TILES,
    Tile,
    tiles_for,
)

HEAD_DIMS = range(16, 257)
"""Head dimensions of the kernels, which pad one that is not a power of two."""
MAX_FLOAT32_HEAD_DIM = 128
MIN_CAPABILITY = (8, 0)
PROBE_QUERIES = 300
PROBE_KEYS = 333  # full, diagonal and ragged blocks of every tile
PRECISION = "tf32x3"
"""Precision of float32 matmuls on tensor cores.

Each operand is split in two TF32 numbers, and three of the four products are summed, which drops
2**-22 of a product.
"""

INTERPRETED = not isinstance(flash_kernels.forward_kernel, triton.JITFunction)
KERNELS: dict[str, Any] = {
    "forward": flash_kernels.forward_kernel,
    "grad_kv": flash_backward_kernels.grad_kv_kernel,
    "grad_q": flash_backward_kernels.grad_q_kernel,
}


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
        if (reason := unavailable_reason(q.device, q.dtype, q.shape[-1])) is not None:
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
            output, _ = run_kernel("forward", (q, k, v), ctx.causal, ctx.scale)
        grad_output = grad_output.contiguous()
        inputs = (q, k, v, grad_output, logsumexp, _delta(output, grad_output))
        (grad_q,) = run_kernel("grad_q", inputs, ctx.causal, ctx.scale)
        grad_k, grad_v = run_kernel("grad_kv", inputs, ctx.causal, ctx.scale)
        return grad_q, grad_k, grad_v, None, None


# a compiled model calls the kernels as they are, at the price of a graph break
@torch.compiler.disable
def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool = False, *, scale: float | None = None
) -> Tensor:
    """Compute attention on the GPU, differentiably. `scale` defaults to 1 / sqrt(D)."""
    return FlashAttention.apply(q, k, v, causal, scale)


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
    name: str, inputs: Sequence[Tensor], causal: bool, scale: float | None, tile: Tile | None = None
) -> list[Tensor]:
    """Run one kernel on contiguous tensors.

    "forward": output (..., Q, D) and base-2 logsumexp (..., Q) of q, k, v. "grad_q", "grad_kv": dQ,
    or dK and dV, of q, k, v, dO, the logsumexp and delta. `tile` replaces the tuned ones.
    """
    results = [torch.empty_like(x) for x in (inputs[1:3] if name == "grad_kv" else inputs[:1])]
    if name == "forward":
        results.append(results[0].new_empty(results[0].shape[:-1], dtype=torch.float32))
    _launch(name, (*inputs, *results), causal, scale, tile)
    return results


def _delta(output: Tensor, grad_output: Tensor) -> Tensor:
    """rowsum(dO * O), (..., Q), in float32."""
    queries, head_dim = output.shape[-2:]
    delta = torch.empty(output.shape[:-1], dtype=torch.float32, device=output.device)
    programs = delta.numel() // queries * triton.cdiv(queries, DELTA_TILE.block_q)
    constants = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "BLOCK_Q": DELTA_TILE.block_q,
    }
    kernel = flash_backward_kernels.delta_kernel[(programs,)]
    with torch.cuda.device_of(output):
        kernel(output, grad_output, delta, queries, **constants, num_warps=DELTA_TILE.warps)
    return delta


def _launch(
    name: str, tensors: tuple[Tensor, ...], causal: bool, scale: float | None, tile: Tile | None
) -> None:
    """Start one program for every block of queries of every head.

    For "grad_kv", of keys. q and k come first.
    """
    q, k = tensors[:2]
    queries = q.shape[-2]
    keys = k.shape[-2]
    head_dim = q.shape[-1]
    group = query_group(q, k)
    owner, block = (k, "BLOCK_K") if name == "grad_kv" else (q, "BLOCK_Q")
    length = owner.shape[-2]
    heads = owner.numel() // (length * head_dim)

    def grid(constants: dict[str, Any]) -> tuple[int]:
        return (heads * triton.cdiv(length, constants[block]),)

    constants = kernel_constants(head_dim, q.dtype, causal, group=group, interpreted=INTERPRETED)
    # the best tile varies slowly: lengths and rows are tuned together up to the next power of two
    sizes = ((max(queries, keys), 8192), (heads * length, 2**20))
    size_class = tuple(
        min(max(512, triton.next_power_of_2(size)), largest) for size, largest in sizes
    )
    tiles: tuple[Tile, ...] = (tile or INTERPRETER_TILES[name],)
    with torch.cuda.device_of(q):  # Triton launches on the current device
        if tile is None and not INTERPRETED:
            tiles = _correct_tiles(name, head_dim, group, q.dtype, causal, q.device)
            if any(x.data_ptr() % DESCRIPTOR_ALIGNMENT for x in tensors):
                tiles = tuple(tile for tile in tiles if tile.specialize < 2)
        # Triton asks for memory at a launch
        if not INTERPRETED and any(tile.specialize == 2 for tile in tiles):
            triton.set_allocator(
                lambda size, *_: torch.empty(size, dtype=torch.int8, device=q.device)
            )
        kernel = _autotuned(name, tiles, size_class)
        kernel[grid](*tensors, queries, keys, attention.softmax_scale(q, scale), **constants)


def kernel_constants(
    head_dim: int, dtype: torch.dtype, causal: bool, *, interpreted: bool, group: int = 1
) -> dict[str, Any]:
    """Compile-time arguments of the three kernels apart from the tile."""
    return {
        "HEAD_DIM": head_dim,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "GROUP": group,
        "CAUSAL": causal,
        # Triton ignores it for half precision
        "PRECISION": PRECISION if dtype == torch.float32 else "tf32",
        "INTERPRETED": interpreted,
    }


@functools.cache
def _autotuned(name: str, tiles: tuple[Tile, ...], size_class: tuple[int, ...]) -> Any:
    """Return the kernel with Triton's autotuner.

    It times tiles once per size class, mask, head dimension, group and dtype.
    """
    configs = [
        triton.Config(tile.constants(), num_warps=tile.warps, num_stages=tile.stages)
        for tile in tiles
    ]
    return triton.autotune(configs, key=["CAUSAL", "HEAD_DIM", "GROUP"])(KERNELS[name])


@functools.cache
def _correct_tiles(
    name: str, head_dim: int, group: int, dtype: torch.dtype, causal: bool, device: torch.device
) -> tuple[Tile, ...]:
    """The kernel's tiles that agree with float64 on `device`; RuntimeError if none does."""
    tiles = tiles_for(
        name, dtype=dtype, head_dim=head_dim, capability=torch.cuda.get_device_capability(device)
    )
    faults = {
        tile: _tile_fault(name, tile, head_dim, group, dtype, causal, device) for tile in tiles
    }
    wrong = {tile: fault for tile, fault in faults.items() if fault}
    kernel = f"{name} kernel, head dimension {head_dim}, {dtype_name(dtype)}, on {device}"
    for tile, fault in wrong.items():
        warnings.warn(f"{kernel}: tile {tile} is left out: {fault}", stacklevel=2)
    if len(wrong) == len(tiles):
        raise RuntimeError(f"{kernel}: no tile can be used: {'; '.join(wrong.values())}")
    return tuple(tile for tile in tiles if tile not in wrong)


def _tile_fault(
    name: str,
    tile: Tile,
    head_dim: int,
    group: int,
    dtype: torch.dtype,
    causal: bool,
    device: torch.device,
) -> str | None:
    """Compare a kernel with this tile with float64; return the reason against it, or None."""
    (q, k, v, grad_output, output, logsumexp), expected = _probe(
        head_dim, group, dtype, causal, device
    )
    try:
        saved = () if name == "forward" else (grad_output, logsumexp, _delta(output, grad_output))
        results = run_kernel(name, (q, k, v, *saved), causal, None, tile)
    except Exception as error:  # of several types, by what fails: compilation, resources, launch
        return str(error).partition("\n")[0] or type(error).__name__
    limit = max(2 * torch.finfo(dtype).eps, 2**-17)
    for result, exact in zip(results, expected[name], strict=True):
        off = float((result.double() - exact).norm() / exact.norm())
        if not off <= limit:
            return f"relative error {off:.1e}, expected at most {limit:.1e}"
    return None


@functools.lru_cache(maxsize=1)
def _probe(
    head_dim: int, group: int, dtype: torch.dtype, causal: bool, device: torch.device
) -> tuple[list[Tensor], dict[str, tuple[Tensor, ...]]]:
    """Make a small problem and its results in float64, by kernel.

    q, k, v, dO, and the output and base-2 logsumexp.
    """
    generator = torch.Generator().manual_seed(0)
    sizes = ((group, PROBE_QUERIES), (1, PROBE_KEYS), (1, PROBE_KEYS), (group, PROBE_QUERIES))
    inputs = [torch.randn(*size, head_dim, generator=generator).to(device, dtype) for size in sizes]
    with torch.enable_grad(), torch.autocast(device.type, enabled=False):
        q, k, v = (x.double().requires_grad_() for x in inputs[:3])
        output = attention.naive_attention(q, k, v, causal)
        grad_q, grad_k, grad_v = torch.autograd.grad(output, (q, k, v), inputs[3].double())
        logsumexp = torch.logsumexp(
            attention.masked_scores(q, k, causal), dim=-1
        ).detach() / math.log(2)
    output = output.detach()
    inputs += [output.to(dtype), logsumexp.float()]
    return inputs, {
        "forward": (output, logsumexp),
        "grad_kv": (grad_k, grad_v),
        "grad_q": (grad_q,),
    }
