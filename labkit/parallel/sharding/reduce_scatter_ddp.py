"""ZeRO-2: gradients averaged by reduce-scatter, so that each rank gets, and keeps, the mean of its share only.

    model = ReduceScatterDDP(model)
    optimizer = ShardedOptimizer(model.parameters(), torch.optim.AdamW, wrapper=model, lr=1e-3)
    loss = criterion(model(inputs), targets)
    loss.backward()             each rank has the mean gradient of what it updates; `p.grad` is given back
    optimizer.step()            each rank updates its share, then all get all of it

With Psi bytes of parameters, each rank sends 2 Psi (p-1)/p bytes a step, as an all-reduce of the gradients does:
here they are averaged by the first half of one, and the second half moves updated parameters. A whole gradient lives
until it has been put into its bucket.

Source: Rajbhandari et al. 2020, arXiv:1910.02054, section 5.2 (P_os+g) and 7.2.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from labkit.parallel.background_comm import Channel, Wait
from labkit.parallel.collectives import reduce_scatter
from labkit.parallel.data_parallel.base import DataParallel
from labkit.parallel.data_parallel.layout import flat_view, gradient_in_layout
from labkit.parallel.data_parallel.overlapped import assign_to_buckets
from labkit.parallel.data_parallel.reducer import LabkitReducer
from labkit.parallel.sharding.partition import Piece
from labkit.parallel.transport import AUTO


class Layout(NamedTuple):
    """How a bucket travels: of how many elements each rank's part is, this rank's pieces, and where all others go."""

    sizes: list[int]
    own: list[Piece]
    places: dict[int, list[tuple[Piece, int]]]
    """By parameter: its pieces, and at which element of the bucket each begins."""


class ReduceScatterDDP(DataParallel):
    """One reduce-scatter a bucket, begun as soon as the bucket's last gradient is there. For a `ShardedOptimizer`.

    Args:
        bucket_mb: a bucket is full from so many MiB of gradients on.
        first_bucket_mb: the same for the first bucket.
        all_reduce: the transport, of labkit's; torch's own reduce-scatter knows no uneven shares.

    Other arguments as `DataParallel`; ValueError for sizes that are not positive, and as there. RuntimeError for a
    backward pass before there is the optimizer that says which rank needs which gradients.

    Clip by `ShardedOptimizer.clip_grad_norm_`: no rank has all gradients.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        bucket_mb: float = 25.0,
        first_bucket_mb: float = 1.0,
        all_reduce: str = AUTO,
        **options: Any,
    ):
        self._sizes_mb = (bucket_mb, first_bucket_mb)
        super().__init__(module, all_reduce=all_reduce, **options)
        if not isinstance(self._reducer, LabkitReducer):
            raise ValueError("expected one of labkit's transports: torch's reduce-scatter knows no uneven shares")
        self._buckets = assign_to_buckets(self._parameters_in_order, *self._sizes_mb)
        self._bucket_of = {index: number for number, bucket in enumerate(self._buckets) for index in bucket}
        self._layouts: list[Layout] | None = None
        self._shares: Mapping[Piece, Tensor] = {}
        self._memory: dict[torch.device, Tensor] = {}
        self._averages: list[Tensor] = []
        self._forget_pass()

    def _settings(self) -> dict[str, object]:
        return super()._settings() | {"bucket_mb, first_bucket_mb": self._sizes_mb}

    @property
    def parameters_in_order(self) -> list[nn.Parameter]:
        """Trained parameters, in the order in which they have numbers here."""
        return list(self._parameters_in_order)

    def bucket_of(self, parameter: Tensor) -> int:
        """The number of the bucket; -1 for what is in none."""
        numbers = (index for index, known in enumerate(self._parameters_in_order) if known is parameter)
        return self._bucket_of.get(next(numbers, -1), -1)

    def share_out(self, pieces: Sequence[Sequence[Piece]], shares: Mapping[Piece, Tensor]) -> None:
        """From now on rank r gets the gradients of `pieces[r]`; this rank as `grad` of its `shares`. A collective.

        Pieces count parameters as `parameters_in_order` does, and cover each of them once.
        """
        layouts = [self._layout(bucket, pieces) for bucket in self._buckets]
        longest: dict[torch.device, int] = {}
        for bucket, layout in zip(self._buckets, layouts, strict=True):
            first = self._parameters_in_order[bucket[0]]
            longest[first.device] = max(longest.get(first.device, 0), sum(layout.sizes) * first.itemsize)
        self._memory = {
            device: torch.empty(n_bytes, dtype=torch.uint8, device=device) for device, n_bytes in longest.items()
        }
        self._averages = [
            self._parameters_in_order[bucket[0]].detach().new_empty(layout.sizes[self._rank])
            for bucket, layout in zip(self._buckets, layouts, strict=True)
        ]
        self._layouts, self._shares = layouts, shares

    def _layout(self, bucket: Sequence[int], pieces: Sequence[Sequence[Piece]]) -> Layout:
        places: dict[int, list[tuple[Piece, int]]] = {index: [] for index in bucket}
        inside = [[piece for piece in of_rank if piece.parameter in places] for of_rank in pieces]
        at = 0
        for piece in (piece for of_rank in inside for piece in of_rank):
            places[piece.parameter].append((piece, at))
            at += piece.stop - piece.start
        sizes = [sum(piece.stop - piece.start for piece in of_rank) for of_rank in inside]
        return Layout(sizes, inside[self._rank], places)

    @property
    def _overlaps(self) -> bool:
        return not self.find_unused

    def _gradient_ready(self, index: int) -> None:
        self._here[self._bucket_of[index]].append(index)
        self._go_on()

    def _finish(self, pending: list[int]) -> None:
        for index in pending:
            self._here[self._bucket_of[index]].append(index)
        self._go_on()
        self._abandon()
        if not self.find_unused:
            self._assign([True] * len(self._parameters_in_order))

    def _clear_globally_unused(self, has_gradient: list[bool]) -> None:
        self._assign(self._sync_used_flags(has_gradient))

    def _go_on(self) -> None:
        """Fill buckets and begin those that are full, in their order: every rank must begin them in the same one.

        There is one vector: while it travels, gradients wait where they are, and backward for it only if a bucket is
        full meanwhile. Those of later buckets wait, too.
        """
        if self._layouts is None:
            raise RuntimeError("expected a ShardedOptimizer(..., wrapper=this) before the first backward pass")
        while (number := len(self._waits)) < len(self._buckets):
            here = self._here[number]
            if not self._is_free and len(here) < self._missing:
                return
            for wait in self._waits[-1:]:
                wait()
            for index in here:
                self._put(index, number, self._layouts[number])
            self._missing -= len(here)
            here.clear()
            if self._missing:
                return
            self._begin(number, self._layouts[number])

    def _put(self, index: int, number: int, layout: Layout) -> None:
        """The gradient, divided by the number of ranks, into its bucket: now, while it is in the cache."""
        vector, parameter = self._vector_of(number, layout), self._parameters_in_order[index]
        gradient = None if parameter.grad is None else flat_view(gradient_in_layout(parameter))
        for piece, at in layout.places[index]:
            part = vector[at : at + piece.stop - piece.start]
            if gradient is None:
                part.zero_()
            else:
                torch.div(gradient[piece.start : piece.stop], self.world_size, out=part)
        parameter.grad = None

    def _vector_of(self, number: int, layout: Layout) -> Tensor:
        first = self._parameters_in_order[self._buckets[number][0]]
        return self._memory[first.device][: sum(layout.sizes) * first.itemsize].view(first.dtype)

    def _begin(self, number: int, layout: Layout) -> None:
        assert isinstance(self._reducer, LabkitReducer)
        vector = self._vector_of(number, layout)
        has_gradients = any(self._shares[piece].grad is not None for piece in layout.own)
        average = torch.empty_like(self._averages[number]) if has_gradients else self._averages[number]
        channel = self._reducer.channels[vector.device]
        self._results.append(average)
        self._is_free = False
        self._waits.append(channel.start(partial(self._reduce, vector, layout, channel, average)))
        if number + 1 < len(self._buckets):
            self._missing = len(self._buckets[number + 1])

    def _reduce(self, vector: Tensor, layout: Layout, channel: Channel, average: Tensor) -> None:
        channel.call(reduce_scatter, vector, "sum", sizes=layout.sizes, into=average)
        self._is_free = True

    def _assign(self, used: Sequence[bool]) -> None:
        """Averaged gradients for this rank's shares, added to what they have."""
        assert self._layouts is not None, "there is one by the time a bucket begins"
        for layout, average in zip(self._layouts, self._results, strict=True):
            for piece, part in zip(layout.own, average.split([p.stop - p.start for p in layout.own]), strict=True):
                share = self._shares[piece]
                if not used[piece.parameter]:
                    continue
                if share.grad is None:
                    share.grad = part.as_strided(share.shape, share.stride(), part.storage_offset())
                else:
                    flat_view(share.grad).add_(part)

    @property
    def _rank(self) -> int:
        assert isinstance(self._reducer, LabkitReducer)
        return next(iter(self._reducer.channels.values())).transport.rank

    def _abandon(self) -> None:
        for wait in self._waits:
            wait()

    def _forget_pass(self) -> None:
        super()._forget_pass()
        self._waits: list[Wait] = []
        self._results: list[Tensor] = []
        self._here: list[list[int]] = [[] for _ in self._buckets]  # gradients that are in no bucket yet
        self._missing = len(self._buckets[0])  # of the bucket that is being filled
        self._is_free = True  # the vector: nothing in it travels
