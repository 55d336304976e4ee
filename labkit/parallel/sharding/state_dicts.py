"""States in torch's layout: rows put together into whole tensors, and whole tensors cut into rows."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from labkit.parallel.sharding.rows import as_distributed, local_rows


@torch.no_grad()
def consolidate(state: Any, is_wanted: bool) -> Any:
    """The same with whole tensors, on the CPU, in place of rows; None unless it is wanted here. A collective.

    One tensor at a time is put together on each rank.
    """
    whole = _map(state, lambda value: _whole(value, is_wanted))
    return whole if is_wanted else None


def _whole(value: Tensor, is_wanted: bool) -> Any:
    full = value.full_tensor() if isinstance(value, DTensor) else value
    return full.detach().to("cpu", copy=True) if is_wanted else None


def _map(value: Any, function: Any) -> Any:
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return type(value)((key, _map(each, function)) for key, each in value.items())  # type: ignore[call-arg]
    return [_map(each, function) for each in value] if isinstance(value, list) else value


def as_rows(name: str, value: Any, shard: Any) -> Any:
    """A whole tensor, or rows, as rows of a shard; ValueError for another shape."""
    if not isinstance(value, Tensor) or value.shape != shard.shape:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"expected {name} to have the shape {tuple(shard.shape)}, got {got}")
    rows = local_rows(value.detach().to(shard.device), shard)
    return as_distributed(rows, torch.empty_strided(shard.shape, shard.stride(), device="meta"), shard.device_mesh)


def state_rows(value: Any, shard: Any) -> Any:
    """A value of a parameter's state: rows of it, if it has the parameter's shape."""
    is_whole = isinstance(value, Tensor) and shard.dim() and value.shape == shard.shape
    return as_rows("a state", value, shard) if is_whole else value
