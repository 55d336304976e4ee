"""Costs of collectives: messages and bytes by algorithm, the alpha-beta model and its fit, gradient buckets.

Collectives follow the alpha-beta model (Hockney 1994): a message of n bytes takes alpha + n * beta seconds. An
algorithm costs a number of successive messages and the bytes that a rank sends in them.

An all-reduce is a reduce-scatter and an all-gather of shards of n/p bytes (Thakur, Rabenseifner & Gropp 2005,
"Optimization of collective communication operations in MPICH", sections 4.1 and 4.2; each phase sends at least
n (p-1)/p bytes per rank). ZeRO's communication volumes count the same (arXiv:1910.02054, section 7).

Legend: p ranks, n bytes in the reduced tensor or all its shards, alpha seconds per message, beta seconds per byte.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from labkit.costs.transformer import TransformerShape


@dataclass(frozen=True)
class MessageCost:
    """Successive messages of one rank on the critical path, and the bytes sent in them."""

    messages: float
    n_bytes: float

    def __add__(self, other: "MessageCost") -> "MessageCost":
        return MessageCost(self.messages + other.messages, self.n_bytes + other.n_bytes)


CostOf = Callable[[int, float], MessageCost]
"""(world size, bytes) -> cost of an algorithm."""


@dataclass(frozen=True)
class AlphaBeta:
    """A fitted or assumed alpha-beta model; the errors are relative, |predicted / measured - 1|."""

    alpha_s: float
    beta_s_per_byte: float
    median_error: float = float("nan")
    largest_error: float = float("nan")

    def predict_s(self, cost: MessageCost) -> float:
        return cost.messages * self.alpha_s + cost.n_bytes * self.beta_s_per_byte


def ring_phase(world_size: int, n_bytes: float) -> MessageCost:
    """Reduce-scatter or all-gather around a ring: p-1 messages of n/p bytes."""
    return MessageCost(world_size - 1, (world_size - 1) * n_bytes / world_size)


def ring(world_size: int, n_bytes: float) -> MessageCost:
    """Reduce-scatter, then all-gather, around a ring: 2(p-1) messages of n/p bytes."""
    return ring_phase(world_size, n_bytes) + ring_phase(world_size, n_bytes)


def direct_phase(world_size: int, n_bytes: float) -> MessageCost:
    """Each rank sends each other rank a shard: p-1 concurrent messages of n/p bytes."""
    return MessageCost(0, 0) if world_size == 1 else MessageCost(1, n_bytes * (world_size - 1) / world_size)


def butterfly(world_size: int, n_bytes: float) -> MessageCost:
    """Direct exchange: each rank sends each other rank a shard, twice; the p-1 messages of a round are concurrent."""
    return direct_phase(world_size, n_bytes) + direct_phase(world_size, n_bytes)


def one_shot(world_size: int, n_bytes: float) -> MessageCost:
    """Each rank sends each other rank the whole tensor, in p-1 concurrent messages."""
    return MessageCost(0, 0) if world_size == 1 else MessageCost(1, n_bytes * (world_size - 1))


def recursive_doubling(world_size: int, n_bytes: float) -> MessageCost:
    """log2(p) exchanges of the whole tensor; ranks beyond a power of two fold in before and out after."""
    rounds = world_size.bit_length() - 1
    return MessageCost(rounds, rounds * n_bytes) + _folding(world_size, n_bytes)


def halving_doubling(world_size: int, n_bytes: float) -> MessageCost:
    """Reduce-scatter by halving, all-gather by doubling: 2 log2(p) messages, 2n(p-1)/p bytes."""
    rounds = world_size.bit_length() - 1
    power = 2**rounds
    return MessageCost(2 * rounds, 2 * n_bytes * (power - 1) / power) + _folding(world_size, n_bytes)


def halving_phase(world_size: int, n_bytes: float) -> MessageCost:
    """Reduce-scatter by halving: log2(p) messages, n(p-1)/p bytes. All-gather by doubling: the same, backwards.

    Ranks beyond a power of two q hand on n bytes before, and get n/p after. The p - q ranks they are folded into have
    two shards, so a round sends up to twice as much.
    """
    rounds = world_size.bit_length() - 1
    power = 2**rounds
    shards = [2 if rank < world_size - power else 1 for rank in range(power)]
    longest = sum(sum(shards[: 2**k]) for k in range(rounds))
    halving = MessageCost(rounds, longest * n_bytes / world_size)
    if power == world_size:
        return halving
    return halving + MessageCost(2, n_bytes + n_bytes / world_size)


def _folding(world_size: int, n_bytes: float) -> MessageCost:
    is_power_of_two = world_size & (world_size - 1) == 0
    return MessageCost(0, 0) if is_power_of_two else MessageCost(2, 2 * n_bytes)


ALL_REDUCE_COSTS: Mapping[str, CostOf] = {
    "ring": ring,
    "butterfly": butterfly,
    "one_shot": one_shot,
    "recursive_doubling": recursive_doubling,
    "halving_doubling": halving_doubling,
}
_PHASE_COSTS = {"ring": ring_phase, "butterfly": direct_phase, "halving_doubling": halving_phase}
REDUCE_SCATTER_COSTS: Mapping[str, CostOf] = {**_PHASE_COSTS, "one_shot": one_shot}
AT_ONCE = frozenset({"butterfly", "one_shot"})
"""Algorithms whose ranks send to all others at once."""
ALL_GATHER_COSTS: Mapping[str, CostOf] = {**_PHASE_COSTS, "one_shot": direct_phase}


class Calls(NamedTuple):
    """Collectives of one rank in a step, each of a whole tensor of `n_bytes`; or messages to one other rank."""

    collective: str
    """"all_reduce", "reduce_scatter", "all_gather" or "exchange"."""
    n_bytes: float
    times: int


def sent_bytes(calls: Iterable[Calls], world_size: int, *, all_reduce: CostOf = butterfly) -> float:
    """Return the bytes that a rank sends in these calls; reduce-scatter and all-gather exchange shards directly."""
    costs = {"all_reduce": all_reduce, "reduce_scatter": direct_phase, "all_gather": direct_phase}
    return sum(
        each.times
        * (each.n_bytes if each.collective == "exchange" else costs[each.collective](world_size, each.n_bytes).n_bytes)
        for each in calls
    )


def tensor_parallel_calls(
    shape: TransformerShape,
    batch: int,
    sequence: int,
    world_size: int,
    *,
    itemsize: int = 4,
    sequence_parallel: bool = False,
) -> list[Calls]:
    """List the collectives of a step with tensor parallelism, forward and backward, with the loss from parts.

    Per layer, two blocks with one collective at each end that is a sum, forward or backward; with sequence parallelism,
    a collective at both ends, forward and backward. Embedding and output are one block. Checkpoints repeat the layers'
    forward collectives. Sources: arXiv:1909.08053, section 3; arXiv:2205.05198, section 4.2.2.
    """
    blocks, activations = 2 * shape.n_layers + 1, batch * sequence * shape.d_model * itemsize
    loss = Calls("all_gather", 2 * batch * sequence * max(itemsize, 4) * world_size, 1)
    if not sequence_parallel:
        return [Calls("all_reduce", activations, 2 * blocks), loss]
    halves = [Calls(name, activations, 2 * blocks) for name in ("all_gather", "reduce_scatter")]
    return [*halves, Calls("all_reduce", shape.d_model * itemsize, blocks), loss]


def pipeline_calls(
    activation_bytes: float, ranks: int, rank: int, micro_batches: int, *, chunks: int = 1, tied_bytes: float = 0
) -> list[Calls]:
    """List the messages that a rank sends in a step of a pipeline.

    Every micro-batch's activations to the next stage, their gradients to the stage before, the gradients of parameters
    that one other rank has, too, and the loss, in float64. `chunks`: stages per rank. Source: arXiv:2104.04473.
    """
    stages = [] if ranks == 1 else range(rank, chunks * ranks, ranks)
    neighbors = sum((stage > 0) + (stage < chunks * ranks - 1) for stage in stages)
    messages = Calls("exchange", activation_bytes, neighbors * micro_batches)
    return [messages, Calls("exchange", tied_bytes, 1), Calls("all_reduce", 8, 1)]


def context_parallel_calls(
    block_bytes: float, gradient_bytes: float, world_size: int, *, is_ring: bool = True
) -> list[Calls]:
    """List the messages of one attention, forward and backward, with the sequence cut over ranks.

    `block_bytes`: a rank's keys and values; `gradient_bytes`: their gradients, in the accumulator's dtype.
    Source: arXiv:2310.01889, section 3.
    """
    if is_ring:
        return [Calls("exchange", block_bytes, 2 * (world_size - 1)), Calls("exchange", gradient_bytes, world_size - 1)]
    gathered = Calls("all_gather", world_size * block_bytes, 2)
    return [gathered, Calls("reduce_scatter", world_size * gradient_bytes, 1)]


def pipeline_idle_share(ranks: int, micro_batches: int, *, chunks: int = 1) -> float:
    """Share of a step that each rank of a pipeline idles if stages take equally long and messages no time."""
    return (ranks - 1) / (chunks * micro_batches + ranks - 1)


def algorithm_bandwidth(n_bytes: float, seconds: float) -> float:
    """algbw in bytes/s: the tensor's bytes over the time of the all-reduce."""
    return n_bytes / seconds


