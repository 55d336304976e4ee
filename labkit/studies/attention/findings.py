"""What the attention lab asks, and how a run answers."""

from dataclasses import replace

import numpy as np
import pandas as pd

from labkit.bench.statistics import judged
from labkit.lab.as_predicted import agreement
from labkit.lab.claims import Trend, claim, lies_within, published, quotients
from labkit.lab.comparing import MEMORY, TIME, compared
from labkit.lab.findings import Finding, Questions, at_the_cost_of
from labkit.lab.own_effects import with_own
from labkit.lab.quantities import Quantity
from labkit.lab.rows import Measured, select
from labkit.lab.units import format_bytes, format_seconds, format_share, join_words, span
from labkit.nn.attention_implementations import RESERVED
from labkit.studies.attention import tables
from labkit.studies.attention.worker import COMPILED, EXPLICIT, TILED
from labkit.studies.shared.attention_passes import PHASES
from labkit.studies.shared.attention_tables import (
    BOTH,
    LEAST_BYTES,
    PROBLEM,
    against,
    caveat,
    from_shortest,
    memory_against_explicit,
    name_of,
    passes,
    times,
)

QUESTIONS = Questions()
EXPLICITS = name_of(EXPLICIT)
EXACT = 1.02  # measured over predicted bytes within this are what the formula says
# Published, from 8192 to 16384 tokens forward and backward take 3.6 to 4.3 times as long.
QUADRATIC = (1.75, 2.25)
LEAST_EXPONENT = 0.01  # a time that falls has none that is compared as a ratio
LONG = 4096
SWEEPS = ("grid", "tiling")


@QUESTIONS.ask(
    "time_growth", "How do the times of the forward and backward pass grow with sequence length and head dimension?"
)
def time_growth(frame: pd.DataFrame) -> Finding | None:
    table = select(times(frame, "grid"), implementation=EXPLICIT, phase=BOTH)
    if table.empty:
        return None
    laws = tables.power_laws(frame)
    widest = select(laws, implementation=EXPLICIT, phase=BOTH, head_dim=table["head_dim"].max())
    headline = "The time of explicit attention follows no power of the sequence length here."
    for row in widest.to_dict("records"):
        headline = (
            f"From {row['from_sequence']} tokens on, doubling the sequence makes explicit attention take "
            f"{row['times_per_doubling']:.1f} times as long on average."
        )
    return Finding("measured", headline, laws, why=_growth_with_width(frame))


def _growth_with_width(frame: pd.DataFrame) -> str | None:
    """How much longer the largest head dimension takes than the smallest, at the longest sequence both have."""
    ratios = select(tables.width_growth(frame), phase=BOTH)
    if ratios.empty:
        return None
    row = judged(ratios).sort_values(["head_dim", "sequence"]).iloc[-1]
    narrow = frame.loc[frame["sweep"] == "grid", "head_dim"].min()
    takes = (
        f"takes {row['ratio']:.1f} times as long as" if row["verdict"] == "slower" else "is not measurably slower than"
    )
    return f"At {row['sequence']} tokens, a head dimension of {row['head_dim']} {takes} one of {narrow}."


@QUESTIONS.ask(
    "memory_growth", "How does the memory held before the backward pass grow, and is it what the formula says?"
)
def memory_growth(frame: pd.DataFrame) -> Finding | None:
    table = tables.memory(frame, "grid")
    names = ["head_dim", "sequence", "implementation", "saved_bytes", "predicted_saved_bytes"]
    found = agreement(
        table[[*names, "measured_over_predicted"]], "counts of bytes held", "what the formula says", close=EXACT
    )
    tensors = tables.saved_tensors(frame)
    if found is None or tensors.empty:
        return found
    matrix = tensors.loc[tensors["tensor"] == "probabilities", "saved_bytes"].sum()
    why = (
        f"At {tensors['sequence'].iloc[0]} tokens, {format_share(matrix / tensors['saved_bytes'].sum())} of what "
        "explicit attention holds is the probabilities, which grow with the square of the length."
    )
    return replace(found, why=why)


@QUESTIONS.ask("out_of_memory", "At which length does this machine run out of memory, and what fills it?")
def out_of_memory(frame: pd.DataFrame) -> Finding | None:
    table = tables.too_large(frame)
    if table.empty:
        return None
    needed = table[table["tensor"] == "all together"].iloc[0]
    tensors = table.iloc[:-2]
    largest = tensors[tensors["bytes"] == tensors["bytes"].max()]
    headline = (
        f"At {needed['sequence']} tokens explicit attention no longer fits: its two passes need "
        f"{format_bytes(needed['bytes'])}."
    )
    why = (
        f"{largest['share_percent'].sum():.0f} % of that is {len(largest)} matrices of "
        f"{format_bytes(largest['bytes'].iloc[0])}: {join_words(list(largest['tensor']))}. {_formula_held(frame)}"
    )
    return Finding("predicted", headline, table, why=why)


def _formula_held(frame: pd.DataFrame) -> str:
    """How far the formula was off where peaks were measured that are large enough."""
    table = pd.concat([tables.memory(frame, sweep) for sweep in SWEEPS])
    table = table[(table["predicted_peak_bytes"] >= LEAST_BYTES) & table["peak_bytes"].notna()]
    if table.empty:
        return "That is by formula; no peak that is large enough to check it was measured."
    ratios = table["peak_bytes"] / table["predicted_peak_bytes"]
    measured = f"{len(ratios)} measured peaks, of {format_bytes(LEAST_BYTES)} and more, are"
    return f"That is by formula; {measured} {span(ratios)} times what it says."


