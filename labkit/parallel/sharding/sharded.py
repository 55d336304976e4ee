"""Shards: a rank's rows of a parameter, gradient or state as a DTensor, on the device and in state
dicts."""

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from labkit.parallel.cut_tensors import CutGradient, set_cut
from labkit.parallel.data_parallel.consistency import check_values
from labkit.parallel.layouts import find_cut
from labkit.parallel.prepare import FLOAT_TYPES, strides_like
from labkit.parallel.sharding.gather import local_rows
from labkit.torch_private import has_internal_overlap

# key: in FSDP's metadata of "rank r of p", in an optimizer's state of {"rank r of p": True}
SHARD = "shard"


def make_mesh(group: dist.ProcessGroup, device_type: str) -> DeviceMesh:
    """Return the mesh, of one dimension, of all ranks of a group."""
    if group is dist.GroupMember.WORLD:
        return DeviceMesh.from_group(group, device_type)
    # By a name of its own: torch keeps results of operators by mesh, and of two equal ones those of
    # the first, whose group may be over since a rank failed.
    return DeviceMesh.from_group(group, device_type, mesh_dim_names=(group.group_name,))


class Sharded(DTensor):
    """A DTensor of a rank's rows. Setting `data` replaces the rows.

    A plain DTensor ignores it without a word, and averages of parameters, SAM and
    `vector_to_parameters` set `data`.
    """

    __slots__ = ()

    @property
    def data(self) -> Tensor:
        """The same rows, hidden from autograd."""
        rows = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        rows.__class__ = CutShard if isinstance(self, CutShard) else Sharded
        return rows

    @data.setter
    def data(self, value: Tensor) -> None:
        if (value.shape, value.dtype) != (self.shape, self.dtype):
            raise ValueError(
                f"expected {tuple(self.shape)}, {self.dtype}; got {tuple(value.shape)},"
                f" {value.dtype}"
            )
        # Tensors of inference mode have no versions, which tell what has changed.
        with torch.inference_mode(False):
            rows = _local_rows(value.detach(), self)
            self._local_tensor = rows.clone() if rows.is_inference() else rows
            torch.autograd.graph.increment_version(self)  # also if this rank has no rows

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if isinstance(self, nn.Parameter):
            raise TypeError("sharded parameters cannot be copied: save a state_dict()")
        return memo.setdefault(id(self), as_gradient(self._local_tensor.clone(), self))


class CutShard(CutGradient, Sharded):
    """A shard of a gradient which tensor parallelism has cut, too: torch's norm is that of both."""

    __slots__ = ()


@torch.no_grad()
def _as_distributed(rows: Tensor, like: Tensor, mesh: DeviceMesh) -> DTensor:
    placements = [Shard(0) if like.dim() else Replicate()]
    return DTensor.from_local(
        rows, mesh, placements, run_check=False, shape=like.shape, stride=strides_like(like)
    )


def shard_parameter(parameter: Tensor, rows: Tensor, mesh: DeviceMesh) -> Any:
    """Return a parameter of the whole shape and with the attributes of `parameter`, whose memory is
    `rows`."""
    shard: Any = nn.Parameter(
        _as_distributed(rows, parameter.detach(), mesh), parameter.requires_grad
    )
    shard.__class__ = Sharded  # nn.Parameter(Sharded(...)) would be a plain DTensor
    shard.__dict__.update(parameter.__dict__)
    return shard


def as_gradient(rows: Tensor, shard: Any) -> Any:
    """Return the rows as a gradient of the shard."""
    return _with_class(Sharded(rows, shard._spec, requires_grad=False), shard)


def _with_class(gradient: Any, shard: Any) -> Any:
    """Return a gradient with the class that it has: `CutShard` if tensor parallelism has cut it."""
    gradient.__class__ = Sharded
    layout = find_cut(shard)
    if layout is not None:
        gradient.__class__ = CutShard
        set_cut(gradient, layout.group, layout.dim)
    return gradient