def bus_bandwidth(world_size: int, n_bytes: float, seconds: float) -> float:
    """busbw in bytes/s, algbw * 2(p-1)/p: what a link carries, comparable across world sizes (nccl-tests)."""
    return algorithm_bandwidth(n_bytes, seconds) * 2 * (world_size - 1) / world_size


def fit_alpha_beta(costs: Sequence[MessageCost], seconds: Sequence[float]) -> AlphaBeta:
    """Fit alpha and beta, neither below zero, by least squares on the *relative* error.

    Absolute errors would fit the largest messages alone: one at 100 MB outweighs all at 4 KB by ten orders of
    magnitude. ValueError with fewer than two measurements or a time that is not positive.
    """
    from scipy.optimize import nnls  # slow to load, and ranks import this module

    times = np.asarray(seconds, dtype=np.float64)
    if len(costs) != len(times) or len(times) < 2 or not (times > 0).all():
        raise ValueError(f"expected two or more positive times, one per cost: {len(times)} for {len(costs)}")
    work = np.array([[cost.messages, cost.n_bytes] for cost in costs]) / times[:, None]
    scale = np.maximum(work.max(axis=0), np.finfo(np.float64).tiny)  # alpha and beta differ by 1e5
    alpha, beta = nnls(work / scale, np.ones(len(times)))[0] / scale
    errors = np.abs(work @ [alpha, beta] - 1)
    return AlphaBeta(float(alpha), float(beta), float(np.median(errors)), float(errors.max()))


def best_buckets(n_bytes: float, model: AlphaBeta) -> float:
    """Number k >= 1 of equal buckets that minimizes k alpha + n beta / k: a call each, and the last bucket's bytes.

    Communication of all but the last bucket hides behind backward; sqrt(n beta / alpha), infinite if calls are free.
    """
    if model.alpha_s <= 0:
        return math.inf
    return max(1.0, math.sqrt(n_bytes * model.beta_s_per_byte / model.alpha_s))
