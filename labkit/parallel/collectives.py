"""Collectives between ranks: all-reduce by five algorithms, reduce-scatter, all-gather, and what
picks an algorithm.

Every rank of a group calls `all_reduce` with a tensor of one shape; afterwards every rank's tensor
holds the sum or the mean, bitwise the same everywhere: each element is computed once and copied, or
computed everywhere from the same operands in the same order. All functions work in place, for any
number of ranks and any length, contiguous or not.

An algorithm gets the tensor as a vector, a transport, and the divisor of a mean
(`prepare.run_collective`). It cuts the vector into pieces, and lists steps for
`transport.run(steps, depth)`, which does this with `depth` steps in flight:

    for step in steps:
        send step.outgoing to step.target
        message = receive from step.source
        step.incoming = (step.incoming + message) / step.divisor if step.add else message

Messages travel through memory that the ranks of a host share, or point to point: with the same
results, to the bit. The first call also connects the ranks of the group.

Letters: p ranks, r this rank, n bytes per rank; a seconds per message, b seconds per byte; q the
largest power of two up to p. In brackets: added if p is not a power of two.

    algorithm            messages in a row    bytes sent per rank   time
    ring                 2 (p-1)              2 n (p-1)/p           2 (p-1) a + 2 n (p-1)/p b
    butterfly (direct)   2                    2 n (p-1)/p           2 a' + 2 n (p-1)/p b      a': p-1 messages at once
    one-shot             1                    n (p-1)               a' + n (p-1) b            a': p-1 messages at once
    recursive doubling   log2 q (+2)          n log2 q (+n)         log2 q (a + n b)          (+2 (a + n b))
    halving-doubling     2 log2 q (+2)        2 n (q-1)/q (+n)      2 log2 q a + 2 n (q-1)/q b  (+2 (a + n b))

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
from functools import cache, partial, wraps
from inspect import signature
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.parallel.prepare import (
    Algorithm,
    check_into,
    cut,
    disable_compile,
    run_collective,
    shard_sizes,
)
from labkit.parallel.transport import AUTO, POINT_TO_POINT, SHARED, Step, Transport, find_transport

__all__ = ["ALGORITHMS", "all_gather", "all_reduce", "reduce_scatter"]

Group = dist.ProcessGroup | None
Via = str | Transport
Pieces = Sequence[Sequence[Tensor]]  # [rank][piece]


class AllReduce(Protocol):
    """Sum or mean over the ranks of a group, in place."""

    def __call__(
        self, tensor: Tensor, group: Group = None, op: str = "mean", *, transport: Via = AUTO
    ) -> None: ...


ALGORITHMS: dict[str, AllReduce] = {}
"""The algorithms that the all-reduce lab checks, times, predicts and plots."""
_functions: dict[str, Algorithm] = {}  # on vectors

# Above these lengths another algorithm overtakes: time over gloo's `dist.all_reduce`, point to
# point, by benchmarks/against_torch.py (RD recursive doubling, D direct exchange, R ring; medians,
# 2 cores, SCHED_BATCH).  ranks     2                       4                       8
# 16 391 KiB   RD .87  D 1.0  R .97    RD .67  D .85  R 1.0    RD .54  D .74  R .92    RD .41  D .73
# R .95 1 MiB     RD 1.0  D 1.0  R 1.0    RD .91  D .84  R .94    RD 1.0  D .90  R 1.0    RD 1.2  D
# .78  R 1.1 100 MiB           D .96  R .92            D 1.0  R 1.0
SHORT_BYTES = 512 << 10
MIDDLE_BYTES = 16 << 20
ONE_SHOT_BYTES = 512 << 10
PAUSE = Step(None, 0, None, 0)
# Through shared memory, RD over D: 2 ranks 256 KiB .87, 1 MiB .96, 4 MiB .97; 4 ranks 64 KiB .83,
# 256 KiB 1.05.
PAIR_SHORT_BYTES = 2 << 20
SHARED_SHORT_BYTES = 192 << 10


@disable_compile
def all_reduce(
    tensor: Tensor, group: Group = None, op: str = "mean", *, transport: Via = AUTO
) -> None:
    """Sum or mean over the ranks of `group`, in place, by the algorithm that suits size and ranks.

    `transport`: "auto" picks, "shared" and "point_to_point" request one. Raises ValueError for an
    `op` other than "mean" and "sum", for a tensor that is not of a float dtype or whose elements
    share memory, and for a group that this rank is not in.
    """
    transport = find_transport(group, tensor.device, transport)
    name = select_algorithm(tensor.numel() * tensor.itemsize, transport.world_size, transport.name)
    run_collective(("all_reduce", name), _functions[name], tensor, group, op, transport)


def select_algorithm(n_bytes: int, world_size: int, transport: str = POINT_TO_POINT) -> str:
    """Return the name of the algorithm for `n_bytes` per rank: few messages if short, few bytes if
    long."""
    if world_size < 1 or n_bytes < 0:
        raise ValueError(
            f"expected n_bytes >= 0 and world_size >= 1, got {n_bytes} and {world_size}"
        )
    shared_bytes = PAIR_SHORT_BYTES if world_size == 2 else SHARED_SHORT_BYTES
    if n_bytes <= (shared_bytes if transport == SHARED else SHORT_BYTES):
        return "recursive_doubling"
    return "butterfly" if transport == SHARED or n_bytes <= MIDDLE_BYTES else "ring"


def all_reduce_algorithm(function: Algorithm) -> AllReduce:
    """Make an all-reduce of an algorithm on vectors, and add it to `ALGORITHMS`."""
    name = function.__name__.removesuffix("_all_reduce")
    _functions[name] = function

    def call(
        tensor: Tensor, group: Group = None, op: str = "mean", *, transport: Via = AUTO
    ) -> None:
        run_collective(("all_reduce", name), function, tensor, group, op, transport)

    vars(call)["__signature__"] = signature(call)  # for help(), in place of the algorithm's
    ALGORITHMS[name] = disable_compile(wraps(function)(call))
    return ALGORITHMS[name]


@all_reduce_algorithm
def ring_all_reduce(vector: Tensor, transport: Transport, divisor: int) -> None:
    """Ranks stand in a ring; each sends to its right neighbor only. Best for long tensors
    (Patarasuk & Yuan 2009).

    The shards travel around the ring twice: once to be added up, after which shard r is complete on
    rank r, and once to be copied to every rank. 2 (p-1) messages in a row, 2 n (p-1)/p bytes sent
    per rank. Long shards are cut into pieces, of which two are in flight: one is being added while
    the other arrives.
    """
    p = transport.world_size
    r = transport.rank
    right = (r + 1) % p
    left = (r - 1) % p
    pieces = cut(vector.split_with_sizes(shard_sizes(len(vector), p)), transport, depth=2)
    adds = []
    copies = []
    for s in range(p - 1):  # rank r sends shard r-1 first, so that it ends with shard r
        round_divisor = divisor if s == p - 2 else 1  # the last round completes this rank's shard
        for sent, received in zip(pieces[(r - s - 1) % p], pieces[(r - s - 2) % p], strict=True):
            adds.append(Step(sent, right, received, left, add=True, divisor=round_divisor))
        for sent, received in zip(pieces[(r - s) % p], pieces[(r - s - 1) % p], strict=True):
            copies.append(Step(sent, right, received, left))
    # a lone piece must arrive before it is sent on
    transport.run(adds + copies, depth=min(2, len(pieces[r])))


@all_reduce_algorithm
def butterfly_all_reduce(vector: Tensor, transport: Transport, divisor: int) -> None:
    """Direct exchange, published as "butterfly": rank i adds up shard i and sends it to all. Best
    in the middle.

    Not the butterfly of textbooks: that is `recursive_doubling_all_reduce`.

    Phase 1, reduce-scatter: rank r sends shard r+s to rank r+s, for every s from 1 to p-1, and adds
    up the p-1 versions of shard r that arrive. Phase 2, all-gather: rank r sends the complete shard
    r to all others.

    The p-1 messages of a phase are in flight at once: 2 messages in a row, 2 n (p-1)/p bytes sent
    per rank. Long shards are cut into pieces. A complete piece is sent right after the next one is
    added up, while it is still in the cache.
    """
    shards = vector.split_with_sizes(shard_sizes(len(vector), transport.world_size))
    depth = max(1, transport.world_size - 1)
    pieces = cut(shards, transport, depth)
    adds = add_steps(pieces, pieces[transport.rank], transport, divisor)
    copies = copy_steps(pieces, transport)
    steps = adds[:depth]
    later = adds[depth:] + [PAUSE] * depth  # the last piece is copied once it is complete
    for i in range(0, len(copies), depth):
        steps += later[i : i + depth] + copies[i : i + depth]
    transport.run(steps, depth)


def add_steps(
    pieces: Pieces, results: Sequence[Tensor], transport: Transport, divisor: int
) -> list[Step]:
    """Return p-1 steps per piece: send it to the rank whose shard it is, add what arrives into
    `results`."""
    p = transport.world_size
    r = transport.rank
    return [
        Step(
            sent[i],
            (r + s) % p,
            total if s == 1 else result,
            (r - s) % p,
            True,
            divisor if s == p - 1 else 1,
            result,
        )
        for i, (total, result) in enumerate(zip(pieces[r], results, strict=True))
        for s, sent in enumerate([*pieces[r + 1 :], *pieces[:r]], 1)
    ]


def copy_steps(pieces: Pieces, transport: Transport) -> list[Step]:
    """Return p-1 steps per piece: send this rank's to every other rank, receive theirs."""
    p = transport.world_size
    r = transport.rank
    return [
        Step(own, (r + s) % p, pieces[(r - s) % p][i], (r - s) % p)
        for i, own in enumerate(pieces[r])
        for s in range(1, p)
    ]


