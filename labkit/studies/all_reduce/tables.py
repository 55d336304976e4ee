"""From the frame of an all-reduce run to the tables its findings and figures are made of.

Every table is tidy and carries units in its names. Times are of the slowest rank of each repeat.
"""

from functools import cache
from typing import Any

import pandas as pd

from labkit.bench.statistics import with_verdicts
from labkit.costs.calibration import MESSAGE, Calibration
from labkit.costs.communication import (
    AlphaBeta,
    CostOf,
    MessageCost,
    algorithm_bandwidth,
    bus_bandwidth,
    crossover_bytes,
    fit_alpha_beta,
)
from labkit.lab.predictions import Predicted, Row
from labkit.lab.project import reference_directory
from labkit.lab.rows import Measured, in_order, select
from labkit.parallel.collectives import ALGORITHMS
from labkit.studies.all_reduce.links import BETWEEN, WITHIN
from labkit.studies.all_reduce.phases import PHASES
from labkit.studies.all_reduce.transports import CHOSEN, FLOOR, MESSAGES, SHARED_MEMORY, TORCH
from labkit.studies.all_reduce.worker import AllReducePoint

MIB = 2**20
ALL_REDUCES = Measured(("sweep", "backend", "scheduling", "world_size", "n_bytes"), "algorithm")
TRANSPORTS = Measured(("world_size", "n_bytes"), "transport")
PHASE_TIMES = Measured(("collective", "world_size", "n_bytes"), "transport")
POLICIES = Measured(("backend", "world_size", "n_bytes", "algorithm"), "scheduling", took_turns=False)
ALGORITHM_ORDER = (TORCH, *ALGORITHMS, CHOSEN)
TRANSPORT_ORDER = (TORCH, MESSAGES, SHARED_MEMORY, "registered", FLOOR)  # "registered": in older runs
# Pairs of which the first sends fewer messages and the second fewer bytes.
OVERTAKING = (("recursive_doubling", "ring"), ("recursive_doubling", "halving_doubling"))


def times(frame: pd.DataFrame, *sweeps: str) -> pd.DataFrame:
    """Median seconds with interval, algbw and busbw in GB/s, one row per (setting, algorithm)."""
    table = ALL_REDUCES.medians(frame, sweep=sweeps)
    algbw = [algorithm_bandwidth(n, s) / 1e9 for n, s in zip(table.n_bytes, table.seconds, strict=True)]
    busbw = [
        bus_bandwidth(p, n, s) / 1e9 for p, n, s in zip(table.world_size, table.n_bytes, table.seconds, strict=True)
    ]
    return with_panel(table.assign(algbw_gb_per_s=algbw, busbw_gb_per_s=busbw))


def with_panel(table: pd.DataFrame) -> pd.DataFrame:
    """Add `panel`, (backend, world size): figures draw one panel each, so that no line joins two backends."""
    return table.assign(panel=list(zip(table["backend"], table["world_size"], strict=True)))


def against_torch(frame: pd.DataFrame, *sweeps: str) -> pd.DataFrame:
    """Each algorithm's time over torch's with two ranks or more, from the same rounds, with interval and verdict."""
    ratios = ALL_REDUCES.over(frame, TORCH, sweep=sweeps)
    return with_panel(with_verdicts(ratios[ratios["world_size"] > 1]))


def transport_times(frame: pd.DataFrame) -> pd.DataFrame:
    """Median seconds with interval of labkit's chooser over each transport, of torch's all-reduce, and of the floor."""
    return TRANSPORTS.medians(frame, sweep="transports", algorithm=[TORCH, FLOOR, CHOSEN])


def transports_over(frame: pd.DataFrame, baseline: str) -> pd.DataFrame:
    """Each transport's time over that of `baseline`, from the same rounds, with interval and verdict."""
    table = TRANSPORTS.over(frame, baseline, sweep="transports", algorithm=[TORCH, FLOOR, CHOSEN])
    return in_order(table, world_size=None, n_bytes=None, transport=TRANSPORT_ORDER)


