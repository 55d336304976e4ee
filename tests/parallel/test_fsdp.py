"""What sharding promises besides its numbers: memory and messages, saving at any moment, refusals,
scalers, hooks."""

import copy
import dataclasses
import gc
import shutil
import tempfile
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.distributed import checkpoint
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn.utils import prune
from torch.nn.utils.parametrize import register_parametrization
from torch.optim import optimizer as optimizer_module

from labkit.bench.ledger import AllocationLedger, peak_between
from labkit.costs.transformer import TransformerShape
from labkit.nn.transformer import Transformer, TransformerLayer, language_model_loss
from labkit.parallel.messages import gather_json
from labkit.parallel.sharding import FSDP, whole_parameters
from labkit.parallel.sharding.partition import find_units, partition
from labkit.parallel.sync_batchnorm import convert_sync_batchnorm
from labkit.parallel.traffic import recorded_traffic
from tests.parallel.data_parallel_cases import WIDTH, TwoHeads, plain
from tests.parallel.sharding_cases import Data, furthest, local, values
from tests.parallel.shared_ranks import assert_refused, on_ranks

SHAPE = TransformerShape(d_model=16, d_ff=32, n_layers=3, n_heads=2, vocabulary=12)
TOKENS = torch.arange(24).view(2, 12) % SHAPE.vocabulary


def transformer(n_layers: int = SHAPE.n_layers) -> Transformer:
    torch.manual_seed(1 + dist.get_rank())
    return Transformer(dataclasses.replace(SHAPE, n_layers=n_layers), context_length=12)


def loss_of(model: nn.Module, shift: int = 0) -> Tensor:
    return language_model_loss(model(TOKENS.roll(shift, 0)), TOKENS.roll(shift, 1))


def inputs(seed: int = 0) -> Tensor:
    return torch.randn(
        3, WIDTH, generator=torch.Generator().manual_seed(seed + 10 * dist.get_rank())
    )


_zero2 = partial(FSDP, reshard_after_backward=False)


@on_ranks(2)
def test_fast_path() -> None:
    """An encoder layer that is the whole model reads its children's parameters in evaluation."""
    torch.manual_seed(0)
    alone = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True).eval()
    model = FSDP(copy.deepcopy(alone))
    x = torch.randn(2, 3, 4)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), alone(x))


@on_ranks(2)
@pytest.mark.parametrize("is_before", [True, False])
def test_compiled_in_place(is_before: bool) -> None:
    """Layers compiled by `compile()`, before they are wrapped and after, are whole while they
    run."""
    bare = plain()
    model = bare if is_before else FSDP(bare)
    bare[0].compile(backend="eager")
    model = FSDP(bare) if is_before else model
    model(inputs()).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@on_ranks(2)
@pytest.mark.parametrize("prefetch", [0, 1])
def test_memory(prefetch: int) -> None:
    """Shards are total / p and a row at most per tensor; of whole parameters there is one unit at a
    time."""
    whole = {name: value.nbytes for name, value in transformer().named_parameters()}
    by_unit = [
        sum(each.parameter.nbytes for each in members.parameters)
        for members in partition(find_units(transformer(), None))
    ]
    model = FSDP(transformer(), prefetch=prefetch)
    optimizer = optim.AdamW(model.parameters())
    with AllocationLedger() as ledger:
        for _ in range(2):
            optimizer.zero_grad()
            start = ledger.moment
            loss_of(model).backward()
            optimizer.step()
    gathered = [each for each in ledger.allocations if each.operator == "resize_storage"]
    assert not any(each.freed is None for each in gathered)
    most = peak_between(gathered, start, ledger.moment).n_bytes
    assert 0 < most <= sum(sorted(by_unit)[-1 - prefetch :])
    limit = sum(whole.values()) / dist.get_world_size() + 4 * SHAPE.d_ff * len(whole)
    states = [
        v for state in optimizer.state.values() for name, v in state.items() if name != "step"
    ]
    assert 0 < sum(local(shard).nbytes for shard in model.parameters()) <= limit
    assert 0 < sum(local(shard.grad).nbytes for shard in model.parameters()) <= limit
    assert 0 < sum(local(value).nbytes for value in states) / 2 <= limit


