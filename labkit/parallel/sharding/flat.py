"""Parameters of one unit and one kind, end to end in one vector, of which a rank keeps a part.

    shards   what the optimizer sees: this rank's part, in the parameters' own dtype; always there
    full     what the unit computes with: whole parameters in the compute dtype, views of one vector whose memory comes
             with `gather` and goes with `release`

Autograd keeps `full`, or views of it, for the backward pass. They name memory that is given back and gathered again
in between, so that nothing of it has to be told to autograd. What is read while it is away is an error, not a guess:
`release` counts up the tensors' versions, as if they had been changed in place, and `gather` counts them back.

Parameters that are replicated take the same way without a message: their part is the whole.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from labkit.parallel.background_comm import Channel, Wait
from labkit.parallel.collectives import all_gather, reduce_scatter
from labkit.parallel.data_parallel.layout import flat_view, gradient_in_layout, strides_like
from labkit.parallel.sharding.partition import Piece

_resize = torch.ops.inductor.resize_storage_bytes_  # an operator, which a ledger of memory sees


@dataclass
class Slot:
    """A parameter: under which names modules have it, and how it looks when it is whole."""

    names: list[str]
    owners: list[tuple[nn.Module, str]]
    like: Tensor = field(repr=False)
    """On the meta device: shape, strides, dtype, without memory."""
    is_trained: bool = True

    @property
    def numel(self) -> int:
        return self.like.numel()


class Flat:
    """Some parameters of one dtype, all trained or none; `pieces` by rank say who keeps what, None: everybody all."""

    def __init__(
        self,
        slots: Sequence[Slot],
        values: Sequence[Tensor],
        pieces: Sequence[Sequence[Piece]] | None,
        rank: int,
        compute_dtype: torch.dtype,
    ):
        """`values` are the whole parameters, in the order of the slots."""
        self.slots, self.is_replicated, self.is_trained = list(slots), pieces is None, slots[0].is_trained
        whole = [Piece(number, 0, slot.numel) for number, slot in enumerate(slots)]
        self.pieces = [whole] if pieces is None else [list(of_rank) for of_rank in pieces]
        self.dtype, self.compute_dtype = values[0].dtype, compute_dtype
        self.sizes = [sum(piece.stop - piece.start for piece in of_rank) for of_rank in self.pieces]
        self.own_pieces = self.pieces[0 if pieces is None else rank]
        own = 0 if pieces is None else rank
        self.own = slice(sum(self.sizes[:own]), sum(self.sizes[: own + 1]))
        self._starts: dict[int, int] = {}
        at = 0
        for of_rank in self.pieces:
            for piece in of_rank:
                self._starts.setdefault(piece.parameter, at)
                at += piece.stop - piece.start
        self.numel = at
        device = values[0].device
        parts = [flat_view(values[piece.parameter])[piece.start : piece.stop] for piece in self.own_pieces]
        memory = torch.cat(parts) if parts else torch.empty(0, dtype=self.dtype, device=device)
        self.shards = [self._shard(number, memory) for number in range(len(slots))]
        self._is_alias = not self.numel or (self.is_replicated and compute_dtype == self.dtype)
        self.memory = memory if self._is_alias else torch.empty(self.numel, dtype=compute_dtype, device=device)
        self.is_freed = False
        self.full = [nn.Parameter(view, self.is_trained) for view in self.views(self.memory.data)]
        self.unreduced: dict[int, Tensor] = {}
        """Gradients of passes under `no_sync`, by number of the parameter, whole, in the parameters' own dtype."""
        self.results: list[Tensor] = []
        """Of this rank's part, (sizes[rank],): gradients of this pass that have been averaged."""
        self.release()

    def _shard(self, number: int, memory: Tensor) -> nn.Parameter:
        """This rank's part of a parameter: a vector, or in its own shape if it is all of it; without elements if none.

        Not even its number of dimensions tells then: some optimizers look at it (Muon).
        """
        like, at = self.slots[number].like, 0
        for piece in self.own_pieces:
            length = piece.stop - piece.start
            if piece.parameter == number:
                part = memory[at : at + length]
                if length == like.numel():
                    part = part.as_strided(like.shape, like.stride())
                return nn.Parameter(part, self.is_trained)
            at += length
        shape = (0, *like.shape[1:])
        return nn.Parameter(torch.empty(shape, dtype=memory.dtype, device=memory.device), self.is_trained)

    def views(self, vector: Tensor) -> list[Tensor]:
        """The whole parameters in a vector of all of them, (numel,)."""
        offset = vector.storage_offset()
        return [
            vector.as_strided(slot.like.shape, slot.like.stride(), offset + self._starts[number])
            for number, slot in enumerate(self.slots)
        ]

    def own_views(self, part: Tensor) -> list[Tensor]:
        """This rank's pieces in a vector of its part, (sizes[rank],), in the order of `own_pieces`."""
        return list(part.split([piece.stop - piece.start for piece in self.own_pieces]))

    def own_shards(self) -> list[Tensor]:
        """The same of the shards, as vectors."""
        return [flat_view(self.shards[piece.parameter].detach()) for piece in self.own_pieces]

    # Parameters

    def gather(self, channel: Channel) -> Wait | None:
        """Begin to make the parameters whole; None if nobody has to wait. A collective unless they are replicated."""
        if not self.is_freed:
            return None
        self.is_freed = False
        _resize(self.memory, self.numel * self.compute_dtype.itemsize)
        torch._C._autograd._unsafe_set_version_counter(tuple(self.full), (0,) * len(self.full))
        self.fill(self.memory)
        if self.is_replicated or channel.transport.world_size == 1:
            return None
        return channel.start(partial(channel.call, all_gather, self.memory, sizes=self.sizes))

    @torch.no_grad()
    def fill(self, vector: Tensor) -> None:
        """This rank's part of a vector of all parameters."""
        if self.own_pieces:
            torch._foreach_copy_(self.own_views(vector[self.own]), self.own_shards())

    def release(self) -> None:
        """Give the memory of whole parameters back."""
        if not self.is_freed and not self._is_alias:
            self._free()

    def _free(self) -> None:
        self.is_freed = True
        _resize(self.memory, 0)
        torch.autograd.graph.increment_version(self.full)

    # Gradients

    def keep(self, number: int) -> None:
        """The gradient of a whole parameter is for a later pass to average."""
        gradient = self.full[number].grad
        assert gradient is not None
        self.full[number].grad = None
        if number in self.unreduced:
            self.unreduced[number].add_(gradient)
        else:
            self.unreduced[number] = gradient.to(self.dtype)

    def has_gradient(self, number: int) -> bool:
        """One that is not averaged yet."""
        return self.full[number].grad is not None or number in self.unreduced

    def pack(self, vector: Tensor) -> None:
        """All gradients that are not averaged yet, zeros for those that are missing, into a vector, (numel,)."""
        views = self.views(vector)
        for number, (view, full) in enumerate(zip(views, self.full, strict=True)):
            kept = self.unreduced.pop(number, None)
            if full.grad is not None:
                view.copy_(full.grad if kept is None else kept.add_(full.grad))
            elif kept is not None:
                view.copy_(kept)
            else:
                view.zero_()
            full.grad = None

    def reduce(self, vector: Tensor, channel: Channel) -> None:
        """Carry out the collective, and keep this rank's part."""
        own = vector.new_empty(self.own.stop - self.own.start)
        channel.call(reduce_scatter, vector, "mean", sizes=self.sizes, into=own)
        self.results.append(own.to(self.dtype))

    def assign(self, used: Sequence[bool]) -> None:
        """Averaged gradients for the shards of parameters that are `used`, added to what they have."""
        results, self.results = self.results, []
        if not results:
            return
        total = results[0]
        for other in results[1:]:
            total.add_(other)
        for piece, part in zip(self.own_pieces, self.own_views(total), strict=True):
            shard = self.shards[piece.parameter]
            if not used[piece.parameter]:
                continue
            if shard.grad is None:
                shard.grad = part.as_strided(shard.shape, strides_like(shard), part.storage_offset())
            else:
                flat_view(gradient_in_layout(shard)).add_(part)

    def forget(self) -> None:
        """Gradients of a pass that an exception has ended."""
        self.results.clear()
        for full in self.full:
            full.grad = None
