"""Which device a rank works on: by its number on its machine, which is not its rank where a job spans several."""

import pytest
import torch
import torch.distributed as dist

from labkit.machine import describe_machine
from labkit.parallel.ranks.device import use_device
from labkit.studies.cifar100.study import STUDY

JOB = {"WORLD_SIZE": "4", "MASTER_ADDR": "node-a", "MASTER_PORT": "1"}


@pytest.fixture
def gpus(monkeypatch):
    """A machine that has so many, of which one is current."""
    current = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)

    def machine_with(count):
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        return current

    return machine_with


def test_a_cpu_is_everybody_s():
    assert use_device("cpu") == "cpu"


# Two ranks on each of two nodes with eight GPUs, under torchrun: the third rank is its node's first.
@pytest.mark.parametrize(("rank", "local_rank", "count", "device"), [(2, 0, 8, "cuda:0"), (3, 1, 8, "cuda:1")])
def test_ranks_of_a_job_take_the_gpus_of_their_machine_in_turn(monkeypatch, gpus, rank, local_rank, count, device):
    for name, value in (JOB | {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}).items():
        monkeypatch.setenv(name, value)
    current = gpus(count)
    assert use_device("cuda") == device
    assert current == [device]


@pytest.mark.parametrize(("rank", "count", "device"), [(3, 4, "cuda:3"), (3, 2, "cuda:1"), (1, 1, "cuda:0")])
def test_ranks_started_here_share_what_there_is(monkeypatch, gpus, rank, count, device):
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    gpus(count)
    assert use_device("cuda") == use_device("cuda", rank) == device


def test_a_rank_alone_needs_no_process_group(gpus):
    gpus(2)
    assert use_device("cuda") == "cuda:0"


def test_cifar100_plans_nccl_by_the_ranks_of_a_machine(monkeypatch):
    gpu = {"name": "a GPU", "memory_bytes": 2**34, "compute_capability": "9.0", "dense_bf16_peak_tflops": None}
    machine = type(describe_machine())(**{**describe_machine().model_dump(), "gpus": [gpu] * 2})
    config = STUDY.profiles["smoke"].model_copy(update={"world_size": 4})
    assert {point.backend for point in STUDY.points(config, machine)} == {"gloo"}
    for name, value in (JOB | {"RANK": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}).items():
        monkeypatch.setenv(name, value)
    assert {point.backend for point in STUDY.points(config, machine)} == {"nccl"}
