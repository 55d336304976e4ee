"""Whether the published results of mixed precision hold in a run, are contradicted, or are not shown either way."""

from collections.abc import Iterator
from itertools import pairwise

import pandas as pd

from labkit.lab.trends import Trend
from labkit.studies.precision import analysis
from labkit.studies.precision.worker import BOTH


def published_trends(frame: pd.DataFrame) -> list[Trend]:
    """The trends that this run has the rows to check."""
    return [*_same_sums(frame), *_gains_with_size(frame), *_small_loses_and_the_others_win(frame)]


def _same_sums(frame: pd.DataFrame) -> Iterator[Trend]:
    """`profile_kernels.csv`: 1000 x 0.01. Arithmetic, not speed: every machine should give the same digits."""
    table = analysis.final_sums(frame).dropna(subset="published")
    table = table[(table["exact_sum"] - 10).abs() < 1e-9]
    if not table.empty:
        same = [analysis.agrees_with(value, text) for value, text in zip(table["sum"], table["published"], strict=True)]
        claim = f"1000 x 0.01 comes to the published sums ({sum(same)} of {len(same)} agree in every printed digit)"
        yield Trend.judged(claim, same, [not agrees for agrees in same])


def _bfloat16(frame: pd.DataFrame) -> pd.DataFrame:
    table = analysis.ratios(frame)
    return table[(table["alternative"] == "bfloat16") & (table["mode"] == BOTH)]


def _gains_with_size(frame: pd.DataFrame) -> Iterator[Trend]:
    """`mixed_precision.csv`: the ratio of bf16 over fp32 falls from each size to the next, and below 1.

    A ratio that falls and stays above 1 is less of a loss, which is no saving: it does not show the trend.
    """
    for device, of_device in _bfloat16(frame).groupby("device"):
        steps = list(pairwise(of_device.sort_values("million_parameters").to_dict("records")))
        if steps:
            shown = [large["high"] < min(1, small["low"]) for small, large in steps]
            contradicted = [large["low"] > small["high"] for small, large in steps]
            seen = f"{sum(shown)} of {len(steps)} steps from a size to the next shown"
            claim = f"The larger the model, the more time bf16 autocast saves, forward and backward ({device}: {seen})"
            yield Trend.judged(claim, shown, contradicted)


def _small_loses_and_the_others_win(frame: pd.DataFrame) -> Iterator[Trend]:
    """`mixed_precision.csv`: at the smallest published size bf16 is slower than fp32, at every larger one faster."""
    table, published = _bfloat16(frame), analysis.published_ratios().set_index("model")["ratio"]
    slow = table[table["model"].isin(published.index[published > 1])]
    fast = table[table["model"].isin(published.index[published < 1])]
    for word, other, some in (("slower", "faster", slow), ("faster", "slower", fast)):
        if not some.empty:
            models = ", ".join(dict.fromkeys(some["model"]))
            claim = f"bf16 autocast is {word} than fp32 at the size{'s' * (some.model.nunique() > 1)} {models}"
            yield Trend.judged(claim, list(some["verdict"] == word), list(some["verdict"] == other))
