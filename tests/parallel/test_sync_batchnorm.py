"""SyncBatchNorm on several ranks is BatchNorm on the whole batch; what it costs; what it refuses;
conversion."""

import copy
import pickle
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from labkit.bench.memory import saved_for_backward
from labkit.parallel.launch import run_ranks
from labkit.parallel.prepare import FLOAT_TYPES
from labkit.parallel.sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm
from tests.parallel.shared_ranks import on_ranks
from tests.parallel.sync_batchnorm_cases import CASES, collectives_of, errors_on_rank, grid, torchs


@on_ranks(2, slow=(1, 4))
def test_equals_batchnorm_on_the_whole_batch():
    p = dist.get_world_size()
    quantities = {"output", "dx", "d_weight", "d_bias", "running_mean", "running_var"}
    for name, case in (grid(p) | (CASES if p > 1 else {})).items():  # alone it is plain batch norm
        found = errors_on_rank(case)
        assert name in CASES or quantities < found.keys()
        shaped, rest = case.tolerances
        for quantity, error in found.items():
            assert error <= (shaped if quantity in ("output", "dx") else rest), (name, quantity)


@on_ranks(2)
def test_collectives():
    """One collective forward and one backward."""
    x = torch.randn(4, 3, requires_grad=dist.get_rank() < 9)
    layer = SyncBatchNorm(3)
    layer(x.detach())  # the first one finds out how the ranks exchange memory
    output, forward = collectives_of(lambda: layer(x))
    _, backward = collectives_of(lambda: output.sum().backward())
    _, empty_forward = collectives_of(lambda: layer(x[: 4 * dist.get_rank()]))
    constant, _ = collectives_of(lambda: layer(x.detach()))
    _, without_input = collectives_of(lambda: constant.square().sum().backward())
    _, evaluated = collectives_of(lambda: layer.eval()(x))
    _, control = collectives_of(dist.barrier)
    assert control == ["barrier"]
    assert forward == empty_forward == backward == ["1 message"]
    assert without_input == evaluated == []


@on_ranks(2)
def test_saved():
    """Saved are references to input and weight, and a few numbers a feature."""
    inputs = [torch.randn(64, 8, 4, dtype=dtype, requires_grad=True) for dtype in FLOAT_TYPES]
    for x in (*inputs, torch.randn(64, 8, 4, requires_grad=True).transpose(0, 2)):
        layer = SyncBatchNorm(x.shape[1])
        _, saved = saved_for_backward(lambda x=x, layer=layer: layer(x))
        by_reference = {each.untyped_storage().data_ptr() for each in (x, layer.weight)}
        other = [n for address, n in saved.items() if address not in by_reference]
        assert len(other) == len(saved) - 2
        assert sum(other) <= 4 * 8 * max(x.itemsize, 4)  # 4C numbers


@on_ranks(2)
def test_a_selective_checkpoint_keeps_nothing_of_what_ranks_exchange():
    """Which it would refuse: the next message overwrites it."""
    keep_all = partial(create_selective_checkpoint_contexts, lambda *_, **__: True)
    layer = nn.Sequential(nn.Linear(3, 3), SyncBatchNorm(3))
    x = torch.randn(4, 3)
    weight = layer[0].weight
    (expected,) = torch.autograd.grad(layer(x).pow(3).sum(), weight)
    output = checkpoint(layer, x, use_reentrant=False, context_fn=keep_all)
    (actual,) = torch.autograd.grad(output.pow(3).sum(), weight)
    assert torch.equal(actual, expected)


