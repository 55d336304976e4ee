"""Training runs that every wrapper must get right, each as the ranks run it and as one process does
on all shards."""

import hashlib
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, partial
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn, optim
from torch.utils.checkpoint import checkpoint

from labkit.costs.transformer import TransformerShape
from labkit.nn.transformer import Transformer, language_model_loss
from labkit.parallel.data_parallel import BucketedDDP, FlatDDP, NaiveDDP, OverlappedDDP

ROWS = 3
WIDTH = 6
SGD = partial(optim.SGD, lr=0.1, momentum=0.5)
ADAMW = partial(optim.AdamW, lr=1e-2, weight_decay=0.1)

WRAPPERS: dict[str, Callable[..., nn.Module]] = {
    "naive": NaiveDDP,
    "flat": FlatDDP,
    "overlapped": OverlappedDDP,
    # buckets of a few hundred bytes, so that these small models fill several
    "bucketed": lambda module, **options: BucketedDDP(
        module, bucket_mb=3e-4, first_bucket_mb=1e-4, **options
    ),
    "one bucket": BucketedDDP,
    "naive, shared memory": lambda module, **options: NaiveDDP(
        module, all_reduce="shared", **options
    ),
    "bucketed, shared memory": lambda module, **options: BucketedDDP(
        module, bucket_mb=3e-4, first_bucket_mb=1e-4, all_reduce="shared", **options
    ),
    "overlapped, point to point": lambda module, **options: OverlappedDDP(
        module, all_reduce="point_to_point", **options
    ),
    "bucketed, no overlap": lambda module, **options: BucketedDDP(
        module, bucket_mb=3e-4, overlap=False, **options
    ),
}


class Tied(nn.Module):
    """The first and the last matrix are one parameter."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


class WithBuffer(nn.Module):
    """Scales by a buffer that each forward pass changes by the data it sees, as running statistics
    are."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.ones(WIDTH))
        self.register_buffer("count", torch.tensor(0))

    def forward(self, x):
        result = self.linear(x * self.scale)
        self.scale.mul_(1 + 0.1 * x[:ROWS].mean(0).tanh())
        self.count.add_(1)
        return result


class ConstantBuffers(nn.Module):
    """Two buffers that autograd saves in each forward pass and that no forward pass changes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.linspace(0.5, 2.0, WIDTH))
        self.register_buffer("shift", torch.ones(WIDTH))

    def forward(self, x):
        return (self.linear(x) * self.scale + self.shift.tanh()).tanh()


class MixedDtypes(nn.Module):
    """A layer in float64, one in float32, one in float64."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.Linear(WIDTH, WIDTH, dtype=d) for d in (torch.double, torch.float, torch.double)]
        )

    def forward(self, x):
        for layer in self.layers:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.double()


class TwoHeads(nn.Module):
    """`head` says which of two heads is used; the other, and sometimes a layer, gets no
    gradient."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x, head):
        return self.heads[head](torch.tanh(self.body(x)))


class Reentrant(nn.Module):
    """Its middle is computed again by a backward pass inside of the backward pass."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x):
        x = torch.tanh(self.layers[0](x))
        x = checkpoint(lambda y: torch.tanh(self.layers[1](y)), x, use_reentrant=True)
        return self.layers[2](x)


class TiedInsideAndOutside(nn.Module):
    """A matrix used outside and inside of a re-entrant checkpoint; a head; inner passes as many as
    `inner`."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.heads = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x, inner=1, head=0):
        first, second = self.layers
        x = torch.tanh(first(x))
        for _ in range(inner):
            x = checkpoint(
                lambda y: torch.tanh(second(torch.tanh(first(y)))), x, use_reentrant=True
            )
        return {"found": [self.heads[head](second(x))]}


class WhollyReentrant(nn.Module):
    """Every parameter is used in inner passes only."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(lambda y, layer=layer: torch.tanh(layer(y)), x, use_reentrant=True)
        return x


