"""Worker of the CIFAR-100 lab: one seed, all implementations, epoch by epoch.

Implementations are trained side by side, epoch 1 of each, then epoch 2 of each, so that the
machine's load hits all alike. After each epoch rank 0 writes a checkpoint with the state of all of
them and the rows so far. An interrupted point resumes from it, and yields its rows again. The first
epoch of a training in a process is marked as warm-up, also after a resume.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.bench.check import describe_error, status_columns
from labkit.bench.clock import time_once, turn_order
from labkit.bench.memory import measure_second_peak
from labkit.lab.point import Point
from labkit.lab.project import datasets_directory
from labkit.nn.datasets import (
    CIFAR100_FILE,
    RECORD_BYTES,
    DatasetError,
    Images,
    digits,
    file_md5,
    read_cifar100,
)
from labkit.parallel.messages import gather_json
from labkit.parallel.ranks.results import current_alternative
from labkit.parallel.ranks.worker import use_device
from labkit.studies.cifar100.training import ALONE, SYNCHRONIZED, Recipe, Trainer, updates_of
from labkit.studies.shared.alternatives import row_of
from labkit.studies.shared.checkpoints import load_checkpoint, save_checkpoint
from labkit.studies.shared.checks import largest_error

DIGITS = "digits"
CIFAR100 = "cifar100"
EPOCH = "epoch"
MEMORY = "memory"
N_IMAGES = {DIGITS: 1797, CIFAR100: 60_000}
# For the plan: measured on two cores, and published for two GPUs
# (data/reference/cifar100_training_2gpu.csv).
IMAGES_PER_S = {"cpu": 1000, "cuda": 25_000}
N_COPIES = 3  # of the images on a rank that reads them: the archive, its members, tensors
CHECKED_UPDATES = 2
# Small enough to be quick. Batch norm over two images is so steep that rounding alone grows large.
CHECKED_BATCH = 4
CHECKED_ACCUMULATION = 2
# In float64, relative to the largest change of a weight; rounding leaves some 1e-12.
TOLERANCE = 1e-6
# Columns of the checks that succeeded in this process.
_CHECKED: dict[tuple[str, Recipe, int], dict[str, Any]] = {}


@dataclass(frozen=True, kw_only=True)
class TrainingPoint(Point):
    """One seed: data, hyperparameters, and the implementations that are trained side by side."""

    dataset: str
    """ "digits" or "cifar100"."""
    archive: str | None = None
    """Path of the archive; None: the fetched one, or none."""
    md5: str | None = None
    """Checksum of the archive: a training resumes with the same one only."""
    train_images: int | None = None
    """Only the first so many; None: all."""
    implementations: tuple[str, ...]
    epochs: int
    batch: int
    accumulation: int
    learning_rate: float
    momentum: float
    device: str = "cpu"
    """ "cpu" or "cuda"; several ranks may share one CUDA device."""
    seed: int = 0
    has_memory: bool = False
    """Whether peak memory is measured, which is the same for every seed."""

    @property
    def planned_s(self) -> float:
        images = self.train_images or N_IMAGES[self.dataset]
        return (
            super().planned_s
            + len(self.implementations) * self.epochs * images / IMAGES_PER_S[self.device]
        )

    @property
    def needed_bytes(self) -> float:
        return N_COPIES * N_IMAGES[self.dataset] * RECORD_BYTES

    def title(self) -> str:
        return f"{self.world_size} ranks, {self.dataset}, seed {self.seed}"


@dataclass(frozen=True)
class RankData:
    """Images (N, 3, 32, 32), uint8, and classes (N,), int64, of one rank, on the CPU."""

    classes: int
    training: tuple[Tensor, Tensor]
    """The whole training set: a rank takes other images in each epoch."""
    validation: tuple[Tensor, Tensor]
    """This rank's shard, ceil(N / ranks) images; the last ranks may have fewer or none."""
    validated: int
    """Validation images in the shards of all ranks."""


