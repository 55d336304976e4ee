"""The trainings that `verify` compares: in one process, and on all ranks.

And the differences between them that rounding explains.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.parallel.messages import cpu_group, gather_json
from labkit.torch_private import DropoutNd

Batch = tuple[Tensor, Tensor]
Values = dict[str, Tensor]
Loss = Callable[[Any, Tensor], Tensor]
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
KINDS = ("gradient", "loss", "norm", "parameter")
"""Of values, in the order of a step."""


class Key(NamedTuple):
    """Which value of a training it is."""

    step: int
    kind: str
    name: str


STEPS = 3
SAFETY = 16.0
"""Largest error of another order of additions, in units of the error in one process. Both are
random sums; over all elements of a model the largest of one is rarely four times that of the other.
"""

SGD_SETTINGS: Mapping[str, Any] = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}


def make_sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer with which trainings are compared, unless another one is given."""
    return torch.optim.SGD(parameters, **SGD_SETTINGS)


@dataclass(frozen=True, kw_only=True)
class Parallel:
    """A parallel training on this rank.

    `step` gets this rank's part of a batch, (inputs, targets), runs forward and backward, and
    returns the loss; the mean over ranks must be that of one process.
    """

    model: nn.Module
    step: Callable[[Tensor, Tensor], Tensor]
    split: Callable[[Tensor, int], Tensor] | None = None
    """Part of inputs or targets that a rank gets; None: each rank gets the whole."""
    gather: Callable[[Values], Mapping[str, Tensor]] | None = None
    """Whole parameters or gradients from this rank's, by the names of the model in one process.

    None: the model's `gather_state_dict`, full DTensors, or the tensors as they are.
    """
    clip: Callable[[float], Tensor | float] | None = None
    """Clips all gradients to a norm and returns the norm before; None: torch's function."""
    optimizer: MakeOptimizer | None = None
    """Makes an optimizer that updates as that of one process. None: makes the same."""


@dataclass
class Record:
    """A training: how it updates, and what it computes by step; parameters also before it."""

    make_optimizer: MakeOptimizer
    max_norm: float
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: list[Values] = field(default_factory=list)
    parameters: list[Values] = field(default_factory=list)

    def values(self) -> dict[Key, Tensor]:
        """Return all values, in the order in which they are compared."""
        result = {Key(0, "parameter", name): p for name, p in self.parameters[0].items()}
        for step in range(1, len(self.losses) + 1):
            gradients = self.gradients[step - 1]
            result |= {Key(step, "gradient", name): g for name, g in gradients.items()}
            for kind, numbers in (("loss", self.losses), ("norm", self.norms)):
                number = numbers[step - 1]
                result[Key(step, kind, "")] = torch.tensor(number, dtype=torch.float64)
            parameters = self.parameters[step]
            result |= {Key(step, "parameter", name): p for name, p in parameters.items()}
        return result


def train_whole(
    start: nn.Module,
    loss_function: Loss,
    batches: Sequence[Batch],
    dtype: torch.dtype,
    make_optimizer: MakeOptimizer,
    max_norm: float = float("inf"),
) -> Record:
    """Train a copy of the model in one process."""
    model = copy.deepcopy(start).to(dtype)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = loss_function(model(_cast(inputs, dtype)), _cast(targets, dtype))
        if loss.requires_grad:
            loss.backward()
        return loss

    names = dict(model.named_parameters(remove_duplicate=False))
    record = Record(make_optimizer, max_norm)
    return _train(Parallel(model=model, step=step, gather=dict), batches, None, record, names)


def train_parallel(
    parallel: Parallel,
    batches: Sequence[Batch],
    group: dist.ProcessGroup,
    whole: Record,
) -> Record:
    """Train on all ranks as `whole` in one process.

    Losses are means over ranks; norms are this rank's.
    """
    record = Record(parallel.optimizer or whole.make_optimizer, whole.max_norm)
    return _train(parallel, batches, group, record, whole.parameters[0])


def _train(
    parallel: Parallel,
    batches: Sequence[Batch],
    group: dist.ProcessGroup | None,
    record: Record,
    names: Container[str],
) -> Record:
    """Fill a record. `group`: None in one process; `names`: of parameters in one process."""
    model = parallel.model
    optimizer = record.make_optimizer(model.parameters())

    def named() -> dict[str, nn.Parameter]:
        return dict(model.named_parameters(remove_duplicate=False))

    record.parameters.append(_gather(parallel, named(), names))
    with _without_dropout(model):
        for step in range(STEPS):
            inputs, targets = batches[step % len(batches)]
            if parallel.split is not None and group is not None:
                inputs = parallel.split(inputs, group.rank())
                targets = parallel.split(targets, group.rank())
            optimizer.zero_grad()
            loss = float(parallel.step(inputs, targets).detach())
            losses = [loss] if group is None else gather_json(loss, group)
            record.losses.append(sum(losses) / len(losses))
            grads = {name: p.grad for name, p in named().items() if p.grad is not None}
            record.gradients.append(_gather(parallel, grads, names))
            if parallel.clip is not None:
                norm = parallel.clip(record.max_norm)
            else:
                norm = nn.utils.clip_grad_norm_(model.parameters(), record.max_norm)
            if hasattr(norm, "full_tensor"):
                norm = norm.full_tensor()  # FSDP's is a DTensor, of which each rank has a share
            record.norms.append(float(norm))
            optimizer.step()
            record.parameters.append(_gather(parallel, named(), names))
    return record


