"""GPUs that are there and cannot be used: labs run on the CPU, with the reason; and the facts about
those that can."""

import math
import shutil
import subprocess
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from labkit.bench.check import deterministic_math
from labkit.lab.commands import doctor
from labkit.lab.pages import cards
from labkit.lab.point import Point
from labkit.machine import description, gpus
from labkit.machine import nvml as nvml_module
from labkit.machine.load import Load, LoadMeter, busy_points, busy_reason
from labkit.parallel.ranks import worker
from labkit.parallel.ranks.results import is_out_of_memory
from labkit.parallel.ranks.worker import use_device
from tests.rehearsal.machines import MACHINES

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

    def pretend(nvml, devices=(), error=None, states=None):
        state = SimpleNamespace(is_initialized=False, library=Nvml(states or {}))

        def init():
            if error:
                raise RuntimeError(error)
            state.is_initialized = True

        def properties(index):
            name, major, minor = devices[index]
            return SimpleNamespace(
                name=name, major=major, minor=minor, total_memory=80 * GIB, uuid=f"u{index}"
            )

        def run(command, **_):
            assert command[0] != "nvidia-smi" or command[1] == "topo", "it takes a second to start"
            return SimpleNamespace(stdout=TOPOLOGY if command[1] == "topo" else "")

        answers = {
            "device_count": lambda: len(devices) if state.is_initialized else nvml,
            "init": init,
            "get_device_properties": properties,
            "get_arch_list": lambda: WHEEL,
        }
        for name, answer in answers.items():
            monkeypatch.setattr(torch.cuda, name, answer)
        monkeypatch.setattr(torch.version, "cuda", "13.0")
        monkeypatch.setattr(subprocess, "run", run)
        monkeypatch.setattr(nvml_module, "_library", lambda: state.library)
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


class Nvml:
    """The driver's library: answers by UUID, where a list has one for each time it is asked.

    What is missing there is NOT_SUPPORTED; a function that is missing here, the driver lacks.
    """

    # Of the answers, the one that a function writes: by its name and first argument.
    VALUES = {
        ("nvmlDeviceGetClockInfo", 1): "clock",
        ("nvmlDeviceGetMaxClockInfo", 1): "max_clock",
        ("nvmlDeviceGetTemperature", 0): "temperature",
        ("nvmlDeviceGetPowerManagementLimit",): "power_mw",
        ("nvmlDeviceGetCurrentClocksThrottleReasons",): "reasons",
        ("nvmlDeviceGetMemoryInfo",): "free",
        ("nvmlDeviceGetUtilizationRates",): "percent",
        ("nvmlDeviceGetComputeMode",): "mode",
    }
    FIELDS = {"free": "free", "percent": "gpu"}  # of structures

    def __init__(self, states):
        self.states = {f"GPU-{uuid}": state for uuid, state in states.items()}

    def nvmlDeviceGetHandleByUUID(self, uuid, handle):
        names = [*self.states]
        if uuid.decode() not in names:
            return 6
        handle._obj.value = 1 + names.index(uuid.decode())
        return 0

    def __getattr__(self, function):
        if function not in {name for name, *_ in self.VALUES}:
            raise AttributeError(function)

        def get(handle, *arguments):
            *options, result = arguments
            name = self.VALUES[function, *options]
            answer = [*self.states.values()][handle.value - 1].get(name)
            if answer is None:
                return 3
            value = answer.pop(0) if isinstance(answer, list) else answer
            setattr(result._obj, self.FIELDS.get(name, "value"), value)
            return 0

        return get


def _state(percent=0, clock=1980, temperature=60, power_mw=700_000, reasons=0, **more):
    named = {"percent": percent, "clock": clock, "temperature": temperature}
    return named | {"max_clock": 1980, "power_mw": power_mw, "reasons": reasons} | more


