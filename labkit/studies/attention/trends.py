"""Whether the published trends of explicit attention hold in a run."""

from collections.abc import Iterator
from math import log

import pandas as pd

from labkit.lab.trends import Trend
from labkit.studies.attention import analysis
from labkit.studies.attention.worker import COMPILED, EXPLICIT

# Published, from 8192 to 16384 tokens forward and backward take 3.6 to 4.3 times as long.
QUADRATIC = (1.75, 2.25)
LONG = 4096


def published_trends(frame: pd.DataFrame) -> list[Trend]:
    """The trends that this run has the rows to check."""
    return [*_quadratic(frame), *_backward_longer(frame), *_compiled(frame)]


def _quadratic(frame: pd.DataFrame) -> Iterator[Trend]:
    """`attention_eager.csv`: from 4096 tokens on times grow with the square of the length."""
    table = analysis.times(frame)
    table = table[(table["implementation"] == EXPLICIT) & (table["phase"] != "both") & (table["sequence"] >= LONG)]
    exponents, shown, contradicted = [], [], []
    for _, group in table.groupby(["sweep", "head_dim", "phase"]):
        if len(group) < 2:
            continue
        rows = group.sort_values("sequence").to_dict("records")
        first, last = rows[0], rows[-1]
        longer = log(last["sequence"] / first["sequence"])
        low, high = log(last["low"] / first["high"]) / longer, log(last["high"] / first["low"]) / longer
        exponents.append(log(last["seconds"] / first["seconds"]) / longer)
        shown.append(QUADRATIC[0] <= low and high <= QUADRATIC[1])
        contradicted.append(high < QUADRATIC[0] or low > QUADRATIC[1])
    if exponents:
        seen = f"exponents {min(exponents):.2f} to {max(exponents):.2f} here"
        claim = f"From {LONG} tokens on the time of explicit attention grows with the square of the length ({seen})"
        yield Trend.judged(claim, shown, contradicted)


def _backward_longer(frame: pd.DataFrame) -> Iterator[Trend]:
    """`attention_eager.csv`: backward takes longer than forward at every size."""
    table = analysis.times(frame, "grid")
    table = table[(table["implementation"] == EXPLICIT) & (table["phase"] != "both")]
    wide = table.pivot(index=["head_dim", "sequence"], columns="phase", values=["low", "high"]).dropna()
    if not wide.empty:
        shown = wide["low"]["backward"] > wide["high"]["forward"]
        contradicted = wide["high"]["backward"] < wide["low"]["forward"]
        claim = f"Backward takes longer than forward ({sum(shown)} of {len(shown)} sizes shown)"
        yield Trend.judged(claim, list(shown), list(contradicted))


def _compiled(frame: pd.DataFrame) -> Iterator[Trend]:
    """`attention_compile.csv`: compiled is slower than eager at 256 tokens, and its backward is faster from 4096 on."""
    ratios = analysis.against_explicit(frame, COMPILED, "grid")
    short = ratios[(ratios["sequence"] < 1024) & ratios["phase"].isin(["forward", "backward"])]
    long = ratios[(ratios["sequence"] >= 2048) & (ratios["phase"] == "backward")]
    if not short.empty:
        claim = "torch.compile makes sequences below 1024 tokens slower"
        yield Trend.judged(claim, list(short["verdict"] == "slower"), list(short["verdict"] == "faster"))
    if not long.empty:
        lengths = f"published from 4096 tokens on, here from {long['sequence'].min()}"
        claim = f"torch.compile makes the backward pass of long sequences faster ({lengths})"
        yield Trend.judged(claim, list(long["verdict"] == "faster"), list(long["verdict"] == "slower"))
