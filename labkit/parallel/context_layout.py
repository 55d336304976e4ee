"""How a sequence is split over ranks: the positions of each, splitting and joining.

For p ranks and causal attention, in which query i sees keys up to i:

    contiguous    Rank r has the r-th of p parts: it sees all keys of r parts, and half of its own.
                  All wait for the last rank, so ranks work for p/(2p-1) of the time.
    zigzag        Rank r has the r-th and the r-th last of 2p parts. Its queries see the first half
                  of an earlier rank's block, and their second half sees all of a later rank's.
                  All ranks have equal work.

Source: Dubey et al. 2024 (arXiv:2407.21783), section 3.3.2, for zigzag.
"""

from __future__ import annotations

import torch
from torch import Tensor

from labkit.parallel.collectives import all_gather
from labkit.parallel.transport import AUTO, Group, member_group

LAYOUTS = ("zigzag", "contiguous")


def local_positions(
    length: int, *, group: Group = None, layout: str = "zigzag", rank: int | None = None
) -> Tensor:
    """Return a rank's positions in a sequence, (length / p,), int64.

    `rank`: of the group, None: this one.
    Raises ValueError for a length that is not a multiple of p, or of 2p with zigzag.
    """
    members = member_group(group)
    pieces = torch.arange(length).chunk(count_parts(length, members.size(), layout))
    if rank is None:
        rank = members.rank()
    if layout == "contiguous":
        return pieces[rank]
    return torch.cat([pieces[rank], pieces[-1 - rank]])


def split_sequence(x: Tensor, dim: int, *, group: Group = None, layout: str = "zigzag") -> Tensor:
    """Return this rank's positions of a tensor with the whole sequence in dimension `dim`.

    Errors as `local_positions`. Split targets like tokens, after shifting them (`next_tokens` in
    `losses`): the target of a part's last token is the first one of another part.
    """
    return x.index_select(
        dim, local_positions(x.shape[dim], group=group, layout=layout).to(x.device)
    )


@torch.no_grad()
def join_sequence(
    x: Tensor, dim: int, *, group: Group = None, layout: str = "zigzag", transport: str = AUTO
) -> Tensor:
    """Return the whole of a tensor that `split_sequence` has split, on every rank.

    Without its graph. A collective.
    """
    members = member_group(group)
    p = members.size()
    length = x.shape[dim] * members.size()
    parts = x.new_empty(p, *x.shape)
    parts[members.rank()] = x
    all_gather(parts, group, transport=transport)
    by_rank = [local_positions(length, group=group, layout=layout, rank=rank) for rank in range(p)]
    places = torch.cat(by_rank).to(x.device)
    return torch.cat(list(parts), dim).index_select(dim, places.argsort())


def count_parts(length: int, p: int, layout: str) -> int:
    """Return the parts into which p ranks cut a sequence; ValueError if they cannot."""
    if layout not in LAYOUTS:
        raise ValueError(f"expected a layout among {', '.join(LAYOUTS)}, got {layout!r}")
    parts = 2 * p if layout == "zigzag" else p
    if length < parts or length % parts:
        raise ValueError(f"expected a sequence that {parts} parts divide, got {length} positions")
    return parts
