"""Numbers computed from shards, such as a penalty on weights, in a loss of ordinary tensors.

    loss = criterion(model(inputs), targets)
    loss = loss + 0.1 * sum(p.square().sum() for p in model.parameters())

The sum is a DTensor. torch adds it to a loss, and raises in backward, where the model's part of the
loss would get a DTensor as gradient. So here such a number becomes an ordinary one, the same on all
ranks, when it meets an ordinary tensor. Its gradient is the mean over ranks, as that of a shard.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from labkit.parallel.sharding.sharded import Sharded
from labkit.torch_private import DisableTorchFunctionSubclass

# What torch says if an operator gets a shard and an ordinary tensor.
MIXED = "mixed torch.Tensor and DTensor"
OUTSIDE = (
    "parameters are in shards outside of the forward of FSDP: call the wrapper, or first"
    " wrapper.register_forward_method(name) if it is another method that computes"
)


class _InLoss(DTensor):
    """A DTensor from which losses are computed."""

    __slots__ = ()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with DisableTorchFunctionSubclass():
            try:
                if torch.is_grad_enabled():
                    return _call_with_graph(func, args, kwargs or {})
                return func(*args, **(kwargs or {}))
            except RuntimeError as error:
                if MIXED in str(error):
                    raise RuntimeError(OUTSIDE) from error
                raise


class ShardInLoss(_InLoss, Sharded):
    """A shard from which a loss may be computed, or which a method reads outside of a forward pass.

    Shards have this class only while users may do so: it makes each access to an attribute ten
    times as slow, and an optimizer's step and a pass of FSDP make some thirty per shard.
    """

    __slots__ = ()


class FromShards(_InLoss):
    """A result of shards that has a graph."""

    __slots__ = ()

    def full_tensor(self, **options: Any) -> Tensor:
        """Return the whole as an ordinary tensor. A collective."""
        if self.dim() == 0:
            return _to_ordinary(self)
        return super().full_tensor(**options)


def _call_with_graph(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Call a function of torch; mark what it computes from shards."""
    tensors = [each for each in args if isinstance(each, Tensor)]
    # Among shards alone a number stays one of shards: the next function may need it as such.
    if func is Tensor.backward or not all(isinstance(each, DTensor) for each in tensors):
        args = [_to_ordinary(each) for each in args]
    result = func(*args, **kwargs)
    if type(result) is DTensor and result.grad_fn is not None:
        result.__class__ = FromShards
    return result


def _to_ordinary(value: Any) -> Any:
    """Return a number from shards as an ordinary tensor, and all else as it is.

    A matrix stays: that it is read by an ordinary operator is a mistake, as of a layer that reads
    another unit's weight.
    """
    if isinstance(value, DTensor) and value.dim() == 0 and value.requires_grad:
        return _WholeNumber.apply(value)
    return value


class _WholeNumber(torch.autograd.Function):
    """The value on all ranks; the gradient is the mean over ranks. Both are collectives."""

    @staticmethod
    def forward(ctx: Any, number: Any) -> Tensor:
        ctx.mesh = number.device_mesh
        whole: Tensor = number.detach().full_tensor()
        return whole

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> DTensor:
        mean = gradient / ctx.mesh.size()
        dist.all_reduce(mean, group=ctx.mesh.get_group())
        return DTensor.from_local(mean, ctx.mesh, [Replicate()], run_check=False)
