"""What a kernels run says: one answer to each question, nothing the intervals do not show."""

import pandas as pd

from labkit.bench.statistics import judged
from labkit.costs.transformer import n_parameters
from labkit.lab.answers import Answer, Question, Verdict, answer_each
from labkit.lab.evidence import ratio_text, significant, with_interval
from labkit.lab.trends import trends_answer
from labkit.lab.units import format_seconds, format_share, join_words
from labkit.nn.transformer import SIZES
from labkit.studies.kernels import analysis, trends
from labkit.studies.kernels.analysis import BOTH, FORWARD
from labkit.studies.kernels.worker import INFERENCE, STEP

CLOCK = Question(
    "profiler_and_clock",
    "What does a forward pass come to by the profiler and by the clock, and why do the two differ?",
)
LARGEST = Question(
    "largest_operator",
    "Which operator or kernel takes most time, how often is it called, and is it the same with the backward pass?",
)
BESIDE = Question("beside_matmul", "What besides matrix multiplication takes a share worth naming?")
SHARE = Question(
    "matmul_share", "Is the share of matrix multiplication smaller in a full AdamW step than in inference?"
)
SOFTMAX = Question(
    "softmax_in_attention",
    "Inside attention, what time does the softmax take next to the matrix products, and what FLOPs?",
)
PUBLISHED = Question("published_trends", "Do the published observations hold on this machine?")
QUESTIONS = (CLOCK, LARGEST, BESIDE, SHARE, SOFTMAX, PUBLISHED)

# A share is worth naming if its whole interval is above this.
WORTH_NAMING = 0.05


def answer_all(frame: pd.DataFrame, coverage: pd.DataFrame) -> list[Answer]:
    """An answer to every question; a question whose rows are missing says so."""
    finders = {
        CLOCK: profiler_and_clock,
        LARGEST: largest_operator,
        BESIDE: beside_matmul,
        SHARE: matmul_share,
        SOFTMAX: softmax_in_attention,
        PUBLISHED: published_trends,
    }
    return answer_each(finders, frame, coverage)


def profiler_and_clock(frame: pd.DataFrame) -> Answer | None:
    table = analysis.against_clock(frame)
    table = table[table["mode"] == INFERENCE]
    if table.empty:
        return None
    sentences = []
    for (device, model), group in _ends(table).groupby(["device", "model"], sort=False):
        rows = {row["measure"]: row for _, row in group.iterrows()}
        if {"profiled_s", "events_s"} <= set(rows):
            sentences += _two_totals(f"{model} on {device}", rows["profiled_s"], rows["events_s"], device == "cuda")
    return Answer(CLOCK, "measured", " ".join(sentences), figure="clock_and_profiler") if sentences else None


