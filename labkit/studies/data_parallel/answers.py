"""What a data-parallel run says: one answer to each question, nothing the intervals do not show."""

from collections.abc import Iterator

import pandas as pd

from labkit.bench.statistics import compare_groups, judged
from labkit.lab.answers import Answer, Question, Verdict, answer_each
from labkit.lab.evidence import (
    not_measured_text,
    ranks_text,
    ratio_text,
    ratios_text,
    significant,
    span_text,
    verdict_of,
    with_interval,
    wrong_rows,
)
from labkit.lab.trends import Trend, trends_answer
from labkit.lab.units import format_bytes, join_words
from labkit.parallel.data_parallel.implementations import DEFAULT_LAYOUT, TORCH
from labkit.studies.data_parallel import analysis
from labkit.studies.data_parallel.worker import LOCAL

FASTEST = Question(
    "fastest", "Which way of averaging gradients is the fastest, and how far from torch's is each?", "synchronization"
)
BUCKETS = Question("bucket_size", "Does the bucket size matter here?", "bucket_size")
OVERLAP = Question("overlap", "How much of the communication hides behind the backward pass?")
MEMORY = Question("memory", "What does each need at its peak?")
ACCUMULATION = Question("accumulation", "Does no_sync save time when gradients are accumulated?", "synchronization")
PUBLISHED = Question("published_trends", "Do the published trends hold on this machine?")
QUESTIONS = (FASTEST, BUCKETS, OVERLAP, MEMORY, ACCUMULATION, PUBLISHED)

ALMOST_NOTHING_PERCENT = 10.0
OVERLAPPING = (TORCH, "overlapped", "bucketed")
MIB = 2**20


def answer_all(frame: pd.DataFrame, coverage: pd.DataFrame) -> list[Answer]:
    """An answer to every question; a question whose rows are missing says so."""
    finders = {
        FASTEST: fastest,
        BUCKETS: bucket_size,
        OVERLAP: overlap,
        MEMORY: memory,
        ACCUMULATION: accumulation,
        PUBLISHED: published_trends,
    }
    return answer_each(finders, frame, coverage)


def _name(implementation: str) -> str:
    """As tables and figures name it, and torch's by its owner."""
    return "torch's" if implementation == TORCH else implementation.replace("_", " ")


def fastest(frame: pd.DataFrame) -> Answer | None:
    ratios, times, bad = analysis.against_torch(frame), _backward_times(frame), wrong_rows(frame)
    if times.empty and bad.empty:
        return None
    sentences = []
    if not bad.empty:
        names = join_words(sorted({_name(name) for name in bad["implementation"]}))
        sentences.append(f"WRONG GRADIENTS, and therefore no times, from {names}.")
    if len(ratios):
        sentences.append(_by_verdict(*significant(ratios)))
    if refused := not_measured_text(frame, "implementation"):
        sentences.append(refused)
    for key, of_setting in times.groupby(analysis.SETTING):
        others = ratios[(ratios[analysis.SETTING] == list(key)).all(axis=1)]
        sentences.append(_against_torch(of_setting, others) if len(others) else _alone(of_setting))
    if ratios.empty:
        return Answer(FASTEST, "not measured" if times.empty else "measured", " ".join(sentences), "backward")
    faster, slower = significant(ratios)
    verdict: Verdict = verdict_of(faster, slower)
    is_shown, best = verdict != "no difference shown", _ahead_everywhere(ratios, faster)
    evidence = ratios_text(ratios if best is None else ratios[ratios["implementation"] == best], _place)
    text, advice = " ".join(sentences), _advice(best, faster, slower)
    return Answer(FASTEST, verdict, text, "backward", advice, is_shown, evidence)


def _by_verdict(faster: pd.DataFrame, slower: pd.DataFrame) -> str:
    """Which wrappers are shown to be faster than torch's somewhere, and which slower."""
    parts = [
        f"{join_words([_name(str(name)) for name in dict.fromkeys(some['implementation'])])} "
        f"({span_text(some['ratio'])} of its backward, in {len(some)} comparisons)"
        for some in (faster, slower)
        if len(some)
    ]
    words = [word for word, some in (("Faster", faster), ("Slower", slower)) if len(some)]
    if not parts:
        return "No wrapper is shown to be faster or slower than torch's beyond chance."
    return " ".join(f"{word} than torch's: {part}." for word, part in zip(words, parts, strict=True))


