"""What a CIFAR-100 run says: one answer to each question, nothing the intervals do not show."""

from collections.abc import Iterable
from dataclasses import replace

import pandas as pd

from labkit.lab.answers import Answer, Question, Verdict, answer_each
from labkit.lab.evidence import ratio_text, ratios_text, span_text, with_interval, wrong_rows
from labkit.lab.trends import trends_answer
from labkit.lab.units import format_bytes, format_seconds, join_words
from labkit.studies.cifar100 import analysis, samples, trends
from labkit.studies.cifar100.training import TORCH_SYNC

LEARNED = Question("learned", "How well does the net learn, and how much does that depend on the seed?")
SAME = Question(
    "same_training", "Do labkit's wrapper and, where torch's runs, labkit's SyncBatchNorm train as well as torch's?"
)
TIME = Question("time", "Does an epoch take longer with labkit's parts than with torch's?")
MEMORY = Question("memory", "What does each need at its peak?")
SYNC = Question(
    "sync_batchnorm",
    "Does batch norm over all ranks train better than local batch norm, and what does it cost?",
    "batch_norm",
)
PUBLISHED = Question("published_trends", "Do the published trends hold on this machine?")
QUESTIONS = (LEARNED, SAME, TIME, MEMORY, SYNC, PUBLISHED)

REFUSED = (
    "torch's SyncBatchNorm refuses CPU tensors: the wrappers are compared with local batch norm on both sides, and "
    "labkit's SyncBatchNorm with one process that has the whole batch, before training."
)


ONE_WRAPPER = "a gain is shown with one wrapper only"


def answer_all(frame: pd.DataFrame, coverage: pd.DataFrame) -> list[Answer]:
    """An answer to every question; a question whose rows are missing says so."""
    finders = {
        LEARNED: learned,
        SAME: same_training,
        TIME: time,
        MEMORY: memory,
        SYNC: sync_batchnorm,
        PUBLISHED: published_trends,
    }
    return answer_each(finders, frame, coverage)


def learned(frame: pd.DataFrame) -> Answer | None:
    table, about = analysis.outcome(frame), samples.setting(frame)
    wrong = wrong_rows(frame)
    if about is None and wrong.empty:
        return None
    sentences = []
    if len(wrong):
        names = join_words(sorted(set(wrong["implementation"].dropna())))
        sentences.append(f"WRONG WEIGHTS after the first updates, and therefore no training, by {names}.")
    if about is None:
        return Answer(LEARNED, "not measured", " ".join(sentences))
    setting = (
        f"Trained on {about['trained']:.0f} images: {about['source']}. Of {about['classes']:.0f} classes a guess is "
        f"right in {100 / about['classes']:.0f} %."
    )
    lost = [
        f"{row['diverged']:.0f} of {row['diverged'] + row['seeds']:.0f} seeds with {row['implementation']}"
        for row in table[table["diverged"] > 0].to_dict("records")
    ]
    if lost:
        sentences.append(f"DIVERGED, with a loss that is not finite: {join_words(lost)}.")
    table = table[table["seeds"] > 0]
    if len(table):
        parts = [
            f"{row['implementation']} {_percent_with_interval(row)}, {_spread(row)}" for row in table.to_dict("records")
        ]
        images = "CIFAR-100" if about["dataset"] == "cifar100" else f"{about['dataset']}, not CIFAR-100,"
        when = f"after epoch {table['epoch'].max():.0f}, over {_seeds(table)}"
        sentences.append(f"Accuracy on {images} {when}: {'; '.join(parts)}.")
    return Answer(LEARNED, "measured", " ".join([*sentences, setting]), "accuracy")


def _seeds(table: pd.DataFrame) -> str:
    return f"{span_text(table['seeds'], '{:.0f}'.format)} seeds"


def _percent(value: float) -> str:
    return f"{value:.1f} %"


def _percent_with_interval(row: dict[str, float]) -> str:
    if row["low"] != row["low"]:
        return f"{_percent(row['accuracy_percent'])} (too few seeds for an interval)"
    return f"{_percent(row['accuracy_percent'])} [{_percent(row['low'])}, {_percent(row['high'])}]"


def _spread(row: dict[str, float]) -> str:
    return f"seeds from {_percent(row['smallest'])} to {_percent(row['largest'])}"