@on_ranks(3, slow=(2,))
def test_messages() -> None:
    """3 Psi (p-1)/p bytes a step, or 2, in the mean over ranks: to the byte, but for notes."""
    p = dist.get_world_size()

    def build() -> nn.Module:
        return nn.Sequential(
            nn.Linear(6, 7, bias=False), nn.Linear(7, 6), nn.Linear(6, 6, bias=False)
        )

    def build_frozen() -> nn.Module:
        model = build()
        model[2].requires_grad_(False)  # type: ignore[operator, index]
        return model

    trained = 4 * (7 * 6 + 6 * 7 + 6)
    frozen = 4 * 6 * 6
    over: Any = {"transport": "point_to_point"}
    models: dict[str, tuple[FSDP, int]] = {
        "FSDP": (FSDP(build(), **over), 3 * trained + 3 * frozen),
        "FSDP, not resharded": (
            FSDP(build(), reshard_after_forward=False, **over),
            2 * trained + 2 * frozen,
        ),
        "FSDP, frozen": (FSDP(build_frozen(), **over), 3 * trained + 2 * frozen),
        "ZeRO-2": (_zero2(build(), **over), 2 * trained + 2 * frozen),
        "ZeRO-2, frozen": (_zero2(build_frozen(), **over), 2 * trained),
    }
    for name, (model, moved) in models.items():
        optimizer = optim.SGD(model.parameters(), lr=0.1)
        for _ in range(2):
            with recorded_traffic() as traffic:
                model(torch.ones(2, 6)).sum().backward()
                optimizer.step()
        n_bytes = torch.tensor(sum(call.sent_bytes for call in traffic if call.is_payload))
        dist.all_reduce(n_bytes)
        assert n_bytes == moved * (p - 1), name


@on_ranks(2)
def test_collectives() -> None:
    """n all-gathers forward, n backward less those that are kept, n reduce-scatters, 2 agreements.

    An evaluation has two agreements, too, since no backward pass follows. A unit is gathered while
    the one before it runs, and averaged before the next but one.
    """
    n = 3
    sizes = {f"{4 * WIDTH * width}": str(width) for width in (1, 2, 3)}
    forward = [f"all_gather {width}" for width in (1, 2, 3)]
    reduced = [f"reduce_scatter {width}" for width in (3, 2, 1)]
    backward = "all_gather 3, all_gather 2, reduce_scatter 3, all_gather 1, reduce_scatter 2"
    schedules = {
        "": [*forward, *backward.split(", "), "reduce_scatter 1"],
        "reshard_after_forward": [*forward, *reduced],
        "reshard_after_backward": [*forward, *reduced],
    }
    for option, expected in schedules.items():
        layers = [nn.Linear(WIDTH, width, bias=False) for width in range(1, 1 + n)]
        model = FSDP(Branches(layers), **({option: False} if option else {}))
        for _ in range(2):
            with recorded_traffic() as traffic:
                model(inputs()).backward()
        payload = [
            f"{call.collective} {sizes[str(call.n_bytes)]}" for call in traffic if call.is_payload
        ]
        assert payload == expected
        with torch.no_grad(), recorded_traffic() as evaluation:
            model(inputs())
        for calls in (traffic, evaluation):
            assert sum(not call.is_payload for call in calls) == 2


