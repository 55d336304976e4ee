"""Everything that a GPU shows for the first time, in at most 25 minutes, as one zip to send.

    make gpu

No developer of labkit has launched its kernels yet; docs/gpus.md lists what nothing has run. Each
step has a deadline, and the next one runs whatever became of it. The zip has no names of users or
hosts.
"""

import os
import signal
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from labkit.check.archives import write_zip
from labkit.lab.project import project_root, runs_directory

LABKIT = [sys.executable, "-m", "labkit"]
FOLDER = project_root() / "reports" / "gpu"
BUNDLE = FOLDER / "check.zip"
PAGES = FOLDER / "pages"


class Step(NamedTuple):
    """A command, and the minutes after which it is ended."""

    name: str
    command: Sequence[str]
    minutes: float


STEPS = (
    Step("doctor", [*LABKIT, "doctor"], 0.5),
    Step("check", [*LABKIT, "check", "--bundle", str(BUNDLE)], 4),
    # Before the tests, which find what it has compiled.
    Step("tiles", [sys.executable, "-m", "benchmarks.launch_tiles"], 5),
    Step("tests", [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "tests"], 3),
    Step("report", [*LABKIT, "report", "--profile", "quick", "--output", str(PAGES)], 12.5),
)


def run_steps(steps: Sequence[Step], folder: Path) -> dict[str, str]:
    """Run each step with a log in `folder`; return what became of it, by name."""
    folder.mkdir(parents=True, exist_ok=True)
    outcomes = {}
    for number, step in enumerate(steps, 1):
        print(f"-- {number} of {len(steps)}: {step.name}, at most {step.minutes:g} min", flush=True)
        start = time.monotonic()
        with (folder / f"{step.name}.log").open("w", encoding="utf-8") as log:
            status = _run(step, log)
        outcomes[step.name] = f"{status}, {time.monotonic() - start:.0f} s"
        print(f"-- {step.name}: {outcomes[step.name]}", flush=True)
    return outcomes


def _run(step: Step, log) -> str:
    """Show and log the output of a step until it ends, or its deadline passes."""
    process = subprocess.Popen(
        step.command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # A group of its own: what a step has started ends with it.
        start_new_session=True,
    )
    has_hung = threading.Event()

    def end() -> None:
        has_hung.set()
        os.killpg(process.pid, signal.SIGKILL)

    deadline = threading.Timer(60 * step.minutes, end)
    deadline.start()
    for line in process.stdout or ():
        print(line, end="", flush=True)
        log.write(line)
    status = process.wait()
    deadline.cancel()
    if has_hung.is_set():
        return f"not done after {step.minutes:g} min"
    return "done" if status == 0 else f"status {status}"


def pack(outcomes: dict[str, str], folder: Path, since: float) -> Path:
    """Write the zip: outcomes, logs, the check's bundle, runs and pages made since then."""
    files = {"outcomes.txt": "".join(f"{name}: {said}\n" for name, said in outcomes.items())}
    runs = [path for path in runs_directory().glob("*/*.jsonl") if path.stat().st_mtime >= since]
    for path in [*folder.glob("*.log"), *folder.glob("pages/*.html"), *runs]:
        name = f"{path.parent.name}/{path.name}"
        files[name] = path.read_text(encoding="utf-8", errors="replace")
    bundle = folder / BUNDLE.name
    if bundle.exists():
        with zipfile.ZipFile(bundle) as archive:
            files |= {f"check/{name}": archive.read(name).decode() for name in archive.namelist()}
    path = folder / "send-this.zip"
    write_zip(path, files)
    return path


def main() -> int:
    since = time.time()
    BUNDLE.unlink(missing_ok=True)
    outcomes = run_steps(STEPS, FOLDER)
    path = pack(outcomes, FOLDER, since)
    print("", *(f"{name:8}{said}" for name, said in outcomes.items()), sep="\n")
    print(f"\nThe file to send: {path}")
    return int(any(not said.startswith("done") for said in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
