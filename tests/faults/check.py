"""Run a victim; afterwards nothing measured is lost, and nothing is left over."""

import sys
from pathlib import Path

from labkit.lab.project import checkout
from labkit.lab.runs.store import Run
from tests.parallel.waiting import Program, wait_until

PATIENCE_S = 300.0  # a second on a quiet machine


class Victim(Program):
    """One measurement, of the lab `faulty` if no other is named, with all that descends from it."""

    def __init__(self, folder, lab="faulty", **variables):
        super().__init__(**variables)
        self.folder = Path(folder)
        self.lab = lab
        self.folder.mkdir(parents=True, exist_ok=True)

    def start(self, *arguments, prefix=()):
        module = ["-m", "tests.faults.victim", str(self.folder), "measure", self.lab]
        self.run([*prefix, sys.executable, *module, *arguments], checkout())
        return self

    def finish(self, timeout_s=PATIENCE_S):
        """Return exit status and output."""
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out + err

    def resume(self):
        """Resume its only run, which then is whole."""
        (path,) = self.paths()
        status, output = self.start("--resume", str(path)).finish()
        assert status == 0, output
        assert set(self.runs()[0].coverage()["status"]) == {"ok"}

    def wait_for(self, file):
        until(lambda: (self.folder / file).exists() or self.process.poll() is not None)
        assert (self.folder / file).exists(), self.finish()

    def paths(self):
        return sorted((self.folder / "runs" / self.lab).glob("*.jsonl"))

    def runs(self):
        return [Run.load(path) for path in self.paths()]


def until(condition, timeout_s=PATIENCE_S):
    assert wait_until(condition, timeout_s), "waited in vain"


def settings(**values):
    return [word for name, value in values.items() for word in ("--set", f"{name}={value}")]
