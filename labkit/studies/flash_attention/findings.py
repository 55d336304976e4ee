"""What the FlashAttention lab asks, and how a run answers."""

from collections.abc import Callable
from dataclasses import replace

import pandas as pd

from labkit.costs.calibration import Calibration
from labkit.lab.claims import claim, exact, published
from labkit.lab.comparing import MEMORY, compared, contest
from labkit.lab.findings import Claim, Finding, Questions, at_the_cost_of
from labkit.lab.places import scope_of
from labkit.lab.rows import select
from labkit.lab.units import format_bytes, format_flops, format_share, join_words
from labkit.studies.flash_attention import recorded, tables
from labkit.studies.shared.attention_passes import EXPLICIT, FLASH, TILED, TOO_SLOW
from labkit.studies.shared.attention_tables import (
    BOTH,
    LEAST_BYTES,
    against,
    caveat,
    memory_against_explicit,
    name_of,
    peaks,
    refused,
    times,
)

QUESTIONS = Questions()
EXPLICITS, KERNEL = name_of(EXPLICIT), name_of(FLASH)
AXIS = ("sequence", "dtype", "head_dim")
USE = "For causal attention, use {} instead of building the whole matrix"
MOST_STARTS = 2  # lengths in a headline
RIVALS = (EXPLICIT, "sdpa", "sdpa_flash", "sdpa_cudnn", "sdpa_efficient")
"""What the kernel is held against: the first two in words, all in the table."""
TECHNIQUE_NAMES = {
    "exp2": "exp2 instead of exp",
    "skip_hidden": "skipping hidden blocks",
    "mask_only_edges": "masking only blocks at edges",
    tables.HIDDEN_TILES: "skipping hidden tiles in tiled attention",
}


@QUESTIONS.ask(
    "crossover",
    "Is any implementation faster than explicit attention, forward and backward together, and from which length on?",
    "attention",
)
def crossover(frame: pd.DataFrame) -> Finding | None:
    found = contest(
        select(against(frame, "lengths"), phase=BOTH),
        "implementation",
        EXPLICITS,
        names=name_of,
        axis=AXIS,
        choose=USE.format,
        keep="For causal attention, keep building the whole matrix at the lengths measured",
        caveat=caveat(frame),
    )
    if found is None or found.lead is None or found.verdict not in ("yes", "it depends"):
        return found
    return _by_dtype(found, found.lead.subject, tables.beats_from(frame))


def _by_dtype(found: Finding, winner: str, starts: pd.DataFrame) -> Finding:
    """The finding with the length from which on it wins in each dtype, where these differ and it wins in all."""
    starts = starts[starts["implementation"].map(name_of) == winner].sort_values("from_sequence")
    if starts["from_sequence"].isna().any() or starts["from_sequence"].nunique() < 2 or len(starts) > MOST_STARTS:
        return found
    places = [
        f"at {row['longest']} tokens in {row['dtype']}"
        if row["from_sequence"] == row["longest"]
        else f"from {row['from_sequence']:.0f} tokens on in {row['dtype']}"
        for row in starts.to_dict("records")
    ]
    place = join_words(places)
    wins = [effect for effect in found.effects if effect.subject == winner and effect.verdict == "faster"]
    return replace(
        found,
        headline=f"{found.verdict.capitalize()}: {winner} is faster than {EXPLICITS} {place}.",
        advice=f"{USE.format(winner)} {place}.",
        lead=min(wins, key=lambda effect: effect.ratio),
    )


