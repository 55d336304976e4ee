"""From the frame of a gradient-buckets run to the tables its findings and figures are made of.

Every table is tidy and carries units in its names. A step is over when its slowest rank is; waiting is that of the
rank that waits longest, so that waiting for a slower rank is part of it.
"""

from dataclasses import asdict
from functools import cache
from itertools import pairwise

import numpy as np
import pandas as pd

from labkit.bench.intervals import estimate_paired
from labkit.bench.statistics import FALSE_DISCOVERY_RATE, adjust_p, compare, with_verdicts
from labkit.lab.columns import label
from labkit.lab.made_once import made_once
from labkit.lab.project import reference_directory
from labkit.lab.rows import Measured
from labkit.studies.gradient_buckets.worker import LOCAL, STEPS

MIB = 2**20
MACHINE = ("workload", "world_size", "backend", "device")
SETTING = (*MACHINE, "batch", "sequence")
LAYOUT = ("buckets", "last_bucket_bytes", "gradient_bytes", "panel")  # what a bucket size comes to
QUANTITIES = ("step_s", "waiting_s", "waiting_percent", "exposed_s", "contention_s")
PHASES = Measured((*SETTING, "alternative"), "phase")
ALTERNATIVES = Measured(SETTING, "alternative", "step_s")
PUBLISHED_RANKS = 2
GROWS = {"sequence": "longer sequences", "batch": "larger batches"}


