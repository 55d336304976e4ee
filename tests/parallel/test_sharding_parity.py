"""Every stage of sharding trains as one process on the full batch does, whatever the model and the optimizer.

Ranks are started once per number of ranks and go through all cases; they return what was wrong, in words.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

from labkit.parallel.background_comm import Channel
from labkit.parallel.collectives import all_gather, all_reduce, reduce_scatter
from labkit.parallel.data_parallel import FlatDDP
from labkit.parallel.launch import run_ranks
from labkit.parallel.sharding import FSDP, ReduceScatterDDP, ShardedOptimizer, gathering
from tests.cases import thinned
from tests.parallel.data_parallel_cases import WIDTH, MixedDtypes, Reentrant, Tied, frozen, plain, transformer
from tests.parallel.sharding_cases import (
    FLOAT32,
    Case,
    Small,
    built,
    furthest,
    matrices,
    on_tokens,
    train,
    values,
)

Made = tuple[nn.Module, optim.Optimizer]
OPTIMIZERS = {
    "AdamW": partial(optim.AdamW, lr=1e-2, weight_decay=0.1),
    "SGD with momentum": partial(optim.SGD, lr=0.1, momentum=0.9),
    "Adafactor": partial(optim.Adafactor, lr=1e-2),
}


class Uneven(nn.Module):
    """Sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Few(Small):
    """Every parameter has an element: torch's Adafactor divides by their number."""

    def __init__(self) -> None:
        super().__init__()
        del self.nothing
        self.register_buffer("nothing", torch.empty(0))


MODELS: dict[str, Callable[[Any], Case]] = {
    "plain": lambda optimizer: Case(optimizer, plain),
    "tied": lambda optimizer: Case(optimizer, Tied),
    "frozen": lambda optimizer: Case(optimizer, frozen),
    "several dtypes": lambda optimizer: Case(optimizer, MixedDtypes),
    "accumulation": lambda optimizer: Case(optimizer, plain, micro_batches=3),
    "clipping": lambda optimizer: Case(optimizer, plain, clip=0.01),
    "clipping, accumulated": lambda optimizer: Case(optimizer, Tied, clip=0.01, micro_batches=2),
    "checkpointed around layers": lambda optimizer: Case(optimizer, transformer, on_tokens),
    "checkpointed, re-entrant": lambda optimizer: Case(optimizer, Reentrant),
    "uneven sizes": lambda optimizer: Case(optimizer, Uneven),
    "more ranks than elements": lambda optimizer: Case(
        optimizer, Few if optimizer is OPTIMIZERS["Adafactor"] else Small
    ),
    "matrices only": lambda optimizer: Case(optimizer, matrices),
}
CASES = {
    (model, optimizer, dtype): replace(make(OPTIMIZERS[optimizer]), dtype=dtype, steps=3)
    for model, make in MODELS.items()
    for optimizer in OPTIMIZERS
    for dtype in (torch.float64, torch.float32)
}


def _zero1(case: Case, group: dist.ProcessGroup) -> tuple[nn.Module, Callable[..., optim.Optimizer]]:
    model = FlatDDP(built(case), all_reduce="auto", group=group)
    cls, settings = case.optimizer.func, case.optimizer.keywords  # type: ignore[attr-defined]
    return model, lambda groups: ShardedOptimizer(groups, cls, group=group, **settings)


def _zero2(case: Case, group: dist.ProcessGroup) -> tuple[nn.Module, Callable[..., optim.Optimizer]]:
    # buckets of a few hundred bytes, so that these small models fill several
    model = ReduceScatterDDP(built(case), bucket_mb=3e-4, first_bucket_mb=1e-4, group=group)
    cls, settings = case.optimizer.func, case.optimizer.keywords  # type: ignore[attr-defined]
    return model, lambda groups: ShardedOptimizer(groups, cls, wrapper=model, **settings)


def _zero3(case: Case, group: dist.ProcessGroup, **options: Any) -> tuple[nn.Module, Callable[..., optim.Optimizer]]:
    options["elementwise"] = case.optimizer.func is not optim.Adafactor  # type: ignore[attr-defined]
    return FSDP(built(case), group=group, **options), case.optimizer


STAGES: dict[str, Callable[..., tuple[nn.Module, Callable[..., optim.Optimizer]]]] = {
    "ZeRO-1": _zero1,
    "ZeRO-2": _zero2,
    "ZeRO-3": _zero3,
    "ZeRO-3, all cut": partial(_zero3, replicate_below=0, prefetch=0, transport="point_to_point"),
    "ZeRO-3, not resharded": partial(_zero3, reshard_after_forward=False, prefetch=2),
}
COLLECTIVES = {"all-gather": all_gather, "reduce-scatter": reduce_scatter, "all-reduce": all_reduce}


def trained(stage: str, case: Case, group: dist.ProcessGroup) -> list[torch.Tensor]:
    """Whole parameters after training in shards."""
    model, make = STAGES[stage](case, group)
    train(case, model, make, [group.rank()])
    return list(model.gather_full_parameters().values()) if isinstance(model, FSDP) else values(model)