def phases(frame: pd.DataFrame) -> pd.DataFrame:
    """Reduce-scatter and all-gather: median seconds by transport, and what a rank sends, over the formula's bytes."""
    keys = list(PHASE_TIMES.columns)
    table = PHASE_TIMES.medians(frame, sweep="phases")
    sent = select(frame, [*keys, "sent_bytes", "formula_bytes"], sweep="phases")[[*keys, "sent_bytes", "formula_bytes"]]
    table = table.merge(sent.drop_duplicates(), on=keys)
    table = table.assign(measured_over_predicted=(table["sent_bytes"] / table["formula_bytes"]).astype(float).round(3))
    return in_order(table, collective=PHASES, world_size=None, n_bytes=None, transport=TRANSPORT_ORDER)


def phases_over_torch(frame: pd.DataFrame) -> pd.DataFrame:
    """The time of each over torch's own, from the same rounds, with interval and verdict."""
    return in_order(PHASE_TIMES.over(frame, TORCH, sweep="phases"), collective=PHASES, transport=TRANSPORT_ORDER)


def batch_against_default(frame: pd.DataFrame) -> pd.DataFrame:
    """Time under SCHED_BATCH over time under the system's default policy: other ranks, one after the other."""
    return with_panel(POLICIES.over(frame, "default", sweep="scheduling"))


def link_models(frame: pd.DataFrame) -> dict[str, dict[tuple[str, int], AlphaBeta]]:
    """Alpha and beta of single pairs, within a host and between hosts, each by (backend, world size).

    Empty where all ranks share a host. Beta is seconds per byte while both ranks of the pair send: its inverse is the
    bandwidth of the link in each direction.
    """
    models = {link: _fit_steps(frame, link) for link in (WITHIN, BETWEEN)}
    return {link: by_world for link, by_world in models.items() if by_world}


def _fit_steps(frame: pd.DataFrame, step: str) -> dict[tuple[str, int], AlphaBeta]:
    table = ALL_REDUCES.medians(frame, sweep="exchange", algorithm=step)
    return {
        (str(backend), int(world_size)): fit_alpha_beta(
            [MessageCost(1, n) for n in steps["n_bytes"]], steps["seconds"].tolist()
        )
        for (backend, world_size), steps in table.groupby(["backend", "world_size"])
        if len(steps) >= 2
    }


def predictions(frame: pd.DataFrame, calibration: Calibration | None) -> pd.DataFrame:
    """What each algorithm took, and what its messages and bytes should take by the machine's calibration."""
    return with_panel(PREDICTED.beside(frame, calibration))


def _expected_s(row: Row, calibration: Calibration) -> float | None:
    """By its messages. Torch's is not predicted: what the calibration has of it is a line through itself."""
    name, ranks = row["algorithm"], int(row["world_size"])
    cost = _cost(name)
    if row["backend"] != "gloo" or ranks < 2 or cost is None:
        return None
    return calibration.algorithm_s("gloo", name, cost(ranks, row["n_bytes"]), ranks)


def _planned(point: AllReducePoint) -> list[dict[str, Any]]:
    if point.sweep != "sizes" or point.session > 1:
        return []
    return [point.describe() | {"n_bytes": point.n_bytes, "algorithm": name} for name in point.algorithms]


def _cost(algorithm: str) -> CostOf | None:
    """What an algorithm of labkit's should cost, if that is known."""
    return ALGORITHMS[algorithm].cost if algorithm in ALGORITHMS else None


PREDICTED = Predicted(
    tuple(ALL_REDUCES.columns),
    _expected_s,
    _planned,
    lambda frame: ALL_REDUCES.medians(frame, sweep="sizes"),
    names=("world_size", "n_bytes", "algorithm"),
)