# One that CUDA does not see, and two of which one is hot and the other at its power cap.
STATES = {
    "hidden": _state(percent=99, clock=210, temperature=99, power_mw=100_000, reasons=8),
    "u0": _state(clock=1410, temperature=91, reasons=0x20),
    "u1": _state(percent=3, power_mw=650_000, reasons=4),
}


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
    states = {"u0": {"free": 70000 * 2**20}, "u1": {"free": 30000 * 2**20}, "u2": {}}
    cuda(nvml=3, devices=[H100] * 3, states=states)
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
    cuda(nvml=2, devices=[H100] * 2, states=STATES)
    load = LoadMeter().load()
    assert load.gpu == gpus.GpuLoad(0.03, "heat", 0.71, 91, 650.0)
    assert "heat slowed a GPU down, at 91 °C" in busy_points({"a": load}, 64)["a"]
    assert Load.model_validate_json(load.model_dump_json()) == load


@pytest.mark.parametrize(
    ("missing", "expected"),
    [
        (("percent", "power_mw"), gpus.GpuLoad(None, "heat", 1.0, 91, None)),
        (("clock", "temperature"), gpus.GpuLoad(0.05, "heat", None, None, 700)),
        (("max_clock", "reasons"), gpus.GpuLoad(0.05, "", None, 91, 700)),
    ],
)
def test_a_value_that_a_gpu_lacks_hides_no_other(cuda, missing, expected):
    state = _state(percent=5, temperature=91, reasons=0x20) | dict.fromkeys(missing)
    cuda(nvml=1, devices=[H100], states={"u0": state})
    assert gpus.gpu_load() == expected
    reason = busy_reason(Load(gpu=expected), 64)
    assert expected.slowed_by in reason
    assert "None" not in reason


@pytest.mark.parametrize(("later", "is_busy"), [(0, False), (100, True)])
def test_another_program_is_one_that_uses_a_gpu_before_the_ranks_start(
    cuda, monkeypatch, later, is_busy
):
    """Not processes: in a container NVML has the host's ids, and ranks of a torchrun job, or a
    server of MPS, are no strangers. A high value may be that of ranks that have just ended."""
    monkeypatch.setattr(gpus, "UTILIZATION_SPAN_S", 0.0)
    # When the machine is described, twice before the ranks, and while they run.
    cuda(nvml=1, devices=[H100], states={"u0": _state(percent=[0, 100, later, 100])})
    assert description.describe_machine().gpus
    load = LoadMeter().load()
    assert (busy_reason(load, 64) == "another program used a GPU") == is_busy


def test_the_other_ranks_of_a_torchrun_job_are_no_other_program(cuda):
    """Eight of them, which compute on all GPUs and cores once they have begun."""
    # When the machine is described, before the ranks, and while they run.
    states = {f"u{index}": _state(percent=[0, 0, 100]) for index in range(8)}
    cuda(nvml=8, devices=[H100] * 8, states=states)
    load = LoadMeter(owns_all_ranks=False).load(at_least_s=0)
    assert (load.gpu.utilization, load.busy_cores, busy_reason(load, 64)) == (0, None, "")


def test_a_machine_without_nvml_has_gpus_and_no_load(cuda):
    cuda(nvml=1, devices=[H100]).library = None
    machine = description.describe_machine()
    assert (len(machine.gpus), machine.gpus[0].free_bytes) == (1, None)
    assert LoadMeter().load().gpu is None


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
def test_ranks_do_not_share_a_gpu_in_exclusive_mode(cuda, ranks, is_refused):
    cuda(nvml=1, devices=[H100], states={"u0": _state(mode=3)})
    reason = Large(n_bytes=2**20, world_size=ranks, backend="gloo").skip_reason(
        description.describe_machine()
    )
    assert ("exclusive" in (reason or "")) == is_refused


@contextmanager
def float32_matmuls_in_tf32(is_tf32):
    """As TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 sets it before torch starts."""
    # not by monkeypatch, which would delete what torch's module answers for
    torch.backends.cuda.matmul.allow_tf32 = is_tf32
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


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


@pytest.mark.parametrize(
    ("name", "links", "expected"),
    [("8 H100", "NV18", 450e9), ("6 B300", "NV18", 900e9), ("7 L40S", "SYS", math.nan)],
)
def test_the_peak_of_the_links_is_that_of_the_data_sheets(name, links, expected):
    machine = MACHINES[name].model_copy(update={"gpu_links": links})
    assert machine.link_bytes_per_s == pytest.approx(expected, nan_ok=True)
