"""Calls across ranks that read no value from a GPU, since the CPU would wait for it."""

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss

from labkit.costs.transformer import TransformerShape
from labkit.nn.transformer import Transformer
from labkit.parallel.context import context_parallel, mean_loss
from labkit.parallel.data_parallel import BucketedDDP
from labkit.parallel.launch import run_ranks
from labkit.parallel.pipeline import Pipeline
from labkit.parallel.tensor import tensor_parallel
from tests.rehearsal.pretended_cuda import READ, pretended_gpu


def _reads(train):
    """Return what the second pass reads."""
    with pretended_gpu():
        torch.manual_seed(0)
        step = train()
        step()
        READ.clear()
        step()
        return READ[:]


def _model():
    shape = TransformerShape(n_layers=2, n_heads=2, d_model=16, d_ff=32, vocabulary=16)
    return Transformer(shape, context_length=16).to("cuda")


def _tokens():
    return torch.arange(32, device="cuda").view(2, 16) % 16


def _tensor_parallel():
    model = tensor_parallel(_model())
    return lambda: model(_tokens(), _tokens()).backward()


def _context_parallel():
    model = context_parallel(_model())
    tokens = _tokens()[:, :8]
    return lambda: mean_loss(model(tokens), tokens).backward()


def _pipeline():
    model = Pipeline([nn.Linear(4, 4).to("cuda") for _ in range(2)], micro_batches=2)
    x = torch.ones(4, 4, device="cuda")
    return lambda: model.step(x, x, mse_loss)


def _unused():
    model = BucketedDDP(nn.Linear(4, 4).to("cuda"), find_unused=True)
    return lambda: model(torch.ones(4, 4, device="cuda")).sum().backward()


@pytest.mark.parametrize(
    ("train", "count"),
    [(_tensor_parallel, 0), (_context_parallel, 0), (_unused, 0), (_pipeline, 1)],
)
def test_reads(train, count):
    """A pipeline reads the loss of a step, at its end."""
    reads = run_ranks(_reads, train, world_size=2)[0]
    assert len(reads) == count, reads
