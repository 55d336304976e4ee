"""Whether the published trends of all-reduce hold in a run: they do, they are contradicted, or neither is shown."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pandas as pd

from labkit.bench.statistics import compare_groups, judged
from labkit.lab.trends import Trend
from labkit.lab.units import format_bytes
from labkit.studies.all_reduce import analysis
from labkit.studies.all_reduce.transports import TORCH

KIB, MIB = 2**10, 2**20

# "In proportion": the published time ratios over size ratios are 0.9 to 1.12.
PROPORTIONAL = (2 / 3, 3 / 2)


def published_trends(frame: pd.DataFrame) -> list[Trend]:
    """The trends that this run has the rows to check."""
    found = [*_linear_in_size(frame), *_slower_with_ranks(frame), *_butterfly_ahead(frame), *_ring_behind(frame)]
    return list(found)


def _torch_gloo(frame: pd.DataFrame, least_bytes: int) -> pd.DataFrame:
    table = analysis.times(frame, "sizes")
    return table[(table["algorithm"] == TORCH) & (table["backend"] == "gloo") & (table["n_bytes"] >= least_bytes)]


def _linear_in_size(frame: pd.DataFrame) -> Iterator[Trend]:
    """`allreduce_gloo_nccl.csv`: from 10 MB to 1 GB gloo's time grows about as the size does."""
    shown, contradicted, growths = [], [], []
    for _, group in _torch_gloo(frame, 10 * MIB).groupby("world_size"):
        if len(group) < 2:
            continue
        rows = group.sort_values("n_bytes").to_dict("records")
        small, large = rows[0], rows[-1]
        sizes = large["n_bytes"] / small["n_bytes"]
        low, high = large["low"] / small["high"] / sizes, large["high"] / small["low"] / sizes
        growths.append(large["seconds"] / small["seconds"] / sizes)
        shown.append(PROPORTIONAL[0] <= low and high <= PROPORTIONAL[1])
        contradicted.append(high < PROPORTIONAL[0] or low > PROPORTIONAL[1])
    if growths:
        seen = f"{min(growths):.2f} to {max(growths):.2f} times the size's growth"
        claim = f"From 10 MB on, gloo's time grows in proportion to the size ({seen})"
        yield Trend.judged(claim, shown, contradicted)


def _slower_with_ranks(frame: pd.DataFrame) -> Iterator[Trend]:
    """`allreduce_gloo_nccl.csv`: from 1 MB on, more ranks take longer at every size."""
    steps: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for _, group in _torch_gloo(frame, MIB).groupby("n_bytes"):
        steps += pairwise(group.sort_values("world_size").to_dict("records"))
    if steps:
        shown = [more["low"] > fewer["high"] for fewer, more in steps]
        contradicted = [more["high"] < fewer["low"] for fewer, more in steps]
        claim = f"From 1 MB on, more ranks take longer ({sum(shown)} of {len(steps)} steps shown)"
        yield Trend.judged(claim, shown, contradicted)


def _butterfly_ahead(frame: pd.DataFrame) -> Iterator[Trend]:
    """`allreduce_ring_vs_butterfly.csv`: butterfly is ahead of ring from 8 ranks on, at one element a rank."""
    ranks = _many_ranks(frame, least_ranks=8)
    ranks = ranks[ranks["n_bytes"] == ranks["n_bytes"].min()]
    table = compare_groups(ranks, "seconds", analysis.SETTING, "algorithm", "ring")
    table = judged(table[table["algorithm"] == "butterfly"])
    if not table.empty:
        size = format_bytes(table["n_bytes"].iloc[0])
        verdicts = table["verdict"]
        claim = f"From 8 ranks on butterfly is faster than ring (published at 8 to 32 elements, here at {size})"
        yield Trend.judged(claim, list(verdicts == "faster"), list(verdicts == "slower"))


def _ring_behind(frame: pd.DataFrame) -> Iterator[Trend]:
    """`allreduce_ring_vs_torch.csv`: ring is behind torch with 16 ranks and 131,072 elements."""
    ranks = _many_ranks(frame, least_ranks=16)
    near = (ranks["world_size"] == 16) & ranks["n_bytes"].between(256 * KIB, 2 * MIB)
    table = compare_groups(ranks[near], "seconds", analysis.SETTING, "algorithm", TORCH)
    table = judged(table[table["algorithm"] == "ring"])
    if not table.empty:
        size = format_bytes(table["n_bytes"].iloc[0])
        verdicts = table["verdict"]
        claim = f"With 16 ranks torch is faster than ring (published at 131,072 elements, here at {size})"
        yield Trend.judged(claim, list(verdicts == "slower"), list(verdicts == "faster"))


def _many_ranks(frame: pd.DataFrame, least_ranks: int) -> pd.DataFrame:
    ranks = analysis.samples(frame, "ranks")
    return ranks[(ranks["backend"] == "gloo") & (ranks["world_size"] >= least_ranks)]
