"""What changes between or within FSDP's passes, and on one rank alone, is noticed by all ranks."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.parallel.sharding import FSDP, whole_parameters
from labkit.parallel.traffic import recorded_traffic
from tests.parallel.data_parallel_cases import WIDTH, plain
from tests.parallel.sharding_cases import furthest
from tests.parallel.shared_ranks import find_accepted, on_ranks

_zero2 = partial(FSDP, reshard_after_backward=False)


def inputs() -> Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))


class Experts(nn.Module):
    """A layer per rank, all of one size."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.heads = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[2](self.heads[head](x))


def _train(model: FSDP, head: int) -> None:
    model(inputs(), head).sum().backward()


def _evaluate(model: FSDP, head: int) -> None:
    with torch.no_grad():
        model(inputs(), head)


@on_ranks(2)
def test_units_of_equal_size() -> list[str]:
    """Ranks that run different units raise one error, over messages that do not name them, too."""
    wrong = []
    rank = dist.get_rank()
    for transport in ("point_to_point", "auto"):
        for options in ({}, {"prefetch": 0}, {"reshard_after_forward": False}):
            for run in (_evaluate, _train):
                model = FSDP(Experts(), transport=transport, **options)
                call = partial(run, model, rank)
                # Over shared memory one message has another unit's name.
                names = "0 where" if transport == "point_to_point" else "every rank"
                try:
                    call()
                    wrong.append(f"{transport}, {options}, {run.__name__}: accepted")
                except RuntimeError as error:
                    if names not in str(error) and "ended or failed" not in str(error):
                        wrong.append(f"{transport}, {options}, {run.__name__}: {error}")
                if transport == "point_to_point":
                    run(model, 1)  # all ranks have raised, so all can go on
    return wrong


@on_ranks(2)
def test_frozen_in_between() -> list[str]:
    """A forward pass of the frozen model, between a pass and its backward, changes no gradient."""
    wrong = []
    for strategy in (FSDP, _zero2):
        for last in (True, False):
            bare = plain()
            model = strategy(copy.deepcopy(bare))
            for each in (bare, model):
                loss = each(torch.ones(2, WIDTH)).square().sum()
                each.requires_grad_(False)
                each(torch.ones(2, WIDTH))
                each.requires_grad_(last)
                loss.backward()
            for name, p in model.module.named_parameters():
                expected = bare.get_parameter(name).grad
                if (p.grad is None) != (expected is None):
                    wrong.append(f"{strategy}, {last}: {name} has {p.grad}")
                elif p.grad is not None and furthest([p.grad.full_tensor()], [expected]) > 1e-6:
                    wrong.append(f"{strategy}, {last}: {name} has another gradient")
    model = FSDP(plain())
    loss = model(inputs()).sum()
    model.module[0].weight.requires_grad_(dist.get_rank() == 0)
    return wrong + find_accepted([("rank 0 has trained parameters=", loss.backward)])


