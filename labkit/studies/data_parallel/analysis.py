"""From the frame of a data-parallel run to the tables its answers and figures are made of.

Every table is tidy and carries units in its names. Times are of the slowest rank of each repeat.
"""

import math
from collections.abc import Hashable
from functools import cache

import numpy as np
import pandas as pd

from labkit.bench.statistics import compare_groups, slowest_rank, summarize, summarize_groups
from labkit.lab.project import reference_directory
from labkit.parallel.data_parallel.implementations import BUCKETED, IMPLEMENTATIONS, TORCH
from labkit.studies.data_parallel.worker import LOCAL, PHASES

SETTING = ["workload", "world_size", "backend", "device"]
ORDER = (LOCAL, *IMPLEMENTATIONS)
LANES = ("forward", "backward", "all-reduce", "optimizer")
BACKWARD = "backward"
STEP = "step"
DEFAULT = "default"
PUBLISHED_NAMES = {"torch_ddp": TORCH, "python_async": "bucketed", "python_sync": "bucketed_sync"}
PERCENTILES = {"mean": "mean_s", "median": "seconds", "p90": "p90_s", "p95": "p95_s", "p99": "p99_s"}

# What tables show.
PHASE_COLUMNS = ["workload", "world_size", "implementation", "phase", *PERCENTILES.values(), "to_torch_percent"]
EXPOSED_COLUMNS = ["workload", "world_size", "implementation", "seconds", "backward_s", "communication_s"]
EXPOSED_COLUMNS += ["hidden_percent", "of_step_percent"]

# The wrapper whose waiting after backward is the communication of these, with nothing else to do.
SAME_COLLECTIVES = {
    TORCH: "bucketed_sync",
    "bucketed": "bucketed_sync",
    "bucketed_sync": "bucketed_sync",
    "overlapped": "naive",
    "naive": "naive",
    "naive_shared": "naive_shared",
    "flat": "flat",
}


def samples(frame: pd.DataFrame, sweep: str) -> pd.DataFrame:
    """`seconds` of the slowest rank by (setting, implementation, bucket, phase, repeat), the whole `step` added."""
    columns = [*SETTING, "bucket_mb", "implementation", "of_bucket_mb", "phase"]
    if frame.empty or "sweep" not in frame or "seconds" not in frame:
        return pd.DataFrame(columns=[*columns, "repeat", "seconds"])
    rows = frame[frame["sweep"] == sweep].dropna(subset="seconds")
    if rows.empty:
        return pd.DataFrame(columns=[*columns, "repeat", "seconds"])
    parts = rows[rows["phase"].isin(PHASES)]
    of_rank = [*(name for name in columns if name != "phase"), "rank", "repeat"]
    steps = parts.groupby(of_rank, dropna=False, as_index=False)["seconds"].sum().assign(phase=STEP)
    return slowest_rank(pd.concat([rows, steps]), "seconds", columns)


def phases(frame: pd.DataFrame) -> pd.DataFrame:
    """Mean, median, p90, p95, p99 and interval by (setting, implementation, phase), all with the default buckets.

    `to_torch_percent`: the median over that of torch's wrapper, as a difference in percent.
    """
    table = summarize_groups(samples(frame, "implementations"), "seconds", [*SETTING, "implementation", "phase"])
    table = table.rename(columns=PERCENTILES)
    torch = table.loc[table["implementation"] == TORCH, [*SETTING, "phase", "seconds"]]
    table = table.merge(torch.rename(columns={"seconds": "torch_s"}), how="left")
    table = table.assign(to_torch_percent=100 * (table["seconds"] / table["torch_s"] - 1)).drop(columns="torch_s")
    return in_order(table).sort_values(["workload", "world_size", "phase"], kind="stable", ignore_index=True)


def in_order(table: pd.DataFrame) -> pd.DataFrame:
    return table.sort_values(
        "implementation", key=lambda names: names.map(ORDER.index), kind="stable", ignore_index=True
    )


def against_torch(frame: pd.DataFrame, phase: str = BACKWARD) -> pd.DataFrame:
    """Time of a phase over that of torch's wrapper, from the same repeats: `ratio`, interval, verdict."""
    rows = samples(frame, "implementations")
    rows = rows[(rows["phase"] == phase) & (rows["implementation"] != LOCAL)]
    return in_order(compare_groups(rows, "seconds", SETTING, "implementation", TORCH))


