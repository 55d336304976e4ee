"""A rank that fails in a pass, catches its error and goes on: the others do not wait for it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.costs.transformer import SIZES
from labkit.nn.transformer import Transformer, language_model_loss
from labkit.parallel.context import context_parallel, split_sequence
from labkit.parallel.data_parallel import BucketedDDP, NaiveDDP
from labkit.parallel.failures import GroupOver
from labkit.parallel.sharding import FSDP
from labkit.parallel.tensor import tensor_parallel
from tests.parallel.shared_ranks import on_ranks

Step = Callable[[], None]


def _tensor(group: dist.ProcessGroup, transport: str) -> tuple[Step, nn.Module]:
    model = tensor_parallel(_transformer(), group, transport=transport)
    tokens = torch.arange(128).view(2, 64)
    return lambda: model(tokens, tokens).backward(), model.module.layers[0]


def _context(group: dist.ProcessGroup, transport: str) -> tuple[Step, nn.Module]:
    model = context_parallel(_transformer(), group, transport=transport)
    tokens = split_sequence(torch.arange(128).view(2, 64), 1, group=group)
    return lambda: language_model_loss(model(tokens), tokens).backward(), model.layers[1]


def _wrapper(wrap: type, group: dist.ProcessGroup, transport: str) -> tuple[Step, nn.Module]:
    model = wrap(_layers(), group=group, all_reduce=transport)
    return lambda: model(torch.ones(4, 8)).sum().backward(), model.module[1]


def _fsdp(group: dist.ProcessGroup, transport: str) -> tuple[Step, nn.Module]:
    model = FSDP(_layers(), group=group, transport=transport)
    return lambda: model(torch.ones(4, 8)).sum().backward(), model.module[1]


def _transformer() -> Transformer:
    return Transformer(SIZES["nano"], context_length=64)


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))


PARTS = {
    "tensor": _tensor,
    "context": _context,
    "naive": partial(_wrapper, NaiveDDP),
    "bucketed": partial(_wrapper, BucketedDDP),
    "fsdp": _fsdp,
}
CASES = [
    ("tensor", "torch", "backward"),
    ("tensor", "point_to_point", "forward"),
    ("tensor", "shared", "backward"),
    ("context", "point_to_point", "backward"),
    ("context", "shared", "forward"),
    ("naive", "torch", "backward"),
    ("bucketed", "point_to_point", "forward"),
    ("bucketed", "shared", "backward"),
    ("fsdp", "point_to_point", "backward"),
    ("fsdp", "shared", "forward"),
]


def _fail_in(layer: nn.Module, direction: str, ranks: list[int]) -> None:
    """Let a layer fail on some ranks, once in its forward or backward pass."""

    def fail(*_: object) -> None:
        handle.remove()
        if dist.get_rank() in ranks:
            raise ZeroDivisionError("by a user")

    def hook_output(_: nn.Module, __: object, output: Tensor) -> None:
        handle.remove()
        output.register_hook(fail)

    handle = layer.register_forward_hook(fail if direction == "forward" else hook_output)


@on_ranks(2)
@pytest.mark.parametrize(("part", "transport", "direction"), CASES)
def test_a_rank_that_fails_alone_ends_its_group(part: str, transport: str, direction: str) -> None:
    step, layer = PARTS[part](dist.new_group(), transport)
    step()
    _fail_in(layer, direction, [0, 1])
    with pytest.raises(ZeroDivisionError):
        step()
    step()  # all have failed, so all go on
    _fail_in(layer, direction, [0])
    with pytest.raises(GroupOver if dist.get_rank() else ZeroDivisionError) as caught:
        step()
    with pytest.raises(GroupOver):
        step()
    assert dist.get_rank() == 0 or "rank 0: " in str(caught.value)