def accumulate_gradient(shard: Any, rows: Tensor) -> None:
    """Add the rows to the shard's `grad`, and run the hooks that users put on the shard."""
    gradient = as_gradient(rows, shard)
    if shard._backward_hooks or shard._post_accumulate_grad_hooks:
        # Autograd runs hooks in its order, but takes five times as long.
        torch.autograd.backward(shard, gradient)
        if shard.grad is not None:  # a hook may step and drop the gradient
            _with_class(shard.grad, shard)
    elif shard.grad is None:
        shard.grad = gradient
    else:
        shard.grad.add_(gradient)


def check_shardable(parameters: Iterable[tuple[str, Tensor]], *, are_averaged: bool) -> None:
    """Raise ValueError for parameters that are sharded or sparse, share elements, or have no
    values.

    `are_averaged`: also for trained parameters whose gradients labkit's collectives do not add.
    """
    ranges = []
    for name, p in parameters:
        check_values(name, p)
        if isinstance(p, DTensor) or p.layout is not torch.strided or has_internal_overlap(p):
            raise ValueError(
                f"expected whole, dense parameters, each element with memory of its own; {name} is"
                " none"
            )
        if are_averaged and p.requires_grad and p.dtype not in FLOAT_TYPES:
            raise ValueError(
                f"expected trained parameters of real floating-point numbers; {name} is {p.dtype}"
            )
        if p.is_contiguous() and p.numel():
            ranges.append((p.data_ptr(), p.data_ptr() + p.nbytes))
    if any(end > start for (_, end), (start, _) in pairwise(sorted(ranges))):
        raise ValueError("expected parameters that share no elements with each other")


# State dicts


def check_shard(saved: str, here: str) -> None:
    """Raise ValueError for a state_dict of another rank or number of ranks."""
    if saved != here:
        raise ValueError(f"expected the shard of {here} or a whole state, got the shard of {saved}")


def _local_rows(value: Tensor, shard: Any) -> Tensor:
    """Return this rank's rows of a tensor, whole or sharded. ValueError for shards on another
    number of ranks."""
    mesh = shard.device_mesh
    if not isinstance(value, DTensor):
        return local_rows(value, mesh.get_local_rank(), mesh.size()).clone()
    if value.device_mesh.size() != mesh.size():
        raise ValueError(
            f"expected whole tensors, or rows on {mesh.size()} ranks; got rows on"
            f" {value.device_mesh.size()}: save with consolidated_state_dict() or"
            " torch.distributed.checkpoint"
        )
    # Results of operators, as in `vector_to_parameters`, may be on every rank, or sums to be added.
    return value.redistribute(placements=shard.placements)._local_tensor


def as_rows(name: str, value: Any, shard: Any) -> Any:
    """Return the shard's rows of a tensor, whole or sharded, as a DTensor. ValueError for another
    shape."""
    if not isinstance(value, Tensor) or value.shape != shard.shape:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"expected {name} to have the shape {tuple(shard.shape)}, got {got}")
    rows = _local_rows(value.detach().to(shard.device), shard)
    return _as_distributed(
        rows, torch.empty_strided(shard.shape, shard.stride(), device="meta"), shard.device_mesh
    )


@torch.no_grad()
def consolidate(state: Mapping[str, Any], is_wanted: bool) -> dict[str, Any] | None:
    """Return a state with whole tensors on the CPU in place of rows, or None unless it is wanted on
    this rank.

    A collective, one tensor at a time.
    """

    def make_whole(value: Any) -> Any:
        if isinstance(value, Tensor):
            full = value.full_tensor() if isinstance(value, DTensor) else value
            return full.detach().to("cpu", copy=True) if is_wanted else None
        if isinstance(value, Mapping):
            return type(value)((key, make_whole(each)) for key, each in value.items())  # type: ignore[call-arg]
        return [make_whole(each) for each in value] if isinstance(value, list) else value

    whole: dict[str, Any] = make_whole(state)
    return whole if is_wanted else None
