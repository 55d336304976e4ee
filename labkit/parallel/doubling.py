"""All-reduces between partners 1, 2, 4, ... ranks apart: few messages in a row.

With p ranks, q is the largest power of two up to p. The other p-q ranks fold in: each sends its
vector to a neighbor first, and receives the result at the end. Contracts and costs are those of
`collectives.py`.
"""

from functools import cache

from torch import Tensor

from labkit.parallel.prepare import make_all_reduce
from labkit.parallel.traffic import Call
from labkit.parallel.transport import Transfer


@make_all_reduce
def recursive_doubling_all_reduce(vector: Tensor, call: Call, divisor: int) -> None:
    """The butterfly of textbooks: whole vectors between partners 1, 2, 4, ... apart.

    Best for short tensors. Fold in: of the first 2 (p-q) ranks, every second sends its vector to
    the one before it, which adds it. That leaves q ranks. In log2 q rounds, for distance d = 1, 2,
    4, ..., q/2, the k-th of them and the (k XOR d)-th send each other all they have and add: 2d
    ranks then hold the same partial sum. Fold out: the folded ranks receive the result.

    log2 q messages in a row, n log2 q bytes sent per rank (Thakur 2005).
    """
    p = call.world_size
    partners = find_partners(call.rank, p)
    rounds = []
    for partner in partners:
        by = divisor if partner == partners[-1] else 1
        rounds.append([Transfer(vector, partner, vector, partner, add=True, divisor=by)])
    if len(power_of_two_ranks(p)) < p:
        if not partners:  # a rank that is folded in has no transfer in as many rounds
            rounds = [[] for _ in find_partners(0, p)]
        rounds = [_fold(vector, call, inward=True), *rounds, _fold(vector, call, inward=False)]
    call.run(rounds)


@make_all_reduce
def halving_doubling_all_reduce(vector: Tensor, call: Call, divisor: int) -> None:
    """Rabenseifner's algorithm: the few messages of doubling and the few bytes of the ring.

    Ranks fold in and out as in `recursive_doubling_all_reduce`. In between, the q ranks halve for d
    = q/2, ..., 2, 1: ranks k and k XOR d halve the range both are responsible for, send the half
    they give up, and add to the half they keep. Then they double, in reverse order: the same
    partners send each other all they have complete.

    2 log2 q messages in a row, 2 n (q-1)/q bytes sent per rank (Thakur 2005).
    """
    ranks = power_of_two_ranks(call.world_size)
    partners = find_partners(call.rank, call.world_size)
    k = ranks.index(call.rank) if partners else 0
    call.run([_fold(vector, call, inward=True)])
    # One round per run: a half begins where the round before may not have written yet.
    for i, partner in reversed([*enumerate(partners)]):
        kept, sent = _halves(vector, k, 1 << i, len(ranks))
        by = divisor if i == 0 else 1
        call.run([[Transfer(sent, partner, kept, partner, add=True, divisor=by)]])
    for i, partner in enumerate(partners):
        complete, missing = _halves(vector, k, 1 << i, len(ranks))
        call.run([[Transfer(complete, partner, missing, partner)]])
    call.run([_fold(vector, call, inward=False)])


def _halves(vector: Tensor, k: int, d: int, q: int) -> tuple[Tensor, Tensor]:
    """Return d of q equal parts that the k-th rank keeps at distance d, and d that it gives up."""
    size = -(-len(vector) // q)
    kept = (k & -d) * size
    given_up = (k & -d ^ d) * size
    return vector[kept : kept + d * size], vector[given_up : given_up + d * size]


@cache
def power_of_two_ranks(world_size: int) -> tuple[int, ...]:
    """Return the q ranks that remain after folding in: of the first 2 (p-q) every other one."""
    q = 1 << (world_size.bit_length() - 1)
    folded = world_size - q
    return tuple(2 * k if k < folded else k + folded for k in range(q))


@cache
def find_partners(rank: int, world_size: int) -> list[int]:
    """Return a rank's partners at distances 1, 2, 4, ..., q/2; none if it is folded in."""
    ranks = power_of_two_ranks(world_size)
    if rank not in ranks:
        return []
    k = ranks.index(rank)
    return [ranks[k ^ 1 << i] for i in range(len(ranks).bit_length() - 1)]


def _fold(vector: Tensor, call: Call, *, inward: bool) -> list[Transfer]:
    """Return the transfer of a rank among the first 2 (p-q), of others none.

    Inward, odd ranks send their vector to the rank before them, which adds it; outward, they
    receive the result.
    """
    folded = call.world_size - len(power_of_two_ranks(call.world_size))
    if call.rank >= 2 * folded:
        return []
    other = call.rank ^ 1
    if call.rank % 2 == inward:
        return [Transfer(vector, other, None, other)]
    return [Transfer(None, other, vector, other, add=inward)]
