"""What a run of the FlashAttention lab says: one answer to each question, nothing the intervals do not show."""

import pandas as pd

from labkit.bench.statistics import compare_groups
from labkit.lab.answers import Answer, Question, Verdict, not_measured
from labkit.lab.evidence import ratio_text, ratios_text, with_interval
from labkit.lab.trends import trends_answer
from labkit.lab.units import format_bytes, join_words
from labkit.studies.flash_attention import analysis, recorded, trends
from labkit.studies.shared.attention_passes import EXPLICIT, FLASH

CROSSOVER = Question(
    "crossover",
    "From which length on does each implementation beat explicit attention, forward and backward together?",
    "attention",
)
SHARE = Question("matmul_share", "What share of the device's measured matmul rate does each implementation reach?")
MEMORY = Question("peak_memory", "How much memory does each implementation need at its peak?")
KERNEL = Question("triton_kernel", "What does the FlashAttention kernel in Triton gain?")
TECHNIQUES = Question("techniques", "What is each technique of the kernel worth, predicted and measured?")
PUBLISHED = Question("published_trends", "Do the published trends hold on this machine?")
QUESTIONS = (CROSSOVER, SHARE, MEMORY, KERNEL, TECHNIQUES, PUBLISHED)

NO_RECORD = "and data/recorded/flash_attention/ holds no run of a GPU to show instead"


def answer_all(frame: pd.DataFrame, coverage: pd.DataFrame) -> list[Answer]:
    """An answer to every question; a question whose rows are missing says so."""
    answers = {
        CROSSOVER: crossover,
        SHARE: matmul_share,
        MEMORY: peak_memory,
        KERNEL: triton_kernel,
        TECHNIQUES: techniques,
        PUBLISHED: published_trends,
    }
    return [
        find(frame) or not_measured(question, coverage, _missing(frame, question)) for question, find in answers.items()
    ]


def _missing(frame: pd.DataFrame, question: Question) -> str:
    """What is not there; reasons of implementations that did not run stand in rows of their points."""
    refused = analysis.refused(frame)
    if question in (KERNEL, TECHNIQUES):
        told = list(dict.fromkeys(refused.loc[refused["implementation"] == FLASH, "gate"]))
        return f"{'; '.join(told) or 'no row of this run holds the kernel'}, {NO_RECORD}"
    reasons = [f"{name}: {gate}" for name, gate in zip(refused["implementation"], refused["gate"], strict=True)]
    told_all = f" ({'; '.join(list(dict.fromkeys(reasons))[:3])})" if reasons else ""
    return f"no row of this run holds what it needs{told_all}"


def crossover(frame: pd.DataFrame) -> Answer | None:
    table = analysis.beats_from(frame)
    if table.empty:
        return None
    ratios = analysis.ratios(frame)
    sentences = [_crossovers(str(dtype), rows, ratios) for dtype, rows in table.groupby("dtype", sort=False)]
    won = table["from_sequence"].notna()
    at_longest = ratios.loc[ratios["sequence"] == ratios["sequence"].max(), "verdict"]
    none: Verdict = "no" if (at_longest == "slower").all() else "no difference shown"
    verdict: Verdict = "measured" if won.any() else none
    if ratios["low"].isna().all():
        sentences.append("There are too few repeats for intervals.")
    advice = _recommendation(frame, table)
    worth = table.loc[won, "implementation"] if won.any() else table["implementation"]
    longest = ratios[(ratios["sequence"] == ratios["sequence"].max()) & ratios["implementation"].isin(worth)]
    evidence = ratios_text(longest, lambda row: f"{_name(row['implementation'])}, {_place(row)}")
    text = " ".join(sentences)
    return Answer(
        CROSSOVER, verdict, text, "against_explicit", advice, advice is not None, evidence, ("time_by_length",)
    )


def _place(row: pd.Series) -> str:
    return f"{row['sequence']} tokens, head dimension {row['head_dim']}, {row['dtype']}"


def _crossovers(dtype: str, rows: pd.DataFrame, ratios: pd.DataFrame) -> str:
    longest = rows["longest"].max()
    won = rows[rows["from_sequence"].notna()].sort_values(["from_sequence", "least_ratio"])
    parts = [
        f"{_name(row['implementation'])} {_from(row, longest)} ({_span(row)} of its time)"
        for row in won.to_dict("records")
    ]
    lost = [_name(name) for name in rows.loc[rows["from_sequence"].isna(), "implementation"]]
    sentence = f"{dtype}, up to {longest} tokens: explicit is beaten by {join_words(parts)}"
    if not parts:
        seen = _at_the_longest(dtype, ratios)
        return f"{dtype}, up to {longest} tokens: none is shown to beat explicit from some length on{seen}."
    return sentence + (f"; {join_words(lost)} not up to the longest, as far as is shown." if lost else ".")