@all_reduce_algorithm
def one_shot_all_reduce(vector: Tensor, transport: Transport, divisor: int) -> None:
    """Every rank sends all others its whole vector, and adds up all p vectors itself. Few waits,
    many bytes.

    1 message in a row (p-1 at a time), n (p-1) bytes sent per rank; through shared memory n bytes
    are written once.
    """
    p = transport.world_size
    r = transport.rank
    length = min(ONE_SHOT_BYTES, transport.piece_bytes(p)) // vector.itemsize
    for part in vector.split(length) if p > 1 and len(vector) else ():
        parts = transport.scratch(p, len(part), part.dtype)
        transport.run(
            [Step(part, (r + s) % p, parts[(r - s) % p], (r - s) % p) for s in range(1, p)], p - 1
        )
        parts[r].copy_(part)
        # in the order of ranks, so that sums are the same to the bit
        torch.add(parts[0], parts[1], out=part)
        for other in parts[2:]:
            part.add_(other)
        part.div_(divisor)


@all_reduce_algorithm
def recursive_doubling_all_reduce(vector: Tensor, transport: Transport, divisor: int) -> None:
    """The butterfly of textbooks: whole vectors between partners 1, 2, 4, ... apart. Best for short
    tensors.

    Fold in: of the first 2 (p-q) ranks, every second sends its vector to the one before it, which
    adds it. That leaves q ranks. In log2 q rounds, for distance d = 1, 2, 4, ..., q/2, the k-th of
    them and the (k XOR d)-th send each other all they have and add: 2d ranks then hold the same
    partial sum. Fold out: the folded ranks receive the result.

    log2 q messages in a row, n log2 q bytes sent per rank; folding adds 2 messages and n bytes
    (Thakur 2005).
    """
    partners = find_partners(transport.rank, transport.world_size)
    _fold(vector, transport, inward=True)
    pieces = cut([vector], transport, depth=2)[0]
    rounds = [(partner, divisor if partner == partners[-1] else 1) for partner in partners]
    steps = [
        Step(piece, partner, piece, partner, True, by) for partner, by in rounds for piece in pieces
    ]
    transport.run(steps, min(2, len(pieces)))
    _fold(vector, transport, inward=False)


