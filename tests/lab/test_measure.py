"""A sweep ends with every point accounted for, whatever happens to its ranks."""

from dataclasses import replace
from unittest.mock import Mock

import pandas as pd
import pytest

from labkit.lab import notebook
from labkit.lab.answers import Check
from labkit.lab.config import ParameterError
from labkit.lab.notebook import OpenLab, Parameters, open_lab
from labkit.lab.runs import executor
from labkit.lab.runs import measure as measuring
from labkit.lab.runs.measure import measure, needs_calibration, resume
from labkit.lab.runs.progress import NotebookLine
from labkit.lab.runs.records import RunWriter
from labkit.lab.runs.store import Run, RunFileError
from labkit.lab.user_checks import AlternativeCheck
from labkit.machine.description import describe_machine
from labkit.studies import load_lab
from tests.lab.fake_lab import FAKE, FakeConfig
from tests.pages.cells import recorded, run_of


def _measure(tmp_path, *actions, world_size=1, **options):
    config = FakeConfig(actions=list(actions), world_size=world_size)
    return measure(FAKE, config, profile="smoke", directory=tmp_path, **options)


def test_every_point_ends_with_a_status_and_a_reason(tmp_path):
    run = _measure(tmp_path, "fine", "raise", "die", "skip", "fine", world_size=2)
    coverage = run.coverage()
    assert coverage["status"].tolist() == ["ok", "failed", "failed", "skipped", "ok"]
    reasons = coverage["reason"].tolist()
    assert "rank 1" in reasons[1]
    assert "deliberate" in reasons[1]
    assert "SIGKILL" in reasons[2]
    assert reasons[3] == "needs what this machine has not"
    assert run.pending == []


def test_a_point_that_an_alternative_ends_names_it_and_the_others_are_measured(tmp_path):
    run = _measure(tmp_path, "fine", "break", "fine")
    coverage = run.coverage()
    assert coverage["status"].tolist() == ["ok", "failed", "ok"]
    assert coverage["reason"].tolist()[1] == "rank 0 was killed by SIGABRT, in broken"
    assert run.frame().groupby("size").size().to_dict() == {1: 2, 3: 2}
    ((_, _, details),) = run.failures()
    assert "fake_lab.py" in details  # where the rank was


@pytest.mark.parametrize(
    ("action", "status", "reason"), [("oom", "oom", "ran out of memory"), ("slow", "ok", "take")]
)
def test_larger_points_of_a_series_are_skipped_once_memory_ran_out_or_rounds_took_far_too_long(
    action, status, reason, tmp_path
):
    coverage = _measure(tmp_path, "fine", action, "fine", "fine").coverage()
    assert coverage["status"].tolist() == ["ok", status, "skipped", "skipped"]
    assert reason in coverage["reason"].tolist()[2]


def test_a_row_that_adds_up_others_makes_no_point_too_long(tmp_path):
    """Forward, backward and their sum: 0.3 s of rounds were 0.6 s, more than six times 0.06."""
    coverage = _measure(tmp_path, "sum", "fine").coverage()
    assert coverage["status"].tolist() == ["ok", "ok"]


def test_points_share_their_ranks_unless_one_asks_for_new_ones(tmp_path):
    frame = _measure(tmp_path, "fine", "fine", "fresh", "fresh", "fine").frame()
    pids = frame.groupby("size")["pid"].first().tolist()
    assert pids[0] == pids[1]
    assert len(set(pids)) == 4


def test_progress_counts_every_point_once_and_names_the_run(tmp_path):
    seen = []
    run = _measure(tmp_path, "fine", "skip", "raise", "fine", on_progress=seen.append)
    assert (seen[-1].done, seen[-1].total) == (4, 4)
    assert [now.done for now in seen] == sorted(now.done for now in seen)
    assert {now.run for now in seen} == {run.name}


