"""The two phases of an all-reduce, reduce-scatter and all-gather, by four algorithms: schedules, no checks.

A vector, (n,), is cut into a shard a rank: `sizes` says how many elements each has, in the order of ranks, 0 allowed.

    reduce-scatter   every rank comes with its own vector; shard r ends as the sum over ranks, divided by `divisor`, on
                     rank r, in its place or in a vector of its length, `into`; what the vector else holds afterwards
                     is of no use
    all-gather       shard r is right on rank r; every shard ends so on every rank

Letters as in `collectives.py`: p ranks, r this rank, q the largest power of two <= p.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import accumulate
from types import MappingProxyType

import torch

from labkit.parallel.reduction import cut
from labkit.parallel.transport.contract import Step, Transport

Sizes = Sequence[int]
ReduceScatter = Callable[[torch.Tensor, Sizes, Transport, int, torch.Tensor | None], None]
AllGather = Callable[[torch.Tensor, Sizes, Transport], None]


# Around the ring


def ring_reduce_scatter(
    vector: torch.Tensor, sizes: Sizes, via: Transport, divisor: int, into: torch.Tensor | None = None
) -> None:
    """p-1 rounds: in round s, rank r sends shard r-s-1 to the right and adds what comes from the left to shard r-s-2.

    A shard so collects one rank's share a round, and ends complete on its own rank.
    """
    _around(vector, sizes, via, -1, divisor, into)


def ring_all_gather(vector: torch.Tensor, sizes: Sizes, via: Transport) -> None:
    """p-1 rounds: in round s, rank r sends shard r-s to the right, and stores what comes from the left: shard r-s-1."""
    _around(vector, sizes, via, 0)


def _around(
    vector: torch.Tensor,
    sizes: Sizes,
    via: Transport,
    first: int,
    divisor: int | None = None,
    into: torch.Tensor | None = None,
) -> None:
    """Begin with shard r + `first`; add what comes, if there is a divisor.

    Long shards are cut into pieces, all ranks alike. A round needs of the round before only the same piece, so
    two pieces are in flight at any time, across rounds: one is being added while the other arrives.
    """
    p, r = via.world_size, via.rank
    right, left = (r + 1) % p, (r - 1) % p
    pieces = cut(vector.split_with_sizes(sizes), via)
    number = len(pieces[0])
    ends = [None] * number if into is None else into.tensor_split(number)
    steps = []
    for s in range(p - 1):
        sent, received = pieces[(r + first - s) % p], pieces[(r + first - s - 1) % p]
        last = [(divisor, end) if divisor and s == p - 2 else (1, None) for end in ends]
        steps += [Step(sent[i], right, received[i], left, divisor is not None, *last[i]) for i in range(number)]
    via.run(steps, min(2, number))


# Direct exchange


def butterfly_reduce_scatter(
    vector: torch.Tensor, sizes: Sizes, via: Transport, divisor: int, into: torch.Tensor | None = None
) -> None:
    """Rank r sends shard r+s to rank r+s, for every s from 1 to p-1, and adds up the p-1 versions of its own.

    All messages are independent, so as many are in flight as there is scratch memory for; rank r turns to rank r+s in
    step s, so that at no time everybody sends to the same rank.
    """
    pieces = cut(vector.split_with_sizes(sizes), via)
    ends = [None] * len(pieces[0]) if into is None else into.tensor_split(len(pieces[0]))
    steps = [step for i, end in enumerate(ends) for step in exchange_to_add(pieces, i, via, divisor, end)]
    via.run(steps, depth=via.world_size)


def butterfly_all_gather(vector: torch.Tensor, sizes: Sizes, via: Transport) -> None:
    """Rank r sends its shard to rank r+s, for every s from 1 to p-1, and stores theirs."""
    pieces = cut(vector.split_with_sizes(sizes), via)
    steps = [step for i in range(len(pieces[0])) for step in exchange_to_store(pieces, i, via)]
    via.run(steps, depth=via.world_size)


def exchange_to_add(
    pieces: Sequence[Sequence[torch.Tensor]], i: int, via: Transport, divisor: int, into: torch.Tensor | None = None
) -> list[Step]:
    """Direct exchange of piece i of every shard: `pieces` by shard."""
    p, r = via.world_size, via.rank
    turns = [((r + s) % p, (r - s) % p) for s in range(1, p)]
    first, last = (r - 1) % p, (r + 1) % p
    steps = []
    for target, source in turns:
        incoming, end = (pieces[r][i], into) if into is None or source == first else (into, None)
        steps.append(Step(pieces[target][i], target, incoming, source, True, divisor if source == last else 1, end))
    return steps


def exchange_to_store(pieces: Sequence[Sequence[torch.Tensor]], i: int, via: Transport) -> list[Step]:
    """The same for shards that are complete."""
    p, r = via.world_size, via.rank
    turns = [((r + s) % p, (r - s) % p) for s in range(1, p)]
    return [Step(pieces[r][i], target, pieces[source][i], source, False) for target, source in turns]


# Everything shown to all


def one_shot_reduce_scatter(
    vector: torch.Tensor, sizes: Sizes, via: Transport, divisor: int, into: torch.Tensor | None = None
) -> None:
    """Every rank shows all others its whole vector, and adds up its own shard of theirs, in the order of ranks."""
    start = sum(sizes[: via.rank])
    add_shown(vector, start, start + sizes[via.rank], via, divisor)
    if into is not None:  # what all are shown is short
        into.copy_(vector[start : start + len(into)])


def add_shown(vector: torch.Tensor, start: int, stop: int, via: Transport, divisor: int) -> None:
    """Elements `start` to `stop` become the sum over ranks. What is longer than a transport can show goes in pieces."""
    if via.world_size == 1:
        return
    step = via.shown_bytes // vector.itemsize
    for at in range(0, len(vector), step):
        part = vector[at : at + step] if len(vector) > step else vector
        via.add_shown(part, max(0, start - at), min(len(part), stop - at), divisor)


def one_shot_all_gather(vector: torch.Tensor, sizes: Sizes, via: Transport) -> None:
    """Every rank shows all others its shard.

    What ranks show is of one length, that of the longest shard: whoever has a shorter one shows what lies behind it,
    too, or at the end of the vector before it.
    """
    longest = max(sizes)
    if via.world_size == 1 or not longest:
        return
    step = via.shown_bytes // vector.itemsize
    if longest == min(sizes) <= step:  # the usual case, which short vectors wait for
        shards = vector.split_with_sizes(sizes)
        for shard, part in zip(shards, via.show(shards[via.rank]), strict=True):
            shard.copy_(part)
        return
    starts = [0, *accumulate(sizes)]
    windows = [min(start, len(vector) - longest) for start in starts[:-1]]
    for at in range(0, longest, step):
        begins = [window + at for window in windows]
        length = min(step, longest - at)
        shown = via.show(vector[begins[via.rank] : begins[via.rank] + length])
        for rank, begin in enumerate(begins):
            low, high = max(starts[rank], begin), min(starts[rank + 1], begin + length)
            if low < high and rank != via.rank:
                vector[low:high].copy_(shown[rank][low - begin : high - begin])


# Halving and doubling


def halving_reduce_scatter(
    vector: torch.Tensor, sizes: Sizes, via: Transport, divisor: int, into: torch.Tensor | None = None
) -> None:
    """Recursive halving: `halve`. Ranks that are folded in get their shard from the rank that has it."""
    fold_in(vector, via)
    halve(vector, _bounds(sizes), via, divisor)
    if _is_paired(via):
        _fold(vector.split_with_sizes(sizes)[via.rank | 1], via, inward=False)
    if into is not None:  # with another rank's, a shard is no range of its own
        into.copy_(vector.split_with_sizes(sizes)[via.rank])


def doubling_all_gather(vector: torch.Tensor, sizes: Sizes, via: Transport) -> None:
    """Recursive doubling: `double`. Ranks that are folded in hand their shard on first, and get everything at last."""
    if _is_paired(via):
        _fold(vector.split_with_sizes(sizes)[via.rank | 1], via, inward=True)
    double(vector, _bounds(sizes), via)
    fold_out(vector, via)


def halve(vector: torch.Tensor, bounds: Sequence[int], via: Transport, divisor: int) -> None:
    """Reduce-scatter by the q ranks that `survivors` names; range k, from bounds[k] to bounds[k+1], to the k-th.

    For distance d = q/2, ..., 2, 1, ranks k and k XOR d halve the ranges both are responsible for; the one with bit d
    set keeps the upper half, the other the lower. Each sends what it gives up, and adds what comes to what it keeps.
    """
    ranks = survivors(via.world_size)
    if via.rank not in ranks:
        return
    k, distance = ranks.index(via.rank), len(ranks) // 2
    while distance:
        kept = k & -distance  # the first of the d ranges it keeps
        given = kept ^ distance
        swap(
            via,
            ranks[k ^ distance],
            vector[bounds[given] : bounds[given + distance]],
            vector[bounds[kept] : bounds[kept + distance]],
            add=True,
            divisor=divisor if distance == 1 else 1,
        )
        distance //= 2


def double(vector: torch.Tensor, bounds: Sequence[int], via: Transport) -> None:
    """All-gather: the partners of `halve` in reverse order send each other the ranges they have, which doubles them."""
    ranks = survivors(via.world_size)
    if via.rank not in ranks:
        return
    k, distance = ranks.index(via.rank), 1
    while distance < len(ranks):
        own = k & -distance
        other = own ^ distance
        swap(
            via,
            ranks[k ^ distance],
            vector[bounds[own] : bounds[own + distance]],
            vector[bounds[other] : bounds[other + distance]],
            add=False,
        )
        distance *= 2


@cache
def survivors(world_size: int) -> tuple[int, ...]:
    """The q ranks that go on after folding in: of the first 2 (p-q) ranks every other, and all the rest."""
    q = 1 << (world_size.bit_length() - 1)
    folded = world_size - q
    return tuple(2 * k if k < folded else k + folded for k in range(q))


def fold_in(vector: torch.Tensor, via: Transport) -> None:
    """Ranks that go no further hand their vector to the rank before them, which adds it."""
    if _is_paired(via):
        _fold(vector, via, inward=True, add=True)


def fold_out(vector: torch.Tensor, via: Transport) -> None:
    """They get the result from it."""
    if _is_paired(via):
        _fold(vector, via, inward=False)


def swap(
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


def _is_paired(via: Transport) -> bool:
    """Whether this rank is folded into the one before it, or has one folded in."""
    return via.rank < 2 * (via.world_size - len(survivors(via.world_size)))


def _fold(vector: torch.Tensor, via: Transport, *, inward: bool, add: bool = False) -> None:
    """Between the two ranks of a pair: from the odd one if `inward`, to it if not."""
    nothing = vector[:0]
    sent, received = (vector, nothing) if bool(via.rank % 2) == inward else (nothing, vector)
    swap(via, via.rank ^ 1, sent, received, add=add)


def _bounds(sizes: Sizes) -> list[int]:
    """Where the ranges of the survivors begin, each its own shard and that of the rank folded into it; and the end."""
    starts = [0, *accumulate(sizes)]
    return [*(starts[rank] for rank in survivors(len(sizes))), starts[-1]]


REDUCE_SCATTERS: Mapping[str, ReduceScatter] = MappingProxyType(
    {
        "ring": ring_reduce_scatter,
        "butterfly": butterfly_reduce_scatter,
        "one_shot": one_shot_reduce_scatter,
        "halving_doubling": halving_reduce_scatter,
    }
)
ALL_GATHERS: Mapping[str, AllGather] = MappingProxyType(
    {
        "ring": ring_all_gather,
        "butterfly": butterfly_all_gather,
        "one_shot": one_shot_all_gather,
        "halving_doubling": doubling_all_gather,
    }
)
