"""Why a training is slower than predicted, in sentences and tables."""

import math
from collections.abc import Iterator, Sequence

from labkit.lab.advise.options import flag
from labkit.lab.advise.report import (
    PARTS,
    PREDICTED,
    YOURS,
    Report,
    Section,
    Step,
    describe_layout,
    describe_request,
    format_count,
    format_percent,
    list_notes,
    nearest_section,
    predicted_step,
)
from labkit.lab.advise.request import AdviceRequest
from labkit.lab.units import format_seconds
from labkit.scaling.advice import sums_s
from labkit.scaling.model import parameters
from labkit.scaling.published import PublishedRow
from labkit.scaling.slowdown_causes import Cause, Diagnosis

MAX_PARTS = 5
"""Parts of the step on a screen."""
MIN_SHARE = 1e-3
"""Share of a step from which on a part is listed."""


def make_report(request: AdviceRequest, diagnosis: Diagnosis, rows: Sequence[PublishedRow]) -> Report:
    """Verdict, then possible causes, published runs, conventions, and the parts of the predicted step."""
    model, layout = request.request.model, diagnosis.expected.layout
    notes = [
        f"These sizes build {format_count(float(parameters(model)))} parameters ({model.layers} layers of "
        f"{model.hidden}, ffn {model.ffn}, vocabulary {model.vocab}): does your program count as many?"
    ]
    searched = {"micro_batch": layout.micro_batch, "recompute": layout.recompute}
    if best := [f"{flag(name)} {value}" for name, value in searched.items() if name not in request.request.fixed]:
        notes.append(f"Not named, so predicted at the best value: {', '.join(best)}.")
    return Report(
        verdict=_verdict(diagnosis),
        headline=_headline(diagnosis),
        about=f"{describe_request(request.request)}; {describe_layout(layout)}",
        sections=list(_sections(diagnosis, rows)),
        notes=[*notes, *list_notes(request, rows, ())],
    )


def _verdict(diagnosis: Diagnosis) -> str:
    expected = diagnosis.expected
    if diagnosis.implied_parameters is not None:
        size = format_count(float(parameters(diagnosis.request.model)))
        implied = format_count(float(diagnosis.implied_parameters))
        return f"These figures disagree: they describe a model of {implied}, not {size}."
    low, high = expected.interval_90
    if diagnosis.step_s > high:
        return f"Slower than predicted: {diagnosis.step_s / expected.step_s:.1f} times the step."
    if diagnosis.step_s < low:
        return f"Faster than predicted: {diagnosis.step_s / expected.step_s:.2f} of the step."
    if diagnosis.convention not in (None, next(iter(diagnosis.conventions))):
        return f"Only the convention differs: {diagnosis.convention}."
    return "As predicted: nothing unusual in this step."


def _headline(diagnosis: Diagnosis) -> str:
    measured, expected = f"{100 * diagnosis.mfu:.1f}%", diagnosis.expected
    if diagnosis.implied_parameters is not None:
        name = diagnosis.request.model.name
        return f"At this throughput {name} would reach {measured} MFU: check which model was built."
    low, high = diagnosis.interval_mfu
    return (
        f"You reach {measured} MFU ({format_seconds(diagnosis.step_s)} per step); predicted are "
        f"{100 * expected.mfu:.1f}% [{100 * low:.0f}, {100 * high:.0f}] ({format_seconds(expected.step_s)})."
    )


def _sections(diagnosis: Diagnosis, rows: Sequence[PublishedRow]) -> Iterator[Section]:
    if diagnosis.causes and diagnosis.implied_parameters is None:
        yield Section(
            "Possible causes, the largest first",
            PREDICTED,
            ("cause", "MFU it leaves", "share of the gap", "check"),
            [_row(diagnosis, cause) for cause in diagnosis.causes],
            note="Each alone, at its worst. The gap stays unexplained until a cause is checked.",
        )
    if rows:
        yield nearest_section(rows)
    hardware = diagnosis.request.hardware
    yield Section(
        f"The same throughput by every convention; the dense peak is {hardware.peak_tflops:g} TFLOP/s",
        YOURS,
        ("counted as", "MFU"),
        [(name, f"{100 * mfu:.1f}%") for name, mfu in diagnosis.conventions.items()],
        note=f"The dense peak is for 16-bit matmuls: {hardware.source}.",
    )
    yield _parts(diagnosis)


def _parts(diagnosis: Diagnosis) -> Section:
    """The predicted step; on a page with the measured one and its unexplained rest."""
    expected = diagnosis.expected
    parts = sorted(sums_s(expected).items(), key=lambda part: -part[1])
    cells = [
        (PARTS[name], format_seconds(value), format_percent(value / expected.step_s))
        for name, value in parts
        if value >= MIN_SHARE * expected.step_s
    ]
    steps = [predicted_step(PREDICTED, expected)]
    if (gap := diagnosis.step_s - expected.step_s) > 0:
        steps.append(Step(YOURS, [*steps[0].parts_s, ("unexplained", gap)], (math.nan, math.nan)))
    return Section(
        "Parts of the predicted step", PREDICTED, ("part", "seconds", "share"), cells, MAX_PARTS, steps=steps
    )


def _row(diagnosis: Diagnosis, cause: Cause) -> tuple[str, ...]:
    left = f"{format_percent(cause.mfu)} or more" if cause.mfu else "any"
    share = diagnosis.share(cause)
    return cause.name, left, "up to all" if share == 1 else f"up to {format_percent(share)}", cause.check
