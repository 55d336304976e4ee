"""Training on CIFAR-100: whether labkit's wrapper and SyncBatchNorm train as well, as fast and in
as little memory."""

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from pydantic import Field, field_validator, model_validator

from labkit.lab.answers import Check, Compare, Report
from labkit.lab.config import (
    Count,
    Device,
    LabConfig,
    ParameterError,
    Seconds,
    Seed,
    SeveralRanks,
    Some,
    one_of,
)
from labkit.lab.declaration import Lab
from labkit.lab.figures import Bars, Lines
from labkit.lab.metric import Metric, Results
from labkit.lab.project import datasets_directory, kind_of_path
from labkit.machine.description import Machine
from labkit.nn.datasets import CIFAR100_MD5, DatasetError, fetch_cifar100, file_md5, read_cifar100
from labkit.studies.cifar100.training import IMPLEMENTATIONS, TORCH_SYNC
from labkit.studies.cifar100.worker import (
    CIFAR100,
    DIGITS,
    EPOCH,
    MEMORY,
    N_IMAGES,
    TrainingPoint,
    train,
)

LABKIT = "own"
TORCH = "torch"
SYNCHRONIZED = "SyncBatchNorm"
LOCAL = "BatchNorm"
RESULTS = {
    "accuracy_percent": "accuracy",
    "validation_loss": "validation loss",
    "train_loss": "training loss",
}
Positive = Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)]


class CifarConfig(LabConfig):
    dataset: Annotated[str, one_of(lambda: N_IMAGES)] = DIGITS
    """ "cifar100" fetches the archive into data/datasets, unless `archive` names one."""
    archive: str | None = None
    """Path of CIFAR-100's binary archive, a .tar.gz."""
    train_images: Count | None = 512
    """Only the first so many of the training set; None: all."""
    implementations: Some[Annotated[str, one_of(lambda: IMPLEMENTATIONS)]] = list(IMPLEMENTATIONS)
    """A wrapper and a batch norm; torch's SyncBatchNorm refuses CPU tensors."""
    world_size: SeveralRanks = 2
    seeds: Some[Seed] = list(range(6))
    """One training each. Fewer than six give no interval, and so no verdict."""
    epochs: Annotated[int, Field(ge=1, le=10_000)] = 3
    batch: Annotated[int, Field(ge=2, le=100_000)] = 8
    """Images of a micro-batch on one rank."""
    accumulation: Annotated[int, Field(ge=1, le=10_000)] = 4
    """Micro-batches per update."""
    # Accumulation, learning rate and momentum are those of the published run.
    learning_rate: Positive = 0.01
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.5
    device: Device = "auto"
    timeout_s: Seconds = 3600.0
    """Deadline of one seed."""

    @field_validator("archive")
    @classmethod
    def _resolve_archive(cls, archive: str | None) -> str | None:
        if archive is None:
            return None
        # Not "~user", whose home may not exist.
        path = Path(archive).expanduser() if archive.startswith("~/") else Path(archive)
        if kind_of_path(path) != "file" or not os.access(path, os.R_OK):
            raise ValueError(
                "should be the path of CIFAR-100's binary archive, and there is no file to read"
            )
        return str(path.resolve())

    @model_validator(mode="after")
    def _enough_images(self) -> "CifarConfig":
        if self.train_images is not None and self.train_images < 2 * self.world_size:
            raise ValueError(f"train_images should be two per rank or more, {2 * self.world_size}")
        return self


def points(config: CifarConfig, machine: Machine) -> list[TrainingPoint]:
    """Plan one point per seed. ParameterError for an archive that is not CIFAR-100's."""
    device = machine.device(config.device)
    # Left out, not refused: the default names all implementations, on every machine.
    names = [name for name in config.implementations if device == "cuda" or name != TORCH_SYNC]
    if not names:
        raise ParameterError(
            "cifar100: parameter 'implementations': torch's SyncBatchNorm refuses CPU tensors"
        )
    # Recorded with the point: a training resumes with the same images only.
    dataset = config.dataset
    md5 = None if dataset == DIGITS else CIFAR100_MD5
    if config.archive is not None:
        dataset = CIFAR100
        _check_archive(Path(config.archive), "parameter 'archive': ")
        md5 = file_md5(Path(config.archive))
    about: dict[str, Any] = {"dataset": dataset, "md5": md5, "implementations": names}
    point = partial(TrainingPoint.on, machine, config, config.world_size, **about)
    # Peaks are the same for every seed: they are measured once.
    return [point(seed=seed, has_memory=seed == config.seeds[0]) for seed in config.seeds]


def _check_archive(path: Path, prefix: str = "") -> None:
    try:
        read_cifar100(path)
    except DatasetError as error:
        raise ParameterError(f"cifar100: {prefix}{error}") from None


def prepare(config: CifarConfig, say: Callable[[str], None]) -> str | None:
    """Fetch CIFAR-100's archive unless one is given or already here, and check it."""
    if config.archive is not None or config.dataset == DIGITS:
        return None
    try:
        fetched = fetch_cifar100(datasets_directory(), say)
    except DatasetError as error:
        raise ParameterError(f"cifar100: {error}") from None
    except ConnectionError as error:
        return f"{error}; give a local archive with --set archive=PATH, or use --set dataset=digits"
    say("checking the archive")
    _check_archive(fetched)
    return None


def _select_last_epochs(rows: pd.DataFrame) -> pd.DataFrame:
    """Return rows of the last epoch that all trainings have; each seed is a repeat."""
    # An interrupted training has fewer epochs, and a later epoch has a lower loss.
    last = rows.groupby(["implementation", "seed"])["epoch"].max().min()
    return rows[rows["epoch"] == last].assign(repeat=rows["seed"])


