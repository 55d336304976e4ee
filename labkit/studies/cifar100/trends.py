"""Whether the published trends of a CIFAR-100 training hold in a run, and its accuracy where that can be compared."""

from collections.abc import Iterator

import pandas as pd

from labkit.lab.evidence import span_text
from labkit.lab.trends import Trend
from labkit.studies.cifar100 import analysis
from labkit.studies.cifar100.training import SYNCHRONIZED


def published_trends(frame: pd.DataFrame) -> list[Trend]:
    """The trends that this run has the rows to check."""
    return [*_as_fast(frame), *_smaller(frame), *_as_good(frame)]


def _as_fast(frame: pd.DataFrame) -> Iterator[Trend]:
    """`cifar100_training_2gpu.csv`: 29.6 s against 29.3 s."""
    ratios = analysis.time_ratios(frame, analysis.SAME)
    if len(ratios):
        claim = (
            "Training with self-made parts takes about as long as with torch's "
            f"({analysis.published_ratio('epoch_s'):.2f} of it published, "
            f"{span_text(ratios['ratio'])} with labkit's here)"
        )
        yield Trend.judged(
            claim, (ratios["low"] > 0.95) & (ratios["high"] < 1.05), (ratios["high"] < 0.95) | (ratios["low"] > 1.05)
        )


def _smaller(frame: pd.DataFrame) -> Iterator[Trend]:
    """`cifar100_training_2gpu.csv`: 170.1 MB against 174.1 MB."""
    table = analysis.memory(frame).dropna()
    table = table[~table["implementation"].str.startswith("torch")]
    if len(table):
        claim = (
            "Training with self-made parts needs a little less memory "
            f"({analysis.published_ratio('peak_bytes'):.2f} published, "
            f"{span_text(table['over_torch'], '{:.3f}'.format)} with labkit's here)"
        )
        yield Trend.judged(claim, table["over_torch"] < 0.99, table["over_torch"] > 1.01)


def _as_good(frame: pd.DataFrame) -> Iterator[Trend]:
    """`cifar100_training_2gpu.csv`: 27.3 % against 27.7 %, one training each."""
    table, lost = analysis.differences(frame, analysis.SAME), analysis.divergences(frame, analysis.SAME)
    verdicts = [*table.loc[table["metric"] == "accuracy", "verdict"], *lost.loc[lost["verdict"] != "none", "verdict"]]
    if verdicts:
        own, torch = (
            analysis.published().set_index("implementation").loc[name, "accuracy_percent"] for name in analysis.SAME[0]
        )
        claim = f"Both train equally well ({own:.1f} % and {torch:.1f} % published)"
        said = pd.Series(verdicts)
        yield Trend.judged(claim, said == "the same", said.isin(["higher", "lower"]))


def reached(frame: pd.DataFrame) -> str:
    """Whether the published accuracy itself can be compared with one from here."""
    if not analysis.is_published_training(frame):
        return "Accuracies themselves cannot be compared: images or recipe are others."
    table = analysis.outcome(frame).dropna(subset="accuracy_percent")
    best = table.loc[table["implementation"].isin(SYNCHRONIZED), "accuracy_percent"]
    if best.empty:
        return (
            "Accuracies themselves cannot be compared: no training with SyncBatchNorm, as published, came to its end."
        )
    here = span_text(best, "{:.1f} %".format)
    return f"With SyncBatchNorm, as published, it is {here} here after as many epochs of the same recipe."
