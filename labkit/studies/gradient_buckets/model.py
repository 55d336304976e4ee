"""What communication should add to a step: by the calibrated all-reduce, and fitted to what it adds.

s bytes of gradients, w bytes/s, k buckets, o seconds a call. On a CPU the cores that carry the bytes are those that
compute, so that nothing hides: k*o + s/w, part of it waiting and part a slower backward pass. The handout's
s/(w*k) + k*o takes all but the last bucket to hide behind the backward pass, and all buckets to be of one size.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pandas as pd

from labkit.costs.calibration import ALL_REDUCE, CPU, Calibration
from labkit.costs.communication import AlphaBeta, MessageCost, best_buckets, bucket_overhead, fit_alpha_beta
from labkit.lab.predictions import Predicted, Row
from labkit.nn.workloads import workload_named
from labkit.parallel.data_parallel.overlapped import assign_to_buckets
from labkit.studies.gradient_buckets import tables
from labkit.studies.gradient_buckets.tables import MACHINE, SETTING
from labkit.studies.gradient_buckets.worker import BucketsPoint

NOTHING_HIDES, LAST_ALONE, FITTED = "nothing hides", "all but the last hide", "fitted"
MODELS = (NOTHING_HIDES, LAST_ALONE, FITTED)
CURVE_POINTS = 12

Models = dict[tuple[object, ...], AlphaBeta]


def all_reduce_cost(row: Row, calibration: Calibration | None) -> AlphaBeta | None:
    """o and 1/w of gloo's all-reduce on the CPU; None for others, which no calibration knows."""
    if calibration is None or (row["backend"], row["device"]) != ("gloo", CPU):
        return None
    found = calibration.transport("gloo", ALL_REDUCE, int(row["world_size"]))
    return AlphaBeta(found.call_s + found.alpha_s, found.beta_s_per_byte) if found else None


def _expected_s(row: Row, calibration: Calibration) -> float | None:
    model = all_reduce_cost(row, calibration)
    return _adds_s(NOTHING_HIDES, model, row["buckets"], row["gradient_bytes"]) if model else None


def _adds_s(kind: str, model: AlphaBeta, buckets: float, n_bytes: float) -> float:
    cost = MessageCost(buckets, n_bytes) if kind == NOTHING_HIDES else bucket_overhead(buckets, n_bytes)
    return model.predict_s(cost)


def _planned(point: BucketsPoint) -> Iterator[dict[str, Any]]:
    for bucket_mb in point.buckets_mb:
        if isinstance(bucket_mb, str):  # a reader's schedule
            continue
        sizes = bucket_bytes(point.workload, bucket_mb)
        layout = {"bucket_mb": bucket_mb, "buckets": len(sizes), "gradient_bytes": sum(sizes)}
        yield point.describe() | layout


@cache
def bucket_bytes(workload: str, bucket_mb: float) -> tuple[int, ...]:
    """Bytes of the buckets that a wrapper makes of a workload's gradients, which come from the last layer on."""
    model = workload_named(workload, batch=1, context_length=1, device="meta").build()
    gradients = list(model.parameters())[::-1]
    buckets = assign_to_buckets(gradients, bucket_mb, bucket_mb)
    return tuple(sum(gradients[i].nbytes for i in indices) for indices in buckets)


def _exposed(frame: pd.DataFrame) -> pd.DataFrame:
    return tables.by_bucket(frame, "exposed_s")


PREDICTED = Predicted(
    (*SETTING, "gradient_bytes", "buckets", "bucket_mb"),
    _expected_s,
    _planned,
    _exposed,
    value="exposed_s",
    names=("sequence", "buckets", "bucket_mb"),
    leaves_out="All-reduces count as they are alone: beside a backward pass they take longer, and so does it.",
)


