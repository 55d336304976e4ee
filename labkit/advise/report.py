"""The answers of `labkit advise` in lines: a verdict, a sentence, tables that say their source."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from labkit.advise.advice import Advice, strategy
from labkit.advise.explain import Diagnosis, causal_share
from labkit.advise.request import TOKENS_PER_PARAMETER, Question, flag
from labkit.lab.commands.console import table_lines
from labkit.lab.units import counted, format_seconds, join_words
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


def report_advice(question: Question, advice: Advice) -> Iterator[str]:
    """Yield the verdict first, then memory, layouts, what would change the answer, its error."""
    first = advice.first
    # Whether it fits comes before how fast it is: a layout that does not fit has no speed.
    yield from _advice_verdict(advice)
    yield f"  {_describe(question.request)}"
    stages = [
        (f"{stage} of {len(first.memory_gib)}", *(f"{gib:.1f}" for gib in parts.values()))
        for stage, parts in enumerate(first.memory_gib[:MAX_ROWS], start=1)
    ]
    title = f"Memory per GPU in GiB: {first.layout} (predicted)"
    yield from _section(title, ("stage", *first.memory_gib[0]), stages)
    if advice.best:
        columns = [_column(question, one) for one in advice.best]
        title = f"The best {counted(len(columns), 'layout')}, with 90% intervals (predicted)"
        headings = ("place", *(str(place) for place in range(1, len(columns) + 1)))
        cells = [(name, *(column[name] for column in columns)) for name in columns[0]]
        yield from _section(title, headings, cells)
    if advice.others:
        losers = [
            (strategy(one.layout), str(one.layout), _compare(one, advice)) for one in advice.others
        ]
        headings = ("strategy", "its best", "against the best")
        yield from _section("Why the others lose (predicted)", headings, losers)
    headings = ("if", "tokens per second", "memory", "best layout then")
    title = "What would change the answer (predicted)"
    yield from _section(title, headings, _change_rows(advice))
    yield from _nearest(advice.neighbors)
    yield ""
    yield from _notes(question, advice.neighbors, first)
    yield (
        "Memory counts a training step: no evaluation, no other process on the GPU, no tensors"
        " that a program keeps."
    )


def _section(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield a table under its title, which ends with where its numbers come from."""
    yield from ("", title)
    yield from (f"  {line}" for line in table_lines(rows, *headings))


def _advice_verdict(advice: Advice) -> tuple[str, str]:
    first = advice.first
    memory = advice.request.hardware.memory_gib
    peak = f"{first.peak_gib:.0f} [{first.peak_low:.0f}, {first.peak_high:.0f}]"
    remedy = advice.remedy
    if not advice.best:
        least = f"{peak} GiB per GPU at least, {FITS_SHARE * memory:.0f} can be used"
        change = f" Change first: {remedy}." if remedy else ""
        return f"No, it does not fit: {least}.", f"Least memory: {first.layout}.{change}"
    step = _with_interval(first, float, format_seconds)
    headline = f"Use {first.layout}: {step} per step, {_percent(first.mfu)} MFU (predicted)."
    fit = f"{peak} of {memory:.0f} GiB per GPU"
    if first.has_room:
        return f"Yes, it fits: {fit}.", headline
    if remedy:
        headline += f" Safer: {remedy}."
    if first.fits:
        return f"Only just: {fit}, and steps may become slow.", headline
    risk = _percent(first.out_of_memory)
    return f"It may fit: {fit}, {risk} risk of running out.", headline


def _column(question: Question, one: Prediction) -> dict[str, str]:
    """Return a layout's cells by row."""
    request = question.request
    layout = one.layout
    tokens = request.tokens
    steps = question.budget / tokens
    budget = f"days, {_count(question.budget)} tokens"
    if question.options.tokens is None:
        budget += f" ({TOKENS_PER_PARAMETER} per parameter)"
    return {
        "arrangement": str(layout),
        "micro-batch x accumulated": f"{layout.micro_batch} x {layout.micro_batches:.0f}",
        "recomputes": RECOMPUTED[layout.recompute],
        "memory": _memory(one, request.hardware.memory_gib),
        "step": _with_interval(one, float, format_seconds),
        "MFU, all scores counted": _with_interval(
            one, lambda step_s: one.mfu * one.step_s / step_s, _percent
        ),
        "MFU, causal half": _percent(one.mfu * causal_share(request)),
        "tokens per second": _with_interval(one, lambda step_s: tokens / step_s, _count),
        budget: _with_interval(one, lambda step_s: steps * step_s / 86400, "{:.3g}".format),
        "GPU-hours": _count(steps * one.step_s / 3600 * request.gpus),
    }


