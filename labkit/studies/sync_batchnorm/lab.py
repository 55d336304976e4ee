"""SyncBatchNorm: what normalizing over the batch of all ranks costs a layer, and where that time
goes."""

from collections.abc import Iterator
from itertools import product
from typing import Annotated

import pandas as pd
from pydantic import Field

from labkit.lab.answers import Compare, Report
from labkit.lab.config import Count, DeviceConfig, Repeats, Seconds, SeveralRanks, Some, one_of
from labkit.lab.declaration import Lab
from labkit.lab.figures import Lines
from labkit.lab.metric import Metric, Results
from labkit.machine.description import Machine
from labkit.studies.shared import tasks
from labkit.studies.sync_batchnorm import worker
from labkit.studies.sync_batchnorm.worker import (
    BOTH,
    COLLECTIVES,
    LABKIT,
    PLAIN,
    TORCH,
    WHOLE,
    SyncBatchNormPoint,
)


class SyncBatchNormConfig(DeviceConfig):
    world_sizes: Some[SeveralRanks] = [2, 4]
    # At least 4: two ranks with two rows each, which plain BatchNorm needs.
    batches: Some[Annotated[int, Field(ge=4, lt=2**31)]] = [32, 64]
    """Rows of all ranks together."""
    features: Some[Count] = [128, 256, 512, 1024]
    alternatives: list[Annotated[str, one_of(lambda: (*worker.LAYERS, COLLECTIVES))]] = list(
        worker.ALTERNATIVES
    )
    calls: Annotated[int, Field(ge=1, le=10_000)] = 2
    """A sample is the mean of so many calls."""
    repeats: Repeats = 60
    rounds_s: Seconds | None = 0.6


CONFIGURATION = ("world_size", "backend", "device", "batch", "features")
TIME = Metric(
    "seconds", "alternative", CONFIGURATION, where={"phase": BOTH}, without=(COLLECTIVES,)
)
PHASES = Metric("seconds", "alternative", (*CONFIGURATION, "phase"))
PEAK = Metric("peak_bytes", "alternative", CONFIGURATION, exact=True)
NAMES = {
    LABKIT: "labkit's SyncBatchNorm",
    TORCH: "torch's SyncBatchNorm",
    PLAIN: "plain BatchNorm",
    WHOLE: "plain BatchNorm on the whole batch",
}


def points(config: SyncBatchNormConfig, machine: Machine) -> Iterator[SyncBatchNormPoint]:
    """Plan one point per number of ranks, batch and number of features, small ones first."""
    sizes = product(sorted(config.world_sizes), sorted(config.batches), sorted(config.features))
    for world_size, batch, features in sizes:
        yield SyncBatchNormPoint.on(machine, config, world_size, batch=batch, features=features)


def split(results: Results) -> pd.DataFrame:
    """Return the time that synchronizing adds to plain BatchNorm, in medians over the rounds.

    Of that, collectives take `collectives_s` by themselves. The rest is the layer's arithmetic, and
    waiting for a slower rank.
    """
    # `TIME` leaves the collectives alone out: they are no layer that could be faster.
    times = Metric("seconds", "alternative", CONFIGURATION, where={"phase": BOTH})
    samples = times.samples(results.frame)
    wide = samples.pivot_table(
        index=[*CONFIGURATION, "repeat"], columns="alternative", values="seconds"
    )
    if not {LABKIT, PLAIN, COLLECTIVES} <= set(wide.columns):
        return pd.DataFrame()
    # Within each round, whose layers ran one after the other at one speed of the machine.
    added = wide[LABKIT] - wide[PLAIN]
    parts = pd.DataFrame(
        {"added_s": added, "collectives_s": wide[COLLECTIVES], "rest_s": added - wide[COLLECTIVES]}
    )
    table = parts.dropna().groupby(level=list(CONFIGURATION)).median().reset_index()
    return table.assign(collectives_percent=100 * table["collectives_s"] / table["added_s"])


LAB = Lab(
    name="sync_batchnorm",
    title="SyncBatchNorm",
    summary="What normalizing over the batch of all ranks costs a layer, and where that goes.",
    config=SyncBatchNormConfig,
    # As in data/reference/sync_batchnorm.csv: 10,000 calls.
    paper={"world_sizes": [2], "calls": 10, "warmup": 10, "repeats": 1000},
    on_gpu={"world_sizes": [2, 8], "calls": 10},
    worker=worker.measure,
    points=points,
    plugin_parameter="alternatives",
    task=tasks.BATCH_NORM,
    register=worker.register,
    alternatives=("alternative",),
    names=NAMES,
    questions=[
        Compare(
            id="price",
            is_expected=True,
            text="Is a synchronized layer faster than plain BatchNorm?",
            metric=TIME,
            baseline=PLAIN,
            among=(LABKIT,),
            topic="batch_norm",
            keep="Synchronize batch norm only if the rows of one rank are too few for statistics.",
            figure=Lines(source=TIME, x="features", panel="world_size", at={"batch": None}),
        ),
        Report(
            id="split",
            text="Where does the added time go: into collectives, or into arithmetic and waiting?",
            table=split,
            configuration=CONFIGURATION,
            says=(
                "Collectives are {collectives_percent}% of the added time ({world_size} ranks,"
                " {features} features)."
            ),
            figure=Lines(
                source=PHASES, x="features", panel="world_size", at={"phase": BOTH, "batch": None}
            ),
        ),
        Compare(
            id="against_torch",
            text="Is labkit's SyncBatchNorm faster than torch's?",
            metric=TIME,
            baseline=TORCH,
            among=(LABKIT,),
        ),
        Compare(
            id="memory",
            text="Does a synchronized layer need less memory than plain BatchNorm?",
            metric=PEAK,
            baseline=PLAIN,
            among=(LABKIT,),
        ),
    ],
)
