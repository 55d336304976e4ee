"""What the data-parallel lab asks, and how a run answers."""

from dataclasses import replace

import pandas as pd

from labkit.lab.claims import Trend, claim, lies_within, published
from labkit.lab.comparing import MEMORY, compared, contest
from labkit.lab.findings import Finding, Questions
from labkit.lab.quantities import time_of_a_part
from labkit.lab.rows import select
from labkit.lab.units import format_seconds, span
from labkit.parallel.data_parallel.implementations import DEFAULT_LAYOUT, OWN_NAMES, TORCH
from labkit.studies.data_parallel import tables
from labkit.studies.shared.rank_troubles import rank_troubles

QUESTIONS = Questions()
TORCHS = "torch's DistributedDataParallel"
OF_BACKWARD = time_of_a_part("for backward")
OVERLAPPING = (TORCH, "overlapped", "bucketed")
ALMOST_NOTHING_PERCENT = 10.0
HARDLY = 1.05  # published: torch's backward spreads over 3.2 % over bucket sizes


def _name(implementation: str) -> str:
    """ "bucketed_shared" -> "labkit's bucketed wrapper over shared memory"; a reader's own keeps its name."""
    if implementation == TORCH:
        return TORCHS
    if implementation not in OWN_NAMES:
        return implementation.replace("_", " ")
    kind, _, how = implementation.partition("_")
    return f"labkit's {kind} wrapper" + {"shared": " over shared memory", "sync": " after backward"}.get(how, "")


def _troubles(frame: pd.DataFrame, sweep: str) -> str | None:
    return rank_troubles(select(frame, ["implementation"], sweep=sweep), "implementation")


@QUESTIONS.ask("fastest", "Does one of labkit's wrappers average gradients faster than torch's?", "synchronization")
def fastest(frame: pd.DataFrame) -> Finding | None:
    return contest(
        tables.against(frame, TORCH),
        "implementation",
        TORCHS,
        names=_name,
        axis=("workload", "world_size"),
        quantity=OF_BACKWARD,
        choose=lambda winner: f"Average gradients by {winner}",
        keep=f"Keep {TORCHS}",
        caveat=_troubles(frame, "implementations"),
        why=_calls_of_naive(frame),
    )


def _calls_of_naive(frame: pd.DataFrame) -> str | None:
    """How much of what one collective per parameter takes longer is the time of that many short calls."""
    calls = tables.overlap(frame).set_index("implementation")
    if not {TORCH, "naive"} <= set(calls.index):
        return None
    profiled = tables.timeline(frame).iloc[0]
    here = {name: profiled[name] for name in ("workload", "world_size")}
    if select(tables.against(frame, TORCH), implementation="naive", verdict="slower", **here).empty:
        return None
    seconds = select(tables.phases(frame), phase=tables.BACKWARD, **here).set_index("implementation")["seconds"]
    longer = seconds["naive"] - seconds[TORCH]
    more, each = calls.loc["naive", "collectives"] - calls.loc[TORCH, "collectives"], calls.loc["naive", "median_s"]
    if more <= 0 or more * each > 1.02 * longer:  # nothing that they explain, or something else beside
        return None
    return (
        f"With {profiled['workload']}, labkit's naive wrapper makes {more} calls more than torch's; at "
        f"{format_seconds(each)} each they are {format_seconds(more * each)} of the {format_seconds(longer)} that its "
        "backward pass takes longer."
    )


@QUESTIONS.ask("bucket_size", "Is another bucket size faster than the default?", "bucket_size")
def bucket_size(frame: pd.DataFrame) -> Finding | None:
    ratios = tables.buckets(frame)
    found = contest(
        ratios,
        "buckets",
        "the default buckets",
        names="a bucket size of {}".format,
        quantity=OF_BACKWARD,
        axis=("workload", "world_size", "implementation"),
        choose=lambda size: f"Use {size}",
        keep=f"Keep the default buckets ({DEFAULT_LAYOUT})",
        caveat=_troubles(frame, "buckets"),
    )
    return _without(found, "buckets", "panel")


def _without(found: Finding | None, *columns: str) -> Finding | None:
    """The finding, and in its table not these columns, which say nothing to a reader."""
    if found is None or found.table is None:
        return found
    return replace(found, table=found.table.drop(columns=list(columns)))


