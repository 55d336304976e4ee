"""Optimizers and training runs that every strategy of sharding must get right, and how they are trained."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn, optim

from labkit.parallel.sharding import whole_parameters
from tests.parallel.data_parallel_cases import WIDTH, MixedDtypes, Tied, channels_last, frozen, plain, transformer

STEPS, ROWS = 3, 3
FLOAT32 = 128 * torch.finfo(torch.float32).eps


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


class Small(nn.Module):
    """Three elements, one of them a scalar, and a parameter without any."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.tensor([0.1, 0.2]))
        self.nothing = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale + self.shift.repeat(WIDTH // 2) + self.nothing.sum()


class Uneven(nn.Module):
    """Sizes that no number of ranks divides, and a parameter that is transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(WIDTH, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh(), nn.Linear(5, WIDTH))
        self.turned = nn.Parameter(torch.randn(WIDTH, WIDTH).t())

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x) @ self.turned


def on_images(model: nn.Module, x: Tensor) -> Tensor:
    return model(x.view(1, 1, ROWS, WIDTH).expand(1, 2, ROWS, WIDTH)).square().mean()


def on_tokens(model: nn.Module, x: Tensor) -> Tensor:
    return model((x * 100).long().abs() % 11).square().mean()


def squared(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def two_schedulers(optimizer: optim.Optimizer) -> list[optim.lr_scheduler.LRScheduler]:
    return [
        optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=STEPS + 1),  # momentum, too
        optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5),
    ]


ADAMW = partial(optim.AdamW, lr=1e-2, weight_decay=0.1)


@dataclass(frozen=True)
class Case:
    optimizer: Callable[..., optim.Optimizer] = ADAMW
    build: Callable[[], nn.Module] = plain
    loss: Callable[[nn.Module, Tensor], Tensor] = squared
    dtype: torch.dtype = torch.float64
    micro_batches: int = 1
    clip: float | None = None
    """Norm of all gradients that they are clipped to, by torch's function."""
    schedulers: Callable[[optim.Optimizer], list[optim.lr_scheduler.LRScheduler]] = field(default=lambda optimizer: [])
    groups: int = 1
    added_at: int | None = None
    """The step before which the last parameters are added, in a group of their own."""
    closure: bool = False
    before: Callable[[nn.Module, int], None] = field(default=lambda model, step: None)
    """What happens to the bare model before each step."""
    split: Callable[[nn.Module], list[dict[str, Any]]] | None = None
    """Parameter groups of the model."""
    without: tuple[str, ...] = ()
    """Strategies that refuse it, with an error of one line."""
    tolerance: float = 1e-10


CASES = {
    "AdamW": Case(),
    "AdamW in float32": Case(dtype=torch.float32, tolerance=FLOAT32),
    "AdamW, fused, amsgrad": Case(partial(optim.AdamW, lr=1e-2, amsgrad=True, fused=True)),
    "AdamW, lr as a tensor": Case(partial(optim.AdamW, lr=torch.tensor(1e-2))),
    "SGD with momentum": Case(partial(optim.SGD, lr=0.1, momentum=0.9, nesterov=True)),
    "RMSprop": Case(partial(optim.RMSprop, lr=1e-2, momentum=0.5, centered=True)),
    "Adagrad": Case(partial(optim.Adagrad, lr=1e-2)),
    "NAdam": Case(partial(optim.NAdam, lr=1e-2)),
    "of a user": Case(Lion),
    "with norms of whole parameters": Case(Lars),
    "tied weights": Case(build=Tied),
    "a frozen parameter": Case(build=frozen),
    "several dtypes": Case(build=MixedDtypes, tolerance=FLOAT32),
    "channels last": Case(build=channels_last, loss=on_images),
    "a transformer, checkpointed": Case(build=transformer, loss=on_tokens),
    "accumulation, clipping": Case(micro_batches=3, clip=0.01),
    "fewer elements than ranks": Case(build=Small),
    "uneven": Case(build=Uneven, clip=0.01),
    "schedulers": Case(partial(optim.AdamW, lr=1e-2), schedulers=two_schedulers),
    "groups": Case(groups=3),
    "an added group": Case(added_at=2),
    "a closure": Case(closure=True),
}
OF_OPTIMIZERS = tuple(name for name, case in CASES.items() if case.build is plain and not case.clip and name != "AdamW")
"""Cases that differ from the first one in the optimizer and how it is used, without clipping."""


def built(case: Case) -> nn.Module:
    torch.manual_seed(0)
    torch.set_default_dtype(case.dtype)
    try:
        return case.build()
    finally:
        torch.set_default_dtype(torch.float32)


def split_groups(case: Case, model: nn.Module) -> tuple[list[dict[str, Any]], list[nn.Parameter]]:
    """Parameter groups with settings of their own, and parameters that are added later."""
    if case.split is not None:
        return case.split(model), []
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
    """On one shard of each batch, or, for the reference, on all of them."""
    groups, later = split_groups(case, model)
    optimizer = make(groups)
    schedulers = case.schedulers(optimizer)
    for step in range(STEPS):
        if step == case.added_at:
            optimizer.add_param_group({"params": later, "lr": 0.05})

        case.before(getattr(model, "module", model), step)

        def gradients(step: int = step) -> Tensor:
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
            if case.clip is not None:
                assert nn.utils.clip_grad_norm_(model.parameters(), case.clip) > case.clip
            return total

        if case.closure:
            assert float(optimizer.step(gradients)) > 0
        else:
            gradients()
            optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    return optimizer


def values(model: nn.Module) -> list[Tensor]:
    return [value.detach().clone() for value in whole_parameters(model).values()]


def furthest(some: list[Tensor], others: list[Tensor]) -> float:
    differences = [(a.double() - b.double()).abs().max() for a, b in zip(some, others, strict=True) if a.numel()]
    return float(max(differences))
