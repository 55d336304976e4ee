"""All-reduce between ranks: five algorithms, and the one that suits.

Every rank of a group calls with a tensor of one shape; afterwards every rank's tensor holds the sum or the mean,
bitwise the same everywhere, because each element is either computed once and copied, or computed everywhere from
the same operands in the same order. Each function works in place. Any number of ranks, any length, contiguous or not.

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
than a chunk for the ring; in shared memory an outbox of 2 MiB, slots of 1 and boards of 1 a rank. A tensor that is not
contiguous, or that gloo has to move for a GPU, is copied during the call.

Sources: Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations" (ring);
Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication operations in MPICH" (the two with
doubling).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
import torch.distributed as dist

from labkit.parallel.chooser import choose_algorithm
from labkit.parallel.reduction import Reduction, cut
from labkit.parallel.transport.choice import AUTO, find_transport, group_transports
from labkit.parallel.transport.contract import Step, Transport
from labkit.parallel.uncompiled import uncompiled

AllReduce = Callable[..., None]  # (tensor, group=None, op="mean")


@uncompiled
def ring_all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, op: str = "mean", *, transport: str | Transport = AUTO
) -> None:
    """Ranks stand in a ring; each sends to its right neighbor only. Best for long tensors (Patarasuk & Yuan 2009).

    The vector is cut into p chunks.

    Phase 1, reduce-scatter, p-1 rounds: in round s, rank r sends chunk r-s to the right and adds what comes from the
    left to chunk r-s-1. A chunk so collects one rank's share a round, and ends complete on rank r as chunk r+1.

    Phase 2, all-gather, p-1 rounds: in round s, rank r sends chunk r+1-s on, and stores what comes as chunk r-s.

    Long chunks are cut into pieces, all ranks alike. A round needs of the round before only the same piece, so
    two pieces are in flight at any time, across rounds: one is being added while the other arrives.

    2 (p-1) messages in a row, 2 n (p-1)/p bytes sent a rank, time 2 (p-1) a + 2 n (p-1)/p b.
    """
    with Reduction(tensor, group, op, transport) as (vector, via, divisor):
        p, r = via.world_size, via.rank
        right, left = (r + 1) % p, (r - 1) % p
        chunks = vector.tensor_split(p)
        pieces = cut(chunks, via)
        number = len(pieces[0])
        rounds = [(s, i) for s in range(p - 1) for i in range(number)]
        depth = min(2, number)
        # Phase 1: reduce-scatter
        steps = [
            Step(pieces[(r - s) % p][i], right, pieces[(r - s - 1) % p][i], left, True, divisor if s == p - 2 else 1)
            for s, i in rounds
        ]
        via.run(steps, depth)
        # Phase 2: all-gather
        steps = [Step(pieces[(r + 1 - s) % p][i], right, pieces[(r - s) % p][i], left, False) for s, i in rounds]
        via.run(steps, depth)


@uncompiled
def butterfly_all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, op: str = "mean", *, transport: str | Transport = AUTO
) -> None:
    """Direct exchange, published as "butterfly": rank i averages chunk i and sends it to all. Best in the middle.

    Not what textbooks call butterfly: that is `recursive_doubling_all_reduce`. The vector is cut into p chunks.

    Phase 1, reduce-scatter: rank r sends chunk r+s to rank r+s, for every s from 1 to p-1, and adds up the p-1
    versions of chunk r that come in.

    Phase 2, all-gather: rank r sends chunk r, now complete, to all others, and stores theirs.

    All messages of a phase are independent, so as many are in flight as there is scratch memory for; rank r turns to
    rank r+s in step s, so that at no time everybody sends to the same rank. A long chunk is cut into pieces, and a
    piece is sent on when the next one has been added up: still in the cache, and far enough behind to wait for nothing.

    2 messages in a row (p-1 at a time), 2 n (p-1)/p bytes sent a rank, time 2 a' + 2 n (p-1)/p b.
    """
    with Reduction(tensor, group, op, transport) as (vector, via, divisor):
        p, r = via.world_size, via.rank
        pieces = cut(vector.tensor_split(p), via)
        partners = [((r + s) % p, (r - s) % p) for s in range(1, p)]
        last = (r + 1) % p

        def reduce_scatter(i: int) -> list[Step]:
            return [
                Step(pieces[target][i], target, pieces[r][i], source, True, divisor if source == last else 1)
                for target, source in partners
            ]

        def all_gather(i: int) -> list[Step]:
            return [Step(pieces[r][i], target, pieces[source][i], source, False) for target, source in partners]

        number = len(pieces[0])
        if number == 1:
            via.run(reduce_scatter(0), depth=p)
            via.run(all_gather(0), depth=p)
            return
        steps = reduce_scatter(0)
        for i in range(1, number):
            steps += reduce_scatter(i) + all_gather(i - 1)
        via.run(steps + all_gather(number - 1), depth=p)


@uncompiled
def one_shot_all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, op: str = "mean", *, transport: str | Transport = AUTO
) -> None:
    """Every rank shows all others its whole vector, and adds up all of them itself. Few waits, many bytes.

    Everybody adds in the order of ranks, so that sums are the same to the bit. What is longer than a transport can
    show goes in pieces.

    1 message in a row (p-1 at a time), n (p-1) bytes sent a rank, time a' + n (p-1) b. Through shared memory a rank
    writes n bytes only, and waits once, however many ranks there are.
    """
    with Reduction(tensor, group, op, transport) as (vector, via, divisor):
        if via.world_size == 1 or not vector.numel():
            return
        number = -(-vector.nbytes // via.shown_bytes)
        for piece in vector.tensor_split(number) if number > 1 else (vector,):
            first, second, *others = via.show(piece)
            torch.add(first, second, out=piece)
            for other in others:
                piece.add_(other)
            if divisor > 1:
                piece.div_(divisor)


@uncompiled
def recursive_doubling_all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, op: str = "mean", *, transport: str | Transport = AUTO
) -> None:
    """The textbook butterfly: whole vectors between partners 1, 2, 4, ... apart. Best for short tensors by messages.

    Fold in: ranks from q, the largest power of two, on hand their vector to rank r-q, which adds it.

    Exchange, log2 q rounds: for distance d = 1, 2, 4, ..., q/2, rank r and rank r XOR d send each other all they
    have and add. After a round with distance d, 2d ranks hold the same partial sum.

    Fold out: the ranks that were folded in receive the result.

    log2 p messages in a row, n log2 p bytes sent a rank, time log2 p (a + n b) (Thakur et al. 2005, section 4.2);
    folding adds 2 messages of n bytes in a row.
    """
    with Reduction(tensor, group, op, transport) as (vector, via, divisor):
        p, r = via.world_size, via.rank
        q = 1 << (p.bit_length() - 1)
        # Fold in
        if q < p:
            _fold(vector, via, q, inward=True)
        # Exchange
        if r < q:
            distance = 1
            while distance < q:
                is_last = 2 * distance == q
                _swap(via, r ^ distance, vector, vector, add=True, divisor=divisor if is_last else 1)
                distance *= 2
        # Fold out
        if q < p:
            _fold(vector, via, q, inward=False)


@uncompiled
def halving_doubling_all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, op: str = "mean", *, transport: str | Transport = AUTO
) -> None:
    """Rabenseifner's algorithm: the few messages of doubling and the few bytes of the ring.

    Fold in: ranks from q, the largest power of two, on hand their vector to rank r-q, which adds it.

    Phase 1, reduce-scatter by recursive halving: for distance d = q/2, ..., 2, 1, rank r and rank r XOR d cut the
    range both are responsible for into halves; the rank with bit d set keeps the upper half, the other the lower.
    Each sends the half it gives up, and adds what comes to the half it keeps.

    Phase 2, all-gather by recursive doubling: the same partners in reverse order send each other the range they have
    complete, which doubles it.

    Fold out: the ranks that were folded in receive the result.

    2 log2 p messages in a row, 2 n (p-1)/p bytes sent a rank, time 2 log2 p a + 2 n (p-1)/p b (Thakur et al. 2005,
    section 4.2); folding adds 2 messages of n bytes in a row.
    """
    with Reduction(tensor, group, op, transport) as (vector, via, divisor):
        p, r = via.world_size, via.rank
        q = 1 << (p.bit_length() - 1)
        # Fold in
        if q < p:
            _fold(vector, via, q, inward=True)
        if r < q:
            # Phase 1: reduce-scatter by recursive halving
            mine, given = vector, []
            distance = q // 2
            while distance:
                lower, upper = mine.tensor_split(2)
                mine, other = (upper, lower) if r & distance else (lower, upper)
                _swap(via, r ^ distance, other, mine, add=True, divisor=divisor if distance == 1 else 1)
                given.append((distance, mine, other))
                distance //= 2
            # Phase 2: all-gather by recursive doubling
            for distance, mine, other in reversed(given):
                _swap(via, r ^ distance, mine, other, add=False)
        # Fold out
        if q < p:
            _fold(vector, via, q, inward=False)


ALGORITHMS: Mapping[str, AllReduce] = MappingProxyType(
    {
        "ring": ring_all_reduce,
        "butterfly": butterfly_all_reduce,
        "one_shot": one_shot_all_reduce,
        "recursive_doubling": recursive_doubling_all_reduce,
        "halving_doubling": halving_doubling_all_reduce,
    }
)


@uncompiled
def all_reduce(
    tensor: torch.Tensor, group: dist.ProcessGroup | None = None, op: str = "mean", *, transport: str | Transport = AUTO
) -> None:
    """Sum or mean over the ranks of `group`, in place, by the algorithm that suits size and ranks.

    Raises:
        ValueError: an `op` other than "mean" and "sum", a tensor that is not of a float type or whose elements
            share memory, or a group this rank is not in.
    """
    via = find_transport(group, tensor.device, transport)
    algorithm = ALGORITHMS[choose_algorithm(tensor.numel() * tensor.itemsize, via.world_size, via.name)]
    algorithm(tensor, group, op, transport=via)


def scratch_bytes(group: dist.ProcessGroup | None = None) -> int:
    """Bytes of scratch memory kept for `group` now."""
    return sum(transport.scratch_bytes() for transport in group_transports(group))


def release_scratch(group: dist.ProcessGroup | None = None) -> None:
    """Give the scratch memory of `group` back; the next all-reduce makes it again."""
    for transport in group_transports(group):
        transport.release_scratch()


def _swap(
    via: Transport, partner: int, outgoing: torch.Tensor, incoming: torch.Tensor, *, add: bool, divisor: int = 1
) -> None:
    """Send and receive one vector each, in pieces if they are long; two are in flight."""
    longest = max(outgoing.nbytes, incoming.nbytes)
    if longest <= via.piece_bytes:
        via.run([Step(outgoing, partner, incoming, partner, add, divisor)])
        return
    number = -(-longest // via.piece_bytes)
    pairs = zip(outgoing.tensor_split(number), incoming.tensor_split(number), strict=True)
    via.run([Step(sent, partner, received, partner, add, divisor) for sent, received in pairs], depth=2)


def _fold(vector: torch.Tensor, via: Transport, q: int, *, inward: bool) -> None:
    """Inward, ranks from q on send their vector to rank r-q, which adds it; outward, they get the result from it."""
    rank, nothing = via.rank, vector[:0]
    if rank >= q:
        sent, received = (vector, nothing) if inward else (nothing, vector)
        _swap(via, rank - q, sent, received, add=False)
    elif rank + q < via.world_size:
        sent, received = (nothing, vector) if inward else (vector, nothing)
        _swap(via, rank + q, sent, received, add=inward)
