"""Published peaks beside counted ones, and whether the published trends hold in a run.

Peaks are bytes that come out the same in every repeat, so that a difference needs no interval; one of less than
`LEAST` is not claimed.
"""

from collections.abc import Iterator
from itertools import pairwise

import pandas as pd

from labkit.costs.memory import state_bytes
from labkit.costs.transformer import n_parameters
from labkit.lab.trends import Trend
from labkit.lab.units import format_bytes
from labkit.nn.transformer import shape_named
from labkit.studies.memory import analysis

LEAST = 0.01


def beside_published(frame: pd.DataFrame) -> list[str]:
    """Sentences: each published peak with the counted one, and what the two together imply; [] without rows."""
    table = analysis.beside_published(frame)
    if table.empty:
        return []
    size = str(table["size"].iloc[0])
    sentences = [
        f"{row['phase'].replace('_', ' ').capitalize()}, {row['precision']}, {row['context_length']} tokens: "
        f"{format_bytes(row['counted_bytes'])} counted, {_published(row['published_bytes'])} published."
        for row in table.to_dict("records")
    ]
    shape = shape_named(size)
    states = sum(state_bytes(shape).values())
    full = table[table["phase"] == "full_step"]
    below = full[full["published_bytes"] < states]
    if len(below):
        least = below.loc[below["published_bytes"].idxmin()]
        sentences.append(
            f"The {n_parameters(shape) / 1e9:.1f} billion float32 parameters of {size}, their gradients and AdamW's "
            f"two states alone take {format_bytes(states)}, more than the {_published(least['published_bytes'])} "
            f"published at {least['context_length']} tokens: that model was smaller, or did not hold all of these."
        )
    return sentences + _graph_kept(frame, table)


def _graph_kept(frame: pd.DataFrame, table: pd.DataFrame) -> list[str]:
    """Published inference peaks above the counted ones, beside a forward pass that keeps its graph."""
    inference = table[table["phase"] == "inference"]
    forward = analysis.of_method(frame, "counted")
    forward = forward[(forward["phase"] == "forward") & forward["size"].isin(table["size"])]
    keys = ["context_length", "precision"]
    return [
        f"The published inference peak at {row['context_length']} tokens is "
        f"{row['published_bytes'] / row['counted_bytes']:.1f} times what a forward pass needs that keeps nothing; one "
        f"that keeps its graph for a backward pass counts {format_bytes(row['peak_bytes'])}."
        for row in inference.merge(forward[[*keys, "peak_bytes"]], on=keys).to_dict("records")
        if row["published_bytes"] > (1 + LEAST) * row["counted_bytes"]
    ]


def _published(n_bytes: float) -> str:
    """In the unit of the counted ones and of the figure, and as it was printed."""
    return f"{format_bytes(n_bytes)} ({n_bytes / 1e9:g} GB)"


def published_trends(frame: pd.DataFrame) -> list[Trend]:
    """The trends that this run has the rows to check."""
    table = analysis.by_context(frame)
    if table.empty:
        return []
    found = [*_grows_with_context(table), *_faster_than_in_proportion(table)]
    return [*found, *_bf16_saves_less_than_half(table), *_inference_near_a_full_step(table)]


def _series(table: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Full steps of one size and precision, by context."""
    full = table[table["phase"] == "full_step"]
    for _, group in full.groupby(["size", "precision"]):
        yield group.sort_values("context_length")


def _grows_with_context(table: pd.DataFrame) -> Iterator[Trend]:
    """24.5, 35 and 70 GB at 128, 256 and 512 tokens."""
    steps = [step for group in _series(table) for step in pairwise(group["peak_bytes"])]
    if steps:
        grows = [longer > (1 + LEAST) * shorter for shorter, longer in steps]
        falls = [longer < (1 - LEAST) * shorter for shorter, longer in steps]
        yield Trend.judged(f"A full step's peak grows with context ({sum(grows)} of {len(steps)} steps)", grows, falls)


def _faster_than_in_proportion(table: pd.DataFrame) -> Iterator[Trend]:
    """10.5 GB more for 128 tokens more, then 35 GB for 256 more: a token costs 1.7 times as much."""
    ratios = []
    for group in _series(table):
        rows = list(zip(group["context_length"], group["peak_bytes"], strict=True))
        slopes = [(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(rows)]
        ratios += [later / earlier for earlier, later in pairwise(slopes) if earlier > 0]
    if ratios:
        claim = "Each further token costs more than the one before"
        shown = [ratio > 1 + LEAST for ratio in ratios]
        yield Trend.judged(f"{claim} ({sum(shown)} of {len(ratios)})", shown, [ratio < 1 - LEAST for ratio in ratios])


def _bf16_saves_less_than_half(table: pd.DataFrame) -> Iterator[Trend]:
    """60 GB instead of 70 GB at 512 tokens."""
    full = table[table["phase"] == "full_step"].pivot_table(
        index=["size", "context_length"], columns="precision", values="peak_bytes"
    )
    if {"float32", "bfloat16"} <= set(full.columns):
        ratios = (full["bfloat16"] / full["float32"]).dropna()
        if len(ratios):
            claim = f"bf16 autocast lowers a full step's peak, by less than half ({ratios.min():.2f} to "
            claim += f"{ratios.max():.2f} of it left)"
            outside = [ratio < 0.5 or ratio > 1 + LEAST for ratio in ratios]
            yield Trend.judged(claim, [0.5 <= ratio < 1 - LEAST for ratio in ratios], outside)


def _inference_near_a_full_step(table: pd.DataFrame) -> Iterator[Trend]:
    """65 GB for inference, 70 GB for a full step, both at 512 tokens."""
    by_phase = table.pivot_table(index=["size", "context_length", "precision"], columns="phase", values="peak_bytes")
    if {"inference", "full_step"} <= set(by_phase.columns):
        shares = (by_phase["inference"] / by_phase["full_step"]).dropna()
        if len(shares):
            claim = f"Inference peaks within 10 % of a full step ({shares.min():.2f} to {shares.max():.2f} of it)"
            yield Trend.judged(claim, [share >= 0.9 for share in shares], [share < 0.9 for share in shares])
