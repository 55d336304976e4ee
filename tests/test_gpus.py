"""GPUs that are there and cannot be used: labs run on the CPU, and it is said why."""

from types import SimpleNamespace

import pytest
import torch

from labkit.lab.commands import doctor
from labkit.lab.pages import cards
from labkit.machine import description, gpus

WHEEL = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]


@pytest.mark.parametrize(
    ("capability", "architectures", "has_code"),
    [
        ((8, 9), WHEEL, True),  # RTX 4090, by the code of 8.6
        ((9, 0), WHEEL, True),
        ((10, 3), WHEEL, True),
        ((12, 1), WHEEL, True),
        ((13, 0), WHEEL, True),  # compiled from the PTX at hand
        ((7, 0), WHEEL, False),  # V100: code of 7.5 is newer
        ((6, 1), WHEEL, False),
        ((8, 0), ["sm_86"], False),
        ((9, 0), ["sm_80"], False),
        ((9, 0), ["compute_80"], True),
        ((9, 0), ["sm_90a"], True),
        ((10, 0), ["sm_90a", "compute_90a"], False),
        ((10, 3), ["sm_100f"], True),
        ((9, 4), ["gfx942"], True),
    ],
)
def test_code_runs_on_gpus_of_its_major_version_and_ptx_on_newer_ones(capability, architectures, has_code):
    assert gpus.has_code_for(capability, architectures) == has_code


@pytest.fixture
def cuda(monkeypatch):
    """Replace what `torch.cuda` says, for a build with CUDA; what is not given raises, as it does without a driver."""

    def pretend(**answers):
        def no_driver(*_):
            raise RuntimeError(
                "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver"
            )

        monkeypatch.setattr(torch.version, "cuda", "13.0")
        for name in ("device_count", "is_available", "get_device_properties", "get_arch_list", "init"):
            monkeypatch.setattr(torch.cuda, name, answers.get(name, no_driver))
        description.describe_machine.cache_clear()

    yield pretend
    monkeypatch.undo()
    description.describe_machine.cache_clear()


def _assert_on_the_cpu(because):
    machine = description.describe_machine()
    assert (machine.gpus, machine.device("auto"), machine.backend("cuda", 1)) == ([], "cpu", "gloo")
    assert because in machine.why_no_gpus
    assert because in machine.why_no_device("cuda")
    assert because in dict(doctor.machine_rows())["gpu"]
    assert because in cards.machine_card(machine, elsewhere=False).data


def test_a_driver_that_is_too_old_leaves_the_cpu(cuda):
    cuda(device_count=lambda: 2, is_available=lambda: False)
    _assert_on_the_cpu("The NVIDIA driver on your system is too old (found version 12040)")


def test_a_gpu_that_torch_has_no_code_for_leaves_the_cpu(cuda):
    names = {0: ("NVIDIA H100 80GB HBM3", 9, 0), 1: ("Tesla V100-SXM2-16GB", 7, 0)}

    def properties(index):
        name, major, minor = names[index]
        return SimpleNamespace(name=name, major=major, minor=minor, total_memory=16 * 2**30)

    known = {"is_available": lambda: True, "get_device_properties": properties, "get_arch_list": lambda: WHEEL}
    cuda(device_count=lambda: 2, **known)
    _assert_on_the_cpu("Tesla V100-SXM2-16GB has compute capability 7.0")
    cuda(device_count=lambda: 1, **known)
    assert [gpu.name for gpu in description.describe_machine().gpus] == ["NVIDIA H100 80GB HBM3"]


def test_torch_without_cuda_beside_an_nvidia_driver_says_so(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(gpus, "NVIDIA_DRIVER", tmp_path / "version")
    assert gpus.why_unusable() is None
    gpus.NVIDIA_DRIVER.touch()
    assert "built without CUDA" in gpus.why_unusable()
