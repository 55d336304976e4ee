"""An advice as a verdict, a sentence and tables: what the screen prints and the page draws.

Each table says where its numbers come from: *predicted*, *published* or *measured by you*.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np

from labkit.lab.advise import words
from labkit.lab.advise.request import Asked
from labkit.lab.units import counted, format_bytes, join_words
from labkit.scaling.advice import Advice, Change, Request, has_room, sums_s
from labkit.scaling.bucket import bucket_bytes
from labkit.scaling.memory import PARTS as MEMORY
from labkit.scaling.model import parameters
from labkit.scaling.prediction import FITS_SHARE
from labkit.scaling.published import PublishedRow
from labkit.scaling.search import Candidate

PREDICTED, PUBLISHED = "predicted", "published"
YOURS = "measured by you"
_SMALL = ("logits", "buffers", "fragmentation", "runtime")
NEAR = 0.05
"""Predictions this near are not told apart."""
STAGES_SHOWN, SHOWN = 4, 6
"""Stages of a pipeline, and rows of other tables, on a screen."""


@dataclass(frozen=True)
class Step:
    """What a step is made of, in seconds, and its 90 % interval (nan: it was measured)."""

    name: str
    parts_s: Sequence[tuple[str, float]]
    interval_s: tuple[float, float]


@dataclass(frozen=True)
class Section:
    """A table with a heading; `mark` says where its numbers come from. Rows beyond `shown` are only on the page.

    `steps` are drawn below it, on the page.
    """

    title: str
    mark: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    shown: int | None = None
    note: str = ""
    steps: Sequence[Step] = ()


@dataclass(frozen=True)
class Report:
    verdict: str
    headline: str
    about: str
    sections: Sequence[Section]
    notes: Sequence[str]


def report(asked: Asked, advice: Advice, rows: Sequence[PublishedRow]) -> Report:
    """Verdict first; then memory, layouts, why others lose, what would change it, and how wrong this may be."""
    verdict, headline = _verdict(advice)
    return Report(
        verdict=verdict,
        headline=headline,
        about=about(asked.request),
        sections=list(_sections(asked, advice, rows)),
        notes=[*_alike(advice.best), *notes(asked, rows, advice.prediction.warnings)],
    )


def _alike(best: Sequence[Candidate]) -> Iterator[str]:
    """That the best layouts are too near for this prediction to tell them apart."""
    near = list(takewhile(lambda one: abs(one.step_s / best[0].step_s - 1) <= NEAR, best))
    if len(near) > 1:
        seconds = [one.step_s for one in near]
        farthest = words.percent(max(seconds) / min(seconds) - 1)
        yield f"Layouts 1 to {len(near)} differ by {farthest} at most, less than the error: take the one you can run."


def steps_of(best: Sequence[Candidate]) -> list[Step]:
    """Predicted steps, numbered from the best one on."""
    return [
        Step(f"{place}: {words.arrangement(one.layout)}", parts_of(one), one.interval_90)
        for place, one in enumerate(best, start=1)
    ]


def parts_of(one: Candidate) -> list[tuple[str, float]]:
    return [(words.PARTS[name], value) for name, value in sums_s(one).items() if value > 0]


def about(request: Request) -> str:
    hardware = request.hardware
    nodes = f", {hardware.network_gbps:g} Gb/s per node" if request.gpus > hardware.gpus_per_node else ""
    return (
        f"{request.model.name} ({words.large(float(parameters(request.model)))} parameters) on {request.gpus} x "
        f"{hardware.name}{nodes}; {words.large(request.tokens)} tokens per step, sequences of {request.seq_len}, "
        f"{request.precision}"
    )


def notes(asked: Asked, rows: Sequence[PublishedRow], warnings: Sequence[str]) -> list[str]:
    """How wrong this may be, what was assumed, where it extrapolates."""
    found = []
    if rows:
        errors = np.abs([row.error for row in rows])
        middle, worst = words.percent(float(np.median(errors))), words.percent(float(errors.max()))
        found.append(
            f"Predicted: on the {len(rows)} nearest published rows, unseen, it was off by {middle} on the median, "
            f"{worst} at worst. [ ] holds 90 % of such errors."
        )
    if asked.calibrated_on:
        found.append(
            f"Calibrated on {asked.calibrated_on} runs of yours ({YOURS}), "
            f"explained to {words.percent(asked.calibration_error)}."
        )
    if asked.assumed:
        found.append(f"Assumed: {join_words(list(asked.assumed))}.")
    told = [warning for warning in warnings if not warning.startswith(("unstable", "expected to run"))]
    if asked.request.framework == "generic":
        told = [warning for warning in told if not warning.startswith("framework")]
        found.append("No framework named: --framework or --calibrate my_runs.csv (three runs) narrows the intervals.")
    return [*found, *(f"Beware: {warning}." for warning in told)]


def _verdict(advice: Advice) -> tuple[str, str]:
    first, memory = advice.first, advice.request.usable.memory_gib
    if not advice.fits:
        first_change = f" Change first: {advice.remedies[0].name}." if advice.remedies else ""
        return (
            f"No, it does not fit: {first.peak_gib:.0f} GiB per GPU at least, {FITS_SHARE * memory:.0f} can be used.",
            f"The leanest layout is {words.arrangement(first.layout)}, every layer recomputed.{first_change}"
            if first.layout.recompute == "full"
            else f"The leanest layout is {words.arrangement(first.layout)}.{first_change}",
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


def _sections(asked: Asked, advice: Advice, rows: Sequence[PublishedRow]) -> Iterator[Section]:
    yield _memory(advice)
    if advice.remedies:
        yield _changes(advice, advice.remedies, "What to change first", "change")
    if advice.best:
        yield _best(asked, advice.best)
        memory = advice.request.usable.memory_gib
        losers = [
            (
                one.strategy,
                words.arrangement(one.candidate.layout),
                words.cause(one.candidate, advice.first, one.cause, memory),
            )
            for one in advice.runners_up
        ]
        if losers:
            yield Section("Why the others lose", PREDICTED, ("strategy", "its best", "against the best"), losers, SHOWN)
        yield _changes(advice, advice.changes, "What would change the answer", "if")
    if rows:
        yield nearest(rows)


def _memory(advice: Advice) -> Section:
    names = [name for name in MEMORY if name not in _SMALL]
    stages = advice.prediction.memory_gib
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
    return Section(title, PREDICTED, ("stage", *names, "logits, buffers", "all"), rows, STAGES_SHOWN)


def _best(asked: Asked, best: Sequence[Candidate]) -> Section:
    request = asked.request
    columns = [_column(asked, candidate) for candidate in best]
    names = [name for name, _ in columns[0]]
    rows = [(name, *(column[at][1] for column in columns)) for at, name in enumerate(names)]
    title = f"The best {counted(len(best), 'layout')}, with 90 % intervals"
    headings = ("", *(str(place + 1) for place in range(len(best))))
    note = f"Precision: {request.precision}, sums in float32."
    return Section(title, PREDICTED, headings, rows, note=note, steps=steps_of(best))


def _column(asked: Asked, one: Candidate) -> list[tuple[str, str]]:
    request, layout = asked.request, one.layout
    bucket = bucket_bytes(request.run(layout), request.constants)
    tokens_per_s, (low, high) = request.tokens / one.step_s, one.interval_90
    hours = asked.budget / tokens_per_s * request.gpus / 3600

    def ranged(text: str, smallest: str, largest: str) -> str:
        return f"{text} [{smallest}, {largest}]"

    def of(value: float, step_s: float) -> float:
        return value * one.step_s / step_s

    return [
        ("arrangement", words.arrangement(layout)),
        ("micro-batch x accumulated", words.batch(layout)),
        ("recomputes", words.RECOMPUTE[layout.recompute]),
        ("bucket", "none" if bucket is None else format_bytes(bucket)),
        ("memory", words.memory(one, request.usable.memory_gib)),
        ("step", ranged(words.seconds(one.step_s), words.seconds(low), words.seconds(high))),
        ("MFU", ranged(words.percent(one.mfu), words.percent(of(one.mfu, high)), words.percent(of(one.mfu, low)))),
        (
            "tokens per second",
            ranged(words.large(tokens_per_s), *(words.large(of(tokens_per_s, s)) for s in (high, low))),
        ),
        ("tokens per day", ranged(*(words.large(86400 * of(tokens_per_s, s)) for s in (one.step_s, high, low)))),
        (
            f"GPU-hours, {words.large(asked.budget)} tokens",
            ranged(*(words.large(hours * s / one.step_s) for s in (one.step_s, low, high))),
        ),
    ]


def _changes(advice: Advice, changes: Sequence[Change], title: str, heading: str) -> Section:
    base = advice.request.tokens / advice.first.step_s if advice.fits else None
    rows = []
    for change in changes:
        one = change.candidate
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
    return Section(title, PREDICTED, (heading, "tokens per second", "memory", "best layout then"), rows, SHOWN)


def nearest(rows: Sequence[PublishedRow]) -> Section:
    found = [
        (
            f"{row.group}: {row.model}",
            f"{row.gpus} x {row.gpu}",
            row.arrangement,
            words.seconds(row.step_s),
            words.percent(row.mfu) if np.isfinite(row.mfu) else "",
            f"{100 * row.error:+.0f} %",
        )
        for row in rows
    ]
    headings = ("published row", "GPUs", "layout", "step", "MFU", "predicted, off by")
    return Section("The nearest published rows", PUBLISHED, headings, found, 3)
