"""From the frame of a scaling run to its tables: errors by published table, where time goes, margins, choices."""

from collections.abc import Callable

import numpy as np
import pandas as pd

from labkit.lab.as_predicted import CLOSE
from labkit.lab.columns import INTERVAL
from labkit.lab.rows import in_order, select
from labkit.scaling.scoring import ON_OTHER_ROWS, OTHERS

GROUPS = ("nanotron", "vtrain_multinode", "vtrain_singlenode", "mosaic", "dgxc", "megatron", "torchtitan", "fms")
TWOFOLD = 2.0
UNKNOWN, RATIO = "not known", "compute_over_communication"
COMPUTE, COMMUNICATION, WAITING = "compute", "communication", "waiting"
STEP, OTHER = "step", "all others"
LEAST_SHARE = 0.005  # of a step: below it on all numbers of GPUs, parts are drawn as one
PARTS = {
    "gemm_s": ("matrix products", COMPUTE),
    "attention_s": ("attention", COMPUTE),
    "elementwise_s": ("norms, activations", COMPUTE),
    "head_s": ("output and loss", COMPUTE),
    "optimizer_s": ("optimizer", COMPUTE),
    "tensor_parallel_s": ("tensor parallelism", COMMUNICATION),
    "context_parallel_s": ("context parallelism", COMMUNICATION),
    "gather_s": ("gathering parameters", COMMUNICATION),
    "pipeline_transfer_s": ("pipeline transfers", COMMUNICATION),
    "data_parallel_s": ("gradient reduction", COMMUNICATION),
    "launch_s": ("CPU launches", WAITING),
    "engine_s": ("pipeline engine", WAITING),
    "bubble_s": ("pipeline bubble", WAITING),
    "straggler_s": ("slowest node", WAITING),
}
"""What the parts of a step are called, and of which kind each is; collectives are what of them is exposed."""
PART_ORDER = [*(title for title, _ in PARTS.values()), OTHER]


SECONDS = "measured step (s)"  # plain numbers along an axis: from 60 ms to 5 minutes, units would crowd it
PREDICTORS = ("predicted", "one_constant", "framework_left_out")
PUBLISHED = (
    *("group", "line", "of_model", "of_gpu", "of_gpus", "arrangement", "unstable", "old_pipeline"),
    *("measured_s", "predicted_s", "low", "high", "one_constant_s", "framework_left_out_s"),
)


def errors(frame: pd.DataFrame) -> pd.DataFrame:
    """Every published row, with the error of each prediction of it in percent, and whether its interval holds it."""
    table = select(frame, PUBLISHED, sweep="published").dropna(subset="measured_s")
    ratios = {name: table[f"{name}_s"].astype(float) / table["measured_s"].astype(float) for name in PREDICTORS}
    return table.assign(
        predicted_over_measured=ratios["predicted"],
        **{SECONDS: table["measured_s"]},
        **{f"{name}_error": 100 * (ratio - 1).abs() for name, ratio in ratios.items()},
        covered=(table["low"] <= table["measured_s"]) & (table["measured_s"] <= table["high"]),
    )


def scoreboard(frame: pd.DataFrame) -> pd.DataFrame:
    """By published table: rows, errors in percent of a step, those of one constant, and how many intervals hold."""
    table = (
        errors(frame)
        .groupby("group")
        .agg(
            rows=("line", "size"),
            median_percent=("predicted_error", "median"),
            mean_percent=("predicted_error", "mean"),
            ninety_percent=("predicted_error", _ninety),
            one_constant_median_percent=("one_constant_error", "median"),
            one_constant_ninety_percent=("one_constant_error", _ninety),
            framework_left_out_median_percent=("framework_left_out_error", "median"),
            covered_percent=("covered", lambda covered: 100 * covered.mean()),
        )
    )
    return in_order(table.reset_index(), group=GROUPS)


def _ninety(errors: pd.Series) -> float:
    return errors.quantile(0.9)


def predictors(frame: pd.DataFrame) -> pd.DataFrame:
    """Published predictors: the mean error they claim or were run at, beside this one's on the rows of that group."""
    means = errors(frame).groupby("group")["predicted_error"].mean()
    rows = [
        (name, of, name not in ON_OTHER_ROWS, mean, means.get(of), note) for name, (of, mean, note) in OTHERS.items()
    ]
    columns = ["predictor", "rows_of", "same_rows", "mean_percent", "here_mean_percent", "note"]
    return pd.DataFrame(rows, columns=columns).dropna(subset="here_mean_percent")