class Branches(nn.Module):
    """Layers that each see the result of the one before."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x * layer(x).sum()
        return x.sum()


class Halves(nn.Module):
    """Rank 0 uses one half, the others use both."""

    def __init__(self) -> None:
        super().__init__()
        self.halves = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([half(x) for half in self.halves[: 1 + (dist.get_rank() > 0)]]).mean(0)


@on_ranks(3)
@pytest.mark.parametrize(
    "options",
    [{}, {"prefetch": 0}, {"reshard_after_forward": False}, {"reshard_after_backward": False}],
    ids=str,
)
def test_one_order(options: dict[str, Any]) -> None:
    """Gathers and averages start in one order on all ranks, whatever parameters they use: NCCL
    would hang otherwise."""
    first, second, third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
    model = FSDP(nn.Sequential(first, Halves(), second, Halves(), third), **options)
    with recorded_traffic() as traffic:
        for n_passes in (1, 2):
            sum(model(inputs(seed)).square().sum() for seed in range(n_passes)).backward()
    events = [[call.collective, call.n_bytes] for call in traffic]
    assert gather_json(events) == [events] * dist.get_world_size()


def _trained(model: nn.Module, optimizer: optim.Optimizer, steps: range) -> None:
    """The same batch on all ranks, so that any number of them trains alike."""
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()


@on_ranks(3)
def test_saving() -> None:
    """Whole into the bare module, by torch's checkpoints onto fewer ranks, in shards: training goes
    on to one end."""
    fewer = dist.new_group([0, 1])
    make = partial(optim.AdamW, lr=1e-2)
    model = FSDP(transformer(1))
    optimizer = make(model.parameters())
    _trained(model, optimizer, range(2))
    shard = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    whole: Any = model.consolidated_state_dict(to=None)
    assert (model.consolidated_state_dict(to=1) is None) == (dist.get_rank() != 1)
    bare = transformer(1)
    bare.load_state_dict(whole)
    assert furthest(list(bare.parameters()), values(model)) == 0
    folders = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folders)
    checkpoint.save(_state(model, optimizer), checkpoint_id=folders[0])
    everywhere, on_rank_0 = (
        copy.deepcopy(
            get_state_dict(
                model.module, optimizer, options=StateDictOptions(full_state_dict=True, **more)
            )
        )
        for more in ({}, {"cpu_offload": True})
    )
    assert furthest(list(everywhere[0].values()), list(whole.values())) == 0
    assert bool(on_rank_0[0]) == (dist.get_rank() == 0)
    _trained(model, optimizer, range(2, 3))
    expected = values(model)
    full: dict[str, Any] = {"full, everywhere": everywhere, "full, on rank 0": on_rank_0}
    for way in ("shards", "whole and shards", "checkpoint", "checkpoint on fewer ranks", *full):
        if "fewer" in way and dist.get_rank() > 1:
            continue
        again = FSDP(transformer(1), group=fewer if "fewer" in way else None)
        after = make(again.parameters())
        if "shards" in way:
            (again if way == "shards" else again.module).load_state_dict(
                shard[0] if way == "shards" else whole
            )
            after.load_state_dict(copy.deepcopy(shard[1]))  # torch keeps the tensors it is given
        elif way in full:
            options = StateDictOptions(
                full_state_dict=True, broadcast_from_rank0=way == "full, on rank 0"
            )
            set_model_state_dict(again.module, full[way][0], options=options)
            set_optimizer_state_dict(again.module, after, full[way][1], options=options)
        else:
            state = _state(again, after)
            checkpoint.load(state, checkpoint_id=folders[0], process_group=again.group)
            set_state_dict(
                again.module,
                after,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
        _trained(again, after, range(2, 3))
        assert furthest(values(again), expected) < 1e-6, way
    dist.barrier()
    shutil.rmtree(folders[0], ignore_errors=True)
    others: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(others, getattr(shard[0], "_metadata", None))
    state = copy.copy(shard[0])
    state._metadata = others[dist.get_rank() - 1]
    assert_refused("the shard", partial(model.load_state_dict, state))


def _state(model: FSDP, optimizer: optim.Optimizer) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model.module, optimizer), strict=True))


def _fail(*_: Any) -> None:
    raise KeyboardInterrupt


@on_ranks(2)
@pytest.mark.parametrize(
    "options", [{}, {"reshard_after_forward": False}, {"reshard_after_backward": False}], ids=str
)
def test_any_moment(options: dict[str, bool]) -> None:
    """States and parameters are shards after an exception, in the middle of a pass, and where units
    stay whole."""
    model = FSDP(plain(), **options)
    expected = {name: local(value).shape for name, value in model.state_dict().items()}

    def assert_in_shards() -> None:
        state = copy.deepcopy(model.state_dict())
        assert {name: local(value).shape for name, value in state.items()} == expected
        assert not any(type(p) is nn.Parameter for p in model.parameters())

    inside = model.module[2].register_forward_hook(lambda *_: assert_in_shards())
    out = model(inputs())
    inside.remove()
    assert_in_shards()
    out.sum().backward()
    gradients = [local(p.grad).clone() for p in model.parameters()]

    def assert_same_gradients() -> None:
        assert furthest([local(p.grad) for p in model.parameters()], gradients) <= 1e-6

    for moment in ("forward", "backward"):
        if moment == "forward":
            hook = model.module[2].register_forward_hook(_fail)
        else:
            hook = model.module[1].register_forward_hook(
                lambda m, a, y: (y.register_hook(_fail), None)[1]
            )
        with pytest.raises(KeyboardInterrupt):
            model(inputs()).sum().backward()
        hook.remove()
        assert_in_shards()
        with torch.no_grad():
            model(inputs())
        unsharded = [each.unsharded for unit in model._units for each in unit.parameters]
        is_whole = any(each.untyped_storage().nbytes() for each in unsharded)
        assert not is_whole or "reshard_after_backward" in options
        model.zero_grad()
        model(inputs()).sum().backward()
        assert_same_gradients()
    model.zero_grad()
    with model.no_sync():
        model(inputs()).sum().backward()
    optim.SGD(model.parameters()).zero_grad()  # with the gradients of no_sync
    model(inputs()).sum().backward()
    assert_same_gradients()


class Reads(nn.Module):
    """Reads a parameter of another unit."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.second = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(self.second(x), self.first.weight)