@contextmanager
def watched(left_out: Callable[..., None] | None = None) -> Iterator[set[Callable[..., None]]]:
    """Which collectives train here; by one of them nothing arrives. What ranks tell one another (a sum) is none."""
    call, gather, used = Channel.call, gathering.all_gather, set[Callable[..., None]]()

    def carry_out(do: Callable[..., None], collective: Callable[..., None], *args: Any, **options: Any) -> None:
        is_note = collective is all_reduce and "sum" in args
        if not is_note:
            used.add(collective)
        if is_note or collective is not left_out:
            do(*args, **options)
        elif collective is all_gather:  # memory of an earlier training may hold what should have come
            vector, sizes = args[0], options["sizes"]
            for rank, part in enumerate(vector.split(list(sizes))):
                if rank != dist.get_rank():
                    part.zero_()
        elif collective is reduce_scatter:
            options["into"].zero_()

    def of_channel(self: Channel, asked: Callable[..., None], *args: Any, **options: Any) -> None:
        carry_out(partial(call, self, asked), asked, *args, **options)

    Channel.call = of_channel  # type: ignore[method-assign]
    gathering.all_gather = partial(carry_out, all_gather, all_gather)  # type: ignore[assignment]
    try:
        yield used
    finally:
        Channel.call, gathering.all_gather = call, gather  # type: ignore[method-assign]


Name = tuple[str, str, torch.dtype]


def go_through(world_size: int, names: list[Name], doing_without: list[Name]) -> dict[str, list[str]]:
    """On a rank: what was wrong, by stage; some cases also without each of the collectives in turn."""
    group = dist.new_group(range(world_size))
    if dist.get_rank() >= world_size:
        return {}
    assert isinstance(group, dist.ProcessGroup)
    wrong: dict[str, list[str]] = {stage: [] for stage in STAGES}
    for name in names:
        case = CASES[name]
        plain_model = built(case)
        train(case, plain_model, case.optimizer, [*range(world_size)])
        expected = values(plain_model)
        tolerance = 1e-10 if case.dtype == torch.float64 and case.build is not MixedDtypes else FLOAT32
        for stage, found in wrong.items():
            with watched() as used:
                got = trained(stage, case, group)
            digest = hashlib.sha256(b"".join(v.reshape(-1).view(torch.uint8).numpy().tobytes() for v in got))
            of_all: list[Any] = [None] * world_size
            dist.all_gather_object(of_all, digest.hexdigest(), group=group)
            if len(set(of_all)) > 1:
                found.append(f"{name}: differs between ranks")
            if not (error := furthest(got, expected)) <= tolerance:
                found.append(f"{name}: {error}")
            for collective in COLLECTIVES if name in doing_without else ():
                if COLLECTIVES[collective] in used and _is_right_without(collective, stage, case, group, expected):
                    found.append(f"{name}: right without {collective}")
            if not used:
                found.append(f"{name}: trained without any collective")
    return wrong


def _is_right_without(
    collective: str, stage: str, case: Case, group: dist.ProcessGroup, expected: list[torch.Tensor]
) -> bool:
    """On every rank, to the tolerance of float32."""
    with watched(COLLECTIVES[collective]):
        try:
            is_right = furthest(trained(stage, case, group), expected) <= FLOAT32
        except AssertionError:  # a norm that is no number
            is_right = False
    flag = torch.tensor(int(is_right))
    dist.all_reduce(flag, op=dist.ReduceOp.MIN, group=group)
    return bool(flag)


WORLDS = (2, 3, 4)
QUICK = [
    ("tied", "AdamW", torch.float64),
    ("frozen", "Adafactor", torch.float64),
    ("several dtypes", "SGD with momentum", torch.float32),
    ("clipping, accumulated", "AdamW", torch.float32),
    ("uneven sizes", "SGD with momentum", torch.float64),
    ("more ranks than elements", "AdamW", torch.float64),
]
QUICK_WITHOUT = [name for name in QUICK if name[0] in ("clipping, accumulated", "uneven sizes")]


@pytest.fixture(scope="module")
def wrong(workers_travel_by_value: None) -> Callable[..., dict[str, list[str]]]:
    known: dict[Any, dict[str, list[str]]] = {}

    def by_stage(world_size: int, all_cases: bool) -> dict[str, list[str]]:
        key = (world_size, all_cases)
        if key not in known:
            names = [name for name in CASES if all_cases or name in QUICK]
            doing_without = names if all_cases else QUICK_WITHOUT
            ranks = run_ranks(go_through, world_size, names, doing_without, world_size=world_size, timeout_s=600)
            known[key] = {stage: [text for of_rank in ranks for text in of_rank[stage]] for stage in STAGES}
        return known[key]

    return by_stage


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    ("world_size", "all_cases"),
    thinned([(3, False), *((p, True) for p in WORLDS)], lambda world_size, all_cases: not all_cases),
)
def test_training_equals_one_process_and_needs_each_of_its_collectives(
    wrong: Callable[..., dict[str, list[str]]], stage: str, world_size: int, all_cases: bool
) -> None:
    assert wrong(world_size, all_cases)[stage] == []
