"""Why a training does not reach what is published, in words."""

import math
from collections.abc import Iterator, Sequence

from labkit.lab.advise import words
from labkit.lab.advise.report import PREDICTED, YOURS, Report, Section, Step, about, nearest, notes, parts_of
from labkit.lab.advise.request import Asked
from labkit.lab.units import join_words
from labkit.scaling.advice import sums_s
from labkit.scaling.explanation import Explanation
from labkit.scaling.model import Model, parameters
from labkit.scaling.published import PublishedRow
from labkit.scaling.suspects import DEGREES, Suspect

SHOWN, SUSPECTS_SHOWN = 5, 14
TOLD = 1e-3
"""Share of a step from which on a part is listed."""


def report(asked: Asked, found: Explanation, rows: Sequence[PublishedRow]) -> Report:
    """Verdict first; then what could explain the gap, what is published, conventions, where the time should go."""
    return Report(
        verdict=_verdict(found),
        headline=_headline(found),
        about=f"{about(asked.request)}; {words.arrangement(found.expected.layout)}",
        sections=list(_sections(found, rows)),
        notes=[*_advice(found), *notes(asked, rows, ())],
    )


def _steps(found: Explanation) -> Iterator[Step]:
    """The predicted step, and the measured one with what is unexplained of it."""
    parts = parts_of(found.expected)
    yield Step("predicted", parts, found.expected.interval_90)
    if (gap := found.step_s - found.expected.step_s) > 0:
        yield Step(YOURS, [*parts, ("unexplained", gap)], (math.nan, math.nan))


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


def _headline(found: Explanation) -> str:
    own = f"{100 * found.mfu:.1f} %"
    if found.parameters_implied is not None:
        return f"At this throughput {found.request.model.name} would reach {own} MFU: check what was built."
    low, high = found.interval_mfu
    predicted = f"{100 * found.expected.mfu:.1f} % [{100 * low:.0f}, {100 * high:.0f}]"
    return (
        f"You reach {own} MFU ({words.seconds(found.step_s)} per step); predicted are {predicted} "
        f"({words.seconds(found.expected.step_s)})."
    )


def _advice(found: Explanation) -> Iterator[str]:
    """What was built by these sizes, what was taken for granted, and what to measure next."""
    model = found.request.model
    yield f"These sizes build {_built(model)}: does your program count as many?"
    if left := list(_left_open(found)):
        yield f"Not named, so predicted at the usual or the best: {join_words(left)}."
    if found.suspects and found.parameters_implied is None:
        first = found.suspects[0]
        labs = (one for one in found.suspects if one.check.startswith("labkit") and not found.is_excluded(one))
        lab = next(labs, first)
        then = f"; then, on that machine: {lab.check}" if lab != first else ""
        yield f"Next: {first.check} ({first.name}){then}."


def _built(model: Model) -> str:
    return (
        f"{words.large(float(parameters(model)))} parameters ({model.layers} layers of {model.hidden}, "
        f"ffn {model.ffn}, vocabulary {model.vocab})"
    )


def _left_open(found: Explanation) -> Iterator[str]:
    request, layout = found.request, found.expected.layout
    usual = {"sequence": f"sequences of {request.seq_len}", "tokens_per_step": f"{words.large(request.tokens)} a step"}
    yield from (text for name, text in usual.items() if name in found.unnamed)
    if "micro_batch" not in request.fixed:
        yield f"micro-batch {layout.micro_batch}"
    if not set(DEGREES) <= set(request.fixed):
        yield words.arrangement(layout).replace(", ", " ")
    if "recompute" not in request.fixed:
        yield f"{words.RECOMPUTE[layout.recompute]} recomputed"


def _sections(found: Explanation, rows: Sequence[PublishedRow]) -> Iterator[Section]:
    if found.suspects and found.parameters_implied is None:
        yield Section(
            "What could explain it: first what could be all of it, the quickest to check before others",
            PREDICTED,
            ("suspect", "MFU it leaves", "of the gap", "what grows", "check"),
            [_row(found, one) for one in found.suspects],
            SUSPECTS_SHOWN,
            note="Each alone, at its worst. The gap itself is unexplained until one of them is checked.",
        )
    if rows:
        yield nearest(rows)
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
        steps=list(_steps(found)),
    )


def _row(found: Explanation, suspect: Suspect) -> tuple[str, ...]:
    left = words.percent(suspect.mfu)
    if suspect.is_graded:
        left = f"{left} or more" if suspect.mfu else "any"
    else:
        left = f"{left} [{100 * suspect.low:.0f}, {100 * suspect.high:.0f}]"
    if found.is_excluded(suspect):
        share = "no: slower still"
    elif found.could_be_all(suspect):
        share = "up to all"
    else:
        share = f"up to {words.percent(found.share(suspect))}"
    return suspect.name, left, share, words.TERMS[suspect.part] if suspect.part else "", suspect.check
