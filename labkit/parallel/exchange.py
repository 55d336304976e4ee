"""Send whole tensors from one rank to another, for rings and pipelines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from labkit.parallel.prepare import as_vector, disable_compile
from labkit.parallel.traffic import Call
from labkit.parallel.transport import AUTO, Group, Transfer, TransportLike, find_transport


@disable_compile
def exchange(
    send: torch.Tensor | None,
    to: int | None,
    receive: torch.Tensor | None,
    source: int | None = None,
    group: Group = None,
    *,
    transport: TransportLike = AUTO,
) -> None:
    """Send a tensor to group rank `to`, and receive one, in place, from group rank `source`; None:
    no message.

    Both ranks of a message call once for it, with tensors of one length and dtype; `send` may
    return only when the other rank receives. The first call in a group is a collective: call
    `find_transport` on all ranks before if only some exchange. Raises ValueError without a tensor,
    or for a rank that is not in the group.
    """
    start_exchange(send, to, receive, source, group, transport=transport)()


@disable_compile
def start_exchange(
    send: torch.Tensor | None,
    to: int | None,
    receive: torch.Tensor | None,
    source: int | None = None,
    group: Group = None,
    *,
    transport: TransportLike = AUTO,
) -> Callable[[], None]:
    """Start an `exchange`, and return a function that completes it: in between the caller computes.

    Until then `send` must not change. Same arguments and errors.
    """
    tensor = receive
    if send is not None:
        tensor = send
    if tensor is None:
        raise ValueError("expected a tensor to send, to receive, or both")
    transport = find_transport(group, tensor.device, transport)
    for part, rank in ((send, to), (receive, source)):
        if part is not None and (rank is None or not 0 <= rank < transport.world_size):
            raise ValueError(f"expected a rank from 0 to {transport.world_size - 1}, got {rank}")
    # An empty vector is no message: transports do not send it.
    if send is None:
        send = tensor.new_empty(0)
    if receive is None:
        receive = tensor.new_empty(0)
    outgoing = send.detach().to(transport.device).contiguous().view(-1)
    incoming, original = as_vector(receive, transport.device)
    # Its transport makes the checksum: the two messages may differ.
    call = Call(transport, "exchange", "direct", (incoming,), checksum=0)
    finish = call.start(Transfer(outgoing, to or 0, incoming, source or 0))
    return partial(_complete, finish, incoming, original)


@disable_compile
def _complete(
    finish: Callable[[], None], incoming: torch.Tensor, original: torch.Tensor | None
) -> None:
    finish()
    torch.autograd.graph.increment_version(incoming)
    if original is not None:
        original.copy_(incoming.view(original.shape))