def fits(frame: pd.DataFrame) -> pd.DataFrame:
    """One alpha and beta for all algorithms together, one row per (backend, world size)."""
    rows = []
    table = times(frame, "sizes")
    for (backend, world_size), group in table[table["world_size"] > 1].groupby(["backend", "world_size"]):
        known = [
            (cost(int(world_size), row["n_bytes"]), row["seconds"])
            for row in group.to_dict("records")
            if (cost := _cost(row["algorithm"]))
        ]
        if len({cost for cost, _ in known}) >= 2:
            model = fit_alpha_beta(*zip(*known, strict=True))
            percents = (100 * model.median_error, 100 * model.largest_error)
            rows.append((backend, world_size, model.alpha_s, 1e9 * model.beta_s_per_byte, *percents))
    columns = ["backend", "world_size", "alpha_s", "beta_ns_per_byte", "median_error_percent", "largest_error_percent"]
    return pd.DataFrame(rows, columns=columns)


def crossovers(frame: pd.DataFrame, calibration: Calibration | None) -> pd.DataFrame:
    """Where one algorithm should overtake another, and between which measured sizes it does.

    One row per (backend, world size, pair). `predicted_bytes` is by messages in a row, as calibrated.
    `wins_until_bytes` and `overtaken_from_bytes` are the last size at which the first algorithm is significantly
    faster, and the first at which the second is; NaN: at none. The prediction "holds" if it lies between them, or
    beyond all that was measured where the second never wins; it is "open" where nothing shows the one or the other.
    """
    rows = []
    both = [
        ALL_REDUCES.over(frame, first, sweep="sizes", backend="gloo", algorithm=[first, second]).assign(first=first)
        for first, second in OVERTAKING
    ]
    ratios = with_verdicts(pd.concat(both, ignore_index=True)).sort_values("world_size", kind="stable")
    for (world_size, first, second), pair in ratios.groupby(["world_size", "first", "algorithm"], sort=False):
        ranks, costs = int(world_size), [cost for cost in map(_cost, (first, second)) if cost is not None]
        found = calibration.transport("gloo", MESSAGE, ranks) if calibration and ranks > 1 else None
        if found is None or len(costs) < 2:
            continue
        predicted = crossover_bytes(costs[0], costs[1], ranks, AlphaBeta(found.alpha_s, found.beta_s_per_byte))
        until = pair.loc[pair["verdict"] == "slower", "n_bytes"].max()
        start = pair.loc[pair["verdict"] == "faster", "n_bytes"].min()
        told = _crossover_holds(predicted, until, start, pair["n_bytes"].max())
        rows.append(("gloo", ranks, first, second, predicted, until, start, told))
    names = ["backend", "world_size", "first", "then", "predicted_bytes", "wins_until_bytes", "overtaken_from_bytes"]
    return pd.DataFrame(rows, columns=[*names, "prediction"])


def _crossover_holds(predicted: float | None, until: float, start: float, longest: float) -> str:
    if pd.isna(start):  # the second nowhere wins
        if pd.isna(until) or (predicted is not None and until < predicted <= longest):
            return "open"
        return "holds" if predicted is None or predicted > until else "does not hold"
    if predicted is None:
        return "does not hold"
    if pd.isna(until):
        return "open" if predicted <= start else "does not hold"
    return "holds" if until <= predicted <= start else "does not hold"


def errors_and_memory(frame: pd.DataFrame) -> pd.DataFrame:
    """Largest error against the exact mean and largest extra memory of any rank, by algorithm and setting."""
    values = ["error", "extra_bytes", "scratch_bytes"]
    checked = select(frame, [*ALL_REDUCES.columns, *values], sweep=["sizes", "ranks"])
    return checked.groupby(ALL_REDUCES.columns)[values].max().reset_index()


@cache
def published_by_ranks() -> pd.DataFrame:
    """Both `allreduce_ring_vs_*.csv` in long form: comparison, world_size, elements, algorithm, seconds."""
    tables = []
    for other in ("butterfly", "torch"):
        table = pd.read_csv(reference_directory() / f"allreduce_ring_vs_{other}.csv")
        for name in ("ring", other):
            rows = table[["world_size", "elements"]].assign(algorithm=name, seconds=table[f"{name}_max_s"])
            tables.append(rows.assign(comparison=f"published: ring and {other}"))
    return pd.concat(tables, ignore_index=True)
