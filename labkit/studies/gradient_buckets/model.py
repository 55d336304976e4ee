"""The handout's model of the waiting, s/(w*k) + k*o: predicted from single all-reduces, fitted to what was waited for.

s bytes of gradients, w bytes/s, k buckets, o seconds a call. All but the last bucket are taken to hide behind the
backward pass, and all buckets to be of one size.
"""

from collections.abc import Mapping
from math import isfinite
from typing import Any

import pandas as pd

from labkit.bench.statistics import slowest_rank, summarize_groups
from labkit.costs.communication import AlphaBeta, MessageCost, best_buckets, bucket_overhead, fit_alpha_beta
from labkit.lab.units import format_bytes, format_rate, format_seconds
from labkit.studies.gradient_buckets import analysis
from labkit.studies.gradient_buckets.analysis import MACHINE, SETTING
from labkit.studies.gradient_buckets.worker import PROBE

PREDICTED, FITTED = "predicted", "fitted"
CURVE_POINTS = 12

Models = dict[tuple[object, ...], AlphaBeta]


def probes(frame: pd.DataFrame) -> pd.DataFrame:
    """Median seconds of single all-reduces with interval, by machine and `n_bytes`."""
    if frame.empty or "n_bytes" not in frame or "seconds" not in frame:
        return pd.DataFrame(columns=[*MACHINE, "n_bytes", "seconds", "low", "high"])
    rows = frame[frame["sweep"] == PROBE].dropna(subset="seconds")
    table = summarize_groups(slowest_rank(rows, "seconds", [*MACHINE, "n_bytes"]), "seconds", [*MACHINE, "n_bytes"])
    return table.rename(columns={"median": "seconds"}).astype({"n_bytes": int})


def predicted(frame: pd.DataFrame) -> Models:
    """o and 1/w by machine, from single all-reduces timed before any step."""
    return {
        key: fit_alpha_beta([MessageCost(1, n) for n in some["n_bytes"]], some["seconds"].tolist())
        for key, some in probes(frame).groupby(MACHINE)
        if len(some) >= 2
    }


def fitted(frame: pd.DataFrame) -> Models:
    """o and 1/w by machine, from the waiting times of all batches, lengths and bucket sizes together."""
    models = {}
    for key, some in analysis.by_bucket(frame, "waiting_s").groupby(MACHINE):
        costs = [bucket_overhead(k, n) for k, n in zip(some["buckets"], some["gradient_bytes"], strict=True)]
        if len(set(costs)) >= 2 and (some["waiting_s"] > 0).all():
            models[key] = fit_alpha_beta(costs, some["waiting_s"].tolist())
    return models


def constants(frame: pd.DataFrame) -> pd.DataFrame:
    """o, w, the best number and size of buckets by each model; errors of the fit in percent."""
    waiting = analysis.by_bucket(frame, "waiting_s")
    rows = []
    for kind, models in ((PREDICTED, predicted(frame)), (FITTED, fitted(frame))):
        for key, some in waiting.groupby(MACHINE):
            if key not in models:
                continue
            model, n_bytes = models[key], float(some["gradient_bytes"].iloc[0])
            buckets = best_buckets(n_bytes, model)
            bandwidth = 1 / model.beta_s_per_byte if model.beta_s_per_byte else float("inf")
            rows.append(
                dict(zip(MACHINE, key, strict=True))
                | {"model": kind, "call_s": model.alpha_s, "bandwidth_bytes_per_s": bandwidth}
                | {"best_buckets": buckets, "best_bucket_bytes": n_bytes / buckets, "gradient_bytes": n_bytes}
                | _errors(model if kind == FITTED else None)
            )
    columns = [*MACHINE, "model", "call_s", "bandwidth_bytes_per_s", "best_buckets", "best_bucket_bytes"]
    return pd.DataFrame(rows, columns=[*columns, "gradient_bytes", "median_error_percent", "largest_error_percent"])


