"""Collectives between ranks: all-reduce by several algorithms, reduce-scatter, and all-gather.

Every rank of a group calls `all_reduce` with a tensor of one shape; afterwards every rank's tensor
holds the sum or the mean, bitwise the same everywhere: each element is computed once and copied, or
computed everywhere from the same operands in the same order. All functions work in place, for any
number of ranks and any length, contiguous or not.

An algorithm gets the tensor as a vector, the call, and the divisor of a mean
(`prepare.run_collective`). It lists rounds of transfers for `call.run(rounds)`, which does this:

    for transfers in rounds:
        for each in transfers, at the same time:
            send each.outgoing to rank each.target
            message = receive from rank each.source
            each.incoming = (each.incoming + message) / each.divisor if each.add else message

The transport cuts long messages into chunks: while one is added or sent on, the next one travels
(`transport/base.py`). Results over all transports are the same, to the bit. The first call also
connects the ranks of the group.

Letters: p ranks, r this rank, n bytes per rank; a seconds per message, a' if p-1 are sent at once,
b seconds per byte; q the largest power of two up to p. In brackets: added if p > q.

    algorithm            messages in a row    bytes sent per rank   time
    ring                 2 (p-1)              2 n (p-1)/p           2 (p-1) a + 2 n (p-1)/p b
    butterfly (direct)   2                    2 n (p-1)/p           2 a' + 2 n (p-1)/p b
    one-shot             1                    n (p-1)               a' + n (p-1) b
    recursive doubling   log2 q (+2)          n log2 q (+n)         log2 q (a + n b)
    halving-doubling     2 log2 q (+2)        2 n (q-1)/q (+n)      2 log2 q a + 2 n (q-1)/q b
                                                                    (+2 (a + n b)) with doubling

Precision. Every addition is rounded to the tensor's dtype. With u its unit roundoff and D additions
in a row (p-1, or ceil(log2 p) with doubling), to first order |sum - exact| <= D u sum|x_r| and
|mean - exact| <= (D+1) u mean|x_r|. float16 is divided before it is added, which costs up to p
2^-25 more: a mean cannot overflow, a sum above 65504 does.

Sources: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of
workstations" (ring); Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication
operations in MPICH" (doubling).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from labkit.parallel.doubling import (
    halving_doubling_all_reduce,
    recursive_doubling_all_reduce,
)
from labkit.parallel.prepare import (
    check_into,
    disable_compile,
    make_all_reduce,
    run_collective,
    shard_sizes,
)
from labkit.parallel.select_algorithm import select_algorithm
from labkit.parallel.traffic import Call
from labkit.parallel.transport import AUTO, Group, Transfer, TransportLike, find_transport

ONE_SHOT_BYTES = 2 << 20  # scratch memory for the messages of all ranks


@disable_compile
def all_reduce(
    tensor: Tensor, group: Group = None, op: str = "mean", *, transport: TransportLike = AUTO
) -> None:
    """Sum or mean over the ranks of `group`, in place, by the algorithm that suits size and ranks.

    `transport`: "auto" picks, "shared" and "point_to_point" request one. Raises ValueError for an
    `op` other than "mean" and "sum", for a tensor that is not of a float dtype or whose elements
    share memory, and for a group that this rank is not in.
    """
    transport = find_transport(group, tensor.device, transport)
    name = select_algorithm(tensor.numel() * tensor.itemsize, transport.world_size, transport.name)
    # Without what hides it from the compiler: here all is hidden already.
    algorithm: Any = ALGORITHMS[name]
    algorithm.__wrapped__(tensor, group, op, transport=transport)


@make_all_reduce
def ring_all_reduce(vector: Tensor, call: Call, divisor: int) -> None:
    """Ranks stand in a ring; each sends to its right neighbor only. Best for long tensors.

    The shards travel around the ring twice: once to be added up, after which shard r is complete on
    rank r, and once to be copied to every rank. 2 (p-1) messages in a row, 2 n (p-1)/p bytes sent
    per rank (Patarasuk & Yuan 2009).
    """
    p = call.world_size
    r = call.rank
    right = (r + 1) % p
    left = (r - 1) % p
    shards = vector.split_with_sizes(shard_sizes(len(vector), p))
    adds = []
    copies = []
    for s in range(p - 1):  # rank r sends shard r-1 first, so that it ends with shard r
        add = Transfer(
            outgoing=shards[(r - s - 1) % p],
            target=right,
            incoming=shards[(r - s - 2) % p],
            source=left,
            add=True,
            divisor=divisor if s == p - 2 else 1,  # the last round completes this rank's shard
        )
        copy = Transfer(
            outgoing=shards[(r - s) % p],
            target=right,
            incoming=shards[(r - s - 1) % p],
            source=left,
        )
        adds.append([add])
        copies.append([copy])
    call.run(adds + copies)


@make_all_reduce
def butterfly_all_reduce(vector: Tensor, call: Call, divisor: int) -> None:
    """Direct exchange, published as "butterfly": rank i adds up shard i and sends it to all.

    Not the butterfly of textbooks: that is `recursive_doubling_all_reduce`. Best in the middle.

    Phase 1, reduce-scatter: rank r sends shard r+s to rank r+s, for every s from 1 to p-1, and adds
    up the p-1 versions of shard r that arrive. Phase 2, all-gather: rank r sends the complete shard
    r to all others. The p-1 messages of a phase are in flight at once: 2 messages in a row, 2 n
    (p-1)/p bytes sent per rank.
    """
    shards = vector.split_with_sizes(shard_sizes(len(vector), call.world_size))
    adds = reduce_scatter_round(shards, shards[call.rank], call, divisor)
    copies = all_gather_round(shards, call)
    call.run([adds, copies])


def reduce_scatter_round(
    shards: Sequence[Tensor], result: Tensor, call: Call, divisor: int
) -> list[Transfer]:
    """Return p-1 transfers: send each rank its shard, add those that arrive up in `result`."""
    p = call.world_size
    r = call.rank
    transfers = []
    for s in range(1, p):
        target = (r + s) % p
        transfer = Transfer(
            outgoing=shards[target],
            target=target,
            # This rank's own part is added with the first message: `result` may hold anything.
            incoming=shards[r] if s == 1 else result,
            source=(r - s) % p,
            add=True,
            divisor=divisor if s == p - 1 else 1,
            into=result,
        )
        transfers.append(transfer)
    return transfers


def all_gather_round(shards: Sequence[Tensor], call: Call) -> list[Transfer]:
    """Return p-1 transfers: send this rank's shard to every other rank, receive theirs."""
    p = call.world_size
    r = call.rank
    return [Transfer(shards[r], (r + s) % p, shards[r - s], (r - s) % p) for s in range(1, p)]


