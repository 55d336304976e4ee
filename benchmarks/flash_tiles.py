"""What every tile of the flash kernels uses on A100 (sm_80) and H100 (sm_90); needs no GPU.

    python benchmarks/flash_tiles.py                                   # the tiles that ship
    python benchmarks/flash_tiles.py --kernel grad_kv --head-dim 128 --tile 64,128,8,2 --tile 128,128,8,2
    python benchmarks/flash_tiles.py --dtype float32 --capability 80 --full

A tile is block_q,block_k,warps,stages.  Registers a thread, spilled bytes a thread, KiB of shared memory a block; then
whether wgmma is used, and whether ptxas had to serialize it.  Causal unless `--full`.

Triton compiles for any target and its wheel holds `ptxas`.  The kernels must not be interpreted (TRITON_INTERPRET
unset).
"""

from __future__ import annotations

import argparse
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
from labkit.nn.flash_tiles import KERNEL_NAMES, Tile, kernel_constants, tiles_for

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


def main() -> None:
    options = _options()
    print(f"{'kernel':8} {'head_dim':8} {'dtype':8} {'target':6} {'tile':16} registers spills KiB   matrix")
    for capability in options.capability:
        for dtype in (getattr(torch, name) for name in options.dtype):
            for head_dim in options.head_dim:
                for kernel in options.kernel:
                    shipped = tiles_for(kernel, dtype=dtype, head_dim=head_dim, capability=divmod(capability, 10))
                    for tile in options.tile or shipped:
                        _print_row(kernel, tile, head_dim, dtype, capability, not options.full)


def _print_row(kernel: str, tile: Tile, head_dim: int, dtype: torch.dtype, capability: int, causal: bool) -> None:
    found = tile_resources(kernel, tile, head_dim=head_dim, dtype=dtype, causal=causal, capability=capability)
    name = f"{tile.block_q}x{tile.block_k} {tile.warps}w {tile.stages}s"
    kib = f"{found.shared_bytes / 1024:.0f}" + (" !" if found.shared_bytes > SHARED_BYTES_LIMIT[capability] else "")
    matrix = ("wgmma" if found.wgmma else "mma") + (" serialized" if found.serialized else "")
    row = f"{kernel:8} {head_dim:<8} {str(dtype).removeprefix('torch.'):8} sm_{capability}  {name:16} "
    print(f"{row}{found.registers:<9} {found.spill_bytes:<6} {kib:5} {matrix}", flush=True)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernel", action="append", choices=KERNEL_NAMES)
    parser.add_argument("--head-dim", action="append", type=int)
    parser.add_argument("--dtype", action="append", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--capability", action="append", type=int, choices=sorted(SHARED_BYTES_LIMIT))
    parser.add_argument("--tile", action="append", type=lambda text: Tile(*map(int, text.split(","))))
    parser.add_argument("--full", action="store_true", help="without the causal mask")
    options = parser.parse_args()
    options.kernel = options.kernel or list(KERNEL_NAMES)
    options.head_dim = options.head_dim or [32, 64, 128]
    options.dtype = options.dtype or ["bfloat16", "float32"]
    options.capability = options.capability or sorted(SHARED_BYTES_LIMIT)
    return options


if __name__ == "__main__":
    main()
