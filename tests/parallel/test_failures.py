"""A rank that fails in a pass, catches its error and goes on: the others do not wait for it."""

from __future__ import annotations

import inspect
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.costs.transformer import SIZES
from labkit.nn.transformer import Transformer, language_model_loss
from labkit.parallel.context import context_parallel, split_sequence
from labkit.parallel.data_parallel import BucketedDDP, NaiveDDP
from labkit.parallel.failures import GroupOver, explain_failure, report_failure
from labkit.parallel.sharding import FSDP
from labkit.parallel.tensor import tensor_parallel
from labkit.parallel.transport import abort
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
    ("tensor", "point_to_point", "forward"),
    ("tensor", "shared", "backward"),
    ("context", "point_to_point", "backward"),
    ("naive", "torch", "backward"),
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
    with mock.patch("labkit.parallel.failures.NAPS", 10):
        with pytest.raises(GroupOver if dist.get_rank() else ZeroDivisionError) as caught:
            step()
        with pytest.raises(GroupOver):
            step()
    if dist.get_rank() == 1:
        assert "rank 0: " in str(caught.value)
        if direction == "forward":  # a user's line; of backward passes autograd gives none
            assert "by a user, at test_failures.py:" in str(caught.value)


@on_ranks(2)
@pytest.mark.parametrize("wrap", [NaiveDDP, BucketedDDP])
def test_a_parameter_that_is_new_on_one_rank_alone_ends_its_group(wrap: type) -> None:
    model = wrap(_layers(), group=dist.new_group())
    if dist.get_rank() == 0:
        nn.utils.parametrizations.weight_norm(model.module[0])
    with mock.patch("labkit.parallel.failures.NAPS", 10):
        expected = GroupOver if dist.get_rank() else RuntimeError
        with pytest.raises(expected, match="was added, replaced or unfrozen"):
            model(torch.ones(4, 8)).sum().backward()


@on_ranks(2)
def test_an_evaluation_that_fails_on_one_rank_ends_nothing() -> None:
    """No rank waits for it: a forward pass of data parallelism without gradients sends nothing."""
    model = NaiveDDP(_layers(), group=dist.new_group())
    outputs = model(torch.ones(4, 8))
    if dist.get_rank() == 0:
        with torch.no_grad(), pytest.raises(RuntimeError, match="shapes"):
            model(torch.ones(4, 9))
    outputs.sum().backward()
    model(torch.ones(4, 8)).sum().backward()


class _Pair(dist.ProcessGroup):
    """A group of two ranks that has a store, and no connections."""

    def __init__(self, store: dist.Store) -> None:
        super().__init__(0, 2)
        self._store = store

    def get_group_store(self) -> dist.Store:
        return self._store


@on_ranks(2)
def test_a_group_that_another_rank_has_left_is_left_without_an_error() -> None:
    group = dist.new_group()
    dist.all_reduce(torch.ones(1), group=group)
    if dist.get_rank() == 0:
        abort(group)
    dist.barrier()
    abort(group)


def _stores() -> tuple[dist.TCPStore, dist.TCPStore]:
    """Return a store, with its server, and another connection to it."""
    timeout = timedelta(seconds=60)
    server = dist.TCPStore("127.0.0.1", 0, None, True, timeout, wait_for_workers=False)
    return server, dist.TCPStore("127.0.0.1", server.port, None, False, timeout)


def _read_end(store: dist.Store) -> None:
    """Raise why the group of a store is over, once it is."""
    for _ in range(400):
        explain_failure(None, store)
        time.sleep(0.05)


def test_a_rank_that_waits_for_a_new_group_ends_the_old_one() -> None:
    """Otherwise the others wait in the old group, and it waits for them, by the same connection."""
    server, client = _stores()
    waiter = threading.Thread(target=client.wait, args=(["the others have come"],), daemon=True)
    waiter.start()
    with mock.patch("labkit.parallel.failures.NAPS", 1):
        report_failure(ZeroDivisionError("by a user"), _Pair(client))
        with pytest.raises(GroupOver, match="rank 0: ZeroDivisionError: by a user"):
            _read_end(server)
    server.set("the others have come", "")
    waiter.join()


def test_a_store_that_is_gone_hides_no_error() -> None:
    server, client = _stores()
    del server
    explain_failure(RuntimeError("connection closed by peer"), client)


PROGRAM = f"""
from datetime import timedelta
import torch.distributed as dist
from labkit.parallel.failures import report_failure

{inspect.getsource(_Pair)}
{inspect.getsource(_stores)}
server, client = _stores()
report_failure(ZeroDivisionError("by a user"), _Pair(client))
"""


def test_a_program_may_end_right_after_a_failure() -> None:
    end = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert (end.returncode, end.stderr) == (0, "")