def steps(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of `all_steps` that are of a bucket size."""
    return all_steps(frame).dropna(subset="bucket_mb")


def over_smallest(frame: pd.DataFrame) -> pd.DataFrame:
    """The step with each schedule of a reader, and each bucket size, over that with the smallest size: `ratio`."""
    table = all_steps(frame)
    smallest = table.loc[table["bucket_mb"] == table["bucket_mb"].min(), "alternative"]
    return ALTERNATIVES.over(table, smallest.iloc[0] if len(smallest) else "")


def beside_own(frame: pd.DataFrame) -> pd.DataFrame:
    """Median step of each alternative with its interval, if there are schedules of a reader among them."""
    table = all_steps(frame)
    return ALTERNATIVES.medians(table if table["bucket_mb"].isna().any() else table.iloc[:0]).assign(
        panel=lambda rows: _panel(rows)
    )


@made_once
def all_steps(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per (setting, bucket size or schedule, repeat), of the slowest rank.

    Columns: setting, the bucket's, `repeat`, and
    `step_s`           forward, backward, waiting, optimizer
    `waiting_s`        from the end of backward until gradients are averaged; `waiting_percent` of the step
    `local_s`          the same step without communication, in the same repeat
    `exposed_s`        the step less that one
    `contention_s`     exposed less waiting: what communication costs backward, which copies gradients into buckets,
                       while it runs beside it; below zero where a rank waits for a slower one
    """
    columns = [*SETTING, "alternative", "bucket_mb", *LAYOUT, "repeat", "local_s", *QUANTITIES]
    slowest = PHASES.samples(frame, sweep=STEPS)
    if slowest.empty:
        return pd.DataFrame(columns=columns)
    by_repeat = slowest.pivot_table(index=[*SETTING, "alternative", "repeat"], columns="phase", values="seconds")
    by_repeat = by_repeat.reindex(columns=["step", "waiting"]).add_suffix("_s").reset_index()
    local = by_repeat.loc[by_repeat["alternative"] == LOCAL, [*SETTING, "repeat", "step_s"]]
    about = frame.reindex(columns=[*SETTING, "alternative", "bucket_mb", *LAYOUT[:-1]])
    table = by_repeat[by_repeat["alternative"] != LOCAL].merge(about.drop_duplicates([*SETTING, "alternative"]))
    table = table.merge(local.rename(columns={"step_s": "local_s"}), on=[*SETTING, "repeat"], how="left")
    table = table.astype(dict.fromkeys(("batch", "sequence", "world_size", "buckets"), int))
    exposed_s = table["step_s"] - table["local_s"]
    table = table.assign(
        panel=_panel(table),
        waiting_percent=100 * table["waiting_s"] / table["step_s"],
        exposed_s=exposed_s,
        contention_s=exposed_s - table["waiting_s"],
    )
    return table.sort_values([*SETTING, "bucket_mb", "repeat"], ignore_index=True)[columns]


def _panel(table: pd.DataFrame) -> list[str]:
    several = zip(table.workload, table.batch, table.world_size, strict=True)
    return [f"{model}, batch {batch:.0f}, {ranks:.0f} ranks" for model, batch, ranks in several]


def by_bucket(frame: pd.DataFrame, quantity: str) -> pd.DataFrame:
    """Median of one of `QUANTITIES` with its interval `low`, `high`, by setting and bucket size."""
    return Measured((*SETTING, *LAYOUT), "bucket_mb", quantity).medians(steps(frame))


def over(frame: pd.DataFrame, bucket_mb: float, quantity: str = "step_s") -> pd.DataFrame:
    """The quantity with every other bucket size over that with this one, from the same turns."""
    return Measured(SETTING, "bucket_mb", quantity).over(steps(frame), bucket_mb)


def pairs(frame: pd.DataFrame, quantity: str = "step_s") -> pd.DataFrame:
    """Every bucket size over every smaller one, `smaller_mb`, from the same turns: `ratio`, interval, verdict."""
    measured, of_sizes = Measured(SETTING, "bucket_mb", quantity), steps(frame)
    sizes = sorted(set(of_sizes["bucket_mb"]))
    found = [measured.over(of_sizes, size).assign(smaller_mb=size) for size in sizes[:-1]]
    if not found:
        return over(frame, 0.0).assign(smaller_mb=[])
    table = pd.concat(found, ignore_index=True)
    return with_verdicts(table[table["bucket_mb"] > table["smaller_mb"]])


def beside_waiting(frame: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Settings and bucket sizes whose step is longer by more than what it waits for, and by less: `contention_s`."""
    groups = steps(frame).dropna(subset="contention_s").groupby([*SETTING, "bucket_mb", "buckets"])["contention_s"]
    table = groups.median().reset_index()
    p = np.array([estimate_paired(group.to_numpy(dtype=float)).p for _, group in groups])
    some = table[adjust_p(p) <= FALSE_DISCOVERY_RATE]
    return some[some["contention_s"] > 0], some[some["contention_s"] < 0]


def overview(frame: pd.DataFrame) -> pd.DataFrame:
    """Medians of all quantities side by side, one row per (setting, bucket size); `local_s`: without communication."""
    keys = ["workload", "world_size", "batch", "sequence", "bucket_mb", "buckets"]
    return steps(frame).groupby(keys, as_index=False)[["local_s", *QUANTITIES]].median()


def with_more_work(frame: pd.DataFrame) -> pd.DataFrame:
    """The share that is waited for at the next longer sequence, or the next larger batch, over that before: `ratio`.

    Columns: setting before, `bucket_mb`, `instead` ("64 tokens instead"), `grows` (of `GROWS`). Settings are measured
    one after the other, so that drift of the machine between them is in the ratio.
    """
    table = steps(frame).dropna(subset="waiting_percent")
    found = []
    for name, grows in GROWS.items():
        fixed = [other for other in (*SETTING, "bucket_mb") if other != name]
        for key, group in table.groupby(fixed):
            samples = {size: some["waiting_percent"] for size, some in group.groupby(name)}
            for before, after in pairwise(sorted(samples)):
                numbers = asdict(compare(samples[after], samples[before], interleaved=False))
                both = {name: before, "instead": f"{label(name, after)} instead", "grows": grows}
                found.append(dict(zip(fixed, key, strict=True)) | both | numbers)
    columns = [*SETTING, "bucket_mb", "instead", "grows", "ratio", "low", "high", "p", "rounds"]
    return with_verdicts(pd.DataFrame(found, columns=columns))


@cache
def published() -> pd.DataFrame:
    """`ddp_bucketed_xl_2gpu.csv` in the columns of `by_bucket`."""
    table = pd.read_csv(reference_directory() / "ddp_bucketed_xl_2gpu.csv")
    names = {"local_batch": "batch", "seq_len": "sequence", "allreduce_s": "waiting_s"}
    table = table.rename(columns=names)
    table = table.assign(workload="xl", world_size=PUBLISHED_RANKS, waiting_percent=100 * table["allreduce_ratio"])
    return table.assign(panel=_panel(table)).drop(columns="allreduce_ratio")
