"""The handout's model of the waiting, s/(w*k) + k*o: predicted from single all-reduces, fitted to what was waited for.

s bytes of gradients, w bytes/s, k buckets, o seconds a call. All but the last bucket are taken to hide behind the
backward pass, and all buckets to be of one size.
"""

import pandas as pd

from labkit.costs.communication import AlphaBeta, MessageCost, best_buckets, bucket_overhead, fit_alpha_beta
from labkit.lab.rows import Measured
from labkit.studies.gradient_buckets import tables
from labkit.studies.gradient_buckets.tables import MACHINE, SETTING
from labkit.studies.gradient_buckets.worker import PROBE

PREDICTED, FITTED = "predicted", "fitted"
CURVE_POINTS = 12
PROBES = Measured(MACHINE, "n_bytes")

Models = dict[tuple[object, ...], AlphaBeta]


def probes(frame: pd.DataFrame) -> pd.DataFrame:
    """Median seconds of single all-reduces with interval, by machine and `n_bytes`."""
    return PROBES.medians(frame, sweep=PROBE).astype({"n_bytes": int})


def predicted(frame: pd.DataFrame) -> Models:
    """o and 1/w by machine, from single all-reduces timed before any step."""
    return {
        key: fit_alpha_beta([MessageCost(1, n) for n in some["n_bytes"]], some["seconds"].tolist())
        for key, some in probes(frame).groupby(list(MACHINE))
        if len(some) >= 2
    }


def fitted(frame: pd.DataFrame) -> Models:
    """o and 1/w by machine, from the waiting times of all batches, lengths and bucket sizes together."""
    models = {}
    for key, some in tables.by_bucket(frame, "waiting_s").groupby(list(MACHINE)):
        costs = [bucket_overhead(k, n) for k, n in zip(some["buckets"], some["gradient_bytes"], strict=True)]
        if len(set(costs)) >= 2 and (some["waiting_s"] > 0).all():
            models[key] = fit_alpha_beta(costs, some["waiting_s"].tolist())
    return models


def constants(frame: pd.DataFrame) -> pd.DataFrame:
    """o, w, the best number and size of buckets by each model; errors of the fit in percent."""
    waiting = tables.by_bucket(frame, "waiting_s")
    rows = []
    for kind, models in ((PREDICTED, predicted(frame)), (FITTED, fitted(frame))):
        for key, some in waiting.groupby(list(MACHINE)):
            if key not in models:
                continue
            model, n_bytes = models[key], float(some["gradient_bytes"].iloc[0])
            buckets = best_buckets(n_bytes, model)
            bandwidth = 1 / model.beta_s_per_byte if model.beta_s_per_byte else float("inf")
            fit = kind == FITTED
            errors = [100 * e if fit else float("nan") for e in (model.median_error, model.largest_error)]
            rows.append([*key, kind, model.alpha_s, bandwidth, buckets, n_bytes / buckets, n_bytes, *errors])
    columns = [*MACHINE, "model", "call_s", "bandwidth_bytes_per_s", "best_buckets", "best_bucket_bytes"]
    return pd.DataFrame(rows, columns=[*columns, "gradient_bytes", "median_error_percent", "largest_error_percent"])


def against_measured(frame: pd.DataFrame) -> pd.DataFrame:
    """Waiting by bucket size beside what both models say, and measured over predicted.

    `with_real_last_s`: the prediction with the bytes that the last bucket really has, in place of an equal share.
    """
    before, after, nothing = predicted(frame), fitted(frame), float("nan")
    rows = []
    for row in tables.by_bucket(frame, "waiting_s").to_dict("records"):
        key = tuple(row[name] for name in MACHINE)
        cost = bucket_overhead(row["buckets"], row["gradient_bytes"])
        real = MessageCost(row["buckets"], row["last_bucket_bytes"])
        rows.append(
            {name: row[name] for name in (*SETTING, "bucket_mb", "buckets", "last_bucket_bytes", "waiting_s")}
            | {"predicted_s": before[key].predict_s(cost) if key in before else nothing}
            | {"with_real_last_s": before[key].predict_s(real) if key in before else nothing}
            | {"fitted_s": after[key].predict_s(cost) if key in after else nothing}
        )
    columns = [*SETTING, "bucket_mb", "buckets", "last_bucket_bytes", "waiting_s"]
    table = pd.DataFrame(rows, columns=[*columns, "predicted_s", "with_real_last_s", "fitted_s"])
    return table.assign(measured_over_predicted=table["waiting_s"] / table["predicted_s"])


def waiting_by_buckets(frame: pd.DataFrame) -> pd.DataFrame:
    """Measured waiting with `buckets`, for the figure: `batch_x_sequence` names the line."""
    table = tables.by_bucket(frame, "waiting_s")
    curves = [f"{batch} x {sequence}" for batch, sequence in zip(table.batch, table.sequence, strict=True)]
    return table.assign(batch_x_sequence=curves, ranks=[f"{ranks} ranks" for ranks in table["world_size"]])


def curves(frame: pd.DataFrame) -> pd.DataFrame:
    """Both models over numbers of buckets from 1 to the most that was measured, in the columns of the figure."""
    most = tables.by_bucket(frame, "waiting_s").groupby(list(MACHINE))["buckets"].max()
    rows = []
    for row in constants(frame).to_dict("records"):
        model = AlphaBeta(row["call_s"], 1 / row["bandwidth_bytes_per_s"])
        for step in range(CURVE_POINTS):
            buckets = float(most[tuple(row[name] for name in MACHINE)]) ** (step / (CURVE_POINTS - 1))
            seconds = model.predict_s(bucket_overhead(buckets, row["gradient_bytes"]))
            rows.append([row["model"], f"{row['world_size']} ranks", buckets, seconds])
    return pd.DataFrame(rows, columns=["batch_x_sequence", "ranks", "buckets", "waiting_s"])