def _place(row: pd.Series) -> str:
    return f"{_name(row['implementation'])} ({row['workload']}, {row['world_size']} ranks)"


def _backward_times(frame: pd.DataFrame) -> pd.DataFrame:
    times = analysis.phases(frame)
    return times[(times["phase"] == analysis.BACKWARD) & (times["implementation"] != LOCAL)]


def _against_torch(times: pd.DataFrame, ratios: pd.DataFrame) -> str:
    torch = times[times["implementation"] == TORCH].iloc[0]
    others = [f"{_name(row['implementation'])} {ratio_text(pd.Series(row))}" for row in ratios.to_dict("records")]
    return (
        f"{ranks_text(torch)}: a backward pass with torch's wrapper takes {with_interval(torch)}; over that, "
        f"{join_words(others)}."
    )


def _alone(times: pd.DataFrame) -> str:
    """Where there is nothing to compare with: medians."""
    parts = [f"{_name(row['implementation'])} {with_interval(pd.Series(row))}" for row in times.to_dict("records")]
    return f"{ranks_text(times.iloc[0])}: a backward pass takes with {join_words(parts)}."


def _ahead_everywhere(ratios: pd.DataFrame, faster: pd.DataFrame) -> str | None:
    """Of the wrappers that are shown to be faster than torch's in every setting, the fastest."""
    settings = ratios.groupby(analysis.SETTING).ngroups
    ahead = {str(name): wins for name, wins in faster.groupby("implementation") if len(wins) == settings}
    return min(ahead, key=lambda name: float(ahead[name]["ratio"].median())) if ahead else None


def _advice(best: str | None, faster: pd.DataFrame, slower: pd.DataFrame) -> str:
    if best is not None:
        how = " (through memory that the ranks share)" if best.endswith("_shared") else ""
        span = span_text(faster.loc[faster["implementation"] == best, "ratio"])
        return f"average gradients by labkit's {_name(best)}{how}: {span} of torch's backward."
    worst = slower.groupby("implementation")["ratio"].max().sort_values(ascending=False)
    avoid = [f"{_name(str(name))} (up to {ratio:.2f} times)" for name, ratio in worst.items()]
    start = "torch's DistributedDataParallel: nothing is shown to be faster everywhere"
    return f"{start}; avoid {join_words(avoid)}." if avoid else f"{start}, nor slower."


def bucket_size(frame: pd.DataFrame) -> Answer | None:
    table, own = analysis.buckets(frame), analysis.own_against_torch_by_bucket(frame)
    if table.empty and own.empty:
        return None
    sentences = []
    for (name, *_), some in table.groupby(["implementation", *analysis.SETTING]):
        values = [f"{row['ratio']:.2f} at {format_bytes(row['bucket_bytes'])}" for row in some.to_dict("records")]
        sentences.append(
            f"{ranks_text(some.iloc[0])}, {_name(name)}: {join_words(values)} of its backward with the default buckets "
            f"({DEFAULT_LAYOUT})."
        )
    if not own.empty:
        span = span_text(own["ratio"])
        sentences.append(f"With equal buckets labkit's bucketed wrapper takes {span} of torch's backward.")
    faster, slower = significant(table)
    if len(table):
        sentences.insert(
            0,
            f"Over the default buckets, a size is shown to be faster in {len(faster)} and slower in {len(slower)} of "
            f"{len(table)} comparisons.",
        )
    verdict: Verdict = "no difference shown" if faster.empty and slower.empty else "yes"
    is_shown = verdict != "no difference shown"
    evidence = ratios_text(table, lambda row: f"{format_bytes(row['bucket_bytes'])}, {_place(row)}")
    text, advice = " ".join(sentences), _size_advice(table, faster, slower)
    return Answer(BUCKETS, verdict, text, "buckets", advice, is_shown, evidence)


