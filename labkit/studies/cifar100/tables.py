"""From the samples of a CIFAR-100 run to the tables its findings and figures are made of.

Implementations are compared seed by seed: with one seed they begin with the same weights and see the same images in
the same order under the same dropout masks. Intervals are of the median over seeds; an epoch is over when its slowest
rank is. A training with a loss that is not finite has diverged: it is counted, and its numbers are in no median.
"""

from dataclasses import asdict
from functools import cache
from math import comb
from typing import Any

import numpy as np
import pandas as pd

from labkit.bench.statistics import (
    CONFIDENCE,
    beyond_p,
    compare,
    is_significant,
    summarize,
    summarize_groups,
    with_verdicts,
)
from labkit.costs.calibration import Calibration
from labkit.lab.project import reference_directory
from labkit.lab.rows import exactly_over
from labkit.nn.datasets import CIFAR100_MD5
from labkit.studies.cifar100.samples import (
    METRICS,
    RECIPE,
    diverged,
    in_order,
    is_finite,
    last_epoch,
    metrics,
    of_phase,
    paired,
    setting,
    times,
)
from labkit.studies.cifar100.training import IMPLEMENTATIONS as IMPLEMENTATIONS  # the order in figures
from labkit.studies.cifar100.training import OWN_LOCAL, OWN_SYNC, TORCH_LOCAL, TORCH_SYNC
from labkit.studies.cifar100.worker import EPOCH, MEMORY
from labkit.studies.shared.norm_collectives import collectives_s

Pairs = tuple[tuple[str, str], ...]
# The same arithmetic by labkit's parts and by torch's; and what synchronizing changes in one of them.
SAME: Pairs = ((OWN_SYNC, TORCH_SYNC), (OWN_LOCAL, TORCH_LOCAL))
SYNC: Pairs = ((OWN_SYNC, OWN_LOCAL), (TORCH_SYNC, TORCH_LOCAL))
# Smaller differences at the end of training are taken for none: points of accuracy, percent of a loss.
MARGINS = {"accuracy": 1.0, "validation loss": 3.0, "training loss": 3.0}
UNITS = {"accuracy": "points", "validation loss": "%", "training loss": "%"}
PUBLISHED_EPOCHS = 16
PUBLISHED_NAMES = {"selfmade": OWN_SYNC, "torch": TORCH_SYNC}
PUBLISHED_RECIPE = (2, 64, 4, 16, 0.01, 0.5)  # in that order
PUBLISHED_IMAGES = 50_000

NORMALIZED = 128  # features of the net's one batch norm
DIFFERENCES = ["both_with", "implementation", "than", "metric", "difference", "low", "high", "unit", "margin", "seeds"]
DIFFERENCES += ["verdict", "than_value"]
DIVERGENCES = ["implementation", "than", "seeds", "diverged", "than_diverged", "verdict"]
RATIOS = ["both_with", "implementation", "ratio", "low", "high", "p", "verdict"]
SYNCHRONIZING = ["implementation", "extra_s", "low", "high", "predicted_s", "measured_over_predicted"]


def is_published_training(frame: pd.DataFrame) -> bool:
    """Whether all images of the official archive were trained on, by the published recipe, to its last epoch."""
    about, last = setting(frame), last_epoch(frame)["epoch"]
    if about is None or about["md5"] != CIFAR100_MD5 or tuple(about[RECIPE]) != PUBLISHED_RECIPE:
        return False
    is_whole = "train_images" not in frame or not (frame["train_images"] < PUBLISHED_IMAGES).any()
    return is_whole and bool((last == PUBLISHED_EPOCHS).all())


def images(frame: pd.DataFrame) -> pd.DataFrame:
    """One row: what the images are, how many and of how many classes, and the size of an update."""
    found = setting(frame)
    if found is None:
        return pd.DataFrame()
    columns = {"classes": "classes", "trained": "trained on", "validated": "validated on", "world_size": "ranks"}
    columns |= {"batch": "micro-batch", "accumulation": "accumulation"}
    row = {heading: int(found[name]) for name, heading in columns.items()}
    update = row["ranks"] * row["micro-batch"] * row["accumulation"]
    return pd.DataFrame([{"images": found["source"]} | row | {"images per update": update}])


def by_epoch(frame: pd.DataFrame, metric: str) -> pd.DataFrame:
    """Median over seeds and its interval by (implementation, epoch), in the column of the metric, of finite losses."""
    column, told = METRICS[metric], metrics(frame)
    table = summarize_groups(told[is_finite(told)], column, ["implementation", "epoch"])
    return in_order(table.rename(columns={"median": column}))[["implementation", "epoch", column, "low", "high", "n"]]


def losses_by_epoch(frame: pd.DataFrame) -> pd.DataFrame:
    """Training and validation loss by epoch, `loss`, one panel each."""
    parts = [
        by_epoch(frame, metric).rename(columns={METRICS[metric]: "loss"}).assign(panel=metric)
        for metric in ("training loss", "validation loss")
    ]
    return pd.concat(parts, ignore_index=True)


