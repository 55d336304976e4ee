"""Shards: a rank's rows of a parameter, gradient or state as a DTensor, on the device and in state
dicts."""

import weakref
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from labkit.parallel.data_parallel.consistency import check_values
from labkit.parallel.prepare import FLOAT_TYPES, strides_like
from labkit.parallel.sharding.gather import own_rows

# key: in FSDP's metadata of "rank r of p", in an optimizer's state of {"rank r of p": True}
SHARD = "shard"


class Sharded(DTensor):
    """A rank's rows of a parameter or gradient.

    What is read by index may be a copy, from other ranks, too: to change that in place raises.
    Setting `data` replaces the rows; a plain DTensor would ignore it silently.
    """

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        part: Any = super().__getitem__(index)
        storages = {each._local_tensor.untyped_storage()._cdata for each in (self, part)}
        if part.requires_grad or len(storages) == 1:
            return part
        with torch.inference_mode():  # torch refuses to change its tensors outside of it
            return part.clone()

    @property
    def data(self) -> Tensor:
        """The same rows, hidden from autograd."""
        rows = torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]
        rows.__class__ = Sharded
        return rows

    @data.setter
    def data(self, value: Tensor) -> None:
        if (value.shape, value.dtype) != (self.shape, self.dtype):
            raise ValueError(
                f"expected {tuple(self.shape)}, {self.dtype}; got {tuple(value.shape)},"
                f" {value.dtype}"
            )
        # tensors of inference mode have no versions, which tell what has changed
        with torch.inference_mode(False):
            rows = _local_rows(value.detach(), self)
            self._local_tensor = rows.clone() if rows.is_inference() else rows
            torch.autograd.graph.increment_version(self)  # also if this rank has no rows

    def share_memory_(self) -> NoReturn:
        raise TypeError("sharded tensors cannot be shared with processes: share full_tensor()")

    def __reduce_ex__(self, protocol: Any) -> Any:
        if isinstance(self, nn.Parameter):
            raise TypeError("sharded parameters cannot be copied or pickled: save a state_dict()")
        return super().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return (
            self.__reduce_ex__(2)
            if isinstance(self, nn.Parameter)
            else memo.setdefault(id(self), self.clone())
        )


def _read_number(
    op_call: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, object]
) -> Any:
    """Read a DTensor as a Python number. RuntimeError for a rank's part of a norm or sum, which
    torch would return."""
    if any(placement.is_partial() for placement in args[0].placements):
        raise RuntimeError(
            "each rank has a part of this norm or sum: call full_tensor() on all ranks, then item()"
        )
    return op_call(args[0]._local_tensor)


def _draw(op_call: OpOverload[..., Any], args: tuple[Any, ...], kwargs: dict[str, object]) -> Any:
    """Draw numbers for the whole tensor, and take this rank's. Torch would draw the same rows on
    each rank."""
    if args[0].device_mesh not in _meshes:  # a DTensor of torch or of a user
        del _handlers[op_call]
        try:
            return op_call(*args, **kwargs)
        finally:
            _handlers[op_call] = _draw
    whole = op_call(args[0].detach().full_tensor(), *args[1:], **kwargs)
    drawn = distribute_tensor(whole, args[0].device_mesh, args[0].placements, src_data_rank=None)
    if not op_call._schema.is_mutable:
        return drawn
    args[0]._local_tensor.copy_(drawn._local_tensor)
    return args[0]


_meshes: weakref.WeakSet[DeviceMesh] = weakref.WeakSet()
"""Meshes of shards, and of what is computed from them."""
_aten = torch.ops.aten
_handlers = DTensor._op_dispatcher._custom_op_handlers
_handlers[_aten._local_scalar_dense.default] = _read_number
for _name in ("normal_", "uniform_", "bernoulli", "rand_like", "randn_like", "randint_like"):
    _handlers[getattr(_aten, _name).default] = _draw
_handlers[_aten.bernoulli_.float] = _draw


@torch.no_grad()
def _as_distributed(rows: Tensor, like: Tensor, mesh: DeviceMesh) -> DTensor:
    _meshes.add(mesh)
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
    return Sharded(rows, shard._spec, requires_grad=False)


def check_shardable(parameters: Iterable[tuple[str, Tensor]], *, are_averaged: bool) -> None:
    """Raise ValueError for parameters that are sharded or sparse, share elements, or have no
    values.

    `are_averaged`: also for trained parameters whose gradients labkit's collectives do not add.
    """
    ranges = []
    for name, p in parameters:
        check_values(name, p)
        if (
            isinstance(p, DTensor)
            or p.layout is not torch.strided
            or torch._debug_has_internal_overlap(p) == 1
        ):
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
        return own_rows(value, mesh.get_local_rank(), mesh.size()).clone()
    if value.device_mesh.size() != mesh.size() or tuple(value.placements) != tuple(
        shard.placements
    ):
        raise ValueError(
            f"expected whole tensors, or rows on {mesh.size()} ranks; got {value.placements} on"
            f" {value.device_mesh.size()}: save with consolidated_state_dict() or"
            " torch.distributed.checkpoint"
        )
    return value._local_tensor


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
