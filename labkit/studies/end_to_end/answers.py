"""What an end-to-end run says: one answer to each question, nothing the intervals do not show."""

from collections.abc import Hashable, Iterator
from typing import Any

import pandas as pd

from labkit.lab.answers import Answer, Question, Verdict, answer_each
from labkit.lab.evidence import (
    no_times,
    ratio_text,
    ratios_text,
    significant,
    span_text,
    verdict_of,
    with_interval,
    wrong_rows,
)
from labkit.lab.trends import Trend, trends_answer
from labkit.lab.units import counted, format_seconds, join_words
from labkit.studies.end_to_end import analysis

STEP_TIMES = Question(
    "step_times", "How long do forward, backward and optimizer step take, and how large is the spread?"
)
WARMUP = Question("warmup", "Do the first steps of a process change a mean, and how many should not count?")
PREDICTED = Question("predicted", "Does a count of FLOPs and bytes predict the times?")
COMPILE = Question("compile", "Does torch.compile of the whole model pay, and after how many steps?", "compile")
PUBLISHED = Question("published_trends", "Do the published trends hold on this machine?")
QUESTIONS = (STEP_TIMES, WARMUP, PREDICTED, COMPILE, PUBLISHED)

# A count of operations leaves out launches, memory traffic and small shapes: within a factor of two it is a guide.
CLOSE = (0.5, 2.0)
# Published: backward over forward is 2.06; two matrix products for one, give or take what is not a product.
TWICE = (1.5, 2.5)
TOLD = ("forward", "backward", "optimizer", "step")
SMALL_SPREAD_PERCENT = 2.0  # published: 1.7 of 517 ms


def answer_all(frame: pd.DataFrame, coverage: pd.DataFrame) -> list[Answer]:
    """An answer to every question; a question whose rows are missing says so."""
    finders = {
        STEP_TIMES: step_times,
        WARMUP: warmup,
        PREDICTED: predicted,
        COMPILE: compiling,
        PUBLISHED: published_trends,
    }
    return answer_each(finders, frame, coverage, "no row of this run holds the times it needs")


def step_times(frame: pd.DataFrame) -> Answer | None:
    table, bad = analysis.phases(frame), _wrong(frame, "phases")
    if table.empty:
        return Answer(STEP_TIMES, "not measured", bad) if bad else None
    sentences = [bad] if bad else []
    for key, of_model in _smallest_and_largest(table):
        parts = [f"{row['phase']} {with_interval(row)}" for _, row in of_model.iterrows() if row["phase"] in TOLD]
        sentences.append(f"{_model(key, table)}: {join_words(parts)}.")
    spreads = table.dropna(subset="spread_percent")
    if not spreads.empty:
        widest = spreads.loc[spreads["spread_percent"].idxmax()]
        sentences.append(
            f"The standard deviation is {spreads['spread_percent'].median():.1f} % of the mean in the middle and "
            f"{widest['spread_percent']:.0f} % at most ({widest['phase']} of {widest['size']})."
        )
    return Answer(STEP_TIMES, "measured", " ".join(sentences), "phases")


def _smallest_and_largest(table: pd.DataFrame) -> list[tuple[tuple[str, str, str], pd.DataFrame]]:
    """Rows by (device, precision, size), of the smallest and the largest model of each; the tables have the rest."""
    found = []
    for _, rows in table.groupby(["device", "precision"], sort=False):
        sizes = list(dict.fromkeys(rows["size"]))
        for size in dict.fromkeys([sizes[0], sizes[-1]]):
            of_model = rows[rows["size"] == size]
            found.append((tuple(of_model[analysis.MODEL].iloc[0]), of_model))
    return found


def _wrong(frame: pd.DataFrame, sweep: str) -> str:
    """What failed, or did not pass its gate, in a sweep; the latter shouted; "" if all is well."""
    bad = wrong_rows(frame)
    bad = bad[bad["sweep"] == sweep] if len(bad) else bad
    if bad.empty:
        return ""
    reasons = join_words(sorted({f"{row['size']}: {row['gate']}" for row in bad.to_dict("records")}))
    return f"{no_times(bad['gate'])}: {reasons}."


def _model(key: tuple[str, str, str], table: pd.DataFrame) -> str:
    """The model's size, with device and precision only where there are several."""
    device, precision, size = key
    several = [name for name, value in (("device", device), ("precision", precision)) if table[name].nunique() > 1]
    values = {"device": device, "precision": precision}
    return ", ".join([size, *(values[name] for name in several)])


