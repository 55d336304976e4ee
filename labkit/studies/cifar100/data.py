"""Distributes the images of a point: rank 0 reads and checks them, all ranks get the training set and their shard."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from labkit.lab.project import datasets_directory
from labkit.nn.datasets import CIFAR100_FILE, DatasetError, Images, digits, file_md5, read_cifar100
from labkit.parallel.ranks.messages import gather_json

DIGITS, CIFAR100 = "digits", "cifar100"
# Shape and dtype of an image and of a class.
PARTS: tuple[tuple[tuple[int, ...], torch.dtype], ...] = (((3, 32, 32), torch.uint8), ((), torch.int64))


@dataclass(frozen=True)
class RankData:
    """The data of one rank: images (N, 3, 32, 32) in uint8 and classes (N,) in int64, on the CPU."""

    classes: int
    training: tuple[Tensor, Tensor]
    """The whole training set: a rank takes other images in each epoch."""
    validation: tuple[Tensor, Tensor]
    """This rank's shard."""
    validated: int
    """Validation images in the shards of all ranks."""


def load_images(dataset: str, archive: str | None, md5: str | None) -> Images:
    """Load the digits, or CIFAR-100 from `archive` or the archive that was fetched.

    DatasetError for a bad archive, or one with another checksum than `md5`.
    """
    if dataset == DIGITS:
        return digits()
    path = Path(archive) if archive else datasets_directory() / CIFAR100_FILE
    try:
        actual = file_md5(path)
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error.strerror or error}") from None
    if md5 is not None and actual != md5:
        raise DatasetError(f"{path}: not the archive that was there at the beginning: expected MD5 {md5}, got {actual}")
    return read_cifar100(path)


def distribute(
    dataset: str, archive: str | None, max_images: int | None, device: str, *, md5: str | None = None
) -> RankData:
    """Read on rank 0, broadcast the training set (its first `max_images`), scatter the validation set.

    DatasetError on rank 0 if it cannot read the data. Tensors travel on the device, as NCCL requires.
    """
    images = load_images(dataset, archive, md5) if dist.get_rank() == 0 else None
    about: dict[str, int] = {}
    if images is not None:
        about = {"classes": images.classes, "validated": len(images.validation[1])}
        about["trained"] = len(images.training[1][:max_images])
    about = gather_json(about)[0]
    training, validation = list[Tensor](), list[Tensor]()
    for part, (shape, dtype) in enumerate(PARTS):
        whole, held_out = (images.training[part][:max_images], images.validation[part]) if images else (None, None)
        training.append(_broadcast(whole, (about["trained"], *shape), dtype, device))
        validation.append(_scatter(held_out, (about["validated"], *shape), dtype, device))
    return RankData(about["classes"], (training[0], training[1]), (validation[0], validation[1]), about["validated"])


def _broadcast(tensor: Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    """Rank 0's tensor, on every rank."""
    travels = torch.empty(tuple(shape), dtype=dtype, device=device) if tensor is None else tensor.to(device)
    dist.broadcast(travels.contiguous(), src=0)
    return travels.cpu()


def _scatter(tensor: Tensor | None, shape: Sequence[int], dtype: torch.dtype, device: str) -> Tensor:
    """This rank's shard of rank 0's tensor, ceil(N / ranks) rows; the last ranks may have fewer or none."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    rows = -(-shape[0] // ranks)
    shard = torch.empty((rows, *shape[1:]), dtype=dtype, device=device)
    pieces = None
    if tensor is not None:  # pieces are equal: the last ones are padded, and the padding cut off below
        padded = torch.cat([tensor, tensor.new_zeros(rows * ranks - shape[0], *shape[1:])])
        pieces = list(padded.to(device).split(rows))
    dist.scatter(shard, pieces, src=0)
    return shard[: max(0, min(rows, shape[0] - rank * rows))].cpu()
