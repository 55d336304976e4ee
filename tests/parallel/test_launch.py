"""What a caller of `launch` gets: rows, ends and the first failure.

What is left behind: test_leftovers.py.
"""

from __future__ import annotations

import gc
import importlib
import os
import re
import signal
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from subprocess import PIPE, Popen
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist

from labkit.machine.cgroups import available_cores
from labkit.parallel.launch import PointEnd, RankError, Row, launch, run_ranks
from labkit.parallel.ranks import group, results, server_process
from labkit.parallel.ranks.debugger import TERMINAL
from labkit.parallel.ranks.results import current_alternative
from tests.parallel.waiting import is_gone, wait_until


def drain(worker: Any, points: list[Any], **options: Any) -> tuple[list[Row], list[PointEnd]]:
    """All rows and all ends."""
    rows = []
    ends = []
    for item in launch(worker, points, **options):
        rows.append(item) if isinstance(item, Row) else ends.append(item)
    return rows, ends


# Rows and points


def test_rows_arrive_while_the_worker_still_runs(tmp_path: Path) -> None:
    received = tmp_path / "received"

    def worker(point: str) -> Iterator[dict[str, Any]]:
        yield {"step": 1}
        while not received.exists():
            time.sleep(0.01)
        yield {"step": 2}

    items = launch(worker, ["a point"], world_size=1, timeout_s=30)
    assert next(items) == Row(0, 0, {"step": 1})
    received.touch()
    assert next(items) == Row(0, 0, {"step": 2})
    end = next(items)
    assert isinstance(end, PointEnd)
    assert end.status == "ok"
    assert list(items) == []


def test_one_group_serves_all_points() -> None:
    def worker(point: int) -> Iterator[dict[str, Any]]:
        total = torch.tensor(float(point + dist.get_rank()))
        dist.all_reduce(total)
        yield {"pid": os.getpid(), "total": total.item()}

    rows, ends = drain(worker, [10, 20, 30], world_size=2)
    assert [(end.index, end.status) for end in ends] == [(0, "ok"), (1, "ok"), (2, "ok")]
    assert list(launch(worker, [], world_size=2)) == []
    assert {row.values["total"] for row in rows if row.index == 1} == {41.0}
    assert len({(row.rank, row.values["pid"]) for row in rows}) == 2
    assert os.getpid() not in {row.values["pid"] for row in rows}


def test_a_point_leaves_no_memory_behind_on_a_gpu() -> None:
    freed: list[bool] = []

    def worker(point: int) -> Iterator[dict[str, Any]]:
        yield {"freed": list(freed)}

        class Model:
            hook: Model

        model = Model()
        model.hook = model  # wrappers and their hooks refer to one another
        alive = weakref.ref(model)
        torch.cuda.is_initialized = lambda: True  # type: ignore[assignment]
        torch.cuda.empty_cache = lambda: freed.append(alive() is None)  # type: ignore[assignment]

    rows, _ = drain(worker, [1, 2, 3], world_size=1, backend=None)
    assert [row.values["freed"] for row in rows] == [[], [True], [True, True]]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        (
            {"a": np.float32(1.5), "b": np.int64(7), "c": torch.tensor(2.0)},
            {"a": 1.5, "b": 7, "c": 2.0},
        ),
        (
            {"shape": (3, 4), "nested": [{"a": (np.int64(1),)}]},
            {"shape": [3, 4], "nested": [{"a": [1]}]},
        ),
        ({"good": 1, "bad": {1, 2}}, "row value 'bad' is not JSON-able: {1, 2}"),
        ({"bad": torch.ones(1)}, r"row value 'bad' is not JSON-able: tensor\(\[1.\]\)"),
        ({"bad": [{0: 1.5}]}, "expected names to be strings, got .*0"),
        ({1: "one"}, "expected names to be strings, got .*1"),
        ("row", "a mapping from names to values, the worker yielded 'row'"),
    ],
)
def test_a_row_is_made_plain_or_its_wrong_value_is_named(
    row: Any, expected: dict[str, Any] | str
) -> None:
    if isinstance(expected, str):
        with pytest.raises(TypeError, match=expected):
            results.plain_row(row)
    else:
        assert results.plain_row(row) == expected


