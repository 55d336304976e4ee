"""What every tile of the flash kernels uses on A100 (sm_80) and H100 (sm_90); needs no GPU.

    python benchmarks/flash_tiles.py                                   # the tiles that ship
    python benchmarks/flash_tiles.py --kernel grad_kv --head-dim 128 --tile 64,128,8,2 --tile 128,128,8,2
    python benchmarks/flash_tiles.py --dtype float32 --capability 80 --full

A tile is block_q,block_k,warps,stages.  Registers a thread, spilled bytes a thread, KiB of shared memory a block; then
whether wgmma is used, and whether ptxas had to serialize it.  Causal unless `--full`.
"""

from __future__ import annotations

import argparse

import torch

from labkit.nn.flash_resources import SHARED_BYTES_LIMIT, tile_resources
from labkit.nn.flash_tiles import KERNEL_NAMES, Tile, tiles_for


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