def _at_the_longest(dtype: str, ratios: pd.DataFrame) -> str:
    """What is faster at the longest length, though not at every head dimension or not enough for a claim."""
    ratios = ratios[ratios["dtype"] == dtype]
    at = ratios[(ratios["sequence"] == ratios["sequence"].max()) & (ratios["verdict"] == "faster")]
    widths = at["head_dim"].nunique() > 1
    told = [
        f"{_name(row['implementation'])} takes {ratio_text(row)}"
        + (f" (head dimension {row['head_dim']})" if widths else "")
        for _, row in at.sort_values("ratio").iterrows()
    ]
    return f"; at {at['sequence'].iloc[0]} tokens alone {join_words(told)} of explicit's time" if told else ""


def _from(row: dict[str, float], longest: int) -> str:
    """Where it wins; a range if it was not compared up to the longest length."""
    if row["longest"] == longest:
        return f"from {row['from_sequence']:.0f} tokens on"
    if row["longest"] == row["from_sequence"]:
        return f"at {row['longest']} tokens, the only or longest length it was compared at"
    return f"from {row['from_sequence']:.0f} to {row['longest']} tokens, where it was compared"


def _span(row: dict[str, float]) -> str:
    return " to ".join(dict.fromkeys(f"{row[name]:.2f}" for name in ("least_ratio", "most_ratio")))


def _recommendation(frame: pd.DataFrame, table: pd.DataFrame) -> str | None:
    """By dtype, of those that beat explicit the fastest at the longest length, and from where on."""
    parts = []
    whole = table["longest"] == table.groupby("dtype")["longest"].transform("max")
    for dtype, rows in table[table["from_sequence"].notna() & whole].groupby("dtype", sort=False):
        name = _fastest(frame, str(dtype), list(rows["implementation"]))
        row = rows[rows["implementation"] == name].iloc[0].to_dict()
        parts.append(f"{_name(name)} from {row['from_sequence']:.0f} tokens on in {dtype} ({_span(row)} of the time)")
    return f"instead of explicit attention use {join_words(parts)}." if parts else None


def _fastest(frame: pd.DataFrame, dtype: str, names: list[str]) -> str:
    """The smallest median at the longest length; SDPA's own choice where it is not shown to be slower than that."""
    table = analysis.samples(frame, "lengths")
    table = table[(table["dtype"] == dtype) & (table["phase"] == "both") & table["implementation"].isin(names)]
    table = table[table["sequence"] == table["sequence"].max()]
    best = str(table.groupby("implementation")["seconds"].median().idxmin())
    if best == "sdpa" or "sdpa" not in set(table["implementation"]):
        return best
    compared = compare_groups(table, "seconds", ["head_dim"], "implementation", best)
    slower = compared.loc[compared["implementation"] == "sdpa", "verdict"] == "slower"
    return best if slower.any() else "sdpa"


def matmul_share(frame: pd.DataFrame) -> Answer | None:
    table = analysis.shares(frame)
    if table.empty:
        return None
    sentences = []
    for dtype, rows in table.groupby("dtype", sort=False):
        flops, seconds = analysis.matmul_rates(frame)[str(dtype)]
        at = rows[(rows["sequence"] == rows["sequence"].max()) & (rows["head_dim"] == rows["head_dim"].max())]
        parts = []
        for phase in ("forward", "backward"):
            of_phase = at[at["phase"] == phase].sort_values("share_percent", ascending=False)
            each = [f"{_percent(row)} with {_name(row['implementation'])}" for _, row in of_phase.iterrows()]
            parts.append(f"{phase} reaches {join_words(each)}")
        rate = flops / pd.Series(seconds).median() / 1e12
        where = f"at {at['sequence'].iloc[0]} tokens and head dimension {at['head_dim'].iloc[0]}"
        told = f"{dtype}: of the {rate:.3g} TFLOP/s of a large matmul, {where},"
        sentences.append(f"{told} {'; '.join(parts)}.")
        if (at["low"] > 100).any():
            sentences.append("A share above 100 % says that the machine was busier during the matmul, measured first.")
    return Answer(SHARE, "measured", " ".join(sentences), "matmul_share")


def _percent(row: pd.Series) -> str:
    return with_interval(row, "share_percent", "{:.0f} %".format)


def peak_memory(frame: pd.DataFrame) -> Answer | None:
    table = analysis.peaks(frame)
    if table.empty:
        return None
    sentences = []
    for dtype, rows in table.groupby("dtype", sort=False):
        rows = rows[rows["head_dim"] == rows["head_dim"].max()]
        explicit = rows[rows["implementation"] == EXPLICIT]
        length = (explicit if len(explicit) else rows)["sequence"].max()
        at = rows[rows["sequence"] == length].sort_values("peak_bytes", kind="stable")
        each = [f"{_name(r['implementation'])} {format_bytes(r['peak_bytes'])}" for r in at.to_dict("records")]
        longest = rows["sequence"].max()
        sentences.append(f"{dtype}, {length} tokens: {join_words(each)}.")
        if longest > length:
            sentences.append(
                f"Explicit does not run at {longest} tokens: {_reason(frame, EXPLICIT, str(dtype), longest)}."
            )
    return Answer(MEMORY, "measured", " ".join(sentences), "peak_memory")


