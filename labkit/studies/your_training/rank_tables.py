"""Tables of your training on several ranks: throughput, exposed communication, memory, lateness."""

from dataclasses import replace
from typing import Any

import pandas as pd

from labkit.bench.intervals import estimate_paired
from labkit.costs.memory import PARTS as HELD_PARTS
from labkit.lab.metric import Metric, Results
from labkit.parallel.data_parallel import LOCAL
from labkit.studies.shared.tables import add_up
from labkit.studies.your_training.worker import STEP

# Share of a step by which a rank must be later than the others to be named.
MIN_LATE_SHARE = 0.1


def _add_parts(rows: pd.DataFrame) -> pd.DataFrame:
    """Return one row per step of a rank: the sum of its parts."""
    return add_up(rows, ["world_size", "strategy", "rank", "repeat"])


WHERE = {"kind": "rank part"}
WITH_LOCAL = Metric("seconds", "strategy", ("world_size",), where=WHERE, prepare=_add_parts)
STRATEGY = replace(WITH_LOCAL, without=(LOCAL,))


def scaling(results: Results) -> pd.DataFrame:
    """Return what each strategy does on several ranks, the fastest first.

    `times_one_process`: its throughput over that of one process with all cores. `exposed_s`: what a
    step takes longer than the same step without communication. `held_bytes`: of parameters,
    gradients and optimizer states, on the rank that holds most.
    """
    samples = WITH_LOCAL.samples(results.frame)
    columns = ["world_size", "strategy", "seconds", "times_one_process"]
    columns += ["exposed_s", "exposed_percent", "held_bytes"]
    if samples.empty:
        return pd.DataFrame(columns=columns)
    keys = ["world_size", "repeat"]
    local = samples.loc[samples["strategy"] == LOCAL, [*keys, "seconds"]]
    rounds = samples[samples["strategy"] != LOCAL]
    rounds = rounds.merge(local, on=keys, suffixes=("", "_local"))
    # The difference of each round: slow minutes of the machine slow both.
    rounds["exposed_s"] = rounds["seconds"] - rounds["seconds_local"]
    groups = rounds.groupby(["world_size", "strategy"])[["seconds", "exposed_s"]]
    # No step is faster for communicating: less than nothing is noise.
    table = groups.median().clip(lower=0).reset_index()
    table = table.merge(_held(results), on=["world_size", "strategy"])
    alone = results.rows(["seconds"], kind="part", part=STEP)["seconds"].astype(float).median()
    table["times_one_process"] = table["world_size"] * alone / table["seconds"]
    table["exposed_percent"] = 100 * table["exposed_s"] / table["seconds"]
    return table[columns].sort_values("seconds", ignore_index=True)


def _held(results: Results) -> pd.DataFrame:
    """Return the bytes that a strategy's rank holds from step to step, the most of any rank."""
    parts = [f"{part}_bytes" for part in HELD_PARTS]
    rows = results.rows(["world_size", "strategy", *parts], **WHERE).dropna()
    held = rows.assign(held_bytes=rows[parts].astype(float).sum(axis=1))
    return held.groupby(["world_size", "strategy"])["held_bytes"].max().reset_index()


def lateness(results: Results) -> pd.DataFrame:
    """Return how much longer each rank takes than the others for a step without communication.

    `later_s`, with its interval: compared with the median of the others. `part`: where most of it
    is. `is_late`: by more than `MIN_LATE_SHARE` of the others' step.
    """
    columns = ["world_size", "rank", "later_s", "low", "high", "part", "is_late"]
    # Without communication: otherwise all ranks take as long as the slowest.
    rows = results.rows(
        ["world_size", "rank", "repeat", "part", "seconds"], strategy=LOCAL, **WHERE
    ).dropna()
    table = []
    for world_size, ranks in rows.groupby("world_size"):
        # Summed: with a loader's workers, a part of the mean step is of several rows.
        parts = ranks.pivot_table("seconds", ["part", "repeat"], "rank", aggfunc="sum")
        steps = parts.groupby("repeat").sum()
        for rank in steps:
            estimate = estimate_paired(_behind_others(steps, rank).to_numpy(float))
            later_by_part = _behind_others(parts, rank).groupby("part").median()
            others_s = steps.drop(columns=rank).median(axis=None)
            table.append(
                {
                    "world_size": world_size,
                    "rank": rank,
                    "later_s": estimate.value,
                    "low": estimate.low,
                    "high": estimate.high,
                    "part": later_by_part.idxmax(),
                    "is_late": estimate.low > MIN_LATE_SHARE * others_s,
                }
            )
    return pd.DataFrame(table, columns=columns)


def _behind_others(seconds: pd.DataFrame, rank: Any) -> pd.Series:
    """Return seconds of a rank minus the median of the other ranks' in the same round."""
    return seconds[rank] - seconds.drop(columns=rank).median(axis=1)
