"""How far from the machine's limit each transport is: the tables, and the answer that is read from them."""

import pandas as pd

from labkit.bench.statistics import compare_groups, slowest_rank, summarize_groups
from labkit.lab.answers import Answer, Question, Verdict
from labkit.lab.evidence import not_measured_text, ratio_text, ratios_text, shown, span_text, wrong_rows
from labkit.lab.units import format_bytes, join_words
from labkit.studies.all_reduce.transports import CHOSEN, COPY, MESSAGES, REGISTERED, SHARED_MEMORY, TORCH

SETTING = ["world_size", "n_bytes"]
TRANSPORT_ORDER = (TORCH, MESSAGES, SHARED_MEMORY, REGISTERED, COPY)
TRANSPORTS = Question(
    "transports",
    "How far from this machine's limit is an all-reduce over torch's messages, and over shared memory?",
    "transport",
)


def transport_samples(frame: pd.DataFrame, algorithm: str = CHOSEN) -> pd.DataFrame:
    """`seconds` of the slowest rank, one row a repeat of each (setting, transport), of one of labkit's algorithms."""
    columns = [*SETTING, "transport", "repeat", "seconds"]
    if frame.empty or not {"seconds", "transport"} <= set(frame):
        return pd.DataFrame(columns=columns)
    rows = frame[(frame["sweep"] == "transports") & frame["algorithm"].isin([TORCH, COPY, algorithm])]
    return slowest_rank(rows.dropna(subset="seconds"), "seconds", [*SETTING, "transport"])


def transport_times(frame: pd.DataFrame, algorithm: str = CHOSEN) -> pd.DataFrame:
    """Median seconds with interval, one row a (setting, transport)."""
    table = summarize_groups(transport_samples(frame, algorithm), "seconds", [*SETTING, "transport"])
    return table.rename(columns={"median": "seconds"})


def over(frame: pd.DataFrame, baseline: str, algorithm: str = CHOSEN) -> pd.DataFrame:
    """Each transport's time over that of `baseline`, from the same interleaved repeats, with interval and verdict."""
    return compare_groups(transport_samples(frame, algorithm), "seconds", SETTING, "transport", baseline)


def transports(frame: pd.DataFrame) -> Answer | None:
    """The answer; None without a row of this sweep that has a time."""
    ratios = over(frame, TORCH)
    own = ratios[ratios["transport"].isin([MESSAGES, SHARED_MEMORY, REGISTERED])]
    if own.empty:
        return None
    shared = own[own["transport"] == SHARED_MEMORY]
    compared = own if shared.empty else shared
    faster, slower = shown(compared, SETTING)
    sentences = [_wrong(frame), not_measured_text(frame, "transport")] + [
        _of_ranks(own, over(frame, COPY), ranks) for ranks in sorted(own["world_size"].unique())
    ]
    text = " ".join(sentence for sentence in sentences if sentence)
    verdict = _verdict(faster, slower, compared)
    advised = verdict == "yes" and not shared.empty
    evidence = ratios_text(shared, lambda row: f"{row['world_size']} ranks, {format_bytes(row['n_bytes'])}")
    return Answer(TRANSPORTS, verdict, text, "transports", _advice(shared), advised, evidence)


def _verdict(faster: pd.DataFrame, slower: pd.DataFrame, compared: pd.DataFrame) -> Verdict:
    if faster.empty and slower.empty:
        return "no difference shown"
    return "yes" if len(faster) == len(compared) else "mixed" if len(faster) else "no"


def _of_ranks(own: pd.DataFrame, over_floor: pd.DataFrame, ranks: int) -> str:
    """What each transport takes of torch's time, and how many times the floor at the largest size."""
    parts = []
    for transport, rows in own[own["world_size"] == ranks].groupby("transport", sort=False):
        parts.append(f"{_named(str(transport))} take {span_text(rows['ratio'])} of torch's time")
    floor = over_floor[over_floor["world_size"] == ranks]
    largest = floor[(floor["n_bytes"] == floor["n_bytes"].max()) & (floor["transport"] != COPY)]
    limits = [f"{ratio_text(row)} for {_named(row['transport'])}" for _, row in largest.iterrows()]
    text = f"{ranks} ranks, {format_bytes(own['n_bytes'].min())} to {format_bytes(own['n_bytes'].max())}: "
    text += f"{join_words(parts)}."
    if limits:
        size = format_bytes(largest["n_bytes"].iloc[0])
        text += f" At {size}, times what copying the bytes takes: {join_words(limits)}."
    return text


def _named(transport: str) -> str:
    names = {
        TORCH: "torch's own",
        MESSAGES: "labkit's messages",
        SHARED_MEMORY: "tensors copied into shared memory",
        REGISTERED: "tensors that lie in shared memory",
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
    faster, slower = shown(shared, SETTING)
    if faster.empty and slower.empty:
        return "shared memory or messages between ranks of this machine: no difference is shown."
    if slower.empty:
        return (
            f"let ranks of this machine exchange CPU tensors through shared memory: faster than torch's all-reduce in "
            f"{len(faster)} of {len(shared)} settings ({span_text(faster['ratio'])} of its time)."
        )
    return f"shared memory is faster in {len(faster)} and slower in {len(slower)} of {len(shared)} settings."