def exposed(frame: pd.DataFrame) -> pd.DataFrame:
    """Communication that a step waits for: a step less the same one without communication, repeat by repeat.

    Columns: setting, implementation, and
    `seconds`           exposed, median, with `low` and `high`; what forward broadcasts is in it
    `backward_s`        the same of the backward pass alone
    `communication_s`   the same collectives with nothing else to do
    `hidden_percent`    of those, what backward does not wait for, 0 to 100; `hidden_low_percent` and
                        `hidden_high_percent` are from the interval of `backward_s`
    `of_step_percent`   exposed over the whole step
    """
    rows, alone = samples(frame, "implementations"), _communication(frame)
    found = []
    for key, here in rows.groupby(SETTING):
        table = here.pivot_table(index="repeat", columns=["implementation", "phase"], values="seconds")
        if (LOCAL, BACKWARD) not in table:
            continue
        for name in (name for name in IMPLEMENTATIONS if (name, BACKWARD) in table):
            step = summarize(table[name, STEP] - table[LOCAL, STEP])
            backward = summarize(table[name, BACKWARD] - table[LOCAL, BACKWARD])
            communication_s = alone.get((*key, SAME_COLLECTIVES.get(name)), float("nan"))
            found.append(
                dict(zip(SETTING, key, strict=True))
                | {"implementation": name, "seconds": step.median, "low": step.low, "high": step.high}
                | {"backward_s": backward.median, "communication_s": communication_s}
                | {"hidden_percent": _hidden(backward.median, communication_s)}
                | {"hidden_low_percent": _hidden(backward.high, communication_s)}
                | {"hidden_high_percent": _hidden(backward.low, communication_s)}
                | {"of_step_percent": 100 * step.median / table[name, STEP].median()}
            )
    columns = [*SETTING, "implementation", "seconds", "low", "high", "backward_s", "communication_s"]
    return pd.DataFrame(
        found, columns=[*columns, "hidden_percent", "hidden_low_percent", "hidden_high_percent", "of_step_percent"]
    )


def _communication(frame: pd.DataFrame) -> dict[Hashable, float]:
    """Median seconds of collectives after backward, by (setting, implementation).

    Of the rank that waits least: the others also wait for that one, which came last.
    """
    if frame.empty or "phase" not in frame or "seconds" not in frame:
        return {}
    rows = frame[(frame["sweep"] == "implementations") & (frame["phase"] == "waiting")].dropna(subset="seconds")
    by = [*SETTING, "implementation"]
    shortest = rows.groupby([*by, "repeat"], as_index=False)["seconds"].min()
    return shortest.groupby(by)["seconds"].median().to_dict()


def _hidden(waited_s: float, communication_s: float) -> float:
    """Percent of the communication that is not waited for; noise below none and above all is cut off."""
    return float(np.clip(100 * (1 - waited_s / communication_s), 0, 100))


def buckets(frame: pd.DataFrame) -> pd.DataFrame:
    """Backward by bucket size over the same wrapper's with its default buckets, from the same turns.

    Columns: setting, `bucket_mb`, `implementation`, `ratio`, interval, verdict, and `bucket_bytes`.
    """
    rows = samples(frame, "buckets")
    rows = rows[rows["phase"] == BACKWARD]
    rows = rows.assign(layout=rows["of_bucket_mb"].isna().map({True: DEFAULT, False: "sized"}))
    table = compare_groups(rows, "seconds", [*SETTING, "bucket_mb", "implementation"], "layout", DEFAULT)
    panels = [f"{name}, {ranks} ranks" for name, ranks in zip(table["workload"], table["world_size"], strict=True)]
    return in_order(table.drop(columns="layout").assign(bucket_bytes=table["bucket_mb"] * 2**20, panel=panels))


def own_against_torch_by_bucket(frame: pd.DataFrame) -> pd.DataFrame:
    """labkit's bucketed wrapper over torch's with every bucket, the first one too, of the same size; backward."""
    rows = samples(frame, "buckets")
    rows = rows[(rows["phase"] == BACKWARD) & (rows["of_bucket_mb"] == rows["bucket_mb"])]
    table = compare_groups(rows, "seconds", [*SETTING, "bucket_mb"], "implementation", TORCH)
    return table.assign(bucket_bytes=table["bucket_mb"] * 2**20)


