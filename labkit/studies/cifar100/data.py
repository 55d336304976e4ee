"""The images of a point: every rank reads them, and has the training set and its shard of the validation set."""

from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from labkit.lab.project import datasets_directory
from labkit.nn.datasets import CIFAR100_FILE, DatasetError, Images, digits, file_md5, read_cifar100

DIGITS, CIFAR100 = "digits", "cifar100"


@dataclass(frozen=True)
class RankData:
    """The data of one rank: images (N, 3, 32, 32) in uint8 and classes (N,) in int64, on the CPU."""

    classes: int
    training: tuple[Tensor, Tensor]
    """The whole training set: a rank takes other images in each epoch."""
    validation: tuple[Tensor, Tensor]
    """This rank's shard, ceil(N / ranks) images; the last ranks may have fewer or none."""
    validated: int
    """Validation images in the shards of all ranks."""


def read_data(dataset: str, archive: str | None, max_images: int | None, *, md5: str | None = None) -> RankData:
    """Read the digits, or CIFAR-100 from `archive` or the archive that was fetched; the first `max_images` are trained.

    DatasetError for a bad archive, or one with another checksum than `md5`.
    """
    images = digits() if dataset == DIGITS else _read_archive(archive, md5)
    validated = len(images.validation[1])
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
        raise DatasetError(f"{path}: not the archive that was there at the beginning: expected MD5 {md5}, got {actual}")
    return read_cifar100(path)
