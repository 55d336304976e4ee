"""The end of rounds: as soon as the ratio of any two alternatives is known as well as requested.

The rule looks at the width of intervals and never at the result, so a difference has no part in when rounds end. A
fixed-width interval is narrow a little too often where the first rounds happen to agree (Chow & Robbins 1965, "On the
asymptotic theory of fixed-width sequential confidence intervals for the mean"). `MIN_ROUNDS`, and checks that grow
apart, keep that small: `tests/bench/test_stopping.py` simulates it.
"""

import math
import time
from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np
import torch
import torch.distributed as dist

from labkit.bench.intervals import MIN_SAMPLES, estimate_paired

MIN_ROUNDS = 8
"""Rounds before which no interval counts as narrow."""
GROWTH = 1.25
"""Ratio of the rounds at one check to those at the last: frequent checks would find what chance made narrow."""

Samples = Mapping[str, Mapping[str, Sequence[float]]]
"""Seconds by alternative and part, one per round."""


class Stopping:
    """Decides after every round whether it was the last one; made when the first begins, on all ranks alike."""

    def __init__(self, ratio_within: float, rounds_s: float) -> None:
        """`ratio_within`: half the width of a ratio's 95% interval that is narrow enough, as a share; 0: none is.

        `rounds_s`: rounds end after so many seconds all the same, once there is an interval.
        """
        self._half_width, self._rounds_s = math.log1p(ratio_within), rounds_s
        self._start = time.perf_counter()
        self._next_look = MIN_SAMPLES if ratio_within or rounds_s < math.inf else math.inf

    def is_enough(self, samples: Samples, device: str) -> bool:
        """Whether these samples suffice. A collective with several ranks."""
        table = [seconds for parts in samples.values() for seconds in parts.values()]
        rounds = len(table[0]) if table else 0
        if rounds < self._next_look:
            return False
        self._next_look = math.ceil(rounds * GROWTH)
        elapsed_s, slowest = _max_over_ranks(time.perf_counter() - self._start, np.array(table), device)
        if elapsed_s >= self._rounds_s:
            return True
        if rounds < MIN_ROUNDS:
            return False
        parts = np.array([part for parts in samples.values() for part in parts])
        return all(widest_ratio(slowest[parts == part]) <= self._half_width for part in set(parts))


def widest_ratio(seconds: np.ndarray) -> float:
    """Half the width of the widest interval of a ratio between two of `seconds`, (alternatives, rounds), in logs.

    With a single alternative, half the width of its interval.
    """
    if seconds.min() <= 0:
        return math.inf
    logs = np.log(seconds)
    differences = [one - other for one, other in combinations(logs, 2)] or logs
    return max((estimate.high - estimate.low) / 2 for estimate in map(estimate_paired, differences))


def _max_over_ranks(elapsed_s: float, seconds: np.ndarray, device: str) -> tuple[float, np.ndarray]:
    """The largest values of all ranks, which the reader of the samples takes, too; so all ranks decide alike."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return elapsed_s, seconds
    values = torch.tensor([elapsed_s, *seconds.ravel()], dtype=torch.float64)
    values = values.to(device if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    slowest = values.tolist()
    return slowest[0], np.array(slowest[1:]).reshape(seconds.shape)
