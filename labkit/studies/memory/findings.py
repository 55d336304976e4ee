"""What the memory lab asks, and how a run answers. Bytes are counts: a difference of them needs no interval."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise

import pandas as pd

from labkit.costs.memory import state_bytes
from labkit.lab.as_predicted import agreement
from labkit.lab.claims import exact, published
from labkit.lab.comparing import MEMORY, contest
from labkit.lab.findings import Claim, Finding, Questions, at_the_cost_of, troubles, with_model
from labkit.lab.own_models import without_own
from labkit.lab.rows import select
from labkit.lab.units import format_bytes, format_seconds, format_share, join_words, span
from labkit.nn.transformer import SIZES, shape_named
from labkit.studies.memory import tables
from labkit.studies.memory.worker import WITHOUT

QUESTIONS = Questions("no row of this run holds the bytes it needs")
CLOSE = 1.05
"""Counted or predicted bytes within this factor of the measured ones agree."""
LEAST = 0.01
"""Published trends are not judged by smaller differences of peaks."""
NO_CHECKPOINTS = "no checkpointing"


@QUESTIONS.ask("peak_by_context", "How high is the peak of a forward pass and of a full step, by context length?")
def peak_by_context(frame: pd.DataFrame) -> Finding | None:
    table = tables.phases(frame, *tables.shown_sizes(frame))
    full = table[table["precision"] == "float32"].dropna(subset="full_step_bytes")
    if full.empty:
        return Finding("measured", "No peak of a full float32 step is known.", table) if len(table) else None
    full = full[full["size"] == full["size"].iloc[0]]
    short, long = full.iloc[0], full.iloc[-1]
    headline = f"A full step of {short['size']} peaks at {format_bytes(short['full_step_bytes'])}"
    if len(full) == 1:
        why = " ".join(_own_peaks(frame)) or None
        return Finding("measured", f"{headline} with {short['context_length']} tokens.", table, why=why)
    context, memory = (long[name] / short[name] for name in ("context_length", "full_step_bytes"))
    states = format_bytes(sum(state_bytes(shape_named(short["size"])).values()))
    why = f"A context {context:.1f} times as long takes {memory:.1f} times the memory: the {states} of parameters, "
    is_measured = "measured" in f"{short['method']} {long['method']}"
    return Finding(
        "measured" if is_measured else "counted",
        f"{headline} ({short['method']}) with the shortest context and at {format_bytes(long['full_step_bytes'])} "
        f"({long['method']}) with the longest.",
        table,
        why=" ".join([f"{why}gradients and AdamW's states do not depend on it.", *_own_peaks(frame)]),
    )


def _own_peaks(frame: pd.DataFrame) -> Iterator[str]:
    full = tables.by_context(frame, *tables.own_models(frame)) if tables.own_models(frame) else pd.DataFrame()
    for size, rows in select(full, ["size"], phase="full_step", precision="float32").groupby("size", sort=False):
        peaks = rows.sort_values("context_length")["peak_bytes"]
        yield f"A full step of {size} peaks at {span(peaks, format_bytes)}."


@QUESTIONS.ask("where_it_goes", "What is the peak of a full step made of?")
def where_it_goes(frame: pd.DataFrame) -> Finding | None:
    parts = tables.parts_of_peaks(frame)
    if parts.empty:
        return None
    largest = parts.sort_values("share").groupby("place").tail(1).sort_values("place")
    *others, told = [_most_of(size, rows) for size, rows in largest.groupby("size", sort=False)]
    return Finding("counted", told, tables.shares(frame), why=" ".join(others) or None)


def _most_of(size: str, rows: pd.DataFrame) -> str:
    """The largest part of one model's peak at its shortest and longest context; a row per context."""
    ends = rows.iloc[[0, -1]].drop_duplicates("place")
    lengths = [" at the shortest context", " at the longest"] if len(ends) > 1 else [""]
    told = [
        f"{format_share(row['share'])}{length} is {_part(row['part'])}"
        for row, length in zip(ends.to_dict("records"), lengths, strict=True)
    ]
    return f"Of {size}'s peak, {join_words(told)}."


def _part(part: str) -> str:
    return "optimizer state" if part == "optimizer" else part


@QUESTIONS.ask("residual_stream", "Does the residual stream take 4 bytes per token and feature?")
def residual_stream(frame: pd.DataFrame) -> Finding | None:
    blocks = tables.blocks(frame)
    table = blocks[["size", "precision", "batch", "context_length", "residual_bytes", "predicted_residual_bytes"]]
    table = table.assign(measured_over_predicted=table["residual_bytes"] / table["predicted_residual_bytes"])
    streams = f"residual streams under {join_words(sorted(table['precision']))}"
    found = agreement(table, streams, f"the formula's {_first(table, 'predicted_residual_bytes')}", close=1)
    kept = (blocks["saved_bytes"] / blocks["residual_bytes"]).max()
    return found and replace(found, why=f"One block keeps up to {kept:.0f} times as much for its backward pass.")


