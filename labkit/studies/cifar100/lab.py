"""Training on CIFAR-100: whether labkit's wrapper and SyncBatchNorm train as well, as fast and as small as torch's."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from pydantic import Field, field_validator, model_validator

from labkit.lab.answers import Check, Compare, Report
from labkit.lab.config import Count, Device, LabConfig, ParameterError, Seed, Some, one_of
from labkit.lab.declaration import Lab
from labkit.lab.figures import Bars, Lines
from labkit.lab.metric import Metric, Results
from labkit.lab.project import datasets_directory, kind_of_path
from labkit.lab.units import format_seconds
from labkit.machine import Machine
from labkit.nn.datasets import CIFAR100_MD5, DatasetError, fetch_cifar100, file_md5, read_cifar100
from labkit.parallel.ranks.torchrun import ranks_here
from labkit.studies.cifar100.training import IMPLEMENTATIONS, TORCH_SYNC
from labkit.studies.cifar100.worker import CIFAR100, DIGITS, EPOCH, MEMORY, N_IMAGES, TrainingPoint, train

LABKIT, TORCH, SYNCHRONIZED, LOCAL = "own", "torch", "SyncBatchNorm", "BatchNorm"
RESULTS = {"accuracy_percent": "accuracy", "validation_loss": "validation loss", "train_loss": "training loss"}
Positive = Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)]


class CifarConfig(LabConfig):
    """The parameters of this lab."""

    dataset: Annotated[str, one_of(lambda: N_IMAGES)] = DIGITS
    """ "cifar100" fetches the archive into data/datasets, unless `archive` names one."""
    archive: str | None = None
    """Path of CIFAR-100's binary archive, a .tar.gz."""
    train_images: Count | None = 512
    """Only the first so many of the training set; None: all."""
    implementations: Some[Annotated[str, one_of(lambda: IMPLEMENTATIONS)]] = list(IMPLEMENTATIONS)
    """The wrapper, and whether batch norm is over all ranks; torch's SyncBatchNorm refuses CPU tensors."""
    world_size: Annotated[int, Field(ge=2, le=64)] = 2
    seeds: Some[Seed] = list(range(6))
    """Each is a training of its own. Below six there is no interval, and so no verdict."""
    epochs: Annotated[int, Field(ge=1, le=10_000)] = 3
    batch: Annotated[int, Field(ge=2, le=100_000)] = 8
    """Images of a micro-batch on one rank."""
    accumulation: Annotated[int, Field(ge=1, le=10_000)] = 4
    """Micro-batches of an update."""
    learning_rate: Positive = 0.01
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.5
    device: Device = "auto"
    timeout_s: Annotated[float, Field(gt=0, le=86_400, allow_inf_nan=False)] = 3600.0
    """Deadline of one seed."""

    @field_validator("archive")
    @classmethod
    def _is_there(cls, archive: str | None) -> str | None:
        if archive is None:
            return None
        try:
            path = Path(archive).expanduser()
        except RuntimeError as error:  # the home of a user that does not exist
            raise ValueError(f"should be a path: {error}") from None
        if kind_of_path(path) != "file":
            raise ValueError("should be the path of CIFAR-100's binary archive, and there is no file to read")
        return str(path.resolve())

    @model_validator(mode="after")
    def _enough_images(self) -> "CifarConfig":
        if self.train_images is not None and self.train_images < 2 * self.world_size:
            raise ValueError(f"train_images should be two per rank or more, {2 * self.world_size}")
        return self


def points(config: CifarConfig, machine: Machine) -> list[TrainingPoint]:
    """One per seed."""
    device = machine.device(config.device)
    names = [name for name in config.implementations if device == "cuda" or name != TORCH_SYNC]
    if not names:
        raise ParameterError("cifar100: parameter 'implementations': torch's SyncBatchNorm refuses CPU tensors")
    dataset = CIFAR100 if config.archive else config.dataset
    md5 = None if dataset == DIGITS else CIFAR100_MD5 if config.archive is None else file_md5(Path(config.archive))
    about: dict[str, Any] = {"dataset": dataset, "md5": md5, "implementations": names, "device": device}
    about["backend"] = machine.backend(device, ranks_here(config.world_size))
    return [TrainingPoint.of(config, seed=seed, **about) for seed in config.seeds]


def check_inputs(config: CifarConfig, say: Callable[[str], None]) -> None:
    """Check the archive that is named: whole, and in its format."""
    if config.archive is not None:
        _check_archive(Path(config.archive), say)


def prepare(config: CifarConfig, say: Callable[[str], None]) -> str | None:
    """Fetch CIFAR-100's archive if none is named and none is there; check that it is whole, and in its format."""
    if config.archive is not None or config.dataset == DIGITS:
        return None
    try:
        path = fetch_cifar100(datasets_directory(), say)
    except DatasetError as error:
        raise ParameterError(f"cifar100: {error}") from None
    except ConnectionError as error:
        return f"{error}; name an archive that is here with --set archive=PATH, or use --set dataset=digits"
    _check_archive(path, say)
    return None


def _check_archive(path: Path, say: Callable[[str], None]) -> None:
    say("checking the archive")
    try:
        read_cifar100(path)
    except DatasetError as error:
        raise ParameterError(f"cifar100: {error}") from None


def describe_progress(point: TrainingPoint, values: Mapping[str, Any]) -> str | None:
    """A few words on an epoch that has just ended."""
    if "accuracy_percent" not in values:
        return None
    return (
        f"epoch {values['epoch']} of {point.epochs}, {values['implementation']}: loss {values['train_loss']:.3f}, "
        f"validation {values['validation_loss']:.3f}, accuracy {values['accuracy_percent']:.1f}%, "
        f"{format_seconds(values['epoch_s'])}"
    )


