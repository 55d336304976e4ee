"""Images to classify: CIFAR-100 from its binary archive, and the handwritten digits that scikit-learn carries.

    images = read_cifar100("cifar-100-binary.tar.gz")      a file that is there
    fetch_cifar100(directory)                              over the network, with its checksum
    images = digits()                                      1,797 real images, no network

CIFAR-100 (Krizhevsky 2009, "Learning multiple layers of features from tiny images"): a record is a coarse label, a fine
label and 3072 pixels, one byte each, planes red, green, blue. The archive is read into memory and unpacked nowhere;
what it holds is checked, and no more of it is decompressed than CIFAR-100 can have.
"""

import hashlib
import io
import tarfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from gzip import BadGzipFile, GzipFile
from pathlib import Path
from typing import BinaryIO

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
# By member of the archive: the most records it may have, which is what the official one has.
MEMBERS = {"cifar-100-binary/train.bin": 50_000, "cifar-100-binary/test.bin": 10_000}
MOST_BYTES = 2 * RECORD_BYTES * sum(MEMBERS.values())
DIGITS_TRAINING = 1437


class DatasetError(ValueError):
    """Data that is not what it should be; the message says what was expected and what was found."""


@dataclass(frozen=True)
class Images:
    """Images (N, 3, 32, 32) in uint8 and their classes (N,) in int64, for training and for validation."""

    name: str
    classes: int
    training: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]


def digits() -> Images:
    """scikit-learn's digits: 8x8 gray images, each pixel drawn as 4x4 equal ones in three equal channels.

    They lie in the order in which people wrote them; a fixed permutation decides which 1,437 are trained on and
    which 360 validate, so that both hold everybody's hand. (Alpaydin & Kaynak 1998, UCI; the test part.)
    """
    from sklearn.datasets import load_digits  # seconds to import: only where digits are wanted

    found = load_digits()
    pixels = np.rint(found.images * (255 / 16)).astype(np.uint8).repeat(4, axis=1).repeat(4, axis=2)
    images = torch.from_numpy(pixels)[:, None].repeat(1, 3, 1, 1)
    labels = torch.from_numpy(found.target.astype(np.int64))
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
        if size == CIFAR100_BYTES and (found := file_md5(path)) != CIFAR100_MD5:
            raise DatasetError(f"{path}: altered: expected the MD5 {CIFAR100_MD5} of the official archive, got {found}")
        with path.open("rb") as file:
            members = _read_members(path, file)
    except OSError as error:
        raise DatasetError(f"{path}: cannot be read: {error.strerror or error}") from None
    training, validation = (_records(path, name, members[name]) for name in MEMBERS)
    return Images("CIFAR-100", CIFAR100_CLASSES, training, validation)


def file_md5(path: Path) -> str:
    """Identifies an archive; no defense against somebody who forges one."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def fetch_cifar100(directory: Path, say: Callable[[str], None] = lambda text: None, url: str = CIFAR100_URL) -> Path:
    """The official archive in `directory`, downloaded if it is not there; `say` hears how far it is.

    Whatever the download holds, a file with the right checksum or none at all is left. Raises DatasetError for another
    checksum, ConnectionError if it cannot be had.
    """
    import pooch
    import requests

    pooch.get_logger().setLevel("ERROR")
    path, known = directory / CIFAR100_FILE, f"md5:{CIFAR100_MD5}"
    download = pooch.HTTPDownloader(progressbar=_Tell(say), timeout=30)
    try:
        return Path(pooch.retrieve(url, known, fname=path.name, path=directory, downloader=download))
    except ValueError as error:
        raise DatasetError(f"{url}: not the file that was published: {error}") from None
    except (requests.RequestException, OSError) as error:
        raise ConnectionError(f"{url} cannot be had: {_first_cause(error)}") from None


class _Tell:
    """What pooch takes for a progress bar: every percent is said."""

    def __init__(self, say: Callable[[str], None]):
        self.total, self._done, self._said, self._say = 0, 0, -1, say

    def update(self, n_bytes: int) -> None:
        self._done += n_bytes
        percent = 100 * self._done // max(1, int(self.total))
        if percent != self._said:
            self._said = percent
            self._say(f"fetching CIFAR-100: {percent} % of {int(self.total) / 1e6:.0f} MB")

    def reset(self) -> None:
        self._done = 0

    def close(self) -> None:
        """Nothing to close."""


def _read_members(path: Path, file: BinaryIO) -> dict[str, bytes]:
    """Contents by name of the two members, and nothing else; the checksum of the compressed file is checked too."""
    found: dict[str, bytes] = {}
    try:
        unpacked = GzipFile(fileobj=file, mode="rb").read(MOST_BYTES + 1)  # to the end, where gzip keeps its checksum
        if len(unpacked) > MOST_BYTES:
            raise DatasetError(f"expected at most {MOST_BYTES:,} bytes once decompressed, and there are more")
        with tarfile.open(fileobj=io.BytesIO(unpacked), mode="r:") as archive:
            for member in archive:
                name = member.name.removeprefix("./")
                if name in MEMBERS:
                    if name in found:
                        raise DatasetError(f"{name} is there twice")
                    found[name] = _content(archive, member, name)
    except (EOFError, tarfile.ReadError) as error:
        raise DatasetError(
            f"{path}: cut short, or no .tar.gz: expected {', '.join(MEMBERS)}, got {path.stat().st_size:,} bytes "
            f"that cannot be unpacked ({error}); the official archive has {CIFAR100_BYTES:,} bytes"
        ) from None
    except (BadGzipFile, zlib.error, tarfile.TarError) as error:
        raise DatasetError(f"{path}: altered, or no .tar.gz: {error}") from None
    except DatasetError as error:
        raise DatasetError(f"{path}: {error}") from None
    if missing := [name for name in MEMBERS if name not in found]:
        raise DatasetError(f"{path}: expected {' and '.join(MEMBERS)} inside, got no {' and no '.join(missing)}")
    return found


def _content(archive: tarfile.TarFile, member: tarfile.TarInfo, name: str) -> bytes:
    """A member as bytes, after a look at its size."""
    records, rest = divmod(member.size, RECORD_BYTES)
    if not member.isreg() or rest or not 1 <= records <= MEMBERS[name]:
        found = f"{member.size:,} bytes" if member.isreg() else "no regular file"
        raise DatasetError(f"{name}: expected 1 to {MEMBERS[name]:,} records of {RECORD_BYTES} bytes, got {found}")
    content = archive.extractfile(member)
    assert content is not None, "a regular file has a content"
    return content.read()


def _records(path: Path, name: str, content: bytes) -> tuple[Tensor, Tensor]:
    table = np.frombuffer(content, np.uint8).reshape(-1, RECORD_BYTES)
    for column, kind, bound in ((0, "coarse", COARSE_CLASSES), (1, "fine", CIFAR100_CLASSES)):
        if (wrong := table[:, column] >= bound).any():
            first = int(wrong.argmax())
            raise DatasetError(
                f"{path}: {name}, record {first}: expected a {kind} label below {bound}, got {table[first, column]}"
            )
    pixels = torch.from_numpy(table[:, 2:].copy()).view(-1, 3, SIDE, SIDE)
    return pixels, torch.from_numpy(table[:, 1].astype(np.int64))


def _first_cause(error: BaseException) -> str:
    """What is behind a chain of wrapped errors, in its own words."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return str(error)
