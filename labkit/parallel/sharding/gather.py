"""The gather of ZeRO-1 and ZeRO-3, and its reverse: every rank gathers all rows of tensors, or
averages its own.

Over NCCL by its own collectives, in a padded copy as torch's FSDP2 (`_all_gather_flat`,
`_reduce_scatter_flat`); otherwise by messages from place to place.

Rank r of p has rows r c to (r+1) c of a tensor of n rows, c = ceil(n / p). Of a scalar, every rank
has all. Messages copy the rows of small tensors only, into one message for all, and tensors laid
out otherwise.
"""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.parallel.collectives import all_gather_round, all_reduce, reduce_scatter_round
from labkit.parallel.prepare import shard_sizes, strides_like
from labkit.parallel.traffic import Call, record_collective
from labkit.parallel.transport.base import Transfer, Transport, checksum
from labkit.torch_private import foreach_copy_

SMALL_BYTES = 32 << 10  # of one rank's rows: copying them costs less than a message

# Since torch 2.13, and before.
all_gather_single: Any = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

Blocks = list[list[Tensor]]  # [tensor][rank]: vectors


def local_rows(whole: Tensor, rank: int, p: int) -> Tensor:
    """Return the rows of a rank, a view: (at most c, ...); all of a scalar."""
    if not whole.dim():
        return whole
    chunk = -(-len(whole) // p)
    return whole[rank * chunk : (rank + 1) * chunk]


def row_strides(like: Tensor) -> tuple[int, ...]:
    """Return the strides of a tensor of this shape whose rows follow each other in memory, each
    laid out as here."""
    return (like[:1].numel(), *strides_like(like[:1])[1:]) if like.dim() else ()


def with_strides(tensor: Tensor, strides: Sequence[int]) -> Tensor:
    """Return the tensor, or a copy of it with these strides."""
    if tensor.stride() == strides:
        return tensor
    return torch.empty_strided(
        tensor.shape, strides, dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)


def plan_all_gather(
    name: str, tensors: Sequence[Tensor], transport: Transport
) -> Callable[[], None]:
    """Return a function that completes tensors in place, each time it is called: a collective.

    Ranks that call it for another `name` raise.

    The caller puts its own rows in place. Rank r then sends them to every other rank, r+1 first,
    and receives theirs in place (`all_gather_round`). For n bytes of tensors, a rank sends
    n (p-1)/p bytes on average.
    """
    tensors = [tensor for tensor in tensors if tensor.dim() and tensor.numel()]
    if transport.collective_group is not None:
        return partial(_all_gather_flat, tensors, transport)
    p = transport.world_size
    dense = [with_strides(tensor, row_strides(tensor)).to(transport.device) for tensor in tensors]
    copies = [
        (tensor, each) for tensor, each in zip(tensors, dense, strict=True) if tensor is not each
    ]
    # As bytes: nothing is added, and transports know few dtypes.
    blocks, packed = _pack(
        [[rows.view(torch.uint8) for rows in _by_rank(each, p)] for each in dense]
    )
    storages = [
        each.untyped_storage()
        for each in chain((x for _, x in copies), (vector for vector, _ in packed))
    ]
    # Storages are freed between calls; the views of them stay.
    sizes = [storage.nbytes() for storage in storages]
    description = checksum(
        "all_gather", name, *((tuple(tensor.shape), tensor.dtype) for tensor in tensors)
    )

    def gather() -> None:
        for storage, size in zip(storages, sizes, strict=True):
            storage.resize_(size)
        for tensor, each in copies:
            each.copy_(tensor)
        _fill(packed)
        if tensors:
            call = Call(transport, "all_gather", "butterfly", tensors, description)
            # One round: no tensor waits for another.
            call.run([[each for block in blocks for each in all_gather_round(block, call)]])
            torch.autograd.graph.increment_version(tensors)  # messages are written past torch
        _unpack(packed)
        for tensor, each in copies:
            tensor.copy_(each)
        for storage in storages:  # second copies of rows, until the next call
            storage.resize_(0)

    return gather


def reduce_scatter_rows(
    name: str, pairs: Sequence[tuple[Tensor, Tensor]], transport: Transport
) -> None:
    """Average gradients over ranks: this rank's rows of the mean go into the second of each pair.

    A collective per dtype, and one per scalar, of which every rank has all. Ranks that call it for
    another `name` raise. Gradients have `row_strides`.
    """
    # One collective per dtype: a message has one, and additions are rounded to it.
    by_dtype: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
    for gradient, rows in pairs:
        if gradient.dim():
            by_dtype.setdefault(gradient.dtype, []).append((gradient, rows))
        else:
            all_reduce(rows, transport=transport)
    for same_dtype in by_dtype.values():
        gradients, means = zip(*same_dtype, strict=True)
        if transport.collective_group is not None:
            _reduce_scatter_flat(gradients, means, transport)
        else:
            _reduce_scatter(name, gradients, means, transport)


def _reduce_scatter(
    name: str, gradients: Sequence[Tensor], means: Sequence[Tensor], transport: Transport
) -> None:
    """Write this rank's rows of the mean of each gradient into `means`. A collective.

    Rank r adds the rows that the others send it to its own: n (p-1)/p bytes sent per rank for n
    bytes of gradients.
    """
    p = transport.world_size
    # A sum of float16 could overflow where the mean does not.
    is_divided_first = gradients[0].dtype == torch.float16 or p == 1
    whole = [
        (gradient / p if is_divided_first else gradient).to(transport.device)
        for gradient in gradients
    ]
    # On a GPU over gloo these are copies in CPU memory, which come back below.
    results = [mean.to(transport.device) for mean in means]
    blocks, packed = _pack(
        [[*_by_rank(each, p), _flatten(own)] for each, own in zip(whole, results, strict=True)]
    )
    _fill(packed[:-1])
    description = checksum(
        "reduce_scatter", name, *((tuple(each.shape), each.dtype) for each in gradients)
    )
    call = Call(transport, "reduce_scatter", "butterfly", gradients, description)
    transfers: list[Transfer] = []
    for *shards, result in blocks:
        transfers += reduce_scatter_round(shards, result, call, 1 if is_divided_first else p)
        if p == 1:
            result.copy_(shards[0])
    call.run([transfers])
    _unpack(packed[-1:])
    for mean, result in zip(means, results, strict=True):
        if mean is not result:
            mean.copy_(result)


def _all_gather_flat(tensors: Sequence[Tensor], transport: Transport) -> None:
    """Complete tensors in place by the backend's all-gather, one per dtype."""
    rank = transport.rank
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same_dtype in by_dtype.values():
        dense = [with_strides(tensor, row_strides(tensor)) for tensor in same_dtype]
        blocks = [_by_rank(each, transport.world_size) for each in dense]
        flat, flat_blocks = _make_flat(blocks)
        foreach_copy_([each[rank] for each in flat_blocks], [block[rank] for block in blocks])
        sent_bytes = flat[rank].nbytes * (transport.world_size - 1)
        record_collective("all_gather", "nccl", same_dtype, sent_bytes)
        # In place: NCCL takes this rank's part of the output as its input.
        all_gather_single(flat.view(-1), flat[rank], group=transport.collective_group)
        foreach_copy_([*chain(*blocks)], [*chain(*flat_blocks)])
        for tensor, each in zip(same_dtype, dense, strict=True):
            if tensor is not each:
                tensor.copy_(each)


def _reduce_scatter_flat(
    gradients: Sequence[Tensor], means: Sequence[Tensor], transport: Transport
) -> None:
    """Write this rank's rows of the mean of each gradient into `means`.

    By the backend's reduce-scatter.
    """
    p = transport.world_size
    # A sum of float16 could overflow where the mean does not.
    is_divided_first = gradients[0].dtype == torch.float16
    blocks = [_by_rank(each, p) for each in gradients]
    flat, flat_blocks = _make_flat(blocks)
    foreach_copy_([*chain(*flat_blocks)], [*chain(*blocks)])
    if is_divided_first:
        flat.div_(p)
    local = torch.empty_like(flat[0])
    record_collective("reduce_scatter", "nccl", gradients, local.nbytes * (p - 1))
    reduce_scatter_single(local, flat.view(-1), group=transport.collective_group)
    if not is_divided_first:
        local.div_(p)
    padded_sizes = [len(block[0]) for block in blocks]
    for mean, padded in zip(means, local.split(padded_sizes), strict=True):
        _flatten(mean).copy_(padded[: mean.numel()])


def _make_flat(blocks: Blocks) -> tuple[Tensor, Blocks]:
    """Return memory for all blocks, (p, n), and views of it as the blocks are.

    Each rank's part is as long as that of rank 0, which has the most rows: backends want equal
    parts.
    """
    padded_sizes = [len(block[0]) for block in blocks]
    flat = blocks[0][0].new_empty(len(blocks[0]), sum(padded_sizes))
    flat_blocks = []
    for padded_block, block in zip(flat.split(padded_sizes, dim=1), blocks, strict=True):
        flat_blocks.append(
            [padded[: len(rows)] for padded, rows in zip(padded_block, block, strict=True)]
        )
    return flat, flat_blocks


def _flatten(dense: Tensor) -> Tensor:
    """Return all elements in the order of memory, (n,), a view."""
    return dense.as_strided((dense.numel(),), (1,))


def _by_rank(whole: Tensor, p: int) -> list[Tensor]:
    """Return each rank's rows of a tensor with `row_strides`: p vectors, views."""
    width = whole[:1].numel()
    return list(
        _flatten(whole).split_with_sizes([width * size for size in shard_sizes(len(whole), p)])
    )


def _pack(blocks: Blocks) -> tuple[Blocks, list[tuple[Tensor, list[Tensor]]]]:
    """Merge small blocks into one.

    Return the large blocks and the merged one; and the vectors of the merged one, each with the
    small vectors that `_fill` copies into it, or `_unpack` out of it.
    """
    small = [block for block in blocks if block[0].nbytes <= SMALL_BYTES]
    large = [block for block in blocks if block[0].nbytes > SMALL_BYTES]
    packed = []
    for of_one_rank in zip(*small, strict=True):
        vector = of_one_rank[0].new_empty(sum(map(len, of_one_rank)))
        packed.append((vector, list(of_one_rank)))
    merged = [[vector for vector, _ in packed]] if small else []
    return large + merged, packed


def _fill(packed: Sequence[tuple[Tensor, list[Tensor]]]) -> None:
    for vector, small in packed:
        torch.cat(small, out=vector)


def _unpack(packed: Sequence[tuple[Tensor, list[Tensor]]]) -> None:
    for vector, small in packed:
        foreach_copy_(small, list(vector.split([len(each) for each in small])))
