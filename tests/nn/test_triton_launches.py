"""Why Triton cannot launch a kernel, before any is launched."""

import sysconfig

import pytest
import torch

from labkit.nn import triton_launches
from labkit.nn.attention_implementations import no_compiler_reason


@pytest.fixture(autouse=True)
def _asked_anew():
    triton_launches.no_launch_reason.cache_clear()
    yield
    triton_launches.no_launch_reason.cache_clear()


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")
@pytest.mark.skipif(not triton_launches.has_triton(), reason="about Triton")
def test_a_driver_that_cannot_be_built_is_a_reason(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "C compiler" in triton_launches.no_launch_reason()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert "C compiler" in no_compiler_reason("cuda")


def test_what_a_build_lacks(monkeypatch, tmp_path):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert "C compiler" in triton_launches.missing_build_tool()
    (tmp_path / "gcc").touch(mode=0o755)
    assert "Python.h" in triton_launches.missing_build_tool()
    (tmp_path / "Python.h").touch()
    assert triton_launches.missing_build_tool() is None


def test_a_gpu_too_old_for_the_compiler_is_a_reason(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (6, 1))
    assert "7.0 or newer, not 6.1" in no_compiler_reason("cuda")
