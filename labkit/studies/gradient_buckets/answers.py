"""What a gradient-buckets run says: one answer to each question, nothing the intervals do not show."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from labkit.bench.statistics import summarize
from labkit.lab.answers import Answer, Question, Verdict, answer_each
from labkit.lab.evidence import ranks_text, ratio_text, ratios_text, significant, span_text, verdict_of, wrong_rows
from labkit.lab.trends import trends_answer
from labkit.lab.units import format_bytes, format_seconds, join_words
from labkit.studies.gradient_buckets import analysis, model
from labkit.studies.gradient_buckets.analysis import MACHINE, MIB, SETTING
from labkit.studies.gradient_buckets.trends import published_trends

WAITING = Question("waiting", "How long does a training step wait for its gradients?")
BUCKET_SIZE = Question("bucket_size", "Does the bucket size matter, and which one is best?", "bucket_size")
MORE_WORK = Question(
    "batch_and_length", "Does a step wait for a smaller share of its time with larger batches and longer sequences?"
)
MODEL = Question("model", "Does s/(wk) + ko explain the waiting, and is its best bucket the measured one?")
PUBLISHED = Question("published_trends", "Do the published trends hold on this machine?")
QUESTIONS = (WAITING, BUCKET_SIZE, MORE_WORK, MODEL, PUBLISHED)

EXPLAINS_PERCENT = 25.0
"""A fit that leaves half of the waiting times further off than this explains nothing."""
TWOFOLD = 2.0
"""A prediction foretells the waiting if no bucket size misses it by more than this factor."""
FEWEST_NUMBERS = 3
"""Of buckets, to test a formula with two constants."""
ALIKE_PERCENT = 5.0
"""Sizes whose intervals all stay below this difference do not matter; wider ones leave it open."""
SMALL_PERCENT = 3.0
"""Calls that take less than this share of a step are cheap."""


def answer_all(frame: pd.DataFrame, coverage: pd.DataFrame) -> list[Answer]:
    """An answer to every question; a question whose rows are missing says so."""
    finders = {
        WAITING: waiting,
        BUCKET_SIZE: bucket_size,
        MORE_WORK: batch_and_length,
        MODEL: explained,
        PUBLISHED: trends,
    }
    return answer_each(finders, frame, coverage)


def _setting(row: Mapping[str, Any] | pd.Series) -> str:
    return f"batch {row['batch']:.0f}, sequence {row['sequence']:.0f}"


def _size(bucket_mb: float) -> str:
    return format_bytes(bucket_mb * MIB)


def waiting(frame: pd.DataFrame) -> Answer | None:
    table, bad = analysis.overview(frame), wrong_rows(frame)
    sentences = []
    if not bad.empty:
        names = join_words(sorted({str(name) for name in bad.get("alternative", pd.Series(["an all-reduce"]))}))
        sentences.append(f"WRONG GRADIENTS, and therefore no times: {names}.")
    if table.empty:
        return Answer(WAITING, "not measured", " ".join(sentences)) if sentences else None
    steps = analysis.steps(frame)
    for _, of_machine in steps.groupby(MACHINE):
        first = of_machine.iloc[0]
        n_bytes = format_bytes(first["gradient_bytes"])
        parts = [_waits(some) for _, some in of_machine.groupby(SETTING)]
        sentences.append(f"{ranks_text(first)}, {n_bytes} of gradients, over all bucket sizes: {'; '.join(parts)}.")
    if remark := _beside(frame):
        sentences.append(remark)
    return Answer(WAITING, "measured", " ".join(sentences), "waiting")


def _waits(samples: pd.DataFrame) -> str:
    """One setting: medians by bucket size, from the smallest to the largest."""
    medians = samples.groupby("bucket_mb")[["step_s", "waiting_s", "waiting_percent", "exposed_s"]].median()
    text = (
        f"with {_setting(samples.iloc[0])} a step takes {span_text(medians['step_s'], format_seconds)} and waits for "
        f"{span_text(medians['waiting_s'], format_seconds)} of it "
        f"({span_text(medians['waiting_percent'], '{:.0f}'.format)} %)"
    )
    exposed = medians["exposed_s"].dropna()
    if exposed.empty:
        return text
    return f"{text}, and is {span_text(exposed, format_seconds)} longer than one without communication"


def _beside(frame: pd.DataFrame) -> str | None:
    """Where the step is longer by more, or by less, than what it waits for."""
    more, less = analysis.beside_waiting(frame)
    if len(more):
        return (
            f"With buckets of {_sizes(more)} that is {span_text(more['contention_s'], format_seconds)} more than the "
            "waiting: communication, and filling the buckets, slow down the backward pass that they run beside."
        )
    if len(less):
        return (
            f"With buckets of {_sizes(less)} that is {span_text(-less['contention_s'], format_seconds)} less than the "
            "waiting, which is partly waiting for a slower rank."
        )
    return None


def _sizes(table: pd.DataFrame) -> str:
    return join_words([_size(size) for size in sorted(set(table["bucket_mb"]))])


def bucket_size(frame: pd.DataFrame) -> Answer | None:
    ratios = analysis.pairs(frame)
    if ratios.empty:
        return None
    sentences = []
    for row in analysis.spread(frame).to_dict("records"):
        where = f"{ranks_text(row)}, {_setting(row)}"
        sentences.append(f"{where}: the slowest size is {row['spread_percent']:.1f} % above the fastest.")
    if ratios["low"].isna().all():
        sentences.append("Too few repeats for an interval, so that no size is claimed to be better than another.")
    clear, evidence = _clear(ratios), ratios_text(ratios, _place)
    if clear.empty:
        none_differs = f"Of {len(ratios)} comparisons of two sizes, none is shown to differ beyond chance."
        reason = _paid_in_backward(frame) or _calls_are_cheap(frame)
        text = " ".join([none_differs, *sentences, *([f"{reason}."] if reason else [])])
        advice = _keep(ratios)
        return Answer(BUCKET_SIZE, "no difference shown", text, "step", advice, _are_alike(ratios), evidence)
    sentences.insert(0, f"{len(clear)} of {len(ratios)} comparisons of two sizes are shown to differ.")
    extreme = clear.loc[(clear["ratio"] - 1).abs().idxmax()]
    sentences.append(
        f"The largest, with {_setting(extreme)}: a step with {_size(extreme['bucket_mb'])} takes "
        f"{ratio_text(extreme)} of the time of one with {_size(extreme['smaller_mb'])}."
    )
    return Answer(BUCKET_SIZE, "yes", " ".join(sentences), "step", _advice(clear, ratios), True, evidence)


def _place(row: pd.Series) -> str:
    return f"{_size(row['bucket_mb'])} over {_size(row['smaller_mb'])} ({_setting(row)})"


def _clear(ratios: pd.DataFrame) -> pd.DataFrame:
    return ratios[ratios["verdict"] != "no difference shown"]


def _never_slower(clear: pd.DataFrame, ratios: pd.DataFrame) -> list[float]:
    """Sizes that are in no setting shown to be slower than another; `clear` are the differences that count."""
    beaten = set(clear.loc[clear["verdict"] == "slower", "bucket_mb"])
    beaten |= set(clear.loc[clear["verdict"] == "faster", "smaller_mb"])
    return sorted((set(ratios["bucket_mb"]) | set(ratios["smaller_mb"])) - beaten)


def _advice(clear: pd.DataFrame, ratios: pd.DataFrame) -> str:
    best = _never_slower(clear, ratios)
    if not best:
        return "no size is best everywhere: choose by batch and sequence length, from the table."
    beaten = sorted((set(ratios["bucket_mb"]) | set(ratios["smaller_mb"])) - set(best))
    avoid = f"{join_words([_size(size) for size in beaten])} {'is' if len(beaten) == 1 else 'are'} shown to be slower"
    if len(best) == 1:
        return f"buckets of {_size(best[0])}: {avoid}."
    return f"buckets of {join_words([_size(size) for size in best])}, between which no difference is shown; {avoid}."


def _most_percent(ratios: pd.DataFrame) -> float:
    """By how much two sizes differ at most, by the ends of all intervals."""
    return float(100 * max(ratios["high"].max(), 1 / ratios["low"].min()) - 100)


def _are_alike(ratios: pd.DataFrame) -> bool:
    """Whether the intervals show that the size does not matter."""
    return bool(ratios["low"].notna().all()) and _most_percent(ratios) < ALIKE_PERCENT


def _keep(ratios: pd.DataFrame) -> str:
    """What to do where no difference is shown. That it does not matter is said only if all intervals are narrow."""
    if _are_alike(ratios):
        most = _most_percent(ratios)
        return f"it does not matter here: by all intervals, no two sizes differ by more than {most:.1f} %."
    return "keep the size you have: none is shown to be better."


def _paid_in_backward(frame: pd.DataFrame) -> str | None:
    """Where a size is shown to wait less than another, and backward beside its communication to be slower instead."""
    clear = _clear(analysis.pairs(frame, "waiting_s"))
    if clear.empty:
        return None
    clearest = clear.loc[np.log(clear["ratio"]).abs().idxmax()]
    short, long = clearest["bucket_mb"], clearest["smaller_mb"]
    if clearest["ratio"] > 1:
        short, long = long, short
    steps = analysis.steps(frame)
    here = steps[(steps[SETTING] == clearest[SETTING]).all(axis=1)]
    by_size = here.pivot_table(index="repeat", columns="bucket_mb", values=["waiting_s", "contention_s"])
    if "contention_s" not in by_size:
        return None
    more_contention = by_size["contention_s", short] - by_size["contention_s", long]
    if not summarize(more_contention).low > 0:
        return None
    medians = by_size.median().map(format_seconds)
    return (
        f"What a step does not wait for, its backward pass pays: with {_setting(clearest)}, buckets of {_size(short)} "
        f"wait for {medians['waiting_s', short]} and slow the rest of the step by {medians['contention_s', short]}, "
        f"those of {_size(long)} wait for {medians['waiting_s', long]} and slow it by {medians['contention_s', long]}"
    )


def _calls_are_cheap(frame: pd.DataFrame) -> str | None:
    """By the time of a single small all-reduce, the most calls are a small part of a step."""
    before, steps = model.predicted(frame), analysis.by_bucket(frame, "step_s")
    calls = [
        (100 * before[key].alpha_s * row["buckets"] / row["step_s"], row["buckets"])
        for row in steps.to_dict("records")
        if (key := tuple(row[name] for name in MACHINE)) in before
    ]
    if not calls or (most := max(calls))[0] > SMALL_PERCENT:
        return None
    return (
        "The bytes stay the same and calls are cheap: by the time of a single small all-reduce, "
        f"the {most[1]} calls of the smallest buckets are {most[0]:.1f} % of a step"
    )


def batch_and_length(frame: pd.DataFrame) -> Answer | None:
    table = analysis.with_more_work(frame)
    if table.empty:
        return None
    sentences = []
    shares = analysis.by_bucket(frame, "waiting_percent")
    for _, some in shares.groupby(MACHINE):
        medians = some.groupby(["batch", "sequence"])["waiting_percent"]
        parts = [
            f"{span_text(values, '{:.0f}'.format)} % with batch {batch}, sequence {sequence}"
            for (batch, sequence), values in medians
        ]
        sentences.append(f"{ranks_text(some.iloc[0])}: a step waits for {join_words(parts)}.")
    falls, rises = significant(table)
    sentences.insert(
        0,
        f"In {len(falls)} of {len(table)} comparisons the share is shown to fall with more tokens, in {len(rises)} to "
        f"rise; the ratio of shares is {span_text(table['ratio'])}.",
    )
    return Answer(MORE_WORK, verdict_of(falls, rises), " ".join(sentences), "share")


def explained(frame: pd.DataFrame) -> Answer | None:
    constants = model.constants(frame)
    if constants.empty:
        return None
    sentences = [_constants_text(row) for row in constants.to_dict("records")]
    table = model.against_measured(frame)
    ratios = table["measured_over_predicted"].dropna()
    if not ratios.empty:
        sentences.insert(0, f"Measured waiting is {span_text(ratios)} times the predicted one.")
    largest = table.loc[table["buckets"].idxmax()]
    share = float(constants["gradient_bytes"].iloc[0] / largest["buckets"])
    sentences.append(
        f"With {largest['buckets']} buckets the last one, which nothing can hide, holds "
        f"{format_bytes(largest['last_bucket_bytes'])}, and {format_bytes(share)} in the model."
    )
    held, text = _best_held(frame, table)
    sentences.append(text)
    if held and _clear(analysis.pairs(frame)).empty:
        sentences.append("That is the waiting alone: of the whole step, no size is shown to be better than another.")
    if table.groupby(MACHINE)["buckets"].nunique().min() < FEWEST_NUMBERS:
        sentences.append("Fewer than three numbers of buckets cannot test a formula with two constants.")
        return Answer(MODEL, "measured", " ".join(sentences), "model")
    fits = constants.loc[constants["model"] == model.FITTED, "median_error_percent"]
    explains = not fits.empty and bool((fits <= EXPLAINS_PERCENT).all())
    foretold = bool(ratios.between(1 / TWOFOLD, TWOFOLD).all()) if len(ratios) else explains
    return Answer(MODEL, _model_verdict(held, explains, foretold), " ".join(sentences), "model")


def _model_verdict(held: bool | None, explains: bool, foretold: bool) -> Verdict:
    if held is None:
        return "no difference shown" if explains else "no"
    kept = (held, explains, foretold)
    return "yes" if all(kept) else "mixed" if any(kept) else "no"


def _constants_text(row: Mapping[str, Any]) -> str:
    what, best = model.costs_and_best(row)
    if row["model"] == model.PREDICTED:
        return f"{ranks_text(row)}: from single all-reduces, timed first, {what}; the best would be {best}."
    return (
        f"Fitted to the waiting itself, {what}, and {best}; half of the times are within "
        f"{row['median_error_percent']:.0f} % of the fit, the worst is off by {row['largest_error_percent']:.0f} %."
    )


def _best_held(frame: pd.DataFrame, table: pd.DataFrame) -> tuple[bool | None, str]:
    """Is the measured size of which the model predicts the shortest waiting shown to be beaten? None: undecided."""
    expected = table.groupby("bucket_mb")["predicted_s"].mean().dropna()
    if expected.empty:
        return None, "Without single all-reduces there is no prediction."
    size = float(expected.idxmin())
    ratios = analysis.pairs(frame, "waiting_s")
    clear = _clear(ratios)
    start = f"Of the measured sizes it predicts the shortest waiting for {_size(size)}"
    if clear.empty:
        return None, f"{start}; no measured difference in waiting is beyond chance."
    best = _never_slower(clear, ratios)
    names = join_words([_size(other) for other in best])
    left = f"the measurements leave {names} as the shortest" if best else "no size waits least everywhere"
    return size in best, f"{start}; {left}."


def trends(frame: pd.DataFrame) -> Answer | None:
    return trends_answer(PUBLISHED, published_trends(frame), "share")
