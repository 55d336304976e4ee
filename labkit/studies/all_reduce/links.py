"""What a link carries within a host and between hosts: exchanges of one pair of ranks each.

On one host there is nothing to tell apart, and nothing is measured.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from labkit.bench.check import max_over_ranks
from labkit.bench.checksums import is_message
from labkit.bench.clock import time_interleaved
from labkit.parallel.ranks.hosts import host_identity
from labkit.parallel.ranks.messages import gather_json

WITHIN, BETWEEN = "pair within a host", "pair between hosts"


def pairs_to_measure(hosts: Sequence[str]) -> dict[str, tuple[int, int]]:
    """A pair of ranks for each kind of link there is, from each rank's host; none on a single host."""
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    if len(ranks) < 2:
        return {}
    first, second, *_ = ranks.values()
    shared = next((of_host for of_host in ranks.values() if len(of_host) > 1), None)
    within = {WITHIN: (shared[0], shared[1])} if shared else {}
    return within | {BETWEEN: (first[0], second[0])}


def measure_links(message: torch.Tensor, *, device: str, **options: Any) -> list[dict[str, Any]]:
    """One row per pair that this rank belongs to: the seconds in which both ranks send each other their message.

    Messages are those of `exact_sums.fill_message`.
    """
    pairs = pairs_to_measure(gather_json(host_identity()))
    if not pairs:
        return []
    rank, received = dist.get_rank(), torch.full_like(message, math.nan)

    def exchange(pair: tuple[int, int]) -> None:
        if rank not in pair:
            return
        peer = pair[1 - pair.index(rank)]
        operations = [dist.P2POp(dist.irecv, received, peer), dist.P2POp(dist.isend, message, peer)]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    gates = {}
    for name, pair in pairs.items():
        received.fill_(math.nan)
        exchange(pair)
        is_lost = rank in pair and not is_message(received, pair[1 - pair.index(rank)])
        gates[name] = "wrong: the other rank's tensor did not arrive" if max_over_ranks(is_lost) else "ok"
    right = {name: pair for name, pair in pairs.items() if gates[name] == "ok"}
    actions = {name: lambda pair=pair: exchange(pair) for name, pair in right.items()}
    samples = time_interleaved(actions, device=device, before=dist.barrier, **options)
    rows = [{"algorithm": name, "check": gates[name]} for name, pair in pairs.items() if rank in pair]
    return [row | ({"seconds": samples[row["algorithm"]]} if row["check"] == "ok" else {}) for row in rows]
