"""Why a training is slow: a verdict, a sentence, tables."""

from labkit.lab.advise.report import nearest_section, notes
from labkit.lab.advise.request import AdviceRequest, flag
from labkit.lab.advise.text import (
    PREDICTED,
    YOURS,
    Report,
    Section,
    describe_request,
    format_percent,
)
from labkit.lab.units import format_seconds
from labkit.scaling.advice import sums_s
from labkit.scaling.prediction import Prediction
from labkit.scaling.slowdown_causes import Cause, Diagnosis


def report_diagnosis(request: AdviceRequest, diagnosis: Diagnosis) -> Report:
    """Report the verdict, then possible causes, published runs, and the predicted parts."""
    rows = diagnosis.neighbors
    headings = ("cause", "MFU it leaves", "share of the gap", "check")
    causes = [_cause_row(diagnosis, cause) for cause in diagnosis.causes]
    sections = []
    if causes:
        title = "Possible causes, each alone and at its worst"
        sections.append(Section(title, PREDICTED, headings, causes))
    counted_as = [(name, f"{100 * mfu:.1f}%") for name, mfu in diagnosis.conventions.items()]
    peak = f"{request.request.hardware.peak_tflops:g} TFLOP/s"
    title = f"The same throughput by every convention; the dense peak is {peak}"
    sections += [nearest_section(rows), Section(title, YOURS, ("counted as", "MFU"), counted_as)]
    sections.append(_step_parts(diagnosis.expected))
    about = f"{describe_request(request.request)}; {diagnosis.expected.layout}"
    return Report(
        _verdict(diagnosis), _headline(diagnosis), about, sections, list(notes(request, rows, ()))
    )


def _verdict(diagnosis: Diagnosis) -> str:
    expected = diagnosis.expected
    low_s, high_s = expected.interval_90
    reached = diagnosis.neighbor_mfu
    other = diagnosis.other_layout
    if diagnosis.step_s > high_s:
        return f"Slower than predicted: {diagnosis.step_s / expected.step_s:.1f} times the step."
    if diagnosis.is_slow and reached:
        least, most = (mfu / diagnosis.mfu for mfu in reached)
        return f"Slower than runs like yours: {least:.1f} to {most:.1f} times the step."
    if other:
        factor = expected.step_s / other.step_s
        return f"Its layout is slow: another is predicted {factor:.1f} times as fast."
    if diagnosis.step_s < low_s:
        return f"Faster than predicted: {diagnosis.step_s / expected.step_s:.2f} of the step."
    if diagnosis.convention not in (None, next(iter(diagnosis.conventions))):
        return f"Only the convention differs: {diagnosis.convention}."
    return "As predicted: nothing unusual in this step."


def _headline(diagnosis: Diagnosis) -> str:
    """Say what is measured, predicted, and reached by others."""
    expected = diagnosis.expected
    low, high = diagnosis.interval_mfu
    sentences = [
        f"You reach {100 * diagnosis.mfu:.1f}% MFU ({format_seconds(diagnosis.step_s)} per step);"
        f" predicted are {100 * expected.mfu:.1f}% [{100 * low:.0f}, {100 * high:.0f}]"
        f" ({format_seconds(expected.step_s)})."
    ]
    if diagnosis.neighbor_mfu:
        least, most = diagnosis.neighbor_mfu
        sentences.append(
            f"Published runs like yours reach {100 * least:.0f} to {100 * most:.0f}% MFU."
        )
    if other := diagnosis.other_layout:
        factor = expected.step_s / other.step_s
        flags = " ".join(map(flag, diagnosis.request.fixed))
        sentences.append(f"Without {flags} it is {factor:.1f} times as fast: {other.layout}.")
    return " ".join(sentences)


def _cause_row(diagnosis: Diagnosis, cause: Cause) -> tuple[str, ...]:
    left = f"{format_percent(cause.mfu)} or more" if cause.mfu else "any"
    share = diagnosis.share(cause)
    return (
        cause.name,
        left,
        "up to all" if share == 1 else f"up to {format_percent(share)}",
        cause.check,
    )


def _step_parts(expected: Prediction) -> Section:
    parts = sorted(sums_s(expected).items(), key=lambda part: -part[1])
    rows = [
        (name, format_seconds(value), format_percent(value / expected.step_s))
        for name, value in parts
        if value
    ]
    headings = ("part", "seconds", "share")
    return Section(
        "Parts of the predicted step", PREDICTED, headings, rows, 5, {PREDICTED: expected}
    )
