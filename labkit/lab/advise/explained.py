"""Why a training does not reach what is published, in words."""

from collections.abc import Iterator, Sequence

from labkit.lab.advise import words
from labkit.lab.advise.report import PREDICTED, YOURS, Report, Section, about, nearest, notes
from labkit.lab.advise.request import Asked
from labkit.scaling.advice import sums_s
from labkit.scaling.explanation import Explanation
from labkit.scaling.model import parameters
from labkit.scaling.published import PublishedRow

SHOWN = 5
TOLD = 1e-3
"""Share of a step from which on a part is listed."""


def report(asked: Asked, found: Explanation, rows: Sequence[PublishedRow]) -> Report:
    """Verdict first; then conventions, where the time should go, which fault would explain it, and what to measure."""
    sums = [(words.PARTS[name], value) for name, value in sums_s(found.expected).items() if value > 0]
    return Report(
        verdict=_verdict(found),
        headline=_headline(found, rows),
        about=f"{about(asked.request)}; {words.arrangement(found.expected.layout)}",
        sections=list(_sections(found, rows)),
        notes=[*_advice(found), *notes(asked, rows, ())],
        parts_s=sums,
    )


def _verdict(found: Explanation) -> str:
    implied = found.parameters_implied
    if implied is not None:
        own = float(parameters(found.request.model))
        return f"These figures disagree: they describe a model of {words.large(implied)}, not {words.large(own)}."
    low, high = found.expected.interval_90
    if found.step_s > high:
        return f"Slower than predicted: {found.step_s / found.expected.step_s:.1f} times the step."
    if found.step_s < low:
        return f"Faster than predicted: {found.step_s / found.expected.step_s:.2f} of the step."
    convention = found.convention
    if convention is not None and convention != found.conventions[0]:
        return f"Only the convention differs: {convention.name}."
    return "As predicted: nothing unusual in this step."


def _headline(found: Explanation, rows: Sequence[PublishedRow]) -> str:
    expected, (low, high) = found.expected, found.expected.interval_90
    mfu = [f"{100 * expected.mfu * expected.step_s / one:.1f} %" for one in (found.step_s, expected.step_s, high, low)]
    if found.parameters_implied is not None:
        return f"At this throughput {found.request.model.name} would reach {mfu[0]} MFU: check what was built."
    known = next((row for row in rows if row.mfu > 0), None)
    other = f"; published: {100 * known.mfu:.1f} % ({known.model}, {known.gpus} x {known.gpu})" if known else ""
    return (
        f"You reach {mfu[0]} MFU, {words.seconds(found.step_s)} per step; "
        f"predicted: {mfu[1]} [{mfu[2]}, {mfu[3]}], {words.seconds(expected.step_s)}{other}."
    )


def _advice(found: Explanation) -> Iterator[str]:
    """The largest unexplained term, and what to measure next."""
    if found.is_expected or found.parameters_implied is not None or not found.suspects:
        return
    gap = found.step_s - found.expected.step_s
    if gap < 0:
        return
    yield "Check first, as no prediction knows them: that the model has the sizes above, and that data arrives in time."
    culprit, nearest_one = found.culprit, found.suspects[0]
    if culprit:
        yield f"One fault would explain it: {culprit.name}. Measure next: labkit report {culprit.lab}"
    else:
        yield (
            f"Unexplained: {words.seconds(gap)} per step, and no single fault gives it. Most likely "
            f"{words.PARTS[found.grown]} ({nearest_one.name}). Measure next: labkit report {nearest_one.lab}"
        )


def _sections(found: Explanation, rows: Sequence[PublishedRow]) -> Iterator[Section]:
    yield Section(
        f"The same throughput by every convention; the dense peak is {found.request.hardware.peak_tflops:g} TFLOP/s",
        YOURS,
        ("counted as", "MFU"),
        [(one.name, f"{100 * one.mfu:.1f} %") for one in found.conventions],
        note=f"The dense peak is of 16-bit products: {found.request.hardware.source}.",
    )
    step_s = found.expected.step_s
    parts = sorted(sums_s(found.expected).items(), key=lambda part: -part[1])
    yield Section(
        "Where the predicted step goes",
        PREDICTED,
        ("part", "seconds", "share"),
        [
            (words.PARTS[name], words.seconds(value), words.percent(value / step_s))
            for name, value in parts
            if value >= TOLD * step_s
        ],
        SHOWN,
    )
    usual = found.expected.mfu * step_s
    yield Section(
        "What a single fault would make of it, the nearest first",
        PREDICTED,
        ("fault", "step", "MFU", "measure it with"),
        [
            (
                one.name,
                words.seconds(one.candidate.step_s),
                words.percent(usual / one.candidate.step_s),
                f"labkit report {one.lab}",
            )
            for one in found.suspects
        ],
        SHOWN,
    )
    if rows:
        yield nearest(rows)
