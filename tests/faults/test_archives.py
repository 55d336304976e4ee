"""Archives of images that are torn, foreign or worse: the lab that trains on them names the file and what is wrong."""

import json
import os
import tarfile

import pytest

from tests.faults.check import settings
from tests.faults.worker import BETWEEN
from tests.nn.cifar_archive import TEST, TRAIN, records, write_archive

ESCAPED = "escaped.bin"
GOOD = {TRAIN: records(64).tobytes(), TEST: records(10, seed=1).tobytes()}


def _torn(path):
    write_archive(path, GOOD)
    path.write_bytes(path.read_bytes()[:-1000])


def _altered(path):
    content = bytearray(write_archive(path, GOOD).read_bytes())
    content[-6] ^= 1  # of gzip's checksum
    path.write_bytes(content)


def _link(path):
    link = tarfile.TarInfo(TRAIN)
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    write_archive(path, {TRAIN: link, TEST: GOOD[TEST]})


def _outside(path):
    """Members that whoever unpacks them would find elsewhere."""
    return {f"../{ESCAPED}": b"x", f"../../{ESCAPED}": b"x", str(path.parent / ESCAPED): b"x"}


def _whole_with_members_elsewhere(path):
    write_archive(path, _outside(path) | GOOD)


TORN = "cannot be read as a whole .tar.gz"
# How an archive is damaged, and what is said then.
DAMAGES = {
    "torn": (_torn, TORN),
    "altered": (_altered, TORN),
    "no archive": (lambda path: path.write_bytes(b"<html>504</html>" * 100), TORN),
    "foreign": (lambda path: write_archive(path, {"readme.txt": b"of something else"}), f"got no {TRAIN}"),
    "a link": (_link, f"got no {TRAIN}"),
    "members elsewhere": (lambda path: write_archive(path, _outside(path)), f"got no {TRAIN}"),
}
# How it has changed since the run began, and what `--resume` says.
CHANGES = {"torn": DAMAGES["torn"], "another": (_whole_with_members_elsewhere, "a file has changed")}
DAMAGED = [pytest.param(name, marks=[] if name == "torn" else [pytest.mark.faults]) for name in DAMAGES]


def training(archive):
    """A training of two seeds, seconds long."""
    own, seeds = json.dumps(["own + BatchNorm"]), [0, 1]
    changed = settings(archive=archive, implementations=own, seeds=seeds, train_images=32, epochs=1)
    return ["--profile", "smoke", *changed]


def assert_nothing_left(hit):
    """Nor has anything escaped: neither into the folder of the victim, nor that of its test, nor above it."""
    assert not any(ESCAPED in files for _, _, files in os.walk(hit.folder.parents[1]))
    hit.assert_nothing_left()


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_archive_stops_before_there_is_a_run(victim, name):
    damage, words = DAMAGES[name]
    hit = victim("0", lab="cifar100")
    archive = hit.folder / "archive.tar.gz"
    damage(archive)
    status, output = hit.start(*training(archive)).finish()
    assert status == 2, output
    assert f"{archive}: " in output
    assert words in output
    assert "Traceback" not in output
    assert hit.runs() == []
    assert_nothing_left(hit)


@pytest.mark.faults
@pytest.mark.parametrize("name", CHANGES)
def test_an_archive_that_changes_costs_the_points_that_need_it_and_a_run_goes_on_with_the_same_only(victim, name):
    damage, words = CHANGES[name]
    hit = victim("0", lab="cifar100", LABKIT_FAULT_PAUSE=BETWEEN)
    archive = write_archive(hit.folder / "archive.tar.gz", GOOD)
    good = archive.read_bytes()
    hit.start(*training(archive)).wait_for("paused")
    damage(archive)
    (hit.folder / "go on").touch()
    status, output = hit.finish()
    assert status == 1, output
    (run,) = hit.runs()
    coverage = run.coverage()
    assert coverage["status"].tolist() == ["ok", "failed"]
    assert f"{archive}: not the archive that was there at the beginning" in coverage["reason"].tolist()[1]
    assert_nothing_left(hit)
    lines = run.path.read_bytes().splitlines(keepends=True)
    before = b"".join(lines[:-1])  # as if it had been killed before the end of the second point
    run.path.write_bytes(before)
    status, output = hit.start("--resume", str(run.path)).finish()
    assert status == 2, output
    assert words in output
    assert run.path.read_bytes() == before
    archive.write_bytes(good)
    status, output = hit.start("--resume", str(run.path)).finish()
    assert status == 0, output
    (run,) = hit.runs()
    assert run.coverage()["status"].tolist() == ["ok", "ok"]
    assert run.path.read_bytes().startswith(before)
