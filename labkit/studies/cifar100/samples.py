"""From the rows of a CIFAR-100 run to one sample a training and epoch: how good it is, and what it takes.

A training with a loss that is not finite has diverged. An epoch is over when its slowest rank is.
"""

import numpy as np
import pandas as pd

from labkit.bench.statistics import slowest_rank
from labkit.lab.rows import select
from labkit.studies.cifar100.training import IMPLEMENTATIONS
from labkit.studies.cifar100.worker import EPOCH

METRICS = {"accuracy": "accuracy_percent", "validation loss": "validation_loss", "training loss": "train_loss"}
RECIPE = ["world_size", "batch", "accumulation", "epochs", "learning_rate", "momentum"]
SETTING = ["dataset", "source", "md5", "backend", "device", *RECIPE]


def of_phase(frame: pd.DataFrame, phase: str, *columns: str) -> pd.DataFrame:
    """Rows of one kind that passed their gate and have a value in `columns`."""
    rows = select(frame, ["implementation", "seed", "epoch", "rank", *columns], phase=phase, check="ok")
    return rows.dropna(subset=list(columns))


def in_order(table: pd.DataFrame) -> pd.DataFrame:
    return table.sort_values("implementation", key=lambda names: names.map(IMPLEMENTATIONS.index), kind="stable")


def setting(frame: pd.DataFrame) -> pd.Series | None:
    """What was trained on and how, from a run's rows: all its points share it. None without an epoch."""
    rows = of_phase(frame, EPOCH, "trained")
    if rows.empty:
        return None
    return rows.iloc[0][[*SETTING, "classes", "trained", "validated", "micro_batches"]]


def metrics(frame: pd.DataFrame) -> pd.DataFrame:
    """By (implementation, seed, epoch): `train_loss`, `validation_loss`, `accuracy_percent`, as rank 0 tells."""
    rows = of_phase(frame, EPOCH, "accuracy")
    rows = rows.assign(accuracy_percent=100 * rows["accuracy"])
    rows = rows.reindex(columns=["implementation", "seed", "epoch", *METRICS.values()])
    return in_order(rows)


def is_finite(table: pd.DataFrame) -> pd.Series:
    """Of rows of `metrics`: whether every loss is a number."""
    return np.isfinite(table[list(METRICS.values())].astype(float)).all(axis=1)


def diverged(frame: pd.DataFrame) -> pd.DataFrame:
    """`diverged` by (implementation, seed): whether a loss of any epoch is not finite."""
    table = metrics(frame)
    bad = table.assign(diverged=~is_finite(table).astype(bool))
    return in_order(bad.groupby(["implementation", "seed"], as_index=False)["diverged"].any())


def last_epoch(frame: pd.DataFrame) -> pd.DataFrame:
    """Metrics of the last epoch that all seeds have, by (implementation, seed), of those that have not diverged."""
    table = metrics(frame)
    table = table[table["epoch"] == _last_epoch(table)].merge(diverged(frame), on=["implementation", "seed"])
    return table[~table["diverged"].astype(bool)].drop(columns="diverged")


def _last_epoch(table: pd.DataFrame) -> float:
    """The last epoch that every training of `metrics` has; NaN without any."""
    return float(table.groupby(["implementation", "seed"])["epoch"].max().min())


def times(frame: pd.DataFrame) -> pd.DataFrame:
    """`epoch_s` of the slowest rank by (implementation, seed, epoch), without those of warm-up.

    A training that has no others keeps them: it would have no time at all.
    """
    rows = of_phase(frame, EPOCH, "epoch_s")
    if rows.empty:
        return pd.DataFrame(columns=["implementation", "seed", "epoch", "epoch_s"])
    warm_up = _is_warm_up(rows)
    has_no_other = warm_up.groupby([rows["implementation"], rows["seed"]]).transform("all")
    table = slowest_rank(rows[~warm_up | has_no_other], "epoch_s", ["implementation", "seed", "epoch"])
    return in_order(table.drop(columns="repeat").sort_values(["seed", "epoch"]))


def _is_warm_up(rows: pd.DataFrame) -> pd.Series:
    """Whether an epoch was the first of its training in its process: the first of all, or the first after a resume.

    Of rows from before that was recorded only epoch 1 is known to be one.
    """
    first = rows["epoch"] == 1
    return rows["warm_up"].where(rows["warm_up"].notna(), first).astype(bool) if "warm_up" in rows else first


def paired(samples: pd.DataFrame, name: str, other: str) -> pd.DataFrame:
    """Seconds of the epochs that both took, side by side, by (seed, epoch)."""
    table = samples.pivot_table(index=["seed", "epoch"], columns="implementation", values="epoch_s")
    return table.reindex(columns=[name, other]).dropna()