def warmup(frame: pd.DataFrame) -> Answer | None:
    steps, effect = analysis.first_steps(frame), analysis.warmup_effect(frame)
    if steps.empty or effect.empty:
        bad = _wrong(frame, "warmup")
        return Answer(WARMUP, "not measured", bad) if bad else None
    sentences = []
    for key, of_model in _smallest_and_largest(effect):
        first = steps[(steps[analysis.MODEL] == list(key)).all(axis=1)].sort_values("step_number").iloc[0]
        sentences.append(_warming(_model(key, effect), first, of_model))
    earlier = effect[effect["warmup"] < effect["warmup"].max()]
    over_steady = earlier.rename(columns={"over_steady": "ratio"})
    faster, slower = (earlier.loc[rows.index] for rows in significant(over_steady))
    if slower.empty and faster.empty:
        sentences.insert(0, "No number of warm-up steps is shown to change the mean beyond chance.")
        return Answer(WARMUP, "no difference shown", " ".join(sentences), "first_steps")
    if 0 in set(slower["warmup"]):
        sentences.append(
            "The first step pays for what happens once: memory asked from the system, threads started, libraries that "
            "choose their kernels, the optimizer's state made."
        )
    if not faster.empty:
        sentences.append("Early steps are faster than later ones: the machine slows down under load.")
    moved = set(slower["warmup"]) | set(faster["warmup"])
    enough = [n for n in sorted(set(effect["warmup"])) if not any(m >= n for m in moved)]
    needed = int(enough[0])
    first_ones = f"the first {f'{needed} steps' if needed > 1 else 'step'}"
    sentences.insert(0, f"Early steps are shown to change a mean: {first_ones} of a process should not count.")
    advice = f"throw away {first_ones} of a measurement."
    changed = pd.concat([faster, slower]).drop(columns=["low", "high"])
    changed = changed.rename(columns={"over_steady": "ratio", "ratio_low": "low", "ratio_high": "high"})
    evidence = ratios_text(
        changed, lambda row: f"{row['size']}, mean after {counted(row['warmup'], 'warm-up step')} over steady"
    )
    return Answer(WARMUP, "yes", " ".join(sentences), "first_steps", advice, True, evidence)


def _warming(model: str, first: pd.Series, effect: pd.DataFrame) -> str:
    """One model: its first step, ten steps after the most warm-up steps, and the same after fewer."""
    steady = effect.loc[effect["warmup"].idxmax()]
    fewer = []
    for row in effect[effect["warmup"] < steady["warmup"]].to_dict("records"):
        ratio = pd.Series({"ratio": row["over_steady"], "low": row["ratio_low"], "high": row["ratio_high"]})
        fewer.append(f"{ratio_text(ratio)} after {row['warmup']}")
    return (
        f"{model}: the first step of a process takes {with_interval(first)}; a mean of {analysis.STEPS_AVERAGED} steps "
        f"after {steady['warmup']} warm-up steps is {format_seconds(steady['mean_s'])}, with a standard deviation of "
        f"{format_seconds(steady['std_s'])}; over that, {join_words(fewer)}."
    )


def predicted(frame: pd.DataFrame) -> Answer | None:
    table = analysis.predictions(frame)
    if table.empty:
        return None
    sentences = []
    for key, of_model in _smallest_and_largest(table):
        ratios = [f"{row['phase']} {row['measured_over_predicted']:.1f}" for row in of_model.to_dict("records")]
        sentences.append(f"{_model(key, table)}, measured over predicted: {join_words(ratios)}.")
    mfu = table.dropna(subset="mfu_percent")
    if mfu.empty:
        sentences.append("No share of a data-sheet peak is given: none is known here for this device and precision.")
    else:
        best = mfu.loc[mfu["mfu_percent"].idxmax()]
        sentences.append(
            f"At best {best['mfu_percent']:.0f} % of the data-sheet peak is reached "
            f"({best['phase']} of {best['size']})."
        )
    close = table["measured_over_predicted"].between(*CLOSE)
    sentences.insert(0, f"{close.sum()} of {len(table)} times are within a factor of two of their prediction.")
    verdict: Verdict = "yes" if close.all() else "mixed" if close.any() else "no"
    return Answer(PREDICTED, verdict, " ".join(sentences), "predicted")