def distribution(frame: pd.DataFrame) -> pd.DataFrame:
    """By predictor, over all rows: the share of them within an error, at some twenty errors."""
    table = errors(frame)
    names = {"predicted": "model never seen", "framework_left_out": "framework never seen", "one_constant": "one MFU"}
    within = np.array([1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 150, 200])
    rows = [
        {"predictor": title, "error_percent": limit, "rows_percent": 100 * (table[f"{name}_error"] <= limit).mean()}
        for name, title in names.items()
        for limit in within
        if len(table)
    ]
    return pd.DataFrame(rows, columns=["predictor", "error_percent", "rows_percent"])


OTHER_PIPELINE = "other_pipeline_s"


def is_other_pipeline(rows: pd.DataFrame) -> "pd.Series[bool]":
    """Whether nanotron took as long as its other pipeline engine, before the fix or after it, would have."""
    if OTHER_PIPELINE not in rows:  # runs of older versions
        return pd.Series(False, index=rows.index)
    ratio = rows[OTHER_PIPELINE].astype(float) / rows["measured_s"].astype(float)
    return ratio.between(1 / CLOSE, CLOSE)


_Test = Callable[[pd.DataFrame], "pd.Series[bool]"]
TROUBLES: dict[str, _Test] = {
    "marked as before nanotron's fix of its pipeline, but as fast as after it": lambda rows: (
        rows["old_pipeline"].astype(bool) & is_other_pipeline(rows)
    ),
    "as slow as nanotron's pipeline before its fix, but not marked so": lambda rows: (
        (rows["group"] == "nanotron")
        & ~rows["old_pipeline"].astype(bool)
        & ~rows["arrangement"].str.contains(" pp 1 ")
        & is_other_pipeline(rows)
    ),
    "so near the memory's limit that steps are several times slow": lambda rows: (
        rows["unstable"].astype(bool) & (rows["predicted_over_measured"] < 1)
    ),
    "512 GPUs without a pipeline: nanotron's are often several times slow": lambda rows: (
        (rows["group"] == "nanotron")
        & (rows["of_gpus"] >= 512)
        & rows["arrangement"].str.contains(" pp 1 ")
        & (rows["predicted_over_measured"] < 1)
    ),
}
"""Why rows are off, as far as it is known; the first that applies is told."""