def same_training(frame: pd.DataFrame) -> Answer | None:
    table, lost = analysis.differences(frame, analysis.SAME), analysis.divergences(frame, analysis.SAME)
    if lost.empty:
        return None
    sentences = [*_lost_text(lost), *(_compared(name, other, some) for (name, other), some in _pairs(table))]
    if TORCH_SYNC not in set(lost["than"]) and (frame["device"] == "cpu").all():
        sentences.append(REFUSED)
    verdict = _sameness([*table["verdict"], *lost.loc[lost["verdict"] != "none", "verdict"]])
    return Answer(SAME, verdict, " ".join(sentences), "differences")


def _lost_text(lost: pd.DataFrame) -> list[str]:
    """Of each pair that lost a seed: how many with which, and what that shows."""
    says = {"higher": "more often with the first", "lower": "less often with the first"}
    return [
        f"DIVERGED, with a loss that is not finite: of {row['seeds']} seeds {row['diverged']} with "
        f"{row['implementation']} and {row['than_diverged']} with {row['than']}, "
        f"{says.get(row['verdict'], 'which shows no difference')}."
        for row in lost[lost["verdict"] != "none"].to_dict("records")
    ]


def _pairs(table: pd.DataFrame) -> Iterable[tuple[tuple[str, str], pd.DataFrame]]:
    for key, some in table.groupby(["implementation", "than"], sort=False):
        yield (str(key[0]), str(key[1])), some


def _sameness(verdicts: Iterable[str]) -> Verdict:
    """Yes if everything is shown to be the same within its margin, no if anything is shown to be beyond it."""
    found = set(verdicts)
    if found & {"higher", "lower"}:
        return "no"
    return "yes" if found == {"the same"} else "no difference shown"


def _compared(name: str, other: str, some: pd.DataFrame) -> str:
    """One pair: every metric with its interval and what it shows."""
    parts = []
    for row in some.to_dict("records"):
        unit = analysis.UNITS[row["metric"]]
        text = f"{row['metric']} {_signed(row['difference'])} {unit}"
        if row["low"] != row["low"]:
            parts.append(f"{text} (too few seeds for an interval)")
            continue
        says = {
            "the same": f"the same within {row['margin']:g} {unit.removesuffix('s') if row['margin'] == 1 else unit}",
            "diverged": "of the seeds that did not diverge, and so without a verdict",
            "not shown": f"neither shown to be within {row['margin']:g} nor beyond",
        }.get(row["verdict"], f"{row['verdict']} by more than {row['margin']:g}")
        parts.append(f"{text} [{_signed(row['low'])}, {_signed(row['high'])}], {says}")
    return f"{name} less {other}, seed by seed: {'; '.join(parts)}."


def _signed(value: float) -> str:
    return f"{value:+.2f}" if round(value, 2) else "0.00"


def time(frame: pd.DataFrame) -> Answer | None:
    table, ratios = analysis.time_summary(frame), analysis.time_ratios(frame, analysis.SAME)
    if table.empty:
        return None
    times = [f"{row['implementation']} {with_interval(pd.Series(row), 'epoch_s')}" for row in table.to_dict("records")]
    text = f"An epoch takes, by implementation: {'; '.join(times)}."
    if ratios.empty:
        return Answer(TIME, "measured", text, "time")
    for row in ratios.to_dict("records"):
        text += f" {row['implementation']} over {row['over']}: {ratio_text(pd.Series(row))}."
    slower, faster = (list(ratios.loc[ratios["verdict"] == verdict, "over"]) for verdict in ("slower", "faster"))
    verdict: Verdict = "mixed" if slower and faster else "yes" if slower else "no" if faster else "no difference shown"
    return Answer(TIME, verdict, text, "time")


def memory(frame: pd.DataFrame) -> Answer | None:
    table = analysis.memory(frame)
    if table.empty:
        return None
    parts = []
    for row in table.to_dict("records"):
        ratio = row["over_torch"]
        beside = (
            f" ({ratio:.3f} of torch's)" if ratio == ratio and not row["implementation"].startswith("torch") else ""
        )
        parts.append(f"{row['implementation']} {format_bytes(row['peak_bytes'])}{beside}")
    text = f"At the peak of an update, model, gradients and momentum included: {join_words(parts)}."
    return Answer(MEMORY, "measured", text, "memory")


