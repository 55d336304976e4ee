"""All-reduce: what averaging a tensor over ranks costs, and which algorithm and transport does it
best.

Each point is one size and number of ranks: algorithms that pass an exact check take turns with
torch's all-reduce. Times are the slowest rank's. Ratios compare times of the same round, except
between scheduling policies, each of which has ranks of its own. Short tensors are measured in two
sessions: again later, by new processes.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import Field

from labkit.costs.calibration import NCCL
from labkit.costs.communication import ALL_REDUCE_COSTS, bus_bandwidth
from labkit.lab.answers import Check, Compare, Report
from labkit.lab.config import Ranks, Repeats, Seconds, Sessions, Some, TimedConfig, one_of
from labkit.lab.declaration import Lab
from labkit.lab.figures import Lines
from labkit.lab.metric import Metric, Results
from labkit.lab.point import repeat_in_sessions
from labkit.machine.description import Machine
from labkit.parallel.collectives import ALGORITHMS
from labkit.parallel.transport import SHARED
from labkit.studies.all_reduce.worker import (
    FLOOR,
    LABKIT,
    OVER,
    TORCH,
    AllReducePoint,
    measure,
    register,
)
from labkit.studies.shared import tasks

KIB = 2**10
MIB = 2**20
PEAK = "peak of the links"
# Longer tensors have one session: their times hardly differ between processes.
SESSIONS_UP_TO_BYTES = MIB

# Bytes of the whole tensor, a multiple of every dtype's size.
Bytes = Annotated[int, Field(ge=8, lt=2**48, multiple_of=8)]
Algorithm = Annotated[str, one_of(lambda: (TORCH, *ALGORITHMS, LABKIT))]


class AllReduceConfig(TimedConfig):
    world_sizes: Some[Ranks] = [2, 4]
    sizes_bytes: Some[Bytes] = [KIB, 4 * KIB, 64 * KIB, 256 * KIB, MIB, 10 * MIB]
    algorithms: list[Algorithm] = [*(name for name in ALGORITHMS if name != "one_shot"), LABKIT]
    """Compared with torch's, point to point. "one_shot", which sends p/2 times a ring's bytes, must
    be asked for."""
    transports: list[Literal["point_to_point", "shared"]] = ["shared"]
    """labkit's `all_reduce` over each is compared with torch's. Point to point it is one of the
    algorithms already: measured twice, one page would say two numbers."""
    scheduling_bytes: list[Bytes] = [4 * KIB, 64 * KIB]
    """Sizes at which SCHED_BATCH is compared with the default scheduling policy."""
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    gloo_up_to_bytes: Bytes = 1024 * MIB
    """Longer tensors are not measured over gloo, whether or not there is NCCL."""
    sessions: Sessions = 2
    """How often tensors of up to 1 MiB are measured, each time by other processes."""
    repeats: Repeats = 60
    rounds_s: Seconds | None = 0.5
    timeout_s: Seconds = 120.0


CONFIGURATION = ("backend", "world_size", "n_bytes")
TIME = Metric("seconds", "algorithm", CONFIGURATION, where={"sweep": "sizes"})
TRANSPORT_TIME = Metric("seconds", "transport", CONFIGURATION[1:], where={"sweep": "transports"})
POLICY_KEYS = (*CONFIGURATION, "algorithm")


def _common_repeats(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of repeats that both policies have: the rounds of one may end earlier."""
    by_repeat = rows.groupby([*POLICY_KEYS, "session", "repeat"], dropna=False)["scheduling"]
    return rows[by_repeat.transform("nunique") == 2]


POLICY_TIME = Metric(
    "seconds", "scheduling", POLICY_KEYS, where={"sweep": "scheduling"}, prepare=_common_repeats
)
NAMES = {
    TORCH: "torch's all-reduce",
    LABKIT: "labkit's all_reduce",
    "ring": "the ring",
    "butterfly": "direct exchange",
    SHARED: "labkit's all_reduce through shared memory",
    "batch": "an all-reduce under SCHED_BATCH",
    "default": "one under the default policy",  # of a sentence that begins with the line above
}