class Offset(nn.Module):
    """The gradient of the offset, a view, and the gradient that goes on to the layer are one piece
    of memory."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.offset = nn.ParameterList([torch.randn(ROWS * WIDTH)])

    def forward(self, x):
        return torch.tanh(self.layer(x)) + self.offset[0].view(ROWS, WIDTH)


class OffsetOfARow(nn.Module):
    """The gradient of the offset is a part of the memory of the gradient that goes on to the
    layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.offset = nn.ParameterList([torch.randn(1, WIDTH)])

    def forward(self, x):
        return torch.tanh(self.layer(x)) + torch.cat([x[1:], self.offset[0]])


class TwoOutputs(nn.Module):
    """Two outputs without a parameter in common."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.second = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.first(x), self.second(x)


class Undefined(nn.Module):
    """A function that has no gradient for its factor on rank 1."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.factor = nn.ParameterList([torch.ones(WIDTH)])

    def forward(self, x):
        return _Scale.apply(self.layer(x), self.factor[0])


class _Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.save_for_backward(x, factor)
        return x * factor

    @staticmethod
    def backward(ctx, gradient):
        x, factor = ctx.saved_tensors
        return gradient * factor, None if dist.get_rank() else (gradient * x).sum(0)


class Conjugate(nn.Module):
    """Autograd gives the parameter's gradient as a conjugate that is not carried out."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.tensor([1 + 2j, 3 - 1j]))

    def forward(self, x):
        return torch.view_as_real(self.factor.conj() * x).square().sum()


class Added(nn.Module):
    """The gradients of the offset and of the input are one piece of memory."""

    def __init__(self):
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(6))

    def forward(self, x):
        return x.view(2, 3) + self.offset.view(2, 3)


class MaxNorm(nn.Module):
    """Its forward pass rescales the rows it has seen."""

    def __init__(self):
        super().__init__()
        self.rows = nn.Parameter(torch.ones(4, 2))

    def forward(self, x):
        return nn.functional.embedding(torch.tensor([dist.get_rank()]), self.rows, max_norm=0.1)


def plain():
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, WIDTH)
    )


def frozen():
    model = plain()
    model[2].weight.requires_grad_(False)
    return model


def channels_last():
    convolutions = nn.Sequential(nn.Conv2d(2, 8, 3), nn.Tanh(), nn.Conv2d(8, 4, 1), nn.Flatten())
    return convolutions.to(memory_format=torch.channels_last)


def transformer():
    shape = TransformerShape(d_model=8, d_ff=12, n_layers=2, n_heads=2, vocabulary=11)
    return Transformer(shape, context_length=WIDTH, checkpoint_segment=1)


def squared(model, x, *_):
    return model(x).square().mean()


def two_forwards(model, x, shard, step):
    """Two forward passes before one backward pass, as in contrastive training."""
    return model(x).mean() - model(x.flip(0) * 2).square().mean()


def _tokens_twice(model, x, shard, step):
    return on_tokens(model, x, shard, step) + on_tokens(model, x + 1, shard, step)


def on_images(model, x, *_):
    return model(x.view(1, 1, ROWS, WIDTH).expand(1, 2, ROWS, WIDTH)).square().mean()


def on_tokens(model, x, shard, step):
    tokens = (x * 100).long().abs() % 11
    return language_model_loss(model(tokens), tokens.flip(1))


def _one_head(model, x, shard, step):
    """Every rank uses another head in some steps, none uses the last one, and the first step is the
    same for all."""
    return model(x, (shard + step) % 2 if step else 0).square().mean()


def _tied(model, x, shard, step):
    return model(x.requires_grad_())["found"][0].square().mean()


def _tied_unlike(model, x, shard, step):
    """Ranks differ in the number of inner passes, down to none, and in the head."""
    return (
        model(x.requires_grad_(), inner=(shard + step) % 3, head=shard % 2)["found"][0]
        .square()
        .mean()
    )


def with_gradient(model, x, shard, step):
    return model(x.requires_grad_()).square().mean()


def _penalty(model, x, shard, step):
    """A pass of `torch.autograd.grad` through the model, which sets no gradient, before the one
    that does."""
    outputs = model(x.requires_grad_())
    (slope,) = torch.autograd.grad(outputs.sum(), x, create_graph=True)
    return outputs.square().mean() + slope.square().mean()


def _penalty_alone(model, x, shard, step):
    """The outputs themselves are not in the loss: backward reaches none of them."""
    (slope,) = torch.autograd.grad(model(x.requires_grad_()).square().sum(), x, create_graph=True)
    return slope.square().mean()


def _each_output(model, x, shard, step):
    """A loss an output, each with a backward pass of its own."""
    return tuple(output.square().mean() for output in model(x))


@dataclass(frozen=True, eq=False)
class Case:
    """A model and how it is trained; `loss(model, x, shard, step)` is that of one shard."""

    build: Callable[[], nn.Module] = plain
    loss: Callable[..., Tensor | tuple[Tensor, ...]] = squared
    optimizer: Callable[..., optim.Optimizer] = SGD
    dtype: torch.dtype = torch.float64
    steps: int = 2
    losses: int = 1
    micro_batches: int = 1
    set_to_none: bool = True
    whole_batch: bool = False
    """The reference sees all shards in one forward pass, not one after the other."""
    options: dict[str, Any] = field(default_factory=dict)
    """Arguments of data-parallel wrappers."""
    tolerance: float = 1e-10
    clip: float | None = None
    """Norm of all gradients that they are clipped to, by torch's function."""
    schedulers: Callable[[optim.Optimizer], list[optim.lr_scheduler.LRScheduler]] = field(
        default=lambda optimizer: []
    )
    groups: int = 1
    added_at: int | None = None
    """The step before which the last parameters are added, in a group of their own."""
    closure: bool = False
    before: Callable[[nn.Module, int], None] = field(default=lambda model, step: None)
    """What happens to the bare model before each step."""
    split: Callable[[nn.Module], list[dict[str, Any]]] | None = None
    """Parameter groups of the model."""
    without: tuple[str, ...] = ()
    """Strategies of sharding that refuse it, with an error of one line."""