def _reason(frame: pd.DataFrame, name: str, dtype: str, sequence: int) -> str:
    refused = analysis.refused(frame)
    at = (refused["implementation"] == name) & (refused["dtype"] == dtype) & (refused["sequence"] == sequence)
    return str(refused.loc[at, "gate"].iloc[0]) if at.any() else "it was not asked for"


def triton_kernel(frame: pd.DataFrame) -> Answer | None:
    if recorded.has_flash(frame):
        return Answer(KERNEL, "measured", _kernel_text(frame), "against_explicit")
    run = recorded.recorded_gpu_run()
    if run is None:
        return None
    text = f"Not measured here: {_why_no_kernel(frame)}. On another machine ({run.label}): {_kernel_text(run.frame)}"
    return Answer(KERNEL, "not measured", text, "triton_kernel")


def _why_no_kernel(frame: pd.DataFrame) -> str:
    refused = analysis.refused(frame)
    reasons = refused.loc[refused["implementation"] == FLASH, "gate"]
    return str(reasons.iloc[0]) if len(reasons) else "it was not asked for"


def _kernel_text(frame: pd.DataFrame) -> str:
    """The kernel against explicit and against SDPA, a sentence a dtype and the longest length both ran at."""
    parts: dict[str, list[str]] = {}
    for baseline in (EXPLICIT, "sdpa_flash", "sdpa_cudnn", "sdpa_efficient"):
        table = analysis.against(frame, "lengths", baseline)
        table = table[(table["implementation"] == FLASH) & (table["phase"] == "both")]
        for dtype, rows in table.groupby("dtype", sort=False):
            row = rows.sort_values(["sequence", "head_dim"]).iloc[-1]
            where = f"{dtype}, {row['sequence']} tokens, head dimension {row['head_dim']}"
            parts.setdefault(where, []).append(f"{ratio_text(row)} of that of {_name(baseline)} ({row['verdict']})")
    sentences = [f"{where}: the time of the kernel is {join_words(told)}." for where, told in parts.items()]
    return " ".join(sentences) or "the kernel was timed alone."


def techniques(frame: pd.DataFrame) -> Answer | None:
    own = analysis.techniques(frame)
    hidden = _technique_texts(analysis.hidden(frame), "tiled attention")
    if not own.empty:
        text = " ".join(_technique_texts(own, "the kernel") + hidden)
        return Answer(TECHNIQUES, "measured", text, "techniques")
    run = recorded.recorded_gpu_run()
    elsewhere = [] if run is None else _technique_texts(analysis.techniques(run.frame), "the kernel")
    if not hidden and not elsewhere:
        return None
    told = f"The kernel's techniques were not measured here: {_why_no_kernel(frame)}"
    told += f". On another machine ({run.label}): {' '.join(elsewhere)}" if run and elsewhere else f", {NO_RECORD}."
    if not hidden:
        return Answer(TECHNIQUES, "not measured", told)
    also = "One technique exists in tiled attention, too, which runs anywhere: tiles that no query sees are skipped."
    return Answer(TECHNIQUES, "measured", " ".join([also, *hidden, told]), "hidden")


def _technique_texts(table: pd.DataFrame, what: str) -> list[str]:
    """A sentence a technique: the shortest and the longest sequence; the rest is in the table."""
    sentences = []
    for (technique, dtype), rows in table.groupby(["technique", "dtype"], sort=False):
        name = str(technique).replace("_", " ")
        compared = "causal over full" if what == "tiled attention" else f"with {name} over without"
        ends = rows.sort_values("sequence").iloc[[0, -1]].drop_duplicates("sequence")
        told = [_technique_row(row, " at best" * (what != "tiled attention")) for _, row in ends.iterrows()]
        where = f"{ends['sequence'].iloc[0]} tokens, {dtype}, {what}, {compared}"
        also = [f"; at {s} tokens {text}" for s, text in zip(ends["sequence"].iloc[1:], told[1:], strict=True)]
        sentences.append(f"{where}: {told[0]}{''.join(also)}.")
    return sentences


def _technique_row(row: pd.Series, at_best: str) -> str:
    verdict = {"faster": "it pays", "slower": "it costs"}.get(row["verdict"], row["verdict"])
    return f"{row['predicted']:.2f} predicted{at_best}, {ratio_text(row)} measured ({verdict})"


def published_trends(frame: pd.DataFrame) -> Answer | None:
    return trends_answer(PUBLISHED, trends.published_trends(frame), "time_by_length")


def _name(implementation: str) -> str:
    return implementation.replace("_", " ")