def _after_wrapping(change: Callable[[nn.Module], object]) -> None:
    model = FSDP(plain())
    change(model.module)
    model(inputs())


def _between_forward_and_backward() -> None:
    model = FSDP(plain())
    loss = model(inputs()).sum()
    with torch.no_grad():
        next(model.parameters()).mul_(2)
    loss.backward()


def _return_from_hook() -> None:
    model = FSDP(plain())
    next(model.parameters()).register_post_accumulate_grad_hook(lambda p: p.grad)
    model(inputs()).sum().backward()


def _hooked() -> nn.Module:
    model = plain()
    model[0].weight.register_hook(lambda gradient: None)
    return model


def _overlapping() -> nn.Module:
    model = nn.Linear(4, 4)
    memory = torch.ones(20)
    model.weight.data = memory[:16].view(4, 4)
    model.bias.data = memory[14:18]
    return model


def _replace(model: nn.Module) -> None:
    model[0].weight = nn.Parameter(torch.ones(16, WIDTH))  # type: ignore[index]


@on_ranks(2)
def test_all_gathers() -> None:
    """No pass computes with what a gather left or missed; none gathers without need."""
    x = inputs()
    for strategy in (FSDP, _zero2):
        model = strategy(plain())
        expected = model(x).detach()
        unit = model._units[0]
        receive = unit._all_gather
        unit._all_gather = _lose_connection
        with torch.no_grad():
            for shard in model.parameters():
                shard.mul_(1)
        for _ in range(2):  # the second call must not take what the first left
            assert_refused("no connection", partial(model, x), OSError)
        unit._all_gather = receive
        assert torch.equal(model(x), expected), f"{strategy}: wrong after a failed gather"
    model = _zero2(plain())
    bare = plain()
    bare.load_state_dict(whole_parameters(model))
    model(x).sum().backward()
    for settings in ({"fused": True}, {"foreach": True}):  # which raise no version
        optimizer = optim.AdamW(model.parameters(), **settings)
        model(x)  # gathers before the step
        optimizer.step()
        bare.load_state_dict(whole_parameters(model))
        optimizer.zero_grad()
        assert torch.equal(model(x), bare(x)), f"parameters from before a step with {settings}"
    with recorded_traffic() as traffic:
        model(x)
    assert not any(call.is_payload for call in traffic)
    with torch.inference_mode():
        for shard in model.parameters():
            shard.data = shard.data.full_tensor() * 2
        model(x)
    model(x).sum().backward()


def _lose_connection() -> None:
    raise OSError("no connection")


