"""What a memory run says: one answer to each question, bound to its bytes.

Bytes come out the same in every repeat, so that most answers need no interval; times of checkpointing do, and have one.
"""

import pandas as pd

from labkit.lab.answers import Answer, Question, Verdict, answer_each
from labkit.lab.evidence import ratio_text, ratios_text, significant
from labkit.lab.trends import trends_answer
from labkit.lab.units import format_bytes, format_seconds, join_words
from labkit.studies.memory import analysis, trends

PEAK_BY_CONTEXT = Question("peak_by_context", "How high is the peak of a forward pass and of a full step, by context?")
WHERE_IT_GOES = Question("where_it_goes", "What is the peak made of?")
RESIDUAL_STREAM = Question("residual_stream", "Is the residual stream's tensor B*S*d*4 bytes?")
LARGEST_ALLOCATIONS = Question("largest_allocations", "Which allocations are largest, and which line makes them?")
SAVED_BY_A_BLOCK = Question("saved_by_a_block", "What does one block keep for backward, and is it as predicted?")
CHECKPOINTING = Question(
    "checkpointing", "Does activation checkpointing save memory, at what cost, with segments how long?", "checkpointing"
)
LARGEST_MODEL = Question(
    "largest_model", "Which is the largest named size whose full step fits into this machine?", "largest_model"
)
COUNTED = Question("counted_against_measured", "Is the counted peak the measured one?")
PUBLISHED_PEAKS = Question("published_peaks", "How do counted peaks compare with the published ones?")
TRENDS = Question("published_trends", "Do the published trends hold here?")
QUESTIONS = (
    PEAK_BY_CONTEXT,
    WHERE_IT_GOES,
    RESIDUAL_STREAM,
    LARGEST_ALLOCATIONS,
    SAVED_BY_A_BLOCK,
    CHECKPOINTING,
    LARGEST_MODEL,
    COUNTED,
    PUBLISHED_PEAKS,
    TRENDS,
)
TOLERANCE = 0.05
"""Counted or predicted bytes this near to the measured ones are said to agree."""


def answer_all(frame: pd.DataFrame, coverage: pd.DataFrame) -> list[Answer]:
    """An answer to every question; a question whose rows are missing says so."""
    finders = {
        PEAK_BY_CONTEXT: peak_by_context,
        WHERE_IT_GOES: where_it_goes,
        RESIDUAL_STREAM: residual_stream,
        LARGEST_ALLOCATIONS: largest_allocations,
        SAVED_BY_A_BLOCK: saved_by_a_block,
        CHECKPOINTING: checkpointing,
        LARGEST_MODEL: largest_model,
        COUNTED: counted_against_measured,
        PUBLISHED_PEAKS: published_peaks,
        TRENDS: published_trends,
    }
    return answer_each(finders, frame, coverage, "no row of this run holds the bytes it needs")


def peak_by_context(frame: pd.DataFrame) -> Answer | None:
    table = analysis.by_context(frame, *_shown_sizes(frame))
    wide = table[table["precision"] == "float32"]
    sentences = []
    for size, group in wide.groupby("size", sort=False):
        for phase, rows in group.groupby("phase", sort=False):
            ends = rows.sort_values("context_length").iloc[[0, -1]].drop_duplicates("context_length")
            told = [
                f"{format_bytes(r.peak_bytes)} at {r.context_length} tokens ({r.method})" for r in ends.itertuples()
            ]
            sentences.append(f"{size} in float32, {_phase(str(phase))}: {' and '.join(told)}.")
    if low := _low_precision(table):
        sentences.append(low)
    if not sentences:
        return None
    return Answer(PEAK_BY_CONTEXT, "measured", " ".join(sentences), "peak_by_context")


