"""Collectives between ranks: all-reduce by five algorithms, its two phases alone, and the algorithm that suits.

All-reduce. Every rank of a group calls with a tensor of one shape; afterwards every rank's tensor holds the sum or the
mean, bitwise the same everywhere, because each element is either computed once and copied, or computed everywhere from
the same operands in the same order. Each function works in place. Any number of ranks, any length, contiguous or not.

Reduce-scatter and all-gather are what an all-reduce does one after the other (`phases.py`), and their results are its,
to the bit. A tensor is cut into a shard a rank; `reduce_scatter` leaves the sum or mean of shard r on rank r, and
`all_gather` makes whole what has shard r right on rank r. Both work in place, so that a tensor needs no second one. By
ring, butterfly and halving-doubling each costs half of what is listed below; one-shot shows whole tensors to
reduce-scatter, and shards, n (p-1)/p bytes, to gather.

Letters: p ranks, r this rank, n bytes a rank; a seconds a message, b seconds a byte; q the largest power of two <= p.

    algorithm            messages in a row    bytes sent a rank     time
    ring                 2 (p-1)              2 n (p-1)/p           2 (p-1) a + 2 n (p-1)/p b
    butterfly (direct)   2                    2 n (p-1)/p           2 a' + 2 n (p-1)/p b      a': p-1 messages at once
    one-shot             1                    n (p-1)               a' + n (p-1) b            a': p-1 messages at once
    recursive doubling   log2 q (+2)          n log2 q (+n)         log2 q (a + n b)          (+2 (a + n b))
    halving-doubling     2 log2 q (+2)        2 n (q-1)/q (+n)      2 log2 q a + 2 n (q-1)/q b  (+2 (a + n b))

(In brackets: what is added if p is not a power of two.) No rank can send less than 2 n (p-1)/p bytes in an
algorithm that uses all of them alike, and none that takes one message at a time can know everything after fewer than
log2 p in a row: the first matters for long tensors, the second for short ones.

Precision. Every addition is rounded to the tensor's type, once, and partial sums travel in that type, as in torch's
gloo backend. With u its unit roundoff (2^-53, 2^-24, 2^-11, 2^-8 for float64, float32, float16, bfloat16) and D
additions in a row (p-1 for ring, butterfly and one-shot, ceil(log2 p) for the two others), to first order

    |sum - exact| <= D u sum|x_r|         |mean - exact| <= (D+1) u mean|x_r|

float16 alone divides before it adds, so that the mean cannot overflow on the way (as DistributedDataParallel does);
what falls below its smallest normal number then costs up to p 2^-25 more. A float16 *sum* overflows above 65504.

Transport. The messages travel point to point, by torch.distributed's send and recv, or through shared memory, which
serves CPU tensors of ranks on one host. `transport="auto"` takes shared memory where there is some for all ranks of
the group; "point_to_point" and "shared" are what they say. Algorithms are the same and so are results, to the bit.

Memory. Scratch of at most two pieces a group and rank (2 MiB on CPU) whatever n is, kept between calls, and never more
than a chunk for the ring; in shared memory an outbox of 2 MiB, slots of up to 1 and boards of 1 a rank. A tensor that
is not contiguous, or that gloo has to move for a GPU, is copied during the call.

Sources: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (ring);
Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication operations in MPICH" (the two with
doubling).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist

from labkit.costs import communication
from labkit.costs.communication import CostOf
from labkit.parallel.chooser import choose_algorithm, choose_phase_algorithm
from labkit.parallel.phases import (
    ALL_GATHERS,
    REDUCE_SCATTERS,
    add_shown,
    double,
    exchange_to_add,
    exchange_to_store,
    fold_in,
    fold_out,
    halve,
    ring_all_gather,
    ring_reduce_scatter,
    survivors,
    swap,
)
from labkit.parallel.reduction import (
    SCHEDULES,
    InPlace,
    Reduction,
    all_reduce_by,
    check_into,
    check_shards,
    cut,
    even_sizes,
)
from labkit.parallel.traffic import watched
from labkit.parallel.transport.choice import AUTO, group_transports, member_group
from labkit.parallel.transport.contract import Transport
from labkit.parallel.uncompiled import uncompiled


@dataclass(frozen=True)
class Algorithm:
    """An all-reduce: the function, and what it should cost for (world size, bytes), if that is known."""

    run: Callable[..., None]
    """A `reduction.AllReduce`."""
    cost: CostOf | None = None

    def __call__(self, tensor: torch.Tensor, *arguments: Any, **options: Any) -> None:
        self.run(tensor, *arguments, **options)


@all_reduce_by("ring")
def ring_all_reduce(vector: torch.Tensor, via: Transport, divisor: int) -> None:
    """Ranks stand in a ring; each sends to its right neighbor only. Best for long tensors (Patarasuk & Yuan 2009).

    The vector is cut into p shards, which go around twice: `ring_reduce_scatter`, `ring_all_gather`.

    2 (p-1) messages in a row, 2 n (p-1)/p bytes sent a rank, time 2 (p-1) a + 2 n (p-1)/p b.
    """
    sizes = even_sizes(len(vector), via.world_size)
    ring_reduce_scatter(vector, sizes, via, divisor)
    ring_all_gather(vector, sizes, via)


@all_reduce_by("butterfly")
def butterfly_all_reduce(vector: torch.Tensor, via: Transport, divisor: int) -> None:
    """Direct exchange, published as "butterfly": rank i averages shard i and sends it to all. Best in the middle.

    Not what textbooks call butterfly: that is `recursive_doubling_all_reduce`. The vector is cut into p shards.

    Phase 1, reduce-scatter: rank r sends shard r+s to rank r+s, for every s from 1 to p-1, and adds up the p-1
    versions of shard r that come in.

    Phase 2, all-gather: rank r sends shard r, now complete, to all others, and stores theirs.

    All messages of a phase are independent, so as many are in flight as there is scratch memory for. A long shard is
    cut into pieces, and a piece is sent on when the next one has been added up: still in the cache, and far enough
    behind to wait for nothing.

    2 messages in a row (p-1 at a time), 2 n (p-1)/p bytes sent a rank, time 2 a' + 2 n (p-1)/p b.
    """
    p = via.world_size
    pieces = cut(vector.split_with_sizes(even_sizes(len(vector), p)), via)
    number = len(pieces[0])
    if number == 1:
        via.run(exchange_to_add(pieces, 0, via, divisor), depth=p)
        via.run(exchange_to_store(pieces, 0, via), depth=p)
        return
    steps = exchange_to_add(pieces, 0, via, divisor)
    for i in range(1, number):
        steps += exchange_to_add(pieces, i, via, divisor) + exchange_to_store(pieces, i - 1, via)
    via.run(steps + exchange_to_store(pieces, number - 1, via), depth=p)


@all_reduce_by("one_shot")
def one_shot_all_reduce(vector: torch.Tensor, via: Transport, divisor: int) -> None:
    """Every rank shows all others its whole vector, and adds up all of them itself. Few waits, many bytes.

    Everybody adds in the order of ranks, so that sums are the same to the bit. What is longer than a transport can
    show goes in pieces.

    1 message in a row (p-1 at a time), n (p-1) bytes sent a rank, time a' + n (p-1) b. Through shared memory a rank
    writes n bytes only, and waits once, however many ranks there are.
    """
    add_shown(vector, 0, len(vector), via, divisor)


@all_reduce_by("recursive_doubling")
def recursive_doubling_all_reduce(vector: torch.Tensor, via: Transport, divisor: int) -> None:
    """The textbook butterfly: whole vectors between partners 1, 2, 4, ... apart. Best for short tensors by messages.

    Fold in: of the first 2 (p-q) ranks, q the largest power of two, every second hands its vector to the one before it,
    which adds it. That leaves q ranks.

    Exchange, log2 q rounds: for distance d = 1, 2, 4, ..., q/2, the k-th of them and the (k XOR d)-th send each other
    all they have and add. After a round with distance d, 2d ranks hold the same partial sum.

    Fold out: the ranks that were folded in receive the result.

    log2 p messages in a row, n log2 p bytes sent a rank, time log2 p (a + n b) (Thakur et al. 2005, section 4.2);
    folding adds 2 messages of n bytes in a row.
    """
    ranks = survivors(via.world_size)
    fold_in(vector, via)
    if via.rank in ranks:
        k, distance = ranks.index(via.rank), 1
        while distance < len(ranks):
            is_last = 2 * distance == len(ranks)
            swap(via, ranks[k ^ distance], vector, vector, add=True, divisor=divisor if is_last else 1)
            distance *= 2
    fold_out(vector, via)


@all_reduce_by("halving_doubling")
def halving_doubling_all_reduce(vector: torch.Tensor, via: Transport, divisor: int) -> None:
    """Rabenseifner's algorithm: the few messages of doubling and the few bytes of the ring.

    Fold in: of the first 2 (p-q) ranks, q the largest power of two, every second hands its vector to the one before it,
    which adds it. That leaves q ranks.

    Phase 1, reduce-scatter by recursive halving, `halve`: in each round partners halve the range both are responsible
    for, and send each other the half they give up.

    Phase 2, all-gather by recursive doubling, `double`: the same partners in reverse order send each other the range
    they have complete, which doubles it.

    Fold out: the ranks that were folded in receive the result.

    2 log2 p messages in a row, 2 n (p-1)/p bytes sent a rank, time 2 log2 p a + 2 n (p-1)/p b (Thakur et al. 2005,
    section 4.2); folding adds 2 messages of n bytes in a row.
    """
    q = len(survivors(via.world_size))
    bounds = [0, *accumulate(even_sizes(len(vector), q))]
    fold_in(vector, via)
    halve(vector, bounds, via, divisor)
    double(vector, bounds, via)
    fold_out(vector, via)


ALGORITHMS: dict[str, Algorithm] = {
    "ring": Algorithm(ring_all_reduce, communication.ring),
    "butterfly": Algorithm(butterfly_all_reduce, communication.butterfly),
    "one_shot": Algorithm(one_shot_all_reduce, communication.one_shot),
    "recursive_doubling": Algorithm(recursive_doubling_all_reduce, communication.recursive_doubling),
    "halving_doubling": Algorithm(halving_doubling_all_reduce, communication.halving_doubling),
}
"""All that is known of each: what is listed here is gated, timed, predicted, drawn and named by the all-reduce lab."""


@uncompiled
def all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, op: str = "mean", *, transport: str | Transport = AUTO
) -> None:
    """Sum or mean over the ranks of `group`, in place, by the algorithm that suits size and ranks.

    Raises:
        ValueError: an `op` other than "mean" and "sum", a tensor that is not of a float type or whose elements
            share memory, or a group this rank is not in.
    """
    with Reduction(tensor, group, op, transport) as (vector, via, divisor):
        algorithm = choose_algorithm(vector.nbytes, via.world_size, via.name)
        SCHEDULES[algorithm](vector, watched(via, "all_reduce", algorithm, vector), divisor)


@uncompiled
def reduce_scatter(
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    op: str = "mean",
    *,
    sizes: Sequence[int] | None = None,
    into: torch.Tensor | None = None,
    algorithm: str = AUTO,
    transport: str | Transport = AUTO,
) -> None:
    """Sum or mean over the ranks of `group`, of which rank r keeps shard r, in place. The rest is overwritten.

    `into`: a vector, (size of the shard,), of the tensor's type, that gets the shard instead.

    `sizes`: elements of each rank's shard, in the order of ranks, which add up to those of the tensor; alike on all
    ranks, 0 allowed. None: as even as possible, the longer ones first, which is `tensor.view(-1).tensor_split(p)`; what
    is left there is, to the bit, what the all-reduce by the same algorithm leaves.

    `algorithm`: one of `REDUCE_SCATTERS`, or "auto": the one that suits.

    Raises ValueError as `all_reduce`, and for `sizes`, `into` and an `algorithm` that cannot be: before any message.
    """
    shards = check_shards(tensor, group, sizes, algorithm, REDUCE_SCATTERS)
    if into is not None:
        into = into.detach()
        check_into(into, tensor, shards[member_group(group).rank()])
    with (reduction := Reduction(tensor, group, op, transport)) as (vector, via, divisor):
        if algorithm == AUTO:
            algorithm = choose_phase_algorithm(vector.nbytes, via.world_size, via.name)
        is_direct = into is not None and into.device == vector.device and via.world_size > 1
        watching = watched(via, "reduce_scatter", algorithm, vector)
        REDUCE_SCATTERS[algorithm](vector, shards, watching, divisor, into if is_direct else None)
        if into is not None and not is_direct:
            into.copy_(vector.split_with_sizes(shards)[via.rank])
        if into is not None:
            torch.autograd.graph.increment_version(into)
            reduction.copy_to = None  # what the tensor holds now is of no use


@uncompiled
def all_gather(
    tensor: torch.Tensor,
    group: dist.ProcessGroup | None = None,
    *,
    sizes: Sequence[int] | None = None,
    algorithm: str = AUTO,
    transport: str | Transport = AUTO,
) -> None:
    """Shard r of rank r for every rank of `group`, in place: afterwards the tensor is the same on all.

    `sizes`, `algorithm` (one of `ALL_GATHERS`) and errors as `reduce_scatter`; the dtype may be any, since bytes are
    moved and none is changed.
    """
    shards = check_shards(tensor, group, sizes, algorithm, ALL_GATHERS)
    with InPlace(tensor, group, transport) as (vector, via):
        if algorithm == AUTO:
            algorithm = choose_phase_algorithm(vector.nbytes, via.world_size, via.name)
        n_bytes = [size * vector.itemsize for size in shards]
        ALL_GATHERS[algorithm](vector.view(torch.uint8), n_bytes, watched(via, "all_gather", algorithm, vector))


def scratch_bytes(group: dist.ProcessGroup | None = None) -> int:
    """Bytes of scratch memory kept for `group` now."""
    return sum(transport.scratch_bytes() for transport in group_transports(group))


def release_scratch(group: dist.ProcessGroup | None = None) -> None:
    """Give the scratch memory of `group` back; the next all-reduce makes it again."""
    for transport in group_transports(group):
        transport.release_scratch()
