"""Rows of parameters: which rank keeps which, where they lie in whole tensors, and how they travel.

Rank r of p keeps rows r c to (r+1) c of a parameter of n rows, c = ceil(n / p), as a DTensor with `Shard(0)`; of a
scalar, every rank keeps all. Rows travel from their place in one rank's tensors to the same place in another's.
"""

from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from labkit.parallel.collectives import add_steps, copy_steps
from labkit.parallel.disable_compile import disable_compile
from labkit.parallel.prepare import cut
from labkit.parallel.traffic import count_traffic
from labkit.parallel.transport import AUTO
from labkit.parallel.transport.base import Step, Transport
from labkit.parallel.transport.select_transport import find_transport

MESSAGES_AHEAD = 4  # per rank
SMALL_BYTES = 32 << 10  # of one rank's rows: a message costs more than to copy them


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


def own_rows(whole: Tensor, rank: int, p: int) -> Tensor:
    """The rows of a rank, a view: (at most c, ...). All of a scalar."""
    if not whole.dim():
        return whole
    n = len(whole)
    chunk = -(-n // p)
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
    rows = own_rows(whole, mesh.get_local_rank(), mesh.size())
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
        return own_rows(value, mesh.get_local_rank(), mesh.size()).clone()
    if value.device_mesh.size() != mesh.size() or tuple(value.placements) != tuple(shard.placements):
        raise ValueError(
            f"expected whole tensors, or rows on {mesh.size()} ranks; got {value.placements} on "
            f"{value.device_mesh.size()}: save with consolidated_state_dict() or torch.distributed.checkpoint"
        )
    return value._local_tensor


def check_no_overlap(parameters: Iterable[Tensor]) -> None:
    """Raise ValueError for parameters that share elements: rows of one would change rows of another."""
    ranges = sorted((p.data_ptr(), p.data_ptr() + p.nbytes) for p in parameters if p.is_contiguous() and p.numel())
    if any(end > start for (_, end), (start, _) in pairwise(ranges)):
        raise ValueError("expected parameters that share no elements with each other")


def row_strides(like: Tensor) -> tuple[int, ...]:
    """Strides of a tensor of this shape whose rows lie one after the other, each laid out as here, if it is dense."""
    if not like.dim():
        return ()
    row = torch.empty_like(like[:1], device="meta")
    return (like[:1].numel(), *row.stride()[1:])


def by_rows(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """The tensor, or a copy of it, with these strides, those of `row_strides`."""
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def flatten(dense: Tensor) -> Tensor:
    """All elements in the order of memory, (n,), a view."""
    return dense.as_strided((dense.numel(),), (1,))


def rows_by_rank(whole: Tensor, p: int) -> list[Tensor]:
    """The rows of each rank in a tensor laid out `by_rows`: p vectors, views."""
    n, width = len(whole), whole[:1].numel()
    chunk = -(-n // p)
    lengths = [width * (min((rank + 1) * chunk, n) - min(rank * chunk, n)) for rank in range(p)]
    return list(flatten(whole).split_with_sizes(lengths))


def _separate(blocks: list[list[Tensor]]) -> tuple[list[list[Tensor]], list[list[Tensor]]]:
    """Rows by rank of large tensors, whose messages need no copy, and those of small ones, which travel in one."""
    large = [by_rank for by_rank in blocks if by_rank[0].nbytes > SMALL_BYTES]
    return large, [by_rank for by_rank in blocks if by_rank[0].nbytes <= SMALL_BYTES]


def _unpack(vector: Tensor, parts: Sequence[Tensor]) -> None:
    torch._foreach_copy_(list(parts), vector.split([len(part) for part in parts]))


@disable_compile
def gather_rows(
    tensors: Sequence[Tensor], group: dist.ProcessGroup | None = None, *, transport: str | Transport = AUTO
) -> None:
    """Complete, in place, tensors of which each rank has its own rows. A collective.

    Rank r sends its rows of each tensor to every other rank, which receives them in their place: n (p-1)/p bytes sent
    per rank for n bytes of tensors, and no copies besides, but for small tensors.
    """
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.dim() and tensor.numel():
            kinds.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for alike in kinds.values():
        via = find_transport(group, alike[0].device, transport)
        depth = max(1, MESSAGES_AHEAD * (via.world_size - 1))
        dense = [by_rows(tensor, row_strides(tensor)).to(via.device) for tensor in alike]
        large, small = _separate([rows_by_rank(each, via.world_size) for each in dense])
        packed = [torch.cat(blocks) for blocks in zip(*small, strict=True)]
        steps: list[Step] = []
        for by_rank in [*large, packed] if small else large:
            pieces = cut([block.view(torch.uint8) for block in by_rank], via, depth)
            steps += chain.from_iterable(copy_steps(pieces, via))
        count_traffic(via, "all_gather", "butterfly", alike).run(steps, depth)
        for vector, blocks in zip(packed, zip(*small, strict=True), strict=True):
            _unpack(vector, blocks)
        for tensor, each in zip(alike, dense, strict=True):
            if each is not tensor:
                tensor.copy_(each)
        torch.autograd.graph.increment_version(alike)  # messages are written past torch


def average_rows(
    gradients: Sequence[Tensor],
    group: dist.ProcessGroup | None,
    results: Sequence[Tensor],
    *,
    transport: str | Transport = AUTO,
) -> None:
    """Mean over ranks of this rank's rows of each tensor, into `results`, laid out alike. A collective.

    Rank r adds up the rows that the others send it, where they arrive: n (p-1)/p bytes sent per rank for n bytes.
    """
    kinds: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for gradient, result in zip(gradients, results, strict=True):
        kinds.setdefault(gradient.dtype, []).append((gradient, result))
    for dtype, pairs in kinds.items():
        via = find_transport(group, pairs[0][0].device, transport)
        p, depth = via.world_size, max(1, MESSAGES_AHEAD * (via.world_size - 1))
        is_divided = dtype == torch.float16 or p == 1  # before it is added, so that a mean cannot overflow on the way
        whole = [(gradient / p if is_divided else gradient).to(via.device) for gradient, _ in pairs]
        means = [flatten(result).to(via.device) for _, result in pairs]
        large, small = _separate([[*rows_by_rank(each, p), mean] for each, mean in zip(whole, means, strict=True)])
        packed = [torch.cat(blocks) for blocks in zip(*small, strict=True)]
        steps: list[Step] = []
        for by_rank in [*large, packed] if small else large:
            *pieces, totals = cut(by_rank, via, depth)
            steps += chain.from_iterable(add_steps(pieces, totals, via, 1 if is_divided else p))
            if p == 1:
                by_rank[-1].copy_(by_rank[0])
        count_traffic(via, "reduce_scatter", "butterfly", [gradient for gradient, _ in pairs]).run(steps, depth)
        if small:
            _unpack(packed[-1], [by_rank[-1] for by_rank in small])
        for (_, result), mean in zip(pairs, means, strict=True):
            if mean.device != result.device:
                flatten(result).copy_(mean)