def worst(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows that are more than twice off, the worst first, and why, as far as it is known."""
    table = errors(frame)
    ratio = table["predicted_over_measured"]
    far = table.assign(times_off=np.maximum(ratio, 1 / ratio)).query("times_off > @TWOFOLD")
    why = pd.Series(UNKNOWN, index=far.index)
    for reason, test in reversed(TROUBLES.items()):
        why = why.mask(test(far), reason)
    return far.assign(why=why).sort_values("times_off", ascending=False, ignore_index=True)


def trainings(frame: pd.DataFrame) -> pd.DataFrame:
    """Each training on each number of GPUs: its layout, step, MFU and GPU-hours per billion tokens with interval."""
    columns = ["model", "gpus", "layout", "step_s", "mfu_percent", "peak_gib", "gpu_hours", "low", "high"]
    rows = select(frame, columns, sweep="training", part=STEP).dropna(subset="gpu_hours")
    return _of_90_percent(rows[columns].astype({"gpus": int}))


def _of_90_percent(table: pd.DataFrame) -> pd.DataFrame:
    """The predictor's intervals are."""
    table.attrs[INTERVAL] = "90 %"
    return table


def waterfalls(frame: pd.DataFrame) -> pd.DataFrame:
    """GPU-hours by part of the step; parts that are nowhere worth mentioning are one."""
    columns = ["model", "gpus", "part", "gpu_hours"]
    rows = select(frame, columns, sweep="training").dropna(subset="gpu_hours")[columns].astype({"gpus": int})
    if rows.empty:
        return rows.assign(kind=[])
    whole = rows[rows["part"] == STEP].set_index(["model", "gpus"])["gpu_hours"]
    share = rows["gpu_hours"] / whole.loc[pd.MultiIndex.from_frame(rows[["model", "gpus"]])].to_numpy()
    small = share.groupby(rows["part"]).transform("max") < LEAST_SHARE
    names = {name: title for name, (title, _) in PARTS.items()} | {STEP: STEP}
    kinds = {name: kind for name, (_, kind) in PARTS.items()}
    rows = rows.assign(
        kind=rows["part"].map(kinds).mask(small, WAITING), part=rows["part"].map(names).mask(small, OTHER)
    )
    keys = ["model", "gpus", "part"]
    summed = rows.groupby(keys, sort=False)["gpu_hours"].sum().reset_index()
    table = summed.merge(rows.drop_duplicates(keys)[[*keys, "kind"]], on=keys).query("gpu_hours > 0")
    return table.sort_values("gpus", kind="stable", ignore_index=True)


def shares(frame: pd.DataFrame) -> pd.DataFrame:
    """By training and number of GPUs: percent of a step that is compute, communication and waiting."""
    table = waterfalls(frame)
    whole = table[table["part"] == STEP][["model", "gpus", "gpu_hours"]].rename(columns={"gpu_hours": "whole"})
    kinds = table[table["part"] != STEP].groupby(["model", "gpus", "kind"], as_index=False)["gpu_hours"].sum()
    kinds = kinds.merge(whole)
    return kinds.assign(share_percent=100 * kinds["gpu_hours"] / kinds["whole"])[
        ["model", "gpus", "kind", "share_percent"]
    ]


def margins(frame: pd.DataFrame) -> pd.DataFrame:
    """By kind of parallelism and compute over communication, in powers of two: the exposed share of a step."""
    rows = select(frame, ["kind", "margin", "exposed_percent"], sweep="margins").dropna(subset="margin")
    if rows.empty:
        return pd.DataFrame(columns=["kind", RATIO, "exposed_percent", "low", "high", "rows"])
    power = 2.0 ** np.floor(np.log2(rows["margin"].astype(float))).clip(-2, 6)
    grouped = rows.assign(**{RATIO: power}).groupby(["kind", RATIO])["exposed_percent"]
    table = grouped.quantile([0.05, 0.5, 0.95]).unstack()
    table.columns = pd.Index(["low", "exposed_percent", "high"])
    table = table[["exposed_percent", "low", "high"]].assign(rows=grouped.size())
    return _of_90_percent(table.reset_index())


CHOICES = ["first_behind_percent", "best_of_three_behind_percent", "simple_behind_percent"]


def choices(frame: pd.DataFrame) -> pd.DataFrame:
    """By published table: families, and how far behind the best measured the choice is, in the mean, in percent."""
    rows = select(frame, ["group", "family", *CHOICES], sweep="families").dropna(subset="family")
    if rows.empty:
        return pd.DataFrame(columns=["group", "families", *CHOICES])
    rows = rows.astype(dict.fromkeys(CHOICES, float))
    table = rows.groupby("group")[CHOICES].mean().assign(families=rows.groupby("group").size())
    return in_order(table.reset_index()[["group", "families", *CHOICES]], group=GROUPS)


def behind(frame: pd.DataFrame) -> pd.DataFrame:
    """`choices` with a row per choice, as a figure draws it."""
    names = dict(zip(CHOICES, ("its first", "best of its three", "smallest that fits"), strict=True))
    table = choices(frame).melt("group", CHOICES, "choice", "behind_percent")
    return table.assign(choice=table["choice"].map(names))


def students(frame: pd.DataFrame) -> pd.DataFrame:
    """Steps on two to four GPUs: measured, predicted, and one over the other."""
    columns = ["author", "setting", "variant", "bucket_mb", "measured_s", "predicted_s", "low", "high"]
    return _of_90_percent(_against(select(frame, columns, sweep="students")[columns]))


def here(frame: pd.DataFrame) -> pd.DataFrame:
    """Steps of this machine's ranks: measured, predicted, and one over the other."""
    columns = ["lab", "workload", "world_size", "implementation", "measured_s", "predicted_s"]
    return _against(select(frame, columns, sweep="here")[columns])


def _against(table: pd.DataFrame) -> pd.DataFrame:
    table = table.dropna(subset="measured_s").astype({"measured_s": float, "predicted_s": float})
    return table.assign(measured_over_predicted=table["measured_s"] / table["predicted_s"])


def trends(frame: pd.DataFrame) -> pd.DataFrame:
    """MFU by number of GPUs, published and predicted."""
    columns = ["trend", "gpus", "published_percent", "mfu_percent", "low", "high"]
    rows = select(frame, columns, sweep="trends").dropna(subset="trend")
    return _of_90_percent(rows[columns].astype({"gpus": int}))
