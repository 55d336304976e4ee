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
from tests.rehearsal.machines import with_gpus


def test_the_steps_take_25_minutes_and_leave_time_for_what_is_planned():
    minutes = {step.name: step.minutes for step in STEPS}
    assert sum(minutes.values()) <= 25
    machine = with_gpus(1, "H100")
    report_s = 0.0
    for lab in map(load_lab, LABS):
        report_s += planned_s(lab.plan(lab.profiles_on(machine)["quick"], machine))
    check = CHECK.plan(CHECK.configure("quick", {}), machine)
    assert report_s <= 60 * minutes["report"]
    assert planned_s(check) <= 60 * minutes["check"]


def test_a_step_after_one_that_failed_or_hung_still_runs_and_all_is_in_the_zip(
    monkeypatch, tmp_path
):
    def python(code):
        return [sys.executable, "-c", code]

    steps = (
        Step("fails", python("print('secret', '/home/ann/x.py'); raise SystemExit(3)"), 1),
        Step("hangs", python("import time; print('on', flush=True); time.sleep(600)"), 0.02),
        Step("ends", python("print('fine')"), 1),
    )
    monkeypatch.setattr(first_gpu, "runs_directory", lambda: tmp_path / "runs")
    run = tmp_path / "runs" / "limits" / "new.jsonl"
    run.parent.mkdir(parents=True)
    run.write_text("{}")
    with zipfile.ZipFile(tmp_path / "check.zip", "w") as archive:
        archive.writestr("doctor.txt", "one H100")
    outcomes = first_gpu.run_steps(steps, tmp_path)
    words = {name: said.partition(",")[0] for name, said in outcomes.items()}
    assert words == {"fails": "status 3", "hangs": "not done after 0.02 min", "ends": "done"}
    with zipfile.ZipFile(first_gpu.pack(outcomes, tmp_path, since=0)) as archive:
        texts = {
            name.rpartition("/")[2]: archive.read(name).decode() for name in archive.namelist()
        }
    assert texts.keys() == {
        "outcomes.txt", "fails.log", "hangs.log", "ends.log", "new.jsonl", "doctor.txt"
    }  # fmt: skip
    assert texts["ends.log"] == "fine\n"
    assert "/home/ann" not in texts["fails.log"]


def test_every_tile_is_launched_by_itself(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(
        launch_tiles, "fault_in_child", lambda case, tile: ("hung" * tile.specialize or None, True)
    )
    assert launch_tiles.main() == 1
    lines = capsys.readouterr().out.splitlines()
    tiles = launch_tiles.all_tiles((9, 0))
    assert len(lines) == len(tiles) + 1
    assert sum("hung" in line for line in lines) == sum(bool(tile.specialize) for _, tile in tiles)


def test_make_runs_it():
    make = subprocess.run(
        ["make", "-n", "gpu"],
        cwd=Path(first_gpu.__file__).parents[1],
        capture_output=True,
        text=True,
    )
    assert "-m benchmarks.first_gpu" in make.stdout