def _low_precision(table: pd.DataFrame) -> str | None:
    """By how much autocast changes the peaks of a full step, and of inference."""
    keys = ["size", "context_length"]
    parts = []
    for phase in ("full_step", "inference"):
        rows = table[table["phase"] == phase].pivot_table(index=keys, columns="precision", values="peak_bytes")
        if {"float32", "bfloat16"} <= set(rows.columns):
            ratios = (rows["bfloat16"] / rows["float32"]).dropna()
            if len(ratios):
                parts.append(f"{ratios.min():.2f} to {ratios.max():.2f} of float32's peak in {_in_a(phase)}")
    return f"bf16 autocast takes {join_words(parts)}; float32 parameters stay." if parts else None


def _in_a(phase: str) -> str:
    return "a full step" if phase == "full_step" else _phase(phase)


def where_it_goes(frame: pd.DataFrame) -> Answer | None:
    table = analysis.parts_of_peaks(frame)
    table = table[table["size"].isin(_shown_sizes(frame)) & (table["precision"] == "float32")]
    sentences = []
    for size, of_size in table.groupby("size", sort=False):
        for context in sorted({of_size["context_length"].min(), of_size["context_length"].max()}):
            at = of_size[of_size["context_length"] == context].sort_values("share", ascending=False)
            most = [f"{_part(row.part)} {_percent(row.share)}" for row in at.itertuples() if row.share >= 0.005]
            peak = format_bytes(at["peak_bytes"].iloc[0])
            sentences.append(f"{size} at {context} tokens, {peak} (counted): {join_words(most)}.")
    if not sentences:
        return None
    return Answer(WHERE_IT_GOES, "measured", " ".join(sentences), "parts")


def residual_stream(frame: pd.DataFrame) -> Answer | None:
    table = analysis.blocks(frame)
    if table.empty:
        return None
    row = table.iloc[0]
    equal = (table["residual_bytes"] == table["predicted_residual_bytes"]).all()
    text = (
        f"What a layer of {row['size']} passes on holds {format_bytes(row['residual_bytes'])} with batch "
        f"{row['batch']:.0f} and {row['context_length']} tokens; the formula says "
        f"{format_bytes(row['predicted_residual_bytes'])}."
    )
    if equal and len(table) > 1:
        text += f" It is the same under {join_words(sorted(table['precision']))}: autocast leaves it in float32."
    kept = row["saved_bytes"] / row["residual_bytes"]
    text += f" One block keeps {kept:.1f} times as much for its backward pass."
    return Answer(RESIDUAL_STREAM, "yes" if equal else "no", text)


def largest_allocations(frame: pd.DataFrame) -> Answer | None:
    table = analysis.allocations(frame)
    sentences = []
    for (size, context), group in table.groupby(["size", "context_length"], sort=False):
        first = group.iloc[0]
        same = group[group["n_bytes"] == first["n_bytes"]]
        made = dict.fromkeys(f"{r.operator} ({r.line}, {r.part_of_step})" for r in same.itertuples())
        sentences.append(
            f"{size} at {context} tokens: the largest single tensors hold {format_bytes(first['n_bytes'])}, made by "
            f"{join_words(list(made)[:4])}."
        )
        heavy = group.loc[group["at_peak_bytes"].astype(float).idxmax()]
        if heavy["at_peak_bytes"] > 0:
            sentences.append(
                f"Most of the peak comes from {heavy['operator']} at {heavy['line']}: "
                f"{format_bytes(heavy['at_peak_bytes'])} in tensors of {format_bytes(heavy['n_bytes'])}."
            )
    if not sentences:
        return None
    sizes = analysis.timeline(frame)["size"]  # a figure each
    figures = (f"timeline_{sizes.iloc[-1]}",) if len(sizes) else ()
    return Answer(LARGEST_ALLOCATIONS, "measured", " ".join(sentences), more_figures=figures)