@on_ranks(2)
def test_refusals():
    """Copies of a group, less than two values a channel, on all ranks, second derivatives, and
    weights that change."""
    layer = SyncBatchNorm(2, process_group=dist.group.WORLD)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="process_group is tied to its ranks"):
            copied(layer)
    layer = SyncBatchNorm(3)
    for rows in ((1, 0), (0, 0)):
        few = f"^expected more than one value per channel in training, got {rows[0]} on all ranks$"
        with pytest.raises(ValueError, match=few):
            layer(torch.randn(rows[dist.get_rank()], 3))
    assert (int(layer.num_batches_tracked), float(layer.running_var.sum())) == (0, 3)
    assert layer(torch.full((2, 3), 0.1)).abs().max() < 1e-5
    x = torch.randn(2, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(layer(x).sum(), x, create_graph=True)
    output = layer(x)
    with torch.no_grad():
        layer.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
    huge = torch.full((4 * dist.get_rank(), 3), 1e37, requires_grad=True)  # none on rank 0
    layer(huge).sum().backward()
    assert not torch.cat([huge.grad, layer.weight.grad[None]]).isnan().any()


@on_ranks(4)
def test_groups():
    """Ranks 0 and 1 share a batch, 2 and 3 another; a rank that calls a layer that is not its own
    is refused."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    pair, place = divmod(dist.get_rank(), 2)
    generators = [torch.Generator().manual_seed(2 * pair + other) for other in (0, 1)]
    inputs = [
        torch.randn(3, 5, generator=generator, dtype=torch.float64) for generator in generators
    ]
    own = SyncBatchNorm(5, momentum=1.0, process_group=groups[pair], dtype=torch.float64)
    results = []
    for layer, batch in (
        (own, inputs[place]),
        (nn.BatchNorm1d(5, dtype=torch.float64), torch.cat(inputs)),
    ):
        x = batch.clone().requires_grad_()
        output = layer(x)
        (output * torch.arange(1.0, 6.0).cumsum(0) * (batch > 0)).sum().backward()
        results.append(torch.stack([output.detach(), x.grad]))
    torch.testing.assert_close(results[0], results[1].split(3, dim=1)[place], rtol=0, atol=1e-10)
    with pytest.raises(ValueError, match="a process group that this rank belongs to"):
        SyncBatchNorm(5, process_group=groups[1 - pair], dtype=torch.float64)(inputs[0])


@pytest.mark.parametrize(
    ("x", "words"),
    [
        (torch.zeros(3), r"expected an input of shape \(batch, 3, ...\), got \(3,\)"),
        (torch.zeros(4, 2), r"expected an input of shape \(batch, 3, ...\), got \(4, 2\)"),
        (torch.zeros(4, 3, dtype=torch.int64), "expected a floating-point input, got torch.int64"),
        (torch.zeros(1, 3), "Expected more than 1 value per channel"),
    ],
)
def test_input_that_does_not_fit_is_refused(x, words):
    with pytest.raises(ValueError, match=words):
        SyncBatchNorm(3)(x)


def test_without_ranks_it_is_plain_batchnorm():
    x = torch.randn(4, 3, 5)
    for options in (
        {},
        {"momentum": None},
        {"affine": False},
        {"track_running_stats": False},
        {"bias": False},
    ):
        plain = torchs(nn.BatchNorm1d, 3, **options)
        own = SyncBatchNorm(3, **options)
        assert torch.equal(own(x), plain(x))
        assert torch.equal(own.eval()(x), plain.eval()(x))
        assert {k: v.tolist() for k, v in own.state_dict().items()} == {
            k: v.tolist() for k, v in plain.state_dict().items()
        }


def _model():
    shared = nn.BatchNorm1d(4)
    return nn.Sequential(
        nn.Linear(4, 4),
        nn.BatchNorm1d(4, eps=0.1, momentum=None, dtype=torch.float64).eval(),
        nn.ModuleDict(
            {
                "2d": nn.BatchNorm2d(3, affine=False),
                "3d": nn.BatchNorm3d(3, track_running_stats=False),
            }
        ),
        nn.SyncBatchNorm(5, momentum=0.3),
        shared,
        nn.Sequential(shared, torchs(nn.BatchNorm2d, 2, bias=False).requires_grad_(False)),
    )


def test_conversion_keeps_tensors_options_and_names():
    model = _model()
    before = {"parameters": dict(model.named_parameters()), "buffers": dict(model.named_buffers())}
    layers = {
        name: layer
        for name, layer in model.named_modules(remove_duplicate=False)
        if hasattr(layer, "eps")
    }
    converted = convert_sync_batchnorm(model)
    assert converted is model
    assert len(layers) == 7
    for name, old in layers.items():
        new = converted.get_submodule(name)
        assert type(new) is SyncBatchNorm
        assert new.extra_repr() == old.extra_repr()
        assert new.training == old.training
    assert converted[4] is converted[5][0], "a shared layer stays one"
    for kind, found in before.items():
        after = dict(getattr(converted, f"named_{kind}")())
        assert after.keys() == found.keys()
        assert all(after[name] is tensor for name, tensor in found.items())


def test_conversion_of_a_layer_of_an_own_one_and_of_a_lazy_one():
    layer = nn.BatchNorm2d(3)
    calls = list[int]()
    layer.register_forward_hook(lambda *_: calls.append(1))
    converted = convert_sync_batchnorm(layer)
    assert converted is layer
    assert type(converted) is SyncBatchNorm
    converted(torch.randn(4, 3, 2, 2))
    assert calls == [1], "hooks stay"
    assert copy.deepcopy(convert_sync_batchnorm(converted)).num_features == 3


class _Activated(nn.BatchNorm1d):
    def forward(self, x):
        return super().forward(x).relu()


def _patched():
    layer = nn.BatchNorm1d(2)
    layer.forward = lambda x: x
    return layer


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (nn.LazyBatchNorm1d, "run a batch through LazyBatchNorm1d"),
        (lambda: _Activated(2), "_Activated has another"),
        (_patched, "BatchNorm1d has another"),
        (lambda: prune.identity(nn.BatchNorm1d(2), "weight"), "pruned or parametrized"),
        (lambda: prune.identity(nn.BatchNorm1d(2), "bias"), "pruned or parametrized"),
        (
            lambda: nn.utils.parametrizations.weight_norm(nn.BatchNorm1d(2), dim=None),
            "pruned or parametrized",
        ),
    ],
)
def test_layers_that_the_new_one_would_not_equal_are_refused_and_nothing_is_changed(build, message):
    model = nn.Sequential(nn.BatchNorm1d(2), build())
    with pytest.raises(ValueError, match=message):
        convert_sync_batchnorm(model)
    assert type(model[0]) is nn.BatchNorm1d


def _compiled():
    """A compiled model, whose first forward pass has the first collective of the process, and an
    uncompiled one."""
    rank = dist.get_rank()
    results = []
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(rank))
    for wrap in (lambda model: torch.compile(model, backend="eager"), lambda model: model):
        torch.manual_seed(0)
        model = wrap(nn.Sequential(nn.Linear(4, 4), SyncBatchNorm(4), nn.Linear(4, 4)))
        outputs = model(x)
        outputs.square().sum().backward()
        results.append(
            [outputs.flatten().tolist(), [p.grad.flatten().tolist() for p in model.parameters()]]
        )
    return results


@pytest.mark.slow
def test_a_compiled_model_may_begin_with_the_first_collective_of_the_process():
    for compiled, uncompiled in run_ranks(_compiled, world_size=2, timeout_s=100):
        assert compiled == uncompiled
