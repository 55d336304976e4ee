"""How long a step waits for its gathers, and what they take: alone, and while it computes."""

import pandas as pd

from labkit.lab.rows import in_order, select, summed
from labkit.studies.sharding.tables import DDP, FSDP, ORDER, SETTING, STEPS, WAITING, WHERE, named, sent, timed
from labkit.studies.sharding.worker import GATHER


def gathers(frame: pd.DataFrame) -> pd.DataFrame:
    """By setting and way: gathers per step, how many were complete when they were needed, and how long steps waited.

    `gathering_s` is what they take while the step computes, `alone_s` as many bytes with nothing else to do. `extra_s`
    is by how much forward and backward take longer than DDP's.
    """
    columns, keys = ["gathers", "in_time", "gathering_s", "seconds"], list(SETTING)
    rows = select(named(frame), [*keys, "way", *columns], kind="time", part=WAITING).dropna(subset="gathers")
    rows = rows.astype(dict.fromkeys(columns, float))
    table = rows.groupby([*keys, "way"], as_index=False)[columns].median()
    table = table.assign(in_time_percent=100 * table["in_time"] / table["gathers"])
    alone = _gathers_alone(frame).groupby([*keys, "way"], as_index=False)["seconds"].median()
    table = table.merge(alone.rename(columns={"seconds": "alone_s"}), on=[*keys, "way"], how="left")
    computing = summed(timed(frame), "part", ("forward", "backward"), "computing", [*keys, "way"])
    computing = STEPS.medians(computing)[[*keys, "way", "seconds"]].rename(columns={"seconds": "computing_s"})
    of_ddp = computing[computing["way"] == DDP].drop(columns="way").rename(columns={"computing_s": "ddp_s"})
    table = table.merge(computing, on=[*keys, "way"], how="left").merge(of_ddp, on=keys, how="left")
    table = table.assign(extra_s=(table["computing_s"] - table["ddp_s"]).astype(float))
    table = table.drop(columns=["computing_s", "ddp_s", "device"])
    return in_order(table.rename(columns={"seconds": "waiting_s"}), way=ORDER)


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
    keys = [*SETTING, "rank", "repeat", "seconds"]
    alone = _gathers_alone(frame)
    alone = alone[alone["way"] == FSDP][keys].assign(way=GATHER)
    waiting = select(named(frame), keys, kind="time", part=WAITING, way=FSDP).dropna(subset="seconds")
    return STEPS.over(pd.concat([waiting[[*keys, "way"]], alone]).astype({"seconds": float}), GATHER)


def gathering(frame: pd.DataFrame) -> pd.DataFrame:
    """The same times, long: gathers alone, while a step computes, and what it waits for."""
    table = gathers(frame)
    table = table[table.groupby(list(WHERE))["way"].transform("nunique") > 1] if len(table) else table
    kinds = {"alone": "alone_s", "while computing": "gathering_s", "waited for": "waiting_s"}
    long = [table.assign(kind=kind, seconds=table[name]) for kind, name in kinds.items()]
    return pd.concat(long)[["size", "transport", "world_size", "way", "kind", "seconds"]]