def outcome(frame: pd.DataFrame) -> pd.DataFrame:
    """By implementation, after the last epoch: median accuracy, interval, smallest, largest; median losses; error.

    Of the `seeds` that have not diverged; `diverged` of them have. An implementation of which all have has no numbers.
    """
    last, by = last_epoch(frame), "implementation"
    counts = diverged(frame).groupby(by)[["diverged"]].sum()
    medians = summarize_groups(last, "accuracy_percent", [by]).set_index(by)[["median", "low", "high", "n"]]
    accuracy = last.groupby(by)["accuracy_percent"].agg(smallest="min", largest="max")
    losses = last.groupby(by)[["epoch", "train_loss", "validation_loss"]].median()
    error = of_phase(frame, EPOCH, "error").groupby(by)[["error"]].max()
    table = counts.join([medians, accuracy, losses, error]).reset_index().fillna({"n": 0})
    table = in_order(table.rename(columns={"median": "accuracy_percent", "n": "seeds"}))
    columns = ["implementation", "epoch", "accuracy_percent", "low", "high", "smallest", "largest", "train_loss"]
    return table[[*columns, "validation_loss", "seeds", "diverged", "error"]]


def _both_with(name: str, other: str) -> str:
    """What the implementations of a pair share: the wrapper, or the batch norm."""
    return next(part for part in name.split(" + ") if part in other.split(" + "))


def differences(frame: pd.DataFrame, pairs: Pairs) -> pd.DataFrame:
    """After the last epoch, seed by seed: the first of a pair less the second; points of accuracy, percent of a loss.

    `verdict`: "the same" if the interval lies within the margin, "higher" or "lower" if significantly beyond it, else
    "not shown"; "diverged" if a seed did with either of the pair: what the others show holds for them alone.
    `than_value` is the median of the second.
    """
    rows, last, lost = [], last_epoch(frame), _lost(divergences(frame, pairs))
    for (name, other), metric in ((pair, metric) for pair in pairs for metric in METRICS):
        table = last.pivot(index="seed", columns="implementation", values=METRICS[metric])
        table = table.reindex(columns=[name, other]).dropna()
        if table.empty:
            continue
        change = table[name] - table[other]
        found = summarize(100 * change / table[other] if UNITS[metric] == "%" else change)
        margin = MARGINS[metric]
        row: dict[str, Any] = {"both_with": _both_with(name, other), "implementation": name, "than": other}
        row |= {"metric": metric, "difference": found.median, "low": found.low, "high": found.high}
        row |= {"unit": UNITS[metric], "margin": margin, "seeds": found.n}
        row |= {"than_value": float(table[other].median())}
        rows.append(row | {"verdict": "diverged" if (name, other) in lost else "not shown"})
    return _placed(pd.DataFrame(rows, columns=DIFFERENCES))


def divergences(frame: pd.DataFrame, pairs: Pairs) -> pd.DataFrame:
    """How many `seeds` that both of a pair have `diverged` with the first, and with the second (`than_diverged`).

    `verdict`: "higher" or "lower" if the first diverges more or less often beyond chance, by a sign test over the seeds
    with which just one of the two does; "none" if no seed did with either; else "not shown".
    """
    rows, table = [], diverged(frame).pivot(index="seed", columns="implementation", values="diverged")
    for name, other in pairs:
        both = table.reindex(columns=[name, other]).dropna().astype(bool)
        if both.empty:
            continue
        first, second = both[name], both[other]
        more, less = int((first & ~second).sum()), int((second & ~first).sum())
        tail = 2 * sum(comb(more + less, k) for k in range(min(more, less) + 1)) / 2 ** (more + less)
        shown = "higher" if more > less else "lower"
        verdict = shown if tail < 1 - CONFIDENCE else "not shown" if (first | second).any() else "none"
        row = {"implementation": name, "than": other, "seeds": len(both), "diverged": int(first.sum())}
        rows.append(row | {"than_diverged": int(second.sum()), "verdict": verdict})
    return pd.DataFrame(rows, columns=DIVERGENCES)


def _lost(found: pd.DataFrame) -> set[tuple[str, str]]:
    """Pairs of which a seed diverged."""
    some = found[found["verdict"] != "none"]
    return set(zip(some["implementation"], some["than"], strict=True))


def _placed(table: pd.DataFrame) -> pd.DataFrame:
    """With the verdict on each difference that has one: all of them answer one question together."""
    value, low, high, margin = (table[name].to_numpy(dtype=float) for name in ("difference", "low", "high", "margin"))
    is_whole = (table["verdict"] != "diverged").to_numpy()
    beyond = is_significant(np.where(is_whole, beyond_p(value, low, high, -margin, margin), np.nan))
    same = is_whole & (low >= -margin) & (high <= margin)
    verdict = np.where(beyond, np.where(value > 0, "higher", "lower"), np.where(same, "the same", table["verdict"]))
    return table.assign(verdict=pd.Series(verdict, index=table.index, dtype=object))


