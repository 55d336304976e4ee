"""What changes between or within FSDP's passes, and on one rank alone, is noticed by all ranks."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.parallel.sharding import FSDP, whole_parameters
from labkit.parallel.traffic import recorded_traffic
from tests.parallel.data_parallel_cases import WIDTH, plain
from tests.parallel.sharding_cases import furthest
from tests.parallel.shared_ranks import assert_refused, on_ranks

STRATEGIES: list[dict[str, bool]] = [{}, {"reshard_after_backward": False}]


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
@pytest.mark.parametrize("run", [_evaluate, _train])
@pytest.mark.parametrize(
    "options", [{}, {"prefetch": 0}, {"reshard_after_forward": False}], ids=str
)
@pytest.mark.parametrize("transport", ["point_to_point", "auto"])
def test_units_of_equal_size(transport: str, options: dict[str, Any], run: Any) -> None:
    """Ranks that run different units raise one error, over messages that do not name them, too."""
    model = FSDP(Experts(), transport=transport, **options)
    # Over shared memory one message has another unit's name.
    names = "0 where" if transport == "point_to_point" else "every rank"
    with pytest.raises(RuntimeError, match=f"{names}|ended or failed"):
        run(model, dist.get_rank())
    if transport == "point_to_point":
        run(model, 1)  # all ranks have raised, so all can go on


@on_ranks(2)
@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("options", STRATEGIES, ids=str)
def test_frozen_in_between(options: dict[str, bool], last: bool) -> None:
    """A forward pass of the frozen model, between a pass and its backward, changes no gradient."""
    bare = plain()
    model = FSDP(copy.deepcopy(bare), **options)
    for each in (bare, model):
        loss = each(torch.ones(2, WIDTH)).square().sum()
        each.requires_grad_(False)
        each(torch.ones(2, WIDTH))
        each.requires_grad_(last)
        loss.backward()
    for name, p in model.module.named_parameters():
        expected = bare.get_parameter(name).grad
        assert (p.grad is None) == (expected is None), name
        if p.grad is not None:
            assert furthest([p.grad.full_tensor()], [expected]) <= 1e-6, name


@on_ranks(2)
def test_frozen_on_one_rank() -> None:
    model = FSDP(plain())
    loss = model(inputs()).sum()
    model.module[0].weight.requires_grad_(dist.get_rank() == 0)
    assert_refused("rank 0 has trained parameters=", loss.backward)


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
@pytest.mark.parametrize("options", STRATEGIES, ids=str)
def test_failed_call_of_a_module(options: dict[str, bool]) -> None:
    """A module that fails when it is called directly leaves no pass behind."""
    model = FSDP(nn.Sequential(Fails(), nn.Linear(WIDTH, WIDTH)), **options)
    layer = model.module[0]
    assert_refused("fails alone", partial(layer, inputs()), ZeroDivisionError)
    layer.fails = False
    with recorded_traffic() as traffic:
        before = model(inputs()).detach()
    assert sum(not call.is_payload for call in traffic) == 1  # at the begin of the next pass
    model(inputs()).sum().backward()
    model.zero_grad()
    with torch.no_grad():
        for shard in model.parameters():
            shard.mul_(2)
    assert not torch.equal(model(inputs()), before)


@on_ranks(2)
def test_foreach_on_shards() -> None:
    """Operators on the rows of shards that raise no version are noticed between evaluations."""
    model = FSDP(plain(), reshard_after_backward=False)
    with torch.no_grad():
        model(inputs())
        rows: list[Any] = [shard.to_local() for shard in model.parameters()]
        torch._foreach_copy_([each.data for each in rows], [each * 2 for each in rows])
        bare = plain()
        bare.load_state_dict(whole_parameters(model))
        assert torch.equal(model(inputs()), bare(inputs()))
        with recorded_traffic() as traffic:
            model(inputs())
    assert not any(call.is_payload for call in traffic)


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
def test_what_a_shard_would_miss() -> None:
    """Values written to an unsharded parameter, and parameters held outside of modules."""
    clamps = partial(FSDP(nn.Sequential(Clamps(WIDTH, 2))), inputs())
    assert_refused("0.weight was changed in place", clamps, RuntimeError)
    for hold in (lambda weight: [weight], lambda weight: {"tied": (weight,)}):
        assert_refused("held holds layer.weight", partial(FSDP, Holds(hold)))
    recurrent = FSDP(nn.LSTM(WIDTH, 2))
    recurrent(inputs())[0].sum().backward()
    assert all(p.grad is not None for p in recurrent.parameters())


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
@pytest.mark.parametrize("n_before", [0, 1])
def test_sparse_on_one_rank(n_before: int) -> None:
    """All ranks refuse a sparse gradient of one, in the middle of a pass and at its end."""
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(n_before)]
    model = FSDP(nn.Sequential(*layers, Sparse()))
    for _ in range(2):
        assert_refused("expected dense gradients", model(inputs()).sum().backward)


@on_ranks(2)
def test_first_error() -> None:
    """The error that ends a backward pass is raised, not those that follow from it."""
    model = FSDP(plain())
    loss = model(inputs()).sum()

    def fail(text: str) -> None:
        raise OSError(text)

    unit = model._units[0]
    unit.finalize_backward = lambda used: fail("first")  # type: ignore[method-assign]
    unit.wait_for_reduce_scatter = lambda: fail("second")  # type: ignore[method-assign]
    assert_refused("first", loss.backward, OSError)
    del unit.finalize_backward, unit.wait_for_reduce_scatter
    model(inputs()).sum().backward()


@on_ranks(2)
def test_error_on_one_rank() -> None:
    """The other rank's pass fails, and later ones say what to do: a new wrapper goes on."""
    # Of sizes that no other test has: torch caches operators on shards by their sizes and ranks.
    bare = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, WIDTH))
    model = FSDP(copy.deepcopy(bare), group=dist.new_group())
    before = whole_parameters(model)
    layer = model.module[1]
    handle = layer.register_forward_hook(lambda *_: 1 / dist.get_rank())
    for _ in range(2):
        call = partial(model, inputs())
        assert_refused("division by zero", call, ZeroDivisionError, RuntimeError)
    handle.remove()
    assert_refused("wrapper", partial(model, inputs()), RuntimeError)
    again = FSDP(bare, group=dist.new_group())
    again.load_state_dict(model.state_dict())
    again(inputs()).sum().backward()
    assert furthest([*whole_parameters(again).values()], [*before.values()]) == 0