@all_reduce_algorithm
def halving_doubling_all_reduce(vector: Tensor, transport: Transport, divisor: int) -> None:
    """Rabenseifner's algorithm: the few messages of doubling and the few bytes of the ring.

    Ranks fold in and out as in `recursive_doubling_all_reduce`. In between, the q ranks halve for d
    = q/2, ..., 2, 1: ranks k and k XOR d halve the range both are responsible for, send the half
    they give up, and add to the half they keep. Then they double, in reverse order: the same
    partners send each other all they have complete.

    2 log2 q messages in a row, 2 n (q-1)/q bytes sent per rank; folding adds 2 messages and n bytes
    (Thakur 2005).
    """
    ranks = power_of_two_ranks(transport.world_size)
    partners = [
        (1 << i, rank) for i, rank in enumerate(find_partners(transport.rank, transport.world_size))
    ]
    k = ranks.index(transport.rank) if partners else 0
    _fold(vector, transport, inward=True)
    for d, partner in reversed(partners):
        own, other = _two_ranges(vector, k, d, len(ranks))
        _swap(other, own, partner, transport, add=True, divisor=divisor if d == 1 else 1)
    for d, partner in partners:
        complete, missing = _two_ranges(vector, k, d, len(ranks))
        _swap(complete, missing, partner, transport, add=False)
    _fold(vector, transport, inward=False)