def costs_and_best(row: Mapping[str, Any]) -> tuple[str, str]:
    """In words, from a row of `constants`: o and w, and the best buckets. Without one of the two there is none."""
    bandwidth, call = format_rate(row["bandwidth_bytes_per_s"]), format_seconds(row["call_s"])
    calls_cost, bytes_cost = row["call_s"] > 0, isfinite(row["bandwidth_bytes_per_s"])
    if calls_cost and bytes_cost:
        best = f"{row['best_buckets']:.1f} buckets of {format_bytes(row['best_bucket_bytes'])}"
        return f"o = {call} and w = {bandwidth}", best
    if bytes_cost:
        return f"calls cost nothing and w = {bandwidth}", "as many buckets as there can be"
    if calls_cost:
        return f"o = {call} and bytes cost nothing", "a single bucket"
    return "neither calls nor bytes cost anything", "any number of buckets"


def _errors(model: AlphaBeta | None) -> dict[str, float]:
    nothing = float("nan")
    return {
        "median_error_percent": 100 * model.median_error if model else nothing,
        "largest_error_percent": 100 * model.largest_error if model else nothing,
    }


def against_measured(frame: pd.DataFrame) -> pd.DataFrame:
    """Waiting by bucket size beside what both models say, and measured over predicted.

    `with_real_last_s`: the prediction with the bytes that the last bucket really has, in place of an equal share.
    """
    before, after = predicted(frame), fitted(frame)
    rows = []
    for row in analysis.by_bucket(frame, "waiting_s").to_dict("records"):
        key = tuple(row[name] for name in MACHINE)
        cost = bucket_overhead(row["buckets"], row["gradient_bytes"])
        real = MessageCost(row["buckets"], row["last_bucket_bytes"])
        nothing = float("nan")
        rows.append(
            {name: row[name] for name in (*SETTING, "bucket_mb", "bucket_bytes", "buckets", "last_bucket_bytes")}
            | {"waiting_s": row["waiting_s"]}
            | {"predicted_s": before[key].predict_s(cost) if key in before else nothing}
            | {"with_real_last_s": before[key].predict_s(real) if key in before else nothing}
            | {"fitted_s": after[key].predict_s(cost) if key in after else nothing}
        )
    columns = [*SETTING, "bucket_mb", "bucket_bytes", "buckets", "last_bucket_bytes", "waiting_s"]
    table = pd.DataFrame(rows, columns=[*columns, "predicted_s", "with_real_last_s", "fitted_s"])
    return table.assign(measured_over_predicted=table["waiting_s"] / table["predicted_s"])


def waiting_by_buckets(frame: pd.DataFrame) -> pd.DataFrame:
    """Measured waiting with `buckets`, for the figure: `batch_x_sequence` names the line."""
    table = analysis.by_bucket(frame, "waiting_s")
    curves = [f"{batch} x {sequence}" for batch, sequence in zip(table.batch, table.sequence, strict=True)]
    return table.assign(batch_x_sequence=curves, ranks=[f"{ranks} ranks" for ranks in table["world_size"]])


def curves(frame: pd.DataFrame) -> pd.DataFrame:
    """Both models over numbers of buckets from 1 to the most that was measured, in the columns of the figure."""
    most = analysis.by_bucket(frame, "waiting_s").groupby(MACHINE)["buckets"].max()
    rows = []
    for row in constants(frame).to_dict("records"):
        key = tuple(row[name] for name in MACHINE)
        model = AlphaBeta(row["call_s"], 1 / row["bandwidth_bytes_per_s"])
        for step in range(CURVE_POINTS):
            buckets = float(most[key]) ** (step / (CURVE_POINTS - 1))
            seconds = model.predict_s(bucket_overhead(buckets, row["gradient_bytes"]))
            rows.append(
                {"batch_x_sequence": row["model"], "ranks": f"{row['world_size']} ranks", "buckets": buckets}
                | {"waiting_s": seconds}
            )
    return pd.DataFrame(rows, columns=["batch_x_sequence", "ranks", "buckets", "waiting_s"])
