"""Every strategy of sharding trains as one process on the full batch does, whatever the model,
optimizer and situation."""

import zlib
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.nn.utils import parametrizations, prune, spectral_norm, vector_to_parameters, weight_norm
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from labkit.parallel import overlap
from labkit.parallel.data_parallel import FlatDDP
from labkit.parallel.messages import gather_json
from labkit.parallel.sharding import FSDP
from tests.cases import thinned
from tests.parallel import data_parallel_cases
from tests.parallel.data_parallel_cases import (
    SGD,
    WIDTH,
    Case,
    built,
    distance,
    on_images,
    reference,
    state_of,
    train,
)
from tests.parallel.sharding_cases import CASES, Data, sharded, transport_by_backend
from tests.parallel.shared_ranks import on_ranks

Made = tuple[nn.Module, Callable[..., optim.Optimizer]]


class SAM(optim.Optimizer):
    """A step by the gradient at the worst place nearby (arXiv:2010.01412); new memory takes the
    parameters back."""

    def __init__(self, params: Any, base: Callable[..., optim.Optimizer] = SGD):
        super().__init__(params, {})
        self.base = base(self.param_groups)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        trained = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        scale = 0.05 / (torch.stack([p.grad.norm() for p in trained]).norm() + 1e-12)
        before = [p.data.clone() for p in trained]
        for p in trained:
            p.add_(p.grad * scale)
        with torch.enable_grad():
            closure()
        for p, value in zip(trained, before, strict=True):
            p.data = value
        self.base.step()
        return loss


def _sharded(optimizer: Any, **options: Any) -> Callable[..., optim.Optimizer]:
    return (
        partial(SAM, base=sharded(SGD, **options))
        if optimizer is SAM
        else sharded(optimizer, **options)
    )


def _zero1(model: nn.Module, optimizer: Any, group: dist.ProcessGroup) -> Made:
    return FlatDDP(model, all_reduce="auto", group=group), _sharded(optimizer, group=group)


def _fsdp(model: nn.Module, optimizer: Any, group: dist.ProcessGroup, **options: Any) -> Made:
    return FSDP(model, group=group, **options), optimizer


def _fsdp_by_backend(
    model: nn.Module, optimizer: Any, group: dist.ProcessGroup, **options: Any
) -> Made:
    """Collectives of the backend, as over NCCL."""

    with mock.patch.object(overlap, "make_separate_transport", transport_by_backend):
        return _fsdp(model, optimizer, group, **options)


STRATEGIES: dict[str, Callable[..., Made]] = {
    "ZeRO-1": _zero1,
    "ZeRO-2": partial(_fsdp, reshard_after_backward=False),
    "ZeRO-3": _fsdp,
    "ZeRO-3, one unit": partial(_fsdp, units=(), prefetch=0, transport="point_to_point"),
    "ZeRO-3, not resharded": partial(_fsdp, reshard_after_forward=False, prefetch=2),
    "ZeRO-3, by the backend": _fsdp_by_backend,
}


# Situations that users have met, each with a model of its own.


class Net(nn.Module):
    """Three layers, each with a loss on the side, from `wrap` to `unwrap` in a container."""

    def __init__(
        self, wrap: Callable[..., Any] = lambda x: x, unwrap: Callable[..., Any] = lambda x: x
    ):
        super().__init__()
        self.layers = nn.ModuleList([Layer(wrap, unwrap) for _ in range(3)])
        self.wrap = wrap
        self.unwrap = unwrap

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(self.unwrap(layer(self.wrap(x))))
        return x


class Layer(nn.Module):
    def __init__(self, wrap: Callable[..., Any], unwrap: Callable[..., Any]):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.side = nn.Linear(WIDTH, WIDTH)
        self.wrap = wrap
        self.unwrap = unwrap

    def forward(self, x: Any) -> Any:
        h = self.frozen(self.unwrap(x))
        self.loss = self.side(h).square().mean()
        return self.wrap(self.linear(h))


class Slots:
    __slots__ = ("x",)

    def __init__(self, x: Tensor):
        self.x = x


class View(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).unsqueeze(1).squeeze(1)


