"""Every lab's worker on a GPU that is pretended: no tensor is on the wrong device."""

from dataclasses import replace
from functools import partial
from itertools import groupby

import pytest

from labkit.parallel.launch import PointEnd, Row, launch
from labkit.studies import LABS, load_lab
from tests.pages.cells import kind_of_point
from tests.rehearsal.machines import MACHINES
from tests.rehearsal.pretended_cuda import pretended_gpu

pytestmark = pytest.mark.slow

# Matrix products of a GPU's sizes, which take a CPU minutes; traces, which are CUPTI's.
OF_A_REAL_GPU = {"rates", "matmul", "products", "timeline", "profile"}
# torch's SyncBatchNorm calls kernels that only CUDA has.
LEFT_OUT = {
    "sync_batchnorm": ("alternatives", "torch"),
    "cifar100": ("implementations", "torch + SyncBatchNorm"),
}


def _points(lab):
    """The first of each kind of points that run on a GPU and need no NCCL."""
    study = load_lab(lab)
    machine = MACHINES["1 H100"]
    kinds = {}
    for point in study.plan(study.profiles["smoke"], machine):
        kind = kind_of_point(vars(point))
        is_there = getattr(point, "device", "cpu") == "cuda" and point.backend != "nccl"
        if is_there and kind not in OF_A_REAL_GPU and point.skip_reason(machine) is None:
            kinds.setdefault(kind, point)
    points = list(kinds.values())
    if lab in LEFT_OUT:
        field, left_out = LEFT_OUT[lab]
        for number, point in enumerate(points):
            others = tuple(name for name in getattr(point, field) if name != left_out)
            points[number] = replace(point, **{field: others})
    return points


def _pretending(worker, point):
    with pretended_gpu():
        yield from worker(point) or ()


@pytest.mark.parametrize("lab", LABS)
def test_a_labs_worker_on_a_gpu(lab):
    worker = partial(_pretending, load_lab(lab).worker)
    points = _points(lab)
    if not points:
        pytest.skip("no point of it runs on a pretended GPU")
    for (ranks, backend), group in groupby(points, lambda point: (point.world_size, point.backend)):
        group = list(group)
        events = list(launch(worker, group, world_size=ranks, backend=backend, timeout_s=300))
        assert [event for event in events if "MixedDevices" in str(event)] == []
        assert {event.status for event in events if isinstance(event, PointEnd)} == {"ok"}, events
        measured = {event.index for event in events if isinstance(event, Row)}
        assert measured == {*range(len(group))}
