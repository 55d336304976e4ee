"""Trains the net with one implementation: updates, accumulation, validation.

Initial weights, the order of images and dropout's masks depend on seed, epoch and rank alone. So
all implementations of a seed see the same, and a resumed training needs no state of a random
generator, only weights, running statistics and momentum.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from labkit.nn.vision import SmallConvNet
from labkit.parallel.data_parallel import TORCH, BucketedDDP, wrap
from labkit.parallel.sync_batchnorm import convert_sync_batchnorm

OWN_SYNC = "own + SyncBatchNorm"
OWN_LOCAL = "own + BatchNorm"
TORCH_SYNC = "torch + SyncBatchNorm"
TORCH_LOCAL = "torch + BatchNorm"
ALONE = "one process"
MAX_VALIDATED = 500  # images in one forward pass


_MODELS: dict[str, Callable[[nn.Module], nn.Module]] = {
    OWN_SYNC: lambda model: BucketedDDP(convert_sync_batchnorm(model)),
    OWN_LOCAL: BucketedDDP,
    TORCH_SYNC: lambda model: wrap(TORCH, nn.SyncBatchNorm.convert_sync_batchnorm(model)),
    TORCH_LOCAL: partial(wrap, TORCH),
    ALONE: lambda model: model,
}
IMPLEMENTATIONS = (OWN_SYNC, OWN_LOCAL, TORCH_SYNC, TORCH_LOCAL)
SYNCHRONIZED = (OWN_SYNC, TORCH_SYNC)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Hyperparameters of a training, the same for all implementations."""

    classes: int
    batch: int
    """Images of a micro-batch on one rank."""
    accumulation: int
    """Micro-batches per update; ranks synchronize at the last one."""
    learning_rate: float = 0.01
    momentum: float = 0.5
    dropout: bool = True
    dtype: torch.dtype = torch.float32
    device: str = "cpu"


class Trainer:
    """The net under one wrapper with its optimizer. All ranks build it, in the same order."""

    def __init__(self, implementation: str, recipe: Recipe, seed: int):
        self.implementation = implementation
        self.recipe = recipe
        # A seed per purpose: another number of draws for one does not change the others.
        torch.manual_seed(seed_of(seed, "weights"))
        dropout = {} if recipe.dropout else {"dropout": (0.0, 0.0)}
        net: nn.Module = SmallConvNet(recipe.classes, **dropout).to(
            device=recipe.device, dtype=recipe.dtype
        )
        self.model: Any = _MODELS[implementation](net)
        self.net = net
        self.optimizer = torch.optim.SGD(
            self.net.parameters(), lr=recipe.learning_rate, momentum=recipe.momentum
        )

    def update(self, images: Tensor, labels: Tensor) -> Tensor:
        """Take one optimizer step on this rank's images; return the sum of their losses.

        The loss is the mean over the images of all ranks, which have equally many.
        """
        self.model.train()
        # On the device: reading each loss would make the CPU wait for every pass.
        total = torch.zeros((), dtype=torch.float64, device=self.recipe.device)
        size = self.recipe.batch
        batches = list(zip(images.split(size), labels.split(size), strict=True))
        for index, (x, y) in enumerate(batches):
            # Ranks synchronize at the last micro-batch; one alone has nobody to wait for.
            is_silent = index < len(batches) - 1 and self.implementation != ALONE
            with self.model.no_sync() if is_silent else nullcontext():
                outputs = self.model(self._pixels(x))
                loss = cross_entropy(outputs, y.to(self.recipe.device), reduction="sum")
                (loss / len(images)).backward()
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def epoch(self, images: Tensor, labels: Tensor, seed: int, epoch: int) -> tuple[Tensor, int]:
        """Train one epoch on this rank's part of the images.

        Return the sum of its losses, and the number of images.
        """
        torch.manual_seed(seed_of(seed, "dropout", epoch, dist.get_rank()))
        total = torch.zeros((), dtype=torch.float64, device=self.recipe.device)
        n_images = 0
        for update in updates_of(len(images), self.recipe, seed, epoch, dist.get_world_size()):
            mine = update[:, dist.get_rank()].flatten()
            total += self.update(images[mine], labels[mine])
            n_images += len(mine)
        return total, n_images

    @torch.no_grad()
    def validate(self, images: Tensor, labels: Tensor, total: int) -> tuple[float, float]:
        """Return (loss, accuracy) over the shards of all ranks, `total` images together."""
        self.model.eval()
        # Sums, not means: the shards of the last ranks may have fewer images.
        sums = torch.zeros(3, dtype=torch.float64, device=self.recipe.device)
        # Equally many passes on every rank: a wrapper may synchronize buffers in each.
        passes = -(-total // (dist.get_world_size() * MAX_VALIDATED))
        for x, y in zip(images.tensor_split(passes), labels.tensor_split(passes), strict=True):
            add_to_sums(sums, self.model(self._pixels(x)), y.to(self.recipe.device))
        dist.all_reduce(sums)
        loss, correct, count = sums.tolist()
        return loss / count, correct / count

    def state(self) -> dict[str, Any]:
        """Return the state on which the next epoch depends, equal on all ranks after `validate`."""
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _pixels(self, images: Tensor) -> Tensor:
        """Convert uint8 to floats from -1 to 1, on the device."""
        return images.to(self.recipe.device).to(self.recipe.dtype).sub_(127.5).div_(127.5)


def add_to_sums(sums: Tensor, logits: Tensor, target: Tensor) -> None:
    """Add to `sums` (3,), in place: losses, the number of correct images, and of all."""
    # One by one: a count in main memory cannot be stacked with numbers on a GPU.
    sums[0] += cross_entropy(logits, target, reduction="sum")
    sums[1] += (logits.argmax(1) == target).sum()
    sums[2] += len(target)


def updates_of(images: int, recipe: Recipe, seed: int, epoch: int, ranks: int) -> Iterator[Tensor]:
    """Yield indices of the images of each update, (micro-batches, ranks, batch).

    In another order every epoch.

    Ranks get equally many whole micro-batches; a few images are left over. The last update of an
    epoch may have fewer micro-batches than the others. ValueError for fewer than two images per
    rank.
    """
    batch = min(recipe.batch, images // ranks)
    if batch < 2:  # batch norm needs more than one
        raise ValueError(f"expected at least two images per rank, got {images} for {ranks} ranks")
    order = torch.randperm(
        images, generator=torch.Generator().manual_seed(seed_of(seed, "order", epoch))
    )
    count = images // (ranks * batch)
    yield from order[: count * ranks * batch].view(count, ranks, batch).split(recipe.accumulation)


def seed_of(*parts: object) -> int:
    """Return a seed of 63 bits from its purpose; nearby numbers give unrelated seeds."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8]) >> 1
