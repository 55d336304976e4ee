"""From the frame of an all-reduce run to the tables its answers and figures are made of.

Every table is tidy and carries units in its names. Times are of the slowest rank of each repeat.
"""

from collections.abc import Sequence
from functools import cache

import numpy as np
import pandas as pd

from labkit.bench.statistics import compare_groups, judged, slowest_rank, summarize_groups
from labkit.costs.communication import (
    ALL_REDUCE_COSTS,
    AlphaBeta,
    MessageCost,
    algorithm_bandwidth,
    bus_bandwidth,
    crossover_bytes,
    fit_alpha_beta,
)
from labkit.lab.project import reference_directory
from labkit.studies.all_reduce.links import BETWEEN, WITHIN
from labkit.studies.all_reduce.transports import TORCH
from labkit.studies.all_reduce.worker import OWN

SETTING = ["sweep", "backend", "scheduling", "world_size", "n_bytes"]
MIB = 2**20
ALGORITHM_ORDER = (TORCH, *OWN)
# Pairs of which the first sends fewer messages and the second fewer bytes.
OVERTAKING = (("recursive_doubling", "ring"), ("recursive_doubling", "halving_doubling"))


def samples(frame: pd.DataFrame, *sweeps: str, also_by: Sequence[str] = ()) -> pd.DataFrame:
    """`seconds` of the slowest rank, one row a repeat of each (setting, algorithm), and column of `also_by`."""
    by = [*SETTING, "algorithm", *also_by]
    if frame.empty or "seconds" not in frame:
        return pd.DataFrame(columns=[*by, "repeat", "seconds"])
    timed = frame[frame["sweep"].isin(sweeps or ("sizes", "ranks"))].dropna(subset="seconds")
    return slowest_rank(timed, "seconds", by)


def times(frame: pd.DataFrame, *sweeps: str) -> pd.DataFrame:
    """Median seconds with interval, algbw and busbw in GB/s, one row a (setting, algorithm)."""
    table = summarize_groups(samples(frame, *sweeps), "seconds", [*SETTING, "algorithm"])
    table = table.rename(columns={"median": "seconds"})
    algbw = [algorithm_bandwidth(n, s) / 1e9 for n, s in zip(table.n_bytes, table.seconds, strict=True)]
    busbw = [
        bus_bandwidth(p, n, s) / 1e9 for p, n, s in zip(table.world_size, table.n_bytes, table.seconds, strict=True)
    ]
    return with_panel(table.assign(algbw_gb_per_s=algbw, busbw_gb_per_s=busbw))


def with_panel(table: pd.DataFrame) -> pd.DataFrame:
    """Add `panel`, (backend, world size): figures draw one panel each, so that no line joins two backends."""
    return table.assign(panel=list(zip(table["backend"], table["world_size"], strict=True)))


def against_torch(frame: pd.DataFrame, *sweeps: str) -> pd.DataFrame:
    """Each algorithm's time over torch's, from the same interleaved repeats, with interval and verdict."""
    return with_panel(compare_groups(samples(frame, *sweeps), "seconds", SETTING, "algorithm", TORCH))


def batch_against_default(frame: pd.DataFrame) -> pd.DataFrame:
    """Time under SCHED_BATCH over time under the system's default policy: other ranks, one after the other.

    Where they were measured in both orders (`turn`), the ratio is the geometric mean of both, the interval covers that
    of each, and a difference is shown only where both orders show it. Runs from before know one order.
    """
    setting = ["backend", "world_size", "n_bytes", "algorithm"]
    turn = frame["turn"].fillna(1) if "turn" in frame else 1
    table = samples(frame.assign(turn=turn), "scheduling", also_by=["turn"])
    by_turn = compare_groups(table, "seconds", [*setting, "turn"], "scheduling", "default", interleaved=False)
    orders = by_turn.groupby([*setting, "scheduling"])
    middle = ("ratio", lambda ratios: np.exp(np.log(ratios).mean()))
    both = orders.agg(ratio=middle, low=("low", "min"), high=("high", "max"), p=("p", lambda p: p.max(skipna=False)))
    same_side = orders["ratio"].agg(lambda ratios: (ratios > 1).nunique() == 1)
    return with_panel(judged(both.assign(p=both["p"].where(same_side, 1.0)).reset_index()))


def exchange_models(frame: pd.DataFrame) -> dict[tuple[str, int], AlphaBeta]:
    """Alpha and beta from single exchange steps, measured before any all-reduce, by (backend, world size)."""
    table = times(frame, "exchange")
    return _fit_steps(table[table["algorithm"] == "exchange"])


def link_models(frame: pd.DataFrame) -> dict[str, dict[tuple[str, int], AlphaBeta]]:
    """Alpha and beta of single pairs, within a host and between hosts, each by (backend, world size).

    Empty where all ranks share a host. Beta is seconds a byte while both ranks of the pair send: its inverse is the
    bandwidth of the link in each direction.
    """
    table = times(frame, "exchange")
    models = {link: _fit_steps(table[table["algorithm"] == link]) for link in (WITHIN, BETWEEN)}
    return {link: by_world for link, by_world in models.items() if by_world}


def _fit_steps(table: pd.DataFrame) -> dict[tuple[str, int], AlphaBeta]:
    return {
        (str(backend), int(world_size)): fit_alpha_beta(
            [MessageCost(1, n) for n in steps["n_bytes"]], steps["seconds"].tolist()
        )
        for (backend, world_size), steps in table.groupby(["backend", "world_size"])
        if len(steps) >= 2
    }


