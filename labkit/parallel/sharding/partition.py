"""Which rank has which elements of which parameters: arithmetic that every rank does alike, without a message."""

from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

from torch import Tensor

from labkit.parallel.data_parallel.layout import flat_view


class Piece(NamedTuple):
    """Elements `start` to `stop` of a parameter, counted in the order in which they lie in memory."""

    parameter: int
    """Its number among the optimizer's, group by group."""
    start: int
    stop: int


def by_elements(
    parameters: Sequence[Tensor], first: int, world_size: int, bucket_of: Callable[[Tensor], int] = lambda _: 0
) -> list[list[Piece]]:
    """By rank, pieces of these parameters, numbered from `first`: as many elements of each kind, to within one.

    A kind is what costs and weighs the same per element: dtype, device, whether it is trained, and the bucket that it
    travels in. The parameters of a
    kind are laid end to end, and that range is cut into one part a rank (ZeRO, arXiv:1910.02054, section 5.1).
    """
    kinds: dict[object, list[int]] = {}
    for number, parameter in enumerate(parameters):
        kind = (bucket_of(parameter), parameter.dtype, parameter.device, parameter.requires_grad)
        kinds.setdefault(kind, []).append(number)
    pieces: list[list[Piece]] = [[] for _ in range(world_size)]
    for numbers in kinds.values():
        bounds = [0, *accumulate(_even_sizes(sum(parameters[number].numel() for number in numbers), world_size))]
        at = 0
        for number in numbers:
            numel = parameters[number].numel()
            for rank, (low, high) in enumerate(pairwise(bounds)):
                start, stop = max(low - at, 0), min(high - at, numel)
                if start < stop:
                    pieces[rank].append(Piece(first + number, start, stop))
            if not numel:  # it has a state, too
                pieces[0].append(Piece(first + number, 0, 0))
            at += numel
    return [sorted(of_rank) for of_rank in pieces]


def _even_sizes(numel: int, world_size: int) -> list[int]:
    size, longer = divmod(numel, world_size)
    return [size + 1] * longer + [size] * (world_size - longer)


def by_parameters(parameters: Sequence[Tensor], first: int, loads: dict[bool, list[int]]) -> list[list[Piece]]:
    """By rank, whole parameters: the largest first, each to the rank that has the fewest bytes by then.

    `loads`: bytes by rank, of trained parameters and of others apart, so far; they are added to.
    """
    pieces: list[list[Piece]] = [[] for _ in loads[True]]
    for number in sorted(range(len(parameters)), key=lambda number: -parameters[number].nbytes):
        parameter = parameters[number]
        load = loads[parameter.requires_grad]
        rank = load.index(min(load))
        load[rank] += parameter.nbytes
        pieces[rank].append(Piece(first + number, 0, parameter.numel()))
    return [sorted(of_rank) for of_rank in pieces]


def elements(parameter: Tensor, piece: Piece) -> Tensor:
    """The elements of a dense tensor that a piece names, (stop - start,): a view of its memory."""
    return flat_view(parameter.detach())[piece.start : piece.stop]