def sync_batchnorm(frame: pd.DataFrame) -> Answer | None:
    table, ratios = analysis.differences(frame, analysis.SYNC), analysis.time_ratios(frame, analysis.SYNC)
    lost = analysis.divergences(frame, analysis.SYNC)
    if lost.empty:
        return None
    sentences = [*_lost_text(lost), *(_compared(name, other, some) for (name, other), some in _pairs(table))]
    costs = analysis.synchronizing(frame).set_index("implementation")
    for row in ratios.to_dict("records"):
        text = f"An epoch of {row['implementation']} takes {ratio_text(pd.Series(row))} of one of {row['over']}"
        if row["implementation"] in costs.index:
            cost = costs.loc[row["implementation"]]
            text += (
                f", {format_seconds(cost['extra_s'])} more; the collectives alone should take "
                f"{format_seconds(cost['predicted_s'])}"
            )
        sentences.append(f"{text}.")
    better, worse = _shown(table, lost, 1), _shown(table, lost, -1)
    verdict: Verdict = "mixed" if better and worse else "yes" if better else "no" if worse else "no difference shown"
    is_whole = set(lost["verdict"]) == {"none"}
    if is_whole and set(table["verdict"]) == {"the same"}:
        verdict = "no"
    advice = _advice(frame, table, lost, better, worse, ratios) if is_whole or better or worse else None
    evidence = ratios_text(ratios, lambda row: f"an epoch of {row['implementation']} over {row['over']}")
    advised = advice is not None and bool(better or worse)
    return Answer(SYNC, verdict, " ".join(sentences), "synchronized", advice, advised, evidence)


def _shown(table: pd.DataFrame, lost: pd.DataFrame, sign: int) -> list[str]:
    """What synchronizing is shown to better (1) or worsen (-1), by more than the margin and with every wrapper."""
    found = []
    for metric, good in (("accuracy", 1), ("validation loss", -1)):
        wanted = "higher" if sign == good else "lower"
        verdicts = table.loc[table["metric"] == metric, "verdict"]
        if len(verdicts) == len(lost) > 0 and (verdicts == wanted).all():
            found.append(f"a {wanted} {metric}")
    wanted = "lower" if sign == 1 else "higher"
    if len(lost) and (lost["verdict"] == wanted).all():
        found.append(f"a {wanted} number of trainings that diverge")
    return found


def _advice(
    frame: pd.DataFrame,
    table: pd.DataFrame,
    lost: pd.DataFrame,
    better: list[str],
    worse: list[str],
    ratios: pd.DataFrame,
) -> str | None:
    about = samples.setting(frame)
    if about is None or ratios.empty or table["low"].isna().any() or (better and worse):
        return None
    here = f"{about['batch']:.0f} images a rank ({about['dataset']})"
    slower = f", for {span_text(ratios['ratio'])} of the time" if (ratios["verdict"] == "slower").all() else ""
    if better:
        return f"synchronize batch norm with {here}: {join_words(better)} {_is(better)} shown{slower}."
    if _is_bettered(table, lost):
        return None if worse else f"whether to synchronize batch norm with {here} is open: {ONE_WRAPPER}."
    reason = (
        f"{join_words(worse)} with synchronizing {_is(worse)} shown" if worse else "no gain with synchronizing is shown"
    )
    saved = f", and an epoch with it takes {span_text(ratios['ratio'])} of the time" if slower else ""
    return f"local batch norm does with {here}: {reason}{saved}."


def _is_bettered(table: pd.DataFrame, lost: pd.DataFrame) -> bool:
    """Whether synchronizing is shown to better anything with any wrapper."""
    good = {("accuracy", "higher"), ("validation loss", "lower")}
    return bool(good & set(zip(table["metric"], table["verdict"], strict=True))) or "lower" in set(lost["verdict"])


def _is(things: list[str]) -> str:
    return "is" if len(things) == 1 else "are"


def published_trends(frame: pd.DataFrame) -> Answer | None:
    answer = trends_answer(PUBLISHED, trends.published_trends(frame), "published")
    return answer and replace(answer, text=f"{answer.text} {trends.reached(frame)}")
