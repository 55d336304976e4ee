"""What the memory lab asks, and how a run answers. Bytes are counts: a difference of them needs no interval."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise

import pandas as pd

from labkit.costs.memory import state_bytes
from labkit.lab.as_predicted import agreement
from labkit.lab.claims import exact, published
from labkit.lab.comparing import MEMORY, compared, contest
from labkit.lab.findings import Claim, Finding, Questions, at_the_cost_of, troubles, with_model, without_verdict
from labkit.lab.own_models import without_own
from labkit.lab.places import scope_of
from labkit.lab.rows import exactly_over, select
from labkit.lab.units import format_bytes, format_seconds, format_share, join_words, span
from labkit.nn.transformer import SIZES, shape_named
from labkit.studies.memory import tables
from labkit.studies.memory.worker import ITS_OWN, WITHOUT

QUESTIONS = Questions("no row of this run holds the bytes it needs")
CLOSE = 1.05  # counted or predicted bytes within this factor of the measured ones agree
LEAST = 0.01  # published trends are not judged by smaller differences of peaks
NO_CHECKPOINTS = "no checkpointing"


@QUESTIONS.ask("peak_by_context", "How high is the peak of a forward pass and of a full step, by context length?")
def peak_by_context(frame: pd.DataFrame) -> Finding | None:
    table = tables.phases(frame, *tables.shown_sizes(frame))
    full = table[table["precision"] == "float32"].dropna(subset="full_step_bytes")
    if full.empty:
        return Finding("measured", "No peak of a full float32 step is known.", table) if len(table) else None
    size = full["size"].iloc[0]
    full = full[full["size"] == size]
    ends = full.iloc[sorted({0, len(full) - 1})]
    told = " with the shortest context and at ".join(map(format_bytes, ends["full_step_bytes"]))
    contexts = [f"{row['context_length']} tokens ({row['method']})" for row in ends.to_dict("records")]
    forward = ends["forward_bytes"].dropna().map(format_bytes)
    return Finding(
        "measured" if set(ends["method"]) == {"measured"} else "counted",
        f"A full step of {size} peaks at {told}{' with the longest' if len(ends) > 1 else ''}.",
        table,
        why=" ".join([*_under_autocast(frame, size), *_own_peaks(frame)]) or None,
        where=f"{join_words(contexts)}{_setting(frame, size)}",
        also=f"Its forward pass alone peaks at {join_words(list(forward))}." if len(forward) else None,
    )


def _setting(frame: pd.DataFrame, size: str) -> str:
    """ " · float32 · batch 4"; nothing of a model that comes with its own batch."""
    told = scope_of(tables.in_tokens(tables.peaks(frame, size=size, precision="float32")), ["precision", "batch"])
    return f" · {told}" if told else ""


def _under_autocast(frame: pd.DataFrame, size: str) -> Iterator[str]:
    """Of inference and of a full step, over all contexts of one model."""
    for phase, subject in (("inference", f"inference of {size}"), ("full_step", f"a full step of {size}")):
        peaks = select(tables.by_context(frame, size), phase=phase)
        ratios = exactly_over(peaks, ["size", "context_length"], "precision", "peak_bytes", "float32")
        if found := compared(ratios, f"{subject} under bfloat16 autocast", "in float32", quantity=MEMORY):
            yield without_verdict(found.headline)


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
    ends = [rows.iloc[sorted({0, len(rows) - 1})] for _, rows in largest.groupby("size", sort=False)]
    *others, told = map(_most_of, ends)
    shares, size = ends[-1]["share"], ends[-1]["size"].iloc[0]
    where = f"{join_words([*map(format_share, shares)])} of the peak{_setting(frame, size)}"
    return Finding("counted", told, tables.shares(frame), why=" ".join(others) or None, where=where)


def _most_of(ends: pd.DataFrame) -> str:
    """The largest part of one model's peak at its shortest and longest context; a row per context."""
    contexts_of: dict[str, list[str]] = {}
    for part, context in zip(ends["part"], ends["context_length"], strict=True):
        name = "optimizer state" if part == "optimizer" else str(part)
        contexts_of.setdefault(name, []).extend([str(context)] if context != ITS_OWN else [])
    parts = [f"{part} at {join_words(at)} tokens" if at else part for part, at in contexts_of.items()]
    return f"The largest part of {ends['size'].iloc[0]}'s peak is {join_words(parts)}."


@QUESTIONS.ask("residual_stream", "Does the residual stream take 4 bytes per token and feature?")
def residual_stream(frame: pd.DataFrame) -> Finding | None:
    blocks = tables.blocks(frame)
    table = blocks[["size", "precision", "batch", "context_length", "residual_bytes", "predicted_residual_bytes"]]
    table = table.assign(measured_over_predicted=table["residual_bytes"] / table["predicted_residual_bytes"])
    streams = f"residual streams under {join_words(sorted(table['precision']))}"
    formula = f"the formula's {_first(table, 'predicted_residual_bytes')}"
    found = agreement(table, streams, formula, close=1, setting=_compared(table))
    kept = (blocks["saved_bytes"] / blocks["residual_bytes"]).max()
    why = f"One block keeps up to {kept:.0f} times as much for its backward pass."
    is_kept = table["precision"].nunique() > 1 and table["residual_bytes"].nunique() == 1
    return found and replace(found, why=why, also="Autocast does not shrink it." if is_kept else None)


