"""What FSDP promises besides its numbers: memory and messages, saving and loading, refusals, whatever a pass may do.

Ranks are started once and go through all sections; they return what was wrong, in words.
"""

import contextlib
import copy
import gc
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim

from labkit.bench.ledger import AllocationLedger, peak_between
from labkit.costs.transformer import TransformerShape
from labkit.nn.transformer import Transformer, TransformerLayer, language_model_loss
from labkit.parallel.data_parallel import consistency
from labkit.parallel.launch import run_ranks
from labkit.parallel.sharding import FSDP, ReduceScatterDDP, ShardedOptimizer, building
from labkit.parallel.sharding.unit import Unit
from labkit.parallel.sharding.units import find_units, slots_by_unit
from labkit.parallel.transport.base import Step
from labkit.parallel.transport.point_to_point import StreamTransport
from tests.cases import thinned
from tests.parallel import data_parallel_cases
from tests.parallel.data_parallel_cases import WIDTH, Tied, TwoHeads, plain
from tests.parallel.sharding_cases import furthest

SHAPE = TransformerShape(d_model=16, d_ff=32, n_layers=3, n_heads=2, vocabulary=12)
TOKENS = torch.arange(24).view(2, 12) % SHAPE.vocabulary


def transformer(shape: TransformerShape = SHAPE) -> Transformer:
    torch.manual_seed(1 + dist.get_rank())
    return Transformer(shape, context_length=12)


def loss_of(model: nn.Module, shift: int = 0) -> torch.Tensor:
    return language_model_loss(model(TOKENS.roll(shift, 0)), TOKENS.roll(shift, 1))


def inputs(seed: int = 0) -> torch.Tensor:
    return torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed + 10 * dist.get_rank()))


HARD = {
    2: ("two losses", "unused, accumulated", "tied, unlike inner passes"),
    3: (
        "two losses",
        "unused, accumulated",
        "tied, unlike inner passes",
        "exception inside no_sync",
        "re-entrant as a whole",
        "gradient penalty",
        "a backward pass an output",
        "channels last",
    ),
}
"""Of the wrappers' cases, those that `make test` has, by stage."""


def _check_wrappers_cases(stage: int, hard: bool) -> list[str]:
    """What the data-parallel wrappers must get right: accumulation, both kinds of checkpointing, penalties, ..."""
    wrong, rank = [], dist.get_rank()
    for name, case in data_parallel_cases.CASES.items():
        if (name in HARD[stage]) != hard or name == "buffers":  # after the last pass each rank has its own
            continue
        built = data_parallel_cases.built(case, seed=rank)
        if stage == 2:
            scattering = ReduceScatterDDP(built, bucket_mb=3e-4, first_bucket_mb=1e-4, **case.options)
            make = partial(ShardedOptimizer, wrapper=scattering)
            data_parallel_cases.train(case, scattering, [rank], lambda: None, make)
            state = built.state_dict()
        else:  # heads that differ between ranks have to be in one unit
            model = FSDP(built, **({"units": ()} if "unused" in name or "unlike" in name else {}))
            data_parallel_cases.train(case, model, [rank], lambda: None)
            state = model.consolidated_state_dict(to=None) or {}
        expected = data_parallel_cases.reference(name, dist.get_world_size())
        if state.keys() != expected.keys():
            wrong.append(f"{name}: {list(state)}")
        error = max(
            furthest([value], [torch.tensor(expected[key], dtype=torch.float64).view(value.shape)])
            for key, value in state.items()
        )
        if not error <= case.tolerance:
            wrong.append(f"{name}: {error}")
    return wrong


def _check_bitwise() -> list[str]:
    """In float32 two ranks end, to the bit, where one process does that looks at their batches one after the other."""
    torch.manual_seed(0)
    alone = plain()
    model = FSDP(copy.deepcopy(alone))
    optimizers = [optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (model, alone)]
    for step in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        model(inputs(step)).square().mean().backward()
        for rank in range(2):
            x = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(step + 10 * rank))
            (alone(x).square().mean() / 2).backward()
        for optimizer in optimizers:
            optimizer.step()
    found = model.gather_full_parameters()
    return [name for name, value in alone.named_parameters() if not torch.equal(found[name], value)]


