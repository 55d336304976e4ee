"""Rows of parameters on ranks: who keeps which, and how all of them lie in one vector that travels.

Rank r of p keeps rows r c to (r+1) c of a parameter of n rows, c = ceil(n / p), as a DTensor with `Shard(0)`.
A `Layout` puts parameters of one dtype into a vector of p equal parts. Part r holds rank r's rows of every parameter,
each padded to c rows: one all-gather makes all parameters whole, one reduce-scatter averages all their gradients.

    part of rank 0            part of rank 1            ...
    rows of a | rows of b     rows of a | rows of b     ...
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard


class Sharded(DTensor):
    """Rows of a parameter or gradient. Its `data` can be replaced, which DTensor alone ignores without a word."""

    __slots__ = ()

    @property
    def data(self) -> Tensor:
        """The same rows for code that autograd must not see."""
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined]

    @data.setter
    def data(self, value: Tensor) -> None:
        if (value.shape, value.dtype) != (self.shape, self.dtype):
            raise ValueError(f"expected {tuple(self.shape)}, {self.dtype}; got {tuple(value.shape)}, {value.dtype}")
        self._local_tensor = local_rows(value.detach(), self)

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError("sharded parameters cannot be copied or pickled: save a state_dict()")

    __deepcopy__ = __reduce_ex__


def own_rows(whole: Tensor, mesh: DeviceMesh) -> Tensor:
    """This rank's rows, a view: (at most c, ...). All of a scalar."""
    if not whole.dim():
        return whole
    n, rank = len(whole), mesh.get_local_rank()
    chunk = -(-n // mesh.size())
    return whole[min(rank * chunk, n) : min((rank + 1) * chunk, n)]


@torch.no_grad()
def as_distributed(rows: Tensor, like: Tensor, mesh: DeviceMesh) -> DTensor:
    """This rank's rows of something shaped as `like`, as a DTensor of the same memory."""
    placements = [Shard(0) if like.dim() else Replicate()]
    stride = torch.empty_like(like, device="meta").stride()
    return DTensor.from_local(rows, mesh, placements, run_check=False, shape=like.shape, stride=stride)


def shard_parameter(parameter: Tensor, mesh: DeviceMesh, *, copy: bool) -> Any:
    """A parameter of the whole shape that has this rank's rows only, in new memory or in the parameter's."""
    whole = parameter.detach()
    rows = own_rows(whole, mesh)
    shard: Any = nn.Parameter(as_distributed(rows.clone() if copy else rows, whole, mesh), parameter.requires_grad)
    shard.__class__ = Sharded  # nn.Parameter(Sharded(...)) would be a plain DTensor
    shard.__dict__.update(parameter.__dict__)
    return shard


def gradient_rows(rows: Tensor, shard: Any) -> Any:
    """These rows as a gradient of the shard."""
    return Sharded(rows, shard._spec, requires_grad=False)


def local_rows(value: Tensor, shard: Any) -> Tensor:
    """This rank's rows of a tensor, whole or shared out; ValueError for rows on another number of ranks."""
    mesh = shard.device_mesh
    if not isinstance(value, DTensor):
        return own_rows(value, mesh).clone()
    if value.device_mesh.size() != mesh.size() or tuple(value.placements) != tuple(shard.placements):
        raise ValueError(
            f"expected whole tensors, or rows on {mesh.size()} ranks; got {value.placements} on "
            f"{value.device_mesh.size()}: save with consolidated_state_dict() or torch.distributed.checkpoint"
        )
    return value._local_tensor


class Layout:
    """Where each parameter's rows lie in a vector, (numel,), of p parts of `part` elements."""

    def __init__(self, like: Sequence[Tensor], mesh: DeviceMesh):
        self._mesh, self._p, self._shapes = mesh, mesh.size(), [each.shape for each in like]
        self._own = [own_rows(torch.empty(shape, device="meta"), mesh).shape for shape in self._shapes]
        self._chunks = [torch.Size((-(-s[0] // self._p), *s[1:])) if s else torch.Size((1,)) for s in self._shapes]
        self._starts = [0, *accumulate(chunk.numel() for chunk in self._chunks)]
        self.part = self._starts[-1]
        self.numel = self._p * self.part
        self._has_padding = self.numel > sum(shape.numel() for shape in self._shapes)

    def own_part(self, vector: Tensor) -> Tensor:
        """This rank's part, (part,), a view."""
        start = self._mesh.get_local_rank() * self.part
        return vector[start : start + self.part]

    def own_views(self, part: Tensor) -> list[Tensor]:
        """This rank's rows of every parameter in its part."""
        parts = zip(self._own, self._starts, strict=False)
        return [part[start : start + shape.numel()].view(shape) for shape, start in parts]

    def pack(self, vector: Tensor, whole: Sequence[Tensor | None]) -> None:
        """Copy all rows of whole tensors into the vector; zeros for those that are None, and where nothing lies."""
        if self._has_padding or any(each is None for each in whole):
            vector.zero_()
        pairs = list(self._pairs(vector, whole))
        if pairs:
            torch._foreach_copy_([packed for packed, _ in pairs], [rows for _, rows in pairs])

    def unpack(self, vector: Tensor, whole: Sequence[Tensor]) -> None:
        """Copy all rows from the vector into whole tensors."""
        pairs = list(self._pairs(vector, whole))
        if pairs:
            torch._foreach_copy_([rows for _, rows in pairs], [packed for packed, _ in pairs])

    def _pairs(self, vector: Tensor, whole: Sequence[Tensor | None]) -> Iterator[tuple[Tensor, Tensor]]:
        """Views of the vector and of whole tensors that hold the same rows."""
        by_rank = vector.view(self._p, self.part)
        for each, chunk, start in zip(whole, self._chunks, self._starts, strict=False):
            if each is None or not each.numel():
                continue
            rows = by_rank[:, start : start + chunk.numel()].unflatten(1, chunk)
            if not each.dim():  # every rank has it
                yield from ((rows[rank], each[None]) for rank in range(self._p))
                continue
            full, rest = divmod(len(each), chunk[0])
            if full:
                yield rows[:full], each[: full * chunk[0]].unflatten(0, (full, chunk[0]))
            if rest:
                yield rows[full, :rest], each[full * chunk[0] :]
