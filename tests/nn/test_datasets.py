"""CIFAR-100's archive is read right, or refused with a clear reason; the digits are what they
are."""

import http.server
import tarfile
import threading
from functools import partial

import pytest
import torch

from labkit.nn import datasets
from labkit.nn.datasets import (
    CIFAR100_BYTES,
    RECORD_BYTES,
    DatasetError,
    digits,
    fetch_cifar100,
    read_cifar100,
)
from tests.nn.cifar_archive import TEST, TRAIN, records, write_archive


def test_records_become_images_and_fine_labels(tmp_path):
    images = read_cifar100(write_archive(tmp_path / "a.tar.gz"))
    assert images.classes == 100
    for (pixels, labels), table in zip(
        (images.training, images.validation), (records(48), records(10, seed=1)), strict=True
    ):
        assert pixels.shape == (len(table), 3, 32, 32)
        assert (pixels.dtype, labels.dtype) == (torch.uint8, torch.int64)
        assert labels.tolist() == table[:, 1].tolist()
        # plane by plane, row by row
        assert pixels[5, 2, 31, 30] == table[5, 2 + 2 * 1024 + 31 * 32 + 30]


def test_other_members_and_leading_dots_do_not_matter(tmp_path):
    members = {
        "./" + TRAIN: records(3).tobytes(),
        "fine_label_names.txt": b"apple\n",
        "./" + TEST: records(2).tobytes(),
    }
    assert len(read_cifar100(write_archive(tmp_path / "a.tar.gz", members)).training[1]) == 3


def _link():
    link = tarfile.TarInfo(TRAIN)
    link.type = tarfile.SYMTYPE
    link.linkname = "/etc/passwd"
    return link


def _with_label(value):
    table = records(4)
    table[2, 1] = value
    return table.tobytes()


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({TEST: records(2).tobytes()}, f"expected {TRAIN} and {TEST} inside, got no {TRAIN}"),
        (
            {TRAIN: records(2).tobytes()[:-1], TEST: records(2).tobytes()},
            "records of 3074 bytes, got 6,147 bytes",
        ),
        ({TRAIN: b"", TEST: records(2).tobytes()}, "got 0 bytes"),
        (
            {TRAIN: records(2).tobytes(), TEST: bytes(10_001 * RECORD_BYTES)},
            "expected 1 to 10,000 records",
        ),
        ({TRAIN: _link(), TEST: records(2).tobytes()}, f"got no {TRAIN}"),
        (
            {TRAIN: _with_label(100), TEST: records(2).tobytes()},
            "expected fine labels below 100, got 100",
        ),
    ],
)
def test_other_contents_than_records_are_refused(tmp_path, members, message):
    path = write_archive(tmp_path / "a.tar.gz", members)
    with pytest.raises(DatasetError, match=message) as raised:
        read_cifar100(path)
    assert str(path) in str(raised.value)


def _altered(content):
    changed = bytearray(content)
    changed[-6] ^= 1  # of gzip's checksum, behind all that tar reads
    return bytes(changed)


BROKEN = {"whole": 0, "header": 10, "middle": 500, "last byte": -1, "last bytes": -9}


@pytest.mark.parametrize("change", [*BROKEN, _altered, lambda content: b"not an archive" * 100])
def test_an_archive_that_is_cut_short_or_altered_is_refused(tmp_path, change):
    path = write_archive(tmp_path / "a.tar.gz")
    content = path.read_bytes()
    content = change(content) if callable(change) else content[: BROKEN[change]]
    path.write_bytes(content)
    with pytest.raises(DatasetError, match=f"cannot be read as a whole.*has {CIFAR100_BYTES:,}"):
        read_cifar100(path)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DatasetError, match=r"nowhere\.tar\.gz: cannot be read.*No such file"):
        read_cifar100(tmp_path / "nowhere.tar.gz")


@pytest.fixture
def server(tmp_path):
    """A directory that is served on the loopback, and its address."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), partial(Quiet, directory=folder)
    ) as serving:
        thread = threading.Thread(target=serving.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield folder, f"http://127.0.0.1:{serving.server_address[1]}"
        serving.shutdown()
        thread.join()


def test_the_archive_is_fetched_once_with_its_checksum_and_progress(server, tmp_path, monkeypatch):
    folder, address = server
    path = write_archive(folder / "x.tar.gz")
    monkeypatch.setattr(datasets, "CIFAR100_MD5", datasets.file_md5(path))
    messages = []
    fetched = fetch_cifar100(tmp_path / "datasets", messages.append, f"{address}/x.tar.gz")
    assert fetched.read_bytes() == path.read_bytes()
    assert [message.partition(",")[0] for message in messages] == ["fetching CIFAR-100"]
    path.unlink()
    assert fetch_cifar100(tmp_path / "datasets", messages.append, f"{address}/x.tar.gz") == fetched
    assert len(messages) == 1


def test_another_file_than_the_published_one_is_not_kept(server, tmp_path):
    folder, address = server
    write_archive(folder / "x.tar.gz")
    with pytest.raises(DatasetError, match="not the file that was published"):
        fetch_cifar100(tmp_path / "datasets", url=f"{address}/x.tar.gz")
    assert list((tmp_path / "datasets").iterdir()) == []


def test_without_a_network_the_error_says_so(server, tmp_path):
    _, address = server
    with pytest.raises(ConnectionError, match=r"cannot be downloaded.*404"):
        fetch_cifar100(tmp_path / "datasets", url=f"{address}/missing.tar.gz")
    with pytest.raises(ConnectionError, match=r"cannot be downloaded.*refused"):
        fetch_cifar100(tmp_path / "datasets", url="http://127.0.0.1:9/missing.tar.gz")


def test_digits_are_real_images_of_ten_classes():
    images = digits()
    (trained, labels), (validated, others) = images.training, images.validation
    assert (trained.shape, validated.shape) == ((1437, 3, 32, 32), (360, 3, 32, 32))
    assert sorted(set(labels.tolist())) == sorted(set(others.tolist())) == list(range(10))
    assert trained.max() == 255
    blocks = trained.view(-1, 3, 8, 4, 8, 4)
    # each pixel is a square of equal ones in every channel
    assert (blocks == blocks[:, :1, :, :1, :, :1]).all()
    assert all(torch.equal(a, b) for a, b in zip(images.training, digits().training, strict=True))
