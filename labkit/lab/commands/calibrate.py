"""Measures this machine's limits, once a day, ahead of a lab that predicts."""

import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from labkit.lab.commands.console import err, print_output, progress

if TYPE_CHECKING:
    from labkit.lab.declaration import Lab

# Of the lab `limits`, before another one is measured alone: what predictions need, in as few repeats as tell.
SHORT_LIMITS = {"repeats": 6, "warmup": 1, "model": "nano"}


def calibrate_first(studies: "Sequence[Lab]", profile: str, load_lab: "Callable[[str], Lab]") -> None:
    """Measure this machine's limits if one of these labs predicts, and there are none of this source and day."""
    from labkit.lab.calibration import FRESH, LIMITS, newest_calibration
    from labkit.lab.runs.measure import measure as measure_run
    from labkit.machine import describe_machine

    predicts = any(getattr(question, "needs_calibration", False) for lab in studies for question in lab.questions)
    is_wanted = predicts and studies[0].name != LIMITS
    if not is_wanted or profile == "smoke" or "WORLD_SIZE" in os.environ:  # smoke is to be quick; a job's ranks wait
        return
    machine = describe_machine()
    found = newest_calibration(machine, within=FRESH)
    if found is not None and found.source == str(machine.source):
        return
    err.print("calibrating this machine first, some 15 seconds once a day and version: predictions are made of it")
    limits = load_lab(LIMITS)
    short = limits.configure("quick", SHORT_LIMITS)
    with progress("measure", LIMITS) as show:
        measure_run(limits, short, profile="quick", on_progress=show, on_output=print_output)
