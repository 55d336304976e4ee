"""Tasks for a class, one per lab that takes a reader's code (`labkit notebook LAB --student`)."""

from labkit.lab.declaration import COLLECTIVES, MESSAGES, Task

RING = Task(
    name="A ring all-reduce",
    text=(
        "Sum a tensor over all ranks, in place, by messages around a ring: for $p$ ranks and $n$"
        " bytes, $2(p-1)$ messages of about $n/p$ bytes per rank. It works for any number of ranks"
        " and for lengths that ranks do not divide."
    ),
    stub='''import torch
import torch.distributed as dist


def mine(tensor: torch.Tensor) -> None:
    """Replace `tensor`, of one dimension, by its sum over all ranks."""
    raise NotImplementedError("write your ring here")
''',
    allowed=MESSAGES,
    moves_input=True,
)

ATTENTION = Task(
    name="Attention in tiles",
    text=(
        "Compute causal and full attention without the whole matrix of scores: in tiles of keys,"
        " with the running maximum and sum of each row."
    ),
    stub='''import torch


def mine(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    """Return softmax(q k^T / sqrt(head_dim)) v; all are (batch, sequence, head_dim)."""
    raise NotImplementedError("write your attention here")
''',
    noted=("scaled_dot_product", "flash_attention", "efficient_attention"),
)

AVERAGE = Task(
    name="Average gradients with one collective",
    text=(
        "Wrap a model so that every rank has the mean of all ranks' gradients after the backward"
        " pass, with a single collective per pass."
    ),
    stub='''import torch
import torch.distributed as dist
from torch import nn


class mine(nn.Module):
    """Called with a model on each rank. After backward, `finish_gradient_synchronization` is
    called; then the gradients are averaged."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        return self.module(*inputs)

    def finish_gradient_synchronization(self) -> None:
        raise NotImplementedError("average the gradients here")
''',
    allowed=("all_reduce", "broadcast"),
    at_most=1,
)

SHARD = Task(
    name="An optimizer that is sharded over ranks (ZeRO-1)",
    text=(
        "Each rank keeps the optimizer's state of its share of the parameters, updates these, and"
        " gets the others from their owners."
    ),
    stub='''from collections.abc import Iterable

import torch
import torch.distributed as dist


class mine(torch.optim.Optimizer):
    """An optimizer of all parameters, whose state is divided among the ranks."""

    def __init__(self, parameters: Iterable, optimizer_class: type, **settings) -> None:
        raise NotImplementedError("give this rank its share here")

    def step(self, closure=None):
        raise NotImplementedError("update the share, then send it to all")
''',
    allowed=COLLECTIVES,
)

BATCH_NORM = Task(
    name="Batch norm over all ranks",
    text=(
        "Normalize by mean and variance over the inputs of all ranks, with the right gradients, and"
        " with one collective forward and one backward."
    ),
    stub='''import torch
import torch.distributed as dist
from torch import nn


def mine(features: int) -> nn.Module:
    """Return a layer for (rows, features) with `weight`, `bias`, `running_mean`, `running_var`."""
    raise NotImplementedError("write your layer here")
''',
    allowed=("all_reduce", "all_gather"),
    at_most=2,
)
