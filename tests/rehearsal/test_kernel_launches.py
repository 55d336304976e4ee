"""From PyTorch to the launch of every flash kernel, compiled for an H100 that is not here: binder,
autotuner, grids.

What the kernels compute is the interpreter's to test; what it passes over is what stands here.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from labkit.nn import flash_attention, flash_checks, flash_launch
from labkit.nn.flash_tiles import tiles_for

pytestmark = [
    pytest.mark.skipif(flash_launch.INTERPRETED, reason="interpreted kernels are not launched"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU that is here launches for itself"),
]

BATCH = 2
SEQUENCE = 100
HEAD_DIM = 64
SHARED_BYTES = 227 * 1024
LOADED = (1, 1, 64, 0, 1024)  # module, function, registers, spills, most threads a block


class Driver:
    """A Triton driver for an sm_90: kernels are compiled for real and launched nowhere; `launches`
    records them."""

    def __init__(self) -> None:
        self.launches: list[tuple[str, tuple[int, int, int]]] = []
        properties = {"max_shared_mem": SHARED_BYTES, "multiprocessor_count": 132, "warpSize": 32}
        self.utils = SimpleNamespace(
            load_binary=lambda name, kernel, shared, device: LOADED,
            get_device_properties=lambda device: properties,
        )

    def launcher_cls(self, source, metadata):
        return lambda x, y, z, stream, function, *arguments: self.launches.append(
            (metadata.name, (x, y, z))
        )

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")

    def get_benchmarker(self):
        """For the autotuner: calls a configuration once; all are equally fast."""

        def benchmark(call, quantiles):
            call()
            return [1.0, 1.0, 1.0]

        return benchmark


@pytest.fixture
def h100(monkeypatch):
    there = Driver()
    monkeypatch.setattr(driver, "_active", there)
    monkeypatch.setattr(flash_attention, "unavailable_reason", lambda *_: None)
    monkeypatch.setattr(flash_checks, "tile_fault", lambda case, tile: None)
    monkeypatch.setattr(flash_checks, "fault_in_child", lambda case, tile: (None, False))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: nullcontext())
    caches = (flash_launch._autotuned, flash_checks.usable_tiles)
    for cached in caches:
        cached.cache_clear()
    yield there
    for cached in caches:
        cached.cache_clear()


def _programs(kernel, dtype):
    """Programs that the autotuner's tries start, and then the call: one for every block of every
    head."""
    tiles = tiles_for(kernel, dtype=dtype, head_dim=HEAD_DIM, capability=(9, 0))
    blocks = [tile.block_k if kernel == "grad_kv" else tile.block_q for tile in tiles]
    return {(BATCH * -(-SEQUENCE // block), 1, 1) for block in blocks}


def test_every_kernel_is_tuned_compiled_and_launched(h100):
    inputs = [
        torch.randn(BATCH, SEQUENCE, HEAD_DIM, dtype=torch.bfloat16).requires_grad_()
        for _ in range(3)
    ]
    output = flash_attention.FlashAttention.apply(*inputs, True)
    torch.autograd.grad(output, inputs, torch.ones_like(output))
    started = {
        name: {grid for called, grid in h100.launches if called == name}
        for name, _ in h100.launches
    }
    assert started.keys() == {"forward_kernel", "delta_kernel", "grad_kv_kernel", "grad_q_kernel"}
    for kernel in ("forward", "grad_kv", "grad_q"):
        assert started[f"{kernel}_kernel"] == _programs(kernel, torch.bfloat16)
    once = len(h100.launches)
    torch.autograd.grad(
        flash_attention.FlashAttention.apply(*inputs, True), inputs, torch.ones_like(output)
    )
    assert len(h100.launches) == once + 4, "what is tuned is not tuned again"
    before = len(h100.launches)
    many = torch.zeros(3, 32 * BATCH, SEQUENCE, HEAD_DIM, dtype=torch.bfloat16)
    flash_attention.run_kernel("forward", many, True, None)
    tiles = tiles_for("forward", dtype=torch.bfloat16, head_dim=HEAD_DIM, capability=(9, 0))
    assert len(h100.launches) == before + len(tiles) + 1, "more programs are tuned for themselves"


CASE = flash_checks.Case("forward", HEAD_DIM, 1, torch.bfloat16, True, torch.device("cuda", 0))
fault_in_child = flash_checks.fault_in_child
SLEEPS = "print('compiled', flush=True); import time; time.sleep(600)"
CRASHES = "print('compiled', flush=True); import os; os.abort()"
RETURNS = "print('compiled'); print('null')"


@pytest.fixture
def tries(monkeypatch, tmp_path):
    """The other process is a stand-in; `tries` lists those that were started."""
    started = []
    start = flash_checks.subprocess.Popen

    def popen(command, **options):
        started.append(command)
        return start(command, **options)

    monkeypatch.setattr(flash_checks.subprocess, "Popen", popen)
    monkeypatch.setattr(flash_checks, "driver_version", lambda: "580.1")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return started


def test_a_tile_that_never_returns_is_left_out_and_not_tried_again(h100, tries, monkeypatch):
    monkeypatch.setattr(flash_checks, "fault_in_child", fault_in_child)
    tiles = tiles_for("forward", dtype=CASE.dtype, head_dim=HEAD_DIM, capability=(9, 0))
    monkeypatch.setattr(flash_checks, "CHILD", SLEEPS)
    monkeypatch.setattr(flash_checks, "DEADLINE_S", 0.2)
    for _ in range(2):
        flash_checks.usable_tiles.cache_clear()
        with pytest.warns(UserWarning, match="special is left out: it did not return"):
            usable = flash_checks.usable_tiles(CASE)
        assert set(usable) == {tile for tile in tiles if not tile.specialize}
    assert len(tries) == 1
    monkeypatch.setattr(flash_checks, "driver_version", lambda: "590.1")
    monkeypatch.setattr(flash_checks, "CHILD", RETURNS)
    monkeypatch.setattr(flash_checks, "DEADLINE_S", 60)
    flash_checks.usable_tiles.cache_clear()
    assert flash_checks.usable_tiles(CASE) == tiles
    assert len(tries) == 2


def test_a_tile_whose_process_crashed_is_tried_again(tries, monkeypatch):
    tile = tiles_for("forward", dtype=CASE.dtype, head_dim=HEAD_DIM, capability=(9, 0))[0]
    monkeypatch.setattr(flash_checks, "CHILD", CRASHES)
    assert "ended with status -6" in flash_checks.remembered_fault(CASE, tile)
    monkeypatch.setattr(flash_checks, "CHILD", RETURNS)
    assert flash_checks.remembered_fault(CASE, tile) is None
    assert len(tries) == 2
