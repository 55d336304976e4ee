"""What is said of a rank that the kernel killed: what its counter tells, and no more."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from labkit.parallel.ranks import failure as rank_failure
from labkit.parallel.ranks.failure import Message, death_of
from labkit.parallel.ranks.log import RankLog
from labkit.parallel.ranks.outcome import is_out_of_memory
from labkit.parallel.ranks.process import RankProcess
from labkit.parallel.ranks.rank import OOM_SCORE


def dead_rank(directory: Path, number: signal.Signals) -> RankProcess:
    """Rank 1, killed by a signal."""
    context = multiprocessing.get_context("fork")
    process = context.Process(target=signal.raise_signal, args=[number])
    process.start()
    process.join()
    pipe, pipe_of_rank = context.Pipe()
    files = directory / "stacks", directory / "turn"
    return RankProcess(1, process, pipe, pipe_of_rank, RankLog(directory / "log"), *files)


def test_what_a_rank_wrote_may_be_cleaned_up_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "exists", lambda _: True)  # it was there a moment ago
    rank = dead_rank(tmp_path, signal.SIGKILL)
    assert (rank.log.tail(), rank.log.new_lines(whole_lines=False), rank.stacks()) == ("", [], "")


def test_a_process_that_has_got_the_id_of_an_ended_rank_is_not_killed(tmp_path: Path) -> None:
    rank = dead_rank(tmp_path, signal.SIGKILL)
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=True) as other:
        rank.process = SimpleNamespace(pid=other.pid)  # type: ignore[assignment]
        rank.stop()
        rank.kill()
        assert other.stdin is not None
        other.stdin.close()
        assert other.wait(60) == 0


def test_an_allocation_that_a_library_of_cuda_could_not_make_is_out_of_memory() -> None:
    assert is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"))
    assert is_out_of_memory(RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"))
    assert not is_out_of_memory(RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"))


KILLED = "rank 1 was killed by SIGKILL"
MEANWHILE = f"{KILLED}: out of memory: meanwhile the kernel killed"


@pytest.mark.parametrize(
    ("number", "before", "now", "limit", "kind", "message"),
    [
        (signal.SIGKILL, None, None, None, "killed", KILLED),
        (signal.SIGKILL, 3, 3, 2**30, "killed", KILLED),
        (signal.SIGKILL, 3, None, 2**30, "killed", KILLED),
        (signal.SIGTERM, 3, 4, 2**30, "killed", "rank 1 was killed by SIGTERM"),
        (
            signal.SIGKILL,
            3,
            4,
            300 * 2**20,
            "oom",
            f"{MEANWHILE} 1 process of its cgroup for that, whose limit is 300 MiB",
        ),
        (signal.SIGKILL, 3, 5, None, "oom", f"{MEANWHILE} 2 processes of its cgroup for that"),
    ],
)
def test_a_kill_is_for_memory_if_the_kernel_counted_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    before: int | None,
    now: int | None,
    limit: int | None,
    kind: str,
    message: str,
) -> None:
    monkeypatch.setattr(rank_failure, "oom_kills", lambda: now)
    monkeypatch.setattr(rank_failure, "memory_limit_bytes", lambda: limit)
    rank = dead_rank(tmp_path, number)
    report = death_of(rank, Message(1, "died", 0.0, {}), before)
    rank.release()
    assert (report.failure.kind, report.failure.message, report.consequence) == (kind, message, False)


SCORE = Path("/proc/self/oom_score_adj")


def _scores() -> list[int]:
    return [int(SCORE.read_text()), int(Path(f"/proc/{os.getppid()}/oom_score_adj").read_text())]


@pytest.mark.skipif(not SCORE.exists(), reason="Linux has scores for the case that memory runs out")
def test_the_kernel_would_rather_take_a_rank_than_its_parent() -> None:
    from labkit.parallel.launch import run_ranks

    parent = int(SCORE.read_text())
    assert run_ranks(_scores, world_size=2) == [[min(1000, parent + OOM_SCORE), parent]] * 2