class Fails(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.fails = True

    def forward(self, x: Tensor) -> Tensor:
        if self.fails:
            raise ZeroDivisionError("fails alone")
        return self.layer(x)


@on_ranks(2)
def test_failed_call_of_a_module() -> list[str]:
    """A module that fails when it is called directly leaves no pass behind."""
    wrong = []
    for strategy in (FSDP, _zero2):
        model = strategy(nn.Sequential(Fails(), nn.Linear(WIDTH, WIDTH)))
        layer = model.module[0]
        wrong += find_accepted([("fails alone", partial(layer, inputs()))], ZeroDivisionError)
        layer.fails = False
        with recorded_traffic() as traffic:
            before = model(inputs()).detach()
        if sum(not call.is_payload for call in traffic) != 1:
            wrong.append(f"{strategy}: the next pass does not begin with an agreement")
        model(inputs()).sum().backward()
        model.zero_grad()
        with torch.no_grad():
            for shard in model.parameters():
                shard.mul_(2)
        if torch.equal(model(inputs()), before):
            wrong.append(f"{strategy}: computes with parameters from before a change")
    return wrong


@on_ranks(2)
def test_foreach_on_shards() -> list[str]:
    """Operators on the rows of shards that raise no version are noticed between evaluations."""
    model = _zero2(plain())
    with torch.no_grad():
        model(inputs())
        rows: list[Any] = [shard.to_local() for shard in model.parameters()]
        torch._foreach_copy_([each.data for each in rows], [each * 2 for each in rows])
        bare = plain()
        bare.load_state_dict(whole_parameters(model))
        wrong = [] if torch.equal(model(inputs()), bare(inputs())) else ["computes with old rows"]
        with recorded_traffic() as traffic:
            model(inputs())
    return wrong + ["gathers without need"] * any(call.is_payload for call in traffic)


class Clamps(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.01, 0.01)
        return super().forward(x)


class Holds(nn.Module):
    def __init__(self, hold: Callable[[Any], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.held = hold(self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@on_ranks(2)
def test_what_a_shard_would_miss() -> list[str]:
    """Values written to an unsharded parameter, and parameters held outside of modules."""
    calls: list[tuple[str, Callable[[], object]]] = [
        ("0.weight was changed in place", partial(FSDP(nn.Sequential(Clamps(WIDTH, 2))), inputs())),
        ("held holds layer.weight", lambda: FSDP(Holds(lambda weight: [weight]))),
        ("held holds layer.weight", lambda: FSDP(Holds(lambda weight: {"tied": (weight,)}))),
    ]
    wrong = find_accepted(calls, RuntimeError)
    recurrent = FSDP(nn.LSTM(WIDTH, 2))
    recurrent(inputs())[0].sum().backward()
    return wrong + ["no gradient"] * any(p.grad is None for p in recurrent.parameters())


class Sparse(nn.Module):
    """The gradient of its table is sparse on rank 1."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(4, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        indices = torch.zeros(1, dtype=torch.int64)
        rows = nn.functional.embedding(indices, self.table, sparse=dist.get_rank() == 1)
        return x * rows


@on_ranks(2)
def test_sparse_on_one_rank() -> list[str]:
    """All ranks refuse a sparse gradient of one, in the middle of a pass and at its end."""
    wrong = []
    for layers in ([Sparse()], [nn.Linear(WIDTH, WIDTH), Sparse()]):
        model = FSDP(nn.Sequential(*layers))
        for _ in range(2):
            loss = model(inputs()).sum()
            wrong += find_accepted([("expected dense gradients", loss.backward)])
    return wrong


@on_ranks(2)
def test_first_error() -> list[str]:
    """The error that ends a backward pass is raised, not those that follow from it."""
    model = FSDP(plain())
    loss = model(inputs()).sum()

    def fail(text: str) -> None:
        raise OSError(text)

    unit = model._units[0]
    unit.finalize_backward = lambda used: fail("first")  # type: ignore[method-assign]
    unit.wait_for_reduce_scatter = lambda: fail("second")  # type: ignore[method-assign]
    wrong = find_accepted([("first", loss.backward)], OSError)
    del unit.finalize_backward, unit.wait_for_reduce_scatter
    model(inputs()).sum().backward()
    return wrong


@on_ranks(2)
def test_error_on_one_rank() -> list[str]:
    """The other rank's pass fails, and later ones say what to do: a new wrapper goes on."""
    # Of sizes that no other test has: torch caches operators on shards by their sizes and ranks.
    bare = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH))
    model = FSDP(copy.deepcopy(bare), group=dist.new_group())
    before = whole_parameters(model)
    layer = model.module[1]
    handle = layer.register_forward_hook(lambda *_: 1 / dist.get_rank())
    calls = [("division by zero", partial(model, inputs()))] * 2
    wrong = find_accepted(calls, ZeroDivisionError, RuntimeError)
    handle.remove()
    wrong += find_accepted([("wrapper", partial(model, inputs()))], RuntimeError)
    again = FSDP(bare, group=dist.new_group())
    again.load_state_dict(model.state_dict())
    again(inputs()).sum().backward()
    difference = furthest([*whole_parameters(again).values()], [*before.values()])
    return wrong + ["another state"] * (difference > 0)
