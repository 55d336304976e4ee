"""An advice as a verdict, a sentence and tables, for the screen and the page.

Each table says where its numbers come from: *predicted*, *published* or *measured by you*.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from labkit.lab.advise import words
from labkit.lab.advise.request import AdviceRequest
from labkit.lab.units import counted, format_bytes, join_words
from labkit.scaling.advice import Advice, Change, has_room, sums_s
from labkit.scaling.bucket import bucket_bytes
from labkit.scaling.memory import PARTS as MEMORY
from labkit.scaling.model import parameters
from labkit.scaling.prediction import FITS_SHARE, Prediction
from labkit.scaling.published import PublishedRow
from labkit.scaling.search import Request

PREDICTED, PUBLISHED = "predicted", "published"
YOURS = "measured by you"
_SMALL = ("logits", "buffers", "fragmentation", "runtime")
NEAR = 0.05
"""Predictions that differ less are alike."""
MAX_STAGES, MAX_ROWS = 4, 6
"""Stages of a pipeline, and rows of other tables, on a screen."""


@dataclass(frozen=True)
class Step:
    """The parts of a step in seconds, and its 90% interval (nan if it was measured)."""

    name: str
    parts_s: Sequence[tuple[str, float]]
    interval_s: tuple[float, float]


@dataclass(frozen=True)
class Section:
    """A table with a heading; `mark` says where its numbers come from.

    Rows beyond `max_rows` are only on the page, as are `steps`, a figure below it.
    """

    title: str
    mark: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    max_rows: int | None = None
    note: str = ""
    steps: Sequence[Step] = ()


@dataclass(frozen=True)
class Report:
    verdict: str
    headline: str
    about: str
    sections: Sequence[Section]
    notes: Sequence[str]


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


def _alike(best: Sequence[Prediction]) -> Iterator[str]:
    """A note if the best layouts are alike."""
    near = list(takewhile(lambda one: abs(one.step_s / best[0].step_s - 1) <= NEAR, best))
    if len(near) > 1:
        seconds = [one.step_s for one in near]
        farthest = words.percent(max(seconds) / min(seconds) - 1)
        yield f"Layouts 1 to {len(near)} differ by {farthest} at most, less than the error: take the one you can run."


def number_steps(best: Sequence[Prediction]) -> list[Step]:
    """Predicted steps, numbered from the best one."""
    return [
        Step(f"{place}: {words.arrangement(one.layout)}", list_parts(one), one.interval_90)
        for place, one in enumerate(best, start=1)
    ]


def list_parts(one: Prediction) -> list[tuple[str, float]]:
    return [(words.PARTS[name], value) for name, value in sums_s(one).items() if value > 0]


def describe_request(request: Request) -> str:
    hardware = request.hardware
    nodes = f", {hardware.network_gbps:g} Gb/s per node" if request.gpus > hardware.gpus_per_node else ""
    return (
        f"{request.model.name} ({words.large(float(parameters(request.model)))} parameters) on {request.gpus} x "
        f"{hardware.name}{nodes}; {words.large(request.tokens)} tokens per step, sequences of {request.seq_len}, "
        f"{request.precision}"
    )


def list_notes(request: AdviceRequest, rows: Sequence[PublishedRow], warnings: Sequence[str]) -> list[str]:
    """How wrong this may be, its assumptions, and where it extrapolates."""
    notes = []
    if rows:
        errors = np.abs([row.error for row in rows])
        median, worst = words.percent(float(np.median(errors))), words.percent(float(errors.max()))
        notes.append(
            f"Predicted: on the {len(rows)} nearest published rows, without having seen them, the median error is "
            f"{median}, the largest {worst}. [ ] holds 90% of such errors."
        )
    if request.calibration_runs:
        notes.append(
            f"Calibrated on {request.calibration_runs} runs of yours ({YOURS}), "
            f"explained to {words.percent(request.calibration_error)}."
        )
    if request.assumptions:
        notes.append(f"Assumed: {join_words(list(request.assumptions))}.")
    warnings = [warning for warning in warnings if not warning.startswith(("unstable", "expected to run"))]
    if request.request.framework == "generic":
        warnings = [warning for warning in warnings if not warning.startswith("framework")]
        notes.append("No framework named: --framework or --calibrate my_runs.csv (three runs) narrows the intervals.")
    return [*notes, *(f"Beware: {warning}." for warning in warnings)]


def _verdict(advice: Advice) -> tuple[str, str]:
    first, memory = advice.first, advice.request.usable.memory_gib
    if not advice.fits:
        first_change = f" Change first: {advice.remedies[0].name}." if advice.remedies else ""
        return (
            f"No, it does not fit: {first.peak_gib:.0f} GiB per GPU at least, {FITS_SHARE * memory:.0f} can be used.",
            f"The layout with the least memory is {words.arrangement(first.layout)}.{first_change}",
        )
    low, high = first.interval_90
    headline = (
        f"Use {words.arrangement(first.layout)}: {words.seconds(first.step_s)} per step "
        f"[{words.seconds(low)}, {words.seconds(high)}], {words.percent(first.mfu)} MFU ({PREDICTED})."
    )
    fit = f"{first.peak_gib:.0f} of {memory:.0f} GiB per GPU"
    if has_room(first):
        return f"Yes, it fits: {fit}.", headline
    change = f" Safer: {advice.remedies[0].name}." if advice.remedies else ""
    return f"Only just: {fit}, {words.percent(first.out_of_memory)} risk of running out.", headline + change


def _sections(request: AdviceRequest, advice: Advice, rows: Sequence[PublishedRow]) -> Iterator[Section]:
    yield _memory(advice)
    if advice.remedies:
        yield _changes(advice, advice.remedies, "What to change first", "change")
    if advice.best:
        yield _best(request, advice.best)
        memory = advice.request.usable.memory_gib
        losers = [
            (
                one.strategy,
                words.arrangement(one.prediction.layout),
                words.describe_cause(one.prediction, advice.first, one.cause, memory),
            )
            for one in advice.runners_up
        ]
        if losers:
            headings = ("strategy", "its best", "against the best")
            yield Section("Why the others lose", PREDICTED, headings, losers, MAX_ROWS)
        yield _changes(advice, advice.changes, "What would change the answer", "if")
    if rows:
        yield nearest_section(rows)


def _memory(advice: Advice) -> Section:
    names = [name for name in MEMORY if name not in _SMALL]
    stages = advice.first.memory_gib
    rows = [
        (
            f"{stage + 1} of {len(stages)}",
            *(f"{parts[name]:.1f}" for name in names),
            f"{sum(parts[name] for name in _SMALL):.1f}",
            f"{sum(parts.values()):.1f}",
        )
        for stage, parts in enumerate(stages)
    ]
    title = f"Memory per GPU in GiB: {words.arrangement(advice.first.layout)}"
    return Section(title, PREDICTED, ("stage", *names, "logits, buffers", "all"), rows, MAX_STAGES)


def _best(request: AdviceRequest, best: Sequence[Prediction]) -> Section:
    columns = [_column(request, candidate) for candidate in best]
    rows = [(name, *(column[name] for column in columns)) for name in columns[0]]
    title = f"The best {counted(len(best), 'layout')}, with 90% intervals"
    headings = ("", *(str(place + 1) for place in range(len(best))))
    note = f"Precision: {request.request.precision}, sums in float32."
    return Section(title, PREDICTED, headings, rows, note=note, steps=number_steps(best))


def _column(advice_request: AdviceRequest, one: Prediction) -> dict[str, str]:
    """A layout's cells by row."""
    request, layout, budget = advice_request.request, one.layout, advice_request.budget
    bucket = bucket_bytes(request.run(layout), request.constants)
    fast_s, slow_s = one.interval_90
    speed = [request.tokens / step_s for step_s in (one.step_s, slow_s, fast_s)]
    hours = [budget / request.tokens * step_s * request.gpus / 3600 for step_s in (one.step_s, fast_s, slow_s)]
    mfu = [one.mfu * one.step_s / step_s for step_s in (one.step_s, slow_s, fast_s)]

    def interval(values: Sequence[float], text: Callable[[float], str]) -> str:
        middle, low, high = map(text, values)
        return f"{middle} [{low}, {high}]"

    return {
        "arrangement": words.arrangement(layout),
        "micro-batch x accumulated": f"{layout.micro_batch} x {layout.micro_batches:.0f}",
        "recomputes": words.RECOMPUTE[layout.recompute],
        "bucket": "none" if bucket is None else format_bytes(bucket),
        "memory": words.memory(one, request.usable.memory_gib),
        "step": interval((one.step_s, fast_s, slow_s), words.seconds),
        "MFU": interval(mfu, words.percent),
        "tokens per second": interval(speed, words.large),
        "tokens per day": interval([86400 * one for one in speed], words.large),
        f"GPU-hours, {words.large(budget)} tokens": interval(hours, words.large),
    }


