"""The answers of `labkit advise` in lines: a verdict, a sentence, tables that say their source."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from labkit.advise.advice import Advice, strategy
from labkit.advise.explain import Diagnosis
from labkit.advise.request import flag
from labkit.lab.commands.console import table_lines
from labkit.lab.units import counted, format_seconds
from labkit.scaling.prediction import FITS_SHARE, Prediction
from labkit.scaling.published import Neighbor
from labkit.scaling.search import Request

RECOMPUTED = {"none": "nothing", "selective": "attention", "full": "every layer"}
# A table must fit on a screen; the first stages of a pipeline hold most, so the last are left out.
MAX_ROWS = 6
# A smaller predicted difference is a tie: the predictor's error is larger.
CLEAR = 0.03
# A run is slow below this share of the least MFU that published runs like it reach.
BELOW = 0.95


def report_advice(advice: Advice) -> Iterator[str]:
    """Yield the verdict first, then memory, layouts, what would change the answer, its error."""
    request = advice.request
    first = advice.first
    # Whether it fits comes before how fast it is: a layout that does not fit has no speed.
    yield from _advice_verdict(advice)
    yield f"  {_describe(request)}"
    stages = [
        (f"{stage} of {len(first.memory_gib)}", *(f"{gib:.1f}" for gib in parts.values()))
        for stage, parts in enumerate(first.memory_gib[:MAX_ROWS], start=1)
    ]
    title = f"Memory per GPU in GiB: {first.layout} (predicted)"
    yield from _section(title, ("stage", *first.memory_gib[0]), stages)
    if advice.best:
        columns = [_column(request, prediction) for prediction in advice.best]
        title = f"The best {counted(len(columns), 'layout')}, with 90% intervals (predicted)"
        headings = ("place", *(str(place) for place in range(1, len(columns) + 1)))
        cells = [(name, *(column[name] for column in columns)) for name in columns[0]]
        yield from _section(title, headings, cells)
    if advice.others:
        losers = [
            (strategy(other.layout), str(other.layout), _compare(other, advice))
            for other in advice.others
        ]
        headings = ("strategy", "its best", "against the best")
        yield from _section("Why the others lose (predicted)", headings, losers)
    headings = ("if", "tokens per second", "memory", "best layout then")
    title = "What would change the answer (predicted)"
    yield from _section(title, headings, _change_rows(advice))
    yield from _errors(request, advice.neighbors, first)
    yield (
        "Memory counts a training step: no evaluation, no other process on the GPU, no tensors"
        " that a program keeps."
    )


def report_diagnosis(diagnosis: Diagnosis) -> Iterator[str]:
    """Yield the verdict, then possible causes, the predicted parts, and published runs."""
    request = diagnosis.request
    expected = diagnosis.expected
    yield from (_verdict(diagnosis), _headline(diagnosis))
    yield f"  {_describe(request)}; {expected.layout}"
    if diagnosis.causes:
        title = "Possible causes, each alone and at its worst (predicted)"
        headings = ("cause", "MFU it leaves", "share of the gap", "check")
        rows = []
        for cause in diagnosis.causes:
            left = f"{_percent(cause.mfu)} or more" if cause.mfu else "any"
            share = diagnosis.share(cause)
            explained = "up to all" if share == 1 else f"up to {_percent(share)}"
            rows.append((cause.name, left, explained, cause.check))
        yield from _section(title, headings, rows)
    # Others count otherwise, and then two figures of the same run differ.
    peak = f"{request.hardware.peak_tflops:g} TFLOP/s"
    title = f"Your MFU by each way to count it; the dense peak is {peak} (measured by you)"
    counts = [(name, f"{100 * mfu:.1f}%") for name, mfu in diagnosis.conventions.items()]
    yield from _section(title, ("counted as", "MFU"), counts)
    parts = [
        (name, format_seconds(seconds), _percent(seconds / expected.step_s))
        for name, seconds in sorted(expected.parts_s.items(), key=lambda part: -part[1])
    ]
    yield from _section("Parts of the predicted step", ("part", "seconds", "share"), parts)
    yield from _errors(request, diagnosis.neighbors, expected)


def _section(title: str, headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield a table under its title, which ends with where its numbers come from."""
    yield from ("", title)
    yield from (f"  {line}" for line in table_lines(rows, *headings))