def saved_by_a_block(frame: pd.DataFrame) -> Answer | None:
    table = analysis.blocks(frame)
    if table.empty:
        return None
    by_operator = analysis.saved_by_operator(frame)
    sentences = []
    for row in table.to_dict("records"):
        some = by_operator[by_operator["precision"] == row["precision"]].head(2)
        most = [f"{r.operator} ({format_bytes(r.bytes)})" for r in some.itertuples()]
        sentences.append(
            f"A block of {row['size']} in {row['precision']} keeps {format_bytes(row['saved_bytes'])}, "
            f"{format_bytes(row['predicted_bytes'])} predicted{', most from ' + join_words(most) if most else ''}; it "
            f"produces {format_bytes(row['parameter_gradients_bytes'])} of parameter gradients and "
            f"{format_bytes(row['input_gradient_bytes'])} of gradients of its input."
        )
    near = (table["saved_bytes"] / table["predicted_bytes"] - 1).abs() <= TOLERANCE
    verdict: Verdict = "yes" if near.all() else "mixed" if near.any() else "no"
    return Answer(SAVED_BY_A_BLOCK, verdict, " ".join(sentences), "saved")


def checkpointing(frame: pd.DataFrame) -> Answer | None:
    table = analysis.best_segments(frame)
    if table.empty:
        return None
    gains = table["peak_bytes"] < (1 - trends.LEAST) * table["without_bytes"]
    sentences = [
        _best_segment(row, gain)
        for row, gain in zip(table.to_dict("records"), gains, strict=True)
        if _is_told(row, table)
    ]
    ratios = analysis.checkpoint_ratios(frame)
    faster, slower = significant(ratios)
    span = f"{ratios['ratio'].min():.2f} to {ratios['ratio'].max():.2f}"
    cost = f"{span} of the time without, which is no difference beyond chance"
    if len(slower):
        worst = slower.loc[slower["ratio"].idxmax()]
        cost = f"up to {ratio_text(worst)} of the time without, with segments of {worst['segment_length']}"
    elif len(faster):
        cost = f"{span} of the time without"
    if len(ratios):
        sentences.append(f"A step of {ratios['size'].iloc[0]} with checkpointing takes {cost}.")
    verdict: Verdict = "yes" if gains.all() else "mixed" if gains.any() else "no"
    evidence = ratios_text(ratios, lambda row: f"time with segments of {row['segment_length']}, {row['size']}")
    advice, text = _recommend_segment(table, gains), " ".join(sentences)
    first = next(row for row in table.to_dict("records") if _is_told(row, table))
    figure = f"checkpoint_{first['size']}_{first['context_length']}_tokens"
    return Answer(CHECKPOINTING, verdict, text, figure, advice, advice is not None, evidence, ("checkpoint_time",))


def _is_told(row: dict[str, object], table: pd.DataFrame) -> bool:
    """A setting that was measured is not told a second time as counted."""
    same = table[(table["size"] == row["size"]) & (table["context_length"] == row["context_length"])]
    return row["method"] == "measured" or "measured" not in set(same["method"])


def _best_segment(row: dict[str, float], gain: bool) -> str:
    where = f"{row['size']}, {row['layers']} layers, {row['context_length']} tokens ({row['method']})"
    without, lowest = format_bytes(row["without_bytes"]), format_bytes(row["peak_bytes"])
    if not gain:
        return f"{where}: no segment length lowers the peak of {without}."
    flat = row["highest_bytes"] <= (1 + trends.LEAST) * row["peak_bytes"]
    place = "with every segment length alike" if flat else f"lowest with segments of {row['best_segment']:.0f}"
    return (
        f"{where}: the peak falls from {without} to {lowest}, {place}; the length predicted from what "
        f"a layer keeps here is {row['predicted_best']:.1f} (the textbook's sqrt(layers): {row['root_of_layers']:.1f})."
    )


def _recommend_segment(table: pd.DataFrame, gains: pd.Series) -> str | None:
    if not gains.any():
        return None
    row = table[gains].iloc[(table[gains]["peak_bytes"] / table[gains]["without_bytes"]).argmin()]
    flat = row["highest_bytes"] <= (1 + trends.LEAST) * row["peak_bytes"]
    every = "every layer" if row["best_segment"] == 1 else f"every {row['best_segment']:.0f} layers"
    return (
        f"if memory is short, checkpoint {'any number of layers' if flat else every}: "
        f"{_percent(row['peak_bytes'] / row['without_bytes'])} of the peak is "
        f"left for {row['size']} at {row['context_length']} tokens ({row['method']})."
    )


