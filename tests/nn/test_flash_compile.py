"""Without a GPU: every tile the flash kernels ship compiles for its GPU, and fits it.

`make test` compiles the first tile of each kernel for bfloat16, head dimensions 64 and 128 and causal attention, on
both GPUs, or all of them with another Triton than they were chosen with; `make test-all` every tile, of every type and
head dimension, a second or more each.
"""

import pytest
import torch

pytest.importorskip("triton")

import triton

from benchmarks.flash_tiles import SHARED_BYTES_LIMIT, TileResources, tile_resources
from labkit.nn import flash_attention
from labkit.nn.flash_tiles import DELTA_TILE, KERNEL_NAMES, Tile, tiles_for

pytestmark = pytest.mark.skipif(flash_attention.INTERPRETED, reason="interpreted kernels cannot be compiled")

F32, BF16 = torch.float32, torch.bfloat16
CAPABILITIES = [80, 90]
# Tiles were chosen with this Triton.  Another one allots registers differently: there, a tile may spill a little as
# long as the autotuner has one that does not.
CHOSEN_WITH = (3, 7)
SAME_TRITON = tuple(map(int, triton.__version__.split(".")[:2])) == CHOSEN_WITH

SLOTS = [(kernel, head_dim) for kernel in KERNEL_NAMES for head_dim in (32, 64, 128)]


def _tiles(kernel: str, head_dim: int, dtype: torch.dtype, capability: int) -> tuple[Tile, ...]:
    return tiles_for(kernel, dtype=dtype, head_dim=head_dim, capability=divmod(capability, 10))


def _check(found: list[TileResources], capability: int) -> None:
    spills = [resources.spill_bytes for resources in found]
    assert max(spills) == 0 if SAME_TRITON else min(spills) <= 64, spills
    assert max(resources.shared_bytes for resources in found) <= SHARED_BYTES_LIMIT[capability]


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"sm{c}")
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("kernel", KERNEL_NAMES)
def test_the_first_tile_fits_and_uses_the_tensor_cores(kernel: str, head_dim: int, capability: int) -> None:
    found = [
        tile_resources(kernel, tile, head_dim=head_dim, dtype=BF16, causal=True, capability=capability)
        for tile in _tiles(kernel, head_dim, BF16, capability)[: 1 if SAME_TRITON else None]
    ]
    _check(found, capability)
    if capability == 90:
        assert all(resources.wgmma for resources in found)
        assert not any(resources.serialized for resources in found) or not SAME_TRITON


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"sm{c}")
@pytest.mark.parametrize(("kernel", "head_dim"), SLOTS, ids=lambda x: str(x))
def test_half_precision_tiles_fit_and_use_the_tensor_cores(kernel: str, head_dim: int, capability: int) -> None:
    found = [
        tile_resources(kernel, tile, head_dim=head_dim, dtype=BF16, causal=causal, capability=capability)
        for tile in _tiles(kernel, head_dim, BF16, capability)
        for causal in (True, False)
    ]
    _check(found, capability)
    if capability == 90:
        assert all(resources.wgmma for resources in found)
        assert not any(resources.serialized for resources in found) or not SAME_TRITON


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"sm{c}")
@pytest.mark.parametrize(("kernel", "head_dim"), SLOTS, ids=lambda x: str(x))
def test_float32_tiles_fit(kernel: str, head_dim: int, capability: int) -> None:
    tiles = _tiles(kernel, head_dim, F32, capability)
    found = [
        tile_resources(kernel, tile, head_dim=head_dim, dtype=F32, causal=number < len(tiles), capability=capability)
        for number, tile in enumerate([*tiles, tiles[0]])  # the first one without the causal mask, too
    ]
    _check(found, capability)


@pytest.mark.slow
@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"sm{c}")
@pytest.mark.parametrize("dtype", [torch.float16, F32], ids=str)
@pytest.mark.parametrize("head_dim", [16, 80])
def test_other_head_dims_and_float16_fit(head_dim: int, dtype: torch.dtype, capability: int) -> None:
    for kernel in KERNEL_NAMES:
        tiles = _tiles(kernel, head_dim, dtype, capability)
        found = [
            tile_resources(kernel, tile, head_dim=head_dim, dtype=dtype, causal=True, capability=capability)
            for tile in (tiles[:1] if SAME_TRITON else tiles)
        ]
        _check(found, capability)


@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"sm{c}")
def test_the_delta_kernel_fits(capability: int) -> None:
    found = tile_resources("delta", DELTA_TILE, head_dim=128, dtype=BF16, causal=False, capability=capability)
    _check([found], capability)
