"""GPUs that are there and cannot be used: labs run on the CPU, with the reason; and the facts about
those that can."""

import shutil
import subprocess
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from labkit.bench.check import deterministic_math
from labkit.lab.commands import doctor
from labkit.lab.pages import cards
from labkit.lab.point import Point
from labkit.machine import description, gpus
from labkit.machine.load import Load, LoadMeter, busy_points, busy_reason
from labkit.parallel.ranks import worker
from labkit.parallel.ranks.results import is_out_of_memory
from labkit.parallel.ranks.worker import use_device
from tests.rehearsal.pretended_cuda import float32_matmuls_in_tf32

WHEEL = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120", "compute_120"]
H100 = ("NVIDIA H100 80GB HBM3", 9, 0)
V100 = ("Tesla V100-SXM2-16GB", 7, 0)
MIG = ("NVIDIA H100 80GB HBM3 MIG 3g.40gb", 9, 0)
TOO_OLD = (
    "The NVIDIA driver on your system is too old (found version 12040). Please update your GPU"
    " driver"
)
UNKNOWN = (
    "CUDA unknown error - this may be due to an incorrectly set up environment, e.g. changing env"
    " variable CUDA_VISIBLE_DEVICES after program start. Setting the available devices to be zero."
)
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Large(Point):
    """A point of one tensor per rank."""

    device: str = "cuda"
    n_bytes: int

    @property
    def needed_bytes(self):
        return self.n_bytes


@pytest.mark.parametrize(
    ("capability", "architectures", "has_code"),
    [
        ((8, 9), WHEEL, True),  # RTX 4090, by the code of 8.6
        ((13, 0), WHEEL, True),  # compiled from the PTX at hand
        ((7, 0), WHEEL, False),  # V100: code of 7.5 is newer
        ((9, 0), ["sm_80"], False),
        ((9, 0), ["compute_80"], True),
        ((9, 0), ["sm_90a"], True),
        ((10, 0), ["sm_90a"], False),
        ((10, 3), ["sm_100f"], True),
        ((9, 4), ["gfx942"], True),
    ],
)
def test_code_runs_on_gpus_of_its_major_version_and_ptx_on_newer_ones(
    capability, architectures, has_code
):
    assert gpus.has_code_for(capability, architectures) == has_code


@pytest.fixture
def cuda(monkeypatch, tmp_path):
    """A build with CUDA, a loaded driver, and the GPUs that NVML counts and that CUDA has; an error
    replaces one."""

    def pretend(nvml, devices=(), error=None, free="", states=""):
        state = SimpleNamespace(is_initialized=False, n_queries=0)

        def init():
            if error:
                raise RuntimeError(error)
            state.is_initialized = True

        def properties(index):
            name, major, minor = devices[index]
            return SimpleNamespace(
                name=name, major=major, minor=minor, total_memory=80 * GIB, uuid=f"u{index}"
            )

        def smi(command, **_):
            if command[0] != "nvidia-smi" or "compute_mode" in command[1]:  # git
                return SimpleNamespace(stdout="")
            if command[1] == "topo":
                return SimpleNamespace(stdout=TOPOLOGY)
            is_known = "throttle_reasons" not in command[1]
            answer = free if "memory.free" in command[1] else states if is_known else ""
            if command[1] == "--query-gpu=uuid,clocks_event_reasons.active":
                answer = "GPU-u0, 0x0\n"
            state.n_queries += 1
            return SimpleNamespace(stdout=answer if isinstance(answer, str) else next(answer))

        answers = {
            "device_count": lambda: len(devices) if state.is_initialized else nvml,
            "init": init,
            "get_device_properties": properties,
            "get_arch_list": lambda: WHEEL,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(subprocess, "run", smi)
        monkeypatch.setattr(gpus, "NVIDIA_DRIVER", tmp_path / "version")
        gpus.NVIDIA_DRIVER.write_text(
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release\n"
        )
        description.describe_machine.cache_clear()
        return state

    yield pretend
    monkeypatch.undo()
    description.describe_machine.cache_clear()


TOPOLOGY = """\tGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity
GPU0\t X \tNV18\tNV18\tPXB\t0-47
GPU1\tNV18\t X \tNV18\tSYS\t0-47
GPU2\tNV18\tNV18\t X \tSYS\t48-95
NIC0\tPXB\tSYS\tSYS\t X
"""


# One that CUDA does not see, and two of which one is hot and the other at its power cap.
STATES = """\
GPU-hidden, 99, 210, 1980, 99, 100.00, 0x0000000000000008
GPU-u0, 0, 1410, 1980, 91, 700.00, 0x0000000000000020
GPU-u1, 3, 1980, 1980, 60, 650.00, 0x0000000000000004
"""


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ({"nvml": 2, "error": TOO_OLD}, "needs 580 or newer"),
        ({"nvml": 2, "error": UNKNOWN}, "incorrectly set up environment (driver 580.65.06)"),
        ({"nvml": 8, "error": "No CUDA GPUs are available"}, "No CUDA GPUs are available"),
        (
            {"nvml": 8, "devices": [H100, ("off the bus",)]},
            "CUDA does not start: not enough values",
        ),
        ({"nvml": 2, "devices": [H100, V100]}, "Tesla V100-SXM2-16GB has compute capability 7.0"),
        (
            {"nvml": 0},
            "an NVIDIA driver is loaded, but CUDA sees no GPU (a container without GPUs?)",
        ),
    ],
)
def test_gpus_that_cannot_be_used_leave_the_cpu_with_a_reason(
    cuda, monkeypatch, command, answers, reason
):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    cuda(**answers)
    machine = description.describe_machine()
    assert (machine.gpus, machine.device("auto"), machine.backend("cuda", 1)) == ([], "cpu", "gloo")
    assert reason in machine.no_gpu_reason
    assert len(machine.no_gpu_reason) <= gpus.MAX_REASON or "capability" in reason
    assert reason in dict(doctor.machine_rows())["gpu"]
    assert reason in cards.machine_card(machine).data
    status, _, complaints = command(
        "measure", "attention", "--profile", "smoke", "--set", "device=cuda"
    )
    assert (status, reason in " ".join(complaints.split())) == (1, True)


