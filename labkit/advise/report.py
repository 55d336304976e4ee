"""The answers of `labkit advise` in words: a verdict, a sentence, tables that say their source."""

from collections.abc import Iterator, Sequence

import numpy as np

from labkit.advise.advice import Advice, strategy
from labkit.advise.explain import Cause, Diagnosis, causal_share
from labkit.advise.request import AdviceRequest, flag
from labkit.advise.text import (
    CLEAR,
    Report,
    Section,
    describe_request,
    format_change,
    format_count,
    format_percent,
    memory_text,
    peak_text,
    with_interval,
)
from labkit.lab.units import counted, format_seconds, join_words
from labkit.scaling.prediction import FITS_SHARE, Prediction
from labkit.scaling.published import Neighbor

RECOMPUTED = {"none": "nothing", "selective": "attention", "full": "every layer"}
# A table must fit on a screen; the first stages of a pipeline hold most, so the last are left out.
MAX_ROWS = 6
UNCOUNTED = (
    "Memory counts a training step: no evaluation, no other process on the GPU, no tensors that a"
    " program keeps."
)


def report_advice(request: AdviceRequest, advice: Advice, rows: Sequence[Neighbor]) -> Report:
    """Report the verdict first, then memory, layouts, what would change the answer, its error."""
    # Whether it fits comes before how fast it is: a layout that does not fit has no speed.
    verdict, headline = _advice_verdict(advice)
    sections = [_memory(advice.first)]
    if advice.best:
        sections.append(_best(request, advice))
    if advice.others:
        losers = [
            (strategy(one.layout), str(one.layout), _compare(one, advice)) for one in advice.others
        ]
        headings = ("strategy", "its best", "against the best")
        sections.append(Section("Why the others lose (predicted)", headings, losers))
    sections += [_changes(advice), _nearest(rows)]
    about = describe_request(request.request)
    notes = [*_notes(request, rows, advice.first), UNCOUNTED]
    return Report(verdict, headline, about, sections, notes)


def _advice_verdict(advice: Advice) -> tuple[str, str]:
    first = advice.first
    memory = advice.request.hardware.memory_gib
    remedy = advice.remedy
    if not advice.best:
        least = f"{peak_text(first)} GiB per GPU at least, {FITS_SHARE * memory:.0f} can be used"
        change = f" Change first: {remedy}." if remedy else ""
        return f"No, it does not fit: {least}.", f"Least memory: {first.layout}.{change}"
    step = with_interval(first, float, format_seconds)
    headline = f"Use {first.layout}: {step} per step, {format_percent(first.mfu)} MFU (predicted)."
    fit = f"{peak_text(first)} of {memory:.0f} GiB per GPU"
    if first.has_room:
        return f"Yes, it fits: {fit}.", headline
    if remedy:
        headline += f" Safer: {remedy}."
    if first.fits:
        return f"Only just: {fit}, and steps may become slow.", headline
    risk = format_percent(first.out_of_memory)
    return f"It may fit: {fit}, {risk} risk of running out.", headline


def _memory(first: Prediction) -> Section:
    names = list(first.memory_gib[0])
    rows = [
        (f"{stage} of {len(first.memory_gib)}", *(f"{parts[name]:.1f}" for name in names))
        for stage, parts in enumerate(first.memory_gib[:MAX_ROWS], start=1)
    ]
    title = f"Memory per GPU in GiB: {first.layout} (predicted)"
    return Section(title, ("stage", *names), rows)


def _best(request: AdviceRequest, advice: Advice) -> Section:
    columns = [_column(request, one) for one in advice.best]
    title = f"The best {counted(len(columns), 'layout')}, with 90% intervals (predicted)"
    headings = ("place", *(str(place + 1) for place in range(len(columns))))
    rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
    return Section(title, headings, rows)


