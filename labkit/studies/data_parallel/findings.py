"""What the data-parallel lab asks, and how a run answers."""

from dataclasses import replace

import pandas as pd

from labkit.lab.claims import Trend, claim, lies_within, published
from labkit.lab.columns import label_of_several
from labkit.lab.comparing import MEMORY, compared, contest
from labkit.lab.findings import Finding, Questions, at_the_cost_of
from labkit.lab.places import scope_of
from labkit.lab.quantities import time_of_a_part
from labkit.lab.rows import select
from labkit.lab.units import format_bytes, format_seconds, join_words, span
from labkit.parallel.data_parallel.implementations import DEFAULT_LAYOUT, OVER_SHARED_MEMORY, TORCH
from labkit.studies.data_parallel import tables
from labkit.studies.shared.rank_troubles import rank_troubles

QUESTIONS = Questions()
TORCHS = "torch's DDP"
OF_BACKWARD = time_of_a_part("for backward and averaging")
ALMOST_NOTHING_PERCENT = 10.0
HARDLY = 1.05  # published: torch's backward spreads over 3.2 % over bucket sizes


def _name(implementation: str) -> str:
    """As a user types it, but for torch's."""
    return TORCHS if implementation == TORCH else implementation


def _troubles(frame: pd.DataFrame, sweep: str) -> str | None:
    return rank_troubles(select(frame, ["implementation"], sweep=sweep), "implementation")


@QUESTIONS.ask("fastest", "Is one of labkit's wrappers faster than torch's DDP?", "synchronization")
def fastest(frame: pd.DataFrame) -> Finding | None:
    axis = ("workload", "world_size")
    found = contest(
        tables.against(frame, TORCH),
        "implementation",
        TORCHS,
        names=_name,
        axis=axis,
        quantity=OF_BACKWARD,
        choose=lambda winner: f"Average gradients with {winner}",
        keep=f"Keep {TORCHS}",
        caveat=_troubles(frame, "implementations"),
        why=_calls_of_naive(frame),
    )
    if found is None or found.lead is None or found.verdict == "no":
        return found
    winner = found.lead.subject
    steps = select(tables.against(frame, TORCH, tables.STEP), implementation=winner)
    whole = compared(steps, f"a step with {winner}", f"a step with {TORCHS}", axis=axis)
    return at_the_cost_of(found, whole)


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
        f"With {profiled['workload']}, naive makes {more} calls more than {TORCHS}; at {format_seconds(each)} each "
        f"they are {format_seconds(more * each)} of the {format_seconds(longer)} that it takes longer."
    )


@QUESTIONS.ask("bucket_size", "Is another bucket size faster than the default?", "bucket_size")
def bucket_size(frame: pd.DataFrame) -> Finding | None:
    ratios = tables.buckets(frame).drop(columns="panel")
    found = contest(
        ratios,
        "bucket_mb",
        "the default buckets",
        names=lambda size: f"a bucket size of {format_bytes(float(size) * tables.MIB)}",
        quantity=OF_BACKWARD,
        axis=("workload", "world_size", "implementation"),
        choose=lambda size: f"Use {size}",
        keep=f"Keep the default buckets ({DEFAULT_LAYOUT})",
        caveat=_troubles(frame, "buckets"),
    )
    if found is None or found.verdict != "no clear difference":
        return found
    sizes = label_of_several("bucket_mb", sorted(set(ratios["bucket_mb"])))
    headline = f"No clear difference{OF_BACKWARD.lead} between {sizes} and the default{OF_BACKWARD.part}."
    return replace(found, headline=headline)


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
    hidden = table.dropna(subset="hidden_percent")
    seen = select(tables.overlap(frame), implementation=list(tables.OVERLAPPING))["during_percent"]
    told = "of the collectives' time runs during backward"
    found = Finding(
        "measured",
        f"{span(hidden['hidden_percent'].clip(lower=0), '{:.0f}'.format)} % of the communication hides.",
        table,
        _troubles(frame, "implementations"),
        where=scope_of(table if hidden.empty else hidden, [*tables.SETTING, "implementation"]),
        also=f"In one profiled step, up to {seen.max():.0f} % {told}." if len(seen) else None,
    )
    is_on_cpu = set(table["device"]) == {"cpu"}
    why = "On a CPU, collectives take the cores that backward needs." if is_on_cpu else None
    if hidden.empty:
        if (waits := table[table["low"] > 0]).empty:
            return replace(found, verdict="undecided", headline="Too noisy to tell what a step waits for.")
        return replace(found, headline=f"A step waits for {span(waits['seconds'], format_seconds)} of communication.")
    if (most := max(hidden["hidden_high_percent"].max(), 0)) < ALMOST_NOTHING_PERCENT:
        return replace(found, headline=f"Almost nothing: at most {most:.0f} % of the communication hides.", why=why)
    if not (hidden["hidden_low_percent"] > 0).any():
        most = max(hidden["hidden_percent"].max(), 0)
        headline = f"Too noisy to tell: by their medians, wrappers that overlap hide up to {most:.0f} %."
        return replace(found, verdict="undecided", headline=headline)
    if len(seen) and seen.max() > 2 * (median := hidden["hidden_percent"].max()):
        headline = f"At most {median:.0f} % by the medians, though up to {seen.max():.0f} % {told}."
        return replace(found, headline=headline, also=None, why=why)
    return found


@QUESTIONS.ask("memory", "Does one of labkit's wrappers need less memory than torch's DDP?")
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
    found = _without(found, "low", "high", "p", "verdict")
    unseen = [name for name in OVER_SHARED_MEMORY if len(select(frame, implementation=name))]
    if found is None or not unseen:
        return found
    caveat = f"Not measured: {join_words(unseen)}, since torch's allocator does not see memory that ranks share."
    return replace(found, caveat=" ".join(filter(None, [found.caveat, caveat])))


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
