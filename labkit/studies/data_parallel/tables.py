"""From the frame of a data-parallel run to the tables its findings and figures are made of.

Every table is tidy and carries units in its names. Times are of the slowest rank of each repeat.
"""

from collections.abc import Hashable
from functools import cache

import pandas as pd

from labkit.bench.statistics import summarize
from labkit.lab.made_once import made_once
from labkit.lab.project import reference_directory
from labkit.lab.rows import Measured, exactly_over, in_order, select, summed
from labkit.parallel.data_parallel.implementations import BUCKETED, LOCAL, OWN_NAMES, TORCH
from labkit.studies.data_parallel.alternatives import PHASES

MIB = 2**20
SETTING = ("workload", "world_size", "backend", "device")
WRAPPERS = Measured((*SETTING, "phase"), "implementation")
BUCKETS = Measured((*SETTING, "implementation", "bucket_mb"), "is_default")
EQUAL_BUCKETS = Measured((*SETTING, "bucket_mb"), "implementation")
ACCUMULATIONS = Measured((*SETTING, "micro_batches", "implementation"), "synchronized")
ORDER = (LOCAL, TORCH, *OWN_NAMES)  # a reader's own come last
LANES = ("forward", "backward", "all-reduce", "optimizer")
COUNTED = ("collectives", "collective_bytes", "added_operators", "added_bytes")
BACKWARD, STEP = "backward", "step"
OVERLAPPING = (TORCH, "overlapped", "bucketed")
"""Of those that can hide communication, the ones whose collectives were measured alone, too."""
PUBLISHED_NAMES = {"torch_ddp": TORCH, "python_async": "bucketed", "python_sync": "bucketed_sync"}
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