def test_hidden_gpus_and_a_build_without_cuda_have_their_reasons(cuda, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    cuda(nvml=0)
    assert "CUDA_VISIBLE_DEVICES is '7'" in gpus.no_gpu_reason()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert "built without CUDA" in gpus.no_gpu_reason()
    gpus.NVIDIA_DRIVER.unlink()
    assert gpus.no_gpu_reason() is None


def test_cuda_counts_and_not_nvml(cuda):
    cuda(nvml=8, devices=[MIG])
    machine = description.describe_machine()
    assert [gpu.name for gpu in machine.gpus] == [MIG[0]]
    assert machine.gpu_links is None


def test_equal_gpus_take_one_line_and_the_free_memory_decides(cuda):
    cuda(nvml=3, devices=[H100] * 3, free="GPU-u0, 70000\nGPU-u1, 30000\nGPU-u2, [N/A]\n")
    machine = description.describe_machine()
    assert [(count, gpu.name) for count, gpu in machine.gpu_counts] == [(3, H100[0])]
    assert [gpu.available_bytes // 2**20 for gpu in machine.gpus] == [70000, 30000, 80 * 1024]
    assert machine.gpu_links == "NV18"
    assert machine.versions["driver"] == "580.65.06"
    assert machine.versions["CUDA"] == "13.0"
    gpu = dict(doctor.machine_rows())["gpu"]
    assert gpu.startswith("3x NVIDIA H100 80GB HBM3, 80 GiB, ")
    assert "68.4 GiB, " in gpu
    assert Large(n_bytes=50 * GIB).skip_reason(machine) is None
    # 2 * 30000 MiB for both
    assert "available" in Large(n_bytes=30 * GIB, world_size=2).skip_reason(machine)
    again = description.Machine.model_validate_json(machine.model_dump_json())
    assert again == machine


def test_the_load_of_gpus_is_the_worst_of_those_that_cuda_sees(cuda):
    state = cuda(nvml=2, devices=[H100] * 2, states=STATES)
    meter = LoadMeter()
    before = state.n_queries
    load = meter.load()
    assert state.n_queries == before + 1  # nvidia-smi takes up to a second to start
    assert load.gpu == gpus.GpuLoad(0.03, "heat", 0.71, 91, 650.0)
    assert "heat slowed a GPU down, at 91 °C" in busy_points({"a": load}, 64)["a"]
    assert Load.model_validate_json(load.model_dump_json()) == load


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("[N/A], 1410, 1980, 91, [N/A], 0x20", gpus.GpuLoad(None, "heat", 0.71, 91, None)),
        (
            "5, [N/A], 1980, [N/A], 90.0, 0x8",
            gpus.GpuLoad(0.05, "a hardware limit", None, None, 90),
        ),
        ("5, 1410, 1980, 50, 90.0, [N/A]", gpus.GpuLoad(0.05, "", 0.71, 50, 90)),
    ],
)
def test_a_value_that_a_gpu_lacks_hides_no_other(cuda, state, expected):
    cuda(nvml=1, devices=[H100], states=f"GPU-u0, {state}\n")
    assert gpus.gpu_load() == expected
    reason = busy_reason(Load(gpu=expected), 64)
    assert expected.slowed_by in reason
    assert "None" not in reason