def _column(advice_request: AdviceRequest, one: Prediction) -> dict[str, str]:
    """Return a layout's cells by row."""
    request = advice_request.request
    layout = one.layout
    tokens = request.tokens
    steps = advice_request.budget / tokens
    hours = steps * one.step_s / 3600 * request.gpus
    return {
        "arrangement": str(layout),
        "micro-batch x accumulated": f"{layout.micro_batch} x {layout.micro_batches:.0f}",
        "recomputes": RECOMPUTED[layout.recompute],
        "memory": memory_text(one, request.hardware.memory_gib),
        "step": with_interval(one, float, format_seconds),
        "MFU, all scores counted": with_interval(
            one, lambda step_s: one.mfu * one.step_s / step_s, format_percent
        ),
        "MFU, causal half": format_percent(one.mfu * causal_share(request)),
        "tokens per second": with_interval(one, lambda step_s: tokens / step_s, format_count),
        f"days, {format_count(advice_request.budget)} tokens": with_interval(
            one, lambda step_s: steps * step_s / 86400, "{:.3g}".format
        ),
        "GPU-hours": format_count(hours),
    }


def _compare(one: Prediction, advice: Advice) -> str:
    """Return why a layout loses against the best one, in a few words."""
    best = advice.first
    memory = memory_text(one, advice.request.hardware.memory_gib)
    if not one.may_fit:
        return f"does not fit: {memory}"
    if one.is_unstable and not best.is_unstable:
        return f"{memory}: steps become slow so near the limit"
    slower = one.step_s / best.step_s - 1
    change = format_change(slower)
    if abs(slower) < CLEAR:
        return change
    if slower < 0:
        # Ranked below all the same: the ranking prefers what is well within memory and data.
        if one.has_room:
            return f"{change}, but further from published runs"
        return f"{change}, but {memory}"
    # The part of the step that loses most time against the best layout is the reason.
    usual = best.sums_s
    lost = {name: seconds - usual[name] for name, seconds in one.sums_s.items()}
    return f"{change}: {max(lost, key=lost.__getitem__)}"


def _changes(advice: Advice) -> Section:
    base = advice.request.tokens / advice.first.step_s
    rows = []
    for change in advice.changes:
        one = change.prediction
        if one is None:
            rows.append((change.name, "does not fit", "", ""))
            continue
        speed = format_count(change.tokens_per_s)
        # Without a layout that fits there is no speed to compare with.
        if advice.best:
            speed = format_change(change.tokens_per_s / base - 1)
        layout = "the same" if one.layout == advice.first.layout else str(one.layout)
        rows.append((change.name, speed, f"{one.peak_gib:.0f} GiB", layout))
    headings = ("if", "tokens per second", "memory", "best layout then")
    return Section("What would change the answer (predicted)", headings, rows)


def report_diagnosis(request: AdviceRequest, diagnosis: Diagnosis) -> Report:
    """Report the verdict, then possible causes, published runs, and the predicted parts."""
    expected = diagnosis.expected
    sections = []
    if diagnosis.causes:
        title = "Possible causes, each alone and at its worst (predicted)"
        headings = ("cause", "MFU it leaves", "share of the gap", "check")
        causes = [_cause_row(diagnosis, cause) for cause in diagnosis.causes]
        sections.append(Section(title, headings, causes))
    peak = f"{request.request.hardware.peak_tflops:g} TFLOP/s"
    title = f"Your MFU by each way to count it; the dense peak is {peak} (measured by you)"
    counted_as = [(name, f"{100 * mfu:.1f}%") for name, mfu in diagnosis.conventions.items()]
    parts = [
        (name, format_seconds(value), format_percent(value / expected.step_s))
        for name, value in sorted(expected.sums_s.items(), key=lambda part: -part[1])
        if value
    ]
    sections += [
        _nearest(diagnosis.neighbors),
        Section(title, ("counted as", "MFU"), counted_as),
        Section("Parts of the predicted step", ("part", "seconds", "share"), parts),
    ]
    about = f"{describe_request(request.request)}; {expected.layout}"
    notes = list(_notes(request, diagnosis.neighbors, expected))
    return Report(_verdict(diagnosis), _headline(diagnosis), about, sections, notes)


