"""A small archive in the format of CIFAR-100's, sound or with something wrong."""

import io
import tarfile

import numpy as np

from labkit.nn.datasets import RECORD_BYTES

TRAIN = "cifar-100-binary/train.bin"
TEST = "cifar-100-binary/test.bin"


def records(number, *, seed=0, classes=100):
    """Records with random labels; pixels that depend on the class, so that something can be
    learned."""
    generator = np.random.default_rng(seed)
    table = generator.integers(0, 256, (number, RECORD_BYTES), dtype=np.uint8)
    table[:, 1] = generator.integers(0, classes, number)
    table[:, 0] = table[:, 1] % 20
    table[:, 2:1026] = table[:, 1:2] * 2
    return table


def write_archive(path, members=None):
    """`members`: contents by name, or a `TarInfo` (a link, say) instead of a content."""
    if members is None:
        members = {TRAIN: records(48).tobytes(), TEST: records(10, seed=1).tobytes()}
    with tarfile.open(path, "w:gz") as archive:
        for name, content in members.items() if isinstance(members, dict) else members:
            if isinstance(content, tarfile.TarInfo):
                archive.addfile(content)
                continue
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path
