"""SyncBatchNorm on several ranks is BatchNorm on the whole batch; what it costs; what it refuses; conversion."""

import copy
import pickle
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import prune

from labkit.bench.memory import saved_for_backward
from labkit.parallel.launch import run_ranks
from labkit.parallel.sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm
from tests.cases import thinned
from tests.parallel.sync_batchnorm_cases import CASES, collectives_of, errors, grid, torchs


@cache
def _errors(world_size):
    cases = grid(world_size) | (CASES if world_size > 1 else {})
    return cases, run_ranks(errors, cases, world_size=world_size, timeout_s=60)


@pytest.mark.parametrize("name", grid(1) | CASES)
@pytest.mark.parametrize("world_size", thinned([1, 2, 4], lambda world_size: world_size < 4))
def test_equals_batchnorm_on_the_whole_batch(world_size, name):
    if world_size == 1 and name in CASES:
        pytest.skip("alone it is plain batch norm")
    cases, ranks = _errors(world_size)
    for rank in ranks:
        found = rank[name]
        if name not in CASES:
            assert {"output", "dx", "d_weight", "d_bias", "running_mean", "running_var"} < found.keys()
        shaped, rest = cases[name].tolerances
        for quantity, error in found.items():
            assert error <= (shaped if quantity in ("output", "dx") else rest), quantity


def _collectives():
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
    return {
        "forward": forward,
        "backward": backward,
        "forward, one batch empty": empty_forward,
        "backward, only the parameters": without_input,
        "evaluation": evaluated,
        "control": control,
    }


def test_one_collective_forward_and_one_backward():
    for seen in run_ranks(_collectives, world_size=2, timeout_s=60):
        assert seen["control"] == ["barrier"]
        assert seen["forward"] == seen["forward, one batch empty"] == seen["backward"] == ["1 message"]
        assert seen["backward, only the parameters"] == seen["evaluation"] == []


def _saved():
    found = {}
    for name, x in {
        "float32": torch.randn(64, 8, 4, requires_grad=True),
        "bfloat16": torch.randn(64, 8, 4).bfloat16().requires_grad_(),
        "strided": torch.randn(64, 8, 4, requires_grad=True).transpose(0, 2),
    }.items():
        _, saved = saved_for_backward(lambda x=x: SyncBatchNorm(x.shape[1])(x))
        other = [n for address, n in saved.items() if address != x.untyped_storage().data_ptr()]
        found[name] = {"saved": len(saved), "other": sum(other), "others": len(other)}
    return found


def test_saves_the_input_and_a_few_numbers_a_feature():
    for rank in run_ranks(_saved, world_size=2, timeout_s=60):
        for found in rank.values():
            assert found["others"] == found["saved"] - 1, "the input itself, by reference"
            assert found["other"] <= 4 * 8 * 4 + 8  # 4C numbers and the count


def _kept_group():
    layer = SyncBatchNorm(2, process_group=dist.group.WORLD)
    with pytest.raises(TypeError, match="process_group is tied to its ranks"):
        copy.deepcopy(layer)
    with pytest.raises(TypeError, match="process_group is tied to its ranks"):
        pickle.dumps(layer)
    first = SyncBatchNorm(2)
    (gradient,) = torch.autograd.grad(
        first(x := torch.randn(4, 2, requires_grad=True)).square().sum(), x, create_graph=True
    )
    return gradient.requires_grad and not torch.isnan(gradient).any()


def test_a_process_group_is_not_copied_and_a_graph_of_gradients_is_made():
    assert run_ranks(_kept_group, world_size=2, timeout_s=60) == [True, True]


