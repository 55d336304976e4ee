"""What a run of the attention lab says: one answer to each question, nothing the intervals do not show."""

import pandas as pd

from labkit.bench.statistics import judged
from labkit.lab.answers import Answer, Question, Verdict, not_measured
from labkit.lab.evidence import ratio_text, ratios_text, significant, span_text, verdict_of, with_interval
from labkit.lab.trends import trends_answer
from labkit.lab.units import format_bytes, format_seconds, format_share, join_words
from labkit.studies.attention import analysis, trends
from labkit.studies.attention.worker import COMPILED, EXPLICIT, TILED

TIME_GROWTH = Question(
    "time_growth", "How do the times of the forward and backward pass grow with sequence length and head dimension?"
)
MEMORY_GROWTH = Question(
    "memory_growth", "How does the memory held before the backward pass grow, and is it what the formula says?"
)
OUT_OF_MEMORY = Question("out_of_memory", "At which length does this machine run out of memory, and what fills it?")
TILING = Question("tiling", "What does tiling save, and what does it cost?", "attention")
COMPILING = Question("compiled", "Is compiled attention faster than eager, forward and backward?", "compile")
PUBLISHED = Question("published_trends", "Do the published trends hold on this machine?")
QUESTIONS = (TIME_GROWTH, MEMORY_GROWTH, OUT_OF_MEMORY, TILING, COMPILING, PUBLISHED)

# Measured over predicted bytes within this is what the formula says.
CLOSE = (0.98, 1.02)
PHASES = ("forward", "backward")


def answer_all(frame: pd.DataFrame, coverage: pd.DataFrame) -> list[Answer]:
    """An answer to every question; a question whose rows are missing says so."""
    answers = {
        TIME_GROWTH: time_growth,
        MEMORY_GROWTH: memory_growth,
        OUT_OF_MEMORY: out_of_memory,
        TILING: tiling,
        COMPILING: compiled,
        PUBLISHED: published_trends,
    }
    return [
        find(frame) or not_measured(question, coverage, _missing(frame, question)) for question, find in answers.items()
    ]


def _missing(frame: pd.DataFrame, question: Question) -> str:
    """What is not there: reasons of implementations that did not run stand in rows of their points."""
    refused = analysis.refused(frame)
    if question is COMPILING:
        refused = refused[refused["implementation"] == COMPILED]
    reasons = [f"{name}: {gate}" for name, gate in zip(refused["implementation"], refused["gate"], strict=True)]
    told = f" ({'; '.join(dict.fromkeys(reasons))})" if reasons else ""
    return f"no row of this run holds what it needs{told}"


def time_growth(frame: pd.DataFrame) -> Answer | None:
    table = analysis.times(frame, "grid")
    table = table[(table["implementation"] == EXPLICIT) & table["phase"].isin(PHASES)]
    if table.empty:
        return None
    laws = analysis.power_laws(frame)
    laws = laws[laws["implementation"] == EXPLICIT]
    sentences = []
    for phase in filter(set(table["phase"]).__contains__, PHASES):
        of_phase = table[table["phase"] == phase]
        longest = of_phase.loc[of_phase["sequence"] == of_phase["sequence"].max()].sort_values("head_dim").iloc[-1]
        told = f"{phase.capitalize()} takes {with_interval(longest)} at {longest['sequence']} tokens"
        sentences.append(f"{told} and head dimension {longest['head_dim']}{_exponents(laws, phase)}.")
    text = " ".join(sentences + _width_sentences(frame))
    return Answer(TIME_GROWTH, "measured", text, "time_by_sequence", more_figures=("time_by_head_dim",))


def _exponents(laws: pd.DataFrame, phase: str) -> str:
    """How time grows with the sequence, by head dimension: exponent, interval, range."""
    rows = laws[laws["phase"] == phase].to_dict("records")
    if not rows:
        return "; over no range of lengths does it follow a power law"
    parts = [
        f"{with_interval(pd.Series(row), 'exponent', '{:.2f}'.format)} from {row['from_sequence']} to "
        f"{row['to_sequence']} tokens at head dimension {row['head_dim']}"
        for row in rows
    ]
    return f"; it grows with the length to the power of {join_words(parts)}"


def _width_sentences(frame: pd.DataFrame) -> list[str]:
    sentences = []
    for row in analysis.width_growth(frame).to_dict("records"):
        if row["phase"] not in PHASES:
            continue
        wider = row["head_dim"] / row["from_head_dim"]
        more = "" if row["verdict"] == "slower" else ", which is not shown to be more"
        sentences.append(
            f"With a head dimension {wider:.0f} times as large, {row['phase']} at {row['sequence']} tokens takes "
            f"{ratio_text(pd.Series(row))} times as long{more}."
        )
    return sentences