def accumulation(frame: pd.DataFrame) -> pd.DataFrame:
    """A step over micro-batches, averaged after the last one only, over averaged after every one: `ratio`."""
    if frame.empty or not {"synchronized", "seconds"} <= set(frame):
        return pd.DataFrame(columns=[*SETTING, "micro_batches", "implementation", "ratio", "low", "high", "verdict"])
    rows = frame[frame["sweep"] == "accumulation"].dropna(subset=["seconds", "synchronized"])
    setting = [*SETTING, "micro_batches", "implementation"]
    slowest = slowest_rank(rows, "seconds", [*setting, "synchronized"])
    return in_order(compare_groups(slowest, "seconds", setting, "synchronized", "every"))


def memory(frame: pd.DataFrame) -> pd.DataFrame:
    """Peak bytes of a step on the rank that needs most, by implementation, and over torch's."""
    if frame.empty or "peak_bytes" not in frame:
        return pd.DataFrame(columns=[*SETTING, "implementation", "peak_bytes", "over_torch"])
    rows = frame[frame["sweep"] == "memory"].dropna(subset="peak_bytes")
    table = rows.groupby([*SETTING, "implementation"], as_index=False)["peak_bytes"].max()
    torch = table.loc[table["implementation"] == TORCH, [*SETTING, "peak_bytes"]]
    table = table.merge(torch.rename(columns={"peak_bytes": "torch_bytes"}), how="left")
    table = table.assign(over_torch=table["peak_bytes"] / table["torch_bytes"])
    return in_order(table.drop(columns="torch_bytes"))


def timeline(frame: pd.DataFrame) -> pd.DataFrame:
    """Boxes of one step of rank 0, by implementation: lane, `start_s`, `duration_s`, `during_s`."""
    if frame.empty or not {"lane", "start_s"} <= set(frame):
        return pd.DataFrame(columns=[*SETTING, "implementation", "lane", "start_s", "duration_s", "during_s", "row"])
    frame = frame.assign(during_s=frame.get("during_s", math.nan))  # of collectives alone: there may be none
    rows = frame[(frame["sweep"] == "timeline") & (frame["rank"] == 0)].dropna(subset=["lane", "start_s"])
    fewest = rows["world_size"].min()
    rows = rows[rows["world_size"] == fewest].sort_values(
        "lane", key=lambda lanes: lanes.map(LANES.index), kind="stable"
    )
    rows = in_order(rows)
    return rows.assign(row=rows["implementation"] + ", " + rows["lane"])


def overlap(frame: pd.DataFrame) -> pd.DataFrame:
    """By implementation: collectives of a step, how many began before backward ended, and the share of their time."""
    boxes = timeline(frame)
    boxes = boxes[boxes["lane"] == "all-reduce"]
    found = []
    for name, some in boxes.groupby("implementation"):
        during = some["during_s"].fillna(0)
        found.append(
            {
                "implementation": name,
                "collectives": len(some),
                "begun_during_backward": int((during > 0).sum()),
                "during_percent": 100 * during.sum() / some["duration_s"].sum(),
            }
        )
    columns = ["implementation", "collectives", "begun_during_backward", "during_percent"]
    return in_order(pd.DataFrame(found, columns=columns))


@cache
def published() -> pd.DataFrame:
    """`ddp_compare_resnet50.csv`, buckets in bytes: torch's sizes were megabytes, the Python wrapper's Mi elements."""
    table = pd.read_csv(reference_directory() / "ddp_compare_resnet50.csv")
    names = table["implementation"].map(PUBLISHED_NAMES)
    bytes_each = names.map(lambda name: 1 if name == TORCH else 4)
    table = table.assign(
        implementation=names,
        bucket_bytes=table["buffer_melements"] * 2**20 * bytes_each,
        seconds=table["median_ms"] / 1e3,
    )
    return table.drop(columns=[column for column in table if column.endswith("_ms")])


def published_ratios() -> pd.DataFrame:
    """Published backward times over torch's in the same row of the sweep: bucket_bytes, implementation, ratio."""
    table = published()
    table = table[table["phase"] == BACKWARD]
    torch = table[table["implementation"] == TORCH].set_index("buffer_melements")["seconds"]
    ratios = table["seconds"].to_numpy() / torch.loc[table["buffer_melements"]].to_numpy()
    return table.assign(ratio=ratios)[table["implementation"].isin(BUCKETED)]
