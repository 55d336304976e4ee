"""A sharded optimizer trains as the plain one does, holds its share of the state, and can be saved and loaded.

Ranks are started once per number of ranks and go through all cases; they return what was wrong, in words.
"""

import contextlib
import copy
import hashlib
from collections.abc import Callable
from functools import cache, partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

from labkit.parallel.data_parallel import FlatDDP
from labkit.parallel.launch import run_ranks
from labkit.parallel.sharding import ShardedOptimizer
from labkit.parallel.sharding.gathering import Gathering, fill_buckets
from labkit.parallel.sharding.partition import Piece, by_elements, by_parameters
from labkit.parallel.sharding.splitting import BY_PARAMETER, ELEMENTWISE, is_elementwise
from tests.cases import thinned
from tests.parallel.data_parallel_cases import plain
from tests.parallel.sharding_cases import (
    CASES,
    FLOAT32,
    Case,
    GlobalNorm,
    Lars,
    Lion,
    Preconditioned,
    built,
    furthest,
    groups_of,
    train,
    values,
)

CPU = torch.device("cpu")


def sharded(case: Case, group: dist.ProcessGroup) -> tuple[nn.Module, ShardedOptimizer]:
    model = FlatDDP(built(case), all_reduce="auto", group=group)
    settings = getattr(case.optimizer, "keywords", {})
    cls = getattr(case.optimizer, "func", case.optimizer)
    make = partial(_make_sharded, cls=cls, group=group, **case.options, **settings)
    optimizer: Any = train(case, model, make, [group.rank()])
    return model, optimizer


def _make_sharded(groups: Any, cls: Any, **options: Any) -> ShardedOptimizer:
    return ShardedOptimizer(groups, cls, **options)


@pytest.fixture(scope="module")
def wrong_by_section(workers_travel_by_value: None) -> Callable[[str], list[str]]:
    """One group of four ranks, and groups of two and three of them, go through all quick sections; one, all others."""

    @cache
    def found(quick: bool) -> list[dict[str, list[str]]]:
        sections = [name for name in SECTIONS if is_quick(name) == quick]
        return run_ranks(_go_through, sections, world_size=4, timeout_s=300)

    return lambda section: [text for of_rank in found(is_quick(section)) for text in of_rank[section]]


def _go_through(sections: list[str]) -> dict[str, list[str]]:
    world = dist.group.WORLD
    assert world is not None
    layouts = {2: [[0, 1], [2, 3]], 3: [[0, 1, 2], [3]], 4: [[0, 1, 2, 3]]}
    groups: dict[int, dist.ProcessGroup] = {}
    for size, layout in layouts.items():
        made = [dist.new_group(ranks) for ranks in layout]
        groups[size] = next(group for group, ranks in zip(made, layout, strict=True) if dist.get_rank() in ranks)
    found: dict[str, list[str]] = {}
    for section in sections:
        size, check = SECTIONS[section]
        found[section] = check(groups[size], groups) if groups[size].size() == size else []
        dist.barrier()
    return found


def _check_training(group: dist.ProcessGroup, groups: Any) -> list[str]:
    wrong = []
    rank, p = group.rank(), group.size()
    plain_models = {name: built(case) for name, case in CASES.items()}
    for name, case in CASES.items():
        plain_optimizer = train(case, plain_models[name], case.optimizer, [*range(p)])
        model, optimizer = sharded(case, group)
        tolerance = 1e-10 if case.dtype == torch.float64 and name != "several dtypes" else FLOAT32
        if (error := furthest(values(model), values(plain_models[name]))) > tolerance:
            wrong.append(f"rank {rank}: {name}: {error}")
        digest = hashlib.sha256(b"".join(v.reshape(-1).view(torch.uint8).numpy().tobytes() for v in values(model)))
        of_all: list[Any] = [None] * p
        dist.all_gather_object(of_all, digest.hexdigest(), group=group)
        if len(set(of_all)) > 1:
            wrong.append(f"{name}: differs between ranks")
        wrong += [f"rank {rank}: {name}: {text}" for text in _differences(optimizer, plain_optimizer)]
        wrong += [f"rank {rank}: {name}: {text}" for text in _share_too_large(optimizer, plain_optimizer, p)]
    return wrong + _check_without_the_collective(plain_models, group)