def points(config: AllReduceConfig, machine: Machine) -> Sequence[AllReducePoint]:
    """Plan every size over gloo, or over NCCL and torch's over gloo; repeat short ones later."""
    once = list(_points(config, "gloo"))
    if len(machine.gpus) > 1:
        # labkit's algorithms run over NCCL then; gloo's row says what CPU tensors cost here.
        only_torch = config.model_copy(update={"algorithms": []})
        once = [*_points(config, "nccl"), *_points(only_torch, "gloo")]
    short = [point for point in once if point.n_bytes <= SESSIONS_UP_TO_BYTES]
    return [*once, *repeat_in_sessions(short, config.sessions)]


def _points(config: AllReduceConfig, backend: str) -> Iterator[AllReducePoint]:
    over_transports = [f"{LABKIT}{OVER}{transport}" for transport in config.transports]
    algorithms = tuple(dict.fromkeys((TORCH, *config.algorithms)))
    sizes = [n for n in config.sizes_bytes if backend == "nccl" or n <= config.gloo_up_to_bytes]
    worlds = [world_size for world_size in config.world_sizes if world_size > 1]
    point = partial(AllReducePoint.of, config, backend=backend)
    for world_size, n_bytes in product(worlds, sizes):
        size = {"world_size": world_size, "n_bytes": n_bytes}
        yield point(sweep="sizes", algorithms=algorithms, **size)
        # NCCL chooses among links by itself; labkit's transports move what lies in main memory.
        if backend == "gloo" and over_transports:
            yield point(sweep="transports", algorithms=(TORCH, *over_transports, FLOOR), **size)
    # No scheduler of CPUs moves NCCL's kernels.
    if backend == "nccl":
        return
    # Policies follow one another: each needs ranks of its own, which cannot take turns.
    policies = product(worlds, ("batch", "default"), config.scheduling_bytes)
    for world_size, policy, n_bytes in policies:
        size = {"world_size": world_size, "n_bytes": n_bytes}
        yield point(sweep="scheduling", scheduling=policy, algorithms=(TORCH, LABKIT), **size)


def times(results: Results) -> pd.DataFrame:
    """Return medians, bandwidths, and each time over the shortest tensor's with as many ranks."""
    table = TIME.medians(results.frame)
    sizes = zip(table["world_size"], table["n_bytes"], table["seconds"], strict=True)
    # Medians are sorted by their keys, and so by length.
    shortest = table.groupby(["backend", "world_size", "algorithm"])["seconds"].transform("first")
    return table.assign(
        algbw_gb_per_s=table["n_bytes"] / table["seconds"] / 1e9,
        busbw_gb_per_s=[bus_bandwidth(int(p), n, s) / 1e9 for p, n, s in sizes],
        times_the_shortest=table["seconds"] / shortest,
    )


def torch_times(results: Results) -> pd.DataFrame:
    """Return torch's all-reduce by size and ranks; NCCL's rows come before gloo's."""
    table = times(results)
    keys = list(CONFIGURATION)
    table = table[table["algorithm"] == TORCH].drop(columns="algorithm")
    return table.sort_values(keys, ascending=[key != "backend" for key in keys])


def bandwidth(results: Results) -> pd.DataFrame:
    """Return the bus bandwidth of torch's all-reduce, over NCCL if there is NCCL, and the peak."""
    table = torch_times(results)[[*CONFIGURATION, "seconds", "busbw_gb_per_s"]]
    table = table[table["backend"] == table["backend"].max()]  # "nccl" > "gloo"
    table = table.assign(kind=[f"{ranks} ranks" for ranks in table["world_size"]])
    # A level line from the shortest to the longest tensor. No links are known for gloo.
    over_nccl = table[table["backend"] == "nccl"].drop_duplicates("n_bytes")
    ends = pd.concat([over_nccl.head(1), over_nccl.tail(1)])
    peak = ends.assign(
        kind=PEAK, busbw_gb_per_s=results.link_bytes_per_s / 1e9, seconds=float("nan")
    )
    return pd.concat([peak.dropna(subset="busbw_gb_per_s"), table], ignore_index=True)


def predictions(results: Results) -> pd.DataFrame:
    """Return measured times, and those that the calibration predicts from messages and bytes."""
    table = TIME.medians(results.frame)
    table = table[table["algorithm"].isin(ALGORITHMS)]
    return table.assign(predicted_s=[_predict(row, results) for row in table.to_dict("records")])


