"""Images to classify: CIFAR-100 from its binary archive, and scikit-learn's digits.

CIFAR-100 (Krizhevsky 2009, "Learning multiple layers of features from tiny images"): a record is a
coarse label, a fine label and 3072 pixels, one byte each, planes red, green, blue.
"""

import hashlib
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from gzip import GzipFile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

SIDE = 32
CIFAR100_URL = "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz"
CIFAR100_FILE = "cifar-100-binary.tar.gz"
CIFAR100_MD5 = "03b5dce01913d631647c71ecec9e9cb8"
CIFAR100_BYTES = 168_513_733
CLASSES = 100
RECORD_BYTES = 2 + 3 * SIDE * SIDE
MAX_RECORDS = {"cifar-100-binary/train.bin": 50_000, "cifar-100-binary/test.bin": 10_000}
DIGITS_TRAINING = 1437


class DatasetError(ValueError):
    """Data that differs from the format; the message names the expected and the actual."""


@dataclass(frozen=True)
class Images:
    """Images (N, 3, 32, 32), uint8, and classes (N,), int64, for training and validation."""

    name: str
    classes: int
    training: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]


def digits() -> Images:
    """Return scikit-learn's digits: 8x8 gray images, each pixel 4x4 equal ones in three channels.

    Source: Alpaydin & Kaynak 1998, UCI; the test part. 1,437 are for training and 360 for
    validation.
    """
    from sklearn.datasets import load_digits  # takes seconds to import

    data = load_digits()
    pixels = np.rint(data.images * (255 / 16)).astype(np.uint8).repeat(4, axis=1).repeat(4, axis=2)
    images = torch.from_numpy(pixels)[:, None].repeat(1, 3, 1, 1)
    labels = torch.from_numpy(data.target.astype(np.int64))
    # They are ordered by writer; after a fixed permutation both sets have every writer.
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    training = order[:DIGITS_TRAINING]
    validation = order[DIGITS_TRAINING:]
    return Images(
        "digits", 10, (images[training], labels[training]), (images[validation], labels[validation])
    )


def read_cifar100(path: Path | str) -> Images:
    """Read CIFAR-100 with its fine labels from an archive like the official one, or a shorter one.

    DatasetError for a file that cannot be read, is cut short or altered, or holds anything but
    records.
    """
    parts: dict[str, tuple[Tensor, Tensor]] = {}
    try:
        with GzipFile(path) as file, tarfile.open(fileobj=file, mode="r|") as archive:
            for member in archive:
                name = member.name.removeprefix("./")
                if name in MAX_RECORDS and member.isreg():
                    parts[name] = _read_records(
                        f"{path}: {name}",
                        member.size,
                        MAX_RECORDS[name],
                        archive.extractfile(member),
                    )
            # To the end, where gzip keeps its checksum.
            while file.read(2**20):
                pass
    except (OSError, EOFError, zlib.error, tarfile.TarError) as error:
        official = f"the official archive has {CIFAR100_BYTES:,} bytes"
        raise DatasetError(
            f"{path}: cannot be read as a whole .tar.gz ({error}); {official}"
        ) from None
    missing = [name for name in MAX_RECORDS if name not in parts]
    if missing:
        expected = " and ".join(MAX_RECORDS)
        raise DatasetError(f"{path}: expected {expected} inside, got no {' and no '.join(missing)}")
    return Images("CIFAR-100", CLASSES, *(parts[name] for name in MAX_RECORDS))


def file_md5(path: Path) -> str:
    """Return the checksum that identifies an archive; no defense against forgery."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def fetch_cifar100(
    directory: Path, say: Callable[[str], None] = lambda text: None, url: str = CIFAR100_URL
) -> Path:
    """Download the official archive to `directory` unless it is there; `say` gets a line before.

    DatasetError for another checksum, ConnectionError if the download fails.
    """
    import pooch

    # It would report what `say` does, on stderr.
    pooch.get_logger().setLevel("ERROR")
    if not (directory / CIFAR100_FILE).exists():
        say(f"fetching CIFAR-100, {CIFAR100_BYTES / 1e6:.0f} MB")
    try:
        download = pooch.HTTPDownloader(timeout=30)
        return Path(
            pooch.retrieve(
                url, f"md5:{CIFAR100_MD5}", CIFAR100_FILE, directory, downloader=download
            )
        )
    except ValueError as error:
        raise DatasetError(f"{url}: not the file that was published: {error}") from None
    except OSError as error:  # those of requests, too
        raise ConnectionError(f"{url} cannot be downloaded: {error}") from None


def _read_records(name: str, size: int, most: int, file: Any) -> tuple[Tensor, Tensor]:
    """Read images (N, 3, 32, 32) and fine labels (N,) of a member of at most `most` records."""
    # The header's size is checked before it is read: a file may claim any.
    if size % RECORD_BYTES or not 1 <= size // RECORD_BYTES <= most:
        raise DatasetError(
            f"{name}: expected 1 to {most:,} records of {RECORD_BYTES} bytes, got {size:,} bytes"
        )
    table = np.frombuffer(file.read(), np.uint8).reshape(-1, RECORD_BYTES)
    largest = table[:, 1].max()
    if largest >= CLASSES:
        raise DatasetError(f"{name}: expected fine labels below {CLASSES}, got {largest}")
    pixels = torch.from_numpy(table[:, 2:].copy()).view(-1, 3, SIDE, SIDE)
    return pixels, torch.from_numpy(table[:, 1].astype(np.int64))