def test_an_interrupt_keeps_what_was_measured_and_resume_measures_the_rest(tmp_path):
    def interrupt(progress):
        if progress.done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        _measure(tmp_path, "fine", "fine", "fine", "fine", on_progress=interrupt)
    (path,) = tmp_path.glob("*.jsonl")
    before = Run.load(path)
    assert before.coverage()["status"].tolist() == ["ok", "ok", "pending", "pending"]
    run = resume(FAKE, path)
    assert run.coverage()["status"].tolist() == ["ok"] * 4
    assert len(run.frame()) == 8
    ends = [line for line in path.read_text().splitlines() if '"kind":"end"' in line]
    assert len(ends) == 4
    (again,) = run.resumptions
    assert again.source == describe_machine().source
    assert again.at > run.header.started


def _begun(tmp_path, *actions):
    """A run that was stopped before its first point."""
    with pytest.raises(KeyboardInterrupt):
        _measure(tmp_path, *actions, on_start=Mock(side_effect=KeyboardInterrupt))
    (path,) = tmp_path.glob("*.jsonl")
    return path


@pytest.mark.parametrize(
    ("before", "now", "error", "words"),
    [
        ('"lab":"fake"', '"lab":"other"', RunFileError, "a run of the lab 'other', not of 'fake'"),
        ('"host":"', '"host":"another-', RunFileError, "numbers of two machines do not mix"),
        (
            '"instructions":"',
            '"instructions":"other than ',
            RunFileError,
            "numbers of two machines do not mix",
        ),
        (
            '"ranks_by_host":null',
            '"ranks_by_host":{"here":[0,1]}',
            RunFileError,
            "two layouts of ranks do not mix",
        ),
        ('"config":{', '"config":{"gone":1,', ParameterError, "unknown parameter 'gone'"),
        (
            '"timeout_s":20',
            '"timeout_s":21',
            RunFileError,
            "plans other points, or a file has changed",
        ),
    ],
)
def test_a_run_that_cannot_go_on_is_refused_before_anything_is_fetched(
    tmp_path, monkeypatch, before, now, error, words
):
    path = _begun(tmp_path, "fine")
    monkeypatch.setitem(vars(FAKE), "prepare", lambda *_: pytest.fail("fetched"))
    with RunWriter.reopen(path), pytest.raises(RunFileError, match="another process is writing"):
        resume(FAKE, path)
    text = path.read_text()
    path.write_text(text.replace(before, now))
    assert path.read_text() != text
    with pytest.raises(error, match=words):
        resume(FAKE, path)


def test_a_run_that_somebody_completed_meanwhile_is_not_measured_twice(tmp_path, monkeypatch):
    path = _begun(tmp_path, "fine")
    reopen = RunWriter.reopen

    def reopen_late(path):
        with monkeypatch.context() as patched:
            patched.setattr(RunWriter, "reopen", reopen)
            resume(FAKE, path)
        return reopen(path)

    monkeypatch.setattr(RunWriter, "reopen", reopen_late)
    with pytest.raises(RunFileError, match="another process has written this run meanwhile"):
        resume(FAKE, path)
    assert len(Run.load(path).frame()) == 2


def test_only_the_first_rank_of_a_job_compares_its_machine_with_the_run(tmp_path, monkeypatch):
    path = _begun(tmp_path, "fine")
    path.write_text(path.read_text().replace('"host":"', '"host":"another-'))
    nothing = [None, None]  # after a broadcast that only waits for all
    agreed = iter([None, nothing, None, nothing, []])
    monkeypatch.setattr(measuring, "job_rank", lambda: 1)
    for module in (measuring, executor):
        monkeypatch.setattr(module, "broadcast_from_first_rank", lambda _: next(agreed))
    with pytest.raises(SystemExit) as end:
        resume(FAKE, path)
    assert end.value.code == 0
    assert list(agreed) == []


def test_a_run_whose_data_cannot_be_had_stays_as_it_is(tmp_path, monkeypatch):
    path = _begun(tmp_path, "fine")
    before = path.read_bytes()
    with monkeypatch.context() as patched:
        patched.setitem(vars(FAKE), "prepare", lambda *_: "no network")
        with pytest.raises(ParameterError, match="cannot go on: no network"):
            resume(FAKE, path)
    assert path.read_bytes() == before
    assert resume(FAKE, path).pending == []