@pytest.mark.parametrize(("later", "is_busy"), [(0, False), (100, True)])
def test_another_program_is_one_that_uses_a_gpu_before_the_ranks_start(
    cuda, monkeypatch, later, is_busy
):
    """A high value may be that of ranks that have just ended; later ones are those of ranks."""
    monkeypatch.setattr(gpus, "UTILIZATION_SPAN_S", 0.0)
    utilizations = iter([100, later, 100])
    states = (f"GPU-u0, {one}, 1980, 1980, 60, 700, 0x0\n" for one in utilizations)
    cuda(nvml=1, devices=[H100], states=states)
    assert description.describe_machine().gpus
    load = LoadMeter().load()
    assert (busy_reason(load, 64) == "another program used a GPU") == is_busy


def test_a_rank_takes_a_gpu_that_cuda_has_and_not_one_that_nvml_counts(cuda, monkeypatch):
    """As on one slice (MIG) of a host with eight GPUs, in a rank that has not begun with CUDA."""
    cuda(nvml=8, devices=[MIG])
    current = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    assert [use_device("cuda", rank) for rank in (1, 0)] == ["cuda:0", "cuda:0"] == current


@pytest.mark.parametrize(("n_bytes", "is_small"), [(64 * 2**20, True), (24 * GIB, False)])
def test_doctor_mentions_a_small_shared_memory(n_bytes, is_small, tmp_path, monkeypatch):
    """labkit's transport needs none of it, but whoever asks why ranks fail may look here."""
    monkeypatch.setattr(doctor, "SHM", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=n_bytes))
    assert (f"{tmp_path} has only 64 MiB" in dict(doctor.machine_rows())["shared memory"]) == (
        is_small
    )


def test_a_rank_runs_on_the_cores_beside_its_gpu(monkeypatch, tmp_path):
    place = {"pci_domain_id": 0, "pci_bus_id": 0x1B, "pci_device_id": 0}
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**place))
    assert gpus.cores_beside(0, tmp_path) == set()
    folder = tmp_path / "0000:1b:00.0"
    folder.mkdir()
    (folder / "local_cpulist").write_text("0-2,8\n")
    assert gpus.cores_beside(0, tmp_path) == {0, 1, 2, 8}
    bound = []
    monkeypatch.setattr(worker.os, "sched_setaffinity", lambda pid, cores: bound.append(cores))
    monkeypatch.setattr(worker, "ALL_CORES", {1, 2, 3})
    monkeypatch.setattr(worker, "cores_beside", lambda index: {0, 1, 2, 8})
    monkeypatch.setattr(worker, "count_gpus", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert [use_device("cuda", 0), use_device("cpu")] == ["cuda:0", "cpu"]
    assert bound == [{1, 2}, {1, 2, 3}], "and on all of them again for points on the CPU"


@pytest.mark.parametrize(("ranks", "is_refused"), [(1, False), (2, True)])
def test_ranks_do_not_share_a_gpu_in_exclusive_mode(cuda, monkeypatch, ranks, is_refused):
    cuda(nvml=1, devices=[H100])
    monkeypatch.setattr(gpus, "_query", lambda fields: [["u0", "Exclusive_Process"]])
    reason = Large(n_bytes=2**20, world_size=ranks, backend="gloo").skip_reason(
        description.describe_machine()
    )
    assert ("exclusive" in (reason or "")) == is_refused


@pytest.mark.parametrize("is_tf32", [False, True])
def test_deterministic_math_can_be_read_inside_and_is_set_back(is_tf32):
    """True is what TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 sets. Inductor reads all; torch raises where
    two names contradict."""
    matmul = torch.backends.cuda.matmul

    def settings():
        older = (torch.get_float32_matmul_precision(), matmul.allow_tf32)
        return (*older, torch.backends.cudnn.allow_tf32, matmul.fp32_precision == "tf32")

    with float32_matmuls_in_tf32(is_tf32):
        before = settings()
        with deterministic_math():
            assert settings() == ("highest", False, False, False)
        assert settings() == before
    assert before[1] == is_tf32


def test_a_library_that_does_not_start_on_a_full_gpu_is_out_of_memory(monkeypatch):
    error = RuntimeError(
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"
    )
    assert not is_out_of_memory(error)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    for free, is_full in ((40 * GIB, False), (2**28, True)):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda free=free: (free, 80 * GIB))
        assert is_out_of_memory(error) == is_full
