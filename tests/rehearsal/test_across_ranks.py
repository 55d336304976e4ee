"""Trainings across ranks on GPUs that are not here: the order in which streams wait and collectives
run over NCCL, and which values the CPU reads, for which it waits until all is computed."""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn

from labkit.costs.transformer import TransformerShape
from labkit.nn.transformer import Transformer
from labkit.parallel import overlap
from labkit.parallel.context import context_parallel, mean_loss
from labkit.parallel.data_parallel import BucketedDDP
from labkit.parallel.pipeline import Pipeline
from labkit.parallel.sharding import FSDP, gather
from labkit.parallel.tensor import tensor_parallel
from tests.parallel.sharding_cases import transport_by_backend
from tests.parallel.shared_ranks import on_ranks
from tests.rehearsal import pretended_cuda
from tests.rehearsal.pretended_cuda import Stream, current_stream, pretended_gpu

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


def _fsdp(model):
    return FSDP(model, units=[*model])


def _ddp(model):
    return BucketedDDP(model, all_reduce="auto", bucket_mb=5e-5, first_bucket_mb=5e-5)


def _logged(name, collective, numbers):
    def call(*args, **options):
        # A flag or two by which ranks agree travel between CPUs.
        if args[0].is_floating_point():
            current_stream().run(f"{name} {next(numbers)}")
        return collective(*args, **options)

    return call


@on_ranks(2)
@pytest.mark.parametrize(("wrap", "expected"), [(_fsdp, FSDP_STEP), (_ddp, DDP_STEP)])
def test_a_step_over_nccl(wrap, expected):
    """A layer is gathered while the one before computes, and its gradients are added up while the
    next one's are computed; no memory is released that the other stream still reads."""
    with pretended_gpu(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(overlap, "make_separate_transport", transport_by_backend)
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3)).to("cuda")
        wrapper = wrap(model)
        for index, layer in enumerate(model):
            forward = f"forward of {index}"
            layer.register_forward_hook(lambda *_, what=forward: current_stream().run(what))
        x = torch.ones(2, 3, device="cuda")
        wrapper(x).sum().backward()
        numbers = itertools.count(1)
        for name, (module, function) in COLLECTIVES.items():
            patch.setattr(module, function, _logged(name, getattr(module, function), numbers))
        Stream.log.clear()
        # by its module: a rank gets copies of what a check names itself
        pretended_cuda.READ.clear()
        wrapper(x).sum().backward()
    assert "\n".join(Stream.log) == expected.strip()
    assert pretended_cuda.READ == [], "the CPU waits for the GPU"


def _transformer():
    shape = TransformerShape(n_layers=2, n_heads=2, d_model=16, d_ff=32, vocabulary=16)
    return Transformer(shape, context_length=16).to("cuda")


def _tensor_parallel(tokens):
    model = tensor_parallel(_transformer())
    return lambda: model(tokens, tokens).backward()


def _context_parallel(tokens):
    model = context_parallel(_transformer())
    tokens = tokens[:, :8]
    return lambda: mean_loss(model(tokens), tokens).backward()


def _sum_and_count(y, targets):
    return (y - targets).square().sum(), (targets > 0).sum()


def _pipeline(tokens):
    model = Pipeline([nn.Linear(16, 16).to("cuda") for _ in range(2)], micro_batches=2)
    return lambda: model.step(tokens.float(), tokens.float(), _sum_and_count)


def _unused(tokens):
    model = BucketedDDP(nn.Linear(16, 4).to("cuda"), find_unused=True)
    return lambda: model(tokens.float()).sum().backward()


# A pipeline reads the loss of a step, at its end.
READS = [(_tensor_parallel, 0), (_context_parallel, 0), (_unused, 0), (_pipeline, 1)]


@on_ranks(2)
@pytest.mark.parametrize(("make_step", "n_reads"), READS)
def test_the_cpu_reads_nothing(make_step, n_reads):
    with pretended_gpu():
        step = make_step(torch.arange(32, device="cuda").view(2, 16) % 16)
        step()
        pretended_cuda.READ.clear()
        step()
    assert len(pretended_cuda.READ) == n_reads, pretended_cuda.READ