@QUESTIONS.ask("matmul_share", "What share of the device's measured matmul rate does each implementation reach?")
def matmul_share(frame: pd.DataFrame, calibration: Calibration | None) -> Finding | None:
    table = tables.widest(tables.shares(frame, calibration))
    table = table[table["sequence"] == table["sequence"].max()]
    both = select(table, phase=BOTH)
    if both.empty:
        return None
    best = both.loc[both["share_percent"].idxmax()]
    explicit = select(both, dtype=best["dtype"], implementation=EXPLICIT)["share_percent"]
    headline = (
        f"At the longest sequence, {name_of(best['implementation'])} reaches {best['share_percent']:.0f} % of the "
        f"{best['dtype']} matmul rate"
    )
    is_other = len(explicit) > 0 and best["implementation"] != EXPLICIT
    headline += f", explicit attention {explicit.iloc[0]:.0f} %." if is_other else "."
    of_dtype = table.drop_duplicates("dtype").sort_values("dtype")
    each = zip(of_dtype["matmul_tflop_per_s"], of_dtype["dtype"], strict=True)
    rates = [f"{format_flops(1e12 * rate)}/s in {dtype}" for rate, dtype in each]
    caveats = [
        "A share above 100 %: the machine was busier when it was calibrated, or multiplies other shapes faster."
    ] * bool((table["low"] > 100).any())
    if uncalibrated := set(times(frame, "lengths")["dtype"]) - set(table["dtype"]):
        caveats.append(f"No share in {join_words(sorted(uncalibrated))}: its matmul rate was not calibrated.")
    why = f"The calibrated matmul rate is {join_words(rates)}."
    where = scope_of(both, ["head_dim", "sequence", "phase"])
    return Finding("measured", headline, table, " ".join(caveats) or None, why, where=where)


@QUESTIONS.ask(
    "peak_memory", "Does any implementation need less memory at its peak than explicit attention, and how much?"
)
def peak_memory(frame: pd.DataFrame) -> Finding | None:
    table = peaks(frame, "lengths")
    if table.empty:
        return None
    ended = refused(frame)
    ended = ended[(ended["implementation"] == EXPLICIT) & (ended["sequence"] <= table["sequence"].max())]
    ended = ended[~ended["check"].str.startswith(TOO_SLOW)]  # which ran, and so has a peak
    ended = ended.sort_values("sequence").head(1).to_dict("records")
    trouble = [f"Explicit attention does not run at {row['sequence']} tokens: {row['check']}." for row in ended]
    found = contest(
        memory_against_explicit(frame, "lengths"),
        "implementation",
        EXPLICITS,
        names=name_of,
        axis=AXIS,
        quantity=MEMORY,
        caveat=" ".join(trouble) or None,
    )
    too_small = f"Nowhere does explicit attention run and need {format_bytes(LEAST_BYTES)}: too little to compare."
    return found or Finding("undecided", too_small, table, " ".join(trouble) or None)


@QUESTIONS.ask("triton_kernel", "Is the FlashAttention kernel in Triton faster than explicit attention?")
def triton_kernel(frame: pd.DataFrame) -> Finding | None:
    if recorded.has_flash(frame):
        return _kernel(frame)
    run, reason = recorded.recorded_gpu_run(), caveat(frame, FLASH)
    if frame.empty or (run is None and reason is None):
        return None
    return _not_here("the Triton kernel", reason, run, _kernel)


def _kernel(frame: pd.DataFrame) -> Finding | None:
    """The kernel over each of its rivals; explicit attention's comes first."""
    found, numbers = [], []
    for rival in RIVALS:
        ratios = select(against(frame, "lengths", rival), implementation=FLASH, phase=BOTH)
        one = compared(ratios, KERNEL, name_of(rival), axis=AXIS, caveat=caveat(frame, FLASH))
        if one is not None and one.table is not None:
            found.append(one)
            numbers.append(one.table.assign(baseline=rival))
    if not found:
        return Finding("undecided", f"Nothing to hold {KERNEL} against was timed.", times(frame, "lengths"))
    return replace(
        at_the_cost_of(found[0], found[1] if len(found) > 1 else None) or found[0],
        table=pd.concat(numbers, ignore_index=True),
        significant=any(one.significant for one in found),
        effects=tuple(effect for one in found for effect in one.effects),
    )