def update_parts(record: Record, name: str, dim: int, ranks: int, steps: int) -> Tensor:
    """Return a parameter after some steps of a training in which each rank updates its own part.

    Equal to the whole parameter's update only for an optimizer that treats each element alone.
    """
    parts = []
    for rank, start in enumerate(record.parameters[0][name].tensor_split(ranks, dim)):
        part = nn.Parameter(start.clone())
        optimizer = record.make_optimizer([part])
        for step in range(steps):
            factor = min(1.0, record.max_norm / (record.norms[step] + 1e-6))
            gradient = record.gradients[step].get(name)
            part.grad = None
            if gradient is not None:
                part.grad = gradient.tensor_split(ranks, dim)[rank] * factor
            optimizer.step()
        parts.append(part.detach())
    return torch.cat(parts, dim)


@torch.no_grad()
def _gather(parallel: Parallel, values: Mapping[str, Any], names: Container[str]) -> Values:
    """Return whole tensors by their `names` in one process."""
    local = {}
    for name, value in values.items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        local[name] = whole.detach().to_dense()
    inner: Any = parallel.model
    if parallel.gather is not None:
        local = dict(parallel.gather(local))
    else:
        while not hasattr(inner, "gather_state_dict") and hasattr(inner, "module"):
            inner = inner.module
            local = {name.removeprefix("module."): value for name, value in local.items()}
        if hasattr(inner, "gather_state_dict"):
            local = inner.gather_state_dict(local)
    return {_without_wrapper(name, names): value.double().clone() for name, value in local.items()}


def _without_wrapper(name: str, names: Container[str]) -> str:
    """Return a parameter's name without that of what a wrapper calls the model."""
    shorter = name
    while shorter not in names:
        _, dot, shorter = shorter.partition(".")
        if not dot:
            return name
    return shorter


def gather_values(
    actual: Tensor | None, expected: Tensor | None, group: dist.ProcessGroup
) -> list[Tensor | None]:
    """Return a value of all ranks, None for those that have none. A collective."""
    group = cpu_group(group)
    like = expected if expected is not None else actual
    shape = torch.Size() if like is None else like.shape
    is_there = actual is not None and actual.shape == shape
    flag = torch.tensor([float(is_there)], dtype=torch.float64)
    flags = [torch.empty_like(flag) for _ in range(group.size())]
    dist.all_gather(flags, flag, group=group)
    if expected is None:
        # Ranks without the value do not know its shape, so that none can gather it.
        return [torch.zeros(()) if each else None for each in flags]
    local = actual.cpu() if is_there and actual is not None else torch.zeros(shape).double()
    values = [torch.empty_like(local, dtype=torch.float64) for _ in flags]
    dist.all_gather(values, local.contiguous().double(), group=group)
    return [value if flag else None for value, flag in zip(values, flags, strict=True)]


def derive_tolerances(exact: Record, rough: Record, dtype: torch.dtype) -> dict[Key, float]:
    """Return the largest error that rounding explains, of each value.

    Errors of float32, in units of its rounding, carry over to other dtypes. A value that was lucky
    has the median of all values, relative to its size.
    """
    one, other = exact.values(), rough.values()
    unit = torch.finfo(torch.float32).eps
    sizes = {key: float(value.abs().max()) if value.numel() else 0.0 for key, value in one.items()}
    errors = {
        key: float((other[key] - value).abs().max()) / unit if value.numel() else 0.0
        for key, value in one.items()
    }
    relative = sorted(errors[key] / sizes[key] for key in one if sizes[key] > 0)
    typical = max(1.0, relative[len(relative) // 2])
    scale = SAFETY * torch.finfo(dtype).eps
    return {key: scale * max(errors[key], typical * sizes[key]) for key in one}


@contextmanager
def _without_dropout(model: nn.Module) -> Iterator[None]:
    modules = [module for module in model.modules() if isinstance(module, DropoutNd)]
    shares = [module.p for module in modules]
    for module in modules:
        module.p = 0.0
    try:
        yield
    finally:
        for module, share in zip(modules, shares, strict=True):
            module.p = share


def _cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype) if x.is_floating_point() else x