def compiling(frame: pd.DataFrame) -> Answer | None:
    bad, table = _wrong(frame, "compile"), analysis.compiled_against_eager(frame)
    if table.empty:
        return Answer(COMPILE, "not measured", bad) if bad else None
    sentences = [bad] if bad else []
    for key, of_model in _smallest_and_largest(table):
        parts = [_compiled_text(row) for row in of_model.to_dict("records")]
        sentences.append(f"{_model(key, table)}, compiled over eager: {'; '.join(parts)}.")
    faster, slower = significant(table)
    sentences.insert(
        1 if bad else 0,
        f"The compiled model is shown to be faster in {len(faster)} and slower in {len(slower)} of {len(table)} "
        "comparisons.",
    )
    verdict = verdict_of(faster, slower)
    is_shown = verdict != "no difference shown"
    evidence = ratios_text(table, lambda row: f"{row['phase']} of {row['size']}")
    text, advice = " ".join(sentences), _compile_advice(verdict, faster, slower, table["compile_s"])
    return Answer(COMPILE, verdict, text, "compiled", advice, is_shown, evidence)


def _compiled_text(row: dict[Hashable, Any]) -> str:
    text = f"{row['phase']} {ratio_text(pd.Series(row))}, {format_seconds(row['compile_s'])} to compile"
    if row["worth_it_after"] == row["worth_it_after"]:
        text += f", earned back after {row['worth_it_after']:,.0f} of them"
    return text


def _compile_advice(verdict: Verdict, faster: pd.DataFrame, slower: pd.DataFrame, compile_s: pd.Series) -> str:
    if verdict == "yes":
        steps = faster[faster["phase"] == "step"]
        if steps.empty:
            return "compile for inference; for training no gain is shown."
        worth = steps["worth_it_after"].max()
        return (
            f"compile the model: a training step takes {span_text(steps['ratio'])} of eager's time "
            f"({join_words(list(dict.fromkeys(steps['size'])))}); compiling is earned back after {worth:,.0f} steps."
        )
    if verdict == "no":
        return f"do not compile: it is shown to be slower, {slower['ratio'].max():.2f} times eager's time at worst."
    if verdict == "mixed":
        where = join_words([f"{row['size']}, {row['phase']}" for row in faster.to_dict("records")])
        return f"compile only where it was shown to help ({where})."
    return f"stay with eager: no gain is shown, and compiling takes {span_text(compile_s, format_seconds)}."


def published_trends(frame: pd.DataFrame) -> Answer | None:
    return trends_answer(
        PUBLISHED,
        [*_backward_twice_forward(frame), *_small_spread(frame), *_compiled_faster(frame)],
        "published_compile",
    )


def _backward_twice_forward(frame: pd.DataFrame) -> Iterator[Trend]:
    """`end_to_end.csv`: backward 347.7 ms, forward 169.1 ms."""
    table = analysis.phases(frame)
    both = [of_model.set_index("phase") for _, of_model in table.groupby(analysis.MODEL)]
    pairs = [(rows.loc["backward"], rows.loc["forward"]) for rows in both if {"backward", "forward"} <= set(rows.index)]
    if pairs:
        bounds = [(b["low"] / f["high"], b["high"] / f["low"]) for b, f in pairs]
        ratios = [b["seconds"] / f["seconds"] for b, f in pairs]
        claim = f"Backward takes about twice as long as forward ({min(ratios):.2f} to {max(ratios):.2f} times here)"
        held = [TWICE[0] <= low and high <= TWICE[1] for low, high in bounds]
        yield Trend.judged(claim, held, [high < TWICE[0] or low > TWICE[1] for low, high in bounds])


def _small_spread(frame: pd.DataFrame) -> Iterator[Trend]:
    """`end_to_end.csv`: the standard deviation of forward + backward is 0.3 % of the mean."""
    table = analysis.phases(frame)
    table = table[table["phase"] == analysis.BOTH].dropna(subset="spread_low")
    if not table.empty:
        seen = span_text(table["spread_percent"], "{:.1f}".format)
        claim = f"The spread of forward and backward is below {SMALL_SPREAD_PERCENT:.0f} % of the mean ({seen} % here)"
        within, beyond = table["spread_high"] < SMALL_SPREAD_PERCENT, table["spread_low"] > SMALL_SPREAD_PERCENT
        yield Trend.judged(claim, within, beyond)


def _compiled_faster(frame: pd.DataFrame) -> Iterator[Trend]:
    """`transformer_compile.csv`: forward and full step are faster compiled, at every size."""
    table = analysis.compiled_against_eager(frame)
    for phase, of_phase in table.groupby("phase"):
        name = {"inference": "Forward alone"}.get(str(phase), "A full step")
        seen = join_words([f"{row['ratio']:.2f} for {row['size']}" for row in of_phase.to_dict("records")])
        claim = f"{name} is faster compiled ({seen})"
        yield Trend.judged(claim, of_phase["verdict"] == "faster", of_phase["verdict"] == "slower")