def test_nothing_is_fetched_for_points_that_cannot_be_measured_here(tmp_path, monkeypatch):
    path = _begun(tmp_path / "begun", "skip", "skip")
    monkeypatch.setitem(vars(FAKE), "prepare", lambda *_: pytest.fail("fetched"))
    for run in (resume(FAKE, path), _measure(tmp_path / "new", "skip", "skip")):
        assert set(run.coverage()["reason"]) == {"needs what this machine has not"}


def test_what_cannot_be_prepared_is_skipped_with_the_reason_and_nothing_runs(tmp_path, monkeypatch):
    said = []
    monkeypatch.setitem(vars(FAKE), "prepare", lambda config, say: say("looking") or "no network")
    run = _measure(tmp_path, "fine", "die", on_progress=lambda progress: said.append(progress.text))
    assert run.coverage()["status"].tolist() == ["skipped", "skipped"]
    assert set(run.coverage()["reason"]) == {"no network"}
    assert "looking" in said


def test_what_the_caller_must_change_stops_before_there_is_a_run(tmp_path, monkeypatch):
    monkeypatch.setitem(
        vars(FAKE), "prepare", Mock(side_effect=ParameterError("fake: the file is damaged"))
    )
    with pytest.raises(ParameterError, match="damaged"):
        _measure(tmp_path, "fine")
    assert list(tmp_path.iterdir()) == []


def _count_attempts(point, checkpoints):
    """How often the point was begun before, by what its checkpoint says."""
    file = checkpoints / point.id / "attempts"
    attempts = int(file.read_text()) if file.exists() else 0
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(str(attempts + 1))
    yield {"attempts": attempts, "half": 1}


