"""`labkit check` from its arguments to its exit status, with a set that is quickly measured or made
up."""

import fcntl
import json
import zipfile
from dataclasses import replace
from unittest.mock import Mock

import pytest
from jsonschema import validate

from labkit.bench.statistics import NO_DIFFERENCE_SHOWN
from labkit.check import checking
from labkit.check.archives import write_bundle
from labkit.check.checking import (
    CHECK,
    CheckConfig,
    Status,
    baseline_folder,
    check_correctness,
    check_machine,
    load_baseline,
)
from labkit.check.commands import describe
from labkit.lab.config import ParameterError
from labkit.lab.user_checks import Correctness
from labkit.machine.description import describe_machine
from tests.check.made_up import made_run
from tests.check.test_documents import SCHEMA
from tests.rehearsal.machines import MACHINES

pytestmark = pytest.mark.usefixtures("home")
OK = Correctness("all_reduce", "cpu", 2, "ring", "ok")
WRONG = replace(OK, status="wrong", reason="element 3")


@pytest.fixture
def measured(monkeypatch):
    """Checks that take no time: `measured(run, correctness)` is what the next one finds."""

    def next_check(run, correctness=(OK,)):
        monkeypatch.setattr(checking, "measure", lambda *_, **__: run)
        monkeypatch.setattr(checking, "check_correctness", lambda *_: correctness)

    return next_check


def _check(*baseline):
    return check_machine(baseline, lambda _: None)


def test_the_set_is_measured_and_every_quantity_has_both_turns(monkeypatch):
    """Truly measured, in one short session; nothing is compared without a baseline."""
    monkeypatch.setattr(checking, "check_correctness", lambda *_: [])
    short = replace(CHECK)  # a new one has profiles of its own
    short.profiles["quick"] = CheckConfig(repeats=2, warmup=0, sessions=1)
    monkeypatch.setattr(checking, "CHECK", short)
    result = _check()
    frame = result.run.frame()
    assert (result.run.coverage()["status"] == "ok").all()
    assert frame.groupby(["world_size", "quantity"])["turn"].nunique().eq(2).all()
    assert {"matmul float32", "copy", "attention", "training step, all ranks"} <= set(
        frame["quantity"]
    )
    assert {one.reason for one in result.changes} == {"there is no baseline"}
    assert result.status == Status.NOTHING_COMPARED


def test_correctness_says_each_implementation_at_each_place(monkeypatch):
    only = {"sync_batchnorm": checking.LABS["sync_batchnorm"]}
    monkeypatch.setattr(checking, "LABS", only)
    rows = list(check_correctness(lambda _: None, None))
    assert [(one.name, one.ranks, one.status) for one in rows if one.name == "labkit"] == [
        ("labkit", 2, "ok")
    ]
    assert not any(one.is_bad for one in rows)


def test_status_3_is_for_lost_speed_or_hardware_and_1_for_wrong_results(measured):
    baseline = made_run(1)
    slow = made_run(2, slower={"copy": 2.0})
    for run, verdicts, status in (
        (made_run(2), [OK], 0),
        (slow, [OK], 3),
        (slow, [OK, WRONG], 1),
    ):
        measured(run, verdicts)
        assert _check(baseline).status == status
    measured(made_run(2, slower={"copy": 0.4}))
    assert _check(baseline).status == 0
    for change, status in (({"cpu": "another", "cores": 1}, 4), ({"cores": 1}, 3)):
        measured(made_run(2, machine=baseline.header.machine.model_copy(update=change)))
        assert _check(baseline).status == status


def test_a_baseline_is_saved_and_compared_with(home, measured, command):
    run = made_run(1, home / "check.jsonl")
    measured(run)
    assert command("check", "--save")[0] == 0
    assert baseline_folder(run.header.machine).exists()
    measured(made_run(2, slower={"attention": 2.0}))
    status, printed, _ = command("check", "--json")
    assert status == 3
    document = json.loads(printed)
    validate(document, SCHEMA)
    numbers = {one["name"]: one for one in document["numbers"]}
    assert numbers["attention, 1 rank, cpu"]["validity"] == "slower"
    assert numbers["copy, 1 rank, cpu"]["validity"] == NO_DIFFERENCE_SHOWN


def test_what_is_right_but_slow_is_no_failure_and_what_was_not_compared_no_success(measured):
    slow = replace(OK, status="too_slow", reason="1.01 s for one pass")
    busy = made_run(2, load={"average": 3.0, "busy_cores": 1.0})
    measured(made_run(2), [slow])
    assert _check(made_run(1)).status == Status.OK
    for run, baseline in ((busy, [made_run(1)]), (made_run(2), [])):
        measured(run)
        result = _check(*baseline)
        assert result.status == Status.NOTHING_COMPARED == 4  # what scripts see
        assert result.nothing_compared_reason


@pytest.mark.usefixtures("home")
def test_a_script_reads_which_results_are_bad_and_that_nothing_was_compared(measured, command):
    results = [replace(OK, status=status) for status in ("wrong", "too_slow", "ok")]
    measured(made_run(1), results)
    status, printed, _ = command("check", "--json")
    document = json.loads(printed)
    assert [one["is_bad"] for one in document["correctness"]] == [True, False, False]
    assert status == document["status"] == Status.WRONG
    measured(made_run(1))
    status, printed, _ = command("check", "--json")
    document = json.loads(printed)
    assert status == document["status"] == Status.NOTHING_COMPARED
    assert document["nothing_compared"]


