"""Numbers behind a recommendation: those that carry it come first."""

import pandas as pd

from labkit.lab.evidence import ratios_text


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