def _first(table: pd.DataFrame, name: str) -> str:
    return format_bytes(table[name].iloc[0]) if len(table) else ""


@QUESTIONS.ask("largest_allocations", "Which allocations are largest, and which line makes them?")
def largest_allocations(frame: pd.DataFrame) -> Finding | None:
    table = tables.allocations(frame)
    if table.empty:
        return None
    of_largest = table[table["size"] == table["size"].iloc[-1]]
    row = of_largest.loc[of_largest["at_peak_bytes"].astype(float).idxmax()]
    text = f"At the peak of {row['size']}, {row['operator']} holds most: {format_bytes(row['at_peak_bytes'])}"
    same = of_largest[of_largest["n_bytes"] == of_largest["n_bytes"].max()]
    makers = join_words(list(dict.fromkeys(same["operator"])))
    why = f"The largest single tensors hold {_first(same, 'n_bytes')} each, made by {makers}."
    return Finding("counted", f"{text}{', allocated at ' if row['line'] else ''}{row['line']}.", table, why=why)


@QUESTIONS.ask("saved_by_a_block", "Does one block keep for its backward pass what the formulas predict?")
def saved_by_a_block(frame: pd.DataFrame) -> Finding | None:
    table = tables.blocks(frame).drop(columns=["batch", "residual_bytes", "predicted_residual_bytes"])
    table = table.assign(measured_over_predicted=table["saved_bytes"] / table["predicted_bytes"])
    found = agreement(table, "bytes kept by a block", "what the formula predicts", close=CLOSE)
    by_operator = tables.saved_by_operator(frame)
    if found is None or by_operator.empty:
        return found
    first = by_operator[by_operator["precision"] == by_operator["precision"].iloc[0]].head(2).to_dict("records")
    most = join_words([f"{row['operator']} ({format_bytes(row['bytes'])})" for row in first])
    return replace(found, why=f"In {first[0]['precision']} most of it comes from {most}.")


@QUESTIONS.ask(
    "checkpointing",
    "Does activation checkpointing save memory, at what cost, and with which segment length?",
    "checkpointing",
)
def checkpointing(frame: pd.DataFrame) -> Finding | None:
    peaks, times = (tables.of_largest(table(frame)) for table in (tables.segment_peaks, tables.segment_times))
    rows = select(frame, ["segment"], table="checkpoint")
    gain = contest(
        peaks,
        "segment",
        NO_CHECKPOINTS,
        names=_segments,
        quantity=MEMORY,
        choose=lambda name: f"If memory is short, {name.replace('ing', '')}",
        keep="Keep all activations",
        caveat=troubles(rows.assign(segments=rows["segment"].map(_segments)), "segments"),
    )
    cost = contest(times, "segment", NO_CHECKPOINTS, names=_segments)
    found = at_the_cost_of(with_model(gain, peaks), with_model(cost, times))
    return found and replace(found, table=tables.segments(frame))


def _segments(length: str | float) -> str:
    """ "checkpointing every layer", "checkpointing every 3 layers"; of no segments that nothing is checkpointed."""
    if float(length) == WITHOUT:
        return NO_CHECKPOINTS
    return "checkpointing every layer" if float(length) == 1 else f"checkpointing every {float(length):.0f} layers"


@QUESTIONS.ask(
    "largest_model", "Which is the largest named size whose full step fits into this machine?", "largest_model"
)
def largest_model(frame: pd.DataFrame) -> Finding | None:
    table = tables.fits(frame)
    named, own = (table[table["size"].isin(list(SIZES)) == is_named] for is_named in (True, False))
    if named.empty:
        return None
    fit, others = named[named["fits"]], named[~named["fits"]]
    memory, setting = _first(table, "machine_bytes"), named.iloc[0]
    caveat = (
        f"Of batch {setting['batch']:.0f}, {setting['context_length']} tokens, float32, AdamW; "
        f"{format_share(1 - tables.FIT_SHARE)} of the memory is left for everything else."
    )
    told = [f"The next size, {others['size'].iloc[0]}, needs {_first(others, 'peak_bytes')}."] if len(others) else []
    if others.empty and fit["size"].iloc[-1] != list(SIZES)[-1]:
        told.append("No larger size was counted.")
    told += [f"{row['size']} needs {format_bytes(row['peak_bytes'])}." for row in own.to_dict("records")]
    why = " ".join(told) or None
    if fit.empty:
        return Finding("no", f"No: none of the counted sizes fits into {memory}.", table, caveat, why)
    best = fit.iloc[-1]
    headline = (
        f"{best['size']} is the largest that fits: a full step needs {format_bytes(best['peak_bytes'])} of {memory}."
    )
    return Finding(
        "counted", headline, table, caveat, why, f"Train models of up to the size {best['size']}.", significant=True
    )