@on_ranks(2)
def test_shards_take_values() -> None:
    """Whole tensors, and results of operators on shards, may be put under shards."""
    model = FSDP(plain())
    shards = list(model.parameters())
    vector = nn.utils.parameters_to_vector(shards)
    expected = [2 * value for value in values(model)]
    nn.utils.vector_to_parameters(vector * 2, shards)
    assert furthest(values(model), expected) == 0
    model(inputs()).sum().backward()
    gradient = shards[0].grad
    assert torch.equal(copy.deepcopy(gradient).full_tensor(), gradient.full_tensor())


class Adapter(nn.Module):
    """A layer and a low-rank correction."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(WIDTH, 2)
        self.up = nn.Linear(2, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


def _put_adapter(model: Any) -> None:
    model[0] = Adapter(model[0])


def _put_layer(model: Any) -> None:
    model[2] = nn.Linear(16, 16)


def _register_gain(model: Any) -> None:
    model[0].gain = nn.Parameter(torch.ones(16))
    model[0].register_forward_hook(lambda layer, _, output: output * layer.gain)


class Double(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return 2 * weight


def _parametrize(model: Any) -> None:
    register_parametrization(model[0], "weight", Double())


def _prune(model: Any) -> None:
    prune.identity(model[0], "weight")


NEW_PARAMETERS: dict[str, tuple[Callable[[Any], None], str]] = {
    "an adapter": (_put_adapter, "0.down.weight was added"),
    "a layer": (_put_layer, "2.weight was replaced"),
    "a gain": (_register_gain, "0.gain was added"),
    "parametrized": (_parametrize, "0.weight was replaced"),
    "pruned": (_prune, "0.weight was replaced"),
}
"""Ways in which users add some, and what is said of each."""


@on_ranks(2)
@pytest.mark.parametrize("options", [{}, {"reshard_after_backward": False}, {"units": ()}], ids=str)
@pytest.mark.parametrize("case", NEW_PARAMETERS)
def test_new_parameters(case: str, options: dict[str, Any]) -> None:
    """New parameters would train on local gradients: all ranks refuse them, and moved ones."""
    change, expected = NEW_PARAMETERS[case]
    for ranks in ((0, 1), (1,)):
        model = FSDP(plain(), **options)
        if dist.get_rank() in ranks:
            change(model.module)
        assert_refused(expected, partial(model, inputs()))


@on_ranks(2)
def test_ignored_parameters_stay_whole() -> None:
    model = plain()
    gain = model.gain = nn.Parameter(torch.ones(()))
    FSDP(model, ignored_params=[gain])(inputs()).sum().backward()
    assert model.gain is gain


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, WIDTH)
        self.gain = nn.Parameter(torch.rand(WIDTH))
        self.body = plain()
        self.head = nn.Linear(WIDTH, 8, bias=False)
        self.head.weight = self.embedding.weight

    def encode(self, x: Tensor) -> Tensor:
        return self.gain * self.body(self.embedding(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encode(x))


@on_ranks(2)
@pytest.mark.parametrize("options", [{}, {"reshard_after_backward": False}, {"units": ()}], ids=str)
def test_methods_beside_forward(options: dict[str, Any]) -> None:
    """A registered method is right before, after and inside of the model's forward."""
    rank = dist.get_rank()
    tokens = torch.arange(6).view(2, 3)
    one = Encoder().double()
    model = FSDP(copy.deepcopy(one), **options)
    model.register_forward_method("encode")
    for calls in ((one.encode, model.module.encode), (one, model)) * 2:
        sum(calls[0](tokens[r]).square().mean() / 2 for r in (0, 1)).backward()
        calls[1](tokens[rank]).square().mean().backward()
    with torch.no_grad():
        model.module.encode(tokens)
    for p, q in zip(one.parameters(), model.parameters(), strict=True):
        assert (p.grad - q.grad.full_tensor()).abs().max() < 1e-12


@on_ranks(2)
def test_a_part_that_is_called_outside_says_what_to_call() -> None:
    """A tied layer, and a method that reads a parameter: before, in and after training."""
    tokens = torch.arange(3)
    model = FSDP(Encoder())
    ordinary = torch.ones(3, WIDTH)

    def call_both() -> None:
        for call in (lambda: model.module.head(ordinary), lambda: model.module.gain * ordinary):
            with pytest.raises(RuntimeError, match="register_forward_method"):
                call()

    call_both()
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    call_both()
    model(tokens).sum().backward()
    optimizer.step()
    model.eval()
    with torch.no_grad():
        call_both()
        model(tokens)
        call_both()