def _check_memory() -> list[str]:
    """Shards are total / p and at most one element per tensor; of whole parameters there is one unit at a time."""
    wrong, p = [], dist.get_world_size()
    whole = {name: value.nbytes for name, value in transformer().named_parameters()}
    by_unit = [sum(slot.like.nbytes for slot in slots) for slots in slots_by_unit(find_units(transformer(), None))]
    for prefetch in (0, 1):
        model = FSDP(transformer(), replicate_below=0, prefetch=prefetch)
        optimizer = optim.AdamW(model.parameters())
        with AllocationLedger() as ledger:
            for _ in range(2):
                optimizer.zero_grad()
                start = ledger.moment
                loss_of(model).backward()
                optimizer.step()
        gathered = [each for each in ledger.allocations if each.operator == "resize_storage"]
        most = peak_between(gathered, start, ledger.moment).n_bytes
        allowed = sum(sorted(by_unit)[-1 - prefetch :])
        if not 0 < most <= allowed:
            wrong.append(f"{most} bytes of whole parameters, {allowed} expected at most")
        if any(each.freed is None for each in gathered):
            wrong.append("whole parameters are kept after the step")
        limit = sum(whole.values()) / p + 4 * len(whole)
        states = [v for state in optimizer.state.values() for name, v in state.items() if name != "step"]
        held = {
            "shards": sum(shard.nbytes for shard in model.parameters()),
            "gradients": sum(shard.grad.nbytes for shard in model.parameters() if shard.grad is not None),
            "state": sum(value.nbytes for value in states) / 2,
        }
        wrong += [f"{n} bytes of {what}, {limit} expected at most" for what, n in held.items() if not 0 < n <= limit]
    return wrong


class Dropped(nn.Module):
    """Backward never comes to the second layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layers[1](x)
        return self.layers[0](x)


def _check_released() -> list[str]:
    """What was to be kept until backward is given back by its end, where backward never came, too."""
    model = FSDP(Dropped(), reshard_after_forward=False, replicate_below=0)
    with AllocationLedger() as ledger:
        outputs = model(inputs(0))
        kept = [each for each in ledger.allocations if each.operator == "resize_storage" and each.freed is None]
        outputs.mean().backward()
    gathered = [each for each in ledger.allocations if each.operator == "resize_storage"]
    wrong = [] if len(kept) > 1 else ["nothing was kept until backward"]
    return wrong + ["whole parameters are kept after backward"] * any(each.freed is None for each in gathered)


class Counted:
    """Bytes that this rank sends point to point."""

    def __init__(self) -> None:
        self.n_bytes, self._run = 0, StreamTransport.run

    def __enter__(self) -> "Counted":
        def run(transport: StreamTransport, steps: list[Step], depth: int = 1) -> None:
            self.n_bytes += sum(step.outgoing.nbytes for step in steps if step.outgoing is not None)
            self._run(transport, steps, depth)

        StreamTransport.run = run  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, *error: object) -> None:
        StreamTransport.run = self._run  # type: ignore[method-assign]


def _check_messages() -> list[str]:
    """3 Psi (p-1)/p bytes a step, or 2, in matrices, and what ranks tell one another: to the byte."""
    p, rounds = dist.get_world_size(), dist.get_world_size().bit_length() - 1

    def build() -> nn.Module:
        return nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(4)))

    psi, notes = 4 * 4 * 64, 8 * (4 + 5 + 2) * rounds  # a number per parameter and unit, and two of their order
    over = {"transport": "point_to_point"}
    fsdp = FSDP(build(), **over), FSDP(build(), reshard_after_forward=False, **over)
    scattering = ReduceScatterDDP(build(), all_reduce="point_to_point")
    zero2 = ShardedOptimizer(scattering.parameters(), optim.SGD, wrapper=scattering, lr=0.1, **over)
    models: dict[str, tuple[nn.Module, optim.Optimizer, float]] = {
        "FSDP": (fsdp[0], optim.SGD(fsdp[0].parameters(), lr=0.1), 3 * psi * (p - 1) / p + notes),
        "FSDP, kept": (fsdp[1], optim.SGD(fsdp[1].parameters(), lr=0.1), 2 * psi * (p - 1) / p + notes),
        "ZeRO-2": (scattering, zero2, 2 * psi * (p - 1) / p),
    }
    wrong = []
    for name, (model, optimizer, expected) in models.items():
        with Counted() as counted:
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        if counted.n_bytes != expected:
            wrong.append(f"{name}: {counted.n_bytes} bytes, {expected} expected")
    return wrong


def _check_order() -> list[str]:
    """A unit is gathered while the one before it runs, from the second pass on, and in backward."""
    events: list[str] = []
    start = Unit.start_gathering

    def noted(unit: Unit, channel: Any) -> None:
        if not unit.is_whole and unit.is_sharded:
            events.append(f"gather {unit.number}")
        start(unit, channel)

    layers = [nn.Linear(4, 4, bias=False) for _ in range(3)]
    for number, layer in enumerate(layers):
        layer.register_forward_pre_hook(lambda *_, number=number: events.append(f"run {number}"))
    model = FSDP(nn.Sequential(*layers))
    for number, unit in enumerate(model._units[:3]):
        unit.flats[0].full[0].register_hook(lambda _, number=number: events.append(f"back {number}"))
    Unit.start_gathering = noted  # type: ignore[method-assign]
    try:
        model(torch.ones(1, 4)).sum().backward()
        events.clear()
        model(torch.ones(1, 4)).sum().backward()
    finally:
        Unit.start_gathering = start  # type: ignore[method-assign]
    forward = ["gather 0", "run 0", "gather 1", "run 1", "gather 2", "run 2"]
    backward = ["gather 2", "gather 1", "back 2", "gather 0", "back 1", "back 0"]
    return [] if events == forward + backward else [str(events)]


def _trained(model: nn.Module, optimizer: optim.Optimizer, steps: range) -> None:
    """The same batch on all ranks, so that any number of them trains alike."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