def _compare(one: Prediction, advice: Advice) -> str:
    """Return why a layout loses against the best one, in a few words."""
    best = advice.first
    memory = _memory(one, advice.request.hardware.memory_gib)
    if not one.may_fit:
        return f"does not fit: {memory}"
    if one.is_unstable and not best.is_unstable:
        return f"{memory}: steps become slow so near the limit"
    slower = one.step_s / best.step_s - 1
    change = _change(slower)
    if abs(slower) < CLEAR:
        return change
    if slower < 0:
        # Ranked below all the same: the ranking prefers what is well within memory and data.
        if one.has_room:
            return f"{change}, but further from published runs"
        return f"{change}, but {memory}"
    # The part of the step that loses most time against the best layout is the reason.
    usual = best.sums_s
    lost = {name: seconds - usual[name] for name, seconds in one.sums_s.items()}
    return f"{change}: {max(lost, key=lost.__getitem__)}"


def _change_rows(advice: Advice) -> list[tuple[str, ...]]:
    base = advice.request.tokens / advice.first.step_s
    rows: list[tuple[str, ...]] = []
    for change in advice.changes:
        one = change.prediction
        if one is None:
            rows.append((change.name, "does not fit", "", ""))
            continue
        speed = _count(change.tokens_per_s)
        # Without a layout that fits there is no speed to compare with.
        if advice.best:
            speed = _change(change.tokens_per_s / base - 1)
        layout = "the same" if one.layout == advice.first.layout else str(one.layout)
        rows.append((change.name, speed, f"{one.peak_gib:.0f} GiB", layout))
    return rows


def report_diagnosis(question: Question, diagnosis: Diagnosis) -> Iterator[str]:
    """Yield the verdict, then possible causes, published runs, and the predicted parts."""
    expected = diagnosis.expected
    yield from (_verdict(diagnosis), _headline(diagnosis))
    yield f"  {_describe(question.request)}; {expected.layout}"
    if diagnosis.causes:
        rows = []
        for cause in diagnosis.causes:
            left = f"{_percent(cause.mfu)} or more" if cause.mfu else "any"
            share = diagnosis.share(cause)
            explained = "up to all" if share == 1 else f"up to {_percent(share)}"
            rows.append((cause.name, left, explained, cause.check))
        title = "Possible causes, each alone and at its worst (predicted)"
        yield from _section(title, ("cause", "MFU it leaves", "share of the gap", "check"), rows)
    yield from _nearest(diagnosis.neighbors)
    # Others count otherwise, and then two figures of the same run differ.
    peak = f"{question.request.hardware.peak_tflops:g} TFLOP/s"
    counted_as = [(name, f"{100 * mfu:.1f}%") for name, mfu in diagnosis.conventions.items()]
    title = f"Your MFU by each way to count it; the dense peak is {peak} (measured by you)"
    yield from _section(title, ("counted as", "MFU"), counted_as)
    parts = [
        (name, format_seconds(value), _percent(value / expected.step_s))
        for name, value in sorted(expected.sums_s.items(), key=lambda part: -part[1])
        if value
    ]
    yield from _section("Parts of the predicted step", ("part", "seconds", "share"), parts)
    yield ""
    yield from _notes(question, diagnosis.neighbors, expected)


def _verdict(diagnosis: Diagnosis) -> str:
    expected = diagnosis.expected
    low_s, high_s = expected.interval_90
    reached = diagnosis.neighbor_mfu
    other = diagnosis.other_layout
    # In the order of how much a reader can act on: a slow step, a slow layout, a way of counting.
    if diagnosis.step_s > high_s:
        factor = diagnosis.step_s / expected.step_s
        return f"Slower than predicted: the step takes {factor:.1f} times as long."
    # An interval may hold nearly everything, as that of a framework without published runs.
    if reached and diagnosis.mfu < BELOW * reached[0]:
        times = " to ".join(dict.fromkeys(f"{mfu / diagnosis.mfu:.1f}" for mfu in reached))
        return f"Slower than runs like yours: {times} times their time per step."
    if other:
        factor = expected.step_s / other.step_s
        return f"The layout is slow: another one is predicted to be {factor:.1f} times as fast."
    if diagnosis.step_s < low_s:
        share = _percent(diagnosis.step_s / expected.step_s)
        return f"Faster than predicted: the step takes {share} of the time."
    if diagnosis.convention not in (None, next(iter(diagnosis.conventions))):
        return f"Only the convention differs: {diagnosis.convention}."
    return "As predicted: nothing unusual in this step."


