"""Tile sizes of the flash kernels: a few per kernel, head dimension and precision, among which to autotune.

How they were chosen: `python benchmarks/kernels.py` compiles each for its GPUs, which need not be at hand, and reads
the machine code. A tile is in `flash_tiles.csv` only if nothing spills inside a loop, and if it fits shared and
tensor memory. Of those the first is the one whose loop comes nearest to the tensor cores' peak, by the rates of all
units; a smaller one follows for short sequences, which have fewer blocks than the GPU has multiprocessors. Spills
outside of a loop cost nothing. Four warps of 32 rows read each tile of shared memory half as often as eight warps of
16.

Letters: block_q queries by block_k keys per tile.  A program owns a block of queries, of keys in "grad_kv".
"""

import csv
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Tile:
    """Sizes a kernel is compiled for: block_q queries by block_k keys; warps and pipeline stages.

    With `specialize`, separate warps load tiles in the forward kernel's main loop.
    """

    block_q: int
    block_k: int
    warps: int
    stages: int
    specialize: int = 0

    def __str__(self) -> str:
        return f"{self.block_q}x{self.block_k} {self.warps}w {self.stages}s{' special' * self.specialize}"

    def constants(self) -> dict[str, int]:
        """Compile-time arguments of a kernel."""
        blocks = {"BLOCK_Q": self.block_q, "BLOCK_K": self.block_k}
        return blocks | ({"WARP_SPECIALIZE": 1} if self.specialize else {})

    def launch_options(self) -> dict[str, int]:
        """The same with Triton's options."""
        return self.constants() | {"num_warps": self.warps, "num_stages": self.stages}


PRECISION = "tf32x3"
"""float32 matmuls on tensor cores: each operand is split in two TF32 numbers and three of the four products are
summed, which drops 2**-22 of a product.  bf16x3 would need fewer registers, but drops 2**-16: not float32."""

TABLE = Path(__file__).with_suffix(".csv")
KERNEL_NAMES = ("forward", "grad_kv", "grad_q")

DELTA_TILE = Tile(64, 0, 4, 1)
"""`delta_kernel` reads two tiles and adds: its size matters little."""

INTERPRETER_TILES = {
    "forward": Tile(64, 32, 4, 1),
    "grad_kv": Tile(32, 64, 4, 1),
    "grad_q": Tile(64, 32, 4, 1),
}
"""Small, so that short sequences have full, diagonal and ragged blocks; the owned block is the larger one."""


def tiles_for(kernel: str, *, dtype: torch.dtype, head_dim: int, capability: tuple[int, int]) -> tuple[Tile, ...]:
    """Tiles to autotune among; none for float32 above a head dimension of 128, where all spill.

    A100 (8.0), Hopper (9.x) and data center Blackwell (10.x) have tables of their own.  All other GPUs from 8.6 have
    99 KiB of shared memory, and tensor cores so slow that smaller tiles reach their peak, too.
    """
    gpu = {9: "Hopper", 10: "Blackwell"}.get(capability[0], "A100" if capability == (8, 0) else "other")
    precision = "float32" if dtype == torch.float32 else "half"
    return tuple(_read_tiles().get((gpu, precision, kernel, str(max(32, padded(head_dim)))), ()))


@cache
def _read_tiles() -> dict[tuple[str, ...], list[Tile]]:
    tiles: dict[tuple[str, ...], list[Tile]] = {}
    with TABLE.open() as file:
        for gpu, precision, kernel, head_dim, *sizes in islice(csv.reader(file), 1, None):
            tiles.setdefault((gpu, precision, kernel, head_dim), []).append(Tile(*map(int, sizes)))
    return tiles


def padded(head_dim: int) -> int:
    """BLOCK_D: the power of two that holds the head dimension."""
    return 1 << (head_dim - 1).bit_length()


def kernel_constants(
    head_dim: int, dtype: torch.dtype, causal: bool, *, interpreted: bool, group: int = 1
) -> dict[str, Any]:
    """Compile-time arguments of the three kernels apart from the tile."""
    return {
        "HEAD_DIM": head_dim,
        "BLOCK_D": padded(head_dim),
        "GROUP": group,
        "CAUSAL": causal,
        "PRECISION": PRECISION if dtype == torch.float32 else "tf32",  # Triton ignores it for half precision
        "INTERPRETED": interpreted,
    }
