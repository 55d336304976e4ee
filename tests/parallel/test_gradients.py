"""Clipping, overflow and random numbers are those of one process, however ranks have parameters."""

import copy
import io
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from labkit.parallel.cut_tensors import CutGradient
from labkit.parallel.gradients import (
    any_rank_overflowed,
    clip_grad_norm_,
    find_overflow,
    fork_seed,
    mark_overflow,
)
from labkit.parallel.layouts import Layout, add_layout
from labkit.parallel.sharding import FSDP
from tests.parallel.model_parallel_cases import EXACT
from tests.parallel.shared_ranks import on_ranks, shared_mesh


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
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
def test_clip(norm_type: float) -> None:
    parameters, whole = make_parameters()
    expected = torch.nn.utils.get_total_norm(whole, norm_type)
    norm = clip_grad_norm_(parameters, 0.5, norm_type=norm_type)
    assert abs(norm - expected) <= EXACT
    clipped: Any = parameters[1].grad
    assert (clipped - whole[1] * 0.5 / (expected + 1e-6)).abs().max() <= EXACT
    # a rank without gradients has the others' norm
    assert clip_grad_norm_([] if dist.get_rank() else parameters, 0.5) > 0


class Scaled(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 2)
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


@on_ranks(2)
def test_clip_of_shards() -> None:
    """FSDP has scalars whole on every rank: they count once."""
    torch.manual_seed(0)
    one = Scaled().double()
    x = torch.arange(6.0, dtype=torch.float64).view(2, 3)
    group = shared_mesh((2,), ("fsdp",)).get_group()
    model = FSDP(copy.deepcopy(one), group=group)
    for each in (one, model):
        each(x).square().mean().backward()
    expected = nn.utils.clip_grad_norm_(one.parameters(), 1e9)
    norm = clip_grad_norm_(model.parameters(), 1e9, [group])
    assert abs(norm - expected) <= EXACT


@on_ranks(2)
def test_torch_functions_on_cut_gradients() -> None:
    """torch's own clipping of cut and replicated parameters has the norm of one process."""
    (cut, gain, *_), (matrix, whole_gain, *_) = make_parameters()
    assert type(cut.grad) is CutGradient
    before = cut.grad.clone()
    (cut * matrix.chunk(2)[dist.get_rank()]).sum().backward()  # accumulates
    assert torch.equal(cut.grad, 2 * before)
    cut.grad.div_(2)
    expected = torch.nn.utils.get_total_norm([matrix, whole_gain])
    for foreach in (None, True):
        norm = nn.utils.clip_grad_norm_([cut, gain], 1e9, foreach=foreach)
        assert abs(norm - expected) <= EXACT


OVER_MATRICES: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "Muon": torch.optim.Muon,
    "Muon without nesterov": partial(torch.optim.Muon, nesterov=False),
    "Adafactor": torch.optim.Adafactor,
    "Adafactor, foreach": partial(torch.optim.Adafactor, foreach=True),
    "LBFGS": torch.optim.LBFGS,
}


@on_ranks(2)
@pytest.mark.parametrize(
    ("name", "is_sharded"),
    # Each optimizer once: with cut parameters, or with shards of them.
    [(name, number % 2 == 0) for number, name in enumerate(OVER_MATRICES)],
)
def test_optimizers_that_mix_elements_are_refused(name: str, is_sharded: bool) -> None:
    """They would see this rank's part of a cut matrix as if it were all of it."""
    parameters, _ = make_parameters()
    if is_sharded:
        layer = nn.Linear(3, 4, bias=False).double()
        layer.weight = parameters[0]
        model = FSDP(layer, group=shared_mesh((2,), ("fsdp",)).get_group())
        model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
        parameters = [*model.parameters()]
    optimizer = OVER_MATRICES[name](parameters[:1])
    before = parameters[0].detach().clone()
    with pytest.raises(ValueError, match="part") as refusal:
        optimizer.step(lambda: parameters[0].grad.detach().sum())  # type: ignore[union-attr]
    assert "\n" not in str(refusal.value)
    assert torch.equal(parameters[0].detach(), before)


def _with_graph(compute: Callable[[], Any]) -> Any:
    with torch.enable_grad():
        return compute()


def _layer(weight: nn.Parameter) -> nn.Linear:
    layer = nn.Linear(3, 2, bias=False)
    layer.weight = weight
    return layer