@QUESTIONS.ask("overlap", "How much of the communication hides behind the backward pass?")
def overlap(frame: pd.DataFrame) -> Finding | None:
    table = tables.exposed(frame)
    if table.empty:
        return None
    hidden = select(table, implementation=list(OVERLAPPING)).dropna(subset="hidden_percent")
    caveat, why = _troubles(frame, "implementations"), _seen_by_the_profiler(frame)
    if hidden.empty:
        if (waits := table[table["low"] > 0]).empty:
            return Finding("undecided", "Too noisy to tell what a step waits for.", table, caveat, why)
        headline = f"A step waits for {span(waits['seconds'], format_seconds)} of communication."
        return Finding("measured", headline, table, caveat, why)
    if (most := hidden["hidden_high_percent"].max()) < ALMOST_NOTHING_PERCENT:
        headline = f"Almost nothing: at most {max(most, 0):.0f} % of the communication hides."
        return Finding("measured", headline, table, caveat, why)
    medians = span(hidden["hidden_percent"], "{:.0f}".format)
    if not (hidden["hidden_low_percent"] > 0).any():
        headline = f"Too noisy to tell: by their medians, wrappers that overlap hide {medians} %."
        below = "Below zero backward is longer by more than all of it." if hidden["hidden_percent"].min() < 0 else None
        return Finding("undecided", headline, table, caveat, " ".join(filter(None, [below, why])) or None)
    headline = f"{medians} % of the communication hides, depending on wrapper and workload."
    if hidden["hidden_percent"].min() < 0:
        up_to = f"{hidden['hidden_percent'].max():.0f} % of the communication hides"
        headline = f"Up to {up_to}; in other settings it costs backward more time than it takes alone."
    return Finding("measured", headline, table, caveat, why)


def _seen_by_the_profiler(frame: pd.DataFrame) -> str | None:
    """Collectives that begin during backward, of the wrapper that starts most of them then."""
    seen = tables.overlap(frame)
    if seen.empty:
        return None
    most = seen.loc[seen["during_percent"].idxmax()]
    beside = "; on a CPU they take the cores that backward needs" if _is_on_cpu(frame) else ""
    return (
        f"In one profiled step {most['begun_during_backward']} of {most['collectives']} collectives of "
        f"{_name(most['implementation'])} begin before backward ends{beside}."
    )


def _is_on_cpu(frame: pd.DataFrame) -> bool:
    return set(select(frame, ["device"], sweep="timeline")["device"]) == {"cpu"}


@QUESTIONS.ask("memory", "Does one of labkit's wrappers need less memory than torch's?")
def memory(frame: pd.DataFrame) -> Finding | None:
    found = contest(
        tables.memory_over_torch(frame),
        "implementation",
        TORCHS,
        names=_name,
        axis=("workload", "world_size"),
        quantity=MEMORY,
        caveat=_troubles(frame, "memory"),
    )
    return _without(found, "low", "high", "p", "verdict")


@QUESTIONS.ask("accumulation", "Does no_sync save time when gradients are accumulated?", "synchronization")
def accumulation(frame: pd.DataFrame) -> Finding | None:
    found = compared(
        tables.accumulation(frame),
        "a step under no_sync",
        "averaging after every micro-batch",
        axis=("workload", "world_size", "implementation"),
        choose="Accumulate gradients under no_sync",
        caveat=_troubles(frame, "accumulation"),
    )
    return _without(found, "synchronized")


@QUESTIONS.ask("published_trends", "Do the published trends hold on this machine?")
def published_trends(frame: pd.DataFrame) -> Finding | None:
    return published([*_ratios_of_backward(frame), _size_does_not_matter_to_torch(frame)])


def _ratios_of_backward(frame: pd.DataFrame) -> list[Trend | None]:
    """`ddp_compare_resnet50.csv`: the overlapping Python wrapper takes 1.02 to 1.21 of torch's backward, and one
    that reduces after backward 1.17 to 1.22 of it.
    """
    in_python = select(tables.against(frame, TORCH), implementation="bucketed")
    after = select(tables.against(frame, "bucketed"), implementation="bucketed_sync")
    return [
        claim("Bucketing in Python is a little slower than torch's", in_python, "slower"),
        claim("Reducing after backward is slower than during it", after, "slower"),
    ]


def _size_does_not_matter_to_torch(frame: pd.DataFrame) -> Trend | None:
    """`ddp_compare_resnet50.csv`: medians of torch's backward over buckets of 3 to 27 MB are 3.2 % apart."""
    table = select(tables.buckets(frame), implementation=TORCH)
    return lies_within("Torch's backward hardly depends on the bucket size", table, 1 / HARDLY, HARDLY)