def _headline(diagnosis: Diagnosis) -> str:
    """Say what is measured, predicted, and reached by others."""
    expected = diagnosis.expected
    low, high = (100 * expected.mfu * expected.step_s / end for end in expected.interval_90[::-1])
    sentences = [
        f"You reach {100 * diagnosis.mfu:.1f}% MFU ({format_seconds(diagnosis.step_s)} per step)."
        f" Predicted: {100 * expected.mfu:.1f}% [{low:.0f}, {high:.0f}]"
        f" ({format_seconds(expected.step_s)} per step)."
    ]
    if diagnosis.neighbor_mfu:
        # One number if the least and the largest are the same.
        reached = " to ".join(dict.fromkeys(f"{100 * mfu:.0f}" for mfu in diagnosis.neighbor_mfu))
        sentences.append(f"Published runs like yours reach {reached}% MFU.")
    other = diagnosis.other_layout
    if other:
        factor = expected.step_s / other.step_s
        flags = " ".join(map(flag, diagnosis.request.fixed))
        sentences.append(f"Without {flags} a step is {factor:.1f} times as fast: {other.layout}.")
    return " ".join(sentences)


def _nearest(rows: Sequence[Neighbor]) -> Iterator[str]:
    """Yield the published runs nearest to the request, and how wrong the prediction of each is."""
    cells = []
    for row in rows:
        run = row.run
        gpus = f"{run.layout.gpus} x {run.hardware.name}"
        mfu = ""
        if np.isfinite(run.mfu):  # not all tables have it
            mfu = _percent(run.mfu)
        step = format_seconds(run.step_s)
        error = f"{100 * row.error:+.0f}%"
        name = f"{run.table}: {run.model.name}"
        cells.append((name, gpus, run.layout.arrangement, step, mfu, error, f"{row.distance:.2g}"))
    title = "The nearest published runs; a distance of 1 is twice as many GPUs (published)"
    headings = ("published run", "GPUs", "layout", "step", "MFU", "prediction off by", "distance")
    yield from _section(title, headings, cells)


def _notes(question: Question, rows: Sequence[Neighbor], prediction: Prediction) -> Iterator[str]:
    """Yield how wrong this may be, its assumptions, and where it extrapolates."""
    errors = np.abs([row.error for row in rows])
    median = _percent(float(np.median(errors)))
    worst = _percent(float(errors.max()))
    yield (
        f"How wrong: on the {len(rows)} nearest published runs the median error is {median}, the"
        f" largest {worst}, by constants fitted without them. An interval [ ] holds 90%."
    )
    if question.calibration:
        yield question.calibration
    if question.assumptions:
        yield f"Assumed: {join_words(question.assumptions)}."
    if question.request.framework == "generic":
        yield (
            "No framework named: --framework or --calibrate my_runs.csv (three runs) narrows the"
            " intervals."
        )
    # The verdict has said what the other warnings say.
    yield from (f"Beware: {text}." for text in prediction.warnings if text.startswith("extra"))


def _describe(request: Request) -> str:
    """Return model, GPUs, batch and precision in one line."""
    hardware = request.hardware
    # A network that GPUs of one node do not use would seem to matter.
    network = ""
    if request.gpus > hardware.gpus_per_node:
        network = f", {hardware.network_gbps:g} Gb/s per node"
    return (
        f"{request.model.name} ({_count(float(request.model.parameters))} parameters) on"
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


def _with_interval(
    one: Prediction, value: Callable[[float], float], text: Callable[[float], str]
) -> str:
    """Return a quantity of the predicted step in seconds, and of the ends of its interval."""
    low, high = sorted(map(value, one.interval_90))
    return f"{text(value(one.step_s))} [{text(low)}, {text(high)}]"


def _memory(one: Prediction, memory_gib: float) -> str:
    """Peak memory of the fullest GPU with its interval, and the risk of running out."""
    peak = f"{one.peak_gib:.0f} [{one.peak_low:.0f}, {one.peak_high:.0f}] of {memory_gib:.0f} GiB"
    if one.fits:
        return peak
    return f"{peak}, {_percent(one.out_of_memory)} risk"