@QUESTIONS.ask("tiling", "Does tiling save time and memory?", "attention")
def tiling(frame: pd.DataFrame) -> Finding | None:
    found = [
        _tiled_against_explicit(frame, ratios, quantity)
        for quantity, ratios in (
            (TIME, select(against(frame, "tiling"), phase=BOTH)),
            (MEMORY, memory_against_explicit(frame, "tiling")),
        )
    ]
    time, memory = map(from_shortest, found)
    if time is None or (memory is not None and time.verdict in ("no clear difference", "undecided")):
        return at_the_cost_of(_of_memory_alone(memory), time)
    return at_the_cost_of(time, memory)


def _of_memory_alone(memory: Finding | None) -> Finding | None:
    """A saving of one of the two that are asked for is no plain "yes"."""
    if memory is None or memory.verdict != "yes":
        return memory
    headline = f"In memory alone{memory.headline.removeprefix('Yes')}"
    return replace(memory, verdict="it depends", headline=headline)


def _tiled_against_explicit(frame: pd.DataFrame, ratios: pd.DataFrame, quantity: Quantity) -> Finding | None:
    dtypes = join_words(sorted(select(frame, ["dtype"], sweep="tiling")["dtype"].unique()))
    found = compared(
        select(ratios, implementation=TILED),
        name_of(TILED),
        EXPLICITS,
        axis=("sequence",),
        quantity=quantity,
        choose=f"Without a mask, tile {dtypes} attention instead of building the whole matrix",
        keep="Build the whole matrix while it fits: tiling is for longer sequences",
        caveat=caveat(frame, TILED),
    )
    return with_own(found, ratios, "implementation", RESERVED, EXPLICITS, axis=("sequence",), quantity=quantity)


@QUESTIONS.ask("compiled", "Is compiled attention faster than eager, forward and backward?", "compile")
def compiled(frame: pd.DataFrame) -> Finding | None:
    trouble = caveat(frame, COMPILED)
    first = select(frame, ["first_call_s"], implementation=COMPILED)["first_call_s"].dropna()
    cost = f"Compiling took {format_seconds(first.iloc[0])} for the first shape" if len(first) else ""
    cost += f", {format_seconds(first.iloc[1:].median())} for each later one" if len(first) > 1 else ""
    ratios = select(against(frame, "grid"), implementation=COMPILED, phase=PHASES)
    found = compared(
        ratios,
        name_of(COMPILED),
        EXPLICITS,
        axis=("sequence", "head_dim", "phase"),
        choose="Compile explicit attention",
        keep="Leave explicit attention eager",
        caveat=" ".join(filter(None, [trouble, cost and f"{cost}, which no time here includes."])) or None,
    )
    return from_shortest(found)


@QUESTIONS.ask("published_trends", "Do the published trends hold on this machine?")
def published_trends(frame: pd.DataFrame) -> Finding | None:
    return published([_quadratic(frame), _quadratic_memory(frame), _backward_longer(frame), *_compiled(frame)])


def _quadratic(frame: pd.DataFrame) -> Trend | None:
    """`attention_eager.csv`: from 4096 tokens on times grow with the square of the length."""
    table = pd.concat([times(frame, sweep).assign(sweep=sweep) for sweep in SWEEPS])
    table = select(table, implementation=EXPLICIT, phase=PHASES)
    text = f"From {LONG} tokens on, the time of explicit attention grows with the square of the length"
    return _growth_claim(text, table, ("low", "seconds", "high"))


def _quadratic_memory(frame: pd.DataFrame) -> Trend | None:
    """`attention_eager.csv`: so does the memory held before backward."""
    table = pd.concat([tables.memory(frame, sweep).assign(sweep=sweep, phase="saved") for sweep in SWEEPS])
    text = f"From {LONG} tokens on, the memory held grows with the square of the length"
    return _growth_claim(text, select(table, implementation=EXPLICIT), ("saved_bytes",) * 3)


def _growth_claim(text: str, table: pd.DataFrame, columns: tuple[str, str, str]) -> Trend | None:
    """Whether the middle of three columns grows with the square of the length; the others are its interval."""
    table = table.assign(**{name: table[of] for name, of in zip(("low", "seconds", "high"), columns, strict=True)})
    table = table[table["sequence"] >= LONG].sort_values("sequence")
    series = table.groupby(["sweep", "head_dim", "phase"])
    first, last = series.first(), series.last()
    longer = np.log((last["sequence"] / first["sequence"]).astype(float))
    exponents = np.log(quotients(last, first)[longer > 0]).div(longer[longer > 0], axis=0).clip(lower=LEAST_EXPONENT)
    return lies_within(text, exponents, *QUADRATIC, equal=None, seen=f"exponents {span(exponents['ratio'])}")


def _backward_longer(frame: pd.DataFrame) -> Trend | None:
    """`attention_eager.csv`: backward takes longer than forward at every size."""
    rows = select(passes(frame, "grid"), implementation=EXPLICIT, phase=PHASES)
    return claim("Backward takes longer than forward", Measured(PROBLEM, "phase").over(rows, "forward"), "slower")


def _compiled(frame: pd.DataFrame) -> list[Trend | None]:
    """`attention_compile.csv`: compiled is slower than eager at 256 tokens, and its backward is faster from 4096 on."""
    ratios = select(against(frame, "grid"), implementation=COMPILED, phase=PHASES)
    long = ratios[(ratios["sequence"] >= 2048) & (ratios["phase"] == "backward")]
    return [
        claim("torch.compile makes sequences below 1024 tokens slower", ratios[ratios["sequence"] < 1024], "slower"),
        claim("torch.compile makes the backward pass of long sequences faster", long, "faster"),
    ]
