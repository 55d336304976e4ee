"""Torch's own tests of DistributedDataParallel and SyncBatchNorm, read from the installed torch, on
labkit's parts.

`make torch-tests` runs them; nothing of torch's is copied. Tests that labkit refuses or leaves out
are in the table of docs/torch-tests.md, with the reason; they must fail. Tests for GPUs run on the
CPU.
"""

import inspect
import os
import re
import sys
import tempfile
import types
import unittest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from labkit.parallel.data_parallel import BucketedDDP
from labkit.parallel.sync_batchnorm import SyncBatchNorm, convert_sync_batchnorm

os.environ |= {"BACKEND": "gloo", "WORLD_SIZE": "2", "TEMP_DIR": tempfile.gettempdir()}
# torch's tests derive from a class of it; these need nothing else of it
if "expecttest" not in sys.modules:
    sys.modules["expecttest"] = types.ModuleType("expecttest")
    sys.modules["expecttest"].TestCase = unittest.TestCase  # type: ignore[attr-defined]

from torch.testing._internal.distributed import distributed_test

TORCHS = distributed_test.DistributedTest._DistTestBase
WORDS = ("ddp", "DDP", "DistributedDataParallel", "SyncBatchNorm")
TESTS = sorted(
    name
    for name in dir(TORCHS)
    if name.startswith("test_")
    and any(word in name + inspect.getsource(getattr(TORCHS, name)) for word in WORDS)
)
TABLE = Path(__file__).parents[2] / "docs" / "torch-tests.md"
LEFT_OUT = set(re.findall(r"`(test_\w+)`", TABLE.read_text()))


class Wrapper(BucketedDDP):
    """BucketedDDP, saved and loaded as torch's tests do: the module, which is then wrapped
    again."""

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        static_graph: bool = False,  # a promise, with which parameters may be unused
        forward_sync_buffers: bool = True,  # of torch 2.13, for broadcast_buffers
        **options: Any,
    ):
        super().__init__(
            module,
            find_unused=static_graph,
            **{"broadcast_buffers": forward_sync_buffers, **options},
        )
        self.forward_sync_buffers = self.broadcast_buffers
        self.process_group = self.join_process_group
        self.broadcast_bucket_size = 2**28

    def __reduce_ex__(self, protocol: Any) -> Any:
        return type(self), (self.module,)


class Norm(SyncBatchNorm):
    """SyncBatchNorm with torch's way to convert."""

    convert_sync_batchnorm = staticmethod(convert_sync_batchnorm)


class OnCPU(TorchFunctionMode):
    """Devices that tests for GPUs name, by number or as "cuda", are the CPU."""

    def __torch_function__(
        self, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        at = {torch.Tensor.to: 1, torch.device: 0}.get(function)
        moved = [_on_cpu(value, number == at) for number, value in enumerate(args)]
        named = {name: _on_cpu(value, name == "device") for name, value in (kwargs or {}).items()}
        return args[0] if function is torch.Tensor.cuda else function(*moved, **named)


def _on_cpu(value: Any, is_device: bool) -> Any:
    is_number = is_device and type(value) is int
    is_name = str(value).startswith("cuda") if isinstance(value, str | torch.device) else False
    return torch.device("cpu") if is_number or is_name else value


def _put_labkit_in_place() -> None:
    """Let torch's tests, in this process, find labkit's classes, and the CPU where they name
    GPUs."""
    distributed_test.DistributedDataParallel = Wrapper
    nn.parallel.DistributedDataParallel = Wrapper  # type: ignore[misc]
    nn.SyncBatchNorm = Norm  # type: ignore[misc]
    move = nn.Module.to
    nn.Module.cuda = lambda self, device=None: self  # type: ignore[method-assign, assignment]
    nn.Module.to = lambda self, *args, **options: move(  # type: ignore[method-assign, assignment]
        self, *(_on_cpu(value, True) for value in args), **options
    )
    for name in ("set_device", "synchronize", "manual_seed", "manual_seed_all"):
        setattr(torch.cuda, name, lambda *args, **options: None)
    torch.cuda.current_device = lambda: 0
    torch.cuda.device_count = lambda: 2
    torch.set_num_threads(1)


class Ranks(distributed_test.TestDistBackend, TORCHS):  # type: ignore[misc, valid-type]
    """Ranks that are forked. Tests run without the decorators that skip them for want of GPUs."""

    __test__ = False

    def setUp(self) -> None:
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)

    @classmethod
    def _run(cls, rank: int, test_name: str, *args: Any, **options: Any) -> None:
        _put_labkit_in_place()
        setattr(cls, test_name, inspect.unwrap(getattr(cls, test_name)))
        with OnCPU():
            super()._run(rank, test_name, *args, **options)


@pytest.mark.parametrize("name", TESTS)
def test_torchs(name: str) -> None:
    result = unittest.TestResult()
    Ranks(name).run(result)
    if result.skipped:
        pytest.skip(result.skipped[0][1])  # torch's own list of tests that fail anywhere
    errors = [text for _, text in result.failures + result.errors]
    if name in LEFT_OUT:
        assert errors, f"{name} passes: take it out of {TABLE.name}"
    else:
        assert not errors, errors[0]


def test_the_table_names_tests_that_there_are() -> None:
    assert set(TESTS) >= LEFT_OUT
