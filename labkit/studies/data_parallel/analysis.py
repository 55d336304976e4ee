"""From the frame of a data-parallel run to the tables its answers and figures are made of.

Every table is tidy and carries units in its names. Times are of the slowest rank of each repeat.
"""

from functools import cache

import pandas as pd

from labkit.bench.statistics import compare_groups, slowest_rank, summarize, summarize_groups
from labkit.lab.project import reference_directory
from labkit.parallel.data_parallel.implementations import BUCKETED, IMPLEMENTATIONS, TORCH
from labkit.studies.data_parallel.worker import DEFAULT_MB, LOCAL, PHASES

SETTING = ["workload", "world_size", "backend", "device"]
ORDER = (LOCAL, *IMPLEMENTATIONS)
LANES = ("forward", "backward", "all-reduce", "optimizer")
BACKWARD = "backward"
STEP = "step"
PUBLISHED_NAMES = {"torch_ddp": TORCH, "python_async": "bucketed", "python_sync": "bucketed_sync"}
PERCENTILES = {"mean": "mean_s", "median": "seconds", "p90": "p90_s", "p95": "p95_s", "p99": "p99_s"}

# What tables show.
PHASE_COLUMNS = ["workload", "world_size", "implementation", "phase", *PERCENTILES.values(), "to_torch_percent"]
EXPOSED_COLUMNS = ["workload", "world_size", "implementation", "seconds", "communication_s"]
EXPOSED_COLUMNS += ["hidden_percent", "of_step_percent"]

# Whose waiting after backward is the communication of these, with nothing else to do.
SAME_COLLECTIVES = {
    TORCH: "bucketed_sync",
    "bucketed": "bucketed_sync",
    "bucketed_sync": "bucketed_sync",
    "overlapped": "naive",
    "naive": "naive",
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
    """Mean, median, p90, p95, p99 and interval by (setting, implementation, phase), all at the default bucket size.

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
    """Communication that a step waits for: a backward pass less the same one without communication.

    Columns: setting, implementation, `seconds` (exposed, median, with low and high), `communication_s` (the same
    collectives with nothing else to do), `hidden_percent` of it, and `of_step_percent`: exposed over the whole step.
    """
    rows = samples(frame, "implementations")
    found = []
    for key, here in rows.groupby(SETTING):
        table = here.pivot_table(index="repeat", columns=["implementation", "phase"], values="seconds")
        if (LOCAL, BACKWARD) not in table:
            continue
        for name in (name for name in IMPLEMENTATIONS if (name, BACKWARD) in table):
            summary = summarize(table[name, BACKWARD] - table[LOCAL, BACKWARD])
            alone = (SAME_COLLECTIVES[name], "waiting")
            communication_s = table[alone].median() if alone in table else float("nan")
            found.append(
                dict(zip(SETTING, key, strict=True))
                | {"implementation": name, "seconds": summary.median, "low": summary.low, "high": summary.high}
                | {"communication_s": communication_s, "step_s": table[name, STEP].median()}
            )
    columns = [*SETTING, "implementation", "seconds", "low", "high", "communication_s", "step_s"]
    result = pd.DataFrame(found, columns=columns)
    return result.assign(
        hidden_percent=100 * (1 - result["seconds"] / result["communication_s"]),
        of_step_percent=100 * result["seconds"] / result["step_s"],
    )


def buckets(frame: pd.DataFrame) -> pd.DataFrame:
    """Backward by bucket size over torch's at its default size, measured in the same turns: `ratio`, verdict.

    `bucket_bytes` is in bytes on every side.
    """
    rows = samples(frame, "buckets")
    rows = rows[rows["phase"] == BACKWARD]
    names = [_named(*pair) for pair in zip(rows["implementation"], rows["of_bucket_mb"], strict=True)]
    table = compare_groups(
        rows.assign(alternative=names),
        "seconds",
        [*SETTING, "bucket_mb"],
        "alternative",
        _named(TORCH, DEFAULT_MB),
    )
    parts = table["alternative"].str.split("@")
    panels = [f"{name}, {ranks} ranks" for name, ranks in zip(table["workload"], table["world_size"], strict=True)]
    table = table.assign(implementation=parts.str[0], bucket_bytes=table["bucket_mb"] * 2**20, panel=panels)
    return table[parts.str[1].astype(float) == table["bucket_mb"]].reset_index(drop=True)


def own_against_torch_by_bucket(frame: pd.DataFrame) -> pd.DataFrame:
    """labkit's bucketed wrapper over torch's at the same bucket size, backward."""
    rows = samples(frame, "buckets")
    rows = rows[(rows["phase"] == BACKWARD) & (rows["of_bucket_mb"] == rows["bucket_mb"])]
    table = compare_groups(rows, "seconds", [*SETTING, "bucket_mb"], "implementation", TORCH)
    return table.assign(bucket_bytes=table["bucket_mb"] * 2**20)


def _named(implementation: str, bucket_mb: float) -> str:
    return f"{implementation}@{bucket_mb:g}"


def accumulation(frame: pd.DataFrame) -> pd.DataFrame:
    """A step over micro-batches, averaged after the last one only, over averaged after every one: `ratio`."""
    if frame.empty or "synchronized" not in frame:
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
    if frame.empty or "lane" not in frame:
        return pd.DataFrame(columns=[*SETTING, "implementation", "lane", "start_s", "duration_s", "during_s"])
    rows = frame[(frame["sweep"] == "timeline") & (frame["rank"] == 0)].dropna(subset="lane")
    fewest = rows["world_size"].min()
    rows = in_order(rows[rows["world_size"] == fewest])
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


def wrong(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows that did not pass their gate."""
    return frame[frame["gate"].fillna("ok") != "ok"] if "gate" in frame else frame.iloc[:0]


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