@on_ranks(2)
def test_torch_is_unchanged() -> None:
    """Importing and using FSDP changes nothing of torch for others."""
    model = FSDP(plain())
    optim.SGD(model.parameters(), lr=0.1).step()
    handlers = DTensor._op_dispatcher._custom_op_handlers
    assert handlers
    assert not any("labkit" in repr(each) for each in handlers.values())
    assert not optimizer_module._global_optimizer_post_hooks
    assert not optimizer_module._global_optimizer_pre_hooks
    assert not any("call_impl" in name for name in vars(model.module))


REFUSALS: dict[str, tuple[str, Callable[[int], Any]]] = {
    "shapes": ("rank 0 has weight=(4, 3)", lambda rank: FSDP(nn.Linear(3, 4 + rank))),
    "number": (
        "the same model on every rank",
        lambda rank: FSDP(nn.Sequential(*[nn.Linear(2, 2) for _ in range(1 + rank)])),
    ),
    "nothing to train": ("that requires a gradient", lambda rank: FSDP(nn.ReLU())),
    "compute_dtype": (
        "dtypes must be among",
        lambda rank: FSDP(plain(), compute_dtype=torch.int32),
    ),
    "another compute_dtype": (
        "rank 0 has compute_dtype=",
        lambda rank: FSDP(plain(), compute_dtype=torch.float16 if rank else torch.bfloat16),
    ),
    "parameters that overlap": ("share no elements", lambda rank: FSDP(_overlapping())),
    "prefetch": ("prefetch 0 units or more", lambda rank: FSDP(plain(), prefetch=-1)),
    "a class that is not there": (
        "got TransformerLayer",
        lambda rank: FSDP(plain(), units=[TransformerLayer]),
    ),
    "a list as a unit": ("got ModuleList", lambda rank: FSDP(TwoHeads(), units=[nn.ModuleList])),
    "other units": (
        "rank 0 has units=",
        lambda rank: FSDP(plain(), units=[nn.Linear] if rank else []),
    ),
    "another setting": (
        "rank 0 has reshard_after_forward=False",
        lambda rank: FSDP(plain(), reshard_after_forward=bool(rank)),
    ),
    "transport": ("got 'pigeons'", lambda rank: FSDP(plain(), transport="pigeons")),
    "trained complex": (
        "weight is torch.complex64",
        lambda rank: FSDP(nn.Linear(2, 2, dtype=torch.complex64)),
    ),
    "meta on rank 1": (
        "weight is on meta",
        lambda rank: FSDP(nn.Linear(2, 2, device="meta" if rank else "cpu")),
    ),
    "lazy on rank 1": (
        "0.weight is lazy",
        lambda rank: FSDP(nn.Sequential(nn.LazyLinear(2) if rank else nn.Linear(2, 2))),
    ),
    "hooks from before": ("parameters without hooks", lambda rank: FSDP(_hooked())),
    "moved": ("cast before it is wrapped", lambda rank: FSDP(plain()).double()),
    "moved inside": (
        "0.weight was moved or cast",
        lambda rank: _after_wrapping(lambda module: module.double()),
    ),
    "reordered inside": (
        "Couldn't swap Linear.weight",
        lambda rank: _after_wrapping(lambda module: module.to(memory_format=torch.channels_last)),
    ),
    "replaced inside": ("0.weight was replaced", lambda rank: _after_wrapping(_replace)),
    "a state of other shapes": (
        "the shape (16, 6), got (3, 3)",
        lambda rank: FSDP(plain()).load_state_dict({"0.weight": torch.ones(3, 3)}),
    ),
    "sharded already": ("whole, dense parameters", lambda rank: FSDP(FSDP(plain()).module)),
    "sparse": (
        "0 has sparse=True",
        lambda rank: FSDP(nn.Sequential(nn.Embedding(4, 2, sparse=True))),
    ),
    "read outside its unit": ("outside its unit", lambda rank: FSDP(Reads())(inputs())),
    "rows of one rank read outside their unit": (
        "outside its unit",
        lambda rank: FSDP(Reads(1))(torch.ones(3, 1)),
    ),
    "read without its unit": (
        "outside of the forward",
        lambda rank: FSDP(plain(), units=()).module[0](inputs()),
    ),
    "copied inside": ("tied to its ranks", lambda rank: copy.deepcopy(FSDP(plain()).module)),
    "second derivative": (
        "differentiates a forward pass once",
        lambda rank: FSDP(plain())(inputs()).sum().backward(create_graph=True),
    ),
    "backward in forward": (
        "differentiates a forward pass once",
        lambda rank: FSDP(Force())(inputs()),
    ),
    "a graph of backward in forward": (
        "differentiates a forward pass once",
        lambda rank: FSDP(Force(create_graph=True))(inputs()).sum().backward(),
    ),
    "changed between forward and backward": (
        "changed between forward and backward",
        lambda rank: _between_forward_and_backward(),
    ),
    "a hook that returns a value": ("should return None", lambda rank: _return_from_hook()),
    "a method that is not there": (
        "has no 'encode'",
        lambda rank: FSDP(plain()).register_forward_method("encode"),
    ),
    "an iterator": ("returned an iterator", lambda rank: FSDP(Lazy())(inputs())),
    "units of other sizes": ("the same call", lambda rank: FSDP(Unlike())(inputs(), rank)),
}
"""What a refusal says, and what is refused."""


