"""A sharded optimizer holds its share of the state, saves and loads, and refuses on all ranks what
one cannot do.

That it trains as the plain one does is tested with all strategies (`test_sharding_parity.py`).
"""

import copy
import shutil
import tempfile
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed import checkpoint

from labkit.parallel.data_parallel import FlatDDP
from labkit.parallel.sharding import ShardedOptimizer
from tests.parallel.data_parallel_cases import FLOAT32, Case, built, plain, split_groups, train
from tests.parallel.sharding_cases import CASES, furthest, local, sharded, values
from tests.parallel.shared_ranks import assert_refused, on_ranks

SAVED = ("SGD with momentum", "channels last", "fewer elements than ranks", "uneven", "groups")


def _assert_states_equal(state: dict[str, Any], expected: dict[str, Any]) -> None:
    """Of whole states."""
    assert state["param_groups"] == expected["param_groups"]
    assert state["state"].keys() == expected["state"].keys()
    for number, values_by_name in expected["state"].items():
        for name, value in values_by_name.items():
            got = state["state"][number][name]
            if not isinstance(value, torch.Tensor):
                assert got == value, (number, name)
                continue
            assert (got.shape, got.dtype) == (value.shape, value.dtype), (number, name)
            assert not value.numel() or furthest([got], [value]) <= FLOAT32, (number, name)


@on_ranks(3)
@pytest.mark.parametrize("name", SAVED)
def test_saving(name: str) -> None:
    """Sharded to plain and back, to another number of ranks, and shard by shard: training goes on
    alike."""
    rank = dist.get_rank()
    p = dist.get_world_size()
    fewer = dist.new_group([0, 1])
    case = CASES[name]
    model = FlatDDP(built(case))
    optimizer: Any = train(case, model, [rank], sharded(case.optimizer))
    alone = built(case)
    reference = train(case, alone, [*range(p)])
    state = optimizer.consolidated_state_dict(to=None)
    _assert_states_equal(state, reference.state_dict())
    assert (optimizer.consolidated_state_dict(to=2) is not None) == (rank == 2)
    elements = [v for s in reference.state.values() for n, v in s.items() if n != "step"]
    rows = sum(v[:1].numel() if v.dim() else 1 for v in elements)
    held = sum(
        local(v).numel() for s in optimizer.state.values() for n, v in s.items() if n != "step"
    )
    assert held <= sum(v.numel() for v in elements) / p + rows
    expected = _continued(case, model, state, case.optimizer)
    own = copy.deepcopy(optimizer.state_dict())
    for saved in (own, state):
        again = _continued(case, model, saved, sharded(case.optimizer))
        assert furthest(again, expected) <= 1e-12
    if rank < 2:
        on_fewer = _continued(case, model, state, sharded(case.optimizer, group=fewer))
        assert furthest(on_fewer, expected) <= 1e-12
    other = {**own, "shard": {f"rank {(rank + 1) % p} of {p}": True}}
    assert_refused("shard", partial(optimizer.load_state_dict, other))


@on_ranks(3)
def test_checkpoint() -> None:
    """Each rank's rows come back from torch.distributed.checkpoint to the rank that saved them."""
    folders = [tempfile.mkdtemp()]
    parameters = list(plain().parameters())
    dist.broadcast_object_list(folders)
    optimizer = ShardedOptimizer(parameters, optim.AdamW)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = {"optimizer": optimizer.state_dict()}
    expected = optimizer.consolidated_state_dict(to=None)
    checkpoint.save(state, checkpoint_id=folders[0])
    optimizer.step()
    state = {"optimizer": optimizer.state_dict()}
    checkpoint.load(state, checkpoint_id=folders[0])
    optimizer.load_state_dict(state["optimizer"])
    shutil.rmtree(folders[0], ignore_errors=True)
    _assert_states_equal(optimizer.consolidated_state_dict(to=None), expected)


def _continued(case: Case, model: nn.Module, state: Any, make: Any) -> list[torch.Tensor]:
    """Two more steps of a copy of the model, with gradients that are the same everywhere."""
    copied = built(case)
    copied.load_state_dict(model.module.state_dict())  # type: ignore[union-attr, operator]
    optimizer = make(split_groups(case, copied)[0])
    optimizer.load_state_dict(copy.deepcopy(state))  # torch keeps the tensors it is given
    for step in range(2):
        for parameter in copied.parameters():
            parameter.grad = (
                torch.full_like(parameter, 0.1 * (step + 1)) * parameter.detach().sign()
            )
        optimizer.step()
    return values(copied)


