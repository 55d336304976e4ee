"""The state of all shards in torch's own layout, and a shard of such a state.

A state is a dictionary a parameter: tensors shaped as the piece of it that a rank has, one value an element, are put
together and cut; everything else (a step count, say) is the same for all pieces of a parameter.
"""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.parallel.collectives import all_gather
from labkit.parallel.data_parallel.layout import flat_view
from labkit.parallel.sharding.partition import Piece
from labkit.parallel.transport.select_transport import member_group

State = dict[str, Any]


def gather_states(
    states: Mapping[int, State],
    parameters: Sequence[Tensor],
    pieces: Sequence[Sequence[Piece]],
    group: dist.ProcessGroup | None,
    to: int | None,
    *,
    device: torch.device,
) -> dict[int, State] | None:
    """Whole states by number of the parameter, on the CPU of group rank `to`, or of all (None); None on the others.

    `states` are those of this rank's pieces, `pieces` by rank; of `parameters` only shape and strides count.
    A collective. One parameter travels at a time, from `device`, as bytes that are read without executing anything they
    hold (`weights_only`).
    """
    rank = member_group(group).rank()
    blobs = {number: _packed(state).to(device) for number, state in states.items()}
    lengths = torch.zeros(len(pieces), len(parameters), dtype=torch.int64, device=device)
    for number, blob in blobs.items():
        lengths[rank, number] = len(blob)
    all_gather(lengths, group)
    found: dict[int, State] = {}
    for number, parameter in enumerate(parameters):
        sizes = lengths[:, number].tolist()
        if not any(sizes):
            continue
        everything = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        if number in blobs:
            everything.split(sizes)[rank].copy_(blobs.pop(number))
        all_gather(everything, group, sizes=sizes)
        if to in (None, rank):
            parts = {other: _unpacked(blob) for other, blob in enumerate(everything.split(sizes)) if len(blob)}
            found[number] = _joined(parameter, {_piece_of(pieces[other], number): parts[other] for other in parts})
    return found if to in (None, rank) else None


def part_of_state(state: Mapping[str, Any], parameter: Tensor, piece: Piece) -> State:
    """The state of a piece, given that of the parameter."""
    if piece.stop - piece.start == parameter.numel():
        return dict(state)
    return {
        name: _cut(value, parameter, piece) if isinstance(value, Tensor) and value.shape == parameter.shape else value
        for name, value in state.items()
    }


def _cut(value: Tensor, parameter: Tensor, piece: Piece) -> Tensor:
    """The piece's values, (stop - start,), in memory of their own; they lie as the parameter's elements do."""
    laid_out = torch.empty_strided(parameter.shape, parameter.stride(), dtype=value.dtype, device=value.device)
    return flat_view(laid_out.copy_(value))[piece.start : piece.stop].clone()


def _joined(parameter: Tensor, parts: Mapping[Piece, State]) -> State:
    """The whole state, given that of all pieces of a parameter, in their order."""
    (piece, whole), *_ = parts.items()
    if piece.stop - piece.start == parameter.numel():
        return whole
    for name, value in whole.items():
        if isinstance(value, Tensor) and value.shape == (piece.stop - piece.start,):
            laid_out = torch.empty_strided(parameter.shape, parameter.stride(), dtype=value.dtype)
            flat_view(laid_out).copy_(torch.cat([state[name] for state in parts.values()]))
            whole[name] = laid_out
    return whole


def _piece_of(pieces: Sequence[Piece], number: int) -> Piece:
    return next(piece for piece in pieces if piece.parameter == number)


def _packed(state: State) -> Tensor:
    """As bytes, (n,) uint8."""
    file = io.BytesIO()
    torch.save(state, file)
    return torch.frombuffer(file.getbuffer(), dtype=torch.uint8)


def _unpacked(blob: Tensor) -> State:
    state: State = torch.load(io.BytesIO(blob.cpu().numpy().tobytes()), map_location="cpu", weights_only=True)
    return state
