"""All-gather of short vectors, over the same transports as the all-reduce: every rank gets everybody's."""

from __future__ import annotations

import torch
import torch.distributed as dist

from labkit.parallel.transport.choice import AUTO, find_transport
from labkit.parallel.transport.contract import SHARED, Step, Transport
from labkit.parallel.uncompiled import uncompiled


@uncompiled
def all_gather(
    vector: torch.Tensor, group: dist.ProcessGroup | None = None, *, transport: str | Transport = AUTO
) -> torch.Tensor:
    """The contiguous vectors (n,) of all ranks of `group`, one shape and type, as (p, n), by group rank.

    Direct exchange: each rank sends its vector to rank r+1, r+2, ... and stores theirs. p-1 messages of n elements a
    rank, all independent. Through shared memory a rank writes its vector once, and the others read it there; three
    ranks or more that all show what they have wait once, not p-1 times.

    Raises ValueError for a tensor that is not a contiguous vector, and as `all_reduce` does for group and transport.
    """
    if vector.dim() != 1 or not vector.is_contiguous():
        raise ValueError(f"expected a contiguous vector, got shape {tuple(vector.shape)}, strides {vector.stride()}")
    via = find_transport(group, vector.device, transport)
    p, r = via.world_size, via.rank
    here = vector.detach().to(via.device)
    gathered = here.new_empty((p, len(here)))
    if via.name == SHARED and p > 2 and 0 < here.nbytes <= via.shown_bytes:
        for row, shown in zip(gathered, via.show(here), strict=True):
            row.copy_(shown)
        return gathered.to(vector.device)
    gathered[r] = here
    number = max(1, -(-here.nbytes // via.piece_bytes))
    pieces = [row.tensor_split(number) for row in gathered]
    turns = [((r + s) % p, (r - s) % p, i) for i in range(number) for s in range(1, p)]
    via.run([Step(pieces[r][i], target, pieces[source][i], source, False) for target, source, i in turns], depth=p)
    return gathered.to(vector.device)