def _size_advice(table: pd.DataFrame, faster: pd.DataFrame, slower: pd.DataFrame) -> str:
    """A size is recommended that is shown to be faster, and that not one comparison finds slower."""
    keep = f"keep the default buckets ({DEFAULT_LAYOUT})"
    if faster.empty and slower.empty:
        return f"{keep}: no size is shown to change a backward pass beyond chance."
    if faster.empty:
        return f"{keep}: none is shown to be faster, and {_sizes(slower)} slower."
    sound = faster[~faster["bucket_mb"].isin(slower["bucket_mb"])]
    if sound.empty:
        return f"{keep}: {_sizes(faster)} {_is(faster)} faster in one setting and slower in another."
    wins = sound.groupby("bucket_mb")["ratio"].agg(["size", "median"])
    best = wins.sort_values(["size", "median"], ascending=[False, True]).index[0]
    ratios = sound.loc[sound["bucket_mb"] == best, "ratio"]
    compared = int((table["bucket_mb"] == best).sum())
    return (
        f"buckets of {format_bytes(best * MIB)}: {span_text(ratios)} of the backward with the default buckets, shown "
        f"in {len(ratios)} of {compared} comparisons and contradicted in none."
    )


def _sizes(table: pd.DataFrame) -> str:
    return join_words([format_bytes(size * MIB) for size in sorted(set(table["bucket_mb"]))])


def _is(table: pd.DataFrame) -> str:
    return "is" if table["bucket_mb"].nunique() == 1 else "are"


def overlap(frame: pd.DataFrame) -> Answer | None:
    table, seen = analysis.exposed(frame), analysis.overlap(frame)
    if table.empty:
        return None
    sentences = []
    for _, of_setting in table.groupby(analysis.SETTING):
        where = ranks_text(of_setting.iloc[0])
        if could_hide := [text for row in of_setting.to_dict("records") if (text := _hidden(pd.Series(row)))]:
            sentences.append(f"{where}: of its communication, backward does not wait for {join_words(could_hide)}.")
        sentences.append(f"{where}: {_least_and_most_exposed(of_setting)}.")
    ran = [
        f"{row['begun_during_backward']} of {row['collectives']} of {_name(row['implementation'])} "
        f"({row['during_percent']:.0f} % of their time)"
        for row in seen.to_dict("records")
        if row["implementation"] in ("naive", "overlapped", "bucketed")
    ]
    if ran:
        sentences.append(f"In the profile of one step, collectives that run during backward are {join_words(ran)}.")
    hidden = table[table["implementation"].isin(OVERLAPPING)].dropna(subset="hidden_percent")
    if hidden.empty or not (hidden["hidden_high_percent"] < ALMOST_NOTHING_PERCENT).all():
        return Answer(OVERLAP, "measured", " ".join(sentences), "exposed", more_figures=("timeline",))
    cause = ": whoever carries the bytes takes the cores that backward needs" if _on_cpu(hidden) else ""
    sentences.append(f"Almost nothing hides{cause}.")
    return Answer(OVERLAP, "no", " ".join(sentences), "exposed", more_figures=("timeline",))


def _hidden(row: pd.Series) -> str | None:
    """What of the communication of one wrapper hides; None for one that cannot hide any, or where it is not known."""
    if row["implementation"] not in OVERLAPPING or row["hidden_percent"] != row["hidden_percent"]:
        return None
    text = f"{row['hidden_percent']:.0f} %"
    if row["hidden_low_percent"] == row["hidden_low_percent"]:
        text += f" [{row['hidden_low_percent']:.0f}, {row['hidden_high_percent']:.0f}]"
    return f"{text} with {_name(row['implementation'])}"


def _least_and_most_exposed(table: pd.DataFrame) -> str:
    """The wrappers with the smallest and the largest median; the table has the others."""
    told = table.loc[list(dict.fromkeys([table["seconds"].idxmin(), table["seconds"].idxmax()]))]
    parts = [f"{with_interval(row)} with {_name(row['implementation'])}" for _, row in told.iterrows()]
    return f"a step takes longer than one without communication by {' to '.join(parts)}"