def _check_saving() -> list[str]:
    """Whole into the bare module and onto fewer ranks, in shards onto as many: training goes on to the same end."""
    wrong = []
    fewer = dist.new_group([0, 1])
    for elementwise, optimizer_cls in ((True, partial(optim.AdamW, lr=1e-2)), (False, optim.Adafactor)):
        options = {"elementwise": elementwise}
        model = FSDP(transformer(), **options)
        optimizer = optimizer_cls(model.parameters())
        _trained(model, optimizer, range(3))
        shard = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        whole = model.consolidated_state_dict(to=None), model.consolidated_optimizer_state_dict(optimizer, to=None)
        only = model.consolidated_state_dict(to=1), model.consolidated_optimizer_state_dict(optimizer, to=1)
        if any((each is None) != (dist.get_rank() != 1) for each in only):
            wrong.append("consolidated on another rank than asked")
        assert whole[0] is not None
        assert whole[1] is not None
        _trained(model, optimizer, range(3, 5))
        expected = list(model.gather_full_parameters().values())

        bare = transformer()
        plain_optimizer = optimizer_cls(bare.parameters())
        bare.load_state_dict(whole[0])
        plain_optimizer.load_state_dict(copy.deepcopy(whole[1]))
        back = copy.deepcopy((bare.state_dict(), plain_optimizer.state_dict()))
        _trained(bare, plain_optimizer, range(3, 5))
        if not furthest([p.detach() for p in bare.parameters()], expected) < 1e-6:
            wrong.append(f"{options}: the bare module goes on differently")

        again = FSDP(transformer(), **options)
        after = optimizer_cls(again.parameters())
        again.load_state_dict(shard[0])
        after.load_state_dict(shard[1])
        _trained(again, after, range(3, 5))
        if not all(map(torch.equal, again.gather_full_parameters().values(), expected)):
            wrong.append(f"{options}: goes on differently from a shard")

        others: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(others, shard[0])
        with contextlib.suppress(ValueError):
            again.load_state_dict(others[dist.get_rank() - 1])
            wrong.append("took another rank's shard")
        if dist.get_rank() < 2:
            for state in (whole, back):
                on_fewer = FSDP(transformer(), group=fewer, **options)
                after = optimizer_cls(on_fewer.parameters())
                on_fewer.load_state_dict(state[0])
                on_fewer.load_optimizer_state_dict(after, copy.deepcopy(state[1]))
                _trained(on_fewer, after, range(3, 5))
                if not furthest(list(on_fewer.gather_full_parameters().values()), expected) < 1e-6:
                    wrong.append(f"{options}: goes on differently on fewer ranks")
    return wrong


