"""Tile sizes of the flash kernels: a few for each kernel, head dimension and precision, among which to autotune.

How they were chosen: each was compiled for its GPU (sm_80 or sm_90), which need not be at hand, and is here only if
nothing spills there.  Of those, the largest: arithmetic grows with block_q * block_k, loads with their sum.  A smaller
one stands by for short sequences, which have fewer blocks than the GPU has multiprocessors.  The comments give
registers a thread and KiB of shared memory a block (causal, head dimension as in the key, Triton 3.7.1), as printed by
`python benchmarks/flash_tiles.py`.

What spills, for comparison: bytes for sm_90 in half precision: forward d128 128x128 with 4 warps 3076, 128x64 with 4
warps 396; dK/dV d64 64x128 with 4 warps 4048; dK/dV d128 128x128 with 8 warps 4008.  On sm_80 dK/dV d128 64x128 with
8 warps 208.  float32 splits each operand in two (see `PRECISION`) and needs far smaller tiles: d128 dK/dV 32x32 with
4 warps spills 3272.

B200 (sm_100) gets the tiles for Hopper, and in float32 with d64 some spill there: forward 128x32 112, 64x32 with 4
warps 184 (with 8 warps nothing), dQ 128x32 1048, 64x32 1300.  dK/dV 32x128 wants more tensor memory than there is;
Triton refuses to load it, and the autotuner is left with 32x32, which fits.

Letters: block_q queries by block_k keys a tile.  A program owns a block of queries, of keys in "grad_kv".
"""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Tile:
    """Sizes a kernel is compiled for: block_q queries by block_k keys; warps and pipeline stages."""

    block_q: int
    block_k: int
    warps: int
    stages: int
    specialize: int = 0

    def constants(self) -> dict[str, int]:
        """The compile-time arguments of a kernel."""
        blocks = {"BLOCK_Q": self.block_q, "BLOCK_K": self.block_k}
        return blocks | ({"WARP_SPECIALIZE": 1} if self.specialize else {})

    def launch_options(self) -> dict[str, int]:
        """The same with Triton's own options."""
        return self.constants() | {"num_warps": self.warps, "num_stages": self.stages}

    def __str__(self) -> str:
        special = " special" if self.specialize else ""
        return f"{self.block_q}x{self.block_k} {self.warps}w {self.stages}s{special}"


PRECISION = "tf32x3"
"""float32 products on tensor cores: each operand is split in two TF32 numbers and three of the four products are
summed, which drops 2**-22 of a product.  bf16x3 would need fewer registers, but drops 2**-16: not float32."""

KERNEL_NAMES = ("forward", "grad_kv", "grad_q")

_HALF_HOPPER = {
    ("forward", 32): (Tile(128, 64, 4, 2), Tile(128, 128, 8, 2), Tile(64, 64, 4, 2)),  # 194/24, 190/40, 93/20
    ("forward", 64): (Tile(128, 128, 8, 2), Tile(128, 64, 4, 3), Tile(64, 64, 4, 3)),  # 206/80, 246/64, 136/56
    ("forward", 128): (Tile(128, 128, 8, 2), Tile(128, 64, 8, 3), Tile(64, 64, 4, 3)),  # 255/160, 198/128, 198/112
    ("forward", 256): (Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)),
    ("grad_kv", 256): (Tile(32, 64, 8, 2), Tile(32, 32, 4, 2)),
    ("grad_q", 256): (Tile(128, 32, 8, 2), Tile(64, 64, 8, 2)),
    ("grad_kv", 32): (Tile(64, 128, 8, 2), Tile(64, 64, 4, 2)),  # 175/32, 164/24
    ("grad_kv", 64): (Tile(64, 128, 8, 2), Tile(64, 64, 4, 3)),  # 223/64, 223/65
    ("grad_kv", 128): (Tile(64, 128, 8, 2), Tile(32, 128, 8, 3), Tile(32, 64, 4, 2)),  # 255/128, 236/112, 250/64
    ("grad_q", 32): (Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)),  # 124/32, 125/24
    ("grad_q", 64): (Tile(128, 128, 8, 2), Tile(128, 64, 8, 3), Tile(64, 64, 4, 3)),  # 218/96, 146/80, 138/64
    ("grad_q", 128): (Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)),  # 226/128, 215/96
}