# What a training computes from a parameter p with a gradient, and would get of this rank's part.
REDUCED: dict[str, Callable[[Any], Any]] = {
    "mean in a log": lambda p: torch.mean(p.grad.abs()),
    "sum by a keyword": lambda p: torch.sum(input=p),
    "limit on columns": lambda p: p.norm(dim=0, keepdim=True),
    "limit on columns, by torch": lambda p: p.renorm(2, 1, 1.0),
    "limit on columns, in place": lambda p: p.data.add_(p.grad).renorm_(2, 1, 1.0),
    "temperature over what is cut": lambda p: p.log_softmax(0),
    "running product": lambda p: p.grad.cumprod(0),
    "weight norm of columns": lambda p: torch._weight_norm(p, torch.ones(1, 3).double(), 1),
    "norm as penalty": lambda p: _with_graph(lambda: p.norm()),
    "largest weight as penalty": lambda p: _with_graph(lambda: p.abs().max()),
    "spectral norm": lambda p: torch.linalg.svdvals(p.detach() + p.data),
    "spectral norm, by torch": lambda p: nn.utils.parametrizations.spectral_norm(_layer(p)),
    "limit on each head": lambda p: [head.norm() for head in p.grad.chunk(3, dim=1)],
    "threshold of pruning": lambda p: p.data.abs().flatten().kthvalue(2),
    "weights that are not zero, as a norm": lambda p: p.norm(0),
    "weights that are not zero, as a norm of vectors": lambda p: torch.linalg.vector_norm(p, 0),
    "mean without NaN": lambda p: p.grad.nanmean(),
    "distance from other weights": lambda p: torch.dist(torch.zeros_like(p), p),
    "mean of squared distances": lambda p: nn.functional.mse_loss(p, torch.zeros_like(p)),
    "angle to another gradient": lambda p: torch.cosine_similarity(p.grad, p.grad, dim=0),
    "products of a gradient (Shampoo)": lambda p: p.grad.T @ p.grad,
    "products by dimensions": lambda p: torch.tensordot(p.grad, p.grad, ([0], [0])),
    "projected gradient (GaLore)": lambda p: p.grad @ torch.ones(3, 1, dtype=p.dtype),
    "mask of attention": lambda p: p.tril(),
    "mask of attention, in place": lambda p: p.data.triu_(),
    "largest gradients": lambda p: torch._foreach_max([p.grad, p.grad]),
    "layer norm of weights": lambda p: nn.functional.layer_norm(p, (3,)),
    "layer of a gradient": lambda p: nn.functional.linear(p.grad, torch.ones(1, 3).double()),
    "smallest of what is cut": lambda p: p.grad.kthvalue(1, 0),
    "norm of a vector as penalty": lambda p: _with_graph(lambda: torch.linalg.vector_norm(p)),
    "all gradients in one vector": lambda p: torch.cat([p.grad.view(-1), torch.ones(2)]).norm(),
}
# Norms in the steps of LAMB and LARS, by hand, of an update, of SAM and of NovoGrad; in a log.
COMPOSED: dict[str, Callable[[Any], Any]] = {
    "trust ratio": lambda p: p.norm(),
    "trust ratio by hand": lambda p: p.data.pow(2).sum().sqrt(),
    "norm of an update": lambda p: (torch.zeros_like(p) + p.grad).norm(p=1),
    "norm of a gradient": lambda p: p.grad.norm(2),
    "norm of a gradient as of old": lambda p: p.grad.detach().data.norm(2),
    "norm of a kept gradient": lambda p: p.grad.clone().norm(),
    "squares of a gradient": lambda p: p.grad.square().sum(),
    "norm of a gradient that is returned": lambda p: _with_graph(
        lambda: torch.autograd.grad((p**3).sum(), [p])
    )[0].norm(),
    "all parameters": lambda p: nn.utils.get_total_norm([p]),
    "largest gradient": lambda p: p.grad.abs().max(),
    "norm of gradients in a list": lambda p: torch._foreach_mul([p.grad], 2.0)[0].norm(),
    "norm of averages in a list": lambda p: torch._foreach_add_(
        [torch.zeros_like(p.detach())], [p.grad]
    )[0].norm(),
    "norm of scaled columns": lambda p: (p.grad * torch.arange(3.0)).norm(),
    "other names": lambda p: (1 - p.grad.negative().multiply(2)).absolute().sum(),
    "weights that are not zero": lambda p: p.count_nonzero(),
    "smallest gradient as a norm": lambda p: torch.linalg.vector_norm(p.grad, -float("inf")),
    "a large gradient": lambda p: (p.grad > 2).any(),
    "gradients outside of a mask": lambda p: (p.grad * ~(p.grad > 2)).norm(),
    "other signs": lambda p: ((p.grad > 0) ^ (p > 0)).sum(),
    "random signs": lambda p: (p.grad * (1 - 2 * torch.randint_like(p, 0, 2))).norm(),
    "quantized weights": lambda p: torch.fake_quantize_per_tensor_affine(
        p.float(), 0.1, 0, -128, 127
    ).sum(),
}


