"""Whether the published trends of `sync_batchnorm.csv` hold in a run."""

from collections.abc import Iterator

import pandas as pd

from labkit.lab.evidence import span_text
from labkit.lab.trends import Trend
from labkit.studies.sync_batchnorm import analysis
from labkit.studies.sync_batchnorm.alternatives import OWN, TORCH

# 128 to 1024 features, batch 32 to 64; ratios of medians are 0.90 to 1.08 and 0.78 to 1.06.
PUBLISHED_RANKS = 2
FEATURES, BATCHES = (128, 1024), (32, 64)
HARDLY = 1.15
# Published: from the smallest to the largest batch, the peak grows by 0.86 (torch) and 0.98 times the batch's growth.
PROPORTIONAL = (0.8, 1.1)
PUBLISHED_PEAK = 2.4
"""The self-made layer's peak over torch's, at the least: 2.4 to 2.8."""


def published_trends(frame: pd.DataFrame) -> list[Trend]:
    """The trends that this run has the rows to check."""
    return [*_size_hardly_matters(frame), *_peak_grows_with_size(frame), *_against_torch(frame)]


def _size_hardly_matters(frame: pd.DataFrame) -> Iterator[Trend]:
    """Published, of torch's and the self-made layer: neither features nor batch make it slower by 15 %."""
    table = analysis.time_growth(frame)
    table = table[table["world_size"] == PUBLISHED_RANKS]
    for grows, words, (least, most) in (("features", "features", FEATURES), ("batch", "rows", BATCHES)):
        some = table[(table["grows"] == grows) & (table["before"] >= least) & (table["after"] <= most)]
        if not some.empty:
            first, last = some["before"].iloc[0], some["after"].iloc[0]
            claim = (
                f"A layer with {last} {words} takes as long as one with {first}, or at most 15 % longer "
                f"({span_text(some['ratio'])} of its time here)"
            )
            yield Trend.judged(claim, some["high"] < HARDLY, some["low"] > HARDLY)


def _peak_grows_with_size(frame: pd.DataFrame) -> Iterator[Trend]:
    """Published, of both layers: the peak grows about as batch times features does."""
    table = analysis.memory(frame)
    table = table[(table["alternative"] == OWN) & (table["world_size"] == PUBLISHED_RANKS)]
    table = table.assign(size=table["batch"] * table["features"])
    growths = []
    for _, group in table.groupby(analysis.MACHINE):
        rows = group.sort_values("size")
        first, last = rows.iloc[0], rows.iloc[-1]
        if first["size"] < last["size"]:
            growths.append(last["peak_bytes"] / first["peak_bytes"] / (last["size"] / first["size"]))
    if growths:
        claim = f"Peak memory grows in proportion to batch times features ({span_text(growths)} of their growth here)"
        holds = [PROPORTIONAL[0] <= growth <= PROPORTIONAL[1] for growth in growths]
        yield Trend.judged(claim, holds, [not one for one in holds])


def _against_torch(frame: pd.DataFrame) -> Iterator[Trend]:
    """Published, of the self-made layer: faster than torch's in every setting, at 2.4 to 2.8 times its peak memory."""
    ratios = analysis.ratios(frame, OWN, TORCH)
    ratios = ratios[ratios["world_size"] == PUBLISHED_RANKS]
    if not ratios.empty:
        claim = f"A self-made layer is faster than torch's ({span_text(ratios['ratio'])} of its time here)"
        yield Trend.judged(claim, ratios["verdict"] == "faster", ratios["verdict"] == "slower")
    table = analysis.memory(frame)
    peaks = table[table["world_size"] == PUBLISHED_RANKS].pivot_table(
        index=analysis.SETTING, columns="alternative", values="peak_bytes"
    )
    if {OWN, TORCH} <= set(peaks.columns) and len(over := (peaks[OWN] / peaks[TORCH]).dropna()):
        claim = f"A self-made layer needs {PUBLISHED_PEAK} times the memory of torch's or more ({span_text(over)} here)"
        yield Trend.judged(claim, over >= PUBLISHED_PEAK, over < PUBLISHED_PEAK)