def read_data(
    dataset: str, archive: str | None, max_images: int | None, *, md5: str | None = None
) -> RankData:
    """Read the digits, or CIFAR-100 from `archive` or the archive that was fetched.

    The first `max_images` are for training. DatasetError for a bad archive, or one with another
    checksum than `md5`.
    """
    images = digits() if dataset == DIGITS else _read_archive(archive, md5)
    validated = len(images.validation[1])
    # All images: a mean over fewer would depend on the number of ranks.
    rows = -(-validated // dist.get_world_size())
    start = dist.get_rank() * rows
    pixels, classes = (part[:max_images] for part in images.training)
    shard_pixels, shard_classes = (part[start : start + rows].clone() for part in images.validation)
    return RankData(images.classes, (pixels, classes), (shard_pixels, shard_classes), validated)


def _read_archive(archive: str | None, md5: str | None) -> Images:
    path = Path(archive) if archive else datasets_directory() / CIFAR100_FILE
    try:
        actual = file_md5(path)
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error.strerror or error}") from None
    if md5 is not None and actual != md5:
        raise DatasetError(
            f"{path}: not the archive that was there at the beginning: expected MD5 {md5}, got"
            f" {actual}"
        )
    return read_cifar100(path)


def describe(implementation: str) -> dict[str, str]:
    """Return the columns that name an implementation, "torch + SyncBatchNorm"."""
    wrapper, _, batch_norm = implementation.partition(" + ")
    return {"implementation": implementation, "wrapper": wrapper, "batch_norm": batch_norm}


def train(point: TrainingPoint, checkpoints: Path | None = None) -> Iterator[dict[str, Any]]:
    """Yield rows of one seed: peak memory, the time of each epoch and, from rank 0, its results."""
    device = use_device(point.device)
    data = read_data(point.dataset, point.archive, point.train_images, md5=point.md5)
    recipe = Recipe(
        classes=data.classes,
        batch=point.batch,
        accumulation=point.accumulation,
        learning_rate=point.learning_rate,
        momentum=point.momentum,
        device=device,
    )
    checks: dict[str, dict[str, Any]] = {}
    trainers: dict[str, Trainer] = {}
    for name in point.implementations:
        checks[name] = _check_once(name, recipe, data, point.seed)
        if checks[name]["status"] == "ok":
            trainers[name] = Trainer(name, recipe, point.seed)
        else:
            yield describe(name) | {"phase": EPOCH} | checks[name]
    path = None
    if checkpoints is not None:
        path = checkpoints / point.id / "checkpoint.pt"
    done, rows = _resume(point, trainers, load_checkpoint(path))
    # A resumed training has its peaks in its checkpoint.
    if not rows and point.has_memory:
        rows = [_peak_memory(name, recipe, data, point.seed) for name in trainers]
    yield from rows
    for epoch in range(done + 1, point.epochs + 1):
        timed: list[dict[str, Any]] = []
        # Shuffled as by the clock; a resume keeps the order.
        for name in turn_order(trainers, epoch, seed=point.id):
            row = _time_epoch(trainers[name], epoch, data, point.seed)
            timed.append(row | checks[name] | {"warm_up": epoch == done + 1})
        rows += timed
        states = {name: trainer.state() for name, trainer in trainers.items()}
        state = {"point": point.id, "epoch": epoch, "trainers": states, "rows": gather_json(rows)}
        # Before the rows are yielded: an interrupt in between measures nothing twice.
        save_checkpoint(path, state)
        yield from timed


def _resume(
    point: TrainingPoint, trainers: dict[str, Trainer], state: dict[str, Any] | None
) -> tuple[int, list[dict[str, Any]]]:
    """Load a checkpoint, if there is one of all these implementations.

    Return its epoch, and their rows in it.
    """
    # An implementation that was wrong then, and is right now, has no state: all begin again.
    if (
        state is None
        or state["point"] != point.id
        or not trainers.keys() <= state["trainers"].keys()
    ):
        return 0, []
    for name, trainer in trainers.items():
        trainer.load(state["trainers"][name])
    rows = state["rows"][dist.get_rank()]
    return state["epoch"], [row for row in rows if row.get("implementation") in (None, *trainers)]


