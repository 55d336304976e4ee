"""Measures the limits of this machine before the first lab that predicts from them."""

import os
from collections.abc import Iterable
from importlib import import_module

from labkit.lab.calibration import FRESH, LIMITS, newest_calibration
from labkit.lab.declaration import Lab
from labkit.lab.runs.executor import OnOutput
from labkit.lab.runs.measure import measure
from labkit.lab.runs.progress import ShowProgress
from labkit.machine import describe_machine

CALIBRATING = "calibrating this machine first, some 15 seconds once a day and version: predictions are made of it"
# What predictions need of the lab `limits`, in the fewest repeats that give an interval.
SHORT_LIMITS = {"repeats": 6, "warmup": 1, "model": "nano"}


def needs_calibration(studies: Iterable[Lab], profile: str) -> bool:
    """Whether one of these labs predicts, and this machine has no calibration of this source and day.

    Not at `smoke`, which is to be short, and not in the ranks of a job, which would wait.
    """
    predicts = any(getattr(question, "needs_calibration", False) for lab in studies for question in lab.questions)
    if not predicts or profile == "smoke" or "WORLD_SIZE" in os.environ:
        return False
    machine = describe_machine()
    calibration = newest_calibration(machine, within=FRESH)
    return calibration is None or calibration.source != str(machine.source)


def calibrate(on_progress: ShowProgress, on_output: OnOutput) -> None:
    """Measure a short run of the lab `limits`."""
    limits: Lab = import_module(f"labkit.studies.{LIMITS}.lab").LAB  # by name: labs import this package
    measure(
        limits, limits.configure("quick", SHORT_LIMITS), profile="quick", on_progress=on_progress, on_output=on_output
    )