def _compared(table: pd.DataFrame) -> str:
    columns = [name for name in ("size", "context_length", "batch", "precision", "phase") if name in table]
    table = table.assign(context_length=table["context_length"].where(table["context_length"] != ITS_OWN))
    return scope_of(table, columns)


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
    file = f", allocated at {'labkit/nn/' if row['size'] in SIZES else ''}{row['line']}" if row["line"] else ""
    where = f"{scope_of(tables.in_tokens(of_largest), ['context_length'])}{_setting(frame, row['size'])}" or None
    return Finding("counted", f"{text}{file}.", table, where=where)


@QUESTIONS.ask("saved_by_a_block", "Does one block keep for its backward pass what the formulas predict?")
def saved_by_a_block(frame: pd.DataFrame) -> Finding | None:
    table = tables.blocks(frame).drop(columns=["batch", "residual_bytes", "predicted_residual_bytes"])
    table = table.assign(measured_over_predicted=table["saved_bytes"] / table["predicted_bytes"])
    of, predicted = "bytes kept by a block", "what the formula predicts"
    found = agreement(table, of, predicted, close=CLOSE, setting=_compared(table))
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
    peaks = peaks.assign(method="bytes " + peaks["method"])
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
    cost = compared(times, "checkpointing", NO_CHECKPOINTS)
    found = at_the_cost_of(with_model(gain, peaks), with_model(cost, times))
    if found is None or peaks.empty:
        return found
    where = scope_of(peaks, ["size", "context_length", "method"])
    if found.also:
        found = replace(found, also=" ".join([found.also, *_saved_where_timed(frame, peaks, times)]))
        where += f" · timed: {scope_of(times, ['size', 'context_length'])}"
    return replace(found, table=tables.segments(frame), where=where)


def _saved_where_timed(frame: pd.DataFrame, peaks: pd.DataFrame, times: pd.DataFrame) -> Iterator[str]:
    """What is saved of the model that was timed, if that is not the one whose memory is told of."""
    largest, timed = (table["size"].iloc[0] for table in (peaks, times))
    saved = 100 * (1 - select(tables.segment_peaks(frame), size=timed)["ratio"])
    if timed != largest and len(saved):
        share = f"{span(saved, '{:.0f}'.format)} %" if saved.max() > 0 else "nothing"
        yield f"It saves {share} of {timed}'s memory; {largest} was not timed."


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
    memory, at = _first(table, "machine_bytes"), scope_of(named, ["batch", "context_length"])
    where = f"{at} · float32 · AdamW · fits if {format_share(1 - tables.FIT_SHARE)} of the memory is left"
    told = [f"The next size, {others['size'].iloc[0]}, needs {_first(others, 'peak_bytes')}."] if len(others) else []
    if others.empty and fit["size"].iloc[-1] != list(SIZES)[-1]:
        told.append("No larger size was counted.")
    told += [f"{row['size']} needs {format_bytes(row['peak_bytes'])}." for row in own.to_dict("records")]
    why = " ".join(told) or None
    if fit.empty:
        return Finding("no", f"No: none of the counted sizes fits into {memory}.", table, why=why, where=where)
    best = fit.iloc[-1]
    text = f"{best['size']} is the largest that fits: a full step needs {format_bytes(best['peak_bytes'])} of {memory}."
    advice = f"Train models of up to the size {best['size']} ({at.replace(' ·', ',')})."
    return Finding("counted", text, table, why=why, advice=advice, significant=True, where=where)


@QUESTIONS.ask("counted_against_measured", "Is the counted peak the measured one?")
def counted_against_measured(frame: pd.DataFrame) -> Finding | None:
    table = tables.counted_against_measured(frame)
    ratio, setting = "counted_over_measured", _compared(table)
    found = agreement(table, "counted peaks", "the measured ones", ratio, CLOSE, setting=setting)
    formula = (table["predicted_over_measured"] - 1).abs().max()
    told = [f"The formulas alone, known before anything ran, are off by at most {100 * formula:.1g} %."]
    costs = tables.peaks(frame, method="counted").dropna(subset="count_s")
    if len(costs):
        row = costs.loc[costs["peak_bytes"].astype(float).idxmax()]
        host = f" and {format_bytes(row['host_bytes'])} of main memory" if pd.notna(row["host_bytes"]) else ""
        peak, time = format_bytes(row["peak_bytes"]), format_seconds(row["count_s"])
        told.append(f"Counting the largest step, {row['size']} with a peak of {peak}, took {time}{host}.")
    return found and replace(found, why=" ".join(told))


@QUESTIONS.ask("published_peaks", "Are the published peaks those that are counted here?")
def published_peaks(frame: pd.DataFrame) -> Finding | None:
    table = tables.beside_published(frame)
    ratio, setting = "counted_over_published", _compared(table)
    found = agreement(table, "counted peaks", "the published ones", ratio, setting=setting)
    return found and replace(found, why=" ".join([*_less_than_states(table), *_graph_kept(frame, table)]) or None)


def _less_than_states(table: pd.DataFrame) -> Iterator[str]:
    """A published full step that cannot be."""
    size = str(table["size"].iloc[0])
    states = sum(state_bytes(shape_named(size)).values())
    full = table[table["phase"] == "full_step"].sort_values("published_bytes")
    if len(full) and full["published_bytes"].iloc[0] < states:
        yield (
            f"Parameters, gradients and AdamW's states alone take {format_bytes(states)}, more than the "
            f"{_first(full, 'published_bytes')} published for a full step."
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
