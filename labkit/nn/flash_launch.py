"""Launches the FlashAttention kernels with given tiles: outputs, grids, compile-time arguments.

`flash_checks.py` decides which tiles are given.
"""

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
import triton
from torch import Tensor

from labkit.nn import attention, flash_backward_kernels, flash_kernels
from labkit.nn.attention import query_group
from labkit.nn.flash_tiles import DELTA_TILE, Tile

# Precision of float32 matmuls on tensor cores. Each operand is split in two TF32 numbers, and three
# of the four products are summed, which drops 2**-22 of a product.
PRECISION = "tf32x3"

INTERPRETED = not isinstance(flash_kernels.forward_kernel, triton.JITFunction)
KERNELS: dict[str, Any] = {
    "forward": flash_kernels.forward_kernel,
    "grad_kv": flash_backward_kernels.grad_kv_kernel,
    "grad_q": flash_backward_kernels.grad_q_kernel,
}


def launch(
    name: str,
    inputs: Sequence[Tensor],
    causal: bool,
    scale: float | None,
    tiles: Sequence[Tile],
    *,
    compile_only: bool = False,
) -> list[Tensor]:
    """Run one kernel on contiguous tensors, with the fastest of `tiles`.

    "forward": output (..., Q, D) and base-2 logsumexp (..., Q) of q, k, v. "grad_q", "grad_kv": dQ,
    or dK and dV, of q, k, v, dO, the logsumexp and delta. With `compile_only` nothing runs.
    """
    q, k, v = inputs[:3]
    results = _allocate_results(name, q, k, v)
    queries = q.shape[-2]
    keys = k.shape[-2]
    head_dim = q.shape[-1]
    group = query_group(q, k)
    # One program for every block of queries of every head; for dK and dV, of keys.
    owner = q
    block = "BLOCK_Q"
    if name == "grad_kv":
        owner = k
        block = "BLOCK_K"
    length = owner.shape[-2]
    heads = owner.numel() // (length * head_dim)

    def grid(constants: dict[str, Any]) -> tuple[int]:
        return (heads * triton.cdiv(length, constants[block]),)

    constants = kernel_constants(head_dim, q.dtype, causal, group=group, interpreted=INTERPRETED)
    # The best tile varies slowly: sizes up to the next power of two are tuned together.
    size_class = (_power_of_2(max(queries, keys), 8192), _power_of_2(heads * length, 2**20))
    kernel = _autotuned(name, tuple(tiles), size_class)
    with torch.cuda.device_of(q):  # Triton launches on the current device
        # Descriptors that a kernel makes stand in memory that Triton asks for at the launch.
        if not INTERPRETED and any(tile.has_descriptors for tile in tiles):
            triton.set_allocator(
                lambda size, *_: torch.empty(size, dtype=torch.int8, device=q.device)
            )
        start = partial(kernel.warmup, grid=grid) if compile_only else kernel[grid]
        scale = attention.softmax_scale(q, scale)
        start(*inputs, *results, queries, keys, scale, **constants)
    return results


def _allocate_results(name: str, q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    if name == "grad_kv":
        return [torch.empty_like(k), torch.empty_like(v)]
    if name == "grad_q":
        return [torch.empty_like(q)]
    return [torch.empty_like(q), q.new_empty(q.shape[:-1], dtype=torch.float32)]


def _power_of_2(size: int, largest: int) -> int:
    """Return the next power of two, from 512 to `largest`."""
    return min(max(512, triton.next_power_of_2(size)), largest)


def delta(output: Tensor, grad_output: Tensor) -> Tensor:
    """rowsum(dO * O), (..., Q), in float32."""
    queries, head_dim = output.shape[-2:]
    result = torch.empty(output.shape[:-1], dtype=torch.float32, device=output.device)
    programs = result.numel() // queries * triton.cdiv(queries, DELTA_TILE.block_q)
    constants = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "BLOCK_Q": DELTA_TILE.block_q,
    }
    kernel = flash_backward_kernels.delta_kernel[(programs,)]
    with torch.cuda.device_of(output):
        kernel(output, grad_output, result, queries, **constants, num_warps=DELTA_TILE.warps)
    return result


def kernel_constants(
    head_dim: int, dtype: torch.dtype, causal: bool, *, interpreted: bool, group: int = 1
) -> dict[str, Any]:
    """Compile-time arguments of the three kernels apart from the tile."""
    return {
        "HEAD_DIM": head_dim,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "GROUP": group,
        "CAUSAL": causal,
        # Triton ignores it for half precision.
        "PRECISION": PRECISION if dtype == torch.float32 else "tf32",
        "INTERPRETED": interpreted,
    }


@cache
def _autotuned(name: str, tiles: tuple[Tile, ...], size_class: tuple[int, ...]) -> Any:
    """Return the kernel with Triton's autotuner.

    It times tiles once per size class, mask, head dimension, group and dtype.
    """
    configs = [
        triton.Config(tile.constants(), num_warps=tile.warps, num_stages=tile.stages)
        for tile in tiles
    ]
    return triton.autotune(configs, key=["CAUSAL", "HEAD_DIM", "GROUP"])(KERNELS[name])
