"""The CIFAR-100 lab: its parameters and the points it measures."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator, model_validator

from labkit.lab import capacity
from labkit.lab.config import Count, Device, LabConfig, ParameterError, Seed, TimeoutSeconds, one_of
from labkit.lab.project import datasets_directory, kind_of_path
from labkit.lab.study import Study
from labkit.lab.units import format_seconds
from labkit.machine import Machine
from labkit.nn.datasets import CIFAR100_MD5, RECORD_BYTES, DatasetError, fetch_cifar100, file_md5, read_cifar100
from labkit.parallel.ranks.torchrun import ranks_here
from labkit.studies.cifar100.data import CIFAR100, DIGITS
from labkit.studies.cifar100.findings import QUESTIONS
from labkit.studies.cifar100.training import IMPLEMENTATIONS, TORCH_SYNC
from labkit.studies.cifar100.worker import TrainingPoint, train_point

MIB = 2**20
RANK_BYTES = 300 * MIB  # a rank's own resident memory, torch and what is trained included
IMAGES = {DIGITS: 1797, CIFAR100: 60_000}
COPIES = 3  # of the images on rank 0: the archive's members, the tensors, what is handed out

Implementation = Annotated[str, one_of(lambda: IMPLEMENTATIONS)]
Positive = Annotated[float, Field(gt=0, le=100, allow_inf_nan=False)]


class CifarConfig(LabConfig):
    """What a reader may set."""

    dataset: Annotated[str, one_of(lambda: IMAGES)] = DIGITS
    """ "cifar100" fetches the archive into data/datasets, unless `archive` names one."""
    archive: str | None = None
    """Path of CIFAR-100's binary archive, a .tar.gz."""
    train_images: Count | None = None
    """Only the first so many of the training set."""
    implementations: Annotated[list[Implementation], Field(min_length=1)] = list(IMPLEMENTATIONS)
    """The wrapper, and whether batch norm is over all ranks; torch's SyncBatchNorm refuses CPU tensors."""
    world_size: Annotated[int, Field(ge=2, le=1024)] = 2
    seeds: Annotated[list[Seed], Field(min_length=1)]
    """Each is a training of its own. Below six there is no interval, and so no verdict."""
    epochs: Annotated[int, Field(ge=1, le=10_000)]
    batch: Annotated[int, Field(ge=2, le=100_000)] = 8
    """Images of a micro-batch on one rank."""
    accumulation: Annotated[int, Field(ge=1, le=10_000)] = 4
    """Micro-batches of an update."""
    learning_rate: Positive = 0.01
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.5
    device: Device = "auto"
    timeout_s: TimeoutSeconds = 3600.0
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
            raise ValueError(
                "should be the path of CIFAR-100's binary archive, and there is no such file, or it may not be read"
            )
        return str(path.resolve())

    @model_validator(mode="after")
    def _enough_images(self) -> "CifarConfig":
        if self.train_images is not None and self.train_images < 2 * self.world_size:
            raise ValueError(f"train_images should be two a rank or more, {2 * self.world_size}")
        return self


class Cifar100Study(Study):
    """The same net trained by labkit's parts and by torch's, epoch by epoch in turns."""

    name = "cifar100"
    title = "Training on CIFAR-100"
    summary = (
        "Whether training with labkit's wrapper and SyncBatchNorm is as good, as fast and as small as with torch's."
    )
    questions = QUESTIONS
    profiles = {
        "smoke": CifarConfig(seeds=[0], epochs=2, train_images=64, accumulation=2),
        "quick": CifarConfig(seeds=list(range(6)), epochs=3, train_images=512),
        "standard": CifarConfig(seeds=list(range(8)), epochs=8),
        "paper": CifarConfig(
            dataset="cifar100", seeds=list(range(6)), epochs=16, batch=64, accumulation=4, timeout_s=86_400.0
        ),
    }
    worker = staticmethod(train_point)
    keeps_checkpoints = True

    def points(self, config: CifarConfig, machine: Machine) -> Sequence[TrainingPoint]:
        """One a seed."""
        device = machine.device(config.device)
        names = [name for name in dict.fromkeys(config.implementations) if device == "cuda" or name != TORCH_SYNC]
        if not names:
            raise ParameterError(f"{self.name}: parameter 'implementations': torch's SyncBatchNorm refuses CPU tensors")
        dataset = CIFAR100 if config.archive else config.dataset
        md5 = None if dataset == DIGITS else CIFAR100_MD5 if config.archive is None else file_md5(Path(config.archive))
        about = {"dataset": dataset, "source": _source(dataset, md5), "md5": md5, "implementations": names}
        about |= {"device": device, "backend": machine.backend(device, ranks_here(config.world_size))}
        return [TrainingPoint.of(config, seed=seed, **about) for seed in dict.fromkeys(config.seeds)]

    def check_inputs(self, config: CifarConfig, say: Callable[[str], None]) -> None:
        """The archive that is named: whole, and in its format."""
        if config.archive is not None:
            self._check_archive(Path(config.archive), say)

    def prepare(self, config: CifarConfig, say: Callable[[str], None]) -> str | None:
        """CIFAR-100's archive where none is named, fetched if it is not there; whole, and in its format."""
        if config.archive is not None or config.dataset == DIGITS:
            return None
        try:
            path = fetch_cifar100(datasets_directory(), say)
        except DatasetError as error:
            raise ParameterError(f"{self.name}: {error}") from None
        except ConnectionError as error:
            return f"{error}; name an archive that is here with --set archive=PATH, or use --set dataset=digits"
        self._check_archive(path, say)
        return None

    def _check_archive(self, path: Path, say: Callable[[str], None]) -> None:
        say("checking the archive")
        try:
            read_cifar100(path)
        except DatasetError as error:
            raise ParameterError(f"{self.name}: {error}") from None

    def progress(self, point: TrainingPoint, values: Mapping[str, Any]) -> str | None:
        if "accuracy" not in values:
            return None
        return (
            f"epoch {values['epoch']} of {point.epochs}, {values['implementation']}: loss {values['train_loss']:.3f}, "
            f"validation {values['validation_loss']:.3f}, accuracy {100 * values['accuracy']:.1f} %, "
            f"{format_seconds(values['epoch_s'])}"
        )

    def skip_reason(self, point: TrainingPoint, machine: Machine) -> str | None:
        if reason := machine.no_device_reason(point.device):
            return reason
        ranks = ranks_here(point.world_size)
        needed = ranks * RANK_BYTES + (COPIES + ranks) * IMAGES[point.dataset] * RECORD_BYTES
        return capacity.skip_reason(machine, "cpu", needed)


def _source(dataset: str, md5: str | None) -> str:
    """What the images are, as the page says it."""
    if dataset == DIGITS:
        return "scikit-learn's handwritten digits, 8x8 pixels drawn as 32x32: not CIFAR-100"
    if md5 == CIFAR100_MD5:
        return "CIFAR-100, the official archive"
    return "an archive in the format of CIFAR-100, not the official one"


STUDY = Cifar100Study()