def _verdict(diagnosis: Diagnosis) -> str:
    expected = diagnosis.expected
    low_s, high_s = expected.interval_90
    reached = diagnosis.neighbor_mfu
    other = diagnosis.other_layout
    # In the order of how much a reader can act on: a slow step, a slow layout, a way of counting.
    if diagnosis.step_s > high_s:
        factor = diagnosis.step_s / expected.step_s
        return f"Slower than predicted: the step takes {factor:.1f} times as long."
    if diagnosis.is_slow and reached:
        least, most = (mfu / diagnosis.mfu for mfu in reached)
        return f"Slower than runs like yours: {least:.1f} to {most:.1f} times their time per step."
    if other:
        factor = expected.step_s / other.step_s
        return f"The layout is slow: another one is predicted to be {factor:.1f} times as fast."
    if diagnosis.step_s < low_s:
        share = format_percent(diagnosis.step_s / expected.step_s)
        return f"Faster than predicted: the step takes {share} of the time."
    if diagnosis.convention not in (None, next(iter(diagnosis.conventions))):
        return f"Only the convention differs: {diagnosis.convention}."
    return "As predicted: nothing unusual in this step."


def _headline(diagnosis: Diagnosis) -> str:
    """Say what is measured, predicted, and reached by others."""
    expected = diagnosis.expected
    low, high = expected.interval_mfu
    sentences = [
        f"You reach {100 * diagnosis.mfu:.1f}% MFU ({format_seconds(diagnosis.step_s)} per step)."
        f" Predicted: {100 * expected.mfu:.1f}% [{100 * low:.0f}, {100 * high:.0f}]"
        f" ({format_seconds(expected.step_s)} per step)."
    ]
    if diagnosis.neighbor_mfu:
        least, most = diagnosis.neighbor_mfu
        sentences.append(
            f"Published runs like yours reach {100 * least:.0f} to {100 * most:.0f}% MFU."
        )
    other = diagnosis.other_layout
    if other:
        factor = expected.step_s / other.step_s
        flags = " ".join(map(flag, diagnosis.request.fixed))
        sentences.append(f"Without {flags} a step is {factor:.1f} times as fast: {other.layout}.")
    return " ".join(sentences)


def _cause_row(diagnosis: Diagnosis, cause: Cause) -> tuple[str, ...]:
    left = f"{format_percent(cause.mfu)} or more" if cause.mfu else "any"
    share = diagnosis.share(cause)
    explained = "up to all" if share == 1 else f"up to {format_percent(share)}"
    return cause.name, left, explained, cause.check


def _nearest(rows: Sequence[Neighbor]) -> Section:
    """Return the published runs nearest to the request, and how wrong the prediction of each is."""
    cells = []
    for row in rows:
        run = row.run
        gpus = f"{run.layout.gpus} x {run.hardware.name}"
        mfu = ""
        if np.isfinite(run.mfu):  # not all tables have it
            mfu = format_percent(run.mfu)
        step = format_seconds(run.step_s)
        error = f"{100 * row.error:+.0f}%"
        name = f"{run.table}: {run.model.name}"
        cells.append((name, gpus, run.layout.arrangement, step, mfu, error, f"{row.distance:.2g}"))
    title = "The nearest published runs; a distance of 1 is twice as many GPUs (published)"
    headings = ("published run", "GPUs", "layout", "step", "MFU", "prediction off by", "distance")
    return Section(title, headings, cells)


def _notes(
    request: AdviceRequest, rows: Sequence[Neighbor], prediction: Prediction
) -> Iterator[str]:
    """Return how wrong this may be, its assumptions, and where it extrapolates."""
    errors = np.abs([row.error for row in rows])
    median = format_percent(float(np.median(errors)))
    worst = format_percent(float(errors.max()))
    yield (
        f"How wrong: on the {len(rows)} nearest published runs the median error is {median}, the"
        f" largest {worst}, by constants fitted without them. An interval [ ] holds 90%."
    )
    if request.calibration_runs:
        error = format_percent(request.calibration_error)
        yield f"Calibrated on {request.calibration_runs} runs of yours, explained to {error}."
    if request.assumptions:
        yield f"Assumed: {join_words(list(request.assumptions))}."
    if request.request.framework == "generic":
        yield (
            "No framework named: --framework or --calibrate my_runs.csv (three runs) narrows the"
            " intervals."
        )
    # The verdict has said what the other warnings say.
    yield from (f"Beware: {text}." for text in prediction.warnings if text.startswith("extra"))
