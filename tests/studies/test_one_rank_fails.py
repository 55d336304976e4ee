"""An alternative that fails on one rank costs its point, which names it, in any lab."""

import os
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import pytest
import torch.distributed as dist

from labkit.parallel.launch import PointEnd, launch
from labkit.parallel.ranks.results import current_alternative
from labkit.studies.all_reduce.worker import AllReducePoint
from labkit.studies.cifar100.training import OWN_LOCAL, OWN_SYNC
from labkit.studies.cifar100.worker import TrainingPoint
from labkit.studies.data_parallel.worker import LOCAL, DataParallelPoint
from labkit.studies.limits.worker import LimitPoint
from labkit.studies.sharding.worker import ShardingPoint
from labkit.studies.sync_batchnorm.worker import LABKIT, PLAIN, SyncBatchNormPoint
from labkit.studies.tuned_step.worker import TunedStepPoint
from tests.cases import thinned

TWO = {"world_size": 2, "backend": "gloo", "warmup": 0, "repeats": 2}
CHECK = 1
CLOCK = 2
TRAINING = {"dataset": "digits", "epochs": 1, "batch": 4, "accumulation": 2, "train_images": 16}
TRAINING |= {
    "learning_rate": 0.01,
    "momentum": 0.5,
    "world_size": 2,
    "backend": "gloo",
    "has_memory": True,
}


@dataclass(frozen=True)
class Case:
    """A point, the alternative that fails in it, and the call of it that does."""

    point: Any
    fails: str
    call: int


CASES = {
    "all_reduce": Case(
        AllReducePoint(sweep="sizes", algorithms=("torch", "ring"), n_bytes=400, **TWO),
        "ring",
        CLOCK,
    ),
    "data_parallel": Case(
        DataParallelPoint(
            sweep="wrappers",
            alternatives=(LOCAL, "torch", "naive"),
            workload="nano",
            context_length=8,
            batch=1,
            **TWO,
        ),
        "naive",
        CLOCK,
    ),
    "sync_batchnorm": Case(
        SyncBatchNormPoint(batch=9, features=6, calls=1, alternatives=(LABKIT, PLAIN), **TWO),
        LABKIT,
        CLOCK,
    ),
    "sharding": Case(
        ShardingPoint(
            kind="time",
            transport="point_to_point",
            implementations=("ddp", "zero1", "torch_ddp"),
            size="nano",
            context_length=8,
            **TWO,
        ),
        "zero1",
        CLOCK,
    ),
    "tuned_step": Case(
        TunedStepPoint(
            model="nano",
            precision="float32",
            attention="tiled",
            compiled=False,
            wrapper="flat",
            batch=1,
            context_length=16,
            **TWO,
        ),
        "joined",
        CHECK,
    ),
    "cifar100": Case(
        TrainingPoint(implementations=(OWN_SYNC, OWN_LOCAL), **TRAINING), OWN_LOCAL, CLOCK
    ),
    "limits": Case(LimitPoint(sweep="exchange", sizes=(64,), **TWO), "shared memory", CHECK),
}


def _with_a_failure(case):
    """The lab's worker, where the second rank dies in that call of the alternative."""
    lab = import_module(type(case.point).__module__.rpartition(".")[0] + ".worker")
    begin = current_alternative.begin
    calls = []

    def begin_or_die(name):
        result = begin(name)
        calls.append(name)
        if dist.get_rank() == 1 and calls.count(case.fails) == case.call:
            os.abort()
        return result

    current_alternative.begin = begin_or_die
    try:
        yield from (getattr(lab, "measure", None) or lab.train)(case.point)
    finally:
        current_alternative.begin = begin


QUICK = ("sharding", "cifar100", "limits")


@cache
def _reasons(is_quick):
    """Why each case's point ended. One launch for all."""
    cases = {name: case for name, case in CASES.items() if (name in QUICK) == is_quick}
    items = launch(_with_a_failure, list(cases.values()), world_size=2, timeout_s=120)
    ends = [item.reason for item in items if isinstance(item, PointEnd)]
    return dict(zip(cases, ends, strict=True))


@pytest.mark.parametrize("name", thinned(CASES, lambda name: name in QUICK))
def test_the_point_names_the_alternative_that_one_rank_failed_in(name):
    reason = _reasons(name in QUICK)[name]
    assert reason == f"rank 1 was killed by SIGABRT, in {CASES[name].fails}"