@made_once
def timed(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of the comparison of implementations, and each whole step as the sum of its phases on its rank."""
    of_rank = [*SETTING, "implementation", "rank", "repeat"]
    rows = select(frame, [*of_rank, "phase", "seconds"], sweep="implementations").dropna(subset="seconds")
    return pd.concat([rows, summed(rows, "phase", PHASES, STEP, of_rank)]) if len(rows) else rows


def phases(frame: pd.DataFrame) -> pd.DataFrame:
    """Mean, median, percentiles and interval by (setting, implementation, phase), all with the default buckets.

    `to_torch_percent`: the time over torch's wrapper's in the same rounds, as `against` has it, as a difference.
    """
    rows = timed(frame)
    table = WRAPPERS.medians(rows).rename(columns={n: f"{n}_s" for n in ("mean", "p90", "p95", "p99")})
    table = table.merge(WRAPPERS.over(rows, TORCH)[[*WRAPPERS.columns, "ratio"]], how="left")
    table = table.assign(to_torch_percent=100 * (table["ratio"].astype(float) - 1))
    columns = ["workload", "world_size", "implementation", "phase", "mean_s", "seconds", "low", "high"]
    ordered = in_order(table, workload=None, world_size=None, phase=None, implementation=ORDER)
    return ordered[[*columns, "p90_s", "p95_s", "p99_s", "to_torch_percent"]]


def against(frame: pd.DataFrame, baseline: str, phase: str = BACKWARD) -> pd.DataFrame:
    """Time of a phase over that of another wrapper, from the same rounds: `ratio`, interval, verdict."""
    rows = timed(frame)
    ratios = WRAPPERS.over(rows[rows["implementation"] != LOCAL], baseline, phase=phase)
    return in_order(ratios.drop(columns="phase"), implementation=ORDER)


def exposed(frame: pd.DataFrame) -> pd.DataFrame:
    """Communication that a step waits for: a step less the same one without communication, repeat by repeat.

    Columns: setting, implementation, and
    `hidden_percent`    of the communication, what backward does not wait for; below zero where backward is longer by
                        more than all of it. `hidden_low_percent`, `hidden_high_percent`: by the interval of backward.
                        NaN unless the wrapper is `OVERLAPPING`
    `communication_s`   the same collectives with nothing else to do
    `backward_s`        exposed in the backward pass alone
    `seconds`           exposed, median, with `low` and `high`; what forward broadcasts is in it
    `of_step_percent`   of the whole step
    """
    rows = timed(frame)
    alone, found = _communication(rows), []
    for key, here in WRAPPERS.samples(rows).groupby(list(SETTING)):
        table = here.pivot_table(index="repeat", columns=["implementation", "phase"], values="seconds")
        if (LOCAL, BACKWARD) not in table:
            continue
        names = set(table.columns.get_level_values("implementation")) - {LOCAL}
        for name in sorted(names, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name)):
            step = summarize(table[name, STEP] - table[LOCAL, STEP])
            backward = summarize(table[name, BACKWARD] - table[LOCAL, BACKWARD])
            communication_s = alone.get((*key, SAME_COLLECTIVES.get(name)), float("nan"))
            waited = (backward.median, backward.high, backward.low)
            hidden = [100 * (1 - s / communication_s) if name in OVERLAPPING else float("nan") for s in waited]
            exposed_s = (step.median, step.low, step.high, 100 * step.median / table[name, STEP].median())
            found.append([*key, name, *hidden, communication_s, backward.median, *exposed_s])
    columns = [*SETTING, "implementation", "hidden_percent", "hidden_low_percent", "hidden_high_percent"]
    times = ["communication_s", "backward_s", "seconds", "low", "high", "of_step_percent"]
    return pd.DataFrame(found, columns=[*columns, *times])


def _communication(rows: pd.DataFrame) -> dict[Hashable, float]:
    """Median seconds of collectives after backward, by (setting, implementation).

    Of the rank that waits least: the others also wait for that one, which came last.
    """
    by = [*SETTING, "implementation"]
    shortest = rows[rows["phase"] == "waiting"].groupby([*by, "repeat"], as_index=False)["seconds"].min()
    return shortest.groupby(by)["seconds"].median().to_dict()


def _backward_by_bucket(frame: pd.DataFrame) -> pd.DataFrame:
    return select(frame, ["of_bucket_mb"], sweep="buckets", phase=BACKWARD)


def buckets(frame: pd.DataFrame) -> pd.DataFrame:
    """Backward by bucket size over the same wrapper's with its default buckets, from the same turns.

    Columns: setting, `implementation`, `bucket_mb`, `ratio`, interval, verdict, `panel`.
    """
    rows = _backward_by_bucket(frame)
    table = BUCKETS.over(rows.assign(is_default=rows["of_bucket_mb"].isna()), True).drop(columns="is_default")
    panels = [f"{name}, {ranks} ranks" for name, ranks in zip(table["workload"], table["world_size"], strict=True)]
    return in_order(table.assign(panel=panels), implementation=ORDER)


def own_against_torch_by_bucket(frame: pd.DataFrame) -> pd.DataFrame:
    """labkit's bucketed wrapper over torch's with every bucket, the first one too, of the same size; backward."""
    rows = _backward_by_bucket(frame)
    return EQUAL_BUCKETS.over(rows[rows["of_bucket_mb"] == rows["bucket_mb"]], TORCH)


def accumulation(frame: pd.DataFrame) -> pd.DataFrame:
    """A step over micro-batches, averaged after the last one only, over averaged after every one: `ratio`."""
    return in_order(ACCUMULATIONS.over(frame, "every", sweep="accumulation"), implementation=ORDER)


def memory(frame: pd.DataFrame) -> pd.DataFrame:
    """Peak bytes of a step on the rank that needs most, by implementation."""
    rows = select(frame, [*SETTING, "implementation", "peak_bytes"], sweep="memory").dropna(subset="peak_bytes")
    table = rows.groupby([*SETTING, "implementation"], as_index=False)["peak_bytes"].max()
    return in_order(table, implementation=ORDER)


def memory_over_torch(frame: pd.DataFrame) -> pd.DataFrame:
    """Peak bytes of a step over those of torch's wrapper."""
    return exactly_over(memory(frame), SETTING, "implementation", "peak_bytes", TORCH)


def traffic(frame: pd.DataFrame) -> pd.DataFrame:
    """What averaging adds to one step of rank 0, counted: `COUNTED`, by implementation; not over shared memory."""
    rows = select(frame, [*SETTING, "implementation", *COUNTED], sweep="timeline", rank=0).dropna(subset=[*COUNTED])
    rows = rows[rows["world_size"] == rows["world_size"].min()]
    return in_order(rows, implementation=ORDER)[["workload", "world_size", "implementation", *COUNTED]]


def moved(table: pd.DataFrame) -> pd.DataFrame:
    """From `traffic`, one row a bar: `bytes` by implementation and `what` moves them."""
    kinds = {"collective_bytes": "averaged over ranks", "added_bytes": "copied and divided"}
    rows = [table.assign(bytes=table[column], what=what) for column, what in kinds.items()]
    return pd.concat(rows)[["implementation", "what", "bytes"]]


def timeline(frame: pd.DataFrame) -> pd.DataFrame:
    """Boxes of one step of rank 0, by implementation: lane, `start_s`, `duration_s`, `during_s` of collectives."""
    columns = [*SETTING, "implementation", "lane", "start_s", "duration_s", "during_s"]
    rows = select(frame, columns, sweep="timeline", rank=0).dropna(subset=["lane", "start_s"])
    rows = rows[rows["world_size"] == rows["world_size"].min()]
    rows = in_order(rows, implementation=ORDER, lane=LANES)
    return rows.assign(row=[", ".join(names) for names in zip(rows["implementation"], rows["lane"], strict=True)])


def overlap(frame: pd.DataFrame) -> pd.DataFrame:
    """By implementation: collectives of a step, the median of their times, how many began before backward ended, and
    the share of their time that ran by then."""
    boxes = timeline(frame)
    boxes = boxes[boxes["lane"] == "all-reduce"]
    rows = []
    for name, some in boxes.groupby("implementation"):
        seconds, during = some["duration_s"], some["during_s"]
        rows.append([name, len(some), seconds.median(), int((during > 0).sum()), 100 * during.sum() / seconds.sum()])
    columns = ["implementation", "collectives", "median_s", "begun_during_backward", "during_percent"]
    return in_order(pd.DataFrame(rows, columns=columns), implementation=ORDER)


@cache
def published_ratios() -> pd.DataFrame:
    """`ddp_compare_resnet50.csv`: backward over torch's in the same row of the sweep: bucket_bytes, implementation.

    Torch's sizes were megabytes, the Python wrapper's Mi elements: here, all are bytes.
    """
    table = pd.read_csv(reference_directory() / "ddp_compare_resnet50.csv")
    names = table["implementation"].map(PUBLISHED_NAMES)
    bytes_each = names.map(lambda name: 1 if name == TORCH else 4)
    table = table.assign(implementation=names, bucket_bytes=table["buffer_melements"] * MIB * bytes_each)
    table = table[table["phase"] == BACKWARD]
    torch = table[table["implementation"] == TORCH].set_index("buffer_melements")["median_ms"]
    table = table.assign(ratio=table["median_ms"].to_numpy() / torch.loc[table["buffer_melements"]].to_numpy())
    return table.loc[table["implementation"].isin(BUCKETED), ["implementation", "bucket_bytes", "ratio"]]
