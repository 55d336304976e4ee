"""A reader's alternative against one process: what `lab.check(mine)` runs on every rank.

Each function takes the alternative of a lab, and returns what a rank calls, or None if the lab
checks it by measuring.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from labkit.costs.transformer import TransformerShape
from labkit.nn.transformer import Transformer, language_model_loss
from labkit.parallel.context import context_parallel
from labkit.parallel.data_parallel import BucketedDDP
from labkit.parallel.losses import next_tokens
from labkit.parallel.verify import SGD_SETTINGS, Parallel, over_sequence, verify
from labkit.studies.shared.sharding_strategies import takes_an_optimizer

RankCheck = Callable[[], tuple[bool, str]]
# Heads, sequences and positions that 2, 3 and 4 ranks divide.
SHAPE = TransformerShape(d_model=24, d_ff=36, n_layers=2, n_heads=12, vocabulary=24)
BATCH = 12
LENGTH = 24


def verify_wrapper(mine: Callable[[nn.Module], nn.Module]) -> RankCheck:
    """Check a data-parallel wrapper: called with a model, gradients of its parameters are means."""
    return partial(_verify, partial(_wrap, mine))


def verify_sharding(mine: Callable[..., Any]) -> RankCheck | None:
    """Check a sharded optimizer. Wrappers are checked by measuring: shards may have any form."""
    if not takes_an_optimizer(mine):
        return None
    return partial(_verify, partial(_optimize, mine))


def verify_plan(mine: Callable[[Transformer], Any]) -> RankCheck:
    """Check a way to cut labkit's Transformer: `parallelize` of `labkit.parallel.verify`."""
    return partial(_verify, mine)


def verify_attention(mine: Callable[..., Tensor]) -> RankCheck:
    """Check attention across ranks, with the arguments of `ring_attention`."""
    return partial(_verify, partial(_attend, mine))


def _verify(parallelize: Callable[[Any], Any]) -> tuple[bool, str]:
    # A token differs from its neighbors in the sequence and in the batch: a shift by one shows.
    tokens = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH) * 5 % 23
    result = verify(_make, parallelize, [(tokens, next_tokens(tokens))])
    return bool(result), str(result)


def _make() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    return Transformer(SHAPE, context_length=LENGTH), language_model_loss


def _wrap(mine: Callable[[nn.Module], nn.Module], model: nn.Module) -> Parallel:
    wrapped = mine(model)

    def step(tokens: Tensor, targets: Tensor) -> Tensor:
        loss = language_model_loss(wrapped(tokens), targets)
        loss.backward()
        finish = getattr(wrapped, "finish_gradient_synchronization", None)
        if finish is not None:
            finish()
        return loss

    return Parallel(model=model, step=step, split=_share)


def _optimize(mine: Callable[..., Any], model: nn.Module) -> Parallel:
    def optimizer(parameters: Any) -> Any:
        return mine(parameters, torch.optim.SGD, **SGD_SETTINGS)

    return replace(_wrap(BucketedDDP, model), optimizer=optimizer)


def _attend(mine: Callable[..., Tensor], model: Transformer) -> Parallel:
    return over_sequence(BucketedDDP(context_parallel(model, attention=mine)))


def _share(x: Tensor, rank: int) -> Tensor:
    return x.tensor_split(dist.get_world_size())[rank]
