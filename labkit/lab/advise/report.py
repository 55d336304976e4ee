"""Advice on a training: a verdict, a sentence, tables.

`text.py` has the parts of a report and its numbers in words.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from labkit.lab.advise.request import AdviceRequest
from labkit.lab.advise.text import (
    CLEAR,
    PREDICTED,
    PUBLISHED,
    RECOMPUTED,
    YOURS,
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
from labkit.lab.units import counted, format_bytes, format_seconds, join_words
from labkit.scaling.advice import Advice, Change, RunnerUp, bucket_bytes
from labkit.scaling.prediction import FITS_SHARE, Prediction
from labkit.scaling.published import Neighbor
from labkit.scaling.runs import RECOMPUTE
from labkit.scaling.slowdown_causes import causal_share


def report_advice(request: AdviceRequest, advice: Advice, rows: Sequence[Neighbor]) -> Report:
    """Report the verdict first, then memory, layouts, and what would change the answer.

    And why others lose, and how wrong it may be.
    """
    verdict, headline = _advice_verdict(advice)
    sections = [_memory(advice.first)]
    if advice.remedies:
        sections.append(_changes(advice, advice.remedies, "What to change first", "change"))
    if advice.best:
        sections.append(_best(request, advice))
        losers = [
            (one.strategy, str(one.prediction.layout), _why(one, advice))
            for one in advice.runners_up
        ]
        if losers:
            headings = ("strategy", "its best", "against the best")
            sections.append(Section("Why the others lose", PREDICTED, headings, losers))
        sections.append(_changes(advice, advice.changes, "What would change the answer", "if"))
    remarks = list(notes(request, rows, advice.first.warnings))
    return Report(
        verdict,
        headline,
        describe_request(request.request),
        [*sections, nearest_section(rows)],
        remarks,
    )


def number_steps(advice: Advice) -> dict[str, Prediction]:
    """Return the steps of the best layouts, numbered.

    If none fits, of the one with the least memory.
    """
    best = advice.best or [advice.first]
    return {f"{place}: {one.layout}": one for place, one in enumerate(best, start=1)}


def _advice_verdict(advice: Advice) -> tuple[str, str]:
    first = advice.first
    memory = advice.request.usable.memory_gib
    remedy = advice.remedies[0].name if advice.remedies else None
    if not advice.best:
        least = f"{peak_text(first)} GiB per GPU at least, {FITS_SHARE * memory:.0f} can be used"
        change = f" Change first: {remedy}." if remedy else ""
        return f"No, it does not fit: {least}.", f"Least memory: {first.layout}.{change}"
    step = with_interval(first, float, format_seconds)
    headline = (
        f"Use {first.layout}: {step} per step, {format_percent(first.mfu)} MFU ({PREDICTED})."
    )
    fit = f"{peak_text(first)} of {memory:.0f} GiB per GPU"
    if first.has_room:
        return f"Yes, it fits: {fit}.", headline
    safer = f" Safer: {remedy}." if remedy else ""
    if first.fits:
        return f"Only just: {fit}, and steps may become slow.", headline + safer
    risk = format_percent(first.out_of_memory)
    return f"It may fit: {fit}, {risk} risk of running out.", headline + safer


def _memory(first: Prediction) -> Section:
    names = list(first.memory_gib[0])
    large = names[:4]
    small = names[4:]
    rows = []
    for stage, parts in enumerate(first.memory_gib, start=1):
        values = [
            *(parts[name] for name in large),
            sum(parts[name] for name in small),
            sum(parts.values()),
        ]
        rows.append((f"{stage} of {len(first.memory_gib)}", *(f"{value:.1f}" for value in values)))
    title = f"Memory per GPU in GiB: {first.layout}"
    return Section(title, PREDICTED, ("stage", *large, "logits, buffers", "all"), rows)


def _best(request: AdviceRequest, advice: Advice) -> Section:
    columns = [_column(request, one) for one in advice.best]
    title = f"The best {counted(len(columns), 'layout')}, with 90% intervals"
    headings = ("place", *(str(place + 1) for place in range(len(columns))))
    rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
    return Section(title, PREDICTED, headings, rows, None, number_steps(advice))


def _column(advice_request: AdviceRequest, one: Prediction) -> dict[str, str]:
    """Return a layout's cells by row."""
    request = advice_request.request
    layout = one.layout
    budget = advice_request.budget
    bucket = bucket_bytes(request.run(layout), request.constants)
    tokens = request.tokens
    days = budget / tokens / 86400
    days_text = with_interval(one, lambda step_s: days * step_s, "{:.3g}".format)
    hours_text = format_count(24 * days * request.gpus * one.step_s)
    return {
        "arrangement": str(layout),
        "micro-batch x accumulated": f"{layout.micro_batch} x {layout.micro_batches:.0f}",
        "recomputes": RECOMPUTED[layout.recompute],
        "bucket": "none" if bucket is None else format_bytes(bucket),
        "memory": memory_text(one, request.usable.memory_gib),
        "step": with_interval(one, float, format_seconds),
        "MFU, all scores counted": with_interval(
            one, lambda step_s: one.mfu * one.step_s / step_s, format_percent
        ),
        "MFU, causal half": format_percent(one.mfu * causal_share(request)),
        "tokens per second": with_interval(one, lambda step_s: tokens / step_s, format_count),
        "tokens per day": with_interval(one, lambda step_s: 86400 * tokens / step_s, format_count),
        f"days, {format_count(budget)} tokens": days_text,
        "GPU-hours": hours_text,
    }


