"""The command line as a user meets it: messages in one line, and exit codes that say what
happened."""

import errno
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from unittest.mock import Mock

import pytest
from papermill.parameterize import parameterize_path

from labkit import __version__
from labkit.lab import project
from labkit.lab.commands.console import number, prepare_shell
from labkit.lab.pages import report
from labkit.lab.pages.execute import execute_notebook
from labkit.lab.pages.report import LabResult
from labkit.lab.project import (
    committed_notebook,
    notebook_path,
    recorded_directory,
    reference_directory,
)
from labkit.lab.runs.measure import measure
from labkit.lab.runs.store import Run
from labkit.studies import LABS, load_lab
from tests.commands import all_runs, runs_by
from tests.lab.fake_lab import FAKE, FakeConfig


def test_list_names_every_lab_and_the_version_is_known_in_any_directory(
    command, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    status, said, _ = command("list")
    assert status == 0
    assert all(lab in said for lab in LABS)
    status, said, _ = command("--version")
    assert status == 0
    assert __version__ in said


LIGHT = """
import sys
from labkit.__main__ import app
asked = ["advise", "--model", "llama-3-8b", "--gpus", "8", "--gpu", "h100"]
for line in (["measure", "--help"], asked):
    sys.argv[1:] = line
    app(standalone_mode=False)
print(sorted({"torch", "pandas", "matplotlib", "scipy", "jinja2"} & set(sys.modules)))
"""


def test_help_and_advice_come_without_what_measuring_needs():
    result = subprocess.run(
        [sys.executable, "-c", LIGHT], capture_output=True, text=True, timeout=60
    )
    assert result.stdout.splitlines()[-1] == "[]", result.stderr


TWO_RANKS = ("world_sizes=[2]", "algorithms=['ring']", "transports=[]", "scheduling_bytes=[]")


def _set(many, *one_by_one):
    """Options that set parameters of a lab."""
    return [part for text in (*many, *one_by_one) for part in ("--set", text)]


def test_a_run_holds_the_command_and_no_path_of_the_machine(command, home, monkeypatch):
    monkeypatch.delitem(sys.modules, "ipykernel", raising=False)  # with it, it were a notebook
    arguments = [
        "measure",
        "all_reduce",
        "--profile",
        "smoke",
        *_set(TWO_RANKS, "sizes_bytes=[64]", "seed=7"),
    ]
    status, *_ = command(*arguments)
    assert status == 0
    (path,) = all_runs()
    assert Run.load(path).header.command == shlex.join(["labkit", *arguments])
    assert str(home) not in path.read_text()


def test_doctor_and_terminal_say_what_runs_here_and_why_the_rest_does_not(command, monkeypatch):
    def begin(*_, on_start, **__):
        on_start(None)
        raise KeyboardInterrupt

    monkeypatch.setattr("labkit.lab.runs.measure.measure", begin)
    for reason in (None, "no g++"):
        for module in ("parallel.transport.library", "lab.commands.doctor"):
            monkeypatch.setattr(f"labkit.{module}.unavailable_reason", lambda reason=reason: reason)
        status, _, complaints = command("measure", "all_reduce", "--profile", "smoke")
        assert (status, "shared memory not available (no g++)" in complaints) == (
            130,
            reason is not None,
        )
    status, said, _ = command("doctor")
    assert status == 0
    for word in (
        "processor",
        "backends",
        "all_reduce",
        "smoke",
        "paper",
        "not available (no g++): CPU ranks",
    ):
        assert word in " ".join(said.split())


MISTAKES = [
    (
        ["measure", "all_reduce", "--set", "wrold_sizes=[2]"],
        ["'wrold_sizes'", "did you mean 'world_sizes'"],
    ),
    (
        ["report", "all_reduce", "--set", "sizes_bytes=[-1]"],
        ["'sizes_bytes'", "multiple of 8", "-1"],
    ),
    (["measure", "all_reduce", "--set", "world_sizes=[1000]"], ["'world_sizes'", "1000"]),
    (
        ["report", "all_reduce", "attention", "--run", "RUN"],
        ["one lab", "got 2: all_reduce, attention"],
    ),
    (
        ["measure", "all_reduce", "--resume", "RUN", "--profile", "smoke"],
        ["takes its parameters from the run"],
    ),
    (["measure", "all_reduce", "--resume", "RUN", "--minutes", "1"], ["--minutes"]),
    (["report", "all_reduce", "--run", "RUN", "--minutes", "1"], ["--minutes", "--run"]),
    (["measure", "al_reduce"], ["'al_reduce'", "did you mean 'all_reduce'"]),
    (
        ["report", "all_reduce", "--run", "no-such-run"],
        ["no-such-run", "data/recorded/all_reduce or data/runs/all_reduce"],
    ),
    (
        ["measure", "all_reduce", "--resume", "no-such-run"],
        ["no-such-run", "in data/runs/all_reduce"],
    ),
    (["measure", "all_reduce", "--resume", "docs"], ["'docs' is neither a run file nor"]),
    (["compare", "README.md", "README.md"], ["README.md: line 1", "not a line of a run"]),
]


def _assert_one_message(said, words):
    assert len(said.strip().splitlines()) == 1
    assert "Traceback" not in said
    for word in words:
        assert word in said


@pytest.mark.parametrize(("arguments", "words"), MISTAKES)
def test_a_mistake_stops_before_measuring_with_one_message(arguments, words, command, monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "nonsense")
    status, _, complaint = command(*arguments)
    assert status == 2
    _assert_one_message(complaint, words)
    assert not runs_by(arguments)


RECORDED, LIMITS = (
    next((recorded_directory() / lab).glob("*.jsonl")) for lab in ("attention", "limits")
)
WRITING = [
    ["measure", "all_reduce", "--profile", "smoke"],
    ["report", "attention", "--profile", "smoke"],
    ["report", "attention", "--run", RECORDED.stem],
    ["compare", RECORDED.stem, "copy.jsonl"],
]


def test_a_report_runs_the_committed_notebook_while_a_reader_explores_with_the_file(
    tmp_path, monkeypatch, command
):
    path = tmp_path / notebook_path("limits").name
    shutil.copy(notebook_path("limits"), path)
    monkeypatch.setattr(project, "notebooks_directory", lambda: tmp_path)
    original = path.read_text()
    assert committed_notebook("limits") == (original, False)  # no repository
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "a"]):
        subprocess.run(["git", "-C", str(tmp_path), *arguments], check=True)
    notebook = json.loads(original)
    notebook["cells"][0]["metadata"]["collapsed"] = True  # as JupyterLab saves it
    path.write_text(json.dumps(notebook))
    assert committed_notebook("limits") == (path.read_text(), False)
    notebook["cells"][-1]["source"] = "1 / 0"
    for edited in (json.dumps(notebook), "<<<<<<< HEAD"):
        path.write_text(edited)
        assert committed_notebook("limits") == (original, True)
    monkeypatch.setattr(report, "report_lab", Mock(side_effect=KeyboardInterrupt))
    _, _, complaints = command("report", "limits", "--run", LIMITS.stem)
    assert f"{path.name}: edited; the report runs the committed notebook" in "".join(
        complaints.split("\n")
    )


