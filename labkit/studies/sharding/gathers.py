"""How long a step waits for its gathers, and what they take: alone, and while it computes."""

import pandas as pd

from labkit.lab.rows import in_order, select, summed
from labkit.studies.sharding.tables import DDP, FSDP, ORDER, SETTING, STEPS, WAITING, WHERE, named, sent, timed
from labkit.studies.sharding.worker import GATHER

OF_ROUND = [*SETTING, "way", "rank", "repeat", "seconds"]


def gathers(frame: pd.DataFrame) -> pd.DataFrame:
    """By setting and way: gathers per step, how many were complete when they were needed, and how long steps waited.

    `gathering_s` is what they take while the step computes, `alone_s` as many bytes with nothing else to do.
    """
    keys, counts = [*SETTING, "way"], ["gathers", "in_time"]
    rows = select(named(frame), [*keys, *counts, "gathering_s", "seconds"], kind="time", part=WAITING)
    rows = rows.dropna(subset="gathers").astype(dict.fromkeys([*counts, "gathering_s", "seconds"], float))
    table = rows.groupby(keys, as_index=False)[counts].median()
    table = table.assign(in_time_percent=100 * table["in_time"] / table["gathers"]).drop(columns="in_time")
    while_computing = rows.assign(seconds=rows["gathering_s"])
    times = {"alone_s": _gathers_alone(frame), "gathering_s": while_computing, "waiting_s": rows}
    for name, of in times.items():
        medians = STEPS.medians(of)[[*keys, "seconds"]].rename(columns={"seconds": name})
        table = table.merge(medians, on=keys, how="left")
    return in_order(table.drop(columns="device"), way=ORDER)


def _gathers_alone(frame: pd.DataFrame) -> pd.DataFrame:
    """By setting, way, rank and repeat: the seconds of gathering alone as many bytes as a step of that way gathers."""
    keys = list(SETTING)
    rows = timed(frame)
    alone = rows[rows["part"] == GATHER][[*keys, "rank", "repeat", "seconds"]]
    of_way = select(sent(frame), collective="all_gather")[[*WHERE, "way", "of_model"]]
    both = alone.merge(of_way, on=list(WHERE))
    return both.assign(seconds=both["seconds"].astype(float) * both["of_model"].astype(float))


def waits_over_gathers(frame: pd.DataFrame) -> pd.DataFrame:
    """What a step of FSDP waits for its gathers over what they take alone, from the same rounds: `ratio`, interval."""
    waiting = select(named(frame), OF_ROUND, kind="time", part=WAITING).dropna(subset="seconds")
    return _over(waiting, select(_gathers_alone(frame), way=FSDP))


def passes_over_ddp_and_gathers(frame: pd.DataFrame) -> pd.DataFrame:
    """FSDP's forward and backward over DDP's and then the gathers alone, from the same rounds: below 1 overlap pays."""
    passes = summed(timed(frame), "part", ("forward", "backward"), "passes", [*SETTING, "way"])
    both = pd.concat([select(passes, way=DDP), select(_gathers_alone(frame), way=FSDP)])[OF_ROUND]
    return _over(passes, summed(both.assign(part=both["way"]), "part", (DDP, FSDP), "both", SETTING))


def _over(rows: pd.DataFrame, others: pd.DataFrame) -> pd.DataFrame:
    """FSDP's seconds, of all ways' `rows`, over others from the same rounds."""
    both = pd.concat([select(rows, way=FSDP), others.assign(way=GATHER)]).reindex(columns=OF_ROUND)
    return STEPS.over(both.astype({"seconds": float}), GATHER)


def gathering(frame: pd.DataFrame) -> pd.DataFrame:
    """The same times, long: gathers alone, while a step computes, and what it waits for."""
    table = gathers(frame)
    table = table[table.groupby(list(WHERE))["way"].transform("nunique") > 1] if len(table) else table
    kinds = {"alone": "alone_s", "while computing": "gathering_s", "waited for": "waiting_s"}
    long = [table.assign(kind=kind, seconds=table[name]) for kind, name in kinds.items()]
    return pd.concat(long)[["size", "transport", "world_size", "way", "kind", "seconds"]]