def _why(runner_up: RunnerUp, advice: Advice) -> str:
    """Return why a layout loses against the best one, in a few words."""
    one = runner_up.prediction
    best = advice.first
    cause = runner_up.cause
    memory = memory_text(one, advice.request.usable.memory_gib)
    if cause == "memory":
        return f"does not fit: {memory}"
    if cause == "unstable":
        return f"{memory}: steps become slow so near the limit"
    slower = one.step_s / best.step_s - 1
    change = format_change(slower)
    if abs(slower) < CLEAR:
        return change
    if slower < 0:
        return f"{change}, but {'further from published runs' if one.has_room else memory}"
    if cause != "compute":
        return f"{change}: {cause}"
    if RECOMPUTE.index(one.layout.recompute) > RECOMPUTE.index(best.layout.recompute):
        return f"{change}: to fit, it recomputes {RECOMPUTED[one.layout.recompute]}"
    return f"{change}: smaller matmuls are slower"


def _changes(advice: Advice, changes: Sequence[Change], title: str, heading: str) -> Section:
    base = advice.request.tokens / advice.first.step_s if advice.best else None
    usual = str(advice.first.layout)
    rows = []
    for change in changes:
        one = change.prediction
        if one is None:
            rows.append((change.name, "does not fit", "", ""))
            continue
        speed = format_count(change.tokens_per_s)
        if base:
            speed = format_change(change.tokens_per_s / base - 1)
        layout = str(one.layout)
        if layout == usual:
            layout = "the same"
        rows.append((change.name, speed, f"{one.peak_gib:.0f} GiB", layout))
    return Section(
        title, PREDICTED, (heading, "tokens per second", "memory", "best layout then"), rows
    )


def nearest_section(rows: Sequence[Neighbor]) -> Section:
    """Return the published rows nearest to the request, and how wrong the prediction of each is."""
    cells = [
        (
            f"{row.run.table}: {row.run.model.name}",
            f"{row.run.layout.gpus} x {row.run.hardware.name}",
            row.run.layout.arrangement,
            format_seconds(row.run.step_s),
            format_percent(row.run.mfu) if np.isfinite(row.run.mfu) else "",
            f"{100 * row.error:+.0f}%",
            f"{row.distance:.2g}",
        )
        for row in rows
    ]
    headings = ("published row", "GPUs", "layout", "step", "MFU", "predicted, off by", "apart")
    return Section(
        "The nearest published rows; 1 apart is a model twice as large",
        PUBLISHED,
        headings,
        cells,
    )


def notes(
    request: AdviceRequest, rows: Sequence[Neighbor], warnings: Sequence[str]
) -> Iterator[str]:
    """Return how wrong this may be, its assumptions, and where it extrapolates."""
    errors = np.abs([row.error for row in rows])
    median = format_percent(float(np.median(errors)))
    worst = format_percent(float(errors.max()))
    yield (
        f"Predicted: on the {len(rows)} nearest published rows, by constants fitted without them,"
        f" the median error is {median}, the largest {worst}. [ ] holds 90% of such errors."
    )
    if request.calibration_runs:
        error = format_percent(request.calibration_error)
        yield (
            f"Calibrated on {request.calibration_runs} runs of yours ({YOURS}), explained to"
            f" {error}."
        )
    if request.assumptions:
        yield f"Assumed: {join_words(list(request.assumptions))}."
    if request.request.framework == "generic":
        yield (
            "No framework named: --framework or --calibrate my_runs.csv (three runs) narrows the"
            " intervals."
        )
    above = ("unstable", "expected to run", "framework")
    yield from (f"Beware: {warning}." for warning in warnings if not warning.startswith(above))