def test_a_disk_that_is_full_is_one_line_and_status_1(command, monkeypatch, tmp_path):
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr("labkit.lab.project.Path.write_bytes", Mock(side_effect=full))
    header, rest = RECORDED.read_text().split("\n", 1)
    other = tmp_path / "other.jsonl"
    other.write_text(
        json.dumps(json.loads(header) | {"started": "2030-01-01T00:00:00Z"}) + "\n" + rest
    )
    status, _, said = command(
        "compare", str(RECORDED), str(other), "--output", str(tmp_path / "page.html")
    )
    assert status == 1
    assert said == f"error: {tmp_path / 'page.html'}: No space left on device\n"


def test_a_disk_that_fills_up_keeps_the_index_of_the_labs_before(command, monkeypatch, home):
    full = OSError(errno.ENOSPC, "No space left on device", "page.html")
    first = LabResult(load_lab("limits"), home / "limits.html", 1.0, None)
    monkeypatch.setattr(report, "report_lab", Mock(side_effect=[first, full]))
    status, _, complaints = command("report", "limits", "memory", "--profile", "smoke")
    assert (status, "Traceback" in complaints) == (1, False)
    assert complaints.splitlines()[-1] == "error: page.html: No space left on device"
    assert "Still being measured" in (home / "reports" / "index.html").read_text()


@pytest.mark.parametrize("arguments", WRITING, ids=["measure", "report", "report --run", "compare"])
def test_a_folder_that_takes_no_files_is_told_before_anything_is_measured(
    arguments, command, tmp_path, monkeypatch
):
    home = tmp_path / "home"
    home.write_text("")  # a file, for which not even root can make folders
    shutil.copy(RECORDED, tmp_path / "copy.jsonl")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LABKIT_HOME", str(home))
    status, _, complaint = command(*arguments)
    assert status == 2
    _assert_one_message(complaint, [str(home), "cannot be written", "export LABKIT_HOME="])


def test_measure_says_why_points_were_skipped_and_they_are_no_failure(
    command, monkeypatch, tmp_path
):
    config = FakeConfig(actions=["fine", "skip"])
    run = measure(FAKE, config, profile="smoke", directory=tmp_path)
    monkeypatch.setattr("labkit.lab.runs.measure.measure", lambda *_, **__: run)
    status, said, complaints = command("measure", "all_reduce", "--profile", "smoke")
    assert status == 0
    assert "skipped" in said
    assert re.search(r"^  1 skipped: needs what this machine has not", complaints, re.MULTILINE)


PREDICT = f"predict {reference_directory() / 'scaling' / 'training_runs.csv'}"