@on_ranks(2)
@pytest.mark.parametrize("case", REFUSALS)
def test_refusals(case: str) -> None:
    """What is wrong on one rank is refused on all of them, in one line; nobody waits for the
    others."""
    expected, call = REFUSALS[case]
    assert_refused(expected, partial(call, dist.get_rank()), RuntimeError, TypeError)


class Force(nn.Module):
    """The gradient of an energy."""

    def __init__(self, *, create_graph: bool = False) -> None:
        super().__init__()
        self.net = plain()
        self.create_graph = create_graph

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(self.net(x).square().sum(), x, create_graph=self.create_graph)[0]


class Lazy(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(WIDTH, 2))

    def forward(self, x: Tensor) -> Any:
        return iter([self[0](x)])


class Unlike(nn.Module):
    """Ranks run layers of different sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 2), nn.Linear(WIDTH, 40)])

    def forward(self, x: Tensor, head: int) -> Tensor:
        return self.heads[head](x)


@on_ranks(2)
@pytest.mark.parametrize("options", [{}, {"reshard_after_backward": False}], ids=str)
def test_scaler(options: dict[str, bool]) -> None:
    """What is infinite on one rank makes all skip the step."""
    model = FSDP(plain(), **options)
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    before = values(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(inputs()).sum()).backward()
    if dist.get_rank():
        local(next(model.parameters()).grad).fill_(float("inf"))
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    assert furthest(values(model), before) == 0


class Boxed(nn.Linear):
    def forward(self, data: Data) -> Data:  # type: ignore[override]
        return Data(super().forward(data.x))


PENALTIES: dict[str, Callable[[nn.Module], Any]] = {
    "squares": lambda model: sum(p.square().sum() for p in model.parameters()),
    "norms": lambda model: sum(torch.norm(p) for p in model.parameters()),
    "full": lambda model: whole(sum(p.square().sum() for p in model.parameters())),
}
WITH_PENALTY: dict[str, Callable[[nn.Module, Any, Tensor], Any]] = {
    "after": lambda model, penalty, x: model(x).square().mean() + 0.1 * penalty(model),
    "before": lambda model, penalty, x: 0.1 * penalty(model) + model(x).square().mean(),
    "product": lambda model, penalty, x: model(x).square().mean() * penalty(model),
    "alone": lambda model, penalty, x: 0.1 * penalty(model),
}


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "way", "options"),
    [
        # Each penalty and each way meets both strategies.
        (name, way, {"reshard_after_backward": False} if (row + column) % 2 else {})
        for row, name in enumerate(PENALTIES)
        for column, way in enumerate(WITH_PENALTY)
    ],
)
def test_penalties(name: str, way: str, options: dict[str, bool]) -> None:
    """A penalty on weights has the value and the gradients of one process, wherever it enters."""
    rank = dist.get_rank()
    x = torch.linspace(-1, 1, 4 * WIDTH, dtype=torch.float64).view(2, 2, WIDTH)
    one = plain().double()
    model = FSDP(copy.deepcopy(one), **options)
    halves = [WITH_PENALTY[way](one, PENALTIES[name], half) for half in x]
    torch.stack(halves).mean().backward()
    mine = WITH_PENALTY[way](model, PENALTIES[name], x[rank])
    mine.backward()
    grads = [p.grad.full_tensor() for p in model.parameters()]
    expected = [p.grad for p in one.parameters()]
    assert furthest([*grads, whole(mine)], [*expected, halves[rank]]) < 1e-10


def whole(number: Any) -> Tensor:
    return number.full_tensor() if hasattr(number, "full_tensor") else number


@on_ranks(2)
def test_inputs_in_dataclasses_are_cast() -> None:
    layers = nn.Sequential(Boxed(WIDTH, WIDTH), Boxed(WIDTH, 3))
    model = FSDP(layers, compute_dtype=torch.bfloat16)
    assert model(Data(inputs())).x.dtype == torch.bfloat16


@on_ranks(2)
@pytest.mark.parametrize("is_synchronized", [False, True])
@pytest.mark.parametrize("compute", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes(compute: torch.dtype, is_synchronized: bool) -> None:
    """BatchNorm computes in its dtype; gradients may travel in another."""
    bare = nn.Sequential(nn.Linear(WIDTH, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    if is_synchronized:
        bare = convert_sync_batchnorm(bare)
    model = FSDP(bare, compute_dtype=compute, reduce_dtype=torch.float32)
    with recorded_traffic() as traffic:
        model(inputs()).float().square().mean().backward()
    reduced = {call.dtype for call in traffic if call.collective == "reduce_scatter"}
    assert reduced == {"float32"}
    assert {p.grad.dtype for p in model.parameters()} == {torch.float32}
    assert model.module[1].running_mean.dtype == torch.float32


@on_ranks(2)
def test_hooks() -> None:
    """Hooks on shards see the mean gradient, of which they may make another one, and end with
    their model."""
    model = FSDP(plain())
    shards = list(model.parameters())
    seen = list[float]()
    for shard in shards:
        shard.register_hook(lambda gradient: gradient * 0)
        shard.register_post_accumulate_grad_hook(
            lambda p: seen.append(float(local(p.grad).abs().max()))
        )
    model(inputs()).sum().backward()
    assert seen == [0.0] * len(shards)
    alive = weakref.ref(model._units[0])  # and with it threads and transports
    del model, shards, shard
    gc.collect()
    assert alive() is None


@on_ranks(2)
def test_optimizers_in_hooks() -> None:
    model = FSDP(plain())
    for parameter in model.parameters():
        optimizer = torch.optim.SGD([parameter], lr=0.1)
        parameter.register_post_accumulate_grad_hook(partial(_step_and_drop, optimizer))
    model(inputs()).sum().backward()
    assert all(p.grad is None for p in model.parameters())


def _step_and_drop(optimizer: torch.optim.Optimizer, _: Tensor) -> None:
    optimizer.step()
    optimizer.zero_grad()


@on_ranks(2)
def test_a_hook_runs_once_per_backward_pass_however_often_the_model_is_called_before() -> None:
    x = torch.linspace(-1, 1, 3 * WIDTH).view(3, WIDTH)
    one = plain()
    gradients = list[list[Tensor]]()
    for model in (one, FSDP(copy.deepcopy(one))):
        calls = list[int]()
        for parameter in model.parameters():
            parameter.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1) + 1)
            parameter.register_post_accumulate_grad_hook(lambda _, calls=calls: calls.append(1))
        (model(x).sum() + model(-x).sum()).backward()
        assert len(calls) == len(list(model.parameters()))
        gradients.append([whole(p.grad) for p in model.parameters()])
    assert furthest(*gradients) < 1e-6
