"""Tiles that the FlashAttention kernels are compiled for, by GPU, dtype and head dimension.

`python benchmarks/kernels.py` compiles each for GPUs that need not be present, and reads the
machine code. A tile is in `flash_tiles.csv` only if nothing spills inside a loop, and if it fits
shared and tensor memory. The first comes nearest to the tensor cores' peak; a smaller one follows
for short sequences, which have fewer blocks.
"""

import csv
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch
import triton

# Divisor of the addresses and row lengths of tensors that descriptors (TMA) load.
DESCRIPTOR_ALIGNMENT = 16


class Tile(NamedTuple):
    """Sizes a kernel is compiled for: block_q queries by block_k keys; warps and pipeline stages.

    Of the forward kernel's main loop: with `specialize` above 0 separate warps load tiles, with 2
    by tensor descriptors; with `ahead` scores are computed one block ahead.
    """

    block_q: int
    block_k: int
    warps: int
    stages: int
    specialize: int = 0
    ahead: int = 0

    def __str__(self) -> str:
        text = f"{self.block_q}x{self.block_k} {self.warps}w {self.stages}s"
        if self.specialize:
            text += " special"
        if self.ahead:
            text += " ahead"
        return text

    @property
    def has_descriptors(self) -> bool:
        """Whether it loads by tensor descriptors, from aligned addresses only."""
        return self.specialize == 2

    def constants(self) -> dict[str, int]:
        """Compile-time arguments of a kernel."""
        blocks = {"BLOCK_Q": self.block_q, "BLOCK_K": self.block_k}
        if self.specialize:
            blocks["WARP_SPECIALIZE"] = self.specialize
        if self.ahead:
            blocks["AHEAD"] = self.ahead
        return blocks


# `delta_kernel` reads two tiles and adds: its size matters little.
DELTA_TILE = Tile(64, 0, 4, 1)
# Small, so that short sequences have full, diagonal and ragged blocks. A program's own block is the
# larger one.
INTERPRETER_TILES = {
    "forward": Tile(64, 32, 4, 1, ahead=1),
    "grad_kv": Tile(32, 64, 4, 1),
    "grad_q": Tile(64, 32, 4, 1),
}


def tiles_for(
    kernel: str, *, dtype: torch.dtype, head_dim: int, capability: tuple[int, int]
) -> tuple[Tile, ...]:
    """Tiles to autotune among; none for float32 above a head dimension of 128, where all spill.

    GPUs other than A100 (8.0), Hopper (9.x) and data center Blackwell (10.x) have 99 KiB of shared
    memory, and tensor cores so slow that smaller tiles reach their peak. Tiles loaded by
    descriptors need rows of a multiple of 16 bytes.
    """
    gpu = {9: "Hopper", 10: "Blackwell"}.get(capability[0], "other")
    if capability == (8, 0):
        gpu = "A100"
    # Kernels pad a head dimension to a power of two; 16 takes the tiles of 32.
    padded = max(32, triton.next_power_of_2(head_dim))
    precision = "float32" if dtype == torch.float32 else "half"
    key = [gpu, precision, kernel, str(padded)]
    is_aligned = head_dim * dtype.itemsize % DESCRIPTOR_ALIGNMENT == 0
    with Path(__file__).with_name("flash_tiles.csv").open() as file:
        tiles = [
            Tile(*map(int, row[4:])) for row in islice(csv.reader(file), 1, None) if row[:4] == key
        ]
    return tuple(tile for tile in tiles if is_aligned or not tile.has_descriptors)
