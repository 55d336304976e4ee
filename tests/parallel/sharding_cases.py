"""Optimizers and training runs that every strategy of sharding must get right."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim

from labkit.parallel.sharding import ShardedOptimizer, whole_parameters
from labkit.parallel.transport import make_separate_transport
from tests.parallel.data_parallel_cases import (
    ADAMW,
    FLOAT32,
    WIDTH,
    Case,
    MixedDtypes,
    Tied,
    channels_last,
    frozen,
    on_images,
    on_tokens,
    transformer,
)


def sharded(optimizer: Any, **options: Any) -> Callable[..., ShardedOptimizer]:
    """The sharded one with the settings of an optimizer."""
    cls = getattr(optimizer, "func", optimizer)
    settings = getattr(optimizer, "keywords", {})
    return lambda groups: ShardedOptimizer(groups, cls, **options, **settings)


def transport_by_backend(group: dist.ProcessGroup | None, *_: Any) -> Any:
    """Make a transport with collectives of the backend, as over NCCL."""
    transport = make_separate_transport(group, torch.device("cpu"), "point_to_point")
    transport.collective_group = group or dist.group.WORLD
    return transport


class Lion(optim.Optimizer):
    """A user's optimizer; every element is updated by itself."""

    def __init__(self, params: Any, lr: float = 1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    average = self.state[p].setdefault("average", torch.zeros_like(p))
                    p.sub_(torch.tanh(average.mul_(0.9).add_(p.grad, alpha=0.1)), alpha=group["lr"])


class Lars(Lion):
    """A step as long as the parameter: it needs all of it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * (p.norm() / (1 + p.grad.norm())), alpha=group["lr"])


@dataclass
class Data:
    x: Tensor


class Small(nn.Module):
    """Three elements, one of them a scalar, and a parameter without any."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.shift = nn.Parameter(torch.tensor([0.1, 0.2]))
        self.nothing = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift.repeat(WIDTH // 2) + self.nothing.sum()


class Uneven(nn.Module):
    """Sizes that no number of ranks divides, and a parameter that is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, WIDTH)
        )
        self.turned = nn.Parameter(torch.randn(WIDTH, WIDTH).t())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) @ self.turned


def two_schedulers(optimizer: optim.Optimizer) -> list[optim.lr_scheduler.LRScheduler]:
    return [
        # momentum, too
        optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=4),
        optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5),
    ]


CASES = {
    "AdamW": Case(optimizer=ADAMW),
    "AdamW in float32": Case(optimizer=ADAMW, dtype=torch.float32, tolerance=FLOAT32),
    "AdamW, fused, amsgrad": Case(
        optimizer=partial(optim.AdamW, lr=1e-2, amsgrad=True, fused=True)
    ),
    "AdamW, lr as a tensor": Case(optimizer=partial(optim.AdamW, lr=torch.tensor(1e-2))),
    "SGD with momentum": Case(optimizer=partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True)),
    "RMSprop": Case(optimizer=partial(optim.RMSprop, lr=1e-2, momentum=0.5, centered=True)),
    "Adagrad": Case(optimizer=partial(optim.Adagrad, lr=1e-2)),
    "NAdam": Case(optimizer=partial(optim.NAdam, lr=1e-2)),
    "of a user": Case(optimizer=Lion),
    "with norms of whole parameters": Case(optimizer=Lars),
    "tied weights": Case(Tied, optimizer=ADAMW),
    "a frozen parameter": Case(frozen, optimizer=ADAMW),
    "several dtypes": Case(MixedDtypes, optimizer=ADAMW, tolerance=FLOAT32),
    "channels last": Case(channels_last, on_images, ADAMW),
    "a transformer, checkpointed": Case(transformer, on_tokens, ADAMW),
    "accumulation, clipping": Case(optimizer=ADAMW, micro_batches=3, clip=0.01),
    "fewer elements than ranks": Case(Small, optimizer=ADAMW),
    "uneven": Case(Uneven, optimizer=ADAMW, clip=0.01),
    "schedulers": Case(optimizer=ADAMW, schedulers=two_schedulers, steps=3),
    "groups": Case(optimizer=ADAMW, groups=3),
    "an added group": Case(optimizer=ADAMW, added_at=1),
    "a closure": Case(optimizer=ADAMW, closure=True),
}


def values(model: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in whole_parameters(model).values()]


def local(value: Any) -> Any:
    return value.to_local() if hasattr(value, "to_local") else value


def furthest(some: list[Tensor], others: list[Tensor]) -> float:
    differences = [
        (a.detach().double() - b.detach().double()).flatten()
        for a, b in zip(some, others, strict=True)
    ]
    return float(torch.cat(differences).abs().max())