@make_all_reduce
def one_shot_all_reduce(vector: Tensor, call: Call, divisor: int) -> None:
    """Every rank sends all others its whole vector, and adds up all p vectors itself.

    Few waits, many bytes: 1 message in a row (p-1 at a time), n (p-1) bytes sent per rank; through
    shared memory n bytes are written once.
    """
    p = call.world_size
    r = call.rank
    if p == 1 or not len(vector):
        return
    for part in vector.split(ONE_SHOT_BYTES // p // vector.itemsize):
        of_rank = call.scratch(p, len(part), part.dtype)
        transfers = [Transfer(part, (r + s) % p, of_rank[r - s], (r - s) % p) for s in range(1, p)]
        call.run([transfers])
        of_rank[r].copy_(part)
        # in the order of ranks, so that sums are the same to the bit
        torch.add(of_rank[0], of_rank[1], out=part)
        for other in of_rank[2:]:
            part.add_(other)
        part.div_(divisor)


# The algorithms that the all-reduce lab checks, times, predicts and plots.
ALGORITHMS = {
    "ring": ring_all_reduce,
    "butterfly": butterfly_all_reduce,
    "one_shot": one_shot_all_reduce,
    "recursive_doubling": recursive_doubling_all_reduce,
    "halving_doubling": halving_doubling_all_reduce,
}


@disable_compile
def reduce_scatter(
    tensor: Tensor,
    group: Group = None,
    op: str = "mean",
    *,
    into: Tensor | None = None,
    transport: TransportLike = AUTO,
) -> None:
    """Sum or mean of shard r over the ranks of `group` on rank r, in place.

    The first phase of an all-reduce: a tensor, flattened, is cut into p shards of equal length, as
    if it were padded. The rest of the tensor is overwritten. `into`, a vector of the shard's
    length, gets the shard instead. Raises ValueError as `all_reduce`, and for an `into` that does
    not fit.
    """
    if into is not None:
        into = into.detach()

    def algorithm(vector: Tensor, call: Call, divisor: int) -> None:
        shards = vector.split_with_sizes(shard_sizes(len(vector), call.world_size))
        result = shards[call.rank]
        # One rank alone adds nothing, so it would put nothing into `into`.
        if into is not None and call.world_size > 1 and into.device == vector.device:
            result = into
        call.run([reduce_scatter_round(shards, result, call, divisor)])
        if into is not None:
            into.copy_(result)
            torch.autograd.graph.increment_version(into)

    names = ("reduce_scatter", "butterfly")
    run_collective(
        names, algorithm, tensor, group, op, transport, partial(check_into, into, tensor)
    )


@disable_compile
def all_gather(
    tensor: Tensor,
    group: Group = None,
    *,
    sizes: Sequence[int] | None = None,
    transport: TransportLike = AUTO,
) -> None:
    """Complete, in place, a tensor of any dtype whose shard r is right on rank r.

    The second phase of an all-reduce. `sizes`: elements of each rank's shard, if they are not
    equal. Raises ValueError as `all_reduce`, and for `sizes` that do not fit.
    """

    def algorithm(vector: Tensor, call: Call, _divisor: int) -> None:
        lengths = shard_sizes(len(vector), call.world_size, sizes)
        n_bytes = [length * vector.itemsize for length in lengths]
        # As bytes: nothing is added, and transports know few dtypes.
        shards = vector.view(torch.uint8).split_with_sizes(n_bytes)
        call.run([all_gather_round(shards, call)])

    run_collective(("all_gather", "butterfly"), algorithm, tensor, group, None, transport)