class InPlace(nn.Module):
    """Changes a view that a unit has returned."""

    def __init__(self) -> None:
        super().__init__()
        self.first = View(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        y += x
        return self.second(y)


class Loose(nn.Module):
    """Parameters in containers without a forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.extra = nn.ParameterList([torch.randn(WIDTH, WIDTH)])
        self.holder = nn.Module()
        self.holder.matrix = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x) @ self.extra[0]) @ self.holder.matrix


class Attending(nn.MultiheadAttention):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, x, x)[0]


class Replacing(optim.SGD):
    """New memory for parameters and gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            if p.grad is not None:
                p.grad.data = p.grad.data * 0.5
                p.data = p.data - 0.1 * p.grad.data


def _convolutions() -> nn.Module:
    return data_parallel_cases.channels_last().to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]


def _layer_twice() -> nn.Module:
    model = data_parallel_cases.WhollyReentrant()
    model.layers[1] = model.layers[0]
    return model


def _on_first(change: Callable[[nn.Module], object]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        model = data_parallel_cases.plain()
        change(model[0])
        return model

    return build


def _toggled(*, at_first: bool) -> Callable[[nn.Module, int], None]:
    def toggle(model: nn.Module, step: int) -> None:
        model[0].requires_grad_(at_first if step < 1 else not at_first)  # type: ignore[operator, index]

    return toggle


def _reorder(model: nn.Module, step: int) -> None:
    if step == 1:  # the optimizer has state in the old order
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _swap_in_average(model: nn.Module, step: int) -> None:
    if step == 1:
        parameters = list(model.parameters())
        numel = sum(p.numel() for p in parameters)
        vector_to_parameters(torch.linspace(-1, 1, numel, dtype=torch.float64), parameters)


def _swap_and_back(model: nn.Module, step: int) -> None:
    """Evaluate other parameters, as an average of earlier ones."""
    others = [p.detach().clone() * 0.5 for p in model.parameters()]
    for _ in range(2):
        for index, p in enumerate(model.parameters()):
            others[index], p.data = p.data, others[index]
        with torch.no_grad():
            model(torch.ones(1, WIDTH, dtype=torch.float64))


def _side_losses(model: nn.Module, x: Tensor, *_: int) -> Tensor:
    inner = getattr(model, "module", model)
    return model(x).square().mean() + sum(layer.loss for layer in inner.layers)  # type: ignore[union-attr, misc, operator]


def _decayed(model: nn.Module) -> list[dict[str, Any]]:
    """The usual groups: matrices decay, by an attribute or not, and vectors do not."""
    groups: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for p in model.parameters():
        groups[p.dim() >= 2 and not getattr(p, "_no_weight_decay", False)].append(p)
    return [
        {"params": ps, "weight_decay": 0.5 * is_matrix} for is_matrix, ps in groups.items() if ps
    ]


UNDER_FSDP = tuple(name for name in STRATEGIES if name != "ZeRO-1")
WITH_UNITS = ("ZeRO-2", "ZeRO-3", "ZeRO-3, not resharded", "ZeRO-3, by the backend")


def _read_weight(module: nn.Module) -> None:
    module.register_forward_pre_hook(lambda module, args: (args[0] * module.weight.mean(),))
    module.register_forward_hook(lambda module, args, output: output + module.weight.sum())


def _in_checkpoint(model: nn.Module, x: Tensor, *_: int) -> Tensor:
    return checkpoint(model, x, use_reentrant=False).square().mean()


def _in_selective_checkpoint(model: nn.Module, x: Tensor, *_: int) -> Tensor:
    contexts = partial(
        create_selective_checkpoint_contexts,
        lambda _, operator, *args, **kwargs: "mm" in str(operator),
    )
    return checkpoint(model, x, use_reentrant=False, context_fn=contexts).square().mean()


def _mark(module: nn.Module) -> None:
    module.weight._no_weight_decay = True  # type: ignore[union-attr]


SITUATIONS = {
    "spectral_norm": Case(_on_first(lambda layer: spectral_norm(layer).eval())),
    "weight_norm": Case(_on_first(weight_norm)),
    "weight_norm, parametrized": Case(_on_first(parametrizations.weight_norm)),
    "prune": Case(_on_first(lambda layer: prune.l1_unstructured(layer, "weight", 0.3))),
    "hooks that read weights": Case(_on_first(_read_weight)),
    "frozen later": Case(before=_toggled(at_first=True), without=("ZeRO-1",)),
    "thawed later": Case(before=_toggled(at_first=False), without=("ZeRO-1",)),
    "vector_to_parameters": Case(before=_swap_in_average),
    "swapped and back": Case(before=_swap_and_back),
    "new memory": Case(optimizer=partial(Replacing, lr=0.1)),
    "SAM": Case(optimizer=SAM, closure=True),
    "channels last later": Case(_convolutions, on_images, before=_reorder, without=UNDER_FSDP),
    "decay by dimensions and attributes": Case(_on_first(_mark), split=_decayed),
    "losses on the side, frozen": Case(Net, _side_losses),
    "dataclasses": Case(partial(Net, Data, lambda data: data.x), _side_losses),
    "objects": Case(partial(Net, Slots, lambda data: data.x), _side_losses),
    "sets": Case(partial(Net, lambda x: {x}, lambda data: next(iter(data))), _side_losses),
    "in place on a view": Case(InPlace),
    "a layer in two checkpoints": Case(
        _layer_twice, data_parallel_cases.with_gradient, without=("ZeRO-1",)
    ),
    "the model in a checkpoint": Case(loss=_in_checkpoint),
    "the model in a selective checkpoint": Case(loss=_in_selective_checkpoint),
    "parameters without a module": Case(Loose),
    "attention alone": Case(lambda: Attending(WIDTH, 2)),
}


ALTERNATIVES = (
    "ZeRO-3",
    "ZeRO-2",
    "ZeRO-3, one unit",
    "ZeRO-3, not resharded",
    "ZeRO-3, by the backend",
)
"""They share most of their code: each trains every fifth case on three ranks, and all are slow."""


ALREADY = {
    "plain",
    "plain float32",
    "tied weights",
    "a frozen parameter",
    "mixed dtypes",
    "channels last",
}
ALREADY |= {name for name, case in data_parallel_cases.CASES.items() if not case.set_to_none}
ALREADY |= {"transformer, checkpointed", "accumulation"}
OF_WRAPPERS = {
    f"{name}, of wrappers": case
    for name, case in data_parallel_cases.CASES.items()
    if name != "buffers" and name not in ALREADY and "penalty" not in name
}
"""Cases of the data-parallel wrappers that are not among those of sharding, but for buffers, which
are each rank's own under FSDP, and second derivatives, which it refuses."""


OF_HOOKS = {
    f"{name}, of wrappers"
    for name in (
        "gradients in one piece of memory",
        "unused, accumulated",
        "tied, unlike inner passes",
        "two losses",
        "two forward passes, buffers",
    )
}
"""Those of them that `make test` trains: in which gradients come several times, or never."""
AROUND_STEPS = {
    "prune",
    "vector_to_parameters",
    "swapped and back",
    "new memory",
    "SAM",
    "channels last later",
    "decay by dimensions and attributes",
}
OF_MODELS = {"channels last", "a transformer, checkpointed"}
EVERY_CASE = CASES | SITUATIONS | OF_WRAPPERS


def _cases_of(strategy: str) -> list[str]:
    names = [name for name, case in EVERY_CASE.items() if strategy not in case.without]
    # It has the wrappers of those.
    return [n for n in names if n not in OF_WRAPPERS] if strategy == "ZeRO-1" else names


def _is_quick(world_size: int, strategy: str, name: str) -> bool:
    if world_size != 3:
        return False
    if strategy == "ZeRO-1":
        # How a model computes is up to the wrapper; what changes parameters concerns the optimizer.
        return (name in CASES and name not in OF_MODELS) or name in AROUND_STEPS
    if name in OF_WRAPPERS and name not in OF_HOOKS:
        return False
    shared = [case for case in EVERY_CASE if "ZeRO-3" not in EVERY_CASE[case].without]
    place = ALTERNATIVES.index(strategy)
    return name in shared[place :: len(ALTERNATIVES)]


TRAININGS = thinned(
    (
        (world_size, strategy, name)
        for world_size in (3, 2, 4)
        for strategy in STRATEGIES
        for name in _cases_of(strategy)
    ),
    _is_quick,
)


@on_ranks()
@pytest.mark.parametrize(("world_size", "strategy", "name"), TRAININGS)
def test_training_equals_one_process(world_size: int, strategy: str, name: str) -> None:
    case = EVERY_CASE[name]
    group = dist.group.WORLD
    assert group is not None
    wrap = STRATEGIES[strategy]
    if strategy in WITH_UNITS and ("unused" in name or "unlike" in name):
        # Ranks use different heads: those may be no units.
        wrap = partial(wrap, units=())
    model, make = wrap(built(case, seed=group.rank()), case.optimizer, group)
    train(case, model, [group.rank()], make)
    state = state_of(model)
    checksums = gather_json(zlib.crc32(repr(state).encode()))
    assert len({*checksums}) == 1, "parameters differ between ranks"
    if group.rank() == 0:
        assert distance(state, reference(case, world_size)) <= case.tolerance
