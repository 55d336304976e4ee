"""Wait for a condition; run a program and track all its descendants."""

import os
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil

MARK = "LABKIT_TEST_MARK"


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    """Return whether the condition becomes true in time."""
    deadline = time.monotonic() + timeout_s
    is_met = condition()
    while not is_met and time.monotonic() < deadline:
        time.sleep(0.01)
        is_met = condition()
    return is_met  # not asked again: it may hold for a moment only


def is_gone(pid: int) -> bool:
    """Whether the process has ended."""
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class Program:
    """A program with a folder for its temporary files; it and its descendants carry a mark."""

    def __init__(self, **variables: str) -> None:
        self.temporary = Path(tempfile.mkdtemp(prefix="labkit-"))
        self.mark = uuid.uuid4().hex
        self.environment = os.environ | {MARK: self.mark, "TMPDIR": str(self.temporary)} | variables
        self.process: subprocess.Popen[str]

    def run(self, command: list[str], cwd: Path) -> None:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = subprocess.Popen(
            command, env=self.environment, cwd=cwd, text=True, start_new_session=True, **pipes
        )

    def processes(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if (
                    process.environ().get(MARK) == self.mark
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    yield process

    def is_any_stopped(self) -> bool:
        """Whether a process has been stopped by SIGSTOP; others may end meanwhile."""
        for process in self.processes():
            with suppress(psutil.Error):
                if process.status() == psutil.STATUS_STOPPED:
                    return True
        return False

    def leftovers(self) -> list[str]:
        processes = []
        for process in self.processes():
            with suppress(psutil.Error):  # it has ended meanwhile
                processes.append(f"{process.pid} {process.cmdline()}")
        cache = "torchinductor_labkit_*"  # compiled code, for later runs
        return [
            *processes,
            *(str(path) for path in self.temporary.iterdir() if not path.match(cache)),
        ]

    def assert_nothing_left(self) -> None:
        assert wait_until(lambda: not self.leftovers()), self.leftovers()

    def kill(self) -> None:
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        if hasattr(self, "process"):
            self.process.communicate()
        shutil.rmtree(self.temporary, ignore_errors=True)
