"""From PyTorch to the launch of every flash kernel, compiled for an H100 that is not here: what the
interpreter passes over, binder, autotuner and grids; and tiles that never return."""

from contextlib import nullcontext
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from labkit.nn import flash_attention, flash_checks, flash_launch
from labkit.nn.flash_checks import usable_tiles
from labkit.nn.flash_tiles import tiles_for

pytestmark = [
    pytest.mark.skipif(flash_launch.INTERPRETED, reason="interpreted kernels are not launched"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU that is here launches for itself"),
]

BATCH = 2
SEQUENCE = 100
HEAD_DIM = 64
CASE = flash_checks.Case("forward", HEAD_DIM, 1, torch.bfloat16, True, torch.device("cuda", 0))
LOADED = (1, 1, 64, 0, 1024)  # module, function, registers, spills, most threads a block
PROPERTIES = {"max_shared_mem": 227 * 1024, "multiprocessor_count": 132, "warpSize": 32}


def _tiles(kernel):
    return tiles_for(kernel, dtype=CASE.dtype, head_dim=HEAD_DIM, capability=(9, 0))


@pytest.fixture(autouse=True)
def _nothing_is_known_of_this_h100(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(flash_checks, "tile_fault", lambda case, tile: None)
    usable_tiles.cache_clear()
    yield
    usable_tiles.cache_clear()
    flash_launch._autotuned.cache_clear()


@pytest.fixture
def launches(monkeypatch):
    """Names and grids of kernels that are compiled for sm_90, and launched nowhere."""
    launched = []

    def launcher(source, metadata):
        return lambda x, y, z, *arguments: launched.append((metadata.name, (x, y, z)))

    def benchmark(call, quantiles):
        """For the autotuner: all configurations are equally fast."""
        call()
        return [1.0, 1.0, 1.0]

    there = SimpleNamespace(
        utils=SimpleNamespace(
            load_binary=lambda *_: LOADED, get_device_properties=lambda device: PROPERTIES
        ),
        launcher_cls=launcher,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device=0: 0,
        get_active_torch_device=lambda: torch.device("cpu"),
        get_benchmarker=lambda: benchmark,
    )
    monkeypatch.setattr(driver, "_active", there)
    monkeypatch.setattr(flash_attention, "unavailable_reason", lambda *_: None)
    monkeypatch.setattr(flash_checks, "remembered_fault", lambda case, tile: None)
    monkeypatch.setattr(torch.cuda, "device_of", lambda tensor: nullcontext())
    return launched


def test_every_kernel_is_tuned_compiled_and_launched(launches):
    """Every tile starts one program for each block of each head."""
    inputs = [torch.randn(BATCH, SEQUENCE, HEAD_DIM, dtype=CASE.dtype) for _ in range(3)]
    for x in inputs:
        x.requires_grad_()

    def differentiate():
        output = flash_attention.FlashAttention.apply(*inputs, True)
        torch.autograd.grad(output, inputs, torch.ones_like(output))

    differentiate()
    expected = {("delta_kernel", (BATCH * 2, 1, 1))}
    for kernel, block in (("forward", "block_q"), ("grad_kv", "block_k"), ("grad_q", "block_q")):
        for tile in _tiles(kernel):
            blocks = -(-SEQUENCE // getattr(tile, block))
            expected.add((f"{kernel}_kernel", (BATCH * blocks, 1, 1)))
    assert set(launches) == expected
    launches.clear()
    differentiate()
    assert len(launches) == 4, "what is tuned is not tuned again"


@pytest.fixture
def child(monkeypatch, tmp_path):
    """Sets what the other process runs, a stand-in, and counts those that were started."""
    started = mock.Mock(wraps=flash_checks.subprocess.Popen)

    def run(code, deadline_s=60.0):
        usable_tiles.cache_clear()
        code = f"import os, time; print('compiled', flush=True); {code}"
        monkeypatch.setattr(flash_checks, "CHILD", code)
        monkeypatch.setattr(flash_checks, "DEADLINE_S", deadline_s)
        return started

    monkeypatch.setattr(flash_checks.subprocess, "Popen", started)
    monkeypatch.setattr(flash_checks, "driver_version", lambda: "580.1")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return run


def test_a_tile_that_never_returns_is_left_out_and_not_tried_again(child, monkeypatch):
    for _ in range(2):
        started = child("time.sleep(600)", deadline_s=0.2)
        with pytest.warns(UserWarning, match="special is left out: it did not return"):
            usable = usable_tiles(CASE)
        assert set(usable) == {tile for tile in _tiles("forward") if not tile.specialize}
        assert started.call_count == 1
    monkeypatch.setattr(flash_checks, "driver_version", lambda: "590.1")
    child("print('null')")
    assert usable_tiles(CASE) == _tiles("forward"), "another driver is asked for itself"
    assert started.call_count == 2


def test_a_tile_whose_process_crashed_is_tried_again(child):
    child("os.abort()")
    with pytest.warns(UserWarning, match="ended with status -6"):
        usable_tiles(CASE)
    started = child("print('null')")
    assert usable_tiles(CASE) == _tiles("forward")
    assert started.call_count == 2
