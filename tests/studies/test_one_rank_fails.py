"""An alternative that fails on one rank only costs no other alternative of its point, in any
lab."""

import os
import re
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

import pytest
import torch.distributed as dist

from labkit.parallel.launch import PointEnd, Retry, launch
from labkit.studies.all_reduce.worker import AllReducePoint
from labkit.studies.cifar100.training import OWN_LOCAL, OWN_SYNC, TORCH_LOCAL
from labkit.studies.cifar100.worker import TrainingPoint
from labkit.studies.data_parallel.worker import LOCAL, DataParallelPoint
from labkit.studies.limits.worker import LimitPoint
from labkit.studies.sharding.worker import ShardingPoint
from labkit.studies.sync_batchnorm.worker import LABKIT, PLAIN, SyncBatchNormPoint
from labkit.studies.tuned_step.worker import TunedStepPoint
from tests.cases import thinned

TWO = {"world_size": 2, "backend": "gloo", "warmup": 0, "repeats": 2}
GATE = "check"
CLOCK = "clock"
EPOCH = "epoch"
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
    """A point, the column that names its alternatives, the one that fails and those that must not
    suffer."""

    point: Any
    column: str
    fails: str
    spared: frozenset[str]
    when: str = GATE


def _case(point, column, fails, *spared, **options):
    return Case(point, column, fails, frozenset(spared), **options)


CASES = {
    "all_reduce": _case(
        AllReducePoint(sweep="sizes", algorithms=("torch", "ring"), n_bytes=400, **TWO),
        *("algorithm", "ring", "torch"),
        when=CLOCK,
    ),
    "data_parallel": _case(
        DataParallelPoint(
            sweep="wrappers", alternatives=(LOCAL, "torch", "naive"),
            workload="nano", context_length=8, batch=1, **TWO
        ),
        *("implementation", "naive", "torch", LOCAL),
        when=CLOCK,
    ),
    "sync_batchnorm": _case(
        SyncBatchNormPoint(batch=9, features=6, calls=1, alternatives=(LABKIT, PLAIN), **TWO),
        *("alternative", LABKIT, PLAIN),
        when=CLOCK,
    ),
    "sharding": _case(
        ShardingPoint(
            kind="time", transport="point_to_point", implementations=("ddp", "zero1", "torch_ddp"),
            size="nano",
            context_length=8, **TWO,
        ),
        *("implementation", "zero1", "ddp", "torch_ddp"),
        when=CLOCK,
    ),
    "tuned_step": _case(
        TunedStepPoint(
            model="nano", precision="float32", attention="tiled", compiled=False, wrapper="flat",
            batch=1,
            context_length=16, **TWO,
        ),
        *("implementation", "joined"),
        when=CLOCK,
    ),
    "cifar100": _case(
        TrainingPoint(implementations=(OWN_SYNC, OWN_LOCAL, TORCH_LOCAL), **TRAINING),
        *("implementation", OWN_LOCAL, OWN_SYNC, TORCH_LOCAL),
        when=EPOCH,
    ),
    "limits": _case(LimitPoint(sweep="exchange", sizes=(64,), **TWO), "way", "shared memory",
    "gloo"),
}  # fmt: skip


def _with_a_failure(case_and_how):
    """The lab's worker, where the second rank raises or dies when it is the turn of that
    alternative."""
    case, how = case_and_how
    shared = import_module("labkit.studies.shared.alternatives")
    lab = import_module(type(case.point).__module__.rpartition(".")[0] + ".worker")

    def fail():
        if dist.get_rank() == 1:
            if how == "abort":
                os.abort()
            raise ValueError("only here")

    gate = shared.guarded_turn
    clock = shared.time_parts_interleaved

    @contextmanager
    def guarded_turn(name, device):
        with gate(name, device) as turn:
            if name == case.fails:
                fail()
            yield turn

    def time_parts(turns, **options):
        turns = {name: dict(parts) for name, parts in turns.items()}
        if case.fails in turns:
            turns[case.fails] |= dict.fromkeys(turns[case.fails], fail)
        return clock(turns, **options)

    if case.when == CLOCK:
        shared.time_parts_interleaved = time_parts
    elif case.when == GATE:
        shared.guarded_turn = guarded_turn
    else:
        lab.guarded_turn = guarded_turn
    try:
        yield from (lab.train if case.when == EPOCH else lab.measure)(case.point)
    finally:
        shared.guarded_turn = gate
        shared.time_parts_interleaved = clock
        lab.guarded_turn = gate


@cache
def _measured(is_quick):
    """By case: how its point ended, the alternatives without which it began anew, and its rows. One
    launch for all."""
    results = {name: ([], [], []) for name in CASES if (name in QUICK) == is_quick}
    points = [(CASES[name], _how(CASES[name])) for name in results]
    for item in launch(_with_a_failure, points, world_size=2, timeout_s=120):
        ends, again, rows = list(results.values())[item.index]
        if isinstance(item, Retry):
            again.append(item.alternative)
            rows.clear()
        elif isinstance(item, PointEnd):
            ends.append(item.reason)
        else:
            rows.append((item.rank, item.values))
    return results


def _how(case):
    return "abort" if case.when == CLOCK else "raise"


QUICK = ("sharding", "tuned_step", "cifar100", "limits")


@pytest.mark.parametrize("name", thinned(CASES, lambda name: name in QUICK))
def test_every_other_alternative_is_measured_and_the_failed_one_has_its_reason(name):
    case = CASES[name]
    ends, again, rows = _measured(name in QUICK)[name]
    assert ends == [None]
    assert again == [case.fails]
    expected = (
        "rank 1 was killed by SIGABRT"
        if _how(case) == "abort"
        else "on rank 1: ValueError: only here"
    )
    for rank in range(2):
        checks = {}
        for row in (row for row_rank, row in rows if row_rank == rank and case.column in row):
            checks.setdefault(row[case.column], set()).add(row.get("check", "ok"))
        reasons = checks[case.fails] - {"ok"}
        assert {re.match(rf"failed:? {expected}", reason) is not None for reason in reasons} == {
            True
        }
        assert {check for spared in case.spared for check in checks[spared]} <= {"ok"}
