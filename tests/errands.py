"""Commands whose outcome tests look at, carried out by a process of their own while other tests keep one core busy.

That process and all that it starts are a session apart, and not of this one's files: tests that count their own
children or open files do not see it.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

TIMEOUT_S = 900


@dataclass(frozen=True)
class Errand:
    """A command, where it is carried out, and variables on top of those of the tests."""

    command: Sequence[str]
    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)


class Errands:
    """Errands by name, begun at once, in their order, so many at the same time."""

    def __init__(self, folder: Path, errands: Mapping[str, Errand], *, at_once: int = 1) -> None:
        self.folder = folder
        self._names = list(errands)
        plan = {name: asdict(errand) for name, errand in errands.items()}
        (folder / "plan.json").write_text(json.dumps(plan, default=str))
        command = [sys.executable, __file__, str(folder), str(at_once)]
        with (folder / "errands.log").open("w") as log:
            said = {"stdout": log, "stderr": log}
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True, **said)

    def outcome(self, name: str) -> subprocess.CompletedProcess[str]:
        """What the errand's command came to, once it has ended."""
        status, end = self.folder / f"{name}.status", time.monotonic() + TIMEOUT_S
        while not status.exists():
            has_ended = self._process.poll() is not None
            assert not has_ended or status.exists(), (self.folder / "errands.log").read_text()
            assert time.monotonic() < end, f"waited in vain for {name}"
            time.sleep(0.05)
        out, err = ((self.folder / f"{name}.{stream}").read_text() for stream in ("out", "err"))
        return subprocess.CompletedProcess(name, int(status.read_text()), out, err)

    def wait_for_all(self) -> None:
        for name in self._names:
            self.outcome(name)

    def end(self) -> None:
        """Interrupt what is still going on."""
        for number in (signal.SIGINT, signal.SIGKILL):
            if self._process.poll() is None:
                os.killpg(self._process.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    self._process.wait(60)


def _carry_out(folder: Path, name: str, errand: Mapping[str, object], parent: int) -> None:
    if os.getppid() != parent:  # nobody waits for it any more
        return
    environment = os.environ | errand["environment"]
    with (folder / f"{name}.out").open("w") as out, (folder / f"{name}.err").open("w") as err:
        where = {"cwd": errand["folder"], "env": environment, "stdout": out, "stderr": err}
        status = subprocess.Popen(errand["command"], **where).wait()
    unfinished = folder / f"{name}.unfinished"
    unfinished.write_text(str(status))
    unfinished.replace(folder / f"{name}.status")


def _main(folder: Path, at_once: int) -> None:
    plan, parent = json.loads((folder / "plan.json").read_text()), os.getppid()
    pool = ThreadPoolExecutor(at_once)
    # An interrupt is for the commands, which get it, too: it is over when they are.
    signal.signal(signal.SIGINT, lambda *_: pool.shutdown(wait=False, cancel_futures=True))
    for done in [pool.submit(_carry_out, folder, name, errand, parent) for name, errand in plan.items()]:
        with suppress(CancelledError):
            done.result()


if __name__ == "__main__":
    _main(Path(sys.argv[1]), int(sys.argv[2]))
