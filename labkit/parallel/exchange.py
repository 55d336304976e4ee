"""Point to point: a whole tensor from one rank to another, for rings and pipelines."""

from __future__ import annotations

from itertools import zip_longest

import torch
import torch.distributed as dist

from labkit.parallel.disable_compile import disable_compile
from labkit.parallel.prepare import InPlace, cut
from labkit.parallel.transport.base import Step, Transport
from labkit.parallel.transport.select_transport import AUTO, find_transport


@disable_compile
def exchange(
    send: torch.Tensor | None,
    to: int | None,
    receive: torch.Tensor | None,
    source: int | None = None,
    group: dist.ProcessGroup | None = None,
    *,
    transport: str | Transport = AUTO,
) -> None:
    """Send a tensor to group rank `to`, and receive one, in place, from group rank `source`; None: no message.

    Both ranks of a message call once for it, with tensors of one length and dtype; `send` may return only when the
    other rank receives. The first call in a group is a collective: call `find_transport` on all ranks before if only
    some exchange. Raises ValueError without a tensor, or for a rank that is not in the group.
    """
    tensor = send if send is not None else receive
    if tensor is None:
        raise ValueError("expected a tensor to send, to receive, or both")
    transport = find_transport(group, tensor.device, transport)
    for part, rank in ((send, to), (receive, source)):
        if part is not None and (rank is None or not 0 <= rank < transport.world_size):
            raise ValueError(f"expected a rank from 0 to {transport.world_size - 1}, got {rank}")
    nothing = tensor.new_empty(0)
    outgoing = (nothing if send is None else send).detach().to(transport.device).contiguous().view(-1)
    with InPlace(nothing if receive is None else receive, group, transport, "exchange", "direct") as (incoming, via):
        pairs = zip_longest(*(cut([vector], via, depth=2)[0] for vector in (outgoing, incoming)))
        via.run([Step(sent, to or 0, received, source or 0) for sent, received in pairs], depth=2)
