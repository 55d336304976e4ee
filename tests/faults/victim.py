"""`labkit` with one lab, whose points fail as requested: `python -m tests.faults.victim FOLDER
measure faulty ...`.

The parent pauses at the moment that LABKIT_FAULT_PAUSE names, and creates the file `paused` in
FOLDER. LABKIT_FAULT_CLOCK makes the time of day jump.
"""

import os
import sys
import time
from pathlib import Path

import pandas as pd

from labkit import studies
from labkit.lab import project

FOLDER = (
    Path(sys.argv.pop(1)) if __name__ == "__main__" else Path(os.environ["LABKIT_FAULT_FOLDER"])
)
os.environ["LABKIT_FAULT_FOLDER"] = str(FOLDER)
project.runs_directory = lambda: FOLDER / "runs"

from labkit.lab.answers import Report  # noqa: E402
from labkit.lab.config import LabConfig  # noqa: E402
from labkit.lab.declaration import Lab  # noqa: E402
from labkit.lab.runs.records import RunWriter  # noqa: E402
from labkit.parallel.ranks import group as rank_group  # noqa: E402
from tests.faults.worker import (  # noqa: E402
    BEFORE,
    BETWEEN,
    WRITING,
    FaultyPoint,
    first_time,
    measure_point,
)


class FaultyConfig(LabConfig):
    action: str = ""
    moment: str = ""
    timeout_s: float = 4.0


def points(config, machine):
    """Three points, of which the second fails."""
    fault = {"action": config.action, "moment": config.moment}
    common = {"world_size": 2, "backend": "gloo", "timeout_s": config.timeout_s}
    return [
        FaultyPoint(number=number, **common, **(fault if number == 1 else {}))
        for number in range(3)
    ]


def count_rows(results):
    return pd.DataFrame([{"rows": len(results.frame)}])


LAB = Lab(
    name="faulty",
    title="Faulty",
    summary="Whatever goes wrong.",
    config=FaultyConfig,
    points=points,
    worker=measure_point,
    questions=[Report(id="how_many", text="How many rows?", table=count_rows, says="{rows} rows.")],
)
load_real = studies.load_lab
studies.load_lab = lambda lab: LAB if lab == LAB.name else load_real(lab)


def pause():
    """Pause once, for a minute or until the file `go on` exists."""
    if first_time("paused"):
        end = time.monotonic() + 60
        while time.monotonic() < end and not (FOLDER / "go on").exists():
            time.sleep(0.02)


def pause_at(moment):
    """Make this process pause once at a moment."""
    if moment == BEFORE:
        start = rank_group.fork_server.open_group
        rank_group.fork_server.open_group = lambda *args: (start(*args), pause())[0]
    if moment == BETWEEN:
        end = RunWriter.end_point
        RunWriter.end_point = lambda writer, *args, **options: (
            end(writer, *args, **options),
            pause(),
        )[0]
    if moment == WRITING:
        write = os.write

        def half(descriptor, line):
            if b'"kind":"row"' in line and first_time("half"):
                write(descriptor, line[: len(line) // 2])
                pause()
                return len(line) // 2
            return write(descriptor, line)

        os.write = half


def let_the_clock_jump():
    real = time.time
    jumps = iter(range(10**9))
    time.time = lambda: real() + (-1) ** next(jumps) * 1e6


pause_at(os.environ.get("LABKIT_FAULT_PAUSE"))
rank_group.START_TIMEOUT_S = float(os.environ.get("LABKIT_FAULT_START_S", "120"))
if os.environ.get("LABKIT_FAULT_CLOCK"):
    let_the_clock_jump()

if __name__ == "__main__":
    from labkit.__main__ import main

    main()