def _save(run, home):
    folder = baseline_folder(run.header.machine)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / run.path.name).write_bytes(run.path.read_bytes())


def test_an_upgrade_is_compared_and_named_and_once_saved_its_old_runs_are_left_out_aloud(
    home, measured, command
):
    machine = describe_machine().model_copy(update={"gpus": []})
    old = machine.model_copy(update={"versions": machine.versions | {"torch": "2.0.0"}})
    for number in range(3):
        _save(made_run(number, home / f"2026010{number}.jsonl", machine=old), home)
    measured(made_run(5, home / "20260201.jsonl", machine=machine, slower={"copy": 2.0}))
    status, said, _ = command("check")
    assert status == Status.SLOWER
    assert f"torch 2.0.0 -> {machine.versions['torch']}" in said
    status, _, complaints = command("check", "--save")
    assert status == 0
    assert "left out of the baseline: 3 runs (torch 2.0.0)" in complaints
    assert "baseline: 1 run," in complaints


def test_a_renamed_host_keeps_its_baseline_and_adds_to_it(home, measured, command):
    machine = describe_machine().model_copy(update={"host": "4f7c9a"})
    _save(made_run(1, home / "20260101.jsonl", machine=machine), home)
    said = []
    assert [run.name for run in load_baseline(None, said.append)] == ["20260101"]
    assert "4f7c9a" in said[0]
    measured(made_run(2, home / "20260102.jsonl"))
    assert command("check", "--save")[0] == 0
    assert len(load_baseline(None)) == 2


def test_the_baseline_of_another_machine_is_nobody_elses(home):
    other = describe_machine().model_copy(update={"host": "4f7c9a", "cpu": "another"})
    _save(made_run(1, home / "20260101.jsonl", machine=other), home)
    assert load_baseline(None) == []


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"load": {"average": 3.0, "busy_cores": 1.0}}, "other programs took"),
        ({"status": "failed"}, "rank 0 died"),
    ],
)
def test_a_disturbed_machine_and_what_was_not_timed_is_status_1_and_no_baseline(
    fields, words, home, measured, command
):
    measured(made_run(1, home / "check.jsonl", **fields))
    status, *said = command("check", "--save")
    assert (status, words in "".join(said)) == (1, True)
    assert not baseline_folder(describe_machine()).exists()


def _with_header(home, **changes):
    run = made_run(1, home / "other.jsonl")
    header, *lines = run.path.read_text().splitlines()
    run.path.write_text("\n".join([json.dumps(json.loads(header) | changes), *lines, ""]))
    return ("--against", str(run.path))


def _write(path, text, *arguments):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return arguments


@pytest.mark.parametrize(
    "prepare",
    [
        lambda home: _write(baseline_folder(describe_machine()) / "damaged.jsonl", "{"),
        lambda home: _with_header(home, lab="limits"),
        lambda home: _with_header(home, format_version=99),
        lambda home: _write(home / "data", "a file where a folder should be"),
        lambda home: _write(home / "empty.jsonl", "", "--against", str(home / "empty.jsonl")),
        lambda home: ("--bundle", str(home)),
        lambda home: ("--against", ""),
        lambda home: ("--against", "x" * 5000),
        lambda home: ("--against", str(home)),
        lambda home: ("--save", "--against", "x"),
        lambda home: ("--tolerance", "-1"),
        lambda home: ("--bundle", str(home / "check.jsonl" / "x.zip")),
    ],
)
def test_what_cannot_be_checked_is_one_line_and_status_2(prepare, home, measured, command):
    measured(made_run(1, home / "check.jsonl"))
    status, _, said = command("check", *prepare(home))
    assert (status, said.count("error:"), "Traceback" in said) == (2, 1, False)


def test_two_at_once_are_refused_and_an_interrupted_check_saves_nothing(command, monkeypatch):
    monkeypatch.setattr(checking, "check_correctness", Mock(side_effect=KeyboardInterrupt))
    assert command("check", "--save")[0] == 130
    assert not baseline_folder(describe_machine()).exists()
    with (checking.checks_directory() / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ParameterError, match="another check runs"):
            _check()


@pytest.mark.parametrize("name", ["8 H100", "1 MIG", "container"])
def test_a_bundle_has_what_a_report_needs_names_the_machine_and_nobody(name, home, measured):
    machine = MACHINES[name].model_copy(update={"host": "anns-laptop"})
    measured(made_run(1, home / "check.jsonl", machine=machine))
    result = _check()
    write_bundle(home / "bundle.zip", result, describe(result))
    with zipfile.ZipFile(home / "bundle.zip") as archive:
        texts = {name: archive.read(name).decode() for name in archive.namelist()}
    assert {"doctor.txt", "check.json", "runs/check.jsonl", "kernels.txt"} <= texts.keys()
    for name, text in texts.items():
        assert str(home) not in text, name
        assert "anns-laptop" not in text, name
    parts = [gpu.name for gpu in machine.gpus] + [machine.no_gpu_reason or ""]
    assert all(part in texts["runs/check.jsonl"] for part in parts)