def test_the_facts_are_what_was_in_force() -> None:
    def worker(point: None) -> Iterator[dict[str, Any]]:
        batch = hasattr(os, "SCHED_BATCH") and os.sched_getscheduler(0) == os.SCHED_BATCH
        yield {"batch": batch, "threads": torch.get_num_threads(), "frozen": gc.get_freeze_count()}

    for scheduling in ("batch", "default"):
        rows, ends = drain(worker, [None], world_size=2, scheduling=scheduling)
        facts = ends[0].facts
        assert (facts["world_size"], facts["backend"], facts["start_method"]) == (
            2,
            "gloo",
            "forkserver",
        )
        assert facts["threads"] == rows[0].values["threads"] == max(1, available_cores() // 2)
        assert (facts["scheduling"] == "batch") == rows[0].values["batch"]
        assert rows[0].values["frozen"] > 100_000  # no collection touches torch's pages
        assert facts["start_s"] > 0
        assert facts["scheduling"] == scheduling or not hasattr(os, "SCHED_BATCH")


# What reaches the ranks


def test_the_environment_of_this_moment_reaches_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def variables() -> list[str | None]:
        return [os.environ.get(name) for name in ("LABKIT_A", "OMP_NUM_THREADS")]

    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for changes in ({"LABKIT_A": "first", "OMP_NUM_THREADS": "5"}, {"LABKIT_A": "second"}):
        with monkeypatch.context() as patched:
            for name, value in changes.items():
                patched.setenv(name, value)
            assert run_ranks(variables, world_size=1) == [
                [changes["LABKIT_A"], changes.get("OMP_NUM_THREADS")]
            ]
    assert "OMP_NUM_THREADS" not in os.environ


def test_an_edited_module_takes_effect_in_the_next_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "labkit_edited_module.py"
    module.write_text("def answer(): return 'before'\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    function = importlib.import_module("labkit_edited_module").answer
    assert run_ranks(function, world_size=1) == ["before"]
    module.write_text("import os\ndef answer(): return ['after', os.getcwd()]\n")
    assert run_ranks(function, world_size=1) == [["after", str(tmp_path)]]
    del sys.modules["labkit_edited_module"]


def test_what_goes_by_value_keeps_its_file_and_the_main_module_is_not_run_again() -> None:
    def where() -> list[Any]:
        code = where.__code__
        inner = (lambda: None).__code__
        return [
            code.co_filename,
            code.co_firstlineno,
            inner.co_filename,
            "__file__" in vars(sys.modules["__main__"]),
        ]

    before = sys.modules["__main__"]
    assert run_ranks(where, world_size=1) == [
        [__file__, where.__code__.co_firstlineno, __file__, False]
    ]
    assert sys.modules["__main__"] is before


def test_two_threads_may_launch_at_once() -> None:
    found: dict[int, Any] = {}
    threads = [
        threading.Thread(
            target=lambda n=n: found.update(
                {n: run_ranks(lambda: dist.get_rank() + n, world_size=2)}
            )
        )
        for n in (10, 20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {10: [10, 11], 20: [20, 21]}


def test_a_breakpoint_in_a_rank_is_pdb_on_the_callers_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def stop_on_rank_1() -> int:
        answer = 6 * 7
        if dist.get_rank() == 1:
            breakpoint()
        dist.barrier()
        return answer

    ours, theirs = os.openpty()
    os.write(ours, b"p answer\nanswer = 1\ncontinue\n")
    monkeypatch.setenv(TERMINAL, os.ttyname(theirs))
    assert run_ranks(stop_on_rank_1, world_size=2) == [42, 1]
    said = os.read(ours, 4096).decode()
    os.close(ours)
    os.close(theirs)
    assert "(labkit-rank-1) 42" in said.replace("\r\n", "\n")
    assert "dist.barrier()" in said  # the line


def test_a_breakpoint_without_a_terminal_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TERMINAL, raising=False)
    monkeypatch.setattr(psutil.Process, "terminal", lambda _: None)
    with pytest.raises(RankError, match=f"{TERMINAL} set to one"):
        run_ranks(breakpoint, world_size=1)


# Failures


def failing(how: Callable[[str], None]) -> Callable[[str], Iterator[dict[str, Any]]]:
    """A worker that yields a row, then does that on rank 1 while rank 0 waits for it in a
    collective."""

    def worker(point: str) -> Iterator[dict[str, Any]]:
        yield {"pid": os.getpid()}
        if point != "works" and dist.get_rank() == 1:
            how(point)
        dist.barrier()

    return worker


def raise_error() -> None:
    print("a last word", flush=True)
    raise ValueError("a bad size\nand more")


def raise_here() -> None:
    raise ValueError("here")


def raise_memory_error() -> None:
    raise MemoryError


def lose_peer() -> None:
    raise RuntimeError("Connection closed by peer [127.0.0.1]:4711")


def hang() -> None:
    time.sleep(1000)


exit_3: Callable[[], Any] = partial(os._exit, 3)
get_killed: Callable[[], Any] = partial(signal.raise_signal, signal.SIGKILL)


FAILURES: dict[str, tuple[Callable[[], None], str, str | None]] = {
    "raises": (raise_error, "failed", "rank 1: ValueError: a bad size"),
    "ends": (partial(sys.exit, "enough"), "failed", "rank 1: SystemExit: enough"),
    "loses its peer": (
        lose_peer,
        "failed",
        "rank 1: RuntimeError: Connection closed by peer [127.0.0.1]:4711",
    ),
    "exits": (exit_3, "failed", "rank 1 exited with code 3"),
    "is killed": (get_killed, "failed", "rank 1 was killed by SIGKILL"),
    "is ended": (
        partial(signal.raise_signal, signal.SIGTERM),
        "failed",
        "rank 1 was killed by SIGTERM",
    ),
    "has no memory": (raise_memory_error, "oom", "rank 1: MemoryError"),
    "takes too much": (partial(torch.empty, 1 << 60), "oom", None),
}


def test_a_failure_costs_its_point_and_the_next_gets_new_ranks() -> None:
    points = [point for name in FAILURES for point in ("works", name)] + ["works"]
    rows, ends = drain(failing(lambda point: FAILURES[point][0]()), points, world_size=2)
    pids = [
        {row.values["pid"] for row in rows if row.index == index} for index in range(len(points))
    ]
    for number, (name, (_, status, reason)) in enumerate(FAILURES.items()):
        worked, failed = ends[2 * number : 2 * number + 2]
        assert (worked.status, failed.status) == ("ok", status), name
        assert failed.failure is not None
        assert failed.failure.rank == 1
        assert failed.reason == failed.failure.message
        assert reason is None or failed.reason == reason
        # and the rows of the failed point were handed over
        assert pids[2 * number] == pids[2 * number + 1]
        assert not pids[2 * number] & pids[2 * number + 2]
    assert ends[-1].status == "ok"
    assert all(is_gone(pid) for pid in set.union(*pids))


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (raise_here, "rank 1: ValueError: here, in second"),
        (get_killed, "rank 1 was killed by SIGKILL, in second"),
    ],
)
def test_a_failure_names_the_alternative_that_was_running(
    how: Callable[[], None], reason: str
) -> None:
    def worker(point: str) -> Iterator[dict[str, Any]]:
        for name in ("first", "second", "third"):
            with current_alternative.running(name):
                if (point, name, dist.get_rank()) == ("fails", "second", 1):
                    how()
                dist.barrier()
        yield {"running": current_alternative.name}

    rows, ends = drain(worker, ["fails", "works"], world_size=2)
    assert [(end.status, end.reason) for end in ends] == [("failed", reason), ("ok", None)]
    assert [row.values for row in rows if row.index == 1] == [{"running": ""}] * 2


def test_an_abort_in_cpp_comes_with_its_cause_and_stacks() -> None:
    def worker(point: None) -> None:
        rank = dist.get_rank()
        if rank == 0:
            dist.send(torch.ones(1000), dst=1)
        else:
            dist.recv(torch.ones(1), src=0)

    _, ends = drain(worker, [None], world_size=2, timeout_s=30)
    assert ends[0].status == "failed"
    assert ends[0].reason is not None
    assert re.match(r"rank 1 was killed by SIGABRT: .*4000 vs 4", ends[0].reason)
    assert ends[0].failure is not None
    assert "Fatal Python error: Aborted" in ends[0].failure.traceback


def test_a_hang_ends_at_the_deadline_with_its_alternative_and_the_stacks_of_all_ranks() -> None:
    def worker(point: str) -> Iterator[dict[str, Any]]:
        yield {"point": point}
        if point == "hangs" and dist.get_rank() < 2:
            current_alternative.begin("a ring")
            print("begins", flush=True)
            dist.barrier() if dist.get_rank() == 0 else hang()

    rows, ends = drain(worker, ["hangs", "works"], world_size=3, timeout_s=1)
    assert len(rows) == 6
    assert [end.status for end in ends] == ["timeout", "ok"]
    assert ends[0].reason == "ranks 0, 1 still running after 1 s (timeout_s), in a ring"
    failure = ends[0].failure
    assert failure is not None
    assert failure.rank is None
    assert failure.output_tail == "[rank 0] begins\n[rank 1] begins"
    waits, hangs, ends_well = re.split("rank [12]: ?", failure.traceback)
    assert "in barrier" in waits
    assert "in hang" in hangs
    assert ends_well.strip() == "has finished"


@pytest.mark.parametrize(
    ("turns", "hanging"),
    [
        # one rank has left it, and waits for the other in the next
        ([(2, "own"), (3, "ring")], "own"),
        ([(2, ""), (2, "own")], "own"),
        ([(2, ""), (3, "own")], ""),  # it waits for what is no alternative's doing
        ([(0, "")], ""),
    ],
)
def test_among_ranks_that_wait_for_each_other_the_slowest_hangs(
    turns: list[tuple[int, str]], hanging: str
) -> None:
    assert results.slowest_alternative(turns) == hanging


def test_the_time_that_a_caller_takes_for_a_row_is_not_the_points() -> None:
    def worker(point: None) -> Iterator[dict[str, Any]]:
        for step in range(4):
            yield {"step": step}

    ends = []
    for item in launch(worker, [None], world_size=1, timeout_s=1.0):
        if isinstance(item, PointEnd):
            ends.append(item.status)
        else:
            time.sleep(0.3)
    assert ends == ["ok"]


def test_a_rank_that_dies_between_two_points_costs_none() -> None:
    pids = dict[int, int]()
    statuses = list[str]()
    for item in launch(lambda _: [{"pid": os.getpid()}], [1, 2], world_size=2):
        if isinstance(item, Row):
            pids[item.rank] = item.values["pid"]
        elif isinstance(item, PointEnd):
            statuses.append(item.status)
            os.kill(pids[1], signal.SIGKILL)
            # until its parent has seen it, and has had a while to report it
            assert wait_until(lambda: not psutil.pid_exists(pids[1]))
            time.sleep(0.3)
    assert statuses == ["ok", "ok"]


def test_ranks_that_do_not_start_are_started_once_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = tmp_path / "labkit_failing_module.py"
    failed = tmp_path / "failed"
    module.write_text("def answer(point): yield {}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    answer = importlib.import_module("labkit_failing_module").answer
    text = (
        f"import os\nif not os.path.exists({str(failed)!r}):\n    open({str(failed)!r}, 'w')\n   "
        " raise ValueError\n"
    )
    module.write_text(text + module.read_text())
    _, ends = drain(answer, [1, 2], world_size=1)
    assert [end.status for end in ends] == ["ok", "ok"]
    assert failed.exists()
    del sys.modules["labkit_failing_module"]


def test_ranks_that_cannot_start_end_every_point(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group, "LOOPBACK", {"GLOO_SOCKET_IFNAME": "nowhere0"})
    _, ends = drain(lambda point: None, [1, 2, 3], world_size=2)
    assert [(end.index, end.status) for end in ends] == [
        (0, "failed"),
        (1, "failed"),
        (2, "failed"),
    ]
    assert ends[2].reason is not None
    assert ends[2].reason.startswith("the ranks did not start, twice: rank ")
    assert "nowhere0" in ends[2].reason


# Output


def test_output_is_shown_per_point_and_its_end_if_it_is_much(
    capfd: pytest.CaptureFixture[str],
) -> None:
    def worker(point: str) -> Iterator[dict[str, Any]]:
        if point == "much":
            for number in range(200_000):
                print(f"line {number:6} of a rank that prints ten megabytes")
        os.system("echo from a child")
        os.write(2, b"progress 1\rprogress 2\n")
        yield {}

    drain(worker, ["little", "much"], world_size=1)
    output = capfd.readouterr()
    assert output.out == ""
    lines = output.err.splitlines()
    assert lines[:2] == ["[rank 0] from a child", "[rank 0] progress 2"]
    assert lines[2].startswith("[rank 0] ... the last of 9.")
    assert lines[-3:] == ["[rank 0] line 199999 of a rank that prints ten megabytes", *lines[:2]]
    assert len(lines) < 60


# run_ranks and arguments


def test_run_ranks_returns_the_results_by_rank_or_raises_what_went_wrong() -> None:
    assert run_ranks(lambda a, b: [a + b, dist.get_rank()], 1, 2, world_size=3) == [
        [3, 0],
        [3, 1],
        [3, 2],
    ]
    with pytest.raises(
        RankError, match=r"(?s)rank 0: ValueError: a bad size.*in raise_error.*a last word"
    ) as caught:
        run_ranks(raise_error, world_size=1)
    assert caught.value.failure.rank == 0
    with pytest.raises(RankError, match=r"rank 0 still running after 0.5 s \(timeout_s\)"):
        run_ranks(time.sleep, 1000, world_size=1, timeout_s=0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"world_size": 0}, "world_size: expected a whole number of ranks, 1 or more, got 0"),
        ({"world_size": 1_000_000}, r"world_size: .* at most \d+ ranks, .*; got 1000000"),
        (
            {"world_size": 2, "backend": "mpi"},
            "backend: expected 'gloo', 'nccl' or None, got 'mpi'",
        ),
        ({"world_size": 2, "backend": None}, "backend: expected 'gloo' or 'nccl'"),
        (
            {"world_size": 2, "scheduling": "fifo"},
            "scheduling: expected 'batch' or 'default', got 'fifo'",
        ),
        (
            {"world_size": 2, "timeout_s": 0},
            "timeout_s: expected a positive number of seconds, got 0",
        ),
        ({"world_size": 1, "worker": "all_reduce"}, "worker: expected a function of one point"),
        (
            {"world_size": 1, "points": [threading.Lock()]},
            "expected what cloudpickle can send to a rank: .*lock",
        ),
    ],
)
def test_wrong_arguments_stop_before_anything_starts(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        launch(**({"worker": lambda point: None, "points": [None]} | options))


def test_a_server_starts_if_warnings_are_errors(tmp_path: Path) -> None:
    (tmp_path / "warns.py").write_text(
        "import warnings\nwarnings.warn('old', DeprecationWarning)\n"
    )
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, server_process.__file__, str(theirs.fileno()), "warns"]
        environment = os.environ | {"PYTHONWARNINGS": "error", "PYTHONPATH": str(tmp_path)}
        server = Popen(command, pass_fds=[theirs.fileno()], env=environment, stderr=PIPE)
    ours.close()
    # It ends with its last caller, and not with the warning.
    assert server.communicate() == (None, b"")
    assert server.returncode == 0
