"""What is trained in shards, whole: parameters as the bare module has them, an optimizer's state as torch's.

Whole parameters travel a unit at a time. Both load on any number of ranks, of which each takes its share.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from labkit.parallel.background_comm import Channel
from labkit.parallel.collectives import all_gather
from labkit.parallel.sharding.checkpoint import gather_states, part_of_state
from labkit.parallel.sharding.flat import Flat, Slot
from labkit.parallel.sharding.partition import Piece, elements
from labkit.parallel.sharding.unit import Unit


@torch.no_grad()
def whole_parameters(units: Sequence[Unit], channel: Channel) -> Iterator[tuple[Slot, Tensor]]:
    """Every parameter in its own dtype, in memory that is its unit's until the next one. A collective."""
    for flat in (flat for unit in units for flat in unit.flats):
        device = flat.shards[0].device
        vector = torch.empty(flat.numel, dtype=flat.dtype, device=device)
        flat.fill(vector)
        if not flat.is_replicated:
            channel.start(partial(channel.call, all_gather, vector, sizes=flat.sizes))()
        yield from zip(flat.slots, flat.views(vector), strict=True)


def shares_of(units: Sequence[Unit], state: Mapping[str, Any]) -> dict[str, Any]:
    """The same state with this rank's shard in place of every whole parameter; ValueError for another shape."""
    found = dict(state)
    for flat, number, slot in _numbered(units):
        shard = flat.shards[number]
        for name in slot.names:
            if name not in state:
                continue
            if state[name].shape != slot.like.shape:
                got = tuple(state[name].shape)
                raise ValueError(f"expected {name} to have the shape {tuple(slot.like.shape)}, got {got}")
            piece = _own_piece(flat, number)
            laid_out = torch.empty_strided(slot.like.shape, slot.like.stride(), dtype=state[name].dtype)
            part = elements(laid_out.copy_(state[name]), piece)
            found[name] = part.as_strided(shard.shape, shard.stride(), part.storage_offset())
    return found


def whole_optimizer_state(
    units: Sequence[Unit], optimizer: Optimizer, group: dist.ProcessGroup | None, to: int | None
) -> dict[str, Any] | None:
    """As the same optimizer over whole parameters would give it, on group rank `to` or on all. A collective."""
    places, rank = _places(units, optimizer), dist.get_rank(group)
    pieces: list[list[Piece]] = [[] for _ in range(dist.get_world_size(group))]
    for number, (flat, at) in enumerate(places):
        for other, of_rank in enumerate(flat.pieces):
            pieces[other] += [Piece(number, piece.start, piece.stop) for piece in of_rank if piece.parameter == at]
    mine = {piece.parameter for piece in pieces[rank]}
    own = {
        number: optimizer.state[flat.shards[at]]
        for number, (flat, at) in enumerate(places)
        if number in mine and flat.shards[at] in optimizer.state
    }
    like = [flat.slots[at].like for flat, at in places]
    found = gather_states(own, like, pieces, group, to, device=places[0][0].shards[0].device)
    groups = optimizer.state_dict()["param_groups"]
    return None if found is None else {"state": found, "param_groups": groups}


def load_optimizer_state(units: Sequence[Unit], optimizer: Optimizer, state: Mapping[str, Any]) -> None:
    """This rank's share of a whole state; ValueError for other parameter groups."""
    places = _places(units, optimizer)
    lengths = [[len(group["params"]) for group in groups] for groups in (state["param_groups"], optimizer.param_groups)]
    if lengths[0] != lengths[1]:
        raise ValueError(f"expected groups of {lengths[1]} parameters, got {lengths[0]}")
    names = [name for group in state["param_groups"] for name in group["params"]]
    own = {
        names[number]: part_of_state(state["state"][names[number]], flat.slots[at].like, _own_piece(flat, at))
        for number, (flat, at) in enumerate(places)
        if names[number] in state["state"] and any(piece.parameter == at for piece in flat.own_pieces)
    }
    optimizer.load_state_dict({"state": own, "param_groups": state["param_groups"]})


def _numbered(units: Sequence[Unit]) -> Iterator[tuple[Flat, int, Slot]]:
    return ((flat, at, slot) for unit in units for flat in unit.flats for at, slot in enumerate(flat.slots))


def _own_piece(flat: Flat, number: int) -> Piece:
    return next((piece for piece in flat.own_pieces if piece.parameter == number), Piece(number, 0, 0))


def _places(units: Sequence[Unit], optimizer: Optimizer) -> list[tuple[Flat, int]]:
    """Flat and number of every parameter of the optimizer; ValueError for one that is none of the model's shards."""
    known = {id(flat.shards[at]): (flat, at) for flat, at, _ in _numbered(units)}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not parameters or any(id(parameter) not in known for parameter in parameters):
        raise ValueError("expected an optimizer of the parameters of this model, made after it was wrapped")
    return [known[id(parameter)] for parameter in parameters]
