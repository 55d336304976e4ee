"""What the attention lab asks, and how a run answers."""

from dataclasses import replace

import numpy as np
import pandas as pd

from labkit.bench.statistics import with_verdicts
from labkit.lab.as_predicted import agreement
from labkit.lab.claims import Trend, claim, lies_within, published, quotients
from labkit.lab.columns import label
from labkit.lab.comparing import MEMORY, TIME, compared
from labkit.lab.findings import Finding, Questions, at_the_cost_of
from labkit.lab.own_effects import with_own
from labkit.lab.places import scope_of
from labkit.lab.quantities import Quantity
from labkit.lab.rows import Measured, select
from labkit.lab.units import format_bytes, format_seconds, format_share, join_words, span
from labkit.nn.attention_implementations import RESERVED
from labkit.studies.attention import tables
from labkit.studies.attention.worker import COMPILED, EXPLICIT, MARGIN, TILED
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
    "time_growth", "How does the time of both passes together grow with the sequence length and the head dimension?"
)
def time_growth(frame: pd.DataFrame) -> Finding | None:
    table = select(times(frame, "grid"), implementation=EXPLICIT, phase=BOTH)
    if table.empty:
        return None
    laws = tables.power_laws(frame)
    fitting = select(laws, implementation=EXPLICIT, phase=BOTH)
    factors = span(fitting["times_per_doubling"], "{:.1f}".format)
    takes = f"oubling the sequence makes explicit attention take {factors} times as long"
    if fitting.empty:
        headline = "The time of explicit attention follows no power of the sequence length here."
    elif len(fitting) == table["head_dim"].nunique():
        headline = f"D{takes}."
    else:
        which = f"head dimension {fitting['head_dim'].iloc[0]}" if len(fitting) == 1 else "some head dimensions"
        headline = f"With {which}, d{takes}; with others no single power fits."
    where = " · ".join(
        f"head dim {row['head_dim']}: power {row['exponent']:.2f} from {row['from_sequence']} tokens on"
        for row in fitting.to_dict("records")
    )
    return Finding("measured", headline, laws, where=where or None, also=_growth_with_width(frame))


def _growth_with_width(frame: pd.DataFrame) -> str | None:
    """How much longer the largest head dimension takes than the smallest, at the longest sequence both have."""
    ratios = select(tables.width_growth(frame), phase=BOTH)
    if ratios.empty:
        return None
    row = with_verdicts(ratios).sort_values(["head_dim", "sequence"]).iloc[-1]
    narrow = frame.loc[frame["sweep"] == "grid", "head_dim"].min()
    takes = (
        f"takes {row['ratio']:.1f} times as long as" if row["verdict"] == "slower" else "is not measurably slower than"
    )
    return f"At {row['sequence']} tokens, a head dimension of {row['head_dim']} {takes} one of {narrow}."


@QUESTIONS.ask(
    "memory_growth", "Is the memory held before the backward pass what the formulas say, and how does it grow?"
)
def memory_growth(frame: pd.DataFrame) -> Finding | None:
    table = tables.memory(frame, "grid")
    names = ["head_dim", "sequence", "implementation", "saved_bytes", "predicted_saved_bytes"]
    shown = table[[*names, "measured_over_predicted"]]
    setting = scope_of(table, ["dtype", "batch", "head_dim", "sequence"])
    found = agreement(shown, "bytes held", "what the formulas say", close=EXACT, setting=setting)
    tensors = tables.saved_tensors(frame)
    if found is None or tensors.empty:
        return found
    matrix = tensors.loc[tensors["tensor"] == "probabilities", "saved_bytes"].sum()
    why = (
        f"At {tensors['sequence'].iloc[0]} tokens, {format_share(matrix / tensors['saved_bytes'].sum())} of what "
        "explicit attention holds is the probabilities, which grow with the square of the length."
    )
    return replace(found, also=_growth_of_held(table), why=why)


def _growth_of_held(table: pd.DataFrame) -> str | None:
    """From the shortest to the longest sequence that both kinds ran at, at the largest head dimension."""
    widest = select(table, head_dim=table["head_dim"].max(), implementation=[EXPLICIT, TILED])
    held = widest.pivot_table(index="sequence", columns="implementation", values="saved_bytes").dropna()
    if len(held) < 2:
        return None
    factors = held.iloc[-1] / held.iloc[0]
    grows = [f"{factor:.0f} times with {name_of(name)}" for name, factor in factors.items()]
    where = f"From {held.index[0]} to {held.index[-1]} tokens, with {label('head_dim', widest['head_dim'].max())},"
    return f"{where} it grows {join_words(grows)}."