def _on_cpu(table: pd.DataFrame) -> bool:
    return bool((table["device"] == "cpu").all())


def memory(frame: pd.DataFrame) -> Answer | None:
    table = analysis.memory(frame)
    if table.empty:
        return None
    sentences = []
    for _, of_setting in table.groupby(analysis.SETTING):
        parts = [
            f"{_name(row['implementation'])} {format_bytes(row['peak_bytes'])}"
            + (f" ({row['over_torch']:.2f} times torch's)" if row["implementation"] != TORCH else "")
            for row in of_setting.to_dict("records")
        ]
        sentences.append(f"{ranks_text(of_setting.iloc[0])}: {join_words(parts)}.")
    return Answer(MEMORY, "measured", " ".join(sentences), "memory")


def accumulation(frame: pd.DataFrame) -> Answer | None:
    table = analysis.accumulation(frame)
    if table.empty:
        return None
    sentences = [
        f"{ranks_text(row)}, {_name(row['implementation'])}: a step of {row['micro_batches']} micro-batches takes "
        f"{ratio_text(pd.Series(row))} of the time when only the last one is synchronized."
        for row in table.to_dict("records")
    ]
    faster, slower = significant(table)
    sentences.insert(
        0,
        f"Averaging after the last micro-batch alone is shown to be faster in {len(faster)} and slower in "
        f"{len(slower)} of {len(table)} comparisons.",
    )
    verdict = verdict_of(faster, slower)
    advice = None
    if verdict == "yes":
        advice = (
            f"accumulate under no_sync: {span_text(faster['ratio'])} of the time of synchronizing every micro-batch."
        )
    evidence = ratios_text(table, _place)
    return Answer(ACCUMULATION, verdict, " ".join(sentences), "accumulation", advice, advice is not None, evidence)


def published_trends(frame: pd.DataFrame) -> Answer | None:
    return trends_answer(
        PUBLISHED,
        [*_torch_is_ahead(frame), *_after_backward_is_slower(frame), *_size_does_not_matter_to_torch(frame)],
        "published",
    )


def _torch_is_ahead(frame: pd.DataFrame) -> Iterator[Trend]:
    """`ddp_compare_resnet50.csv`: the overlapping Python wrapper takes 1.02 to 1.13 of torch's backward."""
    ratios = analysis.against_torch(frame)
    ratios = judged(ratios[ratios["implementation"] == "bucketed"])
    if not ratios.empty:
        claim = f"Bucketing in Python is a little slower than torch's ({span_text(ratios['ratio'])} here)"
        yield Trend.judged(claim, ratios["verdict"] == "slower", ratios["verdict"] == "faster")


def _after_backward_is_slower(frame: pd.DataFrame) -> Iterator[Trend]:
    """`ddp_compare_resnet50.csv`: reduced after backward it is 1.20 of torch's, and slower than overlapping."""
    rows = analysis.samples(frame, "implementations")
    rows = rows[rows["phase"] == analysis.BACKWARD]
    ratios = compare_groups(rows, "seconds", analysis.SETTING, "implementation", "bucketed")
    ratios = judged(ratios[ratios["implementation"] == "bucketed_sync"])
    if not ratios.empty:
        claim = f"Reducing after backward is slower than during it ({span_text(ratios['ratio'])} here)"
        yield Trend.judged(claim, ratios["verdict"] == "slower", ratios["verdict"] == "faster")


def _size_does_not_matter_to_torch(frame: pd.DataFrame) -> Iterator[Trend]:
    """`ddp_compare_resnet50.csv`: torch's backward stays within 3 % over buckets of 3 to 27 MB."""
    table = analysis.buckets(frame)
    table = table[table["implementation"] == TORCH]
    if not table.empty:
        claim = f"torch's backward hardly depends on the bucket size ({span_text(table['ratio'])} of the default here)"
        near = (table["low"] > 0.95) & (table["high"] < 1.05)
        yield Trend.judged(claim, near, (table["high"] < 0.95) | (table["low"] > 1.05))