def fitted(frame: pd.DataFrame) -> Models:
    """o and 1/w by machine, from what it adds with all batches, lengths and bucket sizes together."""
    models = {}
    for key, some in _exposed(frame).groupby(list(MACHINE)):
        costs = [bucket_overhead(k, n) for k, n in zip(some["buckets"], some["gradient_bytes"], strict=True)]
        if len(set(costs)) >= 2 and (some["exposed_s"] > 0).all():
            models[key] = fit_alpha_beta(costs, some["exposed_s"].tolist())
    return models


def constants(frame: pd.DataFrame, calibration: Calibration | None) -> pd.DataFrame:
    """o, w, the best number and size of buckets by each model; errors of the fit in percent."""
    after, rows = fitted(frame), []
    for key, some in _exposed(frame).groupby(list(MACHINE)):
        n_bytes = float(some["gradient_bytes"].iloc[0])
        calibrated = all_reduce_cost(some.iloc[0].to_dict(), calibration)
        for kind, model in zip(MODELS, (calibrated, calibrated, after.get(key)), strict=True):
            if model is None:
                continue
            buckets = 1.0 if kind == NOTHING_HIDES else best_buckets(n_bytes, model)
            bandwidth = 1 / model.beta_s_per_byte if model.beta_s_per_byte else float("inf")
            errors = (model.median_error, model.largest_error) if kind == FITTED else (float("nan"),) * 2
            percent = [100 * error for error in errors]
            rows.append([*key, kind, model.alpha_s, bandwidth, buckets, n_bytes / buckets, n_bytes, *percent])
    columns = [*MACHINE, "model", "call_s", "bandwidth_bytes_per_s", "best_buckets", "best_bucket_bytes"]
    return pd.DataFrame(rows, columns=[*columns, "gradient_bytes", "median_error_percent", "largest_error_percent"])


def against_measured(frame: pd.DataFrame, calibration: Calibration | None) -> pd.DataFrame:
    """What communication adds by bucket size, what it should if nothing hides, and measured over predicted.

    `last_alone_s`: by the handout, where all but the last bucket hide.
    """
    table = PREDICTED.beside(frame, calibration)
    hidden = [
        _adds_s(LAST_ALONE, model, row["buckets"], row["gradient_bytes"])
        for row in table.to_dict("records")
        if (model := all_reduce_cost(row, calibration))
    ]
    table = table.assign(last_alone_s=pd.Series(hidden, dtype=float))
    columns = ["bucket_mb", "buckets", "exposed_s", "predicted_s", "last_alone_s", "measured_over_predicted"]
    return table[[*SETTING, *columns]]


def exposed_by_buckets(frame: pd.DataFrame) -> pd.DataFrame:
    """What communication adds with `buckets`, for the figure: `batch_x_sequence` names the line."""
    table = _exposed(frame)
    curves = [f"{batch} x {sequence}" for batch, sequence in zip(table.batch, table.sequence, strict=True)]
    return table.assign(batch_x_sequence=curves, on=[_on(row) for row in table.to_dict("records")])


def _on(row: Row) -> str:
    """The panel of a figure."""
    return f"{row['workload']}, {row['world_size']} ranks"


def curves(frame: pd.DataFrame, calibration: Calibration | None) -> pd.DataFrame:
    """All models over numbers of buckets from 1 to the most that was measured, in the columns of the figure."""
    most = _exposed(frame).groupby(list(MACHINE))["buckets"].max()
    rows = []
    for row in constants(frame, calibration).to_dict("records"):
        model = AlphaBeta(row["call_s"], 1 / row["bandwidth_bytes_per_s"])
        for step in range(CURVE_POINTS):
            buckets = float(most[tuple(row[name] for name in MACHINE)]) ** (step / (CURVE_POINTS - 1))
            seconds = _adds_s(row["model"], model, buckets, row["gradient_bytes"])
            rows.append([row["model"], _on(row), buckets, seconds])
    return pd.DataFrame(rows, columns=["batch_x_sequence", "on", "buckets", "exposed_s"])
