"""How far from the machine's limit each transport is: the tables, and the answer that is read from them."""

import pandas as pd

from labkit.bench.statistics import compare_groups, slowest_rank, summarize_groups
from labkit.lab.answers import Answer, Question
from labkit.lab.evidence import not_measured_text, ratio_text, ratios_text, significant, span_text, wrong_rows
from labkit.lab.units import format_bytes, join_words
from labkit.studies.all_reduce.transports import CHOSEN, FLOOR, MESSAGES, REGISTERED, SHARED_MEMORY, TORCH

SETTING = ["world_size", "n_bytes"]
TRANSPORT_ORDER = (TORCH, MESSAGES, SHARED_MEMORY, REGISTERED, FLOOR)
TRANSPORTS = Question(
    "transports",
    "How far from this machine's limit is an all-reduce over messages, and over shared memory?",
    "transport",
)


def transport_samples(frame: pd.DataFrame, algorithm: str = CHOSEN) -> pd.DataFrame:
    """`seconds` of the slowest rank, one row a repeat of each (setting, transport), of one of labkit's algorithms."""
    columns = [*SETTING, "transport", "repeat", "seconds"]
    if frame.empty or not {"seconds", "transport"} <= set(frame):
        return pd.DataFrame(columns=columns)
    rows = frame[(frame["sweep"] == "transports") & frame["algorithm"].isin([TORCH, FLOOR, algorithm])]
    return slowest_rank(rows.dropna(subset="seconds"), "seconds", [*SETTING, "transport"])


def transport_times(frame: pd.DataFrame, algorithm: str = CHOSEN) -> pd.DataFrame:
    """Median seconds with interval, one row a (setting, transport)."""
    table = summarize_groups(transport_samples(frame, algorithm), "seconds", [*SETTING, "transport"])
    return table.rename(columns={"median": "seconds"})


def over(frame: pd.DataFrame, baseline: str, algorithm: str = CHOSEN) -> pd.DataFrame:
    """Each transport's time over that of `baseline`, from the same interleaved repeats, with interval and verdict."""
    table = compare_groups(transport_samples(frame, algorithm), "seconds", SETTING, "transport", baseline)
    by_order = table["transport"].map(TRANSPORT_ORDER.index)
    return (
        table.assign(by_order=by_order).sort_values([*SETTING, "by_order"], ignore_index=True).drop(columns="by_order")
    )


def transports(frame: pd.DataFrame) -> Answer | None:
    """The answer; None without a row of this sweep that has a time."""
    ratios = over(frame, TORCH)
    own = ratios[ratios["transport"].isin([MESSAGES, SHARED_MEMORY, REGISTERED])]
    if own.empty:
        return None
    shared = own[own["transport"] == SHARED_MEMORY]
    sentences = [_wrong(frame), not_measured_text(frame, "transport")] + [
        _of_ranks(own, over(frame, FLOOR), ranks) for ranks in sorted(own["world_size"].unique())
    ]
    text = " ".join(sentence for sentence in sentences if sentence)
    advised = not shared.empty and len(significant(shared)[0]) == len(shared)
    evidence = ratios_text(shared, lambda row: f"{row['world_size']} ranks, {format_bytes(row['n_bytes'])}")
    return Answer(TRANSPORTS, "measured", text, "transports", _advice(shared), advised, evidence)


def _of_ranks(own: pd.DataFrame, over_floor: pd.DataFrame, ranks: int) -> str:
    """How many times the floor each takes, at the largest size and over all; and of torch's time."""
    floor = over_floor[(over_floor["world_size"] == ranks) & (over_floor["transport"] != FLOOR)]
    here = own[own["world_size"] == ranks]
    text = ""
    if not floor.empty:
        size = floor["n_bytes"].max()
        limits = [
            f"{_named(row['transport'])} {ratio_text(row)}" for _, row in floor[floor["n_bytes"] == size].iterrows()
        ]
        where = f"With {ranks} ranks and {format_bytes(size)}"
        text = f"{where}, times the floor (additions and copies): {join_words(limits)}. "
    parts = [
        f"{_named(str(transport))} {span_text(rows['ratio'])}"
        for transport, rows in here.groupby("transport", sort=False)
    ]
    sizes = dict.fromkeys(format_bytes(pick(here["n_bytes"])) for pick in (min, max))
    return f"{text}With {ranks} ranks and {' to '.join(sizes)}, of the time of torch's all-reduce: {join_words(parts)}."


def _named(transport: str) -> str:
    names = {
        TORCH: "torch's",
        MESSAGES: "labkit's over messages",
        SHARED_MEMORY: "labkit's over shared memory",
        REGISTERED: "labkit's on registered tensors",
    }
    return names.get(transport, transport)


def _wrong(frame: pd.DataFrame) -> str:
    wrong = wrong_rows(frame[frame["sweep"] == "transports"])
    if wrong.empty:
        return ""
    return f"WRONG RESULTS, and therefore no times, over {join_words(sorted(wrong['transport'].unique()))}."


def _advice(shared: pd.DataFrame) -> str | None:
    if shared.empty:
        return None
    faster, slower = significant(shared)
    if faster.empty and slower.empty:
        return "shared memory or messages between ranks of this machine: no difference is shown."
    if slower.empty:
        return (
            f"let ranks of this machine exchange CPU tensors through shared memory: faster than torch's all-reduce in "
            f"{len(faster)} of {len(shared)} settings ({span_text(faster['ratio'])} of its time)."
        )
    return f"shared memory is faster in {len(faster)} and slower in {len(slower)} of {len(shared)} settings."