def _advice_verdict(advice: Advice) -> tuple[str, str]:
    first = advice.first
    needs = f"each GPU needs {_memory(first, advice.request)}"
    step = _with_interval(first, float, format_seconds)
    headline = f"Use {first.layout}: {step} per step, {_percent(first.mfu)} MFU (predicted)."
    if first.fits:
        return f"Yes, it fits: {needs}.", headline
    remedy = ""
    if advice.remedy:
        word = "Safer" if advice.best else "Change first"
        remedy = f" {word}: {advice.remedy.name}."
    if advice.best:
        return f"It may fit: {needs}.", headline + remedy
    usable = f"{FITS_SHARE * advice.request.hardware.memory_gib:.0f} can be used"
    return f"No, it does not fit: {needs}; {usable}.", f"Least memory: {first.layout}.{remedy}"


def _column(request: Request, prediction: Prediction) -> dict[str, str]:
    """Return a layout's cells by row."""
    layout = prediction.layout
    flops = prediction.mfu * prediction.step_s
    days = request.budget / request.tokens / 86400
    per_parameter = request.budget / request.model.parameters
    budget = f"days, {_count(request.budget)} tokens ({per_parameter:.2g} per parameter)"
    return {
        "arrangement": str(layout),
        "micro-batch x accumulated": f"{layout.micro_batch} x {layout.micro_batches:.0f}",
        "recomputes": RECOMPUTED[layout.recompute],
        "memory": _memory(prediction, request),
        "step": _with_interval(prediction, float, format_seconds),
        "MFU, all scores counted": _with_interval(
            prediction, lambda step_s: flops / step_s, _percent
        ),
        "tokens per second": _with_interval(
            prediction, lambda step_s: request.tokens / step_s, _count
        ),
        budget: _with_interval(prediction, lambda step_s: days * step_s, "{:.3g}".format),
        "GPU-hours": _count(24 * days * prediction.step_s * request.gpus),
    }


def _compare(other: Prediction, advice: Advice) -> str:
    """Return why a layout loses against the best one, in a few words."""
    best = advice.first
    memory = _memory(other, advice.request)
    if not other.may_fit:
        return f"does not fit: {memory}"
    slower = other.step_s / best.step_s - 1
    change = _change(slower)
    if abs(slower) < CLEAR:
        return change
    # Ranked below all the same: the ranking prefers what is well within memory and known.
    if slower < 0 and other.fits:
        return f"{change}, but further from published runs"
    if slower < 0:
        return f"{change}, but {memory}"
    # The part of the step that loses most time against the best layout is the reason.
    lost = {name: part - best.parts_s.get(name, 0) for name, part in other.parts_s.items()}
    return f"{change}: {max(lost, key=lost.__getitem__)}"


def _change_rows(advice: Advice) -> Iterator[tuple[str, ...]]:
    base = advice.request.tokens / advice.first.step_s
    for change in advice.changes:
        best = change.prediction
        if best is None:
            yield change.name, "does not fit", "", ""
            continue
        speed = _count(change.tokens_per_s)
        # Without a layout that fits there is no speed to compare with.
        if advice.best:
            speed = _change(change.tokens_per_s / base - 1)
        layout = "the same" if best.layout == advice.first.layout else str(best.layout)
        yield change.name, speed, f"{best.peak_gib:.0f} GiB", layout


def _verdict(diagnosis: Diagnosis) -> str:
    expected = diagnosis.expected
    low_s, high_s = expected.interval_90
    factor = diagnosis.step_s / expected.step_s
    # In the order of how much a reader can act on: a slow step, then a slow layout.
    if diagnosis.step_s > high_s:
        return f"Slower than predicted: the step takes {factor:.1f} times as long."
    # An interval may hold nearly everything, as that of a framework without published runs.
    reached = diagnosis.neighbor_mfu
    if reached and diagnosis.mfu < BELOW * reached[0]:
        times = _range([mfu / diagnosis.mfu for mfu in reached], "{:.1f}")
        return f"Slower than runs like yours: {times} times their time per step."
    if diagnosis.other_layout:
        gain = expected.step_s / diagnosis.other_layout.step_s
        return f"The layout is slow: another one is predicted to be {gain:.1f} times as fast."
    if diagnosis.step_s < low_s:
        return f"Faster than predicted: the step takes {_percent(factor)} of the time."
    return "As predicted: nothing unusual in this step."


