"""A baseline of a reader's own training: what counts as a change of it, and what forbids one."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from labkit.__main__ import app
from labkit.bench.statistics import NO_DIFFERENCE_SHOWN
from labkit.check.trainings import compare_with_baseline, load_trainings, save_training
from labkit.lab.runs.store import Run
from tests.pages.cells import recorded

DRIFT = 0.01


@pytest.fixture(autouse=True)
def _home(monkeypatch, tmp_path):
    monkeypatch.setenv("LABKIT_HOME", str(tmp_path))


def run_of(
    tmp_path, number, *, slower=None, torch=None, cpu=None, file=None, cores=1.0, found=None
):
    """The recorded run as another day would have it: each part a little faster or slower."""
    run = recorded("your_training")
    rng = np.random.default_rng(number)
    rows = []
    for row in run.rows:
        if row.values.get("kind") == "yardstick":
            continue  # of the day on which it was recorded
        if row.values.get("kind") == "part":
            part = row.values["part"]
            factor = np.exp(rng.normal(0, DRIFT)) * (slower or {}).get(part, 1.0)
            factor *= 1.0 if part == "input" else cores
            seconds = [factor * one for one in row.values["seconds"]]
            row = row.model_copy(update={"values": row.values | {"seconds": seconds}})
        if row.values.get("kind") == "found":
            row = row.model_copy(update={"values": row.values | (found or {})})
        rows.append(row)
    yardstick = [cores * (0.004 + 1e-6 * one) for one in range(20)]
    rows.append(rows[-1].model_copy(update={"values": {"kind": "yardstick", "seconds": yardstick}}))
    machine = run.header.machine
    versions = machine.versions | ({"torch": torch} if torch else {})
    machine = machine.model_copy(update={"versions": versions, "cpu": cpu or machine.cpu})
    planned = {
        id: point | {"file": file or point["file"]} for id, point in run.header.planned.items()
    }
    header = run.header.model_copy(update={"machine": machine, "planned": planned})
    written = Path(tmp_path) / f"run-{number:03}.jsonl"
    lines = [header, *rows, *run.ends.values()]
    written.write_text("".join(f"{line.model_dump_json()}\n" for line in lines))
    return Run(written, header, rows, run.ends)


@pytest.mark.slow  # test_slow_cores_make_no_part_slower_and_hide_none compares some
def test_an_unchanged_training_is_rarely_said_to_have_changed(tmp_path):
    for number in range(3):
        save_training(run_of(tmp_path, number))
    verdicts = [
        verdict
        for number in range(100, 120)
        for verdict in compare_with_baseline(run_of(tmp_path, number)).parts["verdict"]
    ]
    assert sum(verdict != NO_DIFFERENCE_SHOWN for verdict in verdicts) <= 2  # of 100


@pytest.mark.parametrize("cores", [0.6, 1.7])
def test_slow_cores_make_no_part_slower_and_hide_none(tmp_path, cores):
    for number in range(4):
        save_training(run_of(tmp_path, number))
    unchanged = compare_with_baseline(run_of(tmp_path, 50, cores=cores))
    assert {*unchanged.parts["verdict"]} == {NO_DIFFERENCE_SHOWN}
    slower = compare_with_baseline(run_of(tmp_path, 51, cores=cores, slower={"forward": 1.4}))
    assert slower.parts.loc["forward", "verdict"] == "slower"
    assert slower.parts.loc["forward", "ratio"] == pytest.approx(1.4, rel=0.1)


def test_a_slower_part_is_named_with_its_size(tmp_path):
    for number in range(4):
        save_training(run_of(tmp_path, number))
    change = compare_with_baseline(run_of(tmp_path, 50, slower={"backward": 1.3}))
    # The step has its backward pass in it.
    assert list(change.parts.index[change.parts["verdict"] == "slower"]) == ["backward", "step"]
    backward = change.parts.loc["backward"]
    assert backward["low"] < 1.3 < backward["high"]
    assert change.is_slower


def test_a_part_that_takes_next_to_nothing_is_not_compared(tmp_path):
    for number in range(4):
        save_training(run_of(tmp_path, number, slower={"optimizer": 1e-4}))
    unchanged = compare_with_baseline(run_of(tmp_path, 50, slower={"optimizer": 3e-4}))
    assert not unchanged.is_slower
    assert "optimizer" not in unchanged.parts.index
    slower = compare_with_baseline(run_of(tmp_path, 51))
    assert slower.parts.loc["optimizer", "verdict"] == "slower"


def test_another_torch_is_compared_and_named_and_another_processor_is_not(tmp_path):
    for number in range(10, 13):
        save_training(run_of(tmp_path, number))
    upgraded = compare_with_baseline(run_of(tmp_path, 2, torch="99.0", slower={"forward": 3.0}))
    assert [one.name for one in upgraded.differences] == ["torch"]
    assert upgraded.parts.loc["forward", "verdict"] == "slower"
    moved = compare_with_baseline(run_of(tmp_path, 3, cpu="Another"))
    assert [one.name for one in moved.blockers] == ["processor"]
    assert moved.parts.empty
    assert not moved.is_slower


def test_one_saved_run_decides_nothing(tmp_path):
    for number in range(2):
        save_training(run_of(tmp_path, number))
        change = compare_with_baseline(run_of(tmp_path, 50, slower={"forward": 3.0}))
        assert {*change.parts["verdict"]} == {"undecided"}
        assert not change.is_slower


def test_a_baseline_belongs_to_a_setup_and_to_the_newest_torch(tmp_path):
    assert compare_with_baseline(run_of(tmp_path, 1)) is None
    for number, about in enumerate([{}, {"file": "/a.py:setup"}, {"torch": "99.0"}]):
        save_training(run_of(tmp_path, number, **about))
    names = [run.name for run in load_trainings(run_of(tmp_path, 9))]
    assert names == ["run-002"]
    assert len(load_trainings(run_of(tmp_path, 9, file="/a.py:setup"))) == 1


def carry_out(monkeypatch, run, *options):
    """`labkit try` with a run that is measured already."""
    monkeypatch.setattr("labkit.lab.runs.measure.measure", lambda *_, **__: run)
    return CliRunner().invoke(app, ["try", "train.py:setup", *options])


def test_the_command_saves_a_baseline_and_ends_with_status_3_if_a_step_is_slower(
    monkeypatch, tmp_path
):
    for number in range(4):
        assert carry_out(monkeypatch, run_of(tmp_path, number), "--save").exit_code == 0
    assert len(load_trainings(run_of(tmp_path, 9))) == 4
    slower = run_of(tmp_path, 50, slower={"backward": 1.4}, torch="99.0")
    outcome = carry_out(monkeypatch, slower)
    assert outcome.exit_code == 3
    assert "-> 99.0" in outcome.stdout
    document = json.loads(carry_out(monkeypatch, slower, "--json").stdout)
    ratios = {one["name"]: one for one in document["numbers"]}
    assert ratios["backward since the baseline"]["validity"] == "slower"
    assert ratios["input since the baseline"]["validity"] == NO_DIFFERENCE_SHOWN
    assert ratios["your_training.changes"]["verdict"] == "yes"
    assert ratios["your_training.changes"]["value"] < 1
    assert ratios["your_training.step"]["value"] is None  # a part, and no ratio
    assert document["found"]["optimizer"] == "AdamW"


def test_numbers_of_a_busy_run_say_so(monkeypatch, tmp_path):
    monkeypatch.setattr(Run, "busy", {"point": "another program"})
    document = json.loads(carry_out(monkeypatch, run_of(tmp_path, 1), "--json").stdout)
    assert {one["validity"] for one in document["numbers"] if one["value"] is not None} == {
        "busy during 1 of 3 points: another program"
    }


def test_a_training_whose_rank_dies_is_a_line_and_status_1(monkeypatch, tmp_path):
    run = run_of(tmp_path, 1)
    died = {"status": "failed", "reason": "rank 0 died"}
    ends = {point: end.model_copy(update=died) for point, end in run.ends.items()}
    outcome = carry_out(monkeypatch, Run(run.path, run.header, run.rows, ends), "--save")
    assert outcome.exit_code == 1
    assert outcome.stderr.strip() == "not measured: failed: rank 0 died"
    assert not load_trainings(run)


def test_the_command_says_what_the_setup_returned_then_if_it_returns_something_else(
    monkeypatch, tmp_path
):
    carry_out(monkeypatch, run_of(tmp_path, 1), "--save")
    for found, n_times in (({}, 1), ({"n_parameters": 5_000_000}, 2)):
        outcome = carry_out(monkeypatch, run_of(tmp_path, 2, found=found))
        assert outcome.stdout.count("parameters; batch 8 x 128") == n_times


def test_the_command_prints_changes_that_pay_as_python(monkeypatch, tmp_path):
    run = run_of(tmp_path, 1, file=f"{tmp_path}/train.py:setup")
    outcome = carry_out(monkeypatch, run, "--apply")
    compile(outcome.stdout, "applied", "exec")
    assert "from train import setup as unchanged" in outcome.stdout
    assert "num_workers=2" in outcome.stdout
