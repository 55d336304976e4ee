"""`labkit check` on machines that are not here: what is planned, and what a GPU would measure."""

import pytest
import torch

from labkit.bench.check import matrix_product
from labkit.bench.statistics import NO_DIFFERENCE_SHOWN
from labkit.check import worker
from labkit.check.checking import CHECK
from labkit.check.commands import describe_peak_share
from labkit.check.comparison import Change
from labkit.check.worker import CheckPoint, Sizes
from labkit.machine import gpus
from tests.rehearsal.machines import MACHINES
from tests.rehearsal.pretended_cuda import pretended_gpu
from tests.test_gpus import float32_matmuls_in_tf32


@pytest.mark.parametrize("name", MACHINES)
def test_the_plan_has_one_rank_and_all_ranks_of_each_device_and_fits_it(name):
    machine = MACHINES[name]
    points = list(CHECK.points(CHECK.configure("quick", {"sessions": 3}), machine))
    places = [("cpu", 1, None), ("cpu", 2, "gloo")]
    if machine.gpus:
        places.append(("cuda", 1, None))
    if len(machine.gpus) > 1:
        places.append(("cuda", len(machine.gpus), "nccl"))
    planned = [(point.device, point.world_size, point.backend) for point in points]
    assert sorted(planned, key=str) == sorted(3 * places, key=str)
    assert not any(point.skip_reason(machine) for point in points)
    on_gpu = "small cuda" if name in ("1 laptop", "1 MIG") else "cuda"
    assert {point.sizes for point in points} <= {"cpu", on_gpu}


def test_a_known_gpu_says_its_share_of_the_peak_and_an_unknown_one_does_not():
    change = Change("matmul bfloat16", "1 rank, cuda", NO_DIFFERENCE_SHOWN, rate=7e14)
    share = describe_peak_share(change, MACHINES["1 H100"])
    assert share == ", 71% of the peak (published: up to 83%)"
    for name in ("1 laptop", "1 MIG", "V100"):
        assert describe_peak_share(change, MACHINES[name]) == ""


def test_the_set_of_a_gpu_runs_on_one_that_is_pretended(monkeypatch):
    """Without Triton it lacks attention and kernels only."""
    monkeypatch.setitem(worker.SIZES_ON, "cuda", Sizes(32, 2**16, "flash", 2, 64, "nano", 1, 16))
    for module in ("labkit.check.worker", "labkit.nn.attention_implementations"):
        monkeypatch.setattr(f"{module}.has_triton", lambda: False)
    with pretended_gpu():
        point = CheckPoint(device="cuda", sizes="cuda", repeats=1, warmup=0)
        quantities = {row.get("quantity") for row in worker.measure_quantities(point)} - {None}
    assert quantities == {"matmul float32", "matmul bfloat16", "copy", "call", "training step"}


@pytest.mark.parametrize("is_tf32", [False, True])
def test_a_matmul_in_tf32_is_right_only_where_the_environment_asks_for_it(is_tf32, monkeypatch):
    exact = torch.mm

    def tf32(left, right, out):
        with torch._C.DisableTorchFunction():
            bits = [(x.view(torch.int32) + 0x1000) & ~0x1FFF for x in (left, right)]
            return exact(*(x.view(torch.float32) for x in bits), out=out)

    monkeypatch.setattr(torch, "mm", tf32)
    with float32_matmuls_in_tf32(is_tf32), pretended_gpu():
        assert (matrix_product("cuda", torch.float32, 64, 64, 64).wrong is None) == is_tf32
        assert gpus.library_versions()["float32 matmuls"] == ("TF32" if is_tf32 else None)
