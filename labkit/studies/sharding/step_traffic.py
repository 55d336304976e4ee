"""What the collectives of one step sent, against the formulas: calls that are missing, doubled or extra are wrong."""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.costs.communication import ALL_GATHER_COSTS, REDUCE_SCATTER_COSTS
from labkit.costs.sharding import STAGES, moved_bytes
from labkit.parallel.collectives import ALGORITHMS
from labkit.parallel.sharding.gathering import ALIGNMENT_BYTES
from labkit.parallel.traffic import Collective

COLLECTIVES = {"all_reduce": None, "reduce_scatter": REDUCE_SCATTER_COSTS, "all_gather": ALL_GATHER_COSTS}
"""What labkit's ways may call, with the costs of those that are one phase."""
FOLDING = ("recursive_doubling", "halving_doubling")
NOTES, TCP = "notes", "all of them, by TCP"


def traffic_rows(
    way: str, traffic: Sequence[Collective], whole: Mapping[str, Tensor], trained: Collection[str]
) -> Iterator[dict[str, Any]]:
    """A row for every collective that a step should run or did: calls, bytes of tensors, bytes sent, mean over ranks.

    And whether they are right: the tensors are those of the formulas, and every message is one of the algorithm that
    was chosen, of which one-shot fills up shards to the longest. `formula_bytes` is what the stage should send,
    whatever was called; notes have none, nor have a reader's ways, of which the bytes of tensors may be any.
    `trained`: names of parameters that are not frozen.
    """
    world_size = dist.get_world_size()
    model_bytes = sum(value.nbytes for value in whole.values())
    moved = _expected_moves(way, whole, trained) if way in STAGES else None
    found: dict[str, list[Collective]] = {name: [] for name in (*COLLECTIVES, NOTES)}
    for call in traffic:
        is_note = way == "zero3" and call.dtype == "float64"  # FSDP's ranks compare notes in float64
        found[NOTES if is_note else call.collective].append(call)
    for name, calls in found.items():
        tensors = sum(call.n_bytes for call in calls)
        expected = None if name == NOTES or moved is None else moved.get(name, 0)
        padding = _most_padding(whole.values(), len(calls)) if name == "all_gather" else 0
        is_off = expected is not None and not 0 <= tensors - expected <= padding
        by_algorithm = sum(_sent_by_all(call, world_size) for call in calls) / world_size
        of_ranks = [sum(call.sent_bytes for call in calls), by_algorithm, is_off]
        sums = torch.tensor(of_ranks, dtype=torch.float64, device=next(iter(whole.values())).device)
        dist.all_reduce(sums)
        sent, should_send, ranks_off = (round(value) for value in sums.tolist())
        if calls or expected:
            phases = 2 if name == "all_reduce" else 1
            yield {
                "collective": name,
                "calls": len(calls),
                "tensors_bytes": tensors,
                "sent_bytes": sent / world_size,
                "formula_bytes": None if expected is None else phases * expected * (world_size - 1) / world_size,
                "model_bytes": model_bytes,
                "is_right": moved is None or (0 <= sent - should_send <= (world_size - 1) * padding and ranks_off == 0),
            }


def _expected_moves(stage: str, whole: Mapping[str, Tensor], trained: Collection[str]) -> Mapping[str, int]:
    """Of a model with frozen parameters all but these are averaged and updated; sharded, frozen ones are gathered."""
    of_trained = _moved(stage, [value for name, value in whole.items() if name in trained])
    return {**of_trained, "all_gather": _moved(stage, whole.values())["all_gather"]} if stage == "zero3" else of_trained


def _moved(stage: str, values: Collection[Tensor]) -> Mapping[str, int]:
    replicated = sum(value.nbytes for value in values if value.dim() < 2)
    return moved_bytes(sum(value.nbytes for value in values), stage, replicated_bytes=replicated)


def tcp_row(before: int | None, after: int | None, known: int, whole: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """A row for what is not seen of a step of torch's or a reader's: what sockets sent, gloo's headers included.

    Less `known` bytes, which were. None where the system does not count, or nothing went by TCP (NCCL).
    """
    device = next(iter(whole.values())).device
    own = 0 if before is None or after is None else max(0, after - before - known)
    sent = torch.tensor(own, dtype=torch.float64, device=device)
    dist.all_reduce(sent)
    if device.type != "cpu" or not sent:
        return []
    model_bytes = sum(value.nbytes for value in whole.values())
    mean = float(sent) / dist.get_world_size()
    return [{"collective": TCP, "sent_bytes": mean, "model_bytes": model_bytes, "is_right": True}]


def _most_padding(parameters: Iterable[Tensor], calls: int) -> int:
    """Bytes by which pieces are aligned where parameters are gathered: none on two ranks that halve whole multiples."""
    at_ends = sum(-value.nbytes % ALIGNMENT_BYTES for value in parameters)
    return at_ends + 2 * ALIGNMENT_BYTES * dist.get_world_size() * calls  # both sides of a cut


def _sent_by_all(call: Collective, world_size: int) -> float:
    """Bytes that all ranks send together by the algorithm that carried a call out.

    Costs are those of the busiest rank, which all are unless ranks beyond a power of two fold into others.
    """
    power, n_bytes = 2 ** (world_size.bit_length() - 1), call.n_bytes
    of_phase = COLLECTIVES[call.collective]
    cost = ALGORITHMS[call.algorithm].cost if of_phase is None else of_phase[call.algorithm]
    assert cost is not None, "labkit's own algorithms have one"
    if power == world_size or call.algorithm not in FOLDING:
        return world_size * cost(world_size, n_bytes).n_bytes
    returned = n_bytes if of_phase is None else n_bytes / world_size
    return power * cost(power, n_bytes).n_bytes + (world_size - power) * (n_bytes + returned)