@contextlib.contextmanager
def _broadcasts_over(ledger: AllocationLedger) -> Iterator[None]:
    """A broadcast returns when gloo's threads have let go of what it has sent: on a busy machine, later."""

    def users(tensors: list[torch.Tensor]) -> list[int]:
        return [torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) for tensor in tensors]

    def broadcast_and_wait(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None) -> None:
        tensors = [*tensors]
        before, number = users(tensors), len(ledger.allocations)
        consistency.broadcast(tensors, group)
        copies, deadline = ledger.allocations[number:], time.monotonic() + 60
        while any(now > then for now, then in zip(users(tensors), before, strict=True)) or any(
            one.freed is None for one in copies
        ):
            assert time.monotonic() < deadline, "gloo holds what it has sent"
            time.sleep(0.001)

    with mock.patch.object(building, "broadcast", broadcast_and_wait):
        yield


def _check_meta() -> list[str]:
    """Made a unit at a time, the same on all ranks; a module that cannot make itself needs to be told how."""
    wrong, deep = [], replace(SHAPE, n_layers=12)
    with torch.device("meta"):
        model, tied, odd = transformer(deep), Tied(), nn.Sequential(nn.Linear(2, 2), Odd())
    with AllocationLedger() as ledger, _broadcasts_over(ledger):
        sharded = FSDP(model)
    reference = transformer(deep)
    by_unit = [sum(slot.like.nbytes for slot in slots) for slots in slots_by_unit(find_units(reference, None))]
    made = [each for each in ledger.allocations if each.operator != "lift_fresh"]  # of memory that ranks share
    peak = peak_between(made, 0, ledger.moment).n_bytes
    shards = sum(p.nbytes for p in sharded.parameters())
    if peak > shards + 3 * max(by_unit) or peak >= sum(by_unit):  # a unit, its copy that is broadcast, and buffers
        wrong.append(f"{peak} bytes to make it, {shards} in shards")
    whole = sharded.gather_full_parameters()
    spread = torch.tensor([float(value.double().sum()) for value in whole.values()])
    if not torch.equal(spread, _of_rank_0(spread)):
        wrong.append("ranks differ")
    if not torch.equal(sharded.module.positions.cosines, reference.positions.cosines):
        wrong.append("buffers are not made")
    for name, p in reference.named_parameters():
        if p.dim() == 2 and not 0.7 < float(whole[name].std() / p.detach().std()) < 1.4:
            wrong.append(f"{name} is not drawn as it should be")
    loss_of(sharded).backward()
    FSDP(tied)(inputs()).sum().backward()
    with contextlib.suppress(ValueError):
        FSDP(odd)
        wrong.append("made a module that cannot make itself")

    def fill(module: nn.Module) -> None:
        for p in module.parameters(recurse=False):
            p.fill_(dist.get_rank() + 1)

    filled = FSDP(odd, initialize=fill).gather_full_parameters()
    return wrong + [name for name, value in filled.items() if not (value == 1).all()]