def _changes(advice: Advice, changes: Sequence[Change], title: str, heading: str) -> Section:
    base = advice.request.tokens / advice.first.step_s if advice.fits else None
    rows = []
    for change in changes:
        one = change.prediction
        if one is None:
            rows.append((change.name, "does not fit", "", ""))
            continue
        speed = words.signed(change.tokens_per_s / base - 1) if base else words.large(change.tokens_per_s)
        same = one.layout == advice.first.layout or words.arrangement(one.layout) == words.arrangement(
            advice.first.layout
        )
        rows.append(
            (change.name, speed, f"{one.peak_gib:.0f} GiB", "the same" if same else words.arrangement(one.layout))
        )
    return Section(title, PREDICTED, (heading, "tokens per second", "memory", "best layout then"), rows, MAX_ROWS)


def nearest_section(rows: Sequence[PublishedRow]) -> Section:
    cells = [
        (
            f"{row.group}: {row.model}",
            f"{row.gpus} x {row.gpu}",
            row.arrangement,
            words.seconds(row.step_s),
            words.percent(row.mfu) if np.isfinite(row.mfu) else "",
            f"{100 * row.error:+.0f}%",
            f"{row.distance:.2g}",
        )
        for row in rows
    ]
    headings = ("published row", "GPUs", "layout", "step", "MFU", "predicted, off by", "distance")
    note = "Distance 1 is a doubling of the model, or half the way to another kind of GPU."
    return Section("The nearest published rows", PUBLISHED, headings, cells, 3, note=note)
