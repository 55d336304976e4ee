"""`make gpu` without a GPU: its plan, steps that fail or hang, and the zip at the end."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import first_gpu, launch_tiles
from benchmarks.first_gpu import STEPS, Step
from labkit.check.checking import CHECK
from labkit.lab.point import planned_s
from labkit.studies import LABS, load_lab
from tests.rehearsal.machines import MACHINES


def test_make_gpu_takes_25_minutes_and_leaves_time_for_what_is_planned():
    root = Path(first_gpu.__file__).parents[1]
    make = subprocess.run(["make", "-n", "gpu"], cwd=root, capture_output=True, text=True)
    assert "-m benchmarks.first_gpu" in make.stdout
    minutes = {step.name: step.minutes for step in STEPS}
    assert sum(minutes.values()) <= 25
    machine = MACHINES["1 H100"]
    labs = [load_lab(lab) for lab in LABS]
    report = [planned_s(lab.plan(lab.profiles_on(machine)["quick"], machine)) for lab in labs]
    assert sum(report) <= 60 * minutes["report"]
    check = CHECK.plan(CHECK.configure("quick", {}), machine)
    assert planned_s(check) <= 60 * minutes["check"]


def test_a_step_after_one_that_failed_or_hung_still_runs_and_all_is_in_the_zip(
    monkeypatch, tmp_path
):
    codes = {
        "fails": ("print('secret', '/home/ann/x.py'); raise SystemExit(3)", 1),
        "hangs": ("import time; print('on', flush=True); time.sleep(600)", 0.02),
        "ends": ("print('fine')", 1),
    }
    steps = [
        Step(name, [sys.executable, "-c", code], minutes) for name, (code, minutes) in codes.items()
    ]
    monkeypatch.setattr(first_gpu, "runs_directory", lambda: tmp_path / "runs")
    run = tmp_path / "runs" / "limits" / "new.jsonl"
    run.parent.mkdir(parents=True)
    run.write_text("{}")
    with zipfile.ZipFile(tmp_path / "check.zip", "w") as archive:
        archive.writestr("doctor.txt", "one H100")
    outcomes = first_gpu.run_steps(steps, tmp_path)
    ends = {name: outcome.partition(",")[0] for name, outcome in outcomes.items()}
    assert ends == {"fails": "status 3", "hangs": "not done after 0.02 min", "ends": "done"}
    with zipfile.ZipFile(first_gpu.pack(outcomes, tmp_path, since=0)) as archive:
        texts = {Path(name).name: archive.read(name).decode() for name in archive.namelist()}
    logs = {f"{name}.log" for name in codes}
    assert texts.keys() == logs | {"outcomes.txt", "new.jsonl", "doctor.txt"}
    assert texts["ends.log"] == "fine\n"
    assert "/home/ann" not in texts["fails.log"]


def test_every_tile_is_launched_by_itself(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(
        launch_tiles, "fault_in_child", lambda case, tile: ("hung" * tile.specialize or None, True)
    )
    assert launch_tiles.main() == 1
    *lines, _ = capsys.readouterr().out.splitlines()
    tiles = [tile for _, tile in launch_tiles.all_tiles((9, 0))]
    assert ["hung" in line for line in lines] == [tile.specialize > 0 for tile in tiles]