def _not_here(
    what: str, reason: str | None, run: recorded.RecordedRun | None, find: Callable[[pd.DataFrame], Finding | None]
) -> Finding:
    """Of what this machine did not run: why, and what a run from elsewhere says."""
    elsewhere = find(run.frame) if run is not None else None
    why = f"On another machine ({run.label}): {elsewhere.headline}" if run and elsewhere else None
    return Finding("not measured", f"Not measured here: {what}.", caveat=reason, why=why)


@QUESTIONS.ask("techniques", "Do the techniques of the kernel save time, and how much of what is predicted?")
def techniques(frame: pd.DataFrame) -> Finding | None:
    here = _techniques(frame)
    kernels = select(frame, ["seconds"], sweep="techniques")["seconds"]
    if frame.empty or kernels.notna().any():
        return here
    run, reason = recorded.recorded_gpu_run(), caveat(frame, FLASH)
    if here is None and run is None and reason is None:
        return None
    elsewhere = _not_here("the techniques of the Triton kernel", reason, run, _techniques)
    if here is None:
        return elsewhere
    return replace(here, caveat=elsewhere.caveat, why=" ".join(filter(None, [here.why, elsewhere.why])))


def _techniques(frame: pd.DataFrame) -> Finding | None:
    table = tables.techniques(frame)
    found = contest(table, "technique", "going without", names=lambda name: TECHNIQUE_NAMES[name], axis=("sequence",))
    if found is None or found.table is None:
        return found
    longest = found.table[found.table["verdict"] == "faster"].drop_duplicates("technique", keep="last")
    is_less, is_more = longest["low"] > longest["predicted"], longest["high"] < longest["predicted"]
    sides = {"As much as": ~(is_less | is_more), "Less than": is_less, "More than": is_more}
    told = [f"{words} predicted: {_predicted(longest[rows])}." for words, rows in sides.items() if rows.any()]
    return replace(found, also=" ".join(told) or None)


def _predicted(table: pd.DataFrame) -> str:
    rows = table.to_dict("records")
    return join_words([f"{format_share(1 - row['predicted'])} by {TECHNIQUE_NAMES[row['technique']]}" for row in rows])


@QUESTIONS.ask("published_trends", "Do the published trends hold on this machine?")
def published_trends(frame: pd.DataFrame) -> Finding | None:
    """`flash_attention.csv`: a Triton forward pass with a compiled PyTorch backward pass.

    Here it is the Triton kernel where it runs, and tiled attention, the same algorithm in PyTorch, where it does not.
    """
    own = FLASH if recorded.has_flash(frame) else TILED
    ratios = select(against(frame, "lengths"), implementation=own)
    forward = select(ratios[ratios["sequence"] >= 4096], phase="forward")
    both = select(ratios[ratios["sequence"] >= 8192], phase=BOTH, dtype="float32")
    return published(
        [
            claim(f"Forward, from 4096 tokens on, FlashAttention (here {name_of(own)}) is faster", forward, "faster"),
            claim(f"Both passes in float32, from 8192 tokens on (here {name_of(own)})", both, "faster"),
            _longer_than_explicit(frame),
        ]
    )


def _longer_than_explicit(frame: pd.DataFrame) -> Claim | None:
    """`flash_attention.csv`: at 65536 tokens in float32 explicit runs out of memory, and flash does not."""
    ended = refused(frame)
    ended = ended[(ended["implementation"] == EXPLICIT) & ended["check"].str.contains("available|out of memory")]
    measured = times(frame, "lengths")
    if ended.empty or measured.empty:
        return None
    both = ended.merge(select(measured, implementation=[FLASH, TILED]), on=["dtype", "head_dim", "sequence"])
    seen = f"from {both['sequence'].min()} tokens on" if len(both) else ""
    return exact("Explicit attention runs out of memory where FlashAttention still runs", [len(both) > 0], [], seen)