def _last_epochs(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of the last epoch that all trainings have, each seed as a repeat."""
    last = rows.groupby(["implementation", "seed"])["epoch"].max().min()
    return rows[rows["epoch"] == last].assign(repeat=rows["seed"])


def _median_epochs(rows: pd.DataFrame) -> pd.DataFrame:
    """The median epoch of each seed after its warm-up: epochs of one training resemble one another."""
    is_warm_up = rows["warm_up"].astype(bool)
    has_others = ~is_warm_up.groupby([rows["implementation"], rows["seed"]]).transform("all")
    rows = rows[~(is_warm_up & has_others)]
    slowest = rows.groupby([*CONFIGURATION, "wrapper", "seed", "epoch"], dropna=False)["epoch_s"].max()
    return (
        slowest.groupby(level=[*CONFIGURATION, "wrapper", "seed"], dropna=False)
        .median()
        .reset_index(name="epoch_s")
        .assign(repeat=lambda table: table["seed"])
    )


CONFIGURATION = ("dataset", "world_size", "batch", "epochs", "batch_norm")
EPOCHS = {"phase": EPOCH, "check": "ok"}
LOSS = Metric(
    "validation_loss",
    "batch_norm",
    ("dataset", "world_size", "batch", "epochs", "wrapper"),
    where=EPOCHS,
    prepare=_last_epochs,
)
TIME = Metric("epoch_s", "wrapper", CONFIGURATION, where=EPOCHS, prepare=_median_epochs)
PEAK = Metric("peak_bytes", "wrapper", CONFIGURATION, where={"phase": MEMORY}, exact=True)
NAMES = {
    LABKIT: "labkit's parts",
    TORCH: "torch's",
    SYNCHRONIZED: "batch norm over all ranks",
    LOCAL: "local batch norm",
}


def by_epoch(results: Results) -> pd.DataFrame:
    """Median over the seeds of losses and accuracy, by implementation and epoch."""
    columns = ["phase", "dataset", "implementation", "epoch", "seed", *RESULTS]
    rows = results.frame.reindex(columns=columns).dropna(subset=list(RESULTS))
    return rows.groupby(["dataset", "implementation", "epoch"], sort=False)[list(RESULTS)].median().reset_index()


def outcome(results: Results) -> pd.DataFrame:
    """After the last epoch, by implementation: medians over the seeds, and the smallest and largest accuracy."""
    rows = results.frame.reindex(columns=["implementation", "dataset", "epoch", "seed", *RESULTS])
    rows = rows.dropna(subset=list(RESULTS))
    if rows.empty:
        return rows
    last = _last_epochs(rows).groupby(["dataset", "implementation"], sort=False)
    medians = last[list(RESULTS)].median()
    accuracy = last["accuracy_percent"].agg(smallest="min", largest="max", seeds="count")
    return medians.join(accuracy).reset_index()


def same_training(results: Results) -> pd.DataFrame:
    """After the last epoch, each seed's results with labkit's parts and with torch's, by batch norm."""
    rows = results.frame.reindex(columns=["implementation", "wrapper", "batch_norm", "epoch", "seed", *RESULTS])
    rows = rows.dropna(subset=list(RESULTS))
    if rows.empty:
        return pd.DataFrame(columns=["batch_norm", "seed", "result", LABKIT, TORCH])
    long = (
        _last_epochs(rows)
        .rename(columns=RESULTS)
        .melt(["wrapper", "batch_norm", "seed"], list(RESULTS.values()), "result")
    )
    wide = long.pivot_table(index=["batch_norm", "seed", "result"], columns="wrapper", values="value")
    return wide.reindex(columns=[LABKIT, TORCH]).reset_index().rename_axis(columns=None)


LAB = Lab(
    name="cifar100",
    title="Training on CIFAR-100",
    summary="Whether labkit's wrapper and SyncBatchNorm train as well, as fast and as small as torch's.",
    config=CifarConfig,
    paper={"dataset": CIFAR100, "train_images": None, "epochs": 16, "batch": 64, "timeout_s": 86_400.0},
    on_gpu={"world_size": 8, "train_images": None, "batch": 16, "accumulation": 1},
    worker=train,
    points=points,
    keeps_checkpoints=True,
    check_inputs=check_inputs,
    prepare=prepare,
    progress=describe_progress,
    questions=[
        Report(
            id="learned",
            text="How well does the net learn?",
            table=outcome,
            configuration=("dataset", "implementation"),
            says="On {dataset}, {implementation} classifies {accuracy_percent}% of the validation images correctly.",
            figure=Lines(source=by_epoch, x="epoch", y="validation_loss", hue="implementation", log=""),
        ),
        Check(
            id="same_training",
            text="Do labkit's parts train as well as torch's?",
            table=same_training,
            measured=LABKIT,
            predicted=TORCH,
            within=1.03,
            subject="losses and accuracies",
            reference="torch's",
            configuration=("batch_norm", "result"),
        ),
        Compare(
            id="time",
            text="Is an epoch faster with labkit's parts than with torch's?",
            metric=TIME,
            baseline=TORCH,
            names=NAMES,
            figure=Bars(source=TIME, x="batch_norm", y="epoch_s", hue="wrapper"),
        ),
        Compare(
            id="memory",
            text="Does training need less memory with labkit's parts than with torch's?",
            metric=PEAK,
            baseline=TORCH,
            names=NAMES,
        ),
        Compare(
            id="sync_batchnorm",
            text="Does batch norm over all ranks end with a lower loss than local batch norm?",
            metric=LOSS,
            baseline=LOCAL,
            names=NAMES,
            topic="batch_norm",
            advice="With so few images per rank, synchronize batch norm{where}.",
        ),
    ],
)