def _headline(diagnosis: Diagnosis) -> str:
    """Say what is measured, predicted, and reached by others."""
    expected = diagnosis.expected
    low, high = (100 * expected.mfu * expected.step_s / end for end in expected.interval_90[::-1])
    sentences = [
        f"You reach {100 * diagnosis.mfu:.1f}% MFU ({format_seconds(diagnosis.step_s)} per step).",
        f"Predicted: {100 * expected.mfu:.1f}% [{low:.0f}, {high:.0f}]"
        f" ({format_seconds(expected.step_s)} per step).",
    ]
    if diagnosis.neighbor_mfu:
        reached = _range([100 * mfu for mfu in diagnosis.neighbor_mfu], "{:.0f}")
        sentences.append(f"Published runs like yours reach {reached}% MFU.")
    other = diagnosis.other_layout
    if other:
        gain = expected.step_s / other.step_s
        flags = " ".join(map(flag, diagnosis.request.fixed))
        sentences.append(f"Without {flags} a step is {gain:.1f} times as fast: {other.layout}.")
    return " ".join(sentences)


def _errors(
    request: Request, neighbors: Sequence[Neighbor], prediction: Prediction
) -> Iterator[str]:
    """Yield the nearest published runs, how wrong predictions of them are, and assumptions."""
    rows = []
    for neighbor in neighbors:
        run = neighbor.run
        mfu = ""
        if np.isfinite(run.mfu):  # not all tables have it
            mfu = _percent(run.mfu)
        row = (
            f"{run.table}: {run.model.name}",
            f"{run.layout.gpus} x {run.hardware.name}",
            run.layout.arrangement,
            format_seconds(run.step_s),
            mfu,
            f"{100 * neighbor.error:+.0f}%",
            f"{neighbor.distance:.2g}",
        )
        rows.append(row)
    title = "The nearest published runs; a distance of 1 is twice as many GPUs (published)"
    headings = ("published run", "GPUs", "layout", "step", "MFU", "prediction off by", "distance")
    yield from _section(title, headings, rows)
    errors = np.abs([neighbor.error for neighbor in neighbors])
    yield ""
    yield (
        f"How wrong: on the {len(neighbors)} nearest published runs the median error is"
        f" {_percent(float(np.median(errors)))}, the largest {_percent(float(errors.max()))}, by"
        " constants fitted without them. An interval [ ] holds 90%."
    )
    yield from request.notes
    yield from (f"Beware: {warning}." for warning in prediction.warnings)


def _describe(request: Request) -> str:
    """Return model, GPUs, batch and precision in one line."""
    hardware = request.hardware
    # A network that GPUs of one node do not use would seem to matter.
    network = ""
    if request.gpus > hardware.gpus_per_node:
        network = f", {hardware.network_gbps:g} Gb/s per node"
    return (
        f"{request.model.name} ({_count(request.model.parameters)} parameters) on"
        f" {request.gpus} x {hardware.name}{network}; {_count(request.tokens)} tokens per"
        f" step, sequences of {request.seq_len}, {request.precision}"
    )


def _count(value: float) -> str:
    """1234567 -> "1.23 M"; tokens, parameters."""
    for scale, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.3g}"


def _percent(share: float) -> str:
    """0.123 -> "12%"."""
    if 0 < abs(share) < 1e-3:
        return "below 0.1%"
    return f"{100 * share:.0f}%" if abs(share) >= 0.095 else f"{100 * share:.2g}%"


def _change(share: float) -> str:
    """Return a difference: "+12%"."""
    if abs(share) < CLEAR:
        return "about the same"
    sign = "+" if share > 0 else "-"
    return sign + _percent(abs(share))


def _range(values: Sequence[float], form: str) -> str:
    """Return "52 to 58", or one number if they are printed alike."""
    return " to ".join(dict.fromkeys(map(form.format, values)))


def _with_interval(
    prediction: Prediction, value: Callable[[float], float], text: Callable[[float], str]
) -> str:
    """Return a quantity of the predicted step in seconds, and of the ends of its interval."""
    low, high = sorted(map(value, prediction.interval_90))
    return f"{text(value(prediction.step_s))} [{text(low)}, {text(high)}]"


def _memory(prediction: Prediction, request: Request) -> str:
    """Peak memory of the fullest GPU with its interval, and the risk of running out."""
    low, high = prediction.peak_90
    memory = request.hardware.memory_gib
    peak = f"{prediction.peak_gib:.0f} [{low:.0f}, {high:.0f}] of {memory:.0f} GiB"
    if prediction.fits:
        return peak
    return f"{peak}, {_percent(prediction.out_of_memory)} risk"
