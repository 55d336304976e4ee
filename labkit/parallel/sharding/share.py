"""A rank's share of the parameters: what the optimizer inside of a `ShardedOptimizer` updates."""

from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from labkit.parallel.data_parallel.layout import flat_view, gradient_in_layout
from labkit.parallel.sharding.partition import Piece, by_elements, by_parameters, elements
from labkit.parallel.sharding.reduce_scatter_ddp import ReduceScatterDDP


class Share:
    """Which rank has which pieces; and this rank's, each a view of its parameter, or the parameter if that is whole.

    With a wrapper that hands out gradients by piece, all are views, which have gradients of their own, and pieces are
    shared out evenly within each of its buckets.
    """

    def __init__(self, rank: int, world_size: int, is_elementwise: bool, wrapper: ReduceScatterDDP | None):
        self.rank, self.world_size = rank, world_size
        self._is_elementwise, self._wrapper = is_elementwise, wrapper
        self._loads = {trained: [0] * world_size for trained in (True, False)}
        self.pieces: list[list[Piece]] = [[] for _ in range(world_size)]
        self.tensors: dict[Piece, Tensor] = {}

    @property
    def own(self) -> list[Piece]:
        return self.pieces[self.rank]

    def copy(self) -> "Share":
        """The same pieces and tensors, to which more can be added that this one does not get."""
        other = copy(self)
        other._loads = {trained: [*loads] for trained, loads in self._loads.items()}
        other.pieces, other.tensors = [[*of_rank] for of_rank in self.pieces], {**self.tensors}
        return other

    def add(self, parameters: Sequence[Tensor], first: int) -> list[Tensor]:
        """Share out more parameters, numbered from `first`; those of this rank."""
        if self._is_elementwise:
            bucket_of = (lambda _: 0) if self._wrapper is None else self._wrapper.bucket_of
            pieces = by_elements(parameters, first, self.world_size, bucket_of)
        else:
            pieces = by_parameters(parameters, first, self._loads)
        for of_rank, more in zip(self.pieces, pieces, strict=True):
            of_rank += more
        own = {piece: self._tensor_of(parameters[piece.parameter - first], piece) for piece in pieces[self.rank]}
        self.tensors |= own
        return list(own.values())

    def states(self, optimizer: Optimizer) -> dict[int, Any]:
        """The states that the optimizer has, by number of the parameter."""
        found = optimizer.state
        return {piece.parameter: found[tensor] for piece, tensor in self.tensors.items() if tensor in found}

    def connect(self, parameters: Sequence[Tensor]) -> None:
        """The wrapper hands out gradients to these pieces from now on. All parameters, by number. A collective.

        ValueError unless they are the wrapper's, but for those that are frozen.
        """
        assert self._wrapper is not None
        places = {id(parameter): number for number, parameter in enumerate(self._wrapper.parameters_in_order)}
        of_wrapper = {number: places[id(p)] for number, p in enumerate(parameters) if id(p) in places}
        if len(of_wrapper) != len(places) or sum(p.requires_grad for p in parameters) != len(places):
            raise ValueError("expected all trained parameters of the wrapper, and no others")

        def renumbered(pieces: Iterable[Piece]) -> dict[Piece, Piece]:
            known = [piece for piece in pieces if piece.parameter in of_wrapper]
            return {piece: piece._replace(parameter=of_wrapper[piece.parameter]) for piece in known}

        shares = {theirs: self.tensors[piece] for piece, theirs in renumbered(self.own).items()}
        self._wrapper.share_out([list(renumbered(of_rank).values()) for of_rank in self.pieces], shares)

    def take_gradients(self, parameters: Sequence[Tensor], optimizer: Optimizer) -> None:
        """The pieces get the gradients that the parameters have now. All parameters, by number."""
        for piece, tensor in list(self.tensors.items()):
            parameter = parameters[piece.parameter]
            if tensor is parameter:
                continue
            start = parameter.data_ptr() + piece.start * parameter.itemsize
            if tensor.data_ptr() != start or tensor.dtype != parameter.dtype:
                tensor = self._replace(piece, parameter, optimizer)
            if self._wrapper is None and parameter.grad is not None:
                tensor.grad = flat_view(gradient_in_layout(parameter))[piece.start : piece.stop]

    def release_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Hold none of them any longer than the parameters do."""
        for piece, tensor in self.tensors.items():
            if self._wrapper is None and tensor is not parameters[piece.parameter]:
                tensor.grad = None

    def zero_grad(self) -> None:
        """Forget what the wrapper has handed out."""
        for tensor in self.tensors.values():
            tensor.grad = None

    def _replace(self, piece: Piece, parameter: Tensor, optimizer: Optimizer) -> Tensor:
        """A parameter's data was put somewhere else (`model.to`, say): its piece is a view of that from now on."""
        if self._wrapper is not None:
            raise RuntimeError("expected parameters that stay where they were when the optimizer was made")
        before, moved = self.tensors[piece], self._tensor_of(parameter, piece)
        self.tensors[piece] = moved
        for group in optimizer.param_groups:
            group["params"] = [moved if tensor is before else tensor for tensor in group["params"]]
        if before in optimizer.state:
            optimizer.state[moved] = optimizer.state.pop(before)
        return moved

    def _tensor_of(self, parameter: Tensor, piece: Piece) -> Tensor:
        if piece.stop - piece.start < parameter.numel():
            return elements(parameter, piece)
        return parameter if self._wrapper is None else parameter.detach()