class Odd(nn.Module):
    """Without `reset_parameters`."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3, 3))


def _of_rank_0(tensor: torch.Tensor) -> torch.Tensor:
    copied = tensor.clone()
    dist.broadcast(copied, 0)
    return copied


def _check_refusals() -> list[str]:
    """What is wrong on one rank is refused on all of them; nobody waits for the others."""
    wrong, rank = [], dist.get_rank()
    calls: dict[str, Callable[[], Any]] = {
        "shapes": lambda: FSDP(nn.Linear(3, 4 + rank)),
        "number": lambda: FSDP(nn.Sequential(*[nn.Linear(2, 2) for _ in range(1 + rank)])),
        "nothing to train": lambda: FSDP(nn.ReLU()),
        "compute_dtype": lambda: FSDP(plain(), compute_dtype=torch.int32),
        "compute_dtype on one rank": lambda: FSDP(plain(), compute_dtype=torch.int32 if rank else None),
        "another compute_dtype": lambda: FSDP(plain(), compute_dtype=torch.float16 if rank else torch.bfloat16),
        "prefetch": lambda: FSDP(plain(), prefetch=-1),
        "a class that is not there": lambda: FSDP(plain(), units=[TransformerLayer]),
        "a module that is not there": lambda: FSDP(plain(), units=[nn.Linear(2, 2)]),
        "a list as a unit": lambda: FSDP(TwoHeads(), units=[nn.ModuleList]),
        "other units": lambda: FSDP(plain(), units=[nn.Linear] if rank else []),
        "another setting": lambda: FSDP(plain(), reshard_after_forward=bool(rank)),
        "transport": lambda: FSDP(plain(), transport="pigeons"),
        "trained complex": lambda: FSDP(nn.Linear(2, 2, dtype=torch.complex64)),
        "moved": lambda: FSDP(plain()).double(),
        "a state of other shapes": lambda: FSDP(plain()).load_state_dict({"0.weight": torch.ones(3, 3)}),
        "sharded already": lambda: FSDP(FSDP(plain()).module),
        "another optimizer": lambda: FSDP(plain()).load_optimizer_state_dict(optim.SGD(plain().parameters()), {}),
        "sparse": lambda: FSDP(nn.Sequential(nn.Embedding(4, 2, sparse=True)))(torch.tensor([1])).sum().backward(),
        "ZeRO-2 over torch": lambda: ReduceScatterDDP(plain(), all_reduce="torch"),
        "ZeRO-2, other parameters": lambda: _zero2(lambda model: list(model.parameters())[:3]),
        "ZeRO-2, parameters of another": lambda: _zero2(lambda model: plain().parameters()),
        "ZeRO-2, added": lambda: _zero2(lambda model: model.parameters()).add_param_group({"params": [torch.ones(2)]}),
        "ZeRO-2 on one rank": lambda: ShardedOptimizer(
            (model := ReduceScatterDDP(plain())).parameters(), optim.SGD, wrapper=model if rank else None, lr=0.1
        ),
    }  # fmt: skip
    for what, call in calls.items():
        try:
            call()
            wrong.append(f"rank {rank}: {what}: accepted")
        except ValueError:
            pass
    with contextlib.suppress(TypeError):
        copy.deepcopy(FSDP(plain()))
        wrong.append("copied")
    with contextlib.suppress(RuntimeError):
        alone = ReduceScatterDDP(plain())
        alone(inputs()).sum().backward()
        wrong.append("ZeRO-2 without an optimizer: accepted")
    apart = FSDP(TwoHeads())
    try:
        apart(inputs(), rank).sum().backward()
        wrong.append("different units: accepted")
    except RuntimeError as error:
        if "same units in the same order" not in str(error):
            wrong.append(str(error))
    return wrong


def _zero2(parameters_of: Callable[[nn.Module], Any]) -> ShardedOptimizer:
    model = ReduceScatterDDP(plain())
    return ShardedOptimizer(parameters_of(model), optim.SGD, wrapper=model, lr=0.1)


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _check_passes() -> list[str]:
    """Finished once or twice, late, never, or by an exception; under `no_sync`; with what nobody needs any more."""
    wrong = []
    torch.manual_seed(0)
    model = FSDP(plain())
    names = list(model.state_dict())
    if names != ["_extra_state", *(f"module.{name}" for name in plain().state_dict())]:
        wrong.append(f"names {names}")
    model(inputs()).sum().backward()
    expected = _gradients(model)
    model.finish_gradient_synchronization()
    model.finish_gradient_synchronization()
    if not all(map(torch.equal, _gradients(model), expected)):
        wrong.append("not idempotent")

    model.zero_grad()
    with model.no_sync():
        loss = model(inputs()).sum()
    loss.backward()
    if _gradients(model):
        wrong.append("averaged under no_sync")
    model.zero_grad()  # what it left is dropped
    model(inputs()).sum().backward()
    if furthest(_gradients(model), expected) > 1e-6:
        wrong.append("a dropped gradient is there")

    torch.manual_seed(0)
    late = FSDP(plain(), finish_in_backward=False)
    late(inputs()).sum().backward()
    late.finish_gradient_synchronization()
    if furthest(_gradients(late), expected) > 1e-6:
        wrong.append("finished late")
    late(inputs()).sum().backward()
    with contextlib.suppress(RuntimeError):
        late(inputs())
        wrong.append("forgotten")
    late.finish_gradient_synchronization()

    model.zero_grad()
    hook = model._units[0].flats[0].full[0].register_hook(_fail)  # the last layers have been heard of by then
    with contextlib.suppress(KeyError):
        model(inputs()).sum().backward()
    hook.remove()
    with contextlib.suppress(TypeError):
        model(None)
    model.zero_grad()
    model(inputs()).sum().backward()
    if furthest(_gradients(model), expected) > 1e-6:
        wrong.append("after an exception")

    aside = FSDP(nn.Sequential(Aside()))
    aside(inputs())
    with contextlib.suppress(RuntimeError):
        aside.module[0].aside.backward()
        wrong.append("read what was given back")
    with torch.no_grad():
        before = model(inputs())
    model.eval()
    if not torch.equal(model(inputs()), before):
        wrong.append("evaluation")
    alive = weakref.ref(model)
    del model
    gc.collect()
    return wrong if alive() is None else [*wrong, "not freed"]


class Aside(nn.Module):
    """What it notes aside needs its parameter in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.aside = self.weight.square().sum()
        return x @ self.weight