@on_ranks(3)
def test_changes() -> None:
    """Parameters whose data is replaced, that are thawed, that have no gradient; hooks on state
    dicts run."""
    models = [plain(), plain()]
    optimizers = list[Any]()
    for model in models:
        model.load_state_dict(models[0].state_dict())
        model[0].weight.requires_grad_(False)
        make: Any = (
            optim.SGD if model is models[0] else partial(ShardedOptimizer, optimizer_cls=optim.SGD)
        )
        optimizers.append(make(model.named_parameters(), lr=0.1, momentum=0.9))
    for step in range(6):
        for model, optimizer in zip(models, optimizers, strict=True):
            if step == 2:
                model[0].weight.requires_grad_(True)
            if step == 3:
                for parameter in model.parameters():
                    parameter.data = parameter.data.clone()
            optimizer.zero_grad()
            for number, parameter in enumerate(model.parameters()):
                if parameter.requires_grad and (step + number) % 3:
                    gradient = torch.linspace(-1, 1, parameter.numel()).view(parameter.shape)
                    parameter.grad = gradient.t().contiguous().t() if number == 2 else gradient
            optimizer.step()
    assert furthest(values(models[1]), values(models[0])) <= FLOAT32
    state = optimizers[1].consolidated_state_dict(to=None)
    _assert_states_equal(state, optimizers[0].state_dict())
    calls = []
    optimizers[1].register_state_dict_pre_hook(lambda optimizer: calls.append("before"))
    optimizers[1].register_state_dict_post_hook(lambda optimizer, state: calls.append("after"))
    optimizers[1].register_load_state_dict_pre_hook(lambda optimizer, state: calls.append("load"))
    optimizers[1].load_state_dict(optimizers[1].state_dict())
    assert calls == ["before", "after", "load"]


class _Careful(optim.SGD):
    """It refuses a group when the base class has accepted it, and with an error that is nobody
    else's."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        1 / param_group.get("weights", [1])[0]
        super().add_param_group(param_group)


def _weighing(weight: int) -> dict[str, Any]:
    return {"params": [nn.Parameter(torch.ones(3))], "weights": [weight]}


@on_ranks(3)
def test_refusals() -> None:
    """What is wrong on one rank is refused on all of them; nobody waits for the others."""
    rank = dist.get_rank()
    parameters = list(plain().parameters())
    make = ShardedOptimizer
    sound = make(parameters, _Careful, lr=0.1)
    overlapping = [nn.Parameter(parameters[0].detach()), parameters[0]]
    one_group = {"state": {}, "param_groups": [{"params": [0]}]}
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("LBFGS cannot be sharded", lambda: make(parameters, optim.LBFGS)),
        ("SparseAdam cannot be sharded", lambda: make(parameters, optim.SparseAdam)),
        ("Adafactor cannot be sharded", lambda: make(parameters, optim.Adafactor)),
        ("Rprop cannot be sharded", lambda: make(parameters, optim.Rprop)),
        ("empty parameter list", lambda: make([], optim.SGD)),
        ("share no elements", lambda: make(overlapping, optim.SGD)),
        (
            "parameter 0 is on meta",
            lambda: make(nn.Linear(2, 2, device="meta").parameters(), optim.SGD),
        ),
        (
            "parameter 0 is lazy",
            lambda: make(
                [*(nn.LazyLinear(2) if rank else nn.Linear(2, 2)).parameters()], optim.SGD
            ),
        ),
        ("each once", lambda: make([parameters[0], parameters[0]], optim.SGD)),
        ("argument 'speed'", lambda: make(parameters, optim.AdamW, speed=1)),
        (
            "Invalid learning rate: -1.0",
            lambda: make(parameters, optim.AdamW, lr=-1.0 if rank == 1 else 1.0),
        ),
        (
            "division by zero",
            lambda: make(parameters, lambda params: optim.SGD(params, lr=0.1 / (rank != 1))),
        ),
        (
            "rank 0 has lr of group 0=0.1",
            lambda: make(parameters, optim.AdamW, lr=0.1 * (rank + 1)),
        ),
        (
            "rank 0 has parameter 4 of group 0",
            lambda: make(parameters[: 4 + (rank == 0)], optim.AdamW),
        ),
        ("rank 0 has class=Adam", lambda: make(parameters, optim.AdamW if rank else optim.Adam)),
        (
            "memory of its own",
            lambda: make([nn.Parameter(torch.ones(1).expand(4))], optim.SGD),
        ),
        ("got 'pigeons'", lambda: make(parameters, optim.SGD, transport="pigeons")),
        (
            "more than one parameter group",
            lambda: sound.add_param_group({"params": parameters[:1]}),
        ),
        (
            "rank 0 has parameter 0 of group 1=(3,)",
            lambda: sound.add_param_group({"params": [nn.Parameter(torch.ones(3 + rank))]}),
        ),
        ("division by zero", lambda: sound.add_param_group(_weighing(0))),
        ("division by zero", lambda: sound.add_param_group(_weighing(rank - 1))),
        ("doesn't match the size", lambda: sound.load_state_dict(one_group)),
        ("tied to its ranks", lambda: copy.deepcopy(sound)),
    ]
    for expected, call in calls:
        assert_refused(expected, call, ZeroDivisionError, TypeError)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter).to_sparse()
    assert_refused("lazy", lambda: make(nn.LazyLinear(2).parameters(), optim.SGD))
    assert_refused("dense", sound.step)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    before = parameters[0].detach().clone()
    sound.step()  # as if nothing had been asked of it
    torch.testing.assert_close(parameters[0].detach(), before - 0.1)
    assert len(sound.param_groups) == 1
