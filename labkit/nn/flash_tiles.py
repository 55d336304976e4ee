"""Tile sizes of the flash kernels: a few per kernel, head dimension and precision, among which to autotune.

How they were chosen: `python benchmarks/kernels.py` compiles each for its GPUs, which need not be at hand, and reads
the machine code.  A tile is here only if nothing spills inside a loop, and if it fits shared and tensor memory.  Of
those the first is the one whose loop comes nearest to the tensor cores' peak, by the rates of all units; a smaller one
follows for short sequences, which have fewer blocks than the GPU has multiprocessors.  Spills outside of a loop cost
nothing.  Four warps of 32 rows read each tile of shared memory half as often as eight warps of 16.

Letters: block_q queries by block_k keys per tile.  A program owns a block of queries, of keys in "grad_kv".
"""

from dataclasses import dataclass
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

KERNEL_NAMES = ("forward", "grad_kv", "grad_q")

_Table = dict[tuple[str, int], tuple[Tile, ...]]

_HALF_AMPERE: _Table = {
    ("forward", 32): (Tile(128, 64, 4, 2), Tile(64, 64, 4, 2)),
    ("forward", 64): (Tile(128, 64, 4, 3), Tile(64, 64, 4, 3)),
    ("forward", 128): (Tile(128, 32, 4, 3), Tile(64, 32, 4, 3)),
    ("forward", 256): (Tile(64, 32, 4, 2),),
    ("grad_kv", 32): (Tile(64, 128, 4, 2), Tile(32, 64, 4, 2)),
    ("grad_kv", 64): (Tile(32, 128, 4, 2), Tile(32, 64, 4, 2)),
    ("grad_kv", 128): (Tile(64, 64, 4, 2), Tile(32, 64, 4, 2)),
    ("grad_kv", 256): (Tile(32, 32, 4, 2),),
    ("grad_q", 32): (Tile(128, 64, 4, 2), Tile(64, 64, 4, 2)),
    ("grad_q", 64): (Tile(128, 32, 4, 3), Tile(64, 64, 4, 2)),
    ("grad_q", 128): (Tile(128, 32, 4, 2), Tile(64, 32, 4, 2)),
    ("grad_q", 256): (Tile(32, 32, 4, 2),),
}
_HALF_HOPPER: _Table = {
    ("forward", 32): (Tile(128, 128, 8, 2), Tile(64, 64, 4, 2)),
    ("forward", 64): (Tile(128, 128, 8, 2), Tile(128, 64, 4, 3)),
    ("forward", 128): (Tile(128, 128, 8, 2), Tile(64, 64, 4, 2)),
    ("forward", 256): (Tile(128, 64, 8, 2), Tile(64, 32, 4, 2)),
    ("grad_kv", 32): (Tile(64, 128, 8, 2), Tile(64, 64, 4, 2)),
    ("grad_kv", 64): (Tile(128, 128, 8, 2), Tile(64, 64, 4, 3)),
    ("grad_kv", 128): (Tile(64, 128, 8, 2), Tile(32, 64, 4, 2)),
    ("grad_kv", 256): (Tile(32, 64, 8, 2), Tile(32, 32, 4, 2)),
    ("grad_q", 32): (Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)),
    ("grad_q", 64): (Tile(128, 128, 8, 2), Tile(64, 64, 4, 3)),
    ("grad_q", 128): (Tile(128, 128, 8, 2), Tile(64, 64, 4, 2)),
    ("grad_q", 256): (Tile(128, 32, 8, 2), Tile(64, 32, 4, 2)),
}
_HALF_BLACKWELL = _HALF_HOPPER | {
    ("forward", 32): (Tile(128, 64, 4, 2, specialize=1), Tile(128, 128, 8, 2)),
    ("forward", 64): (Tile(128, 32, 4, 3, specialize=1), Tile(128, 128, 8, 2), Tile(128, 64, 4, 3)),
    ("forward", 256): (Tile(128, 64, 8, 2), Tile(64, 64, 8, 2)),
    ("grad_kv", 32): (Tile(64, 128, 4, 2), Tile(64, 64, 4, 2)),
    ("grad_kv", 128): (Tile(64, 128, 8, 2), Tile(64, 64, 4, 2)),
    ("grad_kv", 256): (Tile(16, 64, 4, 2), Tile(32, 64, 8, 2)),
    ("grad_q", 128): (Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)),
}
_HALF_SMALL = _HALF_AMPERE | {
    ("forward", 128): (Tile(128, 64, 8, 2), Tile(64, 32, 4, 3)),
    ("forward", 256): (Tile(64, 32, 8, 2),),
    ("grad_kv", 32): (Tile(32, 128, 4, 2), Tile(32, 64, 4, 2)),
    ("grad_kv", 64): (Tile(64, 64, 4, 2), Tile(32, 64, 4, 2)),
    ("grad_kv", 128): (Tile(64, 64, 8, 2), Tile(32, 64, 4, 2)),
    ("grad_q", 128): (Tile(64, 64, 4, 2), Tile(64, 32, 4, 2)),
}
_FLOAT32_AMPERE: _Table = {
    ("forward", 32): (Tile(32, 32, 4, 2),),
    ("forward", 64): (Tile(32, 32, 4, 2),),
    ("forward", 128): (Tile(32, 32, 4, 2), Tile(16, 32, 4, 2)),
    ("grad_kv", 32): (Tile(32, 32, 4, 2),),
    ("grad_kv", 64): (Tile(32, 32, 4, 2),),
    ("grad_kv", 128): (Tile(64, 16, 8, 2), Tile(32, 16, 8, 2)),
    ("grad_q", 32): (Tile(32, 32, 4, 2),),
    ("grad_q", 64): (Tile(32, 32, 4, 2),),
    ("grad_q", 128): (Tile(16, 32, 4, 2),),
}
_FLOAT32_HOPPER: _Table = {
    ("forward", 32): (Tile(128, 64, 8, 2), Tile(64, 32, 4, 2)),
    ("forward", 64): (Tile(128, 32, 8, 2), Tile(64, 32, 4, 2)),
    ("forward", 128): (Tile(128, 32, 8, 2), Tile(64, 32, 4, 2)),
    ("grad_kv", 32): (Tile(32, 128, 8, 2), Tile(32, 64, 4, 2)),
    ("grad_kv", 64): (Tile(32, 128, 8, 2), Tile(32, 32, 4, 2)),
    ("grad_kv", 128): (Tile(64, 16, 8, 2),),
    ("grad_q", 32): (Tile(128, 32, 8, 2), Tile(64, 32, 4, 2)),
    ("grad_q", 64): (Tile(128, 32, 8, 2), Tile(64, 32, 4, 2)),
    ("grad_q", 128): (Tile(16, 32, 4, 2),),
}
_FLOAT32_BLACKWELL = _FLOAT32_AMPERE | {
    ("forward", 32): (Tile(128, 64, 8, 2),),
    ("forward", 64): (Tile(128, 32, 8, 2), Tile(64, 32, 4, 2)),
    ("forward", 128): (Tile(16, 32, 4, 2),),
}
_FLOAT32_SMALL = _FLOAT32_AMPERE | {
    ("forward", 128): (Tile(16, 32, 4, 2),),
    ("grad_kv", 128): (Tile(32, 16, 8, 2),),
}

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
    tables = {8: (_FLOAT32_AMPERE, _HALF_AMPERE), 9: (_FLOAT32_HOPPER, _HALF_HOPPER)}
    tables |= {10: (_FLOAT32_BLACKWELL, _HALF_BLACKWELL)}
    large = capability == (8, 0) or capability[0] in (9, 10)
    single, half = tables[capability[0]] if large else (_FLOAT32_SMALL, _HALF_SMALL)
    return (single if dtype == torch.float32 else half).get((kernel, max(32, padded(head_dim))), ())


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