# float32: a gradient is a mean of some tens of terms, its rounding some eps; the steps of 0.1 add
# up to less than 64 eps of the largest parameter, which is below 2.
FLOAT32 = 128 * torch.finfo(torch.float32).eps

CASES = {
    "plain": Case(plain),
    "plain float32": Case(plain, dtype=torch.float32, tolerance=FLOAT32),
    "set_to_none=False": Case(plain, set_to_none=False),
    "AdamW, set_to_none=False": Case(plain, optimizer=ADAMW, set_to_none=False),
    "tied weights": Case(Tied),
    "a frozen parameter": Case(frozen),
    "gradients in one piece of memory": Case(Offset),
    "a gradient in a part of another": Case(OffsetOfARow),
    "buffers": Case(WithBuffer, whole_batch=True),
    "two forward passes, buffers": Case(ConstantBuffers, two_forwards),
    "two forward passes, transformer": Case(transformer, _tokens_twice),
    "mixed dtypes": Case(MixedDtypes, tolerance=FLOAT32),
    "parameters unused": Case(TwoHeads, _one_head, steps=3, options={"find_unused": True}),
    "unused, set_to_none=False": Case(
        TwoHeads, _one_head, steps=3, options={"find_unused": True}, set_to_none=False
    ),
    "unused, accumulated": Case(
        TwoHeads, _one_head, steps=3, options={"find_unused": True}, micro_batches=3
    ),
    "two losses": Case(plain, losses=2),
    "accumulation": Case(plain, micro_batches=3),
    "accumulation, set_to_none=False": Case(plain, micro_batches=3, set_to_none=False),
    "re-entrant checkpointing": Case(Reentrant, options={"find_unused": True}),
    "re-entrant, everything used": Case(Reentrant),
    "re-entrant as a whole": Case(WhollyReentrant, with_gradient),
    "tied to a re-entrant layer": Case(TiedInsideAndOutside, _tied, options={"find_unused": True}),
    "tied, unlike inner passes": Case(
        TiedInsideAndOutside,
        _tied_unlike,
        steps=3,
        micro_batches=2,
        losses=2,
        options={"find_unused": True},
    ),
    "gradient penalty": Case(plain, _penalty),
    "a gradient penalty alone": Case(plain, _penalty_alone, options={"find_unused": True}),
    "a backward pass an output": Case(TwoOutputs, _each_output, options={"find_unused": True}),
    "channels last": Case(channels_last, on_images),
    "transformer, checkpointed": Case(transformer, on_tokens),
}