def memory_growth(frame: pd.DataFrame) -> Answer | None:
    table = analysis.memory(frame)
    explicit = table[(table["implementation"] == EXPLICIT) & (table["sweep"] == "grid")]
    if explicit.empty:
        return None
    ratios = explicit["saved_bytes"] / explicit["predicted_saved_bytes"]
    largest = explicit.sort_values(["sequence", "head_dim"]).iloc[-1]
    matrix = _matrix_share(frame, largest)
    verdict: Verdict = "yes" if ratios.between(*CLOSE).all() else "mixed" if ratios.between(*CLOSE).any() else "no"
    sentences = [
        f"Explicit attention holds {format_bytes(largest['saved_bytes'])} at {largest['sequence']} tokens and head "
        f"dimension {largest['head_dim']}, batch {largest['batch']}; the formula says "
        f"{format_bytes(largest['predicted_saved_bytes'])}, and over all sizes measured over predicted is "
        f"{span_text(ratios)}.{matrix}"
    ]
    longest = table[(table["sweep"] == "grid") & (table["sequence"] == largest["sequence"])]
    for name, verb in ((COMPILED, "The compiled version holds"), (TILED, "Tiled attention holds")):
        rows = longest[(longest["implementation"] == name) & (longest["head_dim"] == largest["head_dim"])]
        for row in rows.to_dict("records"):
            share = row["saved_bytes"] / largest["saved_bytes"]
            sentences.append(f"{verb} {format_bytes(row['saved_bytes'])} there, {share:.2f} of that.")
    return Answer(MEMORY_GROWTH, verdict, " ".join(sentences), "memory_held")


def _matrix_share(frame: pd.DataFrame, row: pd.Series) -> str:
    """How much of what is held are the probabilities, which alone grow with the square of the length."""
    at = frame[(frame["phase"] == "saved") & (frame["implementation"] == EXPLICIT) & (frame["sweep"] == "grid")]
    at = at[(at["sequence"] == row["sequence"]) & (at["head_dim"] == row["head_dim"])]
    share = at.loc[at["tensor"] == "probabilities", "saved_bytes"].sum() / at["saved_bytes"].sum()
    return f" {format_share(share)} of it is the probabilities, which grow with the square of the length."


def out_of_memory(frame: pd.DataFrame) -> Answer | None:
    needed = analysis.smallest_too_large(frame)
    if needed is None:
        return None
    tensors = {name: n for name, n in needed.items() if name not in ("sequence", "batch", "head_dim")}
    total, largest = sum(tensors.values()), max(tensors.values())
    matrices = [name for name, n in tensors.items() if n == largest]
    available = format_bytes(analysis.most_available(frame))
    matrix = f"{len(matrices)} matrices of {format_bytes(largest)}: {join_words(matrices)}"
    text = (
        f"Batch {needed['batch']}, head dimension {needed['head_dim']}: {needed['sequence']} tokens is the first power "
        f"of two that does not fit. Forward and backward need {format_bytes(total)} at the worst moment, and "
        f"{available} are available. {format_share(len(matrices) * largest / total)} of that is {matrix}."
    )
    return Answer(OUT_OF_MEMORY, "measured", f"{text} {_prediction_held(frame)}".strip(), "peak_memory")


def _prediction_held(frame: pd.DataFrame) -> str:
    """How far the same formula was off where the peak was measured; only where it is not a matter of pages."""
    table = analysis.memory(frame)
    table = table[table["predicted_peak_bytes"].notna() & table["peak_bytes"].notna()]
    table = table[table["predicted_peak_bytes"] >= 64 * 2**20]
    if table.empty:
        return "The size is by formula; no peak that is large enough to check it was measured."
    ratios = table["peak_bytes"] / table["predicted_peak_bytes"]
    return (
        f"The size is by formula; over {len(ratios)} measured peaks of 64 MiB and more, measured over predicted is "
        f"{span_text(ratios)}."
    )


def tiling(frame: pd.DataFrame) -> Answer | None:
    table = analysis.memory(frame)
    table = table[table["sweep"] == "tiling"].pivot(index="sequence", columns="implementation", values="peak_bytes")
    ratios = analysis.against_explicit(frame, TILED, "tiling")
    if not {EXPLICIT, TILED} <= set(table.columns) or table.dropna().empty:
        return None
    peaks = table.dropna()
    longest = int(peaks.index.max())
    explicit, tiled = peaks.loc[longest, EXPLICIT], peaks.loc[longest, TILED]
    text = (
        f"Memory: at {longest} tokens, batch 1, forward and backward take {format_bytes(tiled)} above the inputs "
        f"where explicit attention takes {format_bytes(explicit)}, {explicit / max(tiled, 1):.0f} times as much. "
        f"{_tiling_times(ratios)}"
    )
    both = ratios[ratios["phase"] == "both"]
    advice = _tiling_advice(both, peaks)
    evidence = ratios_text(both, _place)
    return Answer(
        TILING, "measured", text.strip(), "tiling_memory", advice, advice is not None, evidence, ("tiling_time",)
    )