def _ends(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of each device's smallest and largest model, which an answer tells; figures and tables have all."""
    size = table["model"].map(lambda model: n_parameters(SIZES[model]))
    by_device = size.groupby(table["device"])
    return table[(size == by_device.transform("min")) | (size == by_device.transform("max"))]


def _two_totals(where: str, profiled: pd.Series, events: pd.Series, on_gpu: bool) -> list[str]:
    """The figures of one model, and what the intervals allow to say of their difference."""
    times = {name: format_seconds(profiled[name]) for name in ("clock_s", "profiled_s", "events_s", "host_s")}
    what = "kernels add up" if on_gpu else "operators, and Python between them, add up"
    first = (
        f"{where}: {times['clock_s']} by the clock; the profiler's {what} to {times['events_s']}, "
        f"{ratio_text(events)} of that."
    )
    if profiled["verdict"] == "slower":
        each = format_seconds((profiled["profiled_s"] - profiled["clock_s"]) / profiled["recorded"])
        recording = (
            f"With the profiler on, the clock shows {ratio_text(profiled)} times as much: recording "
            f"{profiled['recorded']:.0f} events costs about {each} each."
        )
    elif profiled["verdict"] == "faster":
        recording = f"With the profiler on, the clock shows less, {ratio_text(profiled)}: more than recording differs."
    else:
        recording = f"That the profiler slows the pass is not shown ({ratio_text(profiled)} times the clock's time)."
    covered = events["events_s"] / events["profiled_s"]
    rest = f"Under the profiler, its events cover {format_share(covered)} of the clock's time"
    if on_gpu:
        rest += f"; in the rest no kernel runs (the host is in the pass for {times['host_s']})"
    return [first, recording, f"{rest}."]


def largest_operator(frame: pd.DataFrame) -> Answer | None:
    table = analysis.operators(frame)
    table = table[table["mode"].isin([FORWARD, BOTH])]
    if table.empty:
        return None
    sentences = []
    for (device, model), group in _ends(table).groupby(["device", "model"], sort=False):
        parts, names = [], []
        for mode, of_mode in group.groupby("mode", sort=False):
            ranked = of_mode.sort_values("self_s", ascending=False)
            names.append(ranked["operator"].iloc[0])
            parts.append(f"{mode}, {_leader(ranked)}")
        both = " The same operator leads in both." if len(names) == 2 and len(set(names)) == 1 else ""
        sentences.append(f"{model} on {device}: {'; '.join(parts)}.{both}")
    return Answer(LARGEST, "measured", " ".join(sentences), more_figures=("timeline",))


def _leader(ranked: pd.DataFrame) -> str:
    """The largest operator, its calls and share; and the runner-up, where chance could have put it first."""
    first = ranked.iloc[0]
    text = (
        f"{first['operator']} takes {with_interval(first, 'self_s')} in {first['calls']:.0f} calls, "
        f"{first['share_percent']:.0f} % of all"
    )
    if len(ranked) > 1 and not first["low"] > ranked["high"].iloc[1]:
        text += f" (not shown to be more than {ranked['operator'].iloc[1]})"
    return text


def beside_matmul(frame: pd.DataFrame) -> Answer | None:
    table = analysis.shares(frame)
    table = table[table["mode"].isin([FORWARD, STEP])]
    if table.empty:
        return None
    others = table[table["family"] != "matmul"]
    worth = others[others["low"] > WORTH_NAMING]
    sentences = []
    for (device, model, mode), _ in _ends(table).groupby(["device", "model", "mode"], sort=False):
        here = worth[(worth["device"] == device) & (worth["model"] == model) & (worth["mode"] == mode)]
        named = [f"{row['family']} {_percent(row)}" for _, row in here.sort_values("share", ascending=False).iterrows()]
        what = join_words(named) if named else f"nothing is shown to be above {format_share(WORTH_NAMING)}"
        sentences.append(f"{model} on {device}, {mode}: {what}.")
    if (table["low"].isna()).all():
        sentences.append("Too few passes for intervals.")
    verdict: Verdict = "measured" if len(worth) else "no difference shown"
    return Answer(BESIDE, verdict, " ".join(sentences), figure="families")


def _percent(row: pd.Series) -> str:
    return with_interval(row, "share", format_share)


def matmul_share(frame: pd.DataFrame) -> Answer | None:
    ratios = analysis.step_against_inference(frame)
    table = analysis.shares(frame).set_index(["device", "model", "mode", "family"])
    if ratios.empty:
        return None
    smaller, larger = significant(ratios)
    sentences = []
    for _, row in ratios.iterrows():
        where = (row["device"], row["model"])
        inference, step = (table.loc[(*where, mode, "matmul")] for mode in (INFERENCE, STEP))
        told = {"faster": "smaller", "slower": "larger"}.get(row["verdict"], "not shown to be another")
        sentences.append(
            f"{row['model']} on {row['device']}: {_percent(inference)} of inference and {_percent(step)} of a full "
            f"step, {told} ({ratio_text(row)})."
        )
    verdict: Verdict = "no difference shown"
    if len(smaller) or len(larger):
        verdict = "mixed" if len(smaller) and len(larger) else "yes" if len(smaller) else "no"
    return Answer(SHARE, verdict, " ".join(sentences), figure="matmul_share")


def softmax_in_attention(frame: pd.DataFrame) -> Answer | None:
    table = analysis.softmax_against_products(frame)
    table = judged(table[table["mode"] == INFERENCE])
    if table[table["part"] == "softmax"].empty:
        return None
    sentences = []
    for (device, model), group in _ends(table).groupby(["device", "model"], sort=False):
        parts = {row["part"]: row for _, row in group.iterrows()}
        if "softmax" not in parts:
            continue
        row = parts["softmax"]
        words = {"faster": "less", "slower": "more"}.get(row["verdict"])
        told = f"shown to be {words}" if words else "no difference shown"
        sentences.append(
            f"{model} on {device}: the softmax takes {ratio_text(row)} times the time of the two matrix products "
            f"({told}), with {row['flop_ratio']:.3f} times their FLOPs."
        )
        if "scale and mask" in parts:
            sentences.append(
                f"Scaling and masking the scores takes {ratio_text(parts['scale and mask'])} times theirs."
            )
    return Answer(SOFTMAX, "measured", " ".join(sentences), figure="attention")


def published_trends(frame: pd.DataFrame) -> Answer | None:
    return trends_answer(PUBLISHED, trends.published_trends(frame), "families")
