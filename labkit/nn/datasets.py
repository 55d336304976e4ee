"""Images to classify: CIFAR-100 from its binary archive, and the handwritten digits that scikit-learn carries.

CIFAR-100 (Krizhevsky 2009, "Learning multiple layers of features from tiny images"): a record is a coarse label, a fine
label and 3072 pixels, one byte each, planes red, green, blue. The archive is read into memory and never unpacked to
disk; its contents are checked, and no more of it is decompressed than CIFAR-100 can have.
"""

import hashlib
import io
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from gzip import BadGzipFile, GzipFile
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

SIDE = 32
CIFAR100_URL = "https://www.cs.toronto.edu/~kriz/cifar-100-binary.tar.gz"
CIFAR100_FILE = "cifar-100-binary.tar.gz"
CIFAR100_MD5 = "03b5dce01913d631647c71ecec9e9cb8"
CIFAR100_BYTES = 168_513_733
CIFAR100_CLASSES, COARSE_CLASSES = 100, 20
RECORD_BYTES = 2 + 3 * SIDE * SIDE
# Records of the official archive by member: no other may have more.
MEMBERS = {"cifar-100-binary/train.bin": 50_000, "cifar-100-binary/test.bin": 10_000}
MAX_BYTES = 2 * RECORD_BYTES * sum(MEMBERS.values())
DIGITS_TRAINING = 1437


class DatasetError(ValueError):
    """Data that differs from the format; the message names the expected and the actual."""


@dataclass(frozen=True)
class Images:
    """Images (N, 3, 32, 32) in uint8 and their classes (N,) in int64, for training and for validation."""

    name: str
    classes: int
    training: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]


def digits() -> Images:
    """scikit-learn's digits: 8x8 gray images, each pixel as 4x4 equal ones in three equal channels.

    They are ordered by writer; a fixed permutation makes 1,437 the training set and 360 the validation set, so that
    both hold every writer. (Alpaydin & Kaynak 1998, UCI; the test part.)
    """
    from sklearn.datasets import load_digits  # takes seconds to import

    data = load_digits()
    pixels = np.rint(data.images * (255 / 16)).astype(np.uint8).repeat(4, axis=1).repeat(4, axis=2)
    images = torch.from_numpy(pixels)[:, None].repeat(1, 3, 1, 1)
    labels = torch.from_numpy(data.target.astype(np.int64))
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    training, validation = order[:DIGITS_TRAINING], order[DIGITS_TRAINING:]
    return Images("digits", 10, (images[training], labels[training]), (images[validation], labels[validation]))


def read_cifar100(path: Path | str) -> Images:
    """CIFAR-100 with its fine labels, from an archive in the format of the official one.

    Fewer records than the official one has are fine. Raises DatasetError for a file that cannot be read, is cut short
    or altered, or holds anything but records; a file of the official size must have the official checksum.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if size == CIFAR100_BYTES and (md5 := file_md5(path)) != CIFAR100_MD5:
            raise DatasetError(f"altered: expected the MD5 {CIFAR100_MD5} of the official archive, got {md5}")
        members = _read_members(path)
        training, validation = (_parse_records(name, members[name]) for name in MEMBERS)
    except DatasetError as error:
        raise DatasetError(f"{path}: {error}") from None
    except (EOFError, zlib.error, tarfile.TarError, BadGzipFile) as error:
        raise DatasetError(
            f"{path}: cut short, altered, or no .tar.gz: got {size:,} bytes that cannot be unpacked ({error}); "
            f"the official archive has {CIFAR100_BYTES:,} bytes"
        ) from None
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error.strerror or error}") from None
    return Images("CIFAR-100", CIFAR100_CLASSES, training, validation)


def file_md5(path: Path) -> str:
    """Identifies an archive; no defense against forgery."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def fetch_cifar100(directory: Path, say: Callable[[str], None] = lambda text: None, url: str = CIFAR100_URL) -> Path:
    """Download the official archive to `directory` unless it is there; `say` gets the progress.

    Only a file with the right checksum is kept. Raises DatasetError for another checksum, ConnectionError if the
    download fails.
    """
    import pooch
    import requests

    pooch.get_logger().setLevel("ERROR")
    download = pooch.HTTPDownloader(progressbar=_Progress(say), timeout=30)
    try:
        path = pooch.retrieve(url, f"md5:{CIFAR100_MD5}", CIFAR100_FILE, directory, downloader=download)
    except ValueError as error:
        raise DatasetError(f"{url}: not the file that was published: {error}") from None
    except (requests.RequestException, OSError) as error:
        raise ConnectionError(f"{url} cannot be downloaded: {error}") from None
    return Path(path)


class _Progress:
    """A progress bar, as pooch expects one, that says every percent."""

    def __init__(self, say: Callable[[str], None]):
        self.total, self._done, self._say = 0, 0, say

    def update(self, n_bytes: int) -> None:
        before, self._done = self._done, self._done + n_bytes
        percent, percent_before = (100 * done // max(1, int(self.total)) for done in (self._done, before))
        if percent != percent_before:
            self._say(f"fetching CIFAR-100: {percent}% of {int(self.total) / 1e6:.0f} MB")

    def reset(self) -> None:
        self._done = 0

    def close(self) -> None:
        """Do nothing."""


def _read_members(path: Path) -> dict[str, bytes]:
    """Contents of the two members by name; the checksum of the compressed file is verified, too."""
    with GzipFile(path) as file:
        unpacked = file.read(MAX_BYTES + 1)  # to the end, where gzip keeps its checksum
    if len(unpacked) > MAX_BYTES:
        raise DatasetError(f"expected at most {MAX_BYTES:,} bytes once decompressed, got more")
    contents: dict[str, bytes] = {}
    with tarfile.open(fileobj=io.BytesIO(unpacked), mode="r:") as archive:
        for member in archive:
            if (name := member.name.removeprefix("./")) not in MEMBERS:
                continue
            content = archive.extractfile(member) if member.isreg() else None
            if name in contents or content is None:
                raise DatasetError(f"{name}: expected one regular file")
            contents[name] = content.read()
    if missing := [name for name in MEMBERS if name not in contents]:
        raise DatasetError(f"expected {' and '.join(MEMBERS)} inside, got no {' and no '.join(missing)}")
    return contents


def _parse_records(name: str, content: bytes) -> tuple[Tensor, Tensor]:
    """Images (N, 3, 32, 32) and fine labels (N,)."""
    if len(content) % RECORD_BYTES or not 1 <= len(content) // RECORD_BYTES <= MEMBERS[name]:
        expected = f"expected 1 to {MEMBERS[name]:,} records of {RECORD_BYTES} bytes"
        raise DatasetError(f"{name}: {expected}, got {len(content):,} bytes")
    table = np.frombuffer(content, np.uint8).reshape(-1, RECORD_BYTES)
    for column, kind, bound in ((0, "coarse", COARSE_CLASSES), (1, "fine", CIFAR100_CLASSES)):
        if (wrong := table[:, column] >= bound).any():
            first = int(wrong.argmax())
            expected = f"expected a {kind} label below {bound}"
            raise DatasetError(f"{name}, record {first}: {expected}, got {table[first, column]}")
    pixels = torch.from_numpy(table[:, 2:].copy()).view(-1, 3, SIDE, SIDE)
    return pixels, torch.from_numpy(table[:, 1].astype(np.int64))
