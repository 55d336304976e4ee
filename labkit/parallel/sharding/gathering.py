"""Updated parameters for everybody: pieces packed into flat buckets, gathered, and copied out.

A bucket is bytes, so that it takes pieces of any dtype, and no longer than it was told: ranks that have more come with
more buckets, and those that are done have an empty part in them.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.parallel.collectives import all_gather
from labkit.parallel.sharding.partition import Piece, elements

ALIGNMENT_BYTES = 16  # of a piece in a bucket: whatever its dtype


class Bucket(NamedTuple):
    """What travels together: bytes of each rank's part, and by rank the pieces in it with their offset in bytes."""

    sizes: list[int]
    pieces: list[list[tuple[Piece, int]]]


class Gathering:
    """Makes every parameter whole on every rank of a group, given that each rank's pieces are right there."""

    def __init__(
        self,
        parameters: Sequence[Tensor],
        pieces: Sequence[Sequence[Piece]],
        bucket_bytes: int,
        group: dist.ProcessGroup | None,
        transport: str,
    ):
        """`pieces` by rank. All parameters are on one device, dense."""
        self._parameters, self._group, self._transport = parameters, group, transport
        itemsizes = {piece.parameter: parameters[piece.parameter].itemsize for of_rank in pieces for piece in of_rank}
        self.buckets = fill_buckets(pieces, itemsizes.__getitem__, bucket_bytes)
        longest = max((sum(bucket.sizes) for bucket in self.buckets), default=0)
        self._buffer = torch.empty(longest, dtype=torch.uint8, device=parameters[0].device)
        self._views: list[tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]] = []
        self._pointers: list[int] = []

    @torch.no_grad()
    def run(self) -> None:
        """A collective."""
        pointers = [parameter.data_ptr() for parameter in self._parameters]
        if pointers != self._pointers:
            self._pointers, rank = pointers, dist.get_rank(self._group)
            self._views = [self._views_of(bucket, rank) for bucket in self.buckets]
        for bucket, (own, others) in zip(self.buckets, self._views, strict=True):
            if own:
                torch._foreach_copy_([packed for packed, _ in own], [part for _, part in own])
            buffer = self._buffer[: sum(bucket.sizes)]
            all_gather(buffer, self._group, sizes=bucket.sizes, transport=self._transport)
            if others:
                torch._foreach_copy_([part for _, part in others], [packed for packed, _ in others])

    def _views_of(self, bucket: Bucket, rank: int) -> tuple[list[tuple[Tensor, Tensor]], list[tuple[Tensor, Tensor]]]:
        """Of this rank's pieces and of the others': where they lie in the bucket, and in the parameter."""
        views = [
            [
                (self._packed(piece, offset), elements(self._parameters[piece.parameter], piece))
                for piece, offset in of_rank
            ]
            for of_rank in bucket.pieces
        ]
        return views[rank], [pair for other, of_rank in enumerate(views) if other != rank for pair in of_rank]

    def _packed(self, piece: Piece, offset: int) -> Tensor:
        dtype = self._parameters[piece.parameter].dtype
        return self._buffer[offset : offset + (piece.stop - piece.start) * dtype.itemsize].view(dtype)


def fill_buckets(pieces: Sequence[Sequence[Piece]], itemsize: Callable[[int], int], bucket_bytes: int) -> list[Bucket]:
    """Buckets of at most about `bucket_bytes` for these pieces, by rank; long ones are cut."""
    room = max(ALIGNMENT_BYTES, bucket_bytes // len(pieces) // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
    parts = [_cut_into_parts(of_rank, itemsize, room) for of_rank in pieces]
    buckets = []
    for number in range(max(len(of_rank) for of_rank in parts)):
        sizes, placed, start = [], [], 0
        for of_rank in parts:
            size, content = of_rank[number] if number < len(of_rank) else (0, [])
            placed.append([(piece, start + offset) for piece, offset in content])
            sizes.append(size)
            start += size
        buckets.append(Bucket(sizes, placed))
    return buckets


def _cut_into_parts(
    pieces: Sequence[Piece], itemsize: Callable[[int], int], room: int
) -> list[tuple[int, list[tuple[Piece, int]]]]:
    """A rank's parts of `room` bytes: how many bytes are used, and pieces with their offset in the part."""
    parts: list[tuple[int, list[tuple[Piece, int]]]] = []
    used, content = 0, list[tuple[Piece, int]]()
    for number, start, stop in pieces:
        n_bytes = itemsize(number)
        while start < stop:
            if used == room:
                parts.append((used, content))
                used, content = 0, []
            end = min(stop, start + (room - used) // n_bytes)
            content.append((Piece(number, start, end), used))
            used += -(-(end - start) * n_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            start = end
    return [*parts, (used, content)] if content else parts
