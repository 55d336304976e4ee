"""Clipping, overflow and random numbers are those of one process, however ranks have parameters."""

import copy

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from labkit.parallel.gradients import (
    any_rank_overflowed,
    clip_grad_norm_,
    find_overflow,
    fork_seed,
    mark_overflow,
)
from labkit.parallel.layouts import CutGradient, Layout, add_layout
from labkit.parallel.sharding import FSDP
from tests.parallel.model_parallel_cases import EXACT
from tests.parallel.shared_ranks import on_ranks


def test_a_sparse_gradient_is_marked() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    (embedding(torch.tensor([1, 2])).sum() * float("inf")).backward()
    assert find_overflow([embedding.weight]) == 1
    embedding.zero_grad()
    embedding(torch.tensor([1, 2])).sum().backward()
    assert embedding.weight.grad is not None
    mark_overflow([embedding.weight.grad])
    assert find_overflow([embedding.weight]) == 1


def make_parameters() -> tuple[list[nn.Parameter], list[Tensor]]:
    """Return this rank's parameters with gradients, and all gradients of one process.

    A cut matrix, a replicated gain, a weight tied between ranks 0 and 1, a layer of each rank.
    """
    rank = dist.get_rank()
    p = dist.get_world_size()
    world = dist.group.WORLD
    assert world is not None
    torch.manual_seed(0)
    matrix, gain, tied, *layers = (torch.randn(2 * p, 3).double() for _ in range(3 + p))
    parts = {"cut": matrix.chunk(p)[rank], "gain": gain, "layer": layers[rank]}
    if rank < 2:
        parts["tied"] = tied
    parameters = {name: nn.Parameter(torch.zeros_like(part)) for name, part in parts.items()}
    add_layout(parameters["cut"], Layout(world, dim=0))
    add_layout(parameters["gain"], Layout(world, copies=p))
    if rank < 2:
        add_layout(parameters["tied"], Layout(world, copies=2))
    for name, parameter in parameters.items():
        (parameter * parts[name]).sum().backward()
    return [*parameters.values()], [matrix, gain, tied, *layers]


@on_ranks(3)
def test_clip() -> list[str]:
    wrong = []
    for norm_type in (2.0, 1.0, float("inf")):
        parameters, whole = make_parameters()
        expected = torch.nn.utils.get_total_norm(whole, norm_type)
        norm = clip_grad_norm_(parameters, 0.5, norm_type=norm_type)
        clipped = parameters[1].grad
        assert clipped is not None
        error = (clipped - whole[1] * 0.5 / (expected + 1e-6)).abs().max()
        if abs(norm - expected) > EXACT or error > EXACT:
            wrong.append(f"{norm_type}: {norm} instead of {expected}, off by {error}")
    nothing = clip_grad_norm_([], 0.5) if dist.get_rank() else clip_grad_norm_(parameters, 0.5)
    return wrong if nothing > 0 else [*wrong, "a rank without gradients has another norm"]


class Scaled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


@on_ranks(2)
def test_clip_of_shards() -> list[str]:
    """FSDP has scalars whole on every rank: they count once."""
    torch.manual_seed(0)
    one = Scaled().double()
    x = torch.arange(6.0, dtype=torch.float64).view(2, 3)
    group = dist.new_group()
    model = FSDP(copy.deepcopy(one), group=group)
    for each in (one, model):
        each(x).square().mean().backward()
    expected = nn.utils.clip_grad_norm_(one.parameters(), 1e9)
    norm = clip_grad_norm_(model.parameters(), 1e9, [group])
    return [] if abs(norm - expected) <= EXACT else [f"{norm} instead of {expected}"]


@on_ranks(2)
def test_torch_functions_on_cut_gradients() -> list[str]:
    """torch's own clipping of cut and replicated parameters has the norm of one process."""
    (cut, gain, *_), (matrix, whole_gain, *_) = make_parameters()
    assert type(cut.grad) is CutGradient
    assert type(cut.grad * 2) is Tensor
    before = cut.grad.clone()
    (cut * matrix.chunk(2)[dist.get_rank()]).sum().backward()  # accumulates
    assert torch.equal(cut.grad, 2 * before)
    cut.grad.div_(2)
    expected = torch.nn.utils.get_total_norm([matrix, whole_gain])
    norms = [
        nn.utils.clip_grad_norm_([cut, gain], 1e9, foreach=foreach) for foreach in (None, True)
    ]
    return [f"{norm} instead of {expected}" for norm in norms if abs(norm - expected) > EXACT]


@on_ranks(2)
def test_overflow() -> list[str]:
    """An overflow on one rank makes all skip; torch alone sees it in cut gradients only."""
    wrong = []
    for index, calls in ((0, False), (1, True), (2, True)):
        parameters, _ = make_parameters()
        before = copy.deepcopy(parameters)
        optimizer = torch.optim.SGD(parameters, lr=1.0)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(torch.ones(()))
        grad = parameters[index].grad
        assert grad is not None
        if dist.get_rank() == 1:
            grad.view(-1)[2] = float("nan")
        if calls and not any_rank_overflowed(parameters):
            wrong.append(f"{index}: no overflow")
        scaler.step(optimizer)
        scaler.update()
        is_same = all(map(torch.equal, before, parameters))
        if scaler.get_scale() != 512 or not is_same:
            wrong.append(f"{index}: scale {scaler.get_scale()}, unchanged {is_same}")
    return [*wrong, "an overflow"] if any_rank_overflowed(make_parameters()[0]) else wrong


@on_ranks(2)
def test_seeds() -> list[str]:
    """Inside of `fork_seed` ranks differ, outside they agree; a checkpoint draws the same again."""
    drawn: list[Tensor] = []

    def draw(x: Tensor) -> Tensor:
        with fork_seed():
            drawn.append(torch.rand(8))
        drawn.append(torch.rand(8))
        return x.exp()

    torch.manual_seed(3)
    checkpoint(draw, torch.ones(1, requires_grad=True), use_reentrant=False).backward()
    inside, outside, *again = (tensor.tolist() for tensor in drawn)
    by_rank = [None] * 2
    dist.all_gather_object(by_rank, (inside, outside))
    assert again == [inside, outside]
    assert by_rank[0][0] != by_rank[1][0]
    assert by_rank[0][1] == by_rank[1][1]
    return []
