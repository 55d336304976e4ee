"""A run of this lab that was recorded on a GPU and is part of the project: what a machine without one can show.

Its numbers are always labeled with its machine.
"""

from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from labkit.lab.project import recorded_directory
from labkit.lab.runs.store import Run
from labkit.studies.shared.attention_passes import FLASH
from labkit.studies.shared.attention_tables import times

LAB = "flash_attention"


@dataclass(frozen=True)
class RecordedRun:
    """The frame of a recorded run that has times of the Triton kernel, and where it was measured."""

    frame: pd.DataFrame
    machine: str

    @property
    def label(self) -> str:
        return f"recorded, {self.machine}"


def recorded_gpu_run(directory: Path | None = None) -> RecordedRun | None:
    """The latest recorded run with times of the Triton kernel; None if the project holds none.

    `directory` is the one of recorded runs, `data/recorded/` if not given.
    """
    folder = (directory or recorded_directory()) / LAB
    for path in sorted(folder.glob("*.jsonl"), reverse=True):
        run = Run.load(path)
        frame = run.frame()
        if has_flash(frame):
            return RecordedRun(frame, run.header.machine.label)
    return None


def has_flash(frame: pd.DataFrame) -> bool:
    """Whether the Triton kernel was timed."""
    return bool((times(frame, "lengths")["implementation"] == FLASH).any())