def test_a_worker_that_keeps_checkpoints_finds_them_when_the_run_is_resumed(tmp_path, monkeypatch):
    monkeypatch.setitem(vars(FAKE), "worker", _count_attempts)
    monkeypatch.setitem(vars(FAKE), "keeps_checkpoints", True)
    with monkeypatch.context() as patched:
        patched.setattr(RunWriter, "add_row", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            _measure(tmp_path, "fine")
    (path,) = tmp_path.glob("*.jsonl")
    checkpoints = path.with_suffix(".checkpoints")
    assert [file.name for file in checkpoints.iterdir()] == Run.load(path).pending
    assert resume(FAKE, path).frame()["attempts"].tolist() == [1]
    assert not checkpoints.exists()


class _InterruptedLine(NotebookLine):
    """The reader presses the button once one point has been measured."""

    def update(self, progress):
        if progress.done == 1:
            raise KeyboardInterrupt


def interrupt_after_a_point(monkeypatch):
    """As in a kernel, whose line is the reader's."""
    monkeypatch.setattr(notebook, "get_ipython", lambda: Mock(kernel=True))
    monkeypatch.setattr(notebook, "NotebookLine", _InterruptedLine)


def test_an_interrupted_measurement_goes_on_in_its_notebook(monkeypatch, home):
    lab = OpenLab(
        FAKE,
        Parameters(
            "smoke", None, FAKE.profiles["smoke"].model_copy(update={"actions": ["fine"] * 3})
        ),
    )
    with pytest.raises(ValueError, match="nothing was interrupted"):
        lab.resume()
    interrupt_after_a_point(monkeypatch)
    with pytest.raises(
        KeyboardInterrupt, match=r"lab\.resume\(\) goes on, or in a terminal `labkit measure"
    ):
        lab.measure()
    monkeypatch.undo()
    frame = lab.resume()
    assert set(frame["size"]) == {1, 2, 3}
    assert not lab.run.pending
    assert len(list(home.glob("data/runs/fake/*.jsonl"))) == 1
    assert len(lab.resume()) == len(frame)  # a cell that was left over does not stop "Run All"


def test_a_run_that_was_interrupted_is_not_taken_for_a_later_one(monkeypatch, home):
    lab = OpenLab(
        FAKE,
        Parameters(
            "smoke", None, FAKE.profiles["smoke"].model_copy(update={"actions": ["fine"] * 2})
        ),
    )
    interrupt_after_a_point(monkeypatch)
    with pytest.raises(KeyboardInterrupt, match=r"lab\.resume"):
        lab.measure()
    lab.study = replace(FAKE, prepare=Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt, match=r"^interrupted$"):
        lab.measure()
    with pytest.raises(ValueError, match="nothing was interrupted"):
        lab.resume()


def test_only_what_is_new_is_measured_with_the_baseline_and_can_be_resumed(monkeypatch, home):
    study = replace(
        FAKE, plugin_parameter="actions", register=lambda name, alternative: {name: alternative}
    )
    lab = OpenLab(
        study,
        Parameters(
            "smoke", None, FAKE.profiles["smoke"].model_copy(update={"actions": ["fine"] * 2})
        ),
    )
    with pytest.raises(ParameterError, match="only=True"):
        lab.measure(only=True)
    assert set(lab.measure({"mine": print}, only=True)["action"]) == {"mine"}
    interrupt_after_a_point(monkeypatch)
    with pytest.raises(KeyboardInterrupt):
        lab.measure({"mine": print, "other": print}, only=True)
    monkeypatch.undo()
    assert set(lab.resume()["action"]) == {"mine", "other"}


def test_a_lab_that_predicts_calibrates_the_machine_first(monkeypatch, home):
    check = Check(
        id="c", text="", table=lambda results: pd.DataFrame(), measured="a", predicted="b"
    )
    study = replace(FAKE, questions=[replace(check, needs_calibration=True)])
    assert not needs_calibration([study], "smoke")
    assert not needs_calibration([FAKE, replace(FAKE, questions=[check])], "quick")
    assert needs_calibration([study], "quick")
    monkeypatch.setenv("WORLD_SIZE", "4")  # left over from something else: alone it is no job
    assert needs_calibration([study], "quick")
    begun = []
    monkeypatch.setattr(notebook, "calibrate", lambda *_: begun.append("limits"))
    lab = OpenLab(study, Parameters("quick", None, FAKE.profiles["smoke"]))
    lab.measure()
    assert begun == ["limits"]


def test_measuring_itself_says_that_an_alternative_is_wrong(monkeypatch, capsys):
    def rename(_, row):
        is_ring = row["values"].get("algorithm") == "ring"
        return row | {
            "values": (
                row["values"]
                | ({"algorithm": "mine", "status": "wrong", "reason": "here"} if is_ring else {})
            )
        }

    run = run_of(recorded("all_reduce"), rename)
    monkeypatch.setattr(notebook, "measure", lambda *_, **__: run)
    study = load_lab("all_reduce")
    OpenLab(study, Parameters("smoke", None, study.profiles["smoke"])).measure({"mine": print})
    assert capsys.readouterr().out.count("mine (here)") == 1


@pytest.mark.parametrize("verdict", ["hangs", "fails"])
def test_an_alternative_that_would_end_its_points_is_refused_first(verdict, monkeypatch, home):
    study = replace(
        FAKE, plugin_parameter="actions", register=lambda name, alternative: {name: alternative}
    )
    monkeypatch.setattr(
        notebook,
        "check_alternative",
        lambda *_: AlternativeCheck(verdict, "rank 1 has a problem, in mine"),
    )
    lab = OpenLab(study, Parameters("smoke", None, FAKE.profiles["smoke"]))
    with pytest.raises(ParameterError, match=f"mine {verdict}: rank 1 has"):
        lab.measure({"mine": print})
    assert list(home.glob("data/runs/*/*")) == []


def test_a_lab_in_a_console_is_text(monkeypatch, home, capsys):
    lab = open_lab(FAKE, profile="smoke", actions=["fine", "skip"])
    lab.table(lab.measure()[["size", "rank"]], "Rows.")
    lab.answer("how_many")
    said = capsys.readouterr().out
    assert "<" not in said
    for text in ("2 points planned, 1 measured, 1 skipped", "Rows.\nsize  rank\n", "2 rows."):
        assert text in said