@on_ranks(2)
@pytest.mark.parametrize("name", REDUCED)
def test_what_would_take_a_part_for_the_whole_is_refused(name: str) -> None:
    (cut, *_), _ = make_parameters()
    with torch.no_grad(), pytest.raises(ValueError, match=r"^[^\n]*part[^\n]*$"):
        REDUCED[name](cut)


@on_ranks(2)
def test_reductions_that_are_right_are_those_of_one_process() -> None:
    (cut, *_), (matrix, *_) = make_parameters()
    torch.nn.init.constant_(cut, 0.5)
    whole = torch.full_like(matrix, 0.5, requires_grad=True)
    rank = dist.get_rank()
    whole.grad = matrix.clone()
    for compute in COMPOSED.values():
        with torch.no_grad():
            torch.testing.assert_close(compute(cut), compute(whole))
    # what one rank finds, all must know
    gradient: Any = cut.grad
    gradient[0, 0] = float("nan") if rank == 1 else 0.0
    assert bool(gradient.isnan().any())
    assert not bool(torch.isfinite(gradient).all())
    whole.grad = None
    # rows are not cut
    with torch.no_grad():
        limited = cut.renorm(2, 0, 0.1).norm(dim=1).detach()
        torch.testing.assert_close(limited, matrix.new_full((2,), 0.1))
    torch.testing.assert_close(cut.norm(dim=1).detach(), matrix.new_full((2,), 0.75).sqrt())
    # what a program prints, and a view of a vector of all gradients
    assert f"{gradient.detach()[1, 1]:.2f}" == f"{gradient.detach().tolist()[1][1]:.2f}"
    cut.grad = torch.cat([matrix.chunk(2)[rank].view(-1)]).view(2, 3)
    vector = cut.grad.view(-1)
    cut.grad = vector.view(2, 3)
    torch.testing.assert_close(cut.grad.norm(), matrix.norm())
    # a penalty on weights, in each rank's loss
    cut.grad = None
    penalties = [tensor.square().sum().sqrt() for tensor in (cut, whole)]
    assert float(penalties[0]) == float(penalties[1])
    torch.autograd.backward(penalties)
    assert cut.grad is not None
    assert whole.grad is not None
    torch.testing.assert_close(cut.grad.detach(), whole.grad.chunk(2)[rank])
    # what is computed with it in a forward pass, and what somebody asked for, are ordinary tensors
    layer = torch.ones(2, 3, dtype=matrix.dtype)
    computed = [layer @ cut.T, nn.functional.linear(layer, cut), cut.detach(), cut.clone()]
    keys = cut.repeat(3, 1)
    computed.append(nn.functional.scaled_dot_product_attention(layer, keys, keys))
    for each in (*computed, copy.deepcopy(cut.grad), cut.grad.as_subclass(Tensor)):
        assert type(each) is Tensor


@on_ranks(2)
def test_a_weight_that_is_divided_by_its_norm_is_refused_in_backward() -> None:
    (cut, *_), (matrix, *_) = make_parameters()
    cut.data.copy_(matrix.chunk(2)[dist.get_rank()])
    normed = cut / cut.square().sum().sqrt()
    outputs = nn.functional.linear(torch.ones(1, 3, dtype=cut.dtype), normed)
    with pytest.raises(ValueError, match="a loss that is alike on all ranks"):
        outputs.square().sum().backward()


@on_ranks(2)
def test_a_hook_gets_a_gradient_whose_norm_is_that_of_all_parts() -> None:
    (cut, *_), (matrix, *_) = make_parameters()
    cut.grad = None
    whole = nn.Parameter(torch.zeros_like(matrix))
    rank = dist.get_rank()
    for parameter, gradient in ((cut, matrix.chunk(2)[rank]), (whole, matrix)):
        parameter.register_hook(lambda gradient: gradient / gradient.norm())
        parameter.register_hook(lambda gradient: gradient.mul_(2))
        (parameter * gradient).sum().backward()
    assert cut.grad is not None
    assert whole.grad is not None
    torch.testing.assert_close(cut.grad.detach(), whole.grad.chunk(2)[rank])


@on_ranks(2)
def test_a_gradient_with_a_graph_can_be_set_to_zero() -> None:
    (cut, *_), _ = make_parameters()
    optimizer = torch.optim.SGD([cut], lr=0.1)
    for read in (lambda: cut.grad, lambda: None):
        optimizer.zero_grad()
        (cut**3).sum().backward(create_graph=True)
        read()
        optimizer.zero_grad(set_to_none=False)
        assert not cut.grad.requires_grad
        assert not cut.grad.count_nonzero()


