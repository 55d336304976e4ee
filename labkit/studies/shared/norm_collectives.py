"""What synchronizing a batch norm sends, and how long that should take by the machine's calibration."""

from labkit.costs.calibration import Calibration
from labkit.costs.communication import ALL_GATHER_COSTS
from labkit.parallel.collectives import ALGORITHMS
from labkit.parallel.select_algorithm import select_algorithm
from labkit.parallel.transport.base import SHARED


def sent_bytes(features: int) -> tuple[int, int]:
    """Of a rank's statistics forward, in float64, and its sums backward, in float32."""
    return 8 * (2 * features + 1), 4 * 2 * features


def collectives_s(features: int, ranks: int, backend: str, calibration: Calibration | None) -> float | None:
    """Of the all-gather forward and the all-reduce backward, over shared memory; None for what was not calibrated."""
    if calibration is None or backend != "gloo" or ranks < 2:
        return None
    statistics, sums = sent_bytes(features)
    gather = "butterfly"  # which `all_gather` exchanges by
    add = ALGORITHMS[name := select_algorithm(sums, ranks, SHARED)].cost
    assert add is not None, "labkit's own algorithms have a cost"
    each = [
        calibration.algorithm_s("shared memory", gather, ALL_GATHER_COSTS[gather](ranks, ranks * statistics), ranks),
        calibration.algorithm_s("shared memory", name, add(ranks, sums), ranks),
    ]
    known = [seconds for seconds in each if seconds is not None]
    return sum(known) if len(known) == len(each) else None
