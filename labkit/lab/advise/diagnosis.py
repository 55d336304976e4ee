"""Why a training is slower than predicted, in sentences and tables."""

import math
from collections.abc import Iterator, Sequence

from labkit.lab.advise import words
from labkit.lab.advise.report import (
    PREDICTED,
    YOURS,
    Report,
    Section,
    Step,
    describe_request,
    list_notes,
    list_parts,
    nearest_section,
)
from labkit.lab.advise.request import AdviceRequest
from labkit.scaling.advice import sums_s
from labkit.scaling.model import parameters
from labkit.scaling.published import PublishedRow
from labkit.scaling.slowdown_causes import Cause, Diagnosis

MAX_PARTS = 5
"""Parts of the step on a screen."""
MIN_SHARE = 1e-3
"""Share of a step from which on a part is listed."""


def make_report(request: AdviceRequest, found: Diagnosis, rows: Sequence[PublishedRow]) -> Report:
    """Verdict, then possible causes, published runs, conventions, and the parts of the predicted step."""
    model, layout = request.request.model, found.expected.layout
    notes = [
        f"These sizes build {words.large(float(parameters(model)))} parameters ({model.layers} layers of "
        f"{model.hidden}, ffn {model.ffn}, vocabulary {model.vocab}): does your program count as many?"
    ]
    values = {"micro_batch": str(layout.micro_batch), "recompute": layout.recompute}
    if chosen := [
        f"--{name.replace('_', '-')} {text}" for name, text in values.items() if name not in found.request.fixed
    ]:
        notes.append(f"Not named, so predicted at the best value: {', '.join(chosen)}.")
    return Report(
        verdict=_verdict(found),
        headline=_headline(found),
        about=f"{describe_request(request.request)}; {words.arrangement(layout)}",
        sections=list(_sections(found, rows)),
        notes=[*notes, *list_notes(request, rows, ())],
    )


def _verdict(found: Diagnosis) -> str:
    if found.implied_parameters is not None:
        size, implied = (words.large(float(n)) for n in (parameters(found.request.model), found.implied_parameters))
        return f"These figures disagree: they describe a model of {implied}, not {size}."
    low, high = found.expected.interval_90
    if found.step_s > high:
        return f"Slower than predicted: {found.step_s / found.expected.step_s:.1f} times the step."
    if found.step_s < low:
        return f"Faster than predicted: {found.step_s / found.expected.step_s:.2f} of the step."
    if found.convention is not None and found.convention != found.conventions[0]:
        return f"Only the convention differs: {found.convention.name}."
    return "As predicted: nothing unusual in this step."


def _headline(found: Diagnosis) -> str:
    measured = f"{100 * found.mfu:.1f}%"
    if found.implied_parameters is not None:
        return f"At this throughput {found.request.model.name} would reach {measured} MFU: check which model was built."
    low, high = found.interval_mfu
    return (
        f"You reach {measured} MFU ({words.seconds(found.step_s)} per step); predicted are "
        f"{100 * found.expected.mfu:.1f}% [{100 * low:.0f}, {100 * high:.0f}] "
        f"({words.seconds(found.expected.step_s)})."
    )


def _sections(found: Diagnosis, rows: Sequence[PublishedRow]) -> Iterator[Section]:
    if found.causes and found.implied_parameters is None:
        yield Section(
            "Possible causes, the largest first",
            PREDICTED,
            ("cause", "MFU it leaves", "share of the gap", "check"),
            [_row(found, cause) for cause in found.causes],
            note="Each alone, at its worst. The gap stays unexplained until a cause is checked.",
        )
    if rows:
        yield nearest_section(rows)
    yield Section(
        f"The same throughput by every convention; the dense peak is {found.request.hardware.peak_tflops:g} TFLOP/s",
        YOURS,
        ("counted as", "MFU"),
        [(one.name, f"{100 * one.mfu:.1f}%") for one in found.conventions],
        note=f"The dense peak is for 16-bit matmuls: {found.request.hardware.source}.",
    )
    step_s = found.expected.step_s
    parts = sorted(sums_s(found.expected).items(), key=lambda part: -part[1])
    yield Section(
        "Parts of the predicted step",
        PREDICTED,
        ("part", "seconds", "share"),
        [
            (words.PARTS[name], words.seconds(value), words.percent(value / step_s))
            for name, value in parts
            if value >= MIN_SHARE * step_s
        ],
        MAX_PARTS,
        steps=list(_steps(found)),
    )


def _steps(found: Diagnosis) -> Iterator[Step]:
    """The predicted step, and the measured one with its unexplained rest."""
    parts = list_parts(found.expected)
    yield Step("predicted", parts, found.expected.interval_90)
    if (gap := found.step_s - found.expected.step_s) > 0:
        yield Step(YOURS, [*parts, ("unexplained", gap)], (math.nan, math.nan))


def _row(found: Diagnosis, cause: Cause) -> tuple[str, ...]:
    left = f"{words.percent(cause.mfu)} or more" if cause.mfu else "any"
    share = found.share(cause)
    return cause.name, left, "up to all" if share == 1 else f"up to {words.percent(share)}", cause.check
