"""Answers in words: headline, statement, scope, notes and advice from the fields of an answer.

A headline begins with the verdict. A statement stands next to the verdict and does not repeat it.
"""

from typing import NamedTuple

from labkit.lab.facts import Agreement, Answer, Comparison, Finding, Note, Status
from labkit.lab.phrases import (
    ceil_percent,
    describe_ratio,
    describe_region,
    describe_scope,
    find_change,
    format_outside,
    is_time,
    phrasing,
)
from labkit.lab.units import column, counted, format_estimate, format_value, join_words

MAX_REGION_NAMES = 3

STATUS_TEXTS: dict[Status, str] = {
    "wrong": "Wrong results, not timed",
    "oom": "Out of memory",
    "failed": "Failed",
    "timeout": "Did not end in time",
    "too_slow": "Right, but too slow to time",
    "refused": "Not measured",
    "skipped": "Not measured",
    "pending": "Not measured",
}


class Sentence(NamedTuple):
    """The parts of an answer's sentence, in the order in which they are read."""

    verdict: str = ""
    """ "Yes"; empty if the text says it."""
    extent: str = ""
    """Where, or how far, it holds: "from 1 MiB up"."""
    text: str = ""
    """ "the ring is 3 times faster than torch."."""


def headline(answer: Answer) -> str:
    """Say the answer in one sentence, verdict first: "Yes, from 1 MiB up: the ring is ..."."""
    sentence = _word_answer(answer)
    start = ", ".join(filter(None, (sentence.verdict, sentence.extent)))
    return capitalize(": ".join(filter(None, (start, sentence.text))))


def statement(answer: Answer) -> str:
    """Say the answer next to its verdict: "From 1 MiB up: the ring is ..."."""
    sentence = _word_answer(answer)
    return capitalize(": ".join(filter(None, (sentence.extent, sentence.text))))


def _word_answer(answer: Answer) -> Sentence:
    match answer:
        case Comparison(verdict="undecided" | "no clear difference"):
            return _word_no_difference(answer)
        case Comparison(verdict="no"):
            return _word_no_gain(answer)
        case Comparison():
            return _word_gain(answer)
        case Agreement():
            return _word_agreement(answer)
        case Finding():
            return Sentence(text=answer.says.format_map(_row_words(answer)))
    cause = _cause(answer)
    reason = answer.reason if cause is None else cause.reason
    return Sentence(verdict="Not measured", text=_with_period(reason))


def _word_gain(answer: Comparison) -> Sentence:
    """Word "yes" and "it depends"."""
    counts = answer.counts
    difference = _difference(answer)
    if answer.is_overall:
        extent = f"over all {counts.total} configurations"
        return Sentence(capitalize(answer.verdict), extent, f"{difference}.")
    region = _short_region(answer)
    if counts.worse:
        worse = f"is {phrasing(answer.quantity).worse} {_other_values(answer)}"
        return Sentence(verdict="It depends", text=f"{difference} {region}, and {worse}.")
    if counts.better == counts.total:
        return Sentence(verdict="Yes", text=f"{difference}.")
    if counts.is_mostly_better:
        return Sentence(verdict="Yes", extent=region, text=f"{difference}.")
    return Sentence(extent=f"only {region}", text=f"{difference}.")


def _word_no_gain(answer: Comparison) -> Sentence:
    """Word "no"."""
    counts = answer.counts
    phrases = phrasing(answer.quantity)
    is_worse_everywhere = counts.worse == counts.total
    extent = ""
    if answer.subject is None and is_worse_everywhere:
        text = f"every {answer.noun} is {phrases.worse} than {answer.baseline}"
    elif answer.subject is None:
        text = f"no {answer.noun} is measurably {phrases.better} than {answer.baseline}"
    elif answer.is_overall:
        extent = f"over all {counts.total} configurations"
        text = _difference(answer)
    elif is_worse_everywhere:
        text = _difference(answer)
    else:
        # How much slower it is in some configurations would read as the answer for all.
        text = f"{answer.subject} is never measurably {phrases.better} than {answer.baseline}"
        text += f", and {phrases.worse} in some configurations"
    return Sentence("No", extent, f"{text}.")