def time_summary(frame: pd.DataFrame) -> pd.DataFrame:
    """Median time of an epoch with its interval over seeds, by implementation: of each seed the median epoch."""
    of_seeds = times(frame).groupby(["implementation", "seed"], as_index=False)["epoch_s"].median()
    table = summarize_groups(of_seeds, "epoch_s", ["implementation"]).rename(columns={"median": "epoch_s"})
    return in_order(table)[["implementation", "epoch_s", "low", "high", "n"]]


def time_ratios(frame: pd.DataFrame, pairs: Pairs) -> pd.DataFrame:
    """Time of an epoch by the first of a pair over that by the second, of the same seeds and epochs.

    Of each seed the median epoch: epochs of one training resemble one another, so that seeds are the samples.
    """
    rows, samples = [], times(frame)
    for name, other in pairs:
        table = paired(samples, name, other).groupby("seed").median()
        if len(table):
            found = compare(table[name], table[other], interleaved=True)
            rows.append({"both_with": _both_with(name, other), "implementation": name} | asdict(found))
    return with_verdicts(pd.DataFrame(rows, columns=RATIOS))


def memory(frame: pd.DataFrame) -> pd.DataFrame:
    """Peak of an update by implementation, of the rank with the highest."""
    return in_order(of_phase(frame, MEMORY, "peak_bytes").groupby("implementation", as_index=False)["peak_bytes"].max())


def memory_ratios(frame: pd.DataFrame) -> pd.DataFrame:
    """Peak with labkit's parts over that with torch's."""
    peaks = memory(frame)
    parts = [name.split(" + ") for name in peaks["implementation"]]
    peaks = peaks.assign(wrapper=[part[0] for part in parts], batch_norm=[part[1] for part in parts])
    return exactly_over(peaks, ["batch_norm"], "wrapper", "peak_bytes", "torch")


def synchronizing(frame: pd.DataFrame, calibration: Calibration | None) -> pd.DataFrame:
    """What an epoch takes longer with batch norm over all ranks, and what its collectives should take.

    `extra_s`      median over seeds of their median of synchronized less local, with its interval
    `predicted_s`  micro-batches times a forward and a backward collective, as calibrated; NaN of what was not
    """
    rows, samples, about = [], times(frame), setting(frame)
    if about is None:
        return pd.DataFrame(columns=SYNCHRONIZING)
    pair_s = collectives_s(NORMALIZED, int(about["world_size"]), about["backend"], calibration) or float("nan")
    for name, other in SYNC:
        table = paired(samples, name, other)
        if len(table):
            found = summarize((table[name] - table[other]).groupby("seed").median())
            predicted_s = about["micro_batches"] * pair_s
            row = {"implementation": name, "extra_s": found.median, "low": found.low, "high": found.high}
            rows.append(row | {"predicted_s": predicted_s, "measured_over_predicted": found.median / predicted_s})
    return pd.DataFrame(rows, columns=SYNCHRONIZING)


@cache
def published() -> pd.DataFrame:
    """`cifar100_training_2gpu.csv` by implementation: the slower rank's time, the larger memory, accuracy."""
    table = pd.read_csv(reference_directory() / "cifar100_training_2gpu.csv")
    table = table.assign(implementation=table["implementation"].map(PUBLISHED_NAMES))
    worst = table.groupby("implementation")[["time_s", "max_memory_bytes", "accuracy"]].max()
    worst = worst.rename(columns={"time_s": "training_s", "max_memory_bytes": "peak_bytes"})
    return worst.assign(accuracy_percent=100 * worst["accuracy"]).drop(columns="accuracy")


def published_ratio(column: str) -> float:
    """Of the own parts over torch's."""
    values = published()[column]
    return float(values[OWN_SYNC] / values[TORCH_SYNC])


def own_over_torch(frame: pd.DataFrame) -> pd.DataFrame:
    """`ratio` of labkit's over torch's by quantity, time of an epoch (with interval) and peak memory."""
    epochs = time_ratios(frame, SAME).assign(quantity="time of an epoch")
    peaks = memory_ratios(frame).assign(quantity="peak memory")
    peaks = peaks.assign(implementation=[f"own + {name}" for name in peaks["batch_norm"]])
    both = pd.concat([epochs, peaks], ignore_index=True)
    return both.reindex(columns=["quantity", "implementation", "ratio", "low", "high"])


def published_own_over_torch() -> pd.DataFrame:
    """The same of the published training."""
    rows = [("time of an epoch", published_ratio("training_s")), ("peak memory", published_ratio("peak_bytes"))]
    return pd.DataFrame(rows, columns=["quantity", "ratio"]).assign(implementation=OWN_SYNC)
