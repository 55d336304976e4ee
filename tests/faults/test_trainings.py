"""Trainings on images that are killed, and archives that are torn or change meanwhile: no epoch is
lost or mixed.

All kinds of damaged archives are in `tests/nn/test_datasets.py`.
"""

import json
import os
import signal

import pytest

from tests.faults.check import settings, until
from tests.faults.worker import BETWEEN
from tests.nn.cifar_archive import TEST, TRAIN, records, write_archive

ESCAPED = "escaped.bin"
GOOD = {TRAIN: records(64).tobytes(), TEST: records(10, seed=1).tobytes()}
EPOCHS = 16
NAMES = ["own + SyncBatchNorm", "torch + BatchNorm"]


def _torn(path):
    path.write_bytes(write_archive(path, GOOD).read_bytes()[:-1000])


def _with_members_elsewhere(path):
    """Members that whoever unpacks them would find elsewhere."""
    names = (f"../{ESCAPED}", f"../../{ESCAPED}", str(path.parent / ESCAPED))
    write_archive(path, dict.fromkeys(names, b"x") | GOOD)


def training(archive, **changes):
    """A training of two seeds, seconds long."""
    few = {
        "implementations": json.dumps(["own + BatchNorm"]),
        "seeds": [0, 1],
        "train_images": 32,
        "epochs": 1,
    }
    return ["--profile", "smoke", *settings(archive=archive, **(few | changes))]


def assert_nothing_left(hit):
    """Nor has anything escaped: neither into the folder of the victim, nor that of its test, nor
    above it."""
    assert not any(ESCAPED in files for _, _, files in os.walk(hit.folder.parents[1]))
    hit.assert_nothing_left()


def test_a_damaged_archive_stops_before_there_is_a_run(command, tmp_path, monkeypatch):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))
    _torn(archive := tmp_path / "archive.tar.gz")
    status, _, complaints = command("measure", "cifar100", *training(archive))
    assert status == 2
    assert f"{archive}: cannot be read as a whole .tar.gz" in complaints
    assert "Traceback" not in complaints
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [archive]


@pytest.mark.faults
@pytest.mark.parametrize(
    ("change", "words"),
    [(_torn, "cannot be read as a whole .tar.gz"), (_with_members_elsewhere, "a file has changed")],
)
def test_an_archive_that_changes_costs_the_points_that_need_it_and_a_run_goes_on_with_the_same_only(
    victim, change, words
):
    hit = victim("0", lab="cifar100", LABKIT_FAULT_PAUSE=BETWEEN)
    archive = write_archive(hit.folder / "archive.tar.gz", GOOD)
    good = archive.read_bytes()
    hit.start(*training(archive)).wait_for("paused")
    change(archive)
    (hit.folder / "go on").touch()
    status, output = hit.finish()
    assert status == 1, output
    (run,) = hit.runs()
    coverage = run.coverage()
    assert coverage["status"].tolist() == ["ok", "failed"]
    assert (
        f"{archive}: not the archive that was there at the beginning"
        in coverage["reason"].tolist()[1]
    )
    assert_nothing_left(hit)
    lines = run.path.read_bytes().splitlines(keepends=True)
    before = b"".join(lines[:-1])  # as if it had been killed before the end of the second point
    run.path.write_bytes(before)
    status, output = hit.start("--resume", str(run.path)).finish()
    assert status == 2, output
    assert words in output
    assert run.path.read_bytes() == before
    archive.write_bytes(good)
    hit.resume()
    assert run.path.read_bytes().startswith(before)


def _epochs(path):
    """Values of the epochs in a run that may be half written."""
    lines = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    return [
        line["values"]
        for line in lines
        if line["kind"] == "row" and "accuracy_percent" in line["values"]
    ]


@pytest.mark.faults
def test_kill_9_costs_no_epoch_and_the_end_is_the_same(victim):
    hit, whole = (victim(folder, lab="cifar100") for folder in ("killed", "whole"))
    archive = write_archive(hit.folder / "archive.tar.gz", GOOD)
    arguments = training(archive, implementations=json.dumps(NAMES), seeds=[4], epochs=EPOCHS)
    hit.start(*arguments)
    until(hit.paths)
    (path,) = hit.paths()
    until(lambda: len(_epochs(path)) >= 3 * len(NAMES))
    hit.process.send_signal(signal.SIGKILL)
    hit.finish()
    before = _epochs(path)
    assert len(before) < EPOCHS * len(NAMES), "the training was over before it was killed"
    assert hit.runs()[0].pending
    hit.resume()
    assert not path.with_suffix(".checkpoints").exists()
    frame = hit.runs()[0].frame()
    epochs = frame.dropna(subset="accuracy_percent")
    expected = {(name, epoch) for name in NAMES for epoch in range(1, EPOCHS + 1)}
    assert set(zip(epochs["implementation"], epochs["epoch"], strict=True)) == expected
    assert len(epochs) == len(expected)
    # of both ranks, each once
    assert len(frame[frame["phase"] == "epoch"]) == 2 * EPOCHS * len(NAMES)
    seconds = epochs.set_index(["implementation", "epoch"])["epoch_s"]
    for row in before:  # what was measured before the kill is not measured again
        assert seconds[row["implementation"], row["epoch"]] == row["epoch_s"]
    status, output = whole.start(*arguments).finish()
    assert status == 0, output
    metrics = ["implementation", "epoch", "train_loss", "validation_loss", "accuracy_percent"]
    in_one_go = whole.runs()[0].frame().dropna(subset="accuracy_percent")[metrics]
    # bit by bit
    assert epochs[metrics].reset_index(drop=True).equals(in_one_go.reset_index(drop=True))
