"""How one implementation trains: which images an update sees, accumulation, dropout's randomness, validation.

Everything random is a function of the seed, the epoch and the rank: weights at the start, the order of images,
dropout's masks. So implementations of one seed see the same, and a training that goes on from the end of an epoch needs
no state of a random generator: weights, running statistics and momentum are all there is.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from labkit.nn.vision import SmallConvNet
from labkit.parallel.data_parallel import BucketedDDP
from labkit.parallel.sync_batchnorm import convert_sync_batchnorm

OWN_SYNC, OWN_LOCAL = "own + SyncBatchNorm", "own + BatchNorm"
TORCH_SYNC, TORCH_LOCAL = "torch + SyncBatchNorm", "torch + BatchNorm"
ALONE = "one process"
MOST_VALIDATED = 500  # images in one forward pass


def _torch_ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


# Wrapper, and whether batch norm looks at the batches of all ranks.
_MODELS: MappingProxyType[str, Callable[[nn.Module], nn.Module]] = MappingProxyType(
    {
        OWN_SYNC: lambda model: BucketedDDP(convert_sync_batchnorm(model)),
        OWN_LOCAL: BucketedDDP,
        TORCH_SYNC: lambda model: _torch_ddp(nn.SyncBatchNorm.convert_sync_batchnorm(model)),
        TORCH_LOCAL: _torch_ddp,
        ALONE: lambda model: model,
    }
)
IMPLEMENTATIONS = (OWN_SYNC, OWN_LOCAL, TORCH_SYNC, TORCH_LOCAL)
SYNCHRONIZED = (OWN_SYNC, TORCH_SYNC)


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """What is trained and how; the same for all implementations."""

    classes: int
    batch: int
    """Images of a micro-batch on one rank."""
    accumulation: int
    """Micro-batches of an update; ranks synchronize at the last one."""
    learning_rate: float = 0.01
    momentum: float = 0.5
    dropout: bool = True
    dtype: torch.dtype = torch.float32
    device: str = "cpu"


class Trainer:
    """The net under one wrapper with its optimizer. Every rank makes it, in the same order."""

    def __init__(self, implementation: str, recipe: Recipe, seed: int):
        self.implementation, self.recipe = implementation, recipe
        torch.manual_seed(seed_of(seed, "weights"))
        dropout = {} if recipe.dropout else {"dropout": (0.0, 0.0)}
        net: nn.Module = SmallConvNet(recipe.classes, **dropout).to(device=recipe.device, dtype=recipe.dtype)
        self.model: Any = _MODELS[implementation](net)
        self.net = net
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=recipe.learning_rate, momentum=recipe.momentum)

    def update(self, images: Tensor, labels: Tensor) -> Tensor:
        """One step of the optimizer from this rank's images, micro-batch by micro-batch; the sum of their losses.

        Gradients are those of the mean loss over all images of all ranks; ranks bring equally many.
        """
        self.model.train()
        total = torch.zeros((), dtype=torch.float64, device=self.recipe.device)
        batches = list(zip(images.split(self.recipe.batch), labels.split(self.recipe.batch), strict=True))
        for index, (x, y) in enumerate(batches):
            alone = self.implementation == ALONE
            with nullcontext() if alone or index == len(batches) - 1 else self.model.no_sync():
                loss = cross_entropy(self.model(self._pixels(x)), y.to(self.recipe.device), reduction="sum")
                (loss / len(images)).backward()
            total += loss.detach()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def epoch(self, images: Tensor, labels: Tensor, seed: int, epoch: int) -> tuple[Tensor, int]:
        """One epoch over the images of all ranks, of which this rank takes its part: sum of losses, and of how many."""
        torch.manual_seed(seed_of(seed, "dropout", epoch, dist.get_rank()))
        total, n_images = torch.zeros((), dtype=torch.float64, device=self.recipe.device), 0
        for update in updates_of(len(images), self.recipe, seed, epoch, dist.get_world_size()):
            mine = update[:, dist.get_rank()].flatten()
            total += self.update(images[mine], labels[mine])
            n_images += len(mine)
        return total, n_images

    @torch.no_grad()
    def validate(self, images: Tensor, labels: Tensor, of_all: int) -> tuple[float, float]:
        """(loss, accuracy) over the shards of all ranks, which hold `of_all` images together."""
        self.model.eval()
        sums = torch.zeros(3, dtype=torch.float64, device=self.recipe.device)
        # As many passes on every rank: a wrapper may synchronize buffers in each.
        passes = -(-of_all // (dist.get_world_size() * MOST_VALIDATED))
        for x, y in zip(images.tensor_split(passes), labels.tensor_split(passes), strict=True):
            add_to_sums(sums, self.model(self._pixels(x)), y.to(self.recipe.device))
        dist.all_reduce(sums)
        loss, correct, count = sums.tolist()
        return loss / count, correct / count

    def state(self) -> dict[str, Any]:
        """All that the next epoch depends on; equal on all ranks after `validate`."""
        return {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.net.load_state_dict(state["net"])
        self.optimizer.load_state_dict(state["optimizer"])

    def _pixels(self, images: Tensor) -> Tensor:
        """uint8 to numbers from -1 to 1."""
        return images.to(self.recipe.device).to(self.recipe.dtype).sub_(127.5).div_(127.5)


def add_to_sums(sums: Tensor, logits: Tensor, target: Tensor) -> None:
    """Add to `sums` (3,), in place: the losses of these images, how many are right, how many there are.

    All on one device: a count in main memory cannot be stacked with numbers on a GPU.
    """
    sums[0] += cross_entropy(logits, target, reduction="sum")
    sums[1] += (logits.argmax(1) == target).sum()
    sums[2] += len(target)


def updates_of(images: int, recipe: Recipe, seed: int, epoch: int, ranks: int) -> Iterator[Tensor]:
    """Which images each update of an epoch sees, (micro-batches, ranks, batch): an order of its own every epoch.

    Ranks get equally many whole micro-batches; the few images that are left over have their turn in another epoch. The
    last update of an epoch may have fewer micro-batches than the others. ValueError for fewer than two images a rank.
    """
    batch = min(recipe.batch, images // ranks)
    if batch < 2:  # batch norm wants more than one
        raise ValueError(f"expected at least two images a rank, got {images} for {ranks} ranks")
    order = torch.randperm(images, generator=torch.Generator().manual_seed(seed_of(seed, "order", epoch)))
    count = images // (ranks * batch)
    yield from order[: count * ranks * batch].view(count, ranks, batch).split(recipe.accumulation)


def seed_of(*parts: object) -> int:
    """A seed of 63 bits from what it is for; nearby numbers give unrelated ones."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8]) >> 1