@on_ranks(2)
def test_a_parameter_made_of_a_gradient_is_copied_as_a_parameter() -> None:
    (cut, *_), _ = make_parameters()
    assert cut.grad is not None
    made = nn.Parameter(cut.grad.clone(), requires_grad=False)
    for parameter in (made, cut):
        copied = copy.deepcopy(parameter)
        assert type(copied) is nn.Parameter
        assert copied.requires_grad == parameter.requires_grad
        assert torch.equal(copied, parameter)


ALONE: dict[str, Callable[[Any], object]] = {
    "sum": lambda p: p.square().sum(),
    "norm": lambda p: nn.utils.clip_grad_norm_([p], 1.0),
    "unscale_": lambda p: torch._amp_foreach_non_finite_check_and_unscale_(
        [p.grad], torch.zeros(1), torch.ones(1)
    ),
}


@on_ranks(2)
@pytest.mark.parametrize("name", ALONE)
def test_a_rank_alone_in_a_collective_of_parts_says_so(name: str) -> None:
    (cut, *_), _ = make_parameters()
    signal = torch.zeros(1)
    if dist.get_rank() == 1:
        dist.recv(signal, 0)
        ALONE[name](cut)
        return

    def show(text: Warning | str, *_: Any) -> None:
        assert f"{name}()" in str(text)
        dist.send(signal, 1)
        signal.fill_(1)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show  # type: ignore[assignment]
        ALONE[name](cut)
    assert signal


@on_ranks(2)
def test_what_is_cut_moves_with_the_dimensions_of_a_square_part() -> None:
    cut = nn.Parameter(torch.ones(3, 3))
    add_layout(cut, Layout(dist.group.WORLD, dim=0))
    with torch.no_grad():
        for turned in (cut.T, cut.mT, cut.t(), cut.transpose(0, 1)):
            with pytest.raises(ValueError, match="part"):
                turned.sum(1)
        with pytest.raises(ValueError, match="part"):
            cut.t_()


@on_ranks(2)
def test_the_norm_of_half_precision_gradients_is_finite_if_that_of_one_process_is() -> None:
    cut = nn.Parameter(torch.zeros(2, 3, dtype=torch.float16))
    add_layout(cut, Layout(dist.group.WORLD, dim=0))
    cut.grad = torch.full_like(cut, 200.0)  # squares do not add up in float16
    whole = nn.Parameter(torch.zeros(4, 3, dtype=torch.float16))
    whole.grad = torch.full_like(whole, 200.0)
    norm, expected = (nn.utils.clip_grad_norm_([each], 1.0) for each in (cut, whole))
    torch.testing.assert_close(norm, expected)
    torch.testing.assert_close(cut.grad.detach(), whole.grad[:2])


ELEMENTWISE: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "AdamW": partial(torch.optim.AdamW, amsgrad=True, maximize=True),
    "RMSprop": partial(torch.optim.RMSprop, centered=True, momentum=0.9),
    "Rprop": torch.optim.Rprop,
    "Adam, foreach": partial(torch.optim.Adam, foreach=True, weight_decay=0.1),
    "SGD, fused": partial(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "Adam, fused": partial(torch.optim.Adam, fused=True, amsgrad=True),
    "AdamW, fused": partial(torch.optim.AdamW, fused=True),
    "Adagrad, fused": partial(torch.optim.Adagrad, fused=True),
}


@on_ranks(2)
@pytest.mark.parametrize("name", ELEMENTWISE)
def test_optimizers_of_single_elements_update_parts(name: str) -> None:
    (cut, *_), (matrix, *_) = make_parameters()
    whole = nn.Parameter(torch.zeros_like(matrix))
    whole.grad = matrix.clone()
    optimizer, of_whole = (ELEMENTWISE[name]([each]) for each in (cut, whole))
    for _ in range(3):
        optimizer.step()
        of_whole.step()
    torch.testing.assert_close(cut.detach(), whole.data.chunk(2)[dist.get_rank()])
    # States are loaded where there are no ranks.
    saved = io.BytesIO()
    torch.save(copy.deepcopy(optimizer.state_dict()), saved)
    saved.seek(0)
    for value in torch.load(saved)["state"][0].values():
        assert type(value) is Tensor


@on_ranks(2)
@pytest.mark.parametrize(("index", "calls"), [(0, False), (1, True), (2, True)])
def test_overflow(index: int, calls: bool) -> None:
    """An overflow on one rank makes all skip; torch alone sees it in cut gradients only."""
    assert not any_rank_overflowed(make_parameters()[0])
    parameters, _ = make_parameters()
    before = copy.deepcopy(parameters)
    optimizer = torch.optim.SGD(parameters, lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale(torch.ones(()))
    grad: Any = parameters[index].grad
    if dist.get_rank() == 1:
        grad.view(-1)[2] = float("nan")
    assert not calls or any_rank_overflowed(parameters)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 512
    assert all(map(torch.equal, before, parameters))


@on_ranks(2)
def test_seeds() -> None:
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