def _place(row: pd.Series) -> str:
    return f"{row['sequence']} tokens"


def _tiling_advice(ratios: pd.DataFrame, peaks: pd.DataFrame) -> str | None:
    """From the first length from which on every measured one is shown to be faster; memory as far as it was seen."""
    faster = significant(ratios)[0]
    lengths = sorted(ratios["sequence"].unique())
    starts = [s for s in lengths if set(ratios.index[ratios["sequence"] >= s]) <= set(faster.index)]
    if not starts:
        return None
    gain = f"{span_text(faster.loc[faster['sequence'] >= starts[0], 'ratio'])} of the time"
    beyond = peaks[peaks.index >= starts[0]]
    less = "less memory, and " if len(beyond) and (beyond[TILED] < beyond[EXPLICIT]).all() else ""
    return f"tile instead of building the matrix from {starts[0]} tokens on: {less}{gain}."


def _tiling_times(ratios: pd.DataFrame) -> str:
    both = ratios[ratios["phase"] == "both"].sort_values("sequence")
    if both.empty:
        return ""
    parts = [f"{ratio_text(row)} at {row['sequence']} tokens ({row['verdict']})" for _, row in both.iterrows()]
    return f"Time: tiled over explicit, forward and backward together, is {join_words(parts)}."


def compiled(frame: pd.DataFrame) -> Answer | None:
    ratios = analysis.against_explicit(frame, COMPILED, "grid")
    ratios = judged(ratios[ratios["phase"].isin(PHASES)])
    if ratios.empty:
        return None
    faster, slower = significant(ratios)
    sentences = [_compiled_phase(phase, of_phase) for phase, of_phase in ratios.groupby("phase", sort=False)]
    seconds = analysis.compile_seconds(frame)
    if not seconds.empty:
        later = (
            f", the {len(seconds) - 1} later ones {format_seconds(seconds[1:].median())} each"
            if seconds.size > 1
            else ""
        )
        sentences.append(
            f"Compiling is apart from these times: the first shape took {format_seconds(seconds[0])}{later} "
            "(less where a compiled graph was found on disk)."
        )
    verdict = verdict_of(faster, slower)
    advice = _compile_advice(ratios)
    is_shown = advice is not None
    evidence = ratios_text(ratios, lambda row: f"{row['phase']}, {_place(row)}")
    text = " ".join(sentences)
    return Answer(
        COMPILING, verdict, text, "compiled_against_eager", advice or _no_compile_advice(ratios), is_shown, evidence
    )


def _compiled_phase(phase: object, ratios: pd.DataFrame) -> str:
    counts = ratios["verdict"].value_counts()
    longest = ratios[ratios["sequence"] == ratios["sequence"].max()].sort_values("head_dim").iloc[-1]
    where = f"{longest['sequence']} tokens, head dimension {longest['head_dim']}"
    return (
        f"{str(phase).capitalize()}: over {len(ratios)} sizes compiled is faster in {counts.get('faster', 0)}, slower "
        f"in {counts.get('slower', 0)}, no difference shown in {counts.get('no difference shown', 0)}; at {where} it "
        f"takes {ratio_text(longest)} of the time."
    )


def _compile_advice(ratios: pd.DataFrame) -> str | None:
    """From which length on no phase is slower and each is faster somewhere; only what the intervals show."""
    lengths = sorted(ratios["sequence"].unique())
    for start in lengths:
        beyond = ratios[ratios["sequence"] >= start]
        faster, slower = significant(beyond)
        if slower.empty and len(faster) == len(beyond):
            return f"compile explicit attention from {start} tokens on, where forward and backward are both faster."
    return None


def _no_compile_advice(ratios: pd.DataFrame) -> str | None:
    """Where compiling is faster here and there, but from no length on in both passes."""
    counts = ratios["verdict"].value_counts()
    if "faster" not in counts:
        return None
    return (
        "choose by length and pass, from the table: from no length on is compiled attention shown to be faster both "
        f"forward and backward (faster in {counts.get('faster', 0)}, slower in {counts.get('slower', 0)} of "
        f"{len(ratios)} comparisons)."
    )


def published_trends(frame: pd.DataFrame) -> Answer | None:
    return trends_answer(PUBLISHED, trends.published_trends(frame), "time_by_sequence")
