"""What a tile of a flash kernel costs on a GPU that need not be there: registers, spills, shared memory.

Triton compiles for any target and its wheel holds `ptxas`, so that tiles can be chosen and tested on a machine
without a GPU.  The kernels must not be interpreted (TRITON_INTERPRET unset).
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource

from labkit.nn import flash_backward_kernels, flash_kernels
from labkit.nn.flash_tiles import Tile, kernel_constants

KERNELS: dict[str, Any] = {
    "forward": flash_kernels.forward_kernel,
    "delta": flash_backward_kernels.delta_kernel,
    "grad_kv": flash_backward_kernels.grad_kv_kernel,
    "grad_q": flash_backward_kernels.grad_q_kernel,
}

SHARED_BYTES_LIMIT = {80: 163 * 1024, 90: 227 * 1024}
"""Shared memory a block may use on A100 and H100 (CUDA C++ programming guide, compute capabilities)."""

_POINTER = {torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16"}


@dataclass(frozen=True)
class TileResources:
    """What one compiled kernel uses: per thread, and per block for shared memory."""

    registers: int
    spill_bytes: int
    shared_bytes: int
    wgmma: bool
    """Whether it uses the warp-group matrix instructions of sm_90, the only way to that GPU's peak."""
    serialized: bool
    """Whether ptxas had to wait for each of them ("wgmma ... serialized"): no overlap with the softmax."""


def tile_resources(
    kernel: str, tile: Tile, *, head_dim: int, dtype: torch.dtype, causal: bool, capability: int
) -> TileResources:
    """Compile `kernel` ("forward", "delta", "grad_kv" or "grad_q") for sm_<capability> and read what ptxas says."""
    compiled = triton.compile(
        _source(kernel, tile, head_dim, dtype, causal),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": tile.warps, "num_stages": tile.stages},
    )
    ptx = compiled.asm["ptx"]
    told = _run_ptxas(ptx, capability)
    return TileResources(
        registers=_number(r"Used (\d+) registers", told),
        spill_bytes=_number(r"(\d+) bytes spill stores", told) + _number(r"(\d+) bytes spill loads", told),
        shared_bytes=compiled.metadata.shared,
        wgmma="wgmma.mma_async" in ptx,
        serialized="serialized" in told,
    )


def _source(kernel: str, tile: Tile, head_dim: int, dtype: torch.dtype, causal: bool) -> ASTSource:
    function = KERNELS[kernel]
    names = {parameter.name for parameter in function.params}
    given = kernel_constants(head_dim, dtype, causal, interpreted=False) | tile.blocks()
    constants = {name: value for name, value in given.items() if name in names}
    signature: dict[str, str] = {}
    for parameter in function.params:
        name = parameter.name
        if name in constants or parameter.has_default:
            signature[name] = "constexpr"
            constants.setdefault(name, parameter.default)
        elif name in ("logsumexp_ptr", "delta_ptr"):
            signature[name] = "*fp32"
        elif name.endswith("_ptr"):
            signature[name] = _POINTER[dtype]
        else:
            signature[name] = "fp32" if name == "scale" else "i32"
    # tensors from PyTorch's allocator are aligned; without saying so, loads are not pipelined
    aligned = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(signature) if name.endswith("_ptr")}
    return ASTSource(function, signature, constants, aligned)


def _run_ptxas(ptx: str, capability: int) -> str:
    target = re.search(r"\.target\s+(\w+)", ptx)
    assert target is not None, "PTX without a target"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        options = ["-v", f"--gpu-name={target[1]}", str(source), "-o", f"{folder}/kernel.cubin"]
        command = [get_ptxas(capability).path, *options]
        return subprocess.run(command, check=True, capture_output=True, text=True).stderr


def _number(pattern: str, text: str) -> int:
    found = re.search(pattern, text)
    assert found is not None, f"ptxas did not say {pattern!r}: {text}"
    return int(found[1])
