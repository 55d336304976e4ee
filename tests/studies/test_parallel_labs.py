"""Labs on parallelism of all kinds: what loses a message gets no time; memory is that of a host."""

from contextlib import nullcontext
from functools import partial
from itertools import product
from unittest.mock import patch

import pandas as pd
import pytest

from labkit.costs.transformer import SIZES
from labkit.lab.metric import Results
from labkit.parallel import context_attention, tensor_collectives
from labkit.parallel.data_parallel.base import BackgroundAllReduce
from labkit.parallel.messages import gather_json
from labkit.parallel.pipeline_messages import Messages
from labkit.parallel.sharding import ShardedOptimizer
from labkit.studies.context_parallel import worker as context_worker
from labkit.studies.data_parallel import worker as data_worker
from labkit.studies.model_parallel import worker as model_worker
from labkit.studies.model_parallel.point import ModelParallelPoint
from labkit.studies.sharding import worker as sharding_worker
from labkit.studies.sharding.lab import largest_models
from tests.cases import thinned
from tests.parallel.shared_ranks import on_ranks

COMMON = {"world_size": 2, "backend": "gloo", "warmup": 0, "repeats": 1}
SMALL = {"layers": 4, "batch": 2, "context_length": 8}
MODEL = partial(ModelParallelPoint, **COMMON, **SMALL)
DATA = partial(
    data_worker.DataParallelPoint,
    **COMMON,
    workload="nano",
    batch=1,
    context_length=8,
    micro_batches=2,
)
DATA = partial(DATA, alternatives=("flat",))
SWEEPS = ("wrappers", "accumulation", "timeline", "memory")
MEASURED = {"seconds", "duration_s", "peak_bytes", "parameters_bytes"}
RECEIVE = Messages.receive


def _lose(messages, source, way):
    content = RECEIVE(messages, source, way)
    return content.detach().zero_().requires_grad_(content.requires_grad)


BREAKS = {
    "tensor": (tensor_collectives.Ranks, "sum", lambda ranks, x: x),
    "pipeline": (Messages, "receive", _lose),
    "axes": (Messages, "receive", _lose),
    "context": (context_attention, "_merge", lambda *_: None),
    "sharding": (ShardedOptimizer, "gather_parameters", lambda optimizer: None),
    **dict.fromkeys(SWEEPS, (BackgroundAllReduce, "average", lambda *_: None)),
}
POINTS = {
    "tensor": (model_worker, MODEL(sweep="tensor", widths=(32,), alternatives=("shared",))),
    "pipeline": (
        model_worker,
        MODEL(sweep="pipeline", widths=(32,), alternatives=("1f1b",), micro_batches=(2,)),
    ),
    "axes": (model_worker, MODEL(sweep="axes", model="nano", alternatives=("pipeline",))),
    "context": (
        context_worker,
        context_worker.ContextParallelPoint(
            **COMMON, ways=("ring, zigzag",), sequence=64, heads=1, head_dim=16
        ),
    ),
    "sharding": (
        sharding_worker,
        sharding_worker.ShardingPoint(
            **COMMON,
            kind="memory",
            size="nano",
            transport="point_to_point",
            implementations=("zero1",),
        ),
    ),
    **{sweep: (data_worker, DATA(sweep=sweep)) for sweep in SWEEPS},
}
LOST = [("pipeline", True), ("wrappers", True)]


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "is_broken"),
    # Of each worker one point without a fault, which fails no check.
    thinned(
        product(POINTS, (False, True)),
        lambda *case: case[0] in ("tensor", "context", "sharding", "memory") or case in LOST,
    ),
)
def test_a_lost_message_is_found_before_anything_is_timed(name, is_broken):
    worker, point = POINTS[name]
    with patch.object(*BREAKS[name]) if is_broken else nullcontext():
        rows = list(worker.measure(point))
    rows = [row for rank in gather_json(rows) for row in rank]
    checks = {row["status"] for row in rows if "status" in row}
    assert checks == {"wrong"} if is_broken else checks <= {"ok"}
    assert any(MEASURED & row.keys() for row in rows) != is_broken


@pytest.mark.parametrize(("host_ranks", "share"), [(4, 4), (2, 2), (float("nan"), 4)])
def test_ranks_share_the_memory_of_their_host(host_ranks, share):
    point = {
        "kind": "memory",
        "world_size": 4,
        "host_ranks": host_ranks,
        "device": "cpu",
        "batch": 1,
    }
    frame = pd.DataFrame([point | {"context_length": 32}])
    table = largest_models(Results(frame, machine_bytes=2**35))
    assert set(table["memory_bytes"]) == {0.9 * 2**35 / share}
    assert set(table["model"]) <= set(SIZES)
