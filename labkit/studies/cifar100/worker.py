"""What a rank runs to measure one point of the CIFAR-100 lab: one seed, all implementations, epoch by epoch.

Implementations are trained side by side, epoch 1 of each, then epoch 2 of each, so that whatever else the machine does
hits all alike. After each epoch rank 0 writes a checkpoint with the state of all of them and the rows so far; a point
that was interrupted goes on from it, and yields the rows again that are in it. The first epoch of a training in a
process is marked as warm-up, also when it is one that goes on.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.bench.check import verdict
from labkit.bench.clock import Stopwatch, turn_order
from labkit.lab.point import Point, skip_reason
from labkit.nn.datasets import RECORD_BYTES
from labkit.parallel.ranks.messages import gather_json, load_checkpoint, save_checkpoint
from labkit.parallel.ranks.torchrun import ranks_here
from labkit.parallel.ranks.worker import use_device
from labkit.studies.cifar100.data import RankData, hand_out
from labkit.studies.cifar100.training import ALONE, SYNCHRONIZED, Recipe, Trainer, updates_of
from labkit.studies.shared.alternatives import Failed, guarded_turn, run_guarded
from labkit.studies.shared.gradient_check import largest_error
from labkit.studies.shared.peaks import peak_of_second

if TYPE_CHECKING:
    from labkit.machine import Machine

EPOCH, MEMORY = "epoch", "memory"
DIGITS, CIFAR100 = "digits", "cifar100"
N_IMAGES = {DIGITS: 1797, CIFAR100: 60_000}
RANK_BYTES = 300 * 2**20  # resident memory of a rank, torch and what is trained included
# In a plan: measured on two cores, and published for two GPUs (data/reference/cifar100_training_2gpu.csv).
IMAGES_PER_S = {"cpu": 1000, "cuda": 25_000}
N_COPIES = 3  # of the images on rank 0: the archive's members, the tensors, what is distributed
GATE_UPDATES = 2
# Enough to be wrong, few enough to be quick. Batch norm over two images is so steep that rounding alone grows large.
GATE_BATCH, GATE_ACCUMULATION = 4, 2
TOLERANCE = 1e-6  # in float64, relative to the largest change of a weight; rounding leaves some 1e-12


@dataclass(frozen=True, kw_only=True)
class TrainingPoint(Point):
    """One seed: the data, the recipe, and the implementations that are trained side by side."""

    dataset: str
    """ "digits" or "cifar100"."""
    archive: str | None = None
    """Path of the archive; None: the one fetched, or none is needed."""
    md5: str | None = None
    """Of the archive, so that a training goes on with the same one only."""
    train_images: int | None = None
    """The first so many; None: all."""
    implementations: tuple[str, ...]
    epochs: int
    batch: int
    accumulation: int
    learning_rate: float
    momentum: float
    device: str = "cpu"
    """ "cpu" or "cuda"; several ranks may share one CUDA device."""
    seed: int = 0

    @property
    def planned_s(self) -> float:
        images = self.train_images or N_IMAGES[self.dataset]
        return super().planned_s + len(self.implementations) * self.epochs * images / IMAGES_PER_S[self.device]

    def skip_reason(self, machine: "Machine") -> str | None:
        ranks = ranks_here(self.world_size)
        needed = ranks * RANK_BYTES + (N_COPIES + ranks) * N_IMAGES[self.dataset] * RECORD_BYTES
        return machine.no_device_reason(self.device) or skip_reason(machine, "cpu", needed)

    def title(self) -> str:
        return f"{super().title()}, {self.dataset}, seed {self.seed}"


def describe(implementation: str) -> dict[str, str]:
    """The columns that name an implementation, "torch + SyncBatchNorm"."""
    wrapper, _, batch_norm = implementation.partition(" + ")
    return {"implementation": implementation, "wrapper": wrapper, "batch_norm": batch_norm}


def train(point: TrainingPoint, checkpoints: Path | None = None) -> Iterator[dict[str, Any]]:
    """Rows of one seed: peak memory of each implementation; the time of each epoch and, from rank 0, how good it is."""
    device = use_device(point.device)
    data = hand_out(point.dataset, point.archive, point.train_images, device, md5=point.md5)
    recipe = Recipe(
        classes=data.classes,
        batch=point.batch,
        accumulation=point.accumulation,
        learning_rate=point.learning_rate,
        momentum=point.momentum,
        device=device,
    )
    small = replace(recipe, batch=GATE_BATCH, accumulation=GATE_ACCUMULATION)
    errors: dict[str, float] = {}
    for name in point.implementations:
        error = run_guarded(name, partial(first_updates_error, name, small, data, point.seed), device=device)
        if isinstance(error, Failed):
            yield describe(name) | {"phase": EPOCH, "check": error.reason}
        elif (checks := verdict(error, TOLERANCE)) == "ok":
            errors[name] = error
        else:
            yield describe(name) | {"phase": EPOCH, "error": error, "check": checks}
    right = list(errors)
    training = _Training(point, recipe, data, right)
    path = checkpoints / point.id / "checkpoint.pt" if checkpoints else None
    rows = training.resume(load_checkpoint(path))
    if not rows:
        rows = [_peak_memory(name, recipe, data, point.seed) for name in right]
    yield from rows
    while training.epochs_done < point.epochs:
        epoch = [row | {"error": errors[row["implementation"]]} for row in training.epoch()]
        rows += epoch
        save_checkpoint(path, training.state(rows))
        yield from epoch


class _Training:
    """All implementations of one seed, epoch by epoch."""

    def __init__(self, point: TrainingPoint, recipe: Recipe, data: RankData, names: list[str]):
        self.point, self.data = point, data
        self.epochs_done = 0
        self._trainers = {name: Trainer(name, recipe, point.seed) for name in names}
        self._is_warm = False
        self._watch = Stopwatch(recipe.device)

    def epoch(self) -> list[dict[str, Any]]:
        """The next epoch of every implementation, in the order of the clock: the same after a resume."""
        epoch = self.epochs_done + 1
        turns = turn_order(self._trainers, epoch, seed=self.point.id)
        rows = [self._one_epoch(self._trainers[name], epoch) for name in turns]
        self.epochs_done, self._is_warm = epoch, True
        return rows

    def _one_epoch(self, trainer: Trainer, epoch: int) -> dict[str, Any]:
        with guarded_turn(trainer.implementation, trainer.recipe.device):
            return self._timed_epoch(trainer, epoch)

    def _timed_epoch(self, trainer: Trainer, epoch: int) -> dict[str, Any]:
        dist.barrier()
        self._watch.start()
        total, n_images = trainer.epoch(*self.data.training, self.point.seed, epoch)
        self._watch.stop()
        sums = torch.stack([total, torch.tensor(n_images).to(total)])
        dist.all_reduce(sums)
        loss, accuracy = trainer.validate(*self.data.validation, self.data.validated)
        row = describe(trainer.implementation) | {"phase": EPOCH, "check": "ok", "epoch": epoch}
        row |= {"epoch_s": self._watch.seconds[-1], "warm_up": not self._is_warm}
        if dist.get_rank() == 0:  # equal on all ranks: one tells
            row |= {"train_loss": float(sums[0] / sums[1]), "validation_loss": loss}
            row |= {"accuracy_percent": 100 * accuracy}
            row |= {"classes": self.data.classes, "trained": int(sums[1]), "validated": self.data.validated}
            row |= {"micro_batches": -(-n_images // self.point.batch)}
        return row

    def state(self, rows: list[dict[str, Any]]) -> dict[str, Any]:
        """For the checkpoint: the trainers', and the rows of every rank."""
        of_ranks = gather_json(rows)
        trainers = {name: trainer.state() for name, trainer in self._trainers.items()}
        return {"point": self.point.id, "epochs_done": self.epochs_done, "trainers": trainers, "rows": of_ranks}

    def resume(self, state: dict[str, Any] | None) -> list[dict[str, Any]]:
        """Go on from a checkpoint, if there is one of all these implementations; the rows of theirs that it holds."""
        if state is None or state["point"] != self.point.id:
            return []
        if not self._trainers.keys() <= state["trainers"].keys():
            return []
        for name, trainer in self._trainers.items():
            trainer.load(state["trainers"][name])
        self.epochs_done = state["epochs_done"]
        rows: list[dict[str, Any]] = state["rows"][dist.get_rank()]
        return [row for row in rows if row.get("implementation") in (None, *self._trainers)]


