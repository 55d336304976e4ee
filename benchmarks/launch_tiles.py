"""Launches every tile of the flash kernels on the GPU that is here, each in another process.

    python -m benchmarks.launch_tiles

A tile that does not return in 20 s is ended, and one that breaks CUDA breaks its process only.
Exits 1 unless all agree with float64.
"""

import sys
from concurrent.futures import ThreadPoolExecutor
from itertools import product

import torch

from labkit.nn.attention import dtype_name
from labkit.nn.flash_checks import Case, fault_in_child
from labkit.nn.flash_launch import KERNELS
from labkit.nn.flash_tiles import Tile, tiles_for

# Processes, which mostly import torch and compile; each holds half a GiB of the GPU.
AT_ONCE = 4


def all_tiles(capability: tuple[int, int]) -> list[tuple[Case, Tile]]:
    """Return what is shipped for a GPU, with and without the causal mask."""
    device = torch.device("cuda", 0)
    found = []
    for name, head_dim, dtype in product(
        KERNELS, (32, 64, 128, 256), (torch.bfloat16, torch.float32)
    ):
        tiles = tiles_for(name, dtype=dtype, head_dim=head_dim, capability=capability)
        for tile, causal in product(tiles, (False, True)):
            found.append((Case(name, head_dim, 1, dtype, causal, device), tile))
    return found


def main() -> int:
    if not torch.cuda.is_available():
        print("there is no GPU that torch can use")
        return 1
    tiles = all_tiles(torch.cuda.get_device_capability())
    wrong = 0
    with ThreadPoolExecutor(AT_ONCE) as pool:
        faults = pool.map(lambda pair: fault_in_child(*pair)[0], tiles)
        for (case, tile), fault in zip(tiles, faults, strict=True):
            wrong += fault is not None
            mask = "causal" if case.causal else "full"
            about = f"{case.kernel:8}{dtype_name(case.dtype):9}{case.head_dim:<4}{mask:7}"
            print(f"{about}{tile!s:22}{fault or 'right'}", flush=True)
    print(f"{wrong} of {len(tiles)} tiles are wrong or do not return")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
