"""Runs on disk: nothing measured is lost, and nothing foreign is taken for a run."""

import json
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from labkit.lab import project
from labkit.lab.point import Point
from labkit.lab.runs.records import RunWriter
from labkit.lab.runs.store import Run, RunFileError, find_run
from labkit.machine.description import describe_machine
from labkit.machine.source import Source
from tests.lab.fake_lab import header

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class _Point(Point):
    size: int
    kinds: tuple[str, ...] = ("a", "b")


POINTS = [_Point(size=size) for size in (1, 2, 3)]
HEADER = header(POINTS)


@pytest.fixture
def writer(tmp_path):
    with RunWriter.create(tmp_path, HEADER) as writer:
        yield writer


def test_a_run_comes_back_as_it_was_written(writer):
    writer.add_row(POINTS[0], 0, {"kind": "a", "seconds": [1.0, 2.0]})
    writer.add_row(POINTS[0], 1, {"kind": "a", "seconds": [3.0, 4.0]})
    writer.end_point(POINTS[0], "ok", elapsed_s=5.0)
    writer.end_point(POINTS[1], "skipped", reason="too large")
    run = Run.load(writer.path)
    assert run.header == HEADER
    assert [_Point(size=size).id for size in (1, 2, 3)] == [*run.header.planned]
    frame = run.frame()
    assert frame[["rank", "repeat", "seconds"]].values.tolist() == [
        [0, 0, 1],
        [0, 1, 2],
        [1, 0, 3],
        [1, 1, 4],
    ]
    assert set(frame["size"]) == {1}
    assert "kinds" not in frame
    coverage = run.coverage()
    assert coverage["status"].tolist() == ["ok", "skipped", "pending"]
    assert coverage["reason"].tolist()[1] == "too large"
    assert run.pending == [POINTS[2].id]


def test_the_name_says_when_and_where_and_a_taken_name_gets_a_number(writer, tmp_path):
    assert writer.path.name == f"20300102T000000Z-{describe_machine().slug}-smoke.jsonl"
    with RunWriter.create(tmp_path, HEADER) as second:
        assert second.path.stem == writer.path.stem + "-2"


def test_rows_of_a_point_that_failed_or_did_not_end_give_no_numbers(writer):
    writer.add_row(POINTS[0], 0, {"seconds": [1.0]})
    writer.end_point(POINTS[0], "failed", reason="rank 1 was killed")
    writer.add_row(POINTS[1], 0, {"seconds": [1.0]})
    assert Run.load(writer.path).frame().empty
    # an end needs a reason unless it is ok
    for status, reason in (("failed", None), ("ok", "fine"), ("lost", "x")):
        with pytest.raises(ValueError, match=r"status"):
            writer.end_point(POINTS[0], status, reason=reason)


def test_a_torn_line_is_passed_over_and_dropped_on_resuming(writer):
    writer.end_point(POINTS[0], "ok")
    writer.add_row(POINTS[1], 0, {"seconds": [1.0]})
    with writer.path.open("a") as file:
        file.write('{"kind": "row", "po')
    assert Run.load(writer.path).pending == [POINTS[1].id, POINTS[2].id]
    writer.close()
    with RunWriter.reopen(writer.path) as again:
        again.start_resumption("again", None)
        again.add_row(POINTS[1], 0, {"seconds": [2.0]})
        again.end_point(POINTS[1], "ok")
    run = Run.load(writer.path)
    assert run.frame()["seconds"].tolist() == [2.0]  # not the row of the attempt that was cut off
    assert run.pending == [POINTS[2].id]


def test_a_run_says_when_and_from_which_source_it_was_resumed(writer):
    sources = {"first": describe_machine().source, "later": Source(commit="fff9999aaa", dirty=True)}
    writer.close()
    for command, source in sources.items():
        with RunWriter.reopen(writer.path) as again:
            again.start_resumption(command, source)
    run = Run.load(writer.path)
    assert {again.command: again.source for again in run.resumptions} == sources
    assert all(
        abs(datetime.now(UTC) - again.at) < timedelta(minutes=5) for again in run.resumptions
    )
    assert run.sources == [*sources.values()]


END = {"kind": "end", "point": POINTS[0].id, "status": "ok", "elapsed_s": 1.0}
ROW = {"kind": "row", "point": POINTS[0].id, "rank": 0, "values": {}}


@pytest.mark.parametrize(
    ("record", "words"),
    [
        ({"kind": "resumed", "at": "yesterday"}, "at"),
        ({"kind": "resumed", "at": "2026-11-30T00:00:00Z", "command": "x", "source": 1}, "source"),
        (END | {"facts": 3}, "facts"),
        (END | {"status": "failed"}, "reason"),
        (ROW | {"point": "another"}, "not in the plan"),
        (ROW | {"values": {"a": [1.0], "b": [1.0, 2.0]}}, "differ in number"),
        ({"kind": "other"}, "kind"),
    ],
)
def test_a_damaged_record_is_refused_by_name(writer, record, words):
    with writer.path.open("a") as file:
        file.write(json.dumps(record) + "\n")
    with pytest.raises(RunFileError, match=f"line 2: not a record of a run .*{words}"):
        Run.load(writer.path)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "header"),
        (b"\x00\xff\n", "line 1"),
        (b'{"kind": "row"}\n', "header"),
        (b'{"kind": "header", "format_version": 99}\n', "format 99"),
        (b'{"kind": "header", "format_version": 2}\n', "damaged header"),
        (b"[1, 2]\n", "not an object"),
        (
            b'{"kind": "header", "format_version": 3, "machine": {"source": {"version": "9.1"}}}\n',
            "by labkit 9.1 in",
        ),
    ],
)
def test_a_foreign_or_damaged_file_is_refused_by_name(tmp_path, content, words):
    path = tmp_path / "run.jsonl"
    path.write_bytes(content)
    with pytest.raises(RunFileError, match=words) as caught:
        Run.load(path)
    assert str(path) in str(caught.value)


def test_a_run_is_found_by_path_and_by_the_beginning_of_its_name(writer, tmp_path):
    assert find_run([tmp_path], str(writer.path)) == writer.path
    assert find_run([tmp_path], "20300102") == writer.path
    with pytest.raises(RunFileError, match=f"^'1999' is neither a run file nor .* in {tmp_path}$"):
        find_run([tmp_path], "1999")
    with pytest.raises(RunFileError, match=r"in data/recorded or data/runs$"):
        find_run(
            [project.recorded_directory() / lab for lab in "ab"] + [project.runs_directory() / "a"],
            "1999",
        )
    (tmp_path / "20300102T-other.jsonl").touch()
    with pytest.raises(
        RunFileError,
        match=r"begins the names of 2 runs: \S+/20300102T-other, \S+/20300102.*; give more",
    ):
        find_run([tmp_path], "20300102")