@QUESTIONS.ask("counted_against_measured", "Is the counted peak the measured one?")
def counted_against_measured(frame: pd.DataFrame) -> Finding | None:
    table = tables.counted_against_measured(frame)
    found = agreement(table, "counted peaks", "the measured ones", "counted_over_measured", CLOSE)
    formula = (table["predicted_over_measured"] - 1).abs().max()
    told = [f"The formulas alone, known before anything ran, are off by at most {100 * formula:.1g} %."]
    costs = tables.peaks(frame, method="counted").dropna(subset="count_s")
    if len(costs):
        row = costs.loc[costs["peak_bytes"].astype(float).idxmax()]
        host = f" and {format_bytes(row['host_bytes'])} of main memory" if pd.notna(row["host_bytes"]) else ""
        told.append(
            f"Counting the largest step, {row['size']} with a peak of {format_bytes(row['peak_bytes'])}, took "
            f"{format_seconds(row['count_s'])}{host}."
        )
    return found and replace(found, why=" ".join(told))


@QUESTIONS.ask("published_peaks", "Are the published peaks those that are counted here?")
def published_peaks(frame: pd.DataFrame) -> Finding | None:
    table = tables.beside_published(frame)
    found = agreement(table, "counted peaks", "the published ones", "counted_over_published")
    return found and replace(found, why=" ".join([*_less_than_states(table), *_graph_kept(frame, table)]) or None)


def _less_than_states(table: pd.DataFrame) -> Iterator[str]:
    """A published full step that cannot be."""
    size = str(table["size"].iloc[0])
    states = sum(state_bytes(shape_named(size)).values())
    full = table[table["phase"] == "full_step"].sort_values("published_bytes")
    if len(full) and full["published_bytes"].iloc[0] < states:
        yield (
            f"The parameters of {size}, their gradients and AdamW's states alone take {format_bytes(states)}, more "
            f"than the {_first(full, 'published_bytes')} published for a full step: that model was smaller, or did not "
            "hold all of these."
        )


def _graph_kept(frame: pd.DataFrame, table: pd.DataFrame) -> Iterator[str]:
    """A published inference peak above the counted one, beside a forward pass that keeps its graph."""
    size, keys = list(table["size"]), ["size", "context_length", "precision"]
    forward = tables.peaks(frame, method="counted", phase="forward", size=size)[[*keys, "peak_bytes"]]
    inference = table[table["phase"] == "inference"].merge(forward, on=keys)
    for row in inference[inference["published_bytes"] > (1 + LEAST) * inference["counted_bytes"]].to_dict("records"):
        nothing, graph, told = (format_bytes(row[f"{name}_bytes"]) for name in ("counted", "peak", "published"))
        yield f"Inference needs {nothing} if nothing is kept, {graph} if the graph is; {told} is published."


@QUESTIONS.ask("published_trends", "Do the published trends hold here?")
def published_trends(frame: pd.DataFrame) -> Finding | None:
    table = tables.phases(without_own(frame))
    series = [
        list(zip(group["context_length"], group["full_step_bytes"], strict=True))
        for _, group in table.dropna(subset="full_step_bytes").groupby(["size", "precision"])
    ]
    growths = [longer / shorter for rows in series for (_, shorter), (_, longer) in pairwise(rows)]
    slopes = [[(b[1] - a[1]) / (b[0] - a[0]) for a, b in pairwise(rows)] for rows in series]
    wide = table.pivot_table(index=["size", "context_length"], columns="precision", values="full_step_bytes")
    wide = wide.reindex(columns=["float32", "bfloat16"])
    return published(
        [
            # 24.5, 35 and 70 GB at 128, 256 and 512 tokens
            _claim("A full step's peak grows with context", growths, least=1 + LEAST),
            # 10.5 GB more for 128 tokens more, then 35 GB for 256 more: a token costs 1.7 times as much
            _claim(
                "Each further token costs more than the one before",
                [later / earlier for of_one in slopes for earlier, later in pairwise(of_one) if earlier > 0],
                least=1 + LEAST,
            ),
            # 60 GB instead of 70 GB at 512 tokens
            _claim(
                "bf16 autocast lowers a full step's peak, by less than half",
                wide["bfloat16"] / wide["float32"],
                least=0.5,
                most=1 - LEAST,
            ),
            # 65 GB for inference, 70 GB for a full step, both at 512 tokens
            _claim(
                "Inference peaks within 10 % of a full step", table["inference_bytes"] / table["full_step_bytes"], 0.9
            ),
        ]
    )


def _claim(text: str, ratios: Iterable[float], least: float, most: float = float("inf")) -> Claim | None:
    """A statement that every ratio is between `least` and `most`; one within `LEAST` of 1 contradicts no trend."""
    known = [ratio for ratio in ratios if ratio == ratio]
    outside = [not least <= ratio <= most and abs(ratio - 1) > LEAST for ratio in known]
    return exact(text, [least <= ratio <= most for ratio in known], outside, f"{span(known)} times" if known else "")
