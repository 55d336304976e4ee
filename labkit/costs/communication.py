"""Costs of collectives: messages and bytes, the alpha-beta model, gradient buckets.

Alpha-beta model (Hockney 1994): a message of n bytes takes alpha + n * beta seconds. An all-reduce
is a reduce-scatter and an all-gather of shards of n/p bytes, which each send at least n (p-1)/p
bytes per rank (Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication
operations in MPICH", sections 4.1 and 4.2).

Legend: p ranks, n bytes in the reduced tensor or all its shards, alpha seconds per message, beta
seconds per byte.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from labkit.costs.transformer import TransformerShape


class MessageCost(NamedTuple):
    """Rounds of messages, one after another, and the bytes of the rank that sends most in each
    round, added up."""

    messages: float
    n_bytes: float


# (world size, bytes) -> cost of an algorithm.
CostOf = Callable[[int, float], MessageCost]
# What is sharded: nothing, optimizer state, also gradients, also parameters.
STAGES = ("ddp", "zero1", "zero2", "zero3")
# Algorithms whose ranks send to all others at once.
AT_ONCE = frozenset({"butterfly", "one_shot"})


def ring(world_size: int, n_bytes: float) -> MessageCost:
    """Reduce-scatter, then all-gather, around a ring: 2(p-1) messages of n/p bytes."""
    messages = 2 * (world_size - 1)
    return MessageCost(messages, messages * n_bytes / world_size)


def butterfly(world_size: int, n_bytes: float) -> MessageCost:
    """Direct exchange: each rank sends each other rank a shard, twice.

    The p-1 messages of a round are concurrent.
    """
    rounds = 2 * (world_size > 1)
    return MessageCost(rounds, 2 * n_bytes * (world_size - 1) / world_size)


def one_shot(world_size: int, n_bytes: float) -> MessageCost:
    """Each rank sends each other rank the whole tensor, in p-1 concurrent messages."""
    return MessageCost(int(world_size > 1), n_bytes * (world_size - 1))


def recursive_doubling(world_size: int, n_bytes: float) -> MessageCost:
    """Recursive doubling: log2(p) exchanges of the whole tensor.

    Ranks beyond a power of two fold in before and out after.
    """
    messages = _rounds(world_size) + _folds(world_size)
    return MessageCost(messages, messages * n_bytes)


def halving_doubling(world_size: int, n_bytes: float) -> MessageCost:
    """Halving-doubling: 2 log2(p) messages, 2n(p-1)/p bytes.

    Reduce-scatter by halving, all-gather by doubling; folds as above.
    """
    rounds = _rounds(world_size)
    folds = _folds(world_size)
    shards = 2 * n_bytes * (1 - 2**-rounds)
    return MessageCost(2 * rounds + folds, shards + folds * n_bytes)


def _rounds(world_size: int) -> int:
    """Return log2 of the largest power of two among `world_size` ranks."""
    return world_size.bit_length() - 1


def _folds(world_size: int) -> int:
    """Return the messages of the whole tensor that ranks beyond a power of two take."""
    return 2 if world_size > 2 ** _rounds(world_size) else 0


ALL_REDUCES = (ring, butterfly, one_shot, recursive_doubling, halving_doubling)
ALL_REDUCE_COSTS: Mapping[str, CostOf] = {cost.__name__: cost for cost in ALL_REDUCES}


class Calls(NamedTuple):
    """Collectives of one rank in a step, each of a whole tensor of `n_bytes`.

    Or messages to one other rank.
    """

    collective: str
    """"all_reduce", "reduce_scatter", "all_gather" or "exchange"."""
    n_bytes: float
    times: int


def sent_bytes(calls: Iterable[Calls], world_size: int, *, all_reduce: CostOf = butterfly) -> float:
    """Return the bytes that a rank sends in these calls.

    Reduce-scatter and all-gather exchange shards directly.

    With an `all_reduce` that folds ranks beyond a power of two, ranks send unequally: these are the
    critical path's.
    """
    share = (world_size - 1) / world_size
    shares = {"all_reduce": all_reduce(world_size, 1).n_bytes, "exchange": 1.0}
    return sum(each.times * each.n_bytes * shares.get(each.collective, share) for each in calls)


def tensor_parallel_calls(
    shape: TransformerShape,
    batch: int,
    sequence: int,
    world_size: int,
    *,
    itemsize: int = 4,
    sequence_parallel: bool = False,
) -> list[Calls]:
    """List the collectives of a tensor-parallel step, with a vocabulary-parallel loss.

    A layer has two blocks; each sums at one end forward and at the other backward. With sequence
    parallelism each has a collective at both ends, forward and backward. Embedding and output are
    one block. Sources: arXiv:1909.08053, section 3; arXiv:2205.05198, section 4.2.2.
    """
    blocks = 2 * shape.n_layers + 1
    activations = batch * sequence * shape.d_model * itemsize
    # The logsumexp and the target's logit of each token, in float32 at least.
    loss = Calls("all_gather", 2 * batch * sequence * max(itemsize, 4) * world_size, 1)
    if not sequence_parallel:
        return [Calls("all_reduce", activations, 2 * blocks), loss]
    halves = [Calls(name, activations, 2 * blocks) for name in ("all_gather", "reduce_scatter")]
    # Each rank's norms see its share of the tokens: their gains' gradients are added up.
    return [*halves, Calls("all_reduce", shape.d_model * itemsize, blocks), loss]


def context_parallel_calls(
    block_bytes: float, gradient_bytes: float, world_size: int, *, is_ring: bool = True
) -> list[Calls]:
    """List the messages of one attention, forward and backward, with the sequence split over ranks.

    `block_bytes`: a rank's keys and values; `gradient_bytes`: their gradients, in the accumulator's
    dtype. Source: arXiv:2310.01889, section 3.
    """
    if is_ring:
        return [
            Calls("exchange", block_bytes, 2 * (world_size - 1)),
            Calls("exchange", gradient_bytes, world_size - 1),
        ]
    gathered = Calls("all_gather", world_size * block_bytes, 2)
    return [gathered, Calls("reduce_scatter", world_size * gradient_bytes, 1)]


def sharding_calls(n_bytes: int, stage: str) -> list[Calls]:
    """List the collectives of a step for parameters of `n_bytes` (arXiv:1910.02054, section 7)."""
    # From ZeRO-2 on a rank needs the mean of its shard alone. ZeRO-3 gathers parameters for the
    # forward and the backward pass, the other stages once, after the optimizer's step.
    average = "reduce_scatter"
    if STAGES.index(stage) < STAGES.index("zero2"):
        average = "all_reduce"
    gathers = {"ddp": 0, "zero3": 2}.get(stage, 1)
    return [Calls(average, n_bytes, 1), Calls("all_gather", n_bytes, gathers)]


def pipeline_idle_share(ranks: int, micro_batches: int, *, chunks: int = 1) -> float:
    """Return the share of a step that each rank of a pipeline idles.

    If stages take equally long and messages no time.
    """
    return (ranks - 1) / (chunks * micro_batches + ranks - 1)


def bus_bandwidth(world_size: int, n_bytes: float, seconds: float) -> float:
    """Return busbw in bytes/s, n/t * 2(p-1)/p: the load of a link (nccl-tests)."""
    return n_bytes / seconds * 2 * (world_size - 1) / world_size


def fit_alpha_beta(costs: Sequence[MessageCost], seconds: Sequence[float]) -> tuple[float, float]:
    """Fit alpha and beta, neither below zero, by least squares on the *relative* error.

    Absolute errors would fit the largest messages alone: one at 100 MB outweighs all at 4 KB by ten
    orders of magnitude. ValueError with fewer than two measurements or a time that is not positive.
    """
    from scipy.optimize import nnls  # slow to load, and ranks import this module

    times = np.asarray(seconds, dtype=np.float64)
    if len(costs) != len(times) or len(times) < 2 or not (times > 0).all():
        raise ValueError(
            f"expected two or more positive times, one per cost: {len(times)} for {len(costs)}"
        )
    work = np.array(costs) / times[:, None]
    scale = np.maximum(work.max(axis=0), np.finfo(np.float64).tiny)  # alpha and beta differ by 1e5
    alpha_s, beta_s_per_byte = nnls(work / scale, np.ones(len(times)))[0] / scale
    return float(alpha_s), float(beta_s_per_byte)
