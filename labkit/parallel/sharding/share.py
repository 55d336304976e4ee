"""A rank's share of the parameters: what the optimizer inside of a `ShardedOptimizer` updates."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from labkit.parallel.data_parallel.layout import flat_view, gradient_in_layout
from labkit.parallel.sharding.partition import Piece, by_elements, by_parameters, elements


class Share:
    """Which rank has which pieces; and this rank's, each a view of its parameter, or the parameter if that is whole."""

    def __init__(self, rank: int, world_size: int, is_elementwise: bool):
        self.rank, self.world_size = rank, world_size
        self._is_elementwise = is_elementwise
        self._loads = {trained: [0] * world_size for trained in (True, False)}
        self.pieces: list[list[Piece]] = [[] for _ in range(world_size)]
        self.tensors: dict[Piece, Tensor] = {}

    @property
    def own(self) -> list[Piece]:
        return self.pieces[self.rank]

    def add(self, parameters: Sequence[Tensor], first: int) -> list[Tensor]:
        """Share out more parameters, numbered from `first`; those of this rank."""
        if self._is_elementwise:
            pieces = by_elements(parameters, first, self.world_size)
        else:
            pieces = by_parameters(parameters, first, self._loads)
        for of_rank, more in zip(self.pieces, pieces, strict=True):
            of_rank += more
        own = {piece: _tensor_of(parameters[piece.parameter - first], piece) for piece in pieces[self.rank]}
        self.tensors |= own
        return list(own.values())

    def states(self, optimizer: Optimizer) -> dict[int, Any]:
        """The states that the optimizer has, by number of the parameter."""
        found = optimizer.state
        return {piece.parameter: found[tensor] for piece, tensor in self.tensors.items() if tensor in found}

    def take_gradients(self, parameters: Sequence[Tensor], optimizer: Optimizer) -> None:
        """The pieces get the gradients that the parameters have now. All parameters, by number."""
        for piece, tensor in list(self.tensors.items()):
            parameter = parameters[piece.parameter]
            if tensor is parameter:
                continue
            start = parameter.data_ptr() + piece.start * parameter.itemsize
            if tensor.data_ptr() != start or tensor.dtype != parameter.dtype:
                tensor = self._replace(piece, _tensor_of(parameter, piece), optimizer)
            if parameter.grad is not None:
                tensor.grad = flat_view(gradient_in_layout(parameter))[piece.start : piece.stop]

    def release_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Hold none of them any longer than the parameters do."""
        for piece, tensor in self.tensors.items():
            if tensor is not parameters[piece.parameter]:
                tensor.grad = None

    def _replace(self, piece: Piece, moved: Tensor, optimizer: Optimizer) -> Tensor:
        """A parameter's data was put somewhere else (`model.to`, say): its piece is a view of that from now on."""
        before, self.tensors[piece] = self.tensors[piece], moved
        for group in optimizer.param_groups:
            group["params"] = [moved if tensor is before else tensor for tensor in group["params"]]
        if before in optimizer.state:
            optimizer.state[moved] = optimizer.state.pop(before)
        return moved


def _tensor_of(parameter: Tensor, piece: Piece) -> Tensor:
    return parameter if piece.stop - piece.start == parameter.numel() else elements(parameter, piece)
