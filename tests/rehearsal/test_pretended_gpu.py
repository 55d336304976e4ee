"""Every lab's worker on a GPU that is pretended: no tensor on the wrong device, no question that
only a CPU answers."""

from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import groupby

import pytest

from labkit.parallel.launch import PointEnd, Row, launch
from labkit.studies import LABS, load_lab
from tests.rehearsal.machines import MACHINES
from tests.rehearsal.pages import kind_of_point
from tests.rehearsal.pretended_cuda import pretended_gpu

pytestmark = pytest.mark.slow

# Matrix products of a GPU's sizes, which take a CPU minutes; traces, which are CUPTI's.
OF_A_REAL_GPU = {"rates", "matmul", "products", "timeline", "profile"}
# torch's SyncBatchNorm calls kernels that only CUDA has.
TORCHS_SYNC_BATCHNORM = {
    "sync_batchnorm": ("alternatives", "torch"),
    "cifar100": ("implementations", "torch + SyncBatchNorm"),
}


def _points(lab):
    """The first of each kind of points that run on a GPU and need no NCCL, by the group of ranks
    they share."""
    study = load_lab(lab)
    machine = MACHINES["one H100"]
    kinds = {}
    for point in study.plan(study.profiles["smoke"], machine):
        kind = kind_of_point(vars(point))
        is_there = getattr(point, "device", "cpu") == "cuda" and point.backend != "nccl"
        if is_there and kind not in OF_A_REAL_GPU and point.skip_reason(machine) is None:
            kinds.setdefault(kind, _without_torchs(lab, point))
    return groupby(kinds.values(), key=lambda point: (point.world_size, point.backend))


def _without_torchs(lab, point):
    field, name = TORCHS_SYNC_BATCHNORM.get(lab, ("", ""))
    return (
        replace(point, **{field: tuple(x for x in getattr(point, field) if x != name)})
        if field
        else point
    )


def _pretending(worker, point):
    with pretended_gpu():
        yield from worker(point) or ()


@pytest.mark.parametrize("lab", LABS)
def test_a_labs_worker_on_a_gpu(lab):
    worker = partial(_pretending, load_lab(lab).worker)
    groups = [(group, list(points)) for group, points in _points(lab)]
    if not groups:
        pytest.skip("no point of it runs on a pretended GPU")
    for (world_size, backend), points in groups:
        rows = 0
        with closing(
            launch(worker, points, world_size=world_size, backend=backend, timeout_s=300)
        ) as events:
            for event in events:
                if not isinstance(event, PointEnd):
                    rows = rows + 1 if isinstance(event, Row) else 0
                    assert "MixedDevices" not in str(event), event
                    continue
                assert event.status == "ok", (points[event.index], event.reason, event.failure)
                assert rows
                rows = 0
