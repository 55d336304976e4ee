"""Models, optimizers and training runs that every way of sharding must get right, and how they are trained."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import nn, optim

from tests.parallel.data_parallel_cases import WIDTH, MixedDtypes, Tied, channels_last, frozen, plain, transformer

STEPS, ROWS = 4, 3
FLOAT32 = 128 * torch.finfo(torch.float32).eps


class Lion(optim.Optimizer):
    """Nobody has told labkit that every element is for itself here."""

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
                    self.state[p]["norm"] = p.norm()
                    p.sub_(p.grad * self.state[p]["norm"] / (1 + p.grad.norm()), alpha=group["lr"])


class Preconditioned(Lion):
    """Elementwise so far, but its state shows that this will change."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.state[p]["left"] = torch.eye(p.shape[0])
                    p.sub_(p.grad, alpha=group["lr"])


class GlobalNorm(Lion):
    """All parameters together."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            norm = sum(p.grad.norm() for p in group["params"])
            for p in group["params"]:
                p.sub_(p.grad / norm, alpha=group["lr"])


class Small(nn.Module):
    """Three elements, one of them a scalar, and a parameter without any."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor([0.1, 0.2]))
        self.nothing = nn.Parameter(torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale + self.shift.repeat(WIDTH // 2) + self.nothing.sum()


def matrices() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 5, bias=False), nn.Tanh(), nn.Linear(5, WIDTH, bias=False))


def on_images(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x.view(1, 1, ROWS, WIDTH).expand(1, 2, ROWS, WIDTH)).square().mean()


def on_tokens(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model((x * 100).long().abs() % 11).square().mean()


def squared(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


Scheduler = Callable[[optim.Optimizer], list[optim.lr_scheduler.LRScheduler]]


ADAMW = partial(optim.AdamW, lr=1e-2, weight_decay=0.1)


@dataclass(frozen=True)
class Case:
    optimizer: Callable[..., optim.Optimizer] = ADAMW
    build: Callable[[], nn.Module] = plain
    loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = squared
    dtype: torch.dtype = torch.float64
    micro_batches: int = 1
    clip: float | None = None
    """Norm of all gradients that they are clipped to."""
    schedulers: Scheduler = field(default=lambda optimizer: [])
    groups: int = 1
    added_at: int | None = None
    """The step before which the last parameters are added, in a group of their own."""
    closure: bool = False
    steps: int = STEPS
    options: dict[str, Any] = field(default_factory=dict)
    """For the sharded one only."""


def two_schedulers(optimizer: optim.Optimizer) -> list[optim.lr_scheduler.LRScheduler]:
    return [
        optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS + 1),  # momentum, too
        optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5),
    ]


CASES = {
    "AdamW": Case(),
    "AdamW in float32": Case(dtype=torch.float32),
    "AdamW, fused, amsgrad": Case(
        partial(optim.AdamW, lr=1e-2, amsgrad=True, fused=True), options={"elementwise": True}
    ),
    "SGD with momentum": Case(partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True)),
    "RMSprop": Case(partial(optim.RMSprop, lr=1e-2, momentum=0.5, centered=True)),
    "Adagrad": Case(partial(optim.Adagrad, lr=1e-2)),
    "NAdam": Case(partial(optim.NAdam, lr=1e-2)),
    "Adafactor": Case(partial(optim.Adafactor, lr=1e-2)),
    "Muon": Case(partial(optim.Muon, lr=1e-2), build=matrices, dtype=torch.float32),
    "elementwise, tried out": Case(Lion),
    "by parameter, tried out": Case(Lars),
    "tied weights": Case(build=Tied),
    "a frozen parameter": Case(build=frozen),
    "several dtypes": Case(build=MixedDtypes),
    "channels last": Case(build=channels_last, loss=on_images),
    "a transformer, checkpointed": Case(build=transformer, loss=on_tokens),
    "accumulation": Case(micro_batches=3),
    "fewer elements than ranks": Case(build=Small),
    "fewer parameters than ranks": Case(Lars, build=Small),
    "schedulers": Case(partial(optim.AdamW, lr=1e-2), schedulers=two_schedulers),
    "groups": Case(groups=3),
    "an added group": Case(added_at=2),
    "an added group, by parameter": Case(partial(optim.Adafactor, lr=1e-2), added_at=2),
    "a closure": Case(closure=True),
    "tiny buckets": Case(options={"bucket_mb": 1e-4, "transport": "point_to_point"}),
}


def built(case: Case) -> nn.Module:
    torch.manual_seed(0)
    torch.set_default_dtype(case.dtype)
    try:
        return case.build()
    finally:
        torch.set_default_dtype(torch.float32)


def groups_of(case: Case, model: nn.Module) -> tuple[list[dict[str, Any]], list[nn.Parameter]]:
    """Parameter groups with settings of their own, and parameters that are added later."""
    parameters = list(model.parameters())
    later = parameters[-2:] if case.added_at is not None else []
    parameters = parameters[: len(parameters) - len(later)]
    cuts = [len(parameters) * number // case.groups for number in range(case.groups + 1)]
    groups = [
        {"params": parameters[low:high], **({"lr": 0.01 * (number + 1)} if case.groups > 1 else {})}
        for number, (low, high) in enumerate(pairwise(cuts))
    ]
    return groups, later


def train(case: Case, model: nn.Module, make: Callable[..., optim.Optimizer], shards: list[int]) -> optim.Optimizer:
    groups, later = groups_of(case, model)
    optimizer = make(groups)
    schedulers = case.schedulers(optimizer)
    for step in range(case.steps):
        if step == case.added_at:
            optimizer.add_param_group({"params": later, "lr": 0.05})

        def gradients(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            for micro_batch in range(case.micro_batches):
                is_last = micro_batch == case.micro_batches - 1
                with model.no_sync() if not is_last and hasattr(model, "no_sync") else nullcontext():
                    total = torch.zeros(())
                    for shard in shards:
                        generator = torch.Generator().manual_seed(100 * step + 10 * micro_batch + shard)
                        x = torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).to(case.dtype)
                        loss = case.loss(model, x) / len(shards)
                        loss.backward()
                        total = total + loss.detach()
            return total

        if case.closure:
            assert float(optimizer.step(gradients)) > 0
        else:
            gradients()
            if case.clip is not None:
                clip(case.clip, model, optimizer)
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    return optimizer


def clip(most: float, model: nn.Module, optimizer: optim.Optimizer) -> None:
    """By whoever has the gradients; they are longer than that."""
    for owner in (model, optimizer):
        if hasattr(owner, "clip_grad_norm_"):
            norm = owner.clip_grad_norm_(most)
            break
    else:
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), most)
    assert float(norm) > most


def values(model: nn.Module) -> list[torch.Tensor]:
    return [p.detach() for p in getattr(model, "module", model).parameters()]


def furthest(some: list[torch.Tensor], others: list[torch.Tensor]) -> float:
    differences = [(a.double() - b.double()).abs().max() for a, b in zip(some, others, strict=True) if a.numel()]
    return float(max(differences))