@QUESTIONS.ask("out_of_memory", "At which length does this machine run out of memory, and what fills it?")
def out_of_memory(frame: pd.DataFrame) -> Finding | None:
    table = tables.too_large(frame)
    if table.empty:
        return None
    needed, available = table.iloc[-2], table["bytes"].iloc[-1]
    tensors = table.iloc[:-2]
    largest = tensors[tensors["bytes"] == tensors["bytes"].max()]
    headline = (
        f"At {needed['sequence']} tokens explicit attention no longer fits: its two passes need "
        f"{format_bytes(needed['bytes'])}."
    )
    also = (
        f"{int(largest['share_percent'].sum())} % of that is {len(largest)} matrices of "
        f"{format_bytes(largest['bytes'].iloc[0])}: {join_words(list(largest['tensor']))}."
    )
    dtypes = scope_of(select(frame, ["dtype"], sweep="grid"), ["dtype"])
    where = (
        f"the shortest of lengths that double · batch {needed['batch']} · head dim {needed['head_dim']} · {dtypes} · "
        f"with a margin of {format_share(MARGIN - 1)}, more than the {format_bytes(available)} available"
    )
    return Finding("predicted", headline, table, why=_formula_held(frame), where=where, also=also)


def _formula_held(frame: pd.DataFrame) -> str:
    """How far the formula was off where peaks were measured that are large enough."""
    table = pd.concat([tables.memory(frame, sweep) for sweep in SWEEPS])
    table = table[(table["predicted_peak_bytes"] >= LEAST_BYTES) & table["peak_bytes"].notna()]
    if table.empty:
        return "No peak that is large enough to check the formula was measured."
    ratios = table["peak_bytes"] / table["predicted_peak_bytes"]
    measured = f"{len(ratios)} measured peaks from {format_bytes(LEAST_BYTES)} on"
    return f"The {measured} are {span(ratios)} times what the formula says."


@QUESTIONS.ask("tiling", "Does tiling save memory or time?", "attention")
def tiling(frame: pd.DataFrame) -> Finding | None:
    memory = _tiled_against_explicit(frame, memory_against_explicit(frame, "tiling"), MEMORY)
    time = _tiled_against_explicit(frame, select(against(frame, "tiling"), phase=BOTH), TIME)
    found = sorted((one for one in (memory, time) if one is not None), key=_standing)
    if not found:
        return None
    marks = {effect.verdict for effect in time.effects} if time is not None else set()
    advising = time if memory is None or {"faster", "slower"} <= marks else memory
    advice = advising.advice if advising else None
    if advising is not None and advising is memory and advice and _standing(advising) == 0 and "slower" in marks:
        advice = f"If memory is short: {advice[0].lower()}{advice[1:]}"  # in time it gains nowhere
    numbers = [one.table for one in found if one.table is not None]
    return replace(
        at_the_cost_of(found[0], found[-1] if len(found) > 1 else None) or found[0],
        table=pd.concat(numbers, ignore_index=True) if numbers else None,
        why=" ".join(one.why for one in found if one.why) or None,
        advice=advice,
    )


def _standing(found: Finding) -> int:
    """What tiling gains is told before what it does not, and last what was not measured."""
    return {"yes": 0, "it depends": 0, "not measured": 2}.get(found.verdict, 1)


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
    found = with_own(found, ratios, "implementation", RESERVED, EXPLICITS, axis=("sequence",), quantity=quantity)
    if (found := from_shortest(found)) is None or found.table is None:
        return found
    table = found.table.drop(columns="phase", errors="ignore")
    table.insert(0, "quantity", quantity.name)
    return replace(found, table=table)


@QUESTIONS.ask("compiled", "Is compiled attention faster than explicit attention, forward and backward?", "compile")
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
        keep="Do not compile explicit attention by itself",
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
    seen = f"exponents {span(exponents['ratio'])}, {table['sequence'].min()} to {table['sequence'].max()} tokens"
    return lies_within(text, exponents, *QUADRATIC, equal=None, seen=seen)


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
