"""Running a victim, and what must hold when it is over: nothing measured is lost, nothing is left over."""

import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from contextlib import suppress
from pathlib import Path

import psutil

from labkit.lab.project import checkout
from labkit.lab.runs.store import Run

MARK = "LABKIT_TEST_MARK"
PATIENCE_S = 300.0  # for what takes a second on a quiet machine


class Victim:
    """One measurement, of the lab `faulty` if no other is named, with all that descends from it."""

    def __init__(self, folder, lab="faulty", **variables):
        self.folder, self.lab = Path(folder), lab
        self.temporary = Path(tempfile.mkdtemp(prefix="labkit-"))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.mark = uuid.uuid4().hex
        self.environment = os.environ | {MARK: self.mark, "TMPDIR": str(self.temporary)} | variables
        self.process = None

    def start(self, *arguments, prefix=()):
        module = ["-m", "tests.faults.victim", str(self.folder), "measure", self.lab]
        command = [*prefix, sys.executable, *module, *arguments]
        self.process = subprocess.Popen(
            command,
            env=self.environment,
            cwd=checkout(),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return self

    def finish(self, timeout_s=PATIENCE_S):
        """Exit status, and what it said on stdout and stderr."""
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out + err

    def wait_for(self, file):
        until(lambda: (self.folder / file).exists() or self.process.poll() is not None)
        assert (self.folder / file).exists(), self.finish()

    def processes(self):
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    yield process

    def runs(self):
        return [Run.load(path) for path in sorted((self.folder / "runs" / self.lab).glob("*.jsonl"))]

    def leftovers(self):
        processes = [f"{process.pid} {process.name()}" for process in self.processes()]
        return [*processes, *map(str, self.temporary.iterdir())]

    def assert_nothing_left(self):
        until(lambda: not self.leftovers(), 60)
        assert self.leftovers() == []

    def kill(self):
        for process in self.processes():
            with suppress(psutil.Error):
                process.kill()
        if self.process is not None:
            self.process.communicate()
        shutil.rmtree(self.temporary, ignore_errors=True)


def until(condition, timeout_s=PATIENCE_S):
    end = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)


def settings(**values):
    return [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