def _time_epoch(trainer: Trainer, epoch: int, data: RankData, seed: int) -> dict[str, Any]:
    """Train one epoch and validate; return its seconds and, on rank 0, its results.

    Losses and accuracy are equal on all ranks.
    """
    with current_alternative.running(trainer.implementation):
        dist.barrier()
        train_epoch = partial(trainer.epoch, *data.training, seed, epoch)
        (total, n_images), epoch_s = time_once(train_epoch, trainer.recipe.device)
        sums = torch.stack([total, torch.tensor(n_images).to(total)])
        dist.all_reduce(sums)
        loss, accuracy = trainer.validate(*data.validation, data.validated)
    row = describe(trainer.implementation) | {"phase": EPOCH, "epoch": epoch, "epoch_s": epoch_s}
    if dist.get_rank() > 0:
        return row
    return row | {
        "train_loss": float(sums[0] / sums[1]),
        "validation_loss": loss,
        "accuracy_percent": 100 * accuracy,
    }


def _check_once(name: str, recipe: Recipe, data: RankData, seed: int) -> dict[str, Any]:
    """Check an implementation unless it was right before: the result does not depend on the seed.

    All ranks run the same points, so they have checked the same.
    """
    key = (name, recipe, len(data.training[0]))
    if key not in _CHECKED:
        check = partial(_check, name, recipe, data, seed)
        columns = row_of(name, check, device=recipe.device)
        if columns["status"] != "ok":
            return columns
        _CHECKED[key] = columns
    return _CHECKED[key]


def _check(name: str, recipe: Recipe, data: RankData, seed: int) -> dict[str, Any]:
    """Compare the weights after the first updates with one process that has all ranks' images.

    In float64 and without dropout; the error is relative to the largest change of any weight, on
    the worst rank. Batch norm over all ranks is that of one process on the whole micro-batch, local
    batch norm that of one process which takes the ranks' micro-batches one by one.
    """
    ranks = dist.get_world_size()
    rank = dist.get_rank()
    recipe = replace(
        recipe,
        batch=CHECKED_BATCH,
        accumulation=CHECKED_ACCUMULATION,
        dropout=False,
        dtype=torch.float64,
    )
    # Batch norm over all ranks has the statistics of their images together.
    alone = recipe
    if name in SYNCHRONIZED:
        alone = replace(recipe, batch=ranks * recipe.batch)
    trainer = Trainer(name, recipe, seed)
    reference = Trainer(ALONE, alone, seed)
    before = _weights(reference)
    images, labels = data.training
    epochs = (updates_of(len(images), recipe, seed, epoch, ranks) for epoch in count(1))
    for update in islice(chain.from_iterable(epochs), CHECKED_UPDATES):
        mine = update[:, rank].flatten()
        everybody = update.flatten()
        trainer.update(images[mine], labels[mine])
        reference.update(images[everybody], labels[everybody])
    error = largest_error([_weights(trainer) - before], [_weights(reference) - before])
    return {"error": error, **status_columns(describe_error(error, TOLERANCE))}


def _weights(trainer: Trainer) -> Tensor:
    """Return all parameters in one vector."""
    # Not one by one: the bias before batch norm has a gradient of zero, and changes by rounding.
    return torch.cat([parameter.detach().flatten() for parameter in trainer.net.parameters()])


def _peak_memory(name: str, recipe: Recipe, data: RankData, seed: int) -> dict[str, Any]:
    """Return the allocator's peak over an update, model and optimizer included."""
    update = next(updates_of(len(data.training[0]), recipe, seed, 1, dist.get_world_size()))
    images, labels = (part[update[:, dist.get_rank()].flatten()] for part in data.training)
    dist.barrier()
    # Named, so that a failure says whose it is.
    with current_alternative.running(name):
        make = partial(Trainer, name, recipe, seed)
        peak = measure_second_peak(
            make, lambda trainer: trainer.update(images, labels), device=recipe.device
        )
    return describe(name) | {"phase": MEMORY} | peak
