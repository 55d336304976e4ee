"""From the frame of a gradient-buckets run to the tables its answers and figures are made of.

Every table is tidy and carries units in its names. A step is over when its slowest rank is; waiting is that of the
rank that waits longest, so that waiting for a slower rank is part of it.
"""

from dataclasses import asdict
from functools import cache
from itertools import pairwise

import numpy as np
import pandas as pd

from labkit.bench.intervals import adjusted, estimate_paired
from labkit.bench.statistics import (
    FALSE_DISCOVERY_RATE,
    compare,
    compare_groups,
    judged,
    slowest_rank,
    summarize_groups,
)
from labkit.lab.project import reference_directory
from labkit.studies.gradient_buckets.worker import LOCAL, STEPS

MIB = 2**20
MACHINE = ["workload", "world_size", "backend", "device"]
SETTING = [*MACHINE, "batch", "sequence"]
BUCKET = ["bucket_mb", "bucket_bytes", "buckets", "last_bucket_bytes", "gradient_bytes"]
QUANTITIES = ("step_s", "waiting_s", "waiting_percent", "exposed_s", "contention_s")
PUBLISHED_RANKS = 2


def steps(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a (setting, bucket size, repeat), of the slowest rank.

    Columns: setting, the bucket's, `repeat`, and
    `step_s`           forward, backward, waiting, optimizer
    `waiting_s`        from the end of backward until gradients are averaged; `waiting_percent` of the step
    `exposed_s`        the step less the same one without communication, from the same repeat
    `contention_s`     exposed less waiting: what communication costs backward while it runs beside it; below zero
                       where a rank waits for a slower one
    """
    columns = [*SETTING, *BUCKET, "panel", "repeat", *QUANTITIES]
    if frame.empty or "phase" not in frame or "seconds" not in frame:
        return pd.DataFrame(columns=columns)
    rows = frame[frame["sweep"] == STEPS].dropna(subset="seconds")
    slowest = slowest_rank(rows, "seconds", [*SETTING, "alternative", "phase"])
    by_repeat = slowest.pivot_table(index=[*SETTING, "alternative", "repeat"], columns="phase", values="seconds")
    by_repeat = by_repeat.reindex(columns=["step", "waiting"]).add_suffix("_s").reset_index()
    local = by_repeat.loc[by_repeat["alternative"] == LOCAL, [*SETTING, "repeat", "step_s"]]
    about = rows.reindex(columns=[*SETTING, "alternative", *BUCKET]).drop_duplicates([*SETTING, "alternative"])
    table = by_repeat[by_repeat["alternative"] != LOCAL].merge(about, on=[*SETTING, "alternative"])
    table = table.merge(local.rename(columns={"step_s": "local_s"}), on=[*SETTING, "repeat"], how="left")
    exposed_s = table["step_s"] - table["local_s"]
    table = table.assign(
        bucket_bytes=table["bucket_mb"] * MIB,
        panel=_panel(table),
        waiting_percent=100 * table["waiting_s"] / table["step_s"],
        exposed_s=exposed_s,
        contention_s=exposed_s - table["waiting_s"],
    )
    return table.sort_values([*SETTING, "bucket_mb", "repeat"], ignore_index=True)[columns]


def _panel(table: pd.DataFrame) -> list[str]:
    return [f"batch {batch:.0f}, {ranks:.0f} ranks" for batch, ranks in zip(table.batch, table.world_size, strict=True)]


def by_bucket(frame: pd.DataFrame, quantity: str) -> pd.DataFrame:
    """Median of one of `QUANTITIES` with its interval `low`, `high`, by setting and bucket size."""
    table = steps(frame).dropna(subset=quantity)
    table = summarize_groups(table, quantity, [*SETTING, *BUCKET, "panel"])
    table = table.rename(columns={"median": quantity})
    return table.astype({"batch": int, "sequence": int, "world_size": int, "buckets": int})


def beside_waiting(frame: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Settings and bucket sizes whose step is longer by more than what it waits for, and by less: `contention_s`."""
    table = by_bucket(frame, "contention_s")
    groups = steps(frame).dropna(subset="contention_s").groupby([*SETTING, *BUCKET, "panel"], sort=True, dropna=False)
    p = np.array([estimate_paired(group.to_numpy(dtype=float)).p for _, group in groups["contention_s"]])
    some = table[adjusted(p) <= FALSE_DISCOVERY_RATE]
    return some[some["contention_s"] > 0], some[some["contention_s"] < 0]


def local_steps(frame: pd.DataFrame) -> pd.DataFrame:
    """Median seconds of the step without communication, with interval, by setting."""
    if frame.empty or "alternative" not in frame or "seconds" not in frame:
        return pd.DataFrame(columns=[*SETTING, "seconds", "low", "high"])
    rows = frame[(frame["alternative"] == LOCAL) & (frame["phase"] == "step")].dropna(subset="seconds")
    table = summarize_groups(slowest_rank(rows, "seconds", SETTING), "seconds", SETTING)
    return table.rename(columns={"median": "seconds"})


def overview(frame: pd.DataFrame) -> pd.DataFrame:
    """Medians of all quantities side by side, one row a (setting, bucket size)."""
    keys = ["batch", "sequence", "world_size", "bucket_bytes", "buckets"]
    table = steps(frame)
    medians = table.groupby(keys, as_index=False)[list(QUANTITIES)].median()
    return medians.astype({"batch": int, "sequence": int, "world_size": int, "buckets": int})


def pairs(frame: pd.DataFrame, quantity: str = "step_s") -> pd.DataFrame:
    """Every bucket size over every smaller one, from the same turns: `ratio`, interval, verdict.

    Columns: setting, `bucket_mb` over `smaller_mb`. Sizes that make the same buckets are compared like any others.
    """
    table = steps(frame).dropna(subset=quantity)
    found = []
    for smaller in sorted(set(table["bucket_mb"]))[:-1]:
        larger = table[table["bucket_mb"] >= smaller]
        ratios = compare_groups(larger, quantity, SETTING, "bucket_mb", smaller)
        found.append(ratios.assign(smaller_mb=smaller))
    columns = [*SETTING, "bucket_mb", "smaller_mb", "bucket_bytes", "smaller_bytes", "ratio", "low", "high", "verdict"]
    if not found:
        return pd.DataFrame(columns=columns)
    ratios = judged(pd.concat(found, ignore_index=True)).astype({"batch": int, "sequence": int, "world_size": int})
    ratios = ratios.assign(bucket_bytes=ratios["bucket_mb"] * MIB, smaller_bytes=ratios["smaller_mb"] * MIB)
    return ratios.sort_values([*SETTING, "smaller_mb"], ignore_index=True)[columns]


def spread(frame: pd.DataFrame, quantity: str = "step_s") -> pd.DataFrame:
    """By how much the slowest bucket size is above the fastest, in percent of it, by setting: medians alone."""
    grouped = by_bucket(frame, quantity).groupby(SETTING)[quantity]
    table = (100 * (grouped.max() / grouped.min() - 1)).rename("spread_percent").reset_index()
    return table.merge(local_steps(frame)[[*SETTING, "seconds"]], how="left")


def with_more_work(frame: pd.DataFrame, quantity: str = "waiting_percent") -> pd.DataFrame:
    """The quantity at the next longer sequence, or the next larger batch, over that before: `ratio`, verdict.

    Columns: machine, `bucket_mb`, `grows` ("sequence" or "batch"), `fixed` (the other's value), `before`, `after`.
    Settings are measured one after the other, so that drift of the machine between them is in the ratio.
    """
    table = steps(frame).dropna(subset=quantity)
    found = []
    for grows, other in (("sequence", "batch"), ("batch", "sequence")):
        for key, group in table.groupby([*MACHINE, "bucket_mb", other]):
            samples = {size: some[quantity] for size, some in group.groupby(grows)}
            for before, after in pairwise(sorted(samples)):
                result = compare(samples[after], samples[before], interleaved=False)
                names = dict(zip([*MACHINE, "bucket_mb", "fixed"], key, strict=True))
                found.append(names | {"grows": grows, "before": before, "after": after} | asdict(result))
    columns = [*MACHINE, "bucket_mb", "fixed", "grows", "before", "after", "ratio", "low", "high", "p"]
    return judged(pd.DataFrame(found, columns=columns))


@cache
def published() -> pd.DataFrame:
    """`ddp_bucketed_xl_2gpu.csv` in the columns of `by_bucket`."""
    table = pd.read_csv(reference_directory() / "ddp_bucketed_xl_2gpu.csv")
    names = {"local_batch": "batch", "seq_len": "sequence", "allreduce_s": "waiting_s"}
    table = table.rename(columns=names).assign(
        world_size=PUBLISHED_RANKS,
        bucket_bytes=table["bucket_mb"] * MIB,
        waiting_percent=100 * table["allreduce_ratio"],
    )
    return table.assign(panel=_panel(table)).drop(columns="allreduce_ratio")
