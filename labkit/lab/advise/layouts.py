"""The advice on a training: whether it fits, the best layouts, why others lose, and what would change the answer."""

from collections.abc import Callable, Iterator, Sequence
from itertools import takewhile

from labkit.lab.advise.report import (
    CLEAR,
    PARTS,
    PREDICTED,
    Report,
    Section,
    Step,
    describe_layout,
    describe_request,
    format_change,
    format_count,
    format_percent,
    list_notes,
    nearest_section,
    predicted_step,
)
from labkit.lab.advise.request import AdviceRequest
from labkit.lab.units import counted, format_bytes, format_seconds
from labkit.scaling.advice import Advice, Change, bucket_bytes, has_room
from labkit.scaling.layout import RECOMPUTE
from labkit.scaling.memory import PARTS as MEMORY
from labkit.scaling.prediction import FITS_SHARE, Prediction
from labkit.scaling.published import PublishedRow

RECOMPUTED = {"none": "nothing", "selective": "attention", "full": "every layer"}
SMALL_MEMORY = ("logits", "buffers", "fragmentation", "runtime")
NEAR = 0.05
"""Predictions that differ less are alike."""
MAX_STAGES, MAX_ROWS = 4, 6
"""Stages of a pipeline, and rows of other tables, on a screen."""


def make_report(request: AdviceRequest, advice: Advice, rows: Sequence[PublishedRow]) -> Report:
    """Verdict first; then memory, layouts, why others lose, what would change the answer, and how wrong it may be."""
    verdict, headline = _verdict(advice)
    return Report(
        verdict=verdict,
        headline=headline,
        about=describe_request(request.request),
        sections=list(_sections(request, advice, rows)),
        notes=[*_alike(advice.best), *list_notes(request, rows, advice.first.warnings)],
    )


def number_steps(best: Sequence[Prediction]) -> list[Step]:
    """Predicted steps, numbered from the best one."""
    return [predicted_step(f"{place}: {describe_layout(one.layout)}", one) for place, one in enumerate(best, start=1)]


def _verdict(advice: Advice) -> tuple[str, str]:
    first, memory = advice.first, advice.request.usable.memory_gib
    remedy = advice.remedies[0].name if advice.remedies else None
    if not advice.fits:
        return (
            f"No, it does not fit: {first.peak_gib:.0f} GiB per GPU at least, {FITS_SHARE * memory:.0f} can be used.",
            f"The layout with the least memory is {describe_layout(first.layout)}."
            + (f" Change first: {remedy}." if remedy else ""),
        )
    low, high = map(format_seconds, first.interval_90)
    headline = (
        f"Use {describe_layout(first.layout)}: {format_seconds(first.step_s)} per step "
        f"[{low}, {high}], {format_percent(first.mfu)} MFU ({PREDICTED})."
    )
    fit = f"{first.peak_gib:.0f} of {memory:.0f} GiB per GPU"
    if has_room(first):
        return f"Yes, it fits: {fit}.", headline
    risk = format_percent(first.out_of_memory)
    return f"Only just: {fit}, {risk} risk of running out.", headline + (f" Safer: {remedy}." if remedy else "")


def _sections(request: AdviceRequest, advice: Advice, rows: Sequence[PublishedRow]) -> Iterator[Section]:
    yield _memory(advice)
    if advice.remedies:
        yield _changes(advice, advice.remedies, "What to change first", "change")
    if advice.best:
        columns = [_column(request, one) for one in advice.best]
        yield Section(
            f"The best {counted(len(columns), 'layout')}, with 90% intervals",
            PREDICTED,
            ("", *(str(place + 1) for place in range(len(columns)))),
            [(name, *(column[name] for column in columns)) for name in columns[0]],
            note=f"Precision: {request.request.precision}, sums in float32.",
            steps=number_steps(advice.best),
        )
        if advice.runners_up:
            yield _losers(advice)
        yield _changes(advice, advice.changes, "What would change the answer", "if")
    if rows:
        yield nearest_section(rows)


def _memory(advice: Advice) -> Section:
    names = [name for name in MEMORY if name not in SMALL_MEMORY]
    stages = advice.first.memory_gib
    rows = []
    for stage, parts in enumerate(stages, start=1):
        values = [*(parts[name] for name in names), sum(parts[name] for name in SMALL_MEMORY), sum(parts.values())]
        rows.append((f"{stage} of {len(stages)}", *(f"{value:.1f}" for value in values)))
    title = f"Memory per GPU in GiB: {describe_layout(advice.first.layout)}"
    return Section(title, PREDICTED, ("stage", *names, "logits, buffers", "all"), rows, MAX_STAGES)