def _two_ranges(vector: Tensor, k: int, d: int, q: int) -> list[Tensor]:
    """Return the d of q equal parts that the k-th rank keeps at distance d, and the d that its
    partner keeps."""
    size = -(-len(vector) // q)
    first = k & -d
    return [vector[at * size : (at + d) * size] for at in (first, first ^ d)]


@cache
def power_of_two_ranks(world_size: int) -> tuple[int, ...]:
    """Return the q ranks that take part after folding in: every other of the first 2 (p-q), and all
    the rest."""
    q = 1 << (world_size.bit_length() - 1)
    folded = world_size - q
    return tuple(2 * k if k < folded else k + folded for k in range(q))


@cache
def find_partners(rank: int, world_size: int) -> list[int]:
    """Return a rank's partners at distances 1, 2, 4, ... of the q ranks; none if it is folded
    in."""
    ranks = power_of_two_ranks(world_size)
    rounds = range(len(ranks).bit_length() - 1) if rank in ranks else ()
    return [ranks[ranks.index(rank) ^ 1 << i] for i in rounds]


def _fold(vector: Tensor, transport: Transport, *, inward: bool) -> None:
    """Odd ranks among the first 2 (p-q) send their vector to the rank before them, which adds it,
    or receive it."""
    if transport.rank < 2 * (transport.world_size - len(power_of_two_ranks(transport.world_size))):
        is_sender = transport.rank % 2 == inward
        sent, received = (vector, vector[:0]) if is_sender else (vector[:0], vector)
        _swap(sent, received, transport.rank ^ 1, transport, add=inward)


def _swap(
    sent: Tensor, received: Tensor, to: int, transport: Transport, *, add: bool, divisor: int = 1
) -> None:
    """Send and receive one vector each, in pieces if they are long; two are in flight."""
    pieces = zip(*cut([sent, received], transport, depth=2), strict=True)
    transport.run(
        [Step(outgoing, to, incoming, to, add, divisor) for outgoing, incoming in pieces], depth=2
    )


@disable_compile
def reduce_scatter(
    tensor: Tensor,
    group: Group = None,
    op: str = "mean",
    *,
    into: Tensor | None = None,
    transport: Via = AUTO,
) -> None:
    """Sum or mean of shard r over the ranks of `group` on rank r, in place. The rest of the tensor
    is overwritten.

    The first phase of an all-reduce: a tensor, flattened, is cut into p shards of equal length, as
    if it were padded. `into`, a vector of the shard's length, gets the shard instead. Raises
    ValueError as `all_reduce`, and for an `into` that does not fit.
    """
    into = None if into is None else into.detach()
    check = partial(check_into, into, tensor)
    run_collective(
        ("reduce_scatter", "butterfly"),
        partial(_reduce_scatter, into),
        tensor,
        group,
        op,
        transport,
        check,
    )


def _reduce_scatter(
    into: Tensor | None, vector: Tensor, transport: Transport, divisor: int
) -> None:
    shards = vector.split_with_sizes(shard_sizes(len(vector), transport.world_size))
    is_direct = into is not None and into.device == vector.device and transport.world_size > 1
    result = into if into is not None and is_direct else shards[transport.rank]
    depth = max(1, transport.world_size - 1)
    *pieces, results = cut([*shards, result], transport, depth)
    transport.run(add_steps(pieces, results, transport, divisor), depth)
    if into is not None:
        into.copy_(result)
        torch.autograd.graph.increment_version(into)


@disable_compile
def all_gather(
    tensor: Tensor,
    group: Group = None,
    *,
    sizes: Sequence[int] | None = None,
    transport: Via = AUTO,
) -> None:
    """Complete, in place, a tensor of any dtype whose shard r is right on rank r: the second phase
    of an all-reduce.

    `sizes`: elements of each rank's shard, if they are not equal. Raises ValueError as
    `all_reduce`, and for `sizes` that do not fit.
    """
    run_collective(
        ("all_gather", "butterfly"), partial(_all_gather, sizes), tensor, group, None, transport
    )


def _all_gather(
    sizes: Sequence[int] | None, vector: Tensor, transport: Transport, _divisor: int
) -> None:
    lengths = [
        size * vector.itemsize for size in shard_sizes(len(vector), transport.world_size, sizes)
    ]
    shards = vector.view(torch.uint8).split_with_sizes(lengths)
    depth = max(1, transport.world_size - 1)
    transport.run(copy_steps(cut(shards, transport, depth), transport), depth)
