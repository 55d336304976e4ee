"""NCCL without a GPU: in which order streams wait, and collectives and layers run."""

from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labkit.parallel import overlap
from labkit.parallel.data_parallel import BucketedDDP
from labkit.parallel.launch import run_ranks
from labkit.parallel.sharding import FSDP, gather
from labkit.parallel.transport import make_separate_transport
from tests.rehearsal.pretended_cuda import Stream, pretended_gpu

COLLECTIVES = {
    "all-gather": (gather, "all_gather_single"),
    "reduce-scatter": (gather, "reduce_scatter_single"),
    "all-reduce": (dist, "all_reduce"),
}
FSDP_STEP = """
side after compute: all-gather 1
side after compute: all-gather 2
compute waits for all-gather 1
compute: forward of 0
compute waits for all-gather 2
compute: forward of 1
side after compute: all-gather 3
side after compute: all-gather 4
compute waits for all-gather 3
side after compute: reduce-scatter 5
side reads (3, 4)
side reads (3,)
compute waits for all-gather 4
compute waits for reduce-scatter 5
side after compute: reduce-scatter 6
side reads (4, 3)
side reads (4,)
compute waits for reduce-scatter 6
"""
DDP_STEP = """
compute: forward of 0
compute: forward of 1
compute: all-reduce 1
compute: all-reduce 2
"""


def _make_transport(group, device, _):
    transport = make_separate_transport(group, torch.device("cpu"), "point_to_point")
    transport.collective_group = dist.group.WORLD  # as over NCCL
    return transport


def _log_step(wrap):
    """Return what the second step of a model of two layers does."""
    number = 0

    def logged(name, collective):
        def call(*args, **options):
            nonlocal number
            # A flag or two by which ranks agree travel between CPUs.
            if args[0].is_floating_point():
                number += 1
                Stream.current().run(f"{name} {number}")
            return collective(*args, **options)

        return call

    with pretended_gpu(), ExitStack() as patches:
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)).to("cuda")
        patches.enter_context(
            mock.patch.object(overlap, "make_separate_transport", _make_transport)
        )
        for name, (module, function) in COLLECTIVES.items():
            call = logged(name, getattr(module, function))
            patches.enter_context(mock.patch.object(module, function, call))
        wrapper = wrap(model)
        for index, layer in enumerate(model):
            layer.register_forward_hook(
                lambda *_, index=index: Stream.current().run(f"forward of {index}")
            )
        for _ in range(2):
            Stream.log.clear()
            number = 0
            wrapper(torch.ones(2, 3, device="cuda")).sum().backward()
    return "\n".join(Stream.log)


def _fsdp(model):
    return FSDP(model, units=[*model])


def _ddp(model):
    return BucketedDDP(model, all_reduce="auto", bucket_mb=5e-5, first_bucket_mb=5e-5)


@pytest.mark.parametrize(("wrap", "expected"), [(_fsdp, FSDP_STEP), (_ddp, DDP_STEP)])
def test_a_step_over_nccl(wrap, expected):
    """A layer is gathered while the one before computes, and its gradients are added up while the
    next one's are computed; no memory is released that the other stream still reads."""
    first, second = run_ranks(_log_step, wrap, world_size=2)
    assert first == second == expected.strip()
