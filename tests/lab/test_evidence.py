"""Numbers behind a recommendation: those that carry it come first."""

import numpy as np
import pandas as pd

from labkit.bench.statistics import compare_groups
from labkit.lab.evidence import ratios_text, significant


def _ratios(*values):
    rows = [
        {"name": f"m{index}", "ratio": value, "low": value - 0.01, "high": value + 0.01,
         "verdict": "faster" if value < 0.96 else "slower" if value > 1.04 else "no difference shown"}
        for index, value in enumerate(values)
    ]  # fmt: skip
    return pd.DataFrame(rows, columns=["name", "ratio", "low", "high", "verdict"])


def test_a_gain_comes_before_losses_however_large():
    text = ratios_text(_ratios(3.0, 0.9, 1.0, 2.0), lambda row: row["name"])
    assert text == "m1: 0.90 [0.89, 0.91]; m2: 1.00 [0.99, 1.01]; m3: 2.00 [1.99, 2.01]; and 1 more"


def test_without_a_gain_the_largest_difference_comes_first():
    assert ratios_text(_ratios(1.0, 2.0), lambda row: row["name"]).startswith("m1: 2.00")
    assert ratios_text(_ratios(), lambda row: row["name"]) is None


def test_a_question_of_its_own_is_not_answered_by_differences_of_others():
    """A ring equal to torch, among algorithms that are all slower: what is said of the ring stays right."""
    claims, tries = 0, 100
    for seed in range(tries):
        rng = np.random.default_rng(seed)
        rows = [
            {"setting": setting, "name": name, "repeat": i, "seconds": factor * np.exp(rng.normal(0, 0.1))}
            for setting in range(8)
            for name, factor in (("torch", 1.0), ("ring", 1.0), ("a", 1.5), ("b", 1.5), ("c", 1.5))
            for i in range(12)
        ]
        table = compare_groups(pd.DataFrame(rows), "seconds", ["setting"], "name", "torch")
        claims += any(len(some) for some in significant(table[table["name"] == "ring"]))
    assert claims / tries <= 0.05 + 2 * np.sqrt(0.05 * 0.95 / tries)