NO_HOME = {"HOME": "/proc/none", "PYTHONWARNINGS": "error"}


def test_a_reader_that_leaves_ends_a_command_quietly():
    """Also where warnings are errors and there is no home folder."""
    environment = os.environ | NO_HOME
    line = f"{sys.executable} -m labkit {PREDICT} | true; exit ${{PIPESTATUS[0]}}"
    result = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, timeout=120, env=environment
    )
    assert (result.returncode, result.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize(
    ("line", "status", "said"),
    [
        ("{} >&-", 0, ""),
        ("{} > /dev/full", 1, "standard output: No space left"),
        ("mkdir d; cd d; rmdir ../d; {}", 2, "the working directory is gone"),
    ],
)
def test_what_a_shell_took_away_is_one_line(line, status, said, tmp_path):
    line = line.format(f"{sys.executable} -m labkit --version")
    result = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert (result.returncode, len(result.stderr.splitlines())) == (status, int(bool(said)))
    assert said in result.stderr


def test_what_a_terminal_cannot_show_is_replaced(monkeypatch):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    prepare_shell()
    print("größe \udce4")
    stdout.flush()
    assert stdout.buffer.getvalue() == b"gr??e ?\n"


def test_a_home_of_an_unknown_user_is_one_line(command, monkeypatch):
    monkeypatch.setenv("LABKIT_HOME", "~nobody-of-this-name/lab")
    for arguments in (["hand-in", "Ann"], ["measure", "limits"], ["compare", "a", "b"]):
        status, _, complaints = command(*arguments)
        assert status == 2
        _assert_one_message(complaints, ["LABKIT_HOME=~nobody-of-this-name/lab"])


def test_a_folder_with_braces_is_no_parameter_of_papermill(tmp_path, monkeypatch):
    carried_out = Mock()
    monkeypatch.setattr("labkit.lab.pages.execute.papermill.execute_notebook", carried_out)
    target = tmp_path / "a {b} %d" / "limits.ipynb"
    execute_notebook("{}", target, {}, Mock())
    assert parameterize_path(carried_out.call_args.args[0], {}) == str(target)
    assert target.read_text() == "{}"


LONG = "x" * 300


@pytest.mark.parametrize(
    "arguments",
    [
        ("notebook", "limits", "--output", f"{LONG}.ipynb"),
        ("compare", "a", "b", "--output", f"{LONG}.html"),
        ("try", f"{LONG}.py:setup"),
        ("check", "--bundle", f"{LONG}.zip"),
        ("hand-in", "Ann", "--notebook", LONG),
    ],
)
def test_a_path_that_can_name_no_file_is_one_line(arguments, command, home):
    status, _, complaints = command(*arguments)
    assert status == 2
    _assert_one_message(complaints, [LONG[:50]])


def test_a_piped_table_has_one_line_per_row_however_narrow_the_terminal_is(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    status, said, _ = command("list")
    assert status == 0
    assert [line.split()[0] for line in said.splitlines()] == list(LABS)
    assert all(load_lab(lab).summary in said for lab in LABS)


STRICT = ("-W", "error", "-m", "labkit", "measure", "all_reduce", "--profile", "smoke")


@pytest.mark.slow
def test_a_command_says_nothing_of_warnings_or_of_a_missing_home(home):
    """Warnings as errors would be printed by processes that end with sockets open."""
    environment = os.environ | NO_HOME
    result = subprocess.run(
        [sys.executable, *STRICT, *_set(TWO_RANKS, "sizes_bytes=[64]")],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
    )
    assert result.returncode == 0
    assert not any(word in result.stderr for word in ("Traceback", "atplotlib", "Warning"))


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP])
@pytest.mark.parametrize("arguments", [["check"], ["measure", "all_reduce", "--profile", "smoke"]])
def test_a_file_system_without_locks_is_one_line(arguments, number, command, home, monkeypatch):
    monkeypatch.setattr(
        "labkit.lab.project.fcntl.flock", Mock(side_effect=OSError(number, os.strerror(number)))
    )
    status, _, complaints = command(*arguments)
    assert (status, "Traceback" in complaints) == (2, False)
    assert "export LABKIT_HOME" in complaints.splitlines()[-1]
    assert not all_runs()


def test_a_machine_that_cannot_reach_itself_is_one_line(command, monkeypatch):
    refused = OSError(errno.ENETUNREACH, "Network is unreachable")
    monkeypatch.setattr("socket.create_connection", Mock(side_effect=refused))
    for arguments in (["measure", "all_reduce"], ["report", "limits"], ["check"]):
        status, _, complaints = command(*arguments)
        assert (status, len(complaints.splitlines())) == (1, 1)
        assert "Network is unreachable" in complaints


def test_what_the_clock_dates_in_the_future_has_no_age():
    measured = datetime.now(UTC) + timedelta(days=1)
    assert number("a", 1.0, "s", measured=measured)["age_s"] is None