def _column(advice_request: AdviceRequest, one: Prediction) -> dict[str, str]:
    """A layout's cells by row."""
    request, layout, budget = advice_request.request, one.layout, advice_request.budget
    bucket = bucket_bytes(request.run(layout), request.constants)

    def interval(value: Callable[[float], float], text: Callable[[float], str]) -> str:
        """A quantity of the predicted step in seconds, and of the ends of its interval."""
        low, high = sorted(map(value, one.interval_90))
        return f"{text(value(one.step_s))} [{text(low)}, {text(high)}]"

    return {
        "arrangement": describe_layout(layout),
        "micro-batch x accumulated": f"{layout.micro_batch} x {layout.micro_batches:.0f}",
        "recomputes": RECOMPUTED[layout.recompute],
        "bucket": "none" if bucket is None else format_bytes(bucket),
        "memory": _memory_text(one, request.usable.memory_gib),
        "step": interval(float, format_seconds),
        "MFU": interval(lambda step_s: one.mfu * one.step_s / step_s, format_percent),
        "tokens per second": interval(lambda step_s: request.tokens / step_s, format_count),
        "tokens per day": interval(lambda step_s: 86400 * request.tokens / step_s, format_count),
        f"GPU-hours, {format_count(budget)} tokens": interval(
            lambda step_s: budget / request.tokens * step_s * request.gpus / 3600, format_count
        ),
    }


def _losers(advice: Advice) -> Section:
    memory = advice.request.usable.memory_gib
    rows = [
        (
            one.strategy,
            describe_layout(one.prediction.layout),
            _describe_cause(one.prediction, advice.first, one.cause, memory),
        )
        for one in advice.runners_up
    ]
    return Section("Why the others lose", PREDICTED, ("strategy", "its best", "against the best"), rows, MAX_ROWS)


def _changes(advice: Advice, changes: Sequence[Change], title: str, heading: str) -> Section:
    base = advice.request.tokens / advice.first.step_s if advice.fits else None
    usual = describe_layout(advice.first.layout)
    rows = []
    for change in changes:
        if (one := change.prediction) is None:
            rows.append((change.name, "does not fit", "", ""))
            continue
        speed = format_change(change.tokens_per_s / base - 1) if base else format_count(change.tokens_per_s)
        layout = describe_layout(one.layout)
        rows.append((change.name, speed, f"{one.peak_gib:.0f} GiB", "the same" if layout == usual else layout))
    return Section(title, PREDICTED, (heading, "tokens per second", "memory", "best layout then"), rows, MAX_ROWS)


def _memory_text(one: Prediction, memory_gib: float) -> str:
    """Memory of the fullest GPU, with the risk of running out if there is one."""
    risk = "" if has_room(one) else f", {format_percent(one.out_of_memory)} risk"
    return f"{one.peak_gib:.0f} of {memory_gib:.0f} GiB{risk}"


def _describe_cause(one: Prediction, best: Prediction, cause: str, memory_gib: float) -> str:
    """Why a layout loses against the best one, in a few words."""
    if cause == "memory":
        return f"does not fit: {one.peak_gib:.0f} GiB at least, {FITS_SHARE * memory_gib:.0f} can be used"
    if cause == "unstable":
        return f"{one.peak_gib:.0f} of {memory_gib:.0f} GiB: so near the limit that steps become slow"
    slower = one.step_s / best.step_s - 1
    change = format_change(slower)
    if abs(slower) < CLEAR:
        return change
    if slower < 0:
        return f"{change}, but {'further from published runs' if has_room(one) else _memory_text(one, memory_gib)}"
    if cause != "compute":
        return f"{change}: {PARTS[cause]}"
    if RECOMPUTE.index(one.layout.recompute) > RECOMPUTE.index(best.layout.recompute):
        return f"{change}: to fit, it recomputes {RECOMPUTED[one.layout.recompute]}"
    return f"{change}: smaller matmuls are slower"


def _alike(best: Sequence[Prediction]) -> Iterator[str]:
    """A note if the best layouts are alike."""
    seconds = [one.step_s for one in takewhile(lambda one: abs(one.step_s / best[0].step_s - 1) <= NEAR, best)]
    if len(seconds) > 1:
        farthest = format_percent(max(seconds) / min(seconds) - 1)
        same = f"Layouts 1 to {len(seconds)} differ by {farthest} at most"
        yield f"{same}, less than the error: take the one you can run."