def largest_model(frame: pd.DataFrame) -> Answer | None:
    table = analysis.fits(frame)
    if table.empty:
        return None
    memory = format_bytes(table["machine_bytes"].iloc[0])
    setting = f"batch {table['batch'].iloc[0]:.0f} and {table['context_length'].iloc[0]} tokens in float32"
    fit, not_fit = table[table["fits"]], table[~table["fits"]]
    sentences, advice = [], None
    if fit.empty:
        sentences.append(f"None of the {len(table)} counted sizes fits into {memory} with {setting}.")
    else:
        best = fit.iloc[-1]
        sentences.append(
            f"{best['size']}: a full step with {setting} needs {format_bytes(best['peak_bytes'])} of {memory}."
        )
        advice = (
            f"up to the size {best['size']}, a full step fits into the {memory} of this machine (batch "
            f"{best['batch']:.0f}, {best['context_length']} tokens, float32, AdamW); it needs "
            f"{format_bytes(best['peak_bytes'])}."
        )
    if len(not_fit):
        least = not_fit.iloc[0]
        sentences.append(f"{least['size']} would need {format_bytes(least['peak_bytes'])}.")
    sentences.append(f"Counted; {_percent(1 - analysis.FIT_SHARE)} of the memory is left for everything else.")
    return Answer(
        LARGEST_MODEL, "no" if fit.empty else "measured", " ".join(sentences), None, advice, advice is not None
    )


def counted_against_measured(frame: pd.DataFrame) -> Answer | None:
    table = analysis.counted_against_measured(frame)
    if table.empty:
        return None
    off = (table["counted_over_measured"] - 1).abs()
    worst, near = table.loc[off.idxmax()], int((off <= TOLERANCE).sum())
    verdict: Verdict = "yes" if near == len(table) else "mixed" if near else "no"
    formula = (table["predicted_over_measured"] - 1).abs().max()
    text = (
        f"In {near} of {len(table)} settings the counted peak is within {_percent(TOLERANCE)} of the measured one; the "
        f"largest difference is {_percent(off.max())} ({worst['size']}, {worst['context_length']} tokens, "
        f"{worst['precision']}, {_phase(worst['phase'])}). The formulas alone, known before anything ran, "
        f"are off by at most {_percent(formula)}."
    )
    return Answer(COUNTED, verdict, f"{text} {_cost_of_counting(frame)}".strip())


def _cost_of_counting(frame: pd.DataFrame) -> str:
    """Time and main memory that it took to count the largest step of all."""
    table = analysis.of_method(frame, "counted").dropna(subset=["count_s"])
    if table.empty:
        return ""
    row = table.loc[table["peak_bytes"].astype(float).idxmax()]
    host = f" and {format_bytes(row['host_bytes'])} of main memory" if pd.notna(row["host_bytes"]) else ""
    return (
        f"Counting the largest, {row['size']} at {row['context_length']} tokens with a peak of "
        f"{format_bytes(row['peak_bytes'])}, took {format_seconds(row['count_s'])}{host}."
    )


def published_peaks(frame: pd.DataFrame) -> Answer | None:
    sentences = trends.beside_published(frame)
    return Answer(PUBLISHED_PEAKS, "measured", " ".join(sentences), "published") if sentences else None


def published_trends(frame: pd.DataFrame) -> Answer | None:
    return trends_answer(TRENDS, trends.published_trends(frame), "published")


def _shown_sizes(frame: pd.DataFrame) -> list[str]:
    """The largest measured size and the big counted one."""
    return list(dict.fromkeys([*analysis.measured_sizes(frame)[-1:], *analysis.big_sizes(frame)]))


def _phase(phase: str) -> str:
    return phase.replace("_", " ")


def _part(part: str) -> str:
    return "optimizer state" if part == "optimizer" else part


def _percent(share: float) -> str:
    """Whole percents, and what is less than one."""
    if share >= 0.01 or share == 0:
        return f"{share * 100:.0f} %"
    return f"{share * 100:.1g} %" if share >= 1e-4 else "below 0.01 %"