def _differences(optimizer: ShardedOptimizer, reference: optim.Optimizer) -> list[str]:
    """Between the whole state and the plain optimizer's."""
    wrong = []
    found, expected = optimizer.consolidated_state_dict(to=None), reference.state_dict()
    assert found is not None
    if found["param_groups"] != expected["param_groups"]:
        wrong.append(f"groups {found['param_groups']}, not {expected['param_groups']}")
    if found["state"].keys() != expected["state"].keys():
        return [*wrong, f"states of {list(found['state'])}"]
    for number, state in expected["state"].items():
        for name, value in state.items():
            got = found["state"][number].get(name)
            if not isinstance(value, torch.Tensor):
                is_right = got == value
            else:
                is_alike = (got.shape, got.dtype) == (value.shape, value.dtype)
                is_right = is_alike and (not value.numel() or furthest([got], [value]) <= FLOAT32)
            if not is_right:
                wrong.append(f"{name} of {number}: {got}, not {value}")
    return wrong


def _share_too_large(optimizer: ShardedOptimizer, reference: optim.Optimizer, p: int) -> list[str]:
    """Of what has a value an element, a rank holds total / p and at most one element per tensor."""
    if not optimizer._share._is_elementwise:
        return []
    held, whole = sum(map(_element_bytes, optimizer.state.values())), reference.state.values()
    one_element_each = sum(_element_bytes(state) // p.numel() for p, state in reference.state.items() if p.numel())
    most = sum(map(_element_bytes, whole)) / p + one_element_each
    return [f"{held} bytes of state, at most {most} expected"] if held > most else []


def _element_bytes(state: dict[str, Any]) -> int:
    return sum(value.nbytes for name, value in state.items() if isinstance(value, torch.Tensor) and name != "step")


def _check_without_the_collective(plain_models: dict[str, nn.Module], group: dist.ProcessGroup) -> list[str]:
    """Every case is wrong on some rank if nobody gathers: so each of them needs it. On three ranks, one in four is."""
    gather, Gathering.run = Gathering.run, lambda self: None  # type: ignore[method-assign]
    wrong = []
    try:
        for name in [*CASES][:: 4 if group.size() == 3 else 1]:
            model, _ = sharded(CASES[name], group)
            is_right = torch.tensor(int(furthest(values(model), values(plain_models[name])) <= FLOAT32))
            dist.all_reduce(is_right, op=dist.ReduceOp.MIN, group=group)
            if is_right:
                wrong.append(f"{name}: right without the collective")
    finally:
        Gathering.run = gather  # type: ignore[method-assign]
    return wrong


def _check_saving(group: dist.ProcessGroup, groups: dict[int, dist.ProcessGroup]) -> list[str]:
    """Sharded to plain and back, to another number of ranks, and shard by shard: training goes on alike."""
    wrong = []
    for name in SAVED:
        case = CASES[name]
        model, optimizer = sharded(case, group)
        state = optimizer.consolidated_state_dict(to=None)
        assert state is not None
        only = optimizer.consolidated_state_dict(to=2)
        if (only is not None) != (group.rank() == 2):
            wrong.append(f"{name}: consolidated on another rank than asked")
        reference = _continued(case, model, state, case.optimizer)
        cls, settings = getattr(case.optimizer, "func", case.optimizer), getattr(case.optimizer, "keywords", {})
        for size in (2, 4):
            make = partial(_make_sharded, cls=cls, group=groups[size], **settings)
            after, plain_again = _continued(case, model, state, make), reference[1].state_dict()
            if furthest(after[0], reference[0]) > 1e-12:
                wrong.append(f"{name}: goes on differently on {size} ranks")
            wrong += [f"{name}: on {size} ranks: {text}" for text in _differences(after[1], reference[1])]
            back = make(groups_of(case, built(case))[0])
            back.load_state_dict(copy.deepcopy(plain_again))
            wrong += [f"{name}: back on {size} ranks: {text}" for text in _differences(back, reference[1])]
        make = partial(_make_sharded, cls=cls, group=group, **settings)
        own_shard = copy.deepcopy(optimizer.state_dict())
        if furthest(_continued(case, model, own_shard, make)[0], reference[0]) > 1e-12:
            wrong.append(f"{name}: goes on differently from a shard")
        of_all: list[Any] = [None] * group.size()
        dist.all_gather_object(of_all, own_shard, group=group)
        try:
            optimizer.load_state_dict(of_all[group.rank() - 1])
            wrong.append(f"{name}: took another rank's shard")
        except ValueError:
            pass
    return wrong


def _continued(case: Case, model: nn.Module, state: Any, make: Any) -> tuple[list[torch.Tensor], Any]:
    """Two more steps of a copy of the model, with gradients that are the same everywhere."""
    copied = built(case)
    copied.load_state_dict(model.module.state_dict())  # type: ignore[union-attr, operator]
    optimizer = make(groups_of(case, copied)[0])
    optimizer.load_state_dict(copy.deepcopy(state))  # torch keeps the tensors it is given
    for step in range(2):
        for parameter in copied.parameters():
            parameter.grad = torch.full_like(parameter, 0.1 * (step + 1)) * parameter.detach().sign()
        optimizer.step()
    return values(copied), optimizer


def _check_changes(group: dist.ProcessGroup, groups: Any) -> list[str]:
    """Parameters whose data is replaced, that are thawed, that have no gradient, or one in other strides."""
    models = [plain(), plain()]
    optimizers: list[optim.Optimizer] = []
    for model in models:
        model.load_state_dict(models[0].state_dict())
        model[0].weight.requires_grad_(False)
        is_first = model is models[0]
        make = partial(ShardedOptimizer, optimizer_cls=optim.SGD, group=group) if not is_first else optim.SGD
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
    wrong = [] if furthest(values(models[1]), values(models[0])) <= FLOAT32 else ["values"]
    wrong += _differences(optimizers[1], optimizers[0])  # type: ignore[arg-type]
    inner = [tensor for tensor in optimizers[1].state if tensor.grad is not None and not tensor.requires_grad]
    return wrong + ([f"{len(inner)} gradients are kept"] if inner else [])


class _Careful(optim.SGD):
    """It refuses a group when the base class has accepted it, and with an error that is nobody else's."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        1 / param_group.get("weights", [1])[0]
        super().add_param_group(param_group)


def _weighing(weight: int) -> dict[str, Any]:
    return {"params": [nn.Parameter(torch.ones(3))], "weights": [weight]}


def _check_refusals(group: dist.ProcessGroup, groups: Any) -> list[str]:
    """What is wrong on one rank is refused on all of them; nobody waits for the others."""
    wrong = []
    rank = group.rank()
    model = plain()
    parameters = list(model.parameters())
    make = partial(ShardedOptimizer, group=group)
    sound = make(parameters, _Careful, lr=0.1)
    calls: dict[str, Callable[[], Any]] = {
        "LBFGS": lambda: make(parameters, optim.LBFGS),
        "SparseAdam": lambda: make(parameters, optim.SparseAdam),
        "all parameters": lambda: make(parameters, GlobalNorm),
        "no parameters": lambda: make([], optim.SGD),
        "a parameter twice": lambda: make([parameters[0], parameters[0]], optim.SGD),
        "a bad setting": lambda: make(parameters, optim.AdamW, lr=-1.0),
        "an unknown setting": lambda: make(parameters, optim.AdamW, speed=1),
        "a bad setting on one rank": lambda: make(parameters, optim.AdamW, lr=-1.0 if rank == 1 else 1.0),
        "one that raises on one rank": lambda: make(parameters, lambda params: optim.SGD(params, lr=0.1 / (1 - rank))),
        "another setting": lambda: make(parameters, optim.AdamW, lr=0.1 * (rank + 1)),
        "another number": lambda: make(parameters[: 4 + (rank == 0)], optim.AdamW),
        "another class": lambda: make(parameters, optim.AdamW if rank else optim.Adam),
        "gaps": lambda: make([nn.Parameter(torch.ones(8)[::2])], optim.SGD),
        "a transport of no such name": lambda: make(parameters, optim.SGD, transport="pigeons"),
        "another transport": lambda: make(parameters, optim.SGD, transport="shared" if rank else "auto"),
        "bucket": lambda: make(parameters, optim.SGD, bucket_mb=0),
        "an added one twice": lambda: sound.add_param_group({"params": parameters[:1]}),
        "another added on one rank": lambda: sound.add_param_group({"params": [nn.Parameter(torch.ones(3 + rank))]}),
        "an added one that its optimizer refuses": lambda: sound.add_param_group(_weighing(0)),
        "an added one that it refuses on one rank": lambda: sound.add_param_group(_weighing(rank - 1)),
        "a state of other groups": lambda: sound.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]}),
    }
    for what, call in calls.items():
        try:
            call()
            wrong.append(f"rank {rank}: {what}: accepted")
        except (ValueError, ZeroDivisionError):
            pass
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter).to_sparse()
    with contextlib.suppress(ValueError):
        sound.step()
        wrong.append("a sparse gradient: accepted")
    with contextlib.suppress(TypeError):
        copy.deepcopy(sound)
        wrong.append("copied")
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    before = parameters[0].detach().clone()
    sound.step()  # as if nothing had been asked of it
    return (
        wrong if torch.allclose(parameters[0], before - 0.1) and len(sound.param_groups) == 1 else [*wrong, "changed"]
    )


SAVED = ("AdamW", "SGD with momentum", "Adafactor", "channels last", "fewer elements than ranks", "groups")
SECTIONS: dict[str, tuple[int, Callable[..., list[str]]]] = {
    "training on 2 ranks": (2, _check_training),
    "training on 3 ranks": (3, _check_training),
    "training on 4 ranks": (4, _check_training),
    "saving and loading": (4, _check_saving),
    "parameters that change": (3, _check_changes),
    "refusals": (3, _check_refusals),
}


def is_quick(section: str) -> bool:
    return section not in ("training on 2 ranks", "training on 4 ranks")


@pytest.mark.parametrize("section", thinned(SECTIONS, is_quick))
def test_it_trains_saves_and_refuses_as_the_plain_optimizer_would(
    wrong_by_section: Callable[[str], list[str]], section: str
) -> None:
    assert wrong_by_section(section) == []


@pytest.mark.gpu
def test_parameters_on_a_gpu_are_gathered_through_the_host(workers_travel_by_value: None) -> None:
    assert run_ranks(_check_gpu, world_size=2) == [[], []]


def _check_gpu() -> list[str]:
    wrong = []
    for settings in ({"foreach": True}, {"fused": True}):
        models = [built(Case(dtype=torch.float32)).cuda() for _ in range(2)]
        sharded_one = ShardedOptimizer(models[0].parameters(), optim.AdamW, **settings)
        for model, optimizer in zip(
            models, (sharded_one, optim.AdamW(models[1].parameters(), **settings)), strict=True
        ):  # type: ignore[arg-type]
            for step in range(3):
                for number, parameter in enumerate(model.parameters()):
                    parameter.grad = torch.full_like(parameter, 0.1 * (step + number + 1))
                optimizer.step()
        if furthest([v.cpu() for v in values(models[0])], [v.cpu() for v in values(models[1])]) > FLOAT32:
            wrong.append(f"{settings}")
        if sharded_one.consolidated_state_dict(to=None) is None:
            wrong.append("no state")
    return wrong


def test_pieces_cover_every_element_once_and_evenly() -> None:
    parameters = [torch.empty(n, dtype=d) for n, d in ((5, torch.float32), (0, torch.float32), (11, torch.float64))]
    parameters += [torch.empty(2, 3), torch.empty(1)]
    for p in (1, 2, 3, 4, 40):
        for pieces in (
            by_elements(parameters, 7, p),
            by_parameters(parameters, 7, {trained: [0] * p for trained in (True, False)}),
        ):
            of_all = sorted(piece for of_rank in pieces for piece in of_rank)
            for number, parameter in enumerate(parameters):
                mine = [piece for piece in of_all if piece.parameter == 7 + number]
                assert (mine[0].start, mine[-1].stop) == (0, parameter.numel())
                assert all(left.stop == right.start for left, right in pairwise(mine))
        for kind in (torch.float32, torch.float64):
            held = [
                sum(q.stop - q.start for q in of_rank if parameters[q.parameter - 7].dtype == kind)
                for of_rank in by_elements(parameters, 7, p)
            ]
            assert max(held) - min(held) <= 1


def test_buckets_take_every_byte_once_and_no_more_than_they_should() -> None:
    pieces = [[Piece(0, 0, 100), Piece(1, 0, 3)], [Piece(1, 3, 5)], []]
    buckets = fill_buckets(pieces, lambda number: (4, 8)[number], bucket_bytes=192)
    assert all(sum(bucket.sizes) <= 192 for bucket in buckets)
    for rank, of_rank in enumerate(pieces):
        packed = [piece for bucket in buckets for piece, _ in bucket.pieces[rank]]
        elements = [(number, i) for number, start, stop in packed for i in range(start, stop)]
        assert elements == [(number, i) for number, start, stop in of_rank for i in range(start, stop)]


@pytest.mark.parametrize(
    ("optimizer_cls", "expected"),
    [(optim.AdamW, True), (optim.Muon, False), (Lion, True), (Lars, False), (Preconditioned, False)],
)
def test_what_an_optimizer_needs_is_known_or_tried_out(optimizer_cls: Any, expected: bool) -> None:
    before = torch.get_rng_state()
    assert is_elementwise(optimizer_cls, {"lr": 0.0}, CPU) is expected
    assert torch.equal(torch.get_rng_state(), before)


def test_torchs_own_optimizers_are_listed_as_a_trial_finds_them() -> None:
    for optimizer_cls in (*ELEMENTWISE, *BY_PARAMETER):
        renamed = type("Renamed", (optimizer_cls,), {})
        assert is_elementwise(renamed, {}, CPU) is (optimizer_cls in ELEMENTWISE), optimizer_cls
