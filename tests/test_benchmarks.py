"""The bounds of the benchmarks; nothing is timed."""

import runpy
from pathlib import Path

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def test_a_bound_is_met_or_missed_by_its_pair_alone():
    against = runpy.run_path(str(BENCHMARKS / "against_torch.py"))
    times = {"labkit": [2.9] * 9, "torch": [3.0] * 9, "plain": [1.0] * 9}
    for bound, word in ((1.0, "at most 1.00: met"), (0.5, "at most 0.50: MISSED")):
        pairs = {("labkit", "torch"): bound, ("labkit", "plain"): None}
        contest = against["Contest"]("x", {}, pairs)
        (line, missed), (other, is_other_missed) = (
            against["_line"](contest, pair, times, 1e9) for pair in pairs
        )
        assert (word in line, missed) == (True, bound < 0.9)
        assert ("at most" in other, is_other_missed) == (False, False)
