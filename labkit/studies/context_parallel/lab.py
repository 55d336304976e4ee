"""Context parallelism: attention split across ranks, by a ring or gathered, in two layouts."""

from collections.abc import Iterator
from itertools import product
from typing import Annotated, Literal

import pandas as pd
from pydantic import Field

from labkit.lab.answers import Check, Compare
from labkit.lab.config import Count, DeviceConfig, Seconds, SeveralRanks, Some
from labkit.lab.declaration import Lab
from labkit.lab.figures import Lines
from labkit.lab.metric import Metric, Results
from labkit.machine.description import Machine
from labkit.parallel.ranks.torchrun import ranks_here
from labkit.studies.context_parallel import worker
from labkit.studies.context_parallel.worker import ContextParallelPoint
from labkit.studies.shared.alternatives import ALL_CORES
from labkit.studies.shared.tables import join, most_sent, predict_messages_s
from labkit.studies.shared.verification import verify_attention


class ContextParallelConfig(DeviceConfig):
    world_sizes: Some[SeveralRanks] = [2]
    lengths: Some[Annotated[int, Field(ge=64, lt=2**31)]] = [512, 1024, 2048]
    """Of the whole sequence; rounded up to a multiple of twice the number of ranks."""
    dtypes: Some[Literal["float32", "bfloat16"]] = ["float32"]
    heads: Count = 4
    head_dim: Annotated[int, Field(ge=8, le=1024)] = 64
    rounds_s: Seconds | None = 3.0


CONFIGURATION = ("world_size", "device", "dtype", "heads", "head_dim", "sequence")
TIME = Metric("seconds", "way", CONFIGURATION)
PEAK = Metric("peak_bytes", "way", CONFIGURATION, exact=True)
NAMES = {
    ALL_CORES: "attention on one rank with all cores",
    worker.WHOLE: "attention on one rank",
    worker.RING: "the zigzag ring",
    worker.RING_CONTIGUOUS: "the contiguous ring",
    worker.GATHERED: "gathering all keys and values",
}


def points(config: ContextParallelConfig, machine: Machine) -> Iterator[ContextParallelPoint]:
    """Plan from short to long; without one rank's own cores if there are more ranks than cores."""
    device = machine.device(config.device)
    for world_size, dtype, sequence in product(
        config.world_sizes, config.dtypes, sorted(config.lengths)
    ):
        # Zigzag halves every rank's part. The defaults fit powers of two, and a machine may have
        # 3 GPUs, or 7 of 8 after one fell off the bus.
        sequence += -sequence % (2 * world_size)
        ways: tuple[str, ...] = worker.WAYS
        # Of several ranks on a core, each has a part of it: one rank alone would have all of it.
        if device == "cpu" and ranks_here(world_size) > machine.cores:
            ways = tuple(way for way in ways if way != worker.WHOLE)
        yield ContextParallelPoint.on(
            machine, config, world_size, ways=ways, sequence=sequence, dtype=dtype
        )


def efficiency(results: Results) -> pd.DataFrame:
    """Return the time on one rank over p times that on p ranks: measured and predicted.

    `formula_efficiency` follows from the layout, `predicted_efficiency` also from the cost of
    messages.
    """
    table = TIME.medians(results.frame)
    whole = table.loc[table["way"] == worker.WHOLE, [*CONFIGURATION, "seconds"]]
    whole = whole.rename(columns={"seconds": "one_rank_s"})
    table = join(table[table["way"].isin(worker.LAYOUTS)], whole, CONFIGURATION, "left")
    table = table.dropna(subset="one_rank_s").infer_objects()
    table = join(table, sent(results), [*CONFIGURATION, "way"], "left")
    p = table["world_size"].astype(float)
    # Under a causal mask the last of p contiguous parts attends to p - 1/2 blocks, as its own is
    # half masked, and the mean part to p/2. All wait for the last.
    share = (p / (2 * p - 1)).where(table["way"] == worker.RING_CONTIGUOUS, 1.0)
    whole_s = table["one_rank_s"].astype(float)
    messages_s = predict_messages_s(table, results)
    table = table.assign(
        efficiency=whole_s / (p * table["seconds"].astype(float)),
        formula_efficiency=share,
        predicted_efficiency=whole_s / (whole_s / share + p * messages_s),
    )
    # The interval is that of the time alone.
    return table.drop(columns=["low", "high", "n", "calls", "sent_bytes", "formula_sent_bytes"])


def sent(results: Results) -> pd.DataFrame:
    """Return calls and bytes in both passes of the rank that sends most, with the formula."""
    return most_sent(results.frame, [*CONFIGURATION, "way"])


LAB = Lab(
    name="context_parallel",
    title="Context parallelism",
    summary=(
        "What attention to a sequence split across ranks costs, sends and holds: a ring, or"
        " gathered."
    ),
    config=ContextParallelConfig,
    paper={
        "world_sizes": [2, 4, 8],
        "lengths": [2**k for k in range(12, 18)],
        "heads": 32,
        "head_dim": 128,
    },
    on_gpu={
        "world_sizes": [2, 8],
        "lengths": [4096, 8192, 16384],
        "dtypes": ["float32", "bfloat16"],
        "heads": 16,
    },
    worker=worker.measure,
    verify=verify_attention,
    points=points,
    alternatives=("way",),
    names=NAMES,
    questions=[
        Compare(
            id="length",
            text="From what length is attention faster when split across ranks?",
            metric=TIME,
            baseline=ALL_CORES,
            among=(worker.RING, worker.RING_CONTIGUOUS, worker.GATHERED),
            advice="Split the sequence across ranks{where}.",
            keep="Split the sequence only to save memory.",
            figure=Lines(source=TIME, x="sequence", panel="world_size"),
        ),
        Check(
            id="efficiency",
            text=(
                "Is efficiency what the layout allows: 1 for zigzag, p/(2p-1) for contiguous on p"
                " ranks?"
            ),
            table=efficiency,
            measured="efficiency",
            predicted="formula_efficiency",
            # The formula has the arithmetic alone, and no messages.
            within=1.25,
            subject="efficiencies",
            reference="the formula",
            figure=Lines(x="sequence", y="measured_over_predicted", hue="way", panel="world_size"),
        ),
        Compare(
            id="layout",
            text="Is the zigzag ring, which gives all ranks the same work, faster?",
            metric=TIME,
            baseline=worker.RING_CONTIGUOUS,
            among=(worker.RING,),
        ),
        Compare(
            id="ring",
            text="Is a ring, which sends while it computes, faster than gathering first?",
            metric=TIME,
            baseline=worker.GATHERED,
            among=(worker.RING,),
        ),
        Check(
            id="sent",
            text="Does a rank send the bytes that the formula says?",
            table=sent,
            measured="sent_bytes",
            predicted="formula_sent_bytes",
            within=1.01,
            subject="bytes sent",
            reference="the formula",
            figure=Lines(x="sequence", y="sent_bytes", hue="way", panel="world_size"),
        ),
        Compare(
            id="memory",
            text="Does a rank need less memory with a part of the sequence?",
            metric=PEAK,
            baseline=worker.WHOLE,
            among=(worker.RING, worker.RING_CONTIGUOUS, worker.GATHERED),
            figure=Lines(source=PEAK, x="sequence", panel="world_size"),
        ),
    ],
)
