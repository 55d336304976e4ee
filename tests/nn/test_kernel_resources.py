"""Without a GPU: the tiles of the flash kernels compile for their GPU, fit it, and spill nothing
inside a loop.

`make test` compiles one tile per kernel; `make test-all` compiles every tile of
`benchmarks/kernels.py`, for six GPUs, a second or more each.
"""

import math
from itertools import product

import pytest
import torch

pytest.importorskip("triton")

import triton

from benchmarks import kernels
from benchmarks.kernels import CHIPS, compile_tile
from labkit.nn.flash_launch import INTERPRETED, KERNELS
from labkit.nn.flash_tiles import DELTA_TILE, tiles_for
from tests.cases import thinned

# Tiles were chosen with this Triton.  Another one allots registers differently: there the
# autotuner's check decides.
pytestmark = [
    pytest.mark.skipif(INTERPRETED, reason="interpreted kernels cannot be compiled"),
    pytest.mark.skipif(
        not triton.__version__.startswith("3.7."), reason="tiles were chosen with Triton 3.7"
    ),
]


FIRST_TILES = [
    *product(KERNELS, (80, 90), (torch.bfloat16,)),
    *product(KERNELS, (90,), (torch.float32,)),
]
# a backward kernel; below is a forward kernel, in another dtype
QUICK = [("grad_q", 90, torch.float32)]


@pytest.mark.parametrize(
    ("kernel", "capability", "dtype"), thinned(FIRST_TILES, lambda *case: case in QUICK)
)
def test_the_first_tile_fits_and_spills_nothing_in_a_loop(
    kernel: str, capability: int, dtype: torch.dtype
) -> None:
    tile = tiles_for(kernel, dtype=dtype, head_dim=128, capability=divmod(capability, 10))[0]
    resources = compile_tile(
        kernel, tile, head_dim=128, dtype=dtype, causal=True, capability=capability
    )
    assert not resources.faults(capability)
    assert resources.instructions > 100
    peak = CHIPS[capability].tflops
    assert 0 < resources.serial <= resources.overlapped <= peak


@pytest.mark.parametrize("head_dim", thinned([64, 128], lambda head_dim: head_dim == 128))
def test_warps_specialize_on_hopper(head_dim: int) -> None:
    tiles = tiles_for("forward", dtype=torch.bfloat16, head_dim=head_dim, capability=(9, 0))
    (tile,) = (tile for tile in tiles if tile.specialize)
    sizes = {"head_dim": head_dim, "dtype": torch.bfloat16, "capability": 90}
    resources = compile_tile("forward", tile, causal=True, **sizes)
    assert not resources.faults(90)
    assert resources.registers == 168, "12 warps share the registers: two groups compute, one loads"
    assert resources.instructions < 700, "one group's loop, without the others'"
    assert all(
        one.specialize == 0
        for one in tiles_for("forward", dtype=torch.bfloat16, head_dim=60, capability=(9, 0))
    )


@pytest.mark.slow
def test_no_bound_is_said_where_groups_of_warps_share_a_trip() -> None:
    tiles = tiles_for("forward", dtype=torch.bfloat16, head_dim=64, capability=(10, 0))
    (tile,) = (tile for tile in tiles if tile.specialize)
    sizes = {"head_dim": 64, "dtype": torch.bfloat16, "capability": 100}
    resources = compile_tile("forward", tile, causal=True, **sizes)
    assert math.isnan(resources.overlapped)
    assert math.isnan(resources.serial)


@pytest.mark.slow
def test_grouped_heads_and_the_delta_kernel_fit() -> None:
    resources = compile_tile(
        "delta", DELTA_TILE, head_dim=128, dtype=torch.bfloat16, causal=False, capability=80
    )
    assert not resources.faults(80)
    tile = tiles_for("grad_kv", dtype=torch.bfloat16, head_dim=64, capability=(9, 0))[-1]
    sizes = {"head_dim": 64, "dtype": torch.bfloat16, "capability": 90}
    assert not compile_tile("grad_kv", tile, causal=True, group=4, **sizes).faults(90)


def test_spills_and_loops_are_read_from_machine_code() -> None:
    listing = """
        /*0000*/                   MOV R1, R2 ;
        /*0010*/                   STL [R1], R2 ;
.L_x_1:
        /*0020*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0030*/                   LDL R2, [R1] ;
        /*0040*/              @!P0 BRA `(.L_x_3) ;
        /*0050*/               @P0 BRA `(.L_x_1) ;
        /*0060*/                   LDL R2, [R1] ;
        /*0070*/                   EXIT ;
.L_x_3:
        /*0080*/                   MUFU.EX2 R2, R2 ;
        /*0090*/                   BRA `(.L_x_1) ;
.L_x_4:
        /*00a0*/                   BRA `(.L_x_4) ;
"""
    (loop,) = kernels._loops(kernels._read_code(listing))
    assert loop == {
        2,
        3,
        4,
        5,
        8,
        9,
    }, "with the part that stands after the end, and without what only waits"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("capability", CHIPS)
def test_every_tile_fits_and_spills_nothing_in_a_loop(
    capability: int, dtype: str, monkeypatch, capsys
) -> None:
    monkeypatch.setattr(
        "sys.argv", ["kernels.py", "--capability", str(capability), "--dtype", dtype]
    )
    assert kernels.main() == 0, capsys.readouterr().out