def predictions(frame: pd.DataFrame) -> pd.DataFrame:
    """What single exchange steps, measured before, say an algorithm should take; and what it took.

    Columns: setting, algorithm, `seconds`, `predicted_s`, `measured_over_predicted`.
    """
    models = exchange_models(frame)
    rows = [
        {name: row[name] for name in (*SETTING, "panel", "algorithm", "seconds")}
        | {"predicted_s": models[key].predict_s(ALL_REDUCE_COSTS[row["algorithm"]](key[1], row["n_bytes"]))}
        for row in times(frame, "sizes").to_dict("records")
        if row["algorithm"] in ALL_REDUCE_COSTS and (key := (row["backend"], row["world_size"])) in models
    ]
    table = pd.DataFrame(rows, columns=[*SETTING, "panel", "algorithm", "seconds", "predicted_s"])
    return table.assign(measured_over_predicted=table["seconds"] / table["predicted_s"])


def fits(frame: pd.DataFrame) -> dict[tuple[str, int], AlphaBeta]:
    """One alpha and beta for all algorithms together, by (backend, world size)."""
    table = times(frame, "sizes")
    table = table[table["algorithm"].isin(list(ALL_REDUCE_COSTS)) & (table["world_size"] > 1)]
    models = {}
    for (backend, world_size), group in table.groupby(["backend", "world_size"]):
        costs = [
            ALL_REDUCE_COSTS[name](world_size, n) for name, n in zip(group["algorithm"], group["n_bytes"], strict=True)
        ]
        if len(set(costs)) >= 2:
            models[str(backend), int(world_size)] = fit_alpha_beta(costs, group["seconds"].tolist())
    return models


def fit_table(frame: pd.DataFrame) -> pd.DataFrame:
    """The fits as a table: alpha in seconds, beta in ns a byte, relative errors in percent."""
    rows = [
        {
            "backend": backend,
            "world_size": world_size,
            "alpha_s": model.alpha_s,
            "beta_ns_per_byte": model.beta_s_per_byte * 1e9,
            "median_error_percent": model.median_error * 100,
            "largest_error_percent": model.largest_error * 100,
        }
        for (backend, world_size), model in fits(frame).items()
    ]
    columns = ["backend", "world_size", "alpha_s", "beta_ns_per_byte"]
    return pd.DataFrame(rows, columns=[*columns, "median_error_percent", "largest_error_percent"])


def crossover_table(frame: pd.DataFrame) -> pd.DataFrame:
    """Where one algorithm should overtake another, and between which measured sizes it does.

    One row a (backend, world size, pair). `predicted_bytes` is by single exchange steps, measured before;
    `fitted_bytes` by the model fitted to the all-reduces themselves, afterwards. `wins_until_bytes` and
    `overtaken_from_bytes` are the last size at which the first algorithm is shown to be faster and the first at
    which the second is; NaN: at none. The prediction "holds" if it lies between them, or says never and the second
    never wins; it is "open" where no size is small enough to show the first one ahead.
    """
    rows = []
    table = samples(frame, "sizes")
    fitted = fits(frame)
    for (backend, world_size), model in exchange_models(frame).items():
        here = table[(table["backend"] == backend) & (table["world_size"] == world_size)]
        for first, second in OVERTAKING:
            both = here[here["algorithm"].isin([first, second])]
            pair = compare_groups(both, "seconds", SETTING, "algorithm", first)
            if pair.empty:
                continue
            predicted = crossover_bytes(first, second, world_size, model)
            until = pair.loc[pair["verdict"] == "slower", "n_bytes"].max()
            start = pair.loc[pair["verdict"] == "faster", "n_bytes"].min()
            afterwards = fitted.get((backend, world_size))
            rows.append(
                {
                    "backend": backend,
                    "world_size": world_size,
                    "first": first,
                    "then": second,
                    "predicted_bytes": predicted,
                    "fitted_bytes": afterwards and crossover_bytes(first, second, world_size, afterwards),
                    "wins_until_bytes": until,
                    "overtaken_from_bytes": start,
                    "prediction": _crossover_holds(predicted, until, start),
                }
            )
    names = ["backend", "world_size", "first", "then", "predicted_bytes", "fitted_bytes", "wins_until_bytes"]
    return pd.DataFrame(rows, columns=[*names, "overtaken_from_bytes", "prediction"])


def _crossover_holds(predicted: float | None, until: float, start: float) -> str:
    if pd.isna(start):  # the second is nowhere shown to win
        if pd.isna(until):
            return "open"
        return "holds" if predicted is None or predicted > until else "does not hold"
    if predicted is None:
        return "does not hold"
    if pd.isna(until):
        return "open" if predicted <= start else "does not hold"
    return "holds" if until <= predicted <= start else "does not hold"


def errors_and_memory(frame: pd.DataFrame) -> pd.DataFrame:
    """Largest error against the exact mean and largest extra memory of any rank, by algorithm and setting."""
    if frame.empty or "error" not in frame:
        return pd.DataFrame(columns=[*SETTING, "algorithm", "error", "extra_bytes", "scratch_bytes", "gate"])
    checked = frame[frame["sweep"].isin(["sizes", "ranks"])]
    worst = {"error": "max", "extra_bytes": "max", "scratch_bytes": "max", "gate": "max"}
    return checked.groupby([*SETTING, "algorithm"]).agg(worst).reset_index()


@cache
def published_by_size() -> pd.DataFrame:
    """`allreduce_gloo_nccl.csv` as (backend, world_size, n_bytes, seconds of the slowest rank)."""
    table = pd.read_csv(reference_directory() / "allreduce_gloo_nccl.csv")
    slowest = table.groupby(["backend", "world_size", "size_mb"])["seconds"].max().reset_index()
    return slowest.assign(n_bytes=slowest["size_mb"] * MIB)


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
