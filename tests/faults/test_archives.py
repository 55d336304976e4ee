"""Archives of images that are torn, foreign or worse: the lab that trains on them says which file and what is wrong."""

import json
import os
import tarfile
from functools import partial

import pytest

from tests.faults.check import at_once, note, settings
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


def _empty(path):
    path.write_bytes(b"")


def _no_archive(path):
    path.write_bytes(b"<html>504 Gateway Time-out</html>" * 100)


def _foreign(path):
    write_archive(path, {"readme.txt": b"an archive of something else"})


def _a_link_for_records(path):
    link = tarfile.TarInfo(TRAIN)
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    write_archive(path, {TRAIN: link, TEST: GOOD[TEST]})


def _members_that_lead_elsewhere(path):
    write_archive(path, _outside(path))


def _another_with_members_that_lead_elsewhere(path):
    write_archive(path, _outside(path) | GOOD)


def _outside(path):
    """Members that whoever unpacks them would find elsewhere."""
    return {f"../{ESCAPED}": b"x", f"../../{ESCAPED}": b"x", str(path.parent / ESCAPED): b"x"}


# What is said, by how the archive is damaged.
DAMAGES = {
    _torn: "cut short, or no .tar.gz",
    _altered: "altered, or no .tar.gz: CRC",
    _empty: "cut short, or no .tar.gz",
    _no_archive: "altered, or no .tar.gz: Not a gzipped file",
    _foreign: f"got no {TRAIN}",
    _a_link_for_records: "got no regular file",
    _members_that_lead_elsewhere: f"got no {TRAIN}",
}
# What `--resume` says, by how the archive has changed since the run began.
CHANGES = {_torn: DAMAGES[_torn], _another_with_members_that_lead_elsewhere: "a file is another: md5 was"}
QUICK = _torn


def _name(damage):
    return damage.__name__.strip("_").replace("_", " ")


def _names(damages):
    return " + ".join(map(_name, damages))


def _cases():
    """Two damages at a time, but for the one that is in `make test` too."""
    slow = [damage for damage in DAMAGES if damage is not QUICK]
    yield pytest.param([QUICK], id=_names([QUICK]))
    for pair in zip(slow[::2], slow[1::2], strict=True):
        yield pytest.param(pair, marks=pytest.mark.faults, id=_names(pair))


def numbered(damages):
    """With a folder for each."""
    return [(str(number), damage) for number, damage in enumerate(damages)]


def training(archive):
    """A training of two seeds, seconds long."""
    own, seeds = json.dumps(["own + BatchNorm"]), [0, 1]
    changed = settings(archive=archive, implementations=own, seeds=seeds, train_images=32, epochs=1)
    return ["--profile", "smoke", *changed]


def nothing_escaped(hit):
    """Neither in the folder of the victim, nor in that of its test, nor above it."""
    return not any(ESCAPED in files for _, _, files in os.walk(hit.folder.parents[1]))


@pytest.mark.parametrize("damages", list(_cases()))
def test_a_damaged_archive_stops_before_there_is_a_run(victim, damages):
    at_once(partial(_check_damaged, victim), *numbered(damages))


def _check_damaged(victim, folder, damage):
    hit = victim(folder, lab="cifar100")
    archive = hit.folder / "archive.tar.gz"
    damage(archive)
    status, said = hit.start(*training(archive)).finish()
    assert status == 2, said
    assert f"{archive}: " in said
    assert DAMAGES[damage] in said
    assert "Traceback" not in said
    assert hit.runs() == []
    assert nothing_escaped(hit)
    hit.assert_nothing_left()
    return [(f"an archive: {_name(damage)}", "before the first point", said.strip().split(f"{archive}: ")[1])]


@pytest.mark.faults
@pytest.mark.parametrize("damages", [CHANGES], ids=_names)
def test_an_archive_that_changes_meanwhile_costs_the_points_that_need_it(victim, damages):
    """Even one that could be read is not the one that the run says it is of."""
    at_once(partial(_check_changed, victim), *numbered(damages))


def _check_changed(victim, folder, damage):
    hit = victim(folder, lab="cifar100", LABKIT_FAULT_PAUSE=BETWEEN)
    archive = write_archive(hit.folder / "archive.tar.gz", GOOD)
    hit.start(*training(archive)).wait_for("paused")
    damage(archive)
    (hit.folder / "go on").touch()
    status, said = hit.finish()
    assert status == 1, said
    (run,) = hit.runs()
    coverage = run.coverage()
    assert coverage["status"].tolist() == ["ok", "failed"]
    reason = coverage["reason"].tolist()[1]
    assert f"{archive}: not the archive that was there at the beginning" in reason
    assert set(run.frame()["seed"]) == {0}
    assert nothing_escaped(hit)
    hit.assert_nothing_left()
    return [(f"an archive: {_name(damage)}", "between points", reason.replace(str(archive), archive.name))]


@pytest.mark.faults
@pytest.mark.parametrize("damages", [CHANGES], ids=_names)
def test_a_run_goes_on_with_the_same_archive_only(victim, damages):
    at_once(partial(_check_resumed, victim), *numbered(damages))


def _check_resumed(victim, folder, damage):
    words = CHANGES[damage]
    hit = victim(folder, lab="cifar100", LABKIT_FAULT_PAUSE=BETWEEN)
    archive = write_archive(hit.folder / "archive.tar.gz", GOOD)
    good = archive.read_bytes()
    hit.start(*training(archive)).wait_for("paused")
    hit.process.kill()
    hit.finish()
    (run,) = hit.runs()
    before = run.path.read_bytes()
    damage(archive)
    status, said = hit.start("--resume", str(run.path)).finish()
    assert status == 2, said
    assert words in said
    assert run.path.read_bytes() == before
    archive.write_bytes(good)
    status, said = hit.start("--resume", str(run.path)).finish()
    assert status == 0, said
    (run,) = hit.runs()
    assert run.coverage()["status"].tolist() == ["ok", "ok"]
    assert run.path.read_bytes().startswith(before)
    hit.assert_nothing_left()
    kept = "1 of 2 points kept; resumed with the right archive"
    return [(f"an archive: {_name(damage)}", "before --resume", f"refused ({words}), {kept}")]


@pytest.mark.faults
def test_an_archive_whose_members_lead_elsewhere_is_unpacked_nowhere(victim):
    hit = victim("0", lab="cifar100")
    archive = hit.folder / "archive.tar.gz"
    _another_with_members_that_lead_elsewhere(archive)
    status, said = hit.start(*training(archive)).finish()
    assert status == 0, said
    assert nothing_escaped(hit)
    hit.assert_nothing_left()
    note(
        f"an archive: {_name(_another_with_members_that_lead_elsewhere)}",
        "before the first point",
        "measured; nothing is unpacked anywhere",
    )