def _compute_median_epochs(rows: pd.DataFrame) -> pd.DataFrame:
    """Return the median epoch of each seed, without its warm-up if it has other epochs."""
    is_warm_up = rows["warm_up"].astype(bool)
    has_others = ~is_warm_up.groupby([rows["implementation"], rows["seed"]]).transform("all")
    rows = rows[~(is_warm_up & has_others)]
    keys = [*CONFIGURATION, "wrapper", "seed"]
    slowest = rows.groupby([*keys, "epoch"], dropna=False)["epoch_s"].max()
    medians = slowest.groupby(level=keys, dropna=False).median().reset_index(name="epoch_s")
    return medians.assign(repeat=medians["seed"])


CONFIGURATION = ("dataset", "world_size", "batch", "epochs", "batch_norm")
EPOCHS = {"phase": EPOCH, "status": "ok"}
BY_WRAPPER = ("dataset", "world_size", "batch", "epochs", "wrapper")
LOSS = Metric(
    "validation_loss", "batch_norm", BY_WRAPPER, where=EPOCHS, prepare=_select_last_epochs
)
TIME = Metric("epoch_s", "wrapper", CONFIGURATION, where=EPOCHS, prepare=_compute_median_epochs)
SYNC_TIME = Metric(
    "epoch_s", "batch_norm", BY_WRAPPER, where=EPOCHS, prepare=_compute_median_epochs
)
PEAK = Metric("peak_bytes", "wrapper", CONFIGURATION, where={"phase": MEMORY}, exact=True)
NAMES = {
    LABKIT: "labkit's parts",
    TORCH: "torch's",
    SYNCHRONIZED: "batch norm over all ranks",
    LOCAL: "local batch norm",
}


def by_epoch(results: Results) -> pd.DataFrame:
    """Return the median over the seeds of losses and accuracy, by implementation and epoch."""
    groups = _rows(results).groupby(["dataset", "implementation", "epoch"], sort=False)
    return groups[list(RESULTS)].median().reset_index()


def last_epochs(results: Results) -> pd.DataFrame:
    """Return medians over the seeds after the last epoch, and the range of the accuracy."""
    groups = _select_last_epochs(_rows(results)).groupby(["dataset", "implementation"], sort=False)
    accuracy = groups["accuracy_percent"].agg(smallest="min", largest="max", seeds="count")
    return groups[list(RESULTS)].median().join(accuracy).reset_index()


def same_training(results: Results) -> pd.DataFrame:
    """Return each seed's results after the last epoch, with labkit's parts and with torch's."""
    rows = _select_last_epochs(_rows(results)).rename(columns=RESULTS)
    keys = ["batch_norm", "seed", "result"]
    long = rows.melt(["wrapper", "batch_norm", "seed"], list(RESULTS.values()), "result")
    wide = long.pivot_table(index=keys, columns="wrapper", values="value")
    return wide.reindex(columns=[LABKIT, TORCH]).reset_index().rename_axis(columns=None)


def _rows(results: Results) -> pd.DataFrame:
    """Return losses and accuracy by seed and epoch."""
    columns = ["dataset", "implementation", "wrapper", "batch_norm", "epoch", "seed", *RESULTS]
    return results.rows(columns).dropna(subset=list(RESULTS))


LAB = Lab(
    name="cifar100",
    title="Training on CIFAR-100",
    summary=(
        "Whether labkit's wrapper and SyncBatchNorm train as well as torch's, as fast, and in as"
        " little memory."
    ),
    config=CifarConfig,
    smoke={"train_images": 128, "epochs": 2},
    # As in data/reference/cifar100_training_2gpu.csv.
    paper={
        "dataset": CIFAR100,
        "train_images": None,
        "epochs": 16,
        "batch": 64,
        "timeout_s": 86_400.0,
    },
    on_gpu={"world_size": 8, "train_images": None, "batch": 16, "accumulation": 1},
    worker=train,
    points=points,
    keeps_checkpoints=True,
    prepare=prepare,
    alternatives=("implementation",),
    names=NAMES,
    questions=[
        Report(
            id="learned",
            text="How well does the net learn?",
            table=last_epochs,
            configuration=("dataset", "implementation"),
            says=(
                "On {dataset}, the net classifies {accuracy_percent}% of the validation images"
                " correctly."
            ),
            figure=Lines(
                source=by_epoch, x="epoch", y="validation_loss", hue="implementation", log=""
            ),
        ),
        Check(
            id="same_training",
            text="Do labkit's parts train as well as torch's?",
            table=same_training,
            measured=LABKIT,
            predicted=TORCH,
            # Smaller differences at the end of training count as none.
            within=1.03,
            subject="losses and accuracies",
            reference="torch's",
        ),
        Compare(
            id="time",
            text="Is an epoch faster with labkit's parts than with torch's?",
            metric=TIME,
            baseline=TORCH,
            figure=Bars(source=TIME, x="batch_norm", y="epoch_s", hue="wrapper"),
        ),
        Compare(
            id="memory",
            text="Does training need less memory with labkit's parts than with torch's?",
            metric=PEAK,
            baseline=TORCH,
        ),
        Compare(
            id="sync_batchnorm",
            text="Does batch norm over all ranks end with a lower loss than local batch norm?",
            metric=LOSS,
            baseline=LOCAL,
        ),
        Compare(
            id="sync_batchnorm_time",
            text="Does an epoch take longer with batch norm over all ranks?",
            metric=SYNC_TIME,
            baseline=LOCAL,
            topic="batch_norm",
            keep="Synchronize batch norm only if a rank's images are too few for statistics.",
        ),
    ],
)