def first_updates_error(name: str, recipe: Recipe, data: RankData, seed: int, updates: int = GATE_UPDATES) -> float:
    """The gate: how far the first updates are from those of one process that has the images of all ranks.

    In float64 and without dropout. Largest deviation of a weight over the largest change of any, on the worst rank.
    Batch norm over all ranks is that of one process on the whole micro-batch; local batch norm that of one process
    which takes the ranks' micro-batches one by one.
    """
    ranks, rank = dist.get_world_size(), dist.get_rank()
    recipe = replace(recipe, dropout=False, dtype=torch.float64)
    alone = replace(recipe, batch=ranks * recipe.batch) if name in SYNCHRONIZED else recipe
    trainer, reference = Trainer(name, recipe, seed), Trainer(ALONE, alone, seed)
    before = _weights(reference)
    images, labels = data.training
    for update in _first(updates, len(images), recipe, seed):
        mine, everybody = update[:, rank].flatten(), update.flatten()
        trainer.update(images[mine], labels[mine])
        reference.update(images[everybody], labels[everybody])
    return largest_error([_weights(trainer) - before], [_weights(reference) - before])


def _first(updates: int, images: int, recipe: Recipe, seed: int) -> Iterator[Tensor]:
    """So many updates, over as many epochs as that takes."""
    epoch = 1
    while updates > 0:
        for update in updates_of(images, recipe, seed, epoch, dist.get_world_size()):
            if updates > 0:
                yield update
            updates -= 1
        epoch += 1


def _weights(trainer: Trainer) -> Tensor:
    """All in one: the bias before the batch norm has a gradient of zero, and rounding makes of that no measure."""
    return torch.cat([parameter.detach().flatten() for parameter in trainer.net.parameters()])


def _peak_memory(name: str, recipe: Recipe, data: RankData, seed: int) -> dict[str, Any]:
    """Peak of the allocator over an update, model and optimizer included, one implementation at a time."""
    update = next(updates_of(len(data.training[0]), recipe, seed, 1, dist.get_world_size()))
    mine = update[:, dist.get_rank()].flatten()
    images, labels = (part[mine] for part in data.training)
    dist.barrier()
    with guarded_turn(name, recipe.device):
        make = partial(Trainer, name, recipe, seed)
        peak_bytes = peak_of_second(make, lambda trainer: trainer.update(images, labels), device=recipe.device)
    return describe(name) | {"phase": MEMORY, "check": "ok", "peak_bytes": peak_bytes}