_HALF_AMPERE = {
    ("forward", 32): (Tile(128, 64, 4, 2), Tile(64, 64, 4, 2)),  # 186/16, 106/12
    ("forward", 64): (Tile(128, 128, 8, 3), Tile(128, 64, 8, 3), Tile(64, 64, 4, 3)),  # 198/80, 182/48, 187/40
    ("forward", 128): (Tile(128, 64, 8, 2), Tile(128, 32, 8, 3), Tile(64, 32, 4, 3)),  # 218/64, 197/64, 221/52
    ("forward", 256): (Tile(64, 32, 4, 2),),
    ("grad_kv", 256): (Tile(32, 32, 4, 2),),
    ("grad_q", 256): (Tile(32, 32, 4, 2),),
    ("grad_kv", 32): (Tile(32, 128, 8, 2), Tile(32, 64, 4, 2)),  # 163/20, 128/12
    ("grad_kv", 64): (Tile(32, 128, 8, 2), Tile(32, 64, 4, 2)),  # 220/40, 255/24
    ("grad_kv", 128): (Tile(64, 64, 8, 2), Tile(32, 64, 8, 3)),  # 178/72, 172/68
    ("grad_q", 32): (Tile(128, 64, 8, 2), Tile(64, 64, 4, 2)),  # 176/24, 166/16
    ("grad_q", 64): (Tile(128, 64, 8, 2), Tile(64, 64, 4, 3)),  # 185/48, 206/48
    ("grad_q", 128): (Tile(128, 32, 8, 2), Tile(64, 32, 4, 2)),  # 197/80, 203/52
}

_FLOAT32_HOPPER = {
    ("forward", 32): (Tile(128, 64, 8, 2), Tile(64, 32, 4, 2)),  # 200/64, 132/32
    ("forward", 64): (Tile(128, 32, 8, 2), Tile(64, 32, 8, 2), Tile(64, 32, 4, 2)),  # 203/96, 203/64, 185/64
    ("forward", 128): (Tile(16, 16, 4, 2),),  # 192/34
    ("forward", 256): (Tile(16, 16, 4, 2),),
    ("grad_kv", 256): (Tile(16, 16, 8, 2),),
    ("grad_q", 256): (Tile(16, 16, 4, 2),),
    ("grad_kv", 32): (Tile(32, 128, 8, 2), Tile(32, 64, 4, 2)),  # 195/80, 203/48
    ("grad_kv", 64): (Tile(32, 128, 8, 2), Tile(32, 32, 4, 2)),  # 255/160, 233/48
    ("grad_kv", 128): (Tile(64, 16, 8, 2), Tile(32, 16, 8, 2)),  # 255/96, 198/64
    ("grad_q", 32): (Tile(128, 32, 8, 2), Tile(64, 32, 4, 2)),  # 122/80, 128/48
    ("grad_q", 64): (Tile(128, 32, 8, 2), Tile(64, 32, 4, 2)),  # 190/160, 203/96
    ("grad_q", 128): (Tile(16, 32, 4, 2),),  # 254/64
}

_FLOAT32_AMPERE = {
    ("forward", 32): (Tile(128, 32, 8, 2), Tile(32, 32, 4, 2)),  # 185/40, 181/16
    ("forward", 64): (Tile(32, 32, 4, 2),),  # 199/40
    ("forward", 128): (Tile(16, 32, 4, 2),),  # 188/52
    ("forward", 256): (Tile(16, 16, 4, 2),),
    ("grad_kv", 256): (Tile(16, 16, 8, 2),),
    ("grad_q", 256): (Tile(16, 16, 4, 2),),
    ("grad_kv", 32): (Tile(32, 32, 4, 2),),  # 255/22
    ("grad_kv", 64): (Tile(32, 32, 4, 2),),  # 242/48
    ("grad_kv", 128): (Tile(64, 16, 8, 2), Tile(32, 16, 8, 2)),  # 255/96, 219/64
    ("grad_q", 32): (Tile(32, 32, 4, 2),),  # 254/24
    ("grad_q", 64): (Tile(32, 32, 8, 2), Tile(16, 32, 4, 2)),  # 168/48, 163/32
    ("grad_q", 128): (Tile(16, 32, 4, 2),),  # 254/64
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
    """The tiles to autotune among.  The tiles for Hopper count on wgmma and 227 KiB of shared memory.

    So data center GPUs of capability 9 and 10 get those (at a price on 10, see above); Ampere, Ada (8.x) and GeForce
    Blackwell (12.x) get the others, all of which fit the 99 KiB of the smaller chips.
    """
    hopper = capability[0] in (9, 10)
    if dtype == torch.float32:
        table = _FLOAT32_HOPPER if hopper else _FLOAT32_AMPERE
    else:
        table = _HALF_HOPPER if hopper else _HALF_AMPERE
    return table[kernel, max(32, padded(head_dim))]


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
