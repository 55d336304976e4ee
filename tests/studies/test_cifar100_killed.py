"""A training that is killed with SIGKILL, through the command line: `--resume` goes on from its last epoch."""

import json
import signal
import subprocess
import sys

import pytest

from labkit.lab.runs.store import Run
from tests.commands import all_runs, labkit, runs_by
from tests.faults.check import until
from tests.nn.cifar_archive import TEST, TRAIN, records, write_archive

EPOCHS = 16
NAMES = ["own + SyncBatchNorm", "torch + BatchNorm"]


@pytest.fixture
def training(tmp_path):
    """Starts `labkit measure cifar100` on a small archive, without waiting for it."""
    members = {TRAIN: records(64).tobytes(), TEST: records(10, seed=1).tobytes()}
    archive = write_archive(tmp_path / "small.tar.gz", members)
    settings = [
        f"archive={archive}",
        f"implementations={json.dumps(NAMES)}",
        f"epochs={EPOCHS}",
        "seeds=[4]",
        "train_images=32",
    ]
    options = [option for setting in settings for option in ("--set", setting)]
    command = ["measure", "cifar100", "--profile", "smoke", *options]
    before = all_runs()
    started = []

    def start():
        started.append(subprocess.Popen([sys.executable, "-m", "labkit", *command], stdout=subprocess.DEVNULL))
        return started[-1]

    yield command, start, lambda: runs_by(command, before)
    for process in started:
        process.kill()
        process.wait()
    for path in runs_by(command, before):
        path.unlink()


def _epochs_told(path):
    lines = [json.loads(line) for line in path.read_text().splitlines()] if path.stat().st_size else []
    return [line["values"] for line in lines if line["kind"] == "row" and "accuracy_percent" in line["values"]]


@pytest.mark.faults
def test_kill_9_costs_no_epoch_and_the_end_is_the_same(training):
    command, start, runs = training
    process = start()
    until(runs)
    (path,) = runs()
    until(lambda: len(_epochs_told(path)) >= 3 * len(NAMES))
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = _epochs_told(path)
    assert len(before) < EPOCHS * len(NAMES), "the training was over before it was killed"
    assert Run.load(path).pending
    resumed = labkit("measure", "cifar100", "--resume", str(path))
    assert resumed.returncode == 0, resumed.stderr
    assert not path.with_suffix(".checkpoints").exists()
    frame = Run.load(path).frame()
    told = frame.dropna(subset="accuracy_percent")
    assert sorted(zip(told["implementation"], told["epoch"], strict=True)) == sorted(
        (name, epoch) for name in NAMES for epoch in range(1, EPOCHS + 1)
    )
    assert len(frame[frame["phase"] == "epoch"]) == 2 * EPOCHS * len(NAMES)  # of both ranks, each once
    seconds = told.set_index(["implementation", "epoch"])["epoch_s"]
    for row in before:  # what was measured before the kill is not measured again
        assert seconds[row["implementation"], row["epoch"]] == row["epoch_s"]
    others = runs()
    assert labkit(*command).returncode == 0
    (whole,) = runs() - others
    metrics = ["implementation", "epoch", "train_loss", "validation_loss", "accuracy_percent"]
    in_one_go = Run.load(whole).frame().dropna(subset="accuracy_percent")[metrics]
    assert told[metrics].reset_index(drop=True).equals(in_one_go.reset_index(drop=True))  # bit by bit