def _word_no_difference(answer: Comparison) -> Sentence:
    """Word "undecided" and "no clear difference"."""
    is_undecided = answer.verdict == "undecided"
    has_intervals = answer.table is not None and answer.table["p"].notna().any()
    if is_undecided and not answer.seconds_more and not has_intervals:
        name = answer.subject or "alternatives"
        text = f"too few repeats to compare {name} with {answer.baseline}."
        return Sentence(verdict="Undecided", text=text)
    if answer.subject is not None:
        compared = answer.subject
    elif answer.n_alternatives == 2:
        compared = f"either {answer.noun}"
    else:
        compared = f"any of {answer.n_alternatives} {answer.noun}s"
    phrases = phrasing(answer.quantity)
    if not is_undecided:
        names = f"{compared} and {answer.baseline}"
        return Sentence(text=f"no clear difference in {phrases.noun} between {names}.")
    start = "the run does not show"
    if answer.seconds_more:  # a run that does not say how long its rounds took has none
        start = f"about {format_estimate(answer.seconds_more)} more would show"
    gain = f"whether {compared} is 10% {phrases.better} than {answer.baseline}"
    return Sentence(verdict="Undecided", text=f"{start} {gain}.")


def _word_agreement(answer: Agreement) -> Sentence:
    counts = answer.counts
    if answer.verdict == "yes":
        difference = f"are within {ceil_percent(answer.factor)} of"
        if answer.factor == 1:
            difference = "equal"
        text = f"all {answer.subject} {difference} {answer.reference}."
        return Sentence(verdict="Yes", text=text)
    if not counts.better:
        share = "no"
    elif 2 * counts.better < counts.total:
        share = "fewer than half of the"
    elif 2 * counts.better == counts.total:
        share = "half of the"
    else:
        share = "most"
    # Rounded to 1.5, the worst would seem to be within the factor of 1.5 that it misses.
    worst = format_outside(answer.worst, answer.within)
    compared = f"is {worst} times {answer.reference}"
    if is_time(answer.quantity):
        compared = f"takes {worst} times the predicted time"
    within = f"within a factor of {answer.within:g} of {answer.reference}"
    text = f"{share} {answer.subject} are {within}; the worst {compared}."
    if answer.verdict == "it depends":
        return Sentence(extent="partly", text=text)
    return Sentence(verdict="No", text=text)


def _difference(answer: Comparison) -> str:
    """Say "the ring takes 15 to 23% less time than torch" of an answer that shows a difference."""
    change = find_change(answer)
    assert change is not None
    phrase = change.phrase
    amount = f"{phrase.verb} {change.text} {phrase.words}"
    return f"{answer.subject} {amount} {phrase.preposition} {answer.baseline}"


def overall(answer: Answer) -> str:
    """Say "Over all 4 configurations: 12% [8, 16] less time."; "" for a single configuration."""
    if not isinstance(answer, Comparison) or answer.overall is None:
        return ""
    pooled = answer.overall
    phrases = phrasing(answer.quantity)
    start = f"Over all {pooled.n} configurations"
    low = describe_ratio(pooled.low, pooled.low, pooled.low, phrases)
    high = describe_ratio(pooled.high, pooled.high, pooled.high, phrases)
    if answer.is_overall and pooled.low < pooled.high:
        # The headline has said the ratio itself, so the line below it has the interval alone.
        ends = [low, high]
        if pooled.direction == "better":  # from the smaller effect to the larger one
            ends.reverse()
        return f"95% interval: from {ends[0]} to {ends[1]}."
    if pooled.direction is not None:
        return f"{start}: {describe_ratio(pooled.ratio, pooled.low, pooled.high, phrases)}."
    if pooled.low == pooled.high:
        return f"{start}: no clear difference."
    return f"{start}: between {low} and {high}."


def _row_words(answer: Finding) -> dict[str, str]:
    """Return the values of a report's row as words, by column."""
    return {str(name): format_value(str(name), value) for name, value in answer.values.items()}