def data(case: Case, step: int, micro_batch: int, shard: int) -> Tensor:
    """(ROWS, WIDTH), another for every step, micro-batch and shard."""
    generator = torch.Generator().manual_seed(1000 * step + 100 * micro_batch + shard)
    return torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64).to(case.dtype)


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


def train(
    case: Case,
    model: nn.Module,
    shards: list[int],
    make: Callable[..., optim.Optimizer] | None = None,
    after_step: Callable[[], None] = lambda: None,
) -> optim.Optimizer:
    """Train on the given shards: one for a rank, all of them for the reference."""
    groups, later = split_groups(case, model)
    optimizer = (make or case.optimizer)(groups)
    schedulers = case.schedulers(optimizer)
    for step in range(case.steps):
        if step == case.added_at:
            optimizer.add_param_group({"params": later, "lr": 0.05})
        case.before(getattr(model, "module", model), step)

        def gradients(step: int = step) -> Tensor:
            optimizer.zero_grad(set_to_none=case.set_to_none)
            total = torch.zeros(())
            for micro_batch in range(case.micro_batches):
                is_last = micro_batch == case.micro_batches - 1
                with nullcontext() if is_last or not hasattr(model, "no_sync") else model.no_sync():
                    total = total + _backward(case, model, shards, step, micro_batch)
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
        after_step()
    return optimizer


def _backward(
    case: Case, model: nn.Module, shards: list[int], step: int, micro_batch: int
) -> Tensor:
    """The backward passes of a micro-batch; the sum of their losses."""
    batches = [(shard, data(case, step, micro_batch, shard)) for shard in shards]
    total = torch.zeros(())
    if case.whole_batch:
        batches = [(0, torch.cat([inputs for _, inputs in batches]))]
    for shard, inputs in batches:
        found = case.loss(model, inputs, shard, step)
        for loss in found if isinstance(found, tuple) else (found,):
            for n in range(case.losses):
                scaled = loss * (n + 1) / len(batches)
                scaled.backward(retain_graph=n < case.losses - 1)
                total = total + scaled.detach()
    return total


def built(case: Case, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    torch.set_default_dtype(case.dtype)
    try:
        return case.build()
    finally:
        torch.set_default_dtype(torch.float32)


def state_of(model: Any) -> dict[str, list[float]]:
    """The bare model's state, of whole tensors. A collective if it is in shards."""
    is_sharded = hasattr(model, "consolidated_state_dict")
    state = (
        model.consolidated_state_dict(to=None)
        if is_sharded
        else getattr(model, "module", model).state_dict()
    )
    return {name: value.double().flatten().tolist() for name, value in state.items()}


def distance(state: dict[str, list[float]], expected: dict[str, list[float]]) -> float:
    """The largest difference between two states of the same names."""
    assert state.keys() == expected.keys()
    one, other = (
        torch.tensor([x for name in expected for x in each[name]]).double()
        for each in (state, expected)
    )
    return float((one - other).abs().max())


def digest_of(model: nn.Module) -> str:
    """Of every bit of every parameter."""
    parts = [p.detach().reshape(-1).view(torch.uint8).numpy().tobytes() for p in model.parameters()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


@cache
def reference(case: Case, world_size: int) -> dict[str, list[float]]:
    """The same training by one process, on the shards of all ranks, from rank 0's seed."""
    train(case, model := built(case), list(range(world_size)))
    return state_of(model)
