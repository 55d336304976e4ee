"""Frames for `notebooks/12_scaling.ipynb`: errors on held-out runs, trainings, break-evens."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from labkit.scaling import DATA, communication, step_time
from labkit.scaling.advice import sums_s
from labkit.scaling.hardware import find_hardware
from labkit.scaling.models import Numbers, find_model
from labkit.scaling.prediction import predict_runs
from labkit.scaling.published import is_timed, load_published
from labkit.scaling.runs import Runs
from labkit.scaling.search import Request, rank

PARTS = {
    "data": "data_parallel_s",
    "sharding": "gather_s",
    "tensor": "tensor_parallel_s",
    "context": "context_parallel_s",
    "pipeline": "bubble_s",
}
"""Kind of parallelism -> the part of a step that it costs."""


def held_out() -> pd.DataFrame:
    """Return every timed published run that a fold leaves out, with its prediction."""
    return judge(pd.read_csv(DATA / "cross_validated.csv"))


def judge(rows: pd.DataFrame) -> pd.DataFrame:
    """Add errors in percent, and whether the 90% interval holds the measured time.

    The rows are of `cross_validated.csv`.

    `distance` is from measured runs; `high_over_low` is the interval's width; `situation` is what a
    fold's fit knows of a run: its framework, only other frameworks, or no run on its GPU.
    """
    ratio = rows["predicted_s"] / rows["measured_s"]
    return rows.assign(
        predicted_over_measured=ratio,
        error_percent=100 * (ratio - 1).abs(),
        is_covered=rows["measured_s"].between(rows["low_s"], rows["high_s"]),
        high_over_low=rows["high_s"] / rows["low_s"],
    )


def summarize(rows: pd.DataFrame, *by: str) -> pd.DataFrame:
    """Count judged rows by these columns.

    With median error and coverage in percent, mean and median width, and median distance.
    """
    return rows.groupby(list(by), sort=False).agg(
        rows=("error_percent", "size"),
        median_error=("error_percent", "median"),
        error_of_nine_in_ten=("error_percent", lambda errors: errors.quantile(0.9)),
        covered=("is_covered", lambda covered: 100 * covered.mean()),
        mean_width=("high_over_low", "mean"),
        median_width=("high_over_low", "median"),
        distance=("distance", "median"),
    )


def chosen_layouts() -> pd.DataFrame:
    """Return how far proposed layouts are behind the best measured one, by table.

    Mean percent over families.
    """
    return pd.read_csv(DATA / "chosen_layouts.csv")


def training(
    model: str, gpu: str, gpus: Sequence[int], *, sequence: int = 8192, tokens_per_step: int = 2**24
) -> pd.DataFrame:
    """Return GPU-hours per billion tokens by part, on the best layout per number of GPUs.

    Parts add up to the step.
    """
    rows = []
    for count in gpus:
        batch = max(tokens_per_step // sequence, 1)
        request = Request(find_model(model), find_hardware(gpu), count, sequence, batch)
        best = rank(request).first()
        hours = count / 3600 * 1e9 / request.tokens
        rows += [
            {"gpus": count, "part": part, "gpu_hours": hours * value}
            for part, value in sums_s(best).items()
        ]
    return pd.DataFrame(rows)


def exposed_by_ratio() -> pd.DataFrame:
    """Return the exposed share of a published step against compute over communication.

    In percent, by kind of parallelism.
    """
    published = load_published()
    predictions = predict_runs(published)
    ratios = compute_comm_ratio(published)
    tables = []
    for kind, part in PARTS.items():
        rows = np.flatnonzero(is_timed(published) & np.isfinite(ratios[kind]))
        exposed = 100 * predictions.parts_s[part][rows] / predictions.step_s[rows]
        tables.append(
            pd.DataFrame({"kind": kind, "ratio": ratios[kind][rows], "exposed_percent": exposed})
        )
    return pd.concat(tables, ignore_index=True)


def compute_comm_ratio(runs: Runs) -> dict[str, Numbers]:
    """Return compute over communication (pipeline: busy over idle) by kind, (n,).

    nan in runs that do not use the kind.

    Seconds of a layer by the formulas of a step, forward and backward without recomputation, before
    anything overlaps. Below 1 a step is mostly communication. The context ring is compared with
    attention, behind which it travels.
    """
    once = np.ones(len(runs))
    replicas = runs.dp * runs.cp
    matmuls = step_time.matmuls_s(runs, once)
    ranks = communication.Group(runs, replicas, runs.tp)
    n_bytes = runs["gradient_bytes"] * runs.layer_parameters / runs.tp
    gathers = np.isin(runs.shard, ("zero3", "hsdp"))
    kinds = {
        "data": (
            runs.micro_batches * matmuls,
            ranks.all_reduce_s(n_bytes),
            (replicas > 1) & ~gathers,
        ),
        "sharding": (
            matmuls,
            communication.parameter_gather_s(runs),
            (runs.shard_ranks > 1) & gathers,
        ),
        "tensor": (matmuls, communication.tensor_parallel_s(runs, once), runs.tp > 1),
        "context": (
            step_time.attention_s(runs, once),
            communication.context_ring_s(runs),
            runs.cp > 1,
        ),
        "pipeline": (runs.micro_batches * runs.vp, runs.pp - 1, runs.pp > 1),
    }
    return {
        name: np.divide(compute, communication, out=np.full(len(runs), np.nan), where=is_used)
        for name, (compute, communication, is_used) in kinds.items()
    }
