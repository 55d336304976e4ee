"""An alternative that fails on one rank only costs no other alternative of its point, in any lab."""

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

TWO = {"world_size": 2, "backend": "gloo", "warmup": 0, "repeats": 2}
SMALL = {"batch": 1} | TWO
GATE, CLOCK, EPOCH = "check", "clock", "epoch"
TRAINING = {"dataset": "digits", "epochs": 1, "batch": 4, "accumulation": 2, "train_images": 16}
TRAINING |= {"learning_rate": 0.01, "momentum": 0.5, "world_size": 2, "backend": "gloo"}


@dataclass(frozen=True)
class Case:
    """A point, the column that names its alternatives, the one that fails and those that must not suffer."""

    point: Any
    column: str
    fails: str
    spared: frozenset[str]
    when: str = GATE


def _case(point, column, fails, *spared, **options):
    return Case(point, column, fails, frozenset(spared), **options)


def _data_parallel(sweep, *alternatives, **options):
    return DataParallelPoint(
        sweep=sweep, alternatives=alternatives, workload="nano", context_length=8, **(SMALL | options)
    )


def _sharding(kind):
    names = ("ddp", "zero1", "torch_ddp")
    settings = {"size": "nano", "context_length": 8} | TWO
    return ShardingPoint(kind=kind, transport="point_to_point", implementations=names, **settings)


CASES = {
    "all_reduce": _case(
        AllReducePoint(sweep="sizes", algorithms=("torch", "ring"), n_bytes=400, **TWO),
        *("algorithm", "ring", "torch"),
        when=CLOCK,
    ),
    "data_parallel": _case(
        _data_parallel("wrappers", LOCAL, "torch", "naive"),
        *("implementation", "naive", "torch", LOCAL),
        when=CLOCK,
    ),
    "data_parallel, timeline": _case(
        _data_parallel("timeline", "torch", "naive"), "implementation", "naive", "torch"
    ),
    "data_parallel, memory": _case(_data_parallel("memory", "torch", "naive"), "implementation", "naive", "torch"),
    "sync_batchnorm": _case(
        SyncBatchNormPoint(batch=9, features=6, calls=1, alternatives=(LABKIT, PLAIN), **TWO),
        *("alternative", LABKIT, PLAIN),
        when=CLOCK,
    ),
    "sharding": _case(_sharding("time"), "implementation", "zero1", "ddp", "torch_ddp", when=CLOCK),
    "sharding, memory": _case(_sharding("memory"), "implementation", "zero1", "ddp", "torch_ddp"),
    "tuned_step": _case(
        TunedStepPoint(
            model="nano", precision="float32", attention="tiled", compiled=False, wrapper="flat", batch=1,
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
    "limits": _case(LimitPoint(sweep="exchange", sizes=(64,), **TWO), "way", "shared memory", "gloo"),
}  # fmt: skip


def _with_a_failure(case_and_how):
    """The lab's worker, where the second rank raises or dies when it is the turn of that alternative."""
    case, how = case_and_how
    shared = import_module("labkit.studies.shared.alternatives")
    lab = import_module(type(case.point).__module__.rpartition(".")[0] + ".worker")

    def fail():
        if dist.get_rank() == 1:
            if how == "abort":
                os.abort()
            raise ValueError("only here")

    gate, clock = shared.guarded_turn, shared.time_parts_interleaved

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
        shared.guarded_turn, shared.time_parts_interleaved = gate, clock
        lab.guarded_turn = gate


@cache
def _measured(names):
    """By case: how its point ended, for which alternatives it began anew, and its rows. One launch for all of them."""
    found = {name: ([], [], []) for name in names}
    points = [(CASES[name], _how(CASES[name])) for name in names]
    for item in launch(_with_a_failure, points, world_size=2, timeout_s=120):
        ends, again, rows = found[names[item.index]]
        if isinstance(item, Retry):
            again.append(item.alternative)
            rows.clear()
        elif isinstance(item, PointEnd):
            ends.append(item.reason)
        else:
            rows.append((item.rank, item.values))
    return found


def _how(case):
    return "abort" if case.when == CLOCK else "raise"


ONE_PER_LAB = tuple(name for name in CASES if ", " not in name)
OTHERS = tuple(name for name in CASES if name not in ONE_PER_LAB)


@pytest.mark.parametrize(
    ("names", "name"),
    [
        *((ONE_PER_LAB, name) for name in ONE_PER_LAB),
        *(pytest.param(OTHERS, name, marks=pytest.mark.slow) for name in OTHERS),
    ],
    ids=[*ONE_PER_LAB, *OTHERS],
)
def test_every_other_alternative_is_measured_and_the_one_says_why_not(names, name):
    case = CASES[name]
    ends, again, rows = _measured(names)[name]
    assert ends == [None]
    assert again == [case.fails]
    expected = "rank 1 was killed by SIGABRT" if _how(case) == "abort" else "on rank 1: ValueError: only here"
    for rank in range(2):
        gates = {}
        for of_rank, row in rows:
            if of_rank == rank and case.column in row:
                gates.setdefault(row[case.column], set()).add(row.get("check", "ok"))
        reasons = gates[case.fails] - {"ok"}
        assert {re.match(rf"failed:? {expected}", reason) is not None for reason in reasons} == {True}
        assert {gate for spared in case.spared for gate in gates[spared]} <= {"ok"}
