"""Whether the published trends of FlashAttention hold in a run.

The published kernel is Triton forward with a compiled PyTorch backward; here it is the Triton kernel where it runs, and
tiled attention, the same algorithm in PyTorch, where it does not.
"""

from collections.abc import Iterator

import pandas as pd

from labkit.lab.trends import Trend
from labkit.studies.flash_attention import analysis
from labkit.studies.flash_attention.recorded import has_flash
from labkit.studies.shared.attention_passes import EXPLICIT, FLASH, TILED


def published_trends(frame: pd.DataFrame) -> list[Trend]:
    """The trends that this run has the rows to check."""
    own = FLASH if has_flash(frame) else TILED
    return [*_ahead(frame, own, "forward", 4096, None), *_ahead(frame, own, "both", 8192, "float32"), *_memory(frame)]


def _ahead(frame: pd.DataFrame, own: str, phase: str, least: int, dtype: str | None) -> Iterator[Trend]:
    """`flash_attention.csv`: forward is ahead from 4096 tokens on; with backward, in float32, from 8192 on."""
    table = analysis.ratios(frame, phase)
    table = table[(table["implementation"] == own) & (table["sequence"] >= least)]
    table = table if dtype is None else table[table["dtype"] == dtype]
    if not table.empty:
        what = "forward" if phase == "forward" else f"forward and backward together in {dtype}"
        claim = f"From {least} tokens on, FlashAttention {what} is faster than explicit attention (here: {own})"
        yield Trend.judged(claim, list(table["verdict"] == "faster"), list(table["verdict"] == "slower"))


def _memory(frame: pd.DataFrame) -> Iterator[Trend]:
    """`flash_attention.csv`: at 65536 tokens in float32 explicit runs out of memory, and flash does not."""
    refused = analysis.refused(frame)
    ended = refused[(refused["implementation"] == EXPLICIT) & refused["gate"].str.contains("available|out of memory")]
    measured = analysis.times(frame, "lengths")
    linear = measured[measured["implementation"].isin([FLASH, TILED])]
    if measured.empty:
        return
    both = ended.merge(linear, on=["dtype", "head_dim", "sequence"])
    where = f" (here from {both['sequence'].min()} tokens)" if len(both) else ""
    claim = f"Explicit attention runs out of memory where FlashAttention still runs{where}"
    yield Trend.judged(claim, [len(both) > 0], [])