def _fail(gradient: torch.Tensor) -> None:
    raise KeyError("deliberate")


def _check_clipping() -> list[str]:
    """The norm is torch's, of any kind, and longer than what is left of it."""
    wrong = []
    torch.manual_seed(0)
    alone = plain().double()
    for norm_type in (2.0, 1.0, float("inf")):
        model = FSDP(copy.deepcopy(alone))
        x = torch.ones(2, WIDTH, dtype=torch.float64)
        alone.zero_grad()
        for each in (alone, model):
            each(x).square().mean().backward()
        norms = [
            float(torch.nn.utils.clip_grad_norm_(alone.parameters(), 0.01, norm_type)),
            float(model.clip_grad_norm_(0.01, norm_type)),
        ]
        if abs(norms[0] - norms[1]) > 1e-10 or norms[0] < 0.01:
            wrong.append(f"{norm_type}: {norms}")
    return wrong


SECTIONS: dict[str, tuple[int, Callable[[], list[str]]]] = {
    "the wrappers' cases": (2, partial(_check_wrappers_cases, 3, hard=True)),
    "the wrappers' cases, ZeRO-2": (2, partial(_check_wrappers_cases, 2, hard=True)),
    "the wrappers' easy cases": (2, partial(_check_wrappers_cases, 3, hard=False)),
    "the wrappers' easy cases, ZeRO-2": (2, partial(_check_wrappers_cases, 2, hard=False)),
    "bitwise": (2, _check_bitwise),
    "memory": (2, _check_memory),
    "released": (2, _check_released),
    "messages": (2, _check_messages),
    "messages of four": (4, _check_messages),
    "order": (2, _check_order),
    "meta": (2, _check_meta),
    "refusals": (2, _check_refusals),
    "passes": (2, _check_passes),
    "clipping": (2, _check_clipping),
    "saving": (3, _check_saving),
}


def _go_through(sections: list[str]) -> dict[str, list[str]]:
    found = {}
    for section in sections:
        found[section] = SECTIONS[section][1]()
        dist.barrier()
    return found


@pytest.fixture(scope="module")
def wrong_by_section(workers_travel_by_value: None) -> Callable[[str], list[str]]:
    known: dict[str, list[str]] = {}

    def of(section: str) -> list[str]:
        if section not in known:
            world_size = SECTIONS[section][0]
            alike = [
                name
                for name, (ranks, _) in SECTIONS.items()
                if (ranks, _is_easy(name)) == (world_size, _is_easy(section))
            ]
            for of_rank in run_ranks(_go_through, alike, world_size=world_size, timeout_s=300):
                for name, texts in of_rank.items():
                    known.setdefault(name, []).extend(texts)
        return known[section]

    return of


def _is_easy(section: str) -> bool:
    return "easy" in section


@pytest.mark.parametrize("section", thinned(SECTIONS, lambda section: not _is_easy(section)))
def test_what_it_promises(wrong_by_section: Callable[[str], list[str]], section: str) -> None:
    assert wrong_by_section(section) == []