def advice(answer: Answer) -> str | None:
    """Word the recommendation, with the exceptions that the run shows."""
    if answer.advice is None:
        return None
    match answer:
        case Finding():
            return capitalize(answer.advice.format_map(_row_words(answer)))
        case Comparison():
            better = phrasing(answer.quantity).better
            where = ""
            has_limits = answer.counts.better < answer.counts.total and not answer.is_overall
            if answer.is_better and has_limits and answer.region is not None:
                where = f" {describe_region(answer.region)}"
            elif answer.is_better and has_limits:
                where = f" ({better} {_some(answer)})"
            text = answer.advice.format_map({"name": answer.subject or "", "where": where})
            for name, region in answer.overtaken:
                place = "in some configurations"
                if region is not None:
                    place = describe_region(region)
                text += f" {capitalize(place)}, {name} is {better} still."
            return capitalize(text)
    return capitalize(answer.advice)


def _some(answer: Comparison) -> str:
    share = "most" if answer.counts.is_mostly_better else "some"
    return f"in {share} configurations"


def _short_region(answer: Comparison) -> str:
    """Name the region in a few words; a list of many names only says how much it covers."""
    region = answer.region
    if region is None or len(region.values) > MAX_REGION_NAMES:
        return _some(answer)
    return describe_region(region)


def _other_values(answer: Comparison) -> str:
    """Name the configurations outside of the region: "for other values of width"."""
    if answer.region is None or answer.region.relation == "among":
        return "in others"
    if answer.region.column == "world_size":
        return "with other numbers of ranks"
    # Titles such as "features" and "batch" have no regular plural.
    return f"for other values of {column(answer.region.column).title}"


def scope(answer: Answer) -> str:
    """Say what the answer covers: "faster in 5 of 6 configurations: gloo · 2 and 4 ranks"."""
    covered = describe_scope(answer.scope)
    counts = ""
    match answer:
        case Comparison():
            counts = _count_configurations(answer)
        case Agreement():
            rows = counted(answer.counts.total, "comparison")
            counts = f"{answer.counts.better} of {rows}"
    return ": ".join(filter(None, (counts, covered)))


def _count_configurations(answer: Comparison) -> str:
    """Say "faster in 10 of 12 configurations, slower in 1", or "all 6 configurations"."""
    counts = answer.counts
    n = counts.total
    noun = "comparisons" if answer.subject is None else "configurations"
    # All are alike: how many they are says enough.
    if n in (counts.better, counts.worse) or counts.better + counts.worse == 0:
        return {1: "", 2: f"both {noun}"}.get(n, f"all {n} {noun}")
    phrases = phrasing(answer.quantity)
    if not counts.better:
        return f"{phrases.worse} in {counts.worse} of {n} {noun}"
    text = f"{phrases.better} in {counts.better} of {n} {noun}"
    if counts.worse:
        text += f", {phrases.worse} in {counts.worse}"
    return text


def _cause(answer: Answer) -> Note | None:
    """Return the note that says why nothing was measured; None if the answer's reason does."""
    # Why an alternative could not run says more than why points are missing.
    by_name = [note for note in answer.notes if note.names]
    if by_name:
        return by_name[0]
    if answer.reason or not answer.notes:
        return None
    return answer.notes[0]


def notes(answer: Answer) -> list[str]:
    """Word everything that a reader would act on, one sentence each."""
    remaining = list(answer.notes)
    if answer.verdict == "not measured":
        # The headline has said it, unless the note also names alternatives.
        remaining = [note for note in remaining if note.names or note is not _cause(answer)]
    sentences = [*answer.remarks, *(describe_note(note) for note in remaining)]
    if isinstance(answer, Comparison) and answer.ties:
        sentences.insert(0, f"As good, to within 3%: {join_words(answer.ties)}.")
    return sentences


def describe_note(note: Note) -> str:
    """Say "Failed: ring and butterfly (no plan).", or "2 points skipped: needs 51 GiB."."""
    if note.names:
        return f"{STATUS_TEXTS[note.status]}: {join_words(note.names)} ({note.reason})."
    return _with_period(f"{counted(note.points, 'point')} {note.status}: {note.reason}")


def capitalize(text: str) -> str:
    return text[:1].upper() + text[1:]


def _with_period(text: str) -> str:
    return f"{text.removesuffix('.')}."