def _predict(row: dict[str, Any], results: Results) -> float | None:
    cost = ALL_REDUCE_COSTS.get(row["algorithm"])
    ranks = int(row["world_size"])
    if results.calibration is None or cost is None:
        return None
    way = NCCL if row["backend"] == "nccl" else "gloo"
    return results.calibration.algorithm_s(
        way, row["algorithm"], cost(ranks, row["n_bytes"]), ranks
    )


LAB = Lab(
    name="all_reduce",
    title="All-reduce",
    summary=(
        "What averaging a tensor over ranks costs, and which algorithm and transport does it best."
    ),
    config=AllReduceConfig,
    # As in data/reference/allreduce_gloo_nccl.csv.
    paper={
        "world_sizes": [2, 4, 6],
        "sizes_bytes": [MIB, 10 * MIB, 100 * MIB, 1024 * MIB],
        "repeats": 50,
    },
    on_gpu={
        "world_sizes": [2, 4, 8],
        "sizes_bytes": [4 * KIB, 64 * KIB, MIB, 16 * MIB, 256 * MIB],
        "scheduling_bytes": [],
        "sessions": 1,
        "gloo_up_to_bytes": MIB,
    },
    worker=measure,
    points=points,
    plugin_parameter="algorithms",
    task=tasks.RING,
    register=register,
    is_checked=lambda point: point.sweep in ("sizes", "transports"),
    alternatives=("algorithm",),
    names=NAMES,
    questions=[
        Report(
            id="size_and_ranks",
            text="How does the time of an all-reduce grow with its size and the number of ranks?",
            table=torch_times,
            configuration=CONFIGURATION,
            says="An all-reduce of {n_bytes} between {world_size} ranks takes {seconds}.",
            figure=Lines(x="n_bytes", y="seconds", hue="world_size", panel="backend"),
        ),
        Report(
            id="bandwidth",
            text="What bandwidth do the links between ranks reach?",
            table=bandwidth,
            # The peak is the links', and nothing reached it.
            pick=lambda table: table["busbw_gb_per_s"].where(table["kind"] != PEAK).idxmax(),
            configuration=CONFIGURATION,
            says=(
                "{world_size} ranks reach a bus bandwidth of {busbw_gb_per_s} GB/s with {n_bytes}."
            ),
            figure=Lines(x="n_bytes", y="busbw_gb_per_s", hue="kind", log="x"),
        ),
        Compare(
            id="algorithms",
            text=(
                "Does any of labkit's point-to-point algorithms beat torch's all-reduce, and at"
                " which sizes?"
            ),
            metric=TIME,
            baseline=TORCH,
            topic="all_reduce",
            advice="If ranks send point to point, average with {name}{where}.",
            figure=Lines(x="n_bytes", hue="algorithm", panel="world_size"),
        ),
        Check(
            id="alpha_beta",
            needs_calibration=True,
            without_rows=(
                "It timed none of labkit's algorithms with a number of ranks that is calibrated;"
                " `labkit measure limits --set 'ranks=[2,3]'` calibrates 2 and 3."
            ),
            text="Do the costs of a message and of a byte predict how long an all-reduce takes?",
            table=predictions,
            measured="seconds",
            predicted="predicted_s",
            figure=Lines(
                x="n_bytes", y="measured_over_predicted", hue="algorithm", panel="world_size"
            ),
        ),
        Compare(
            id="transports",
            text="Is labkit's all-reduce through shared memory faster than torch's?",
            metric=TRANSPORT_TIME,
            baseline=TORCH,
            among=(SHARED,),
            topic="transport",
            advice="On one machine, average CPU tensors with {name}{where}.",
            figure=Lines(source=TRANSPORT_TIME, x="n_bytes", panel="world_size"),
        ),
        Compare(
            id="scheduling",
            text="Are small all-reduces faster under SCHED_BATCH than under the default policy?",
            metric=POLICY_TIME,
            baseline="default",
            topic="scheduling",
            advice=(
                "Run CPU ranks under SCHED_BATCH{where}. labkit already does this; start other"
                " programs with `chrt -b 0`."
            ),
            figure=Lines(x="n_bytes", hue="algorithm", panel="world_size"),
        ),
    ],
)
