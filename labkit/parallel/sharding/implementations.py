"""Ways to train data-parallel, from whole copies to everything in shards, under one call: labkit's and torch's."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from labkit.parallel.data_parallel import BucketedDDP
from labkit.parallel.sharding.fsdp import FSDP
from labkit.parallel.sharding.optimizer import ShardedOptimizer
from labkit.parallel.sharding.reduce_scatter_ddp import ReduceScatterDDP
from labkit.parallel.transport import AUTO

OptimizerClass = type[Optimizer]
Made = tuple[nn.Module, Optimizer]


def _ddp(model: nn.Module, optimizer: OptimizerClass, transport: str, **settings: Any) -> Made:
    wrapped = BucketedDDP(model, all_reduce=transport)
    return wrapped, optimizer(wrapped.parameters(), **settings)


def _zero1(model: nn.Module, optimizer: OptimizerClass, transport: str, **settings: Any) -> Made:
    wrapped = BucketedDDP(model, all_reduce=transport)
    return wrapped, ShardedOptimizer(wrapped.parameters(), optimizer, transport=transport, **settings)


def _zero2(model: nn.Module, optimizer: OptimizerClass, transport: str, **settings: Any) -> Made:
    wrapped = ReduceScatterDDP(model, all_reduce=transport)
    sharded = ShardedOptimizer(wrapped.parameters(), optimizer, wrapper=wrapped, transport=transport, **settings)
    return wrapped, sharded


def _zero3(model: nn.Module, optimizer: OptimizerClass, transport: str, **settings: Any) -> Made:
    wrapped = FSDP(model, transport=transport)
    return wrapped, optimizer(wrapped.parameters(), **settings)


def _torch_ddp(model: nn.Module, optimizer: OptimizerClass, _: str, **settings: Any) -> Made:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, optimizer(wrapped.parameters(), **settings)


def _torch_zero1(model: nn.Module, optimizer: OptimizerClass, _: str, **settings: Any) -> Made:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return wrapped, ZeroRedundancyOptimizer(wrapped.parameters(), optimizer, **settings)


def _torch_zero3(model: Any, optimizer: OptimizerClass, _: str, **settings: Any) -> Made:
    device = next(model.parameters()).device.type
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    for unit in (*model.layers, model.embedding, model.output):
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, optimizer(model.parameters(), **settings)


IMPLEMENTATIONS: Mapping[str, Callable[..., Made]] = {
    "ddp": _ddp,
    "zero1": _zero1,
    "zero2": _zero2,
    "zero3": _zero3,
    "torch_ddp": _torch_ddp,
    "torch_zero1": _torch_zero1,
    "torch_zero3": _torch_zero3,
}
"""labkit's by what they share out; torch's DDP, that with its sharded optimizer, and fully_shard."""
TORCHS = tuple(name for name in IMPLEMENTATIONS if name.startswith("torch_"))


def shard(name: str, model: nn.Module, optimizer: OptimizerClass, *, transport: str = AUTO, **settings: Any) -> Made:
    """A labkit Transformer under its wrapper, and `optimizer(..., **settings)` of what this rank updates. A collective.

    `transport` is what labkit's ways send by. ValueError for a name that is none of `IMPLEMENTATIONS`.
    """
    if name not in IMPLEMENTATIONS:
        raise ValueError(f"expected one of {', '.join(IMPLEMENTATIONS)}, got {name!r}")
    return IMPLEMENTATIONS[name](model, optimizer, transport, **settings)


def whole_parameters(model: nn.Module) -> dict[str, Tensor]:
    """Whole parameters of a wrapped model, by the bare one's names, on every rank. A collective."""
    if isinstance(model, FSDP):
        return model.gather_full_parameters()
    bare = getattr(model, "module", model)
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach()
        for name, value in bare.named_parameters()
    }


def held_tensors(model: nn.Module, optimizer: Optimizer) -> dict[str, list[Tensor]]:
    """What this rank keeps from step to step: its parameters, their gradients, the optimizer's state."""
    inner = getattr(optimizer, "optim", optimizer)  # torch's sharded optimizer has another inside
    parameters = list(model.parameters())
    updated = [*parameters, *inner.state]  # pieces of parameters have gradients of their own
    gradients = [tensor.grad for tensor in dict.fromkeys(updated) if tensor.grad is not None]
    states = [value for state in inner.state.values() for value in state.values() if isinstance(value, Tensor)]
    return {"parameters": _local(parameters), "gradients": _local(gradients), "optimizer": _local(states)}


def n_bytes(tensors: Iterable[Tensor]) -> int:
    """Of their storages, each once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def _local(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