def _in_groups():
    """Ranks 0 and 1 share a batch, 2 and 3 another; then a rank calls a layer that is not its own."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    rank = dist.get_rank()
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(rank), dtype=torch.float64)
    layer = SyncBatchNorm(5, momentum=1.0, process_group=groups[rank // 2], dtype=torch.float64)
    x.requires_grad_()
    output = layer(x)
    (output * torch.arange(1.0, 6.0).cumsum(0) * (x.detach() > 0)).sum().backward()
    try:
        SyncBatchNorm(5, process_group=groups[1 - rank // 2], dtype=torch.float64)(x)
    except ValueError as error:
        return output.tolist(), x.grad.tolist(), str(error)


def test_a_group_shares_a_batch_of_its_own():
    ranks = run_ranks(_in_groups, world_size=4, timeout_s=60)
    for pair in (0, 2):
        generators = [torch.Generator().manual_seed(rank) for rank in (pair, pair + 1)]
        x = torch.cat([torch.randn(3, 5, generator=g, dtype=torch.float64) for g in generators]).requires_grad_()
        output = nn.BatchNorm1d(5, dtype=torch.float64)(x)
        (output * torch.arange(1.0, 6.0).cumsum(0) * (x.detach() > 0)).sum().backward()
        got = torch.tensor([ranks[pair][:2], ranks[pair + 1][:2]], dtype=torch.float64)
        torch.testing.assert_close(got[:, 0].flatten(0, 1), output, rtol=0, atol=1e-10)
        torch.testing.assert_close(got[:, 1].flatten(0, 1), x.grad, rtol=0, atol=1e-10)
    assert all("this rank is not one of them" in error for _, _, error in ranks)


def _too_small():
    layer, told = SyncBatchNorm(3), []
    for rows in ((1, 0), (0, 0)):
        try:
            layer(torch.randn(rows[dist.get_rank()], 3))
        except ValueError as error:
            told.append(str(error))
    unchanged = int(layer.num_batches_tracked) == 0 and float(layer.running_var.sum()) == 3
    constant = layer(torch.full((2, 3), 0.1)).abs().max()
    again = torch.randn(2, 3, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(again).square().sum(), again, create_graph=True)
    try:
        gradient.sum().backward()
    except RuntimeError as error:
        told.append(str(error))
    return told, unchanged, float(constant)


def test_less_than_two_values_a_channel_are_refused_on_every_rank():
    for told, unchanged, constant in run_ranks(_too_small, world_size=2, timeout_s=60):
        for values, message in zip((1, 0), told, strict=False):
            assert message == f"expected more than one value per channel in training, got {values} on all ranks"
        assert unchanged
        assert constant < 1e-5
        assert "no second derivative" in told[2]


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
    for options in ({}, {"momentum": None}, {"affine": False}, {"track_running_stats": False}, {"bias": False}):
        plain, own = torchs(nn.BatchNorm1d, 3, **options), SyncBatchNorm(3, **options)
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
        nn.ModuleDict({"2d": nn.BatchNorm2d(3, affine=False), "3d": nn.BatchNorm3d(3, track_running_stats=False)}),
        nn.SyncBatchNorm(5, momentum=0.3),
        shared,
        nn.Sequential(shared, torchs(nn.BatchNorm2d, 2, bias=False).requires_grad_(False)),
    )


def test_conversion_keeps_tensors_options_and_names():
    model = _model()
    before = {"parameters": dict(model.named_parameters()), "buffers": dict(model.named_buffers())}
    layers = {name: layer for name, layer in model.named_modules(remove_duplicate=False) if hasattr(layer, "eps")}
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
    layer, calls = nn.BatchNorm2d(3), list[int]()
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
        (lambda: nn.utils.parametrizations.weight_norm(nn.BatchNorm1d(2), dim=None), "pruned or parametrized"),
    ],
)
def test_layers_that_the_new_one_would_not_equal_are_refused_and_nothing_is_changed(build, message):
    model = nn.Sequential(nn.BatchNorm1d(2), build())
    with pytest.raises(ValueError, match=message):
        convert_sync_batchnorm(model)
    assert type(model[0]) is nn.BatchNorm1d


def _compiled():
    """A compiled model, whose first forward pass has the first collective of the process, and an uncompiled one."""
    rank, results = dist.get_rank(), []
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(rank))
    for wrap in (lambda model: torch.compile(model, backend="eager"), lambda model: model):
        torch.manual_seed(0)
        model = wrap(nn.Sequential(nn.Linear(4, 4), SyncBatchNorm(4), nn.Linear(4, 4)))
        outputs = model(x)
        outputs.square().sum().backward()
        results.append([outputs.flatten().tolist(), [p.grad.flatten().tolist() for p in model.parameters()]])
    return results


@pytest.mark.slow
def test_a_compiled_model_may_begin_with_the_first_collective_of_the_process():
    for compiled, uncompiled in run_ranks(_compiled, world_size=2, timeout_s=100):
        assert compiled == uncompiled
