"""A baseline of a reader's own training: saved runs of `labkit try`, and what changed since.

The parts of a step are compared as the quantities of `labkit check` are. Another processor or other
cores forbid a comparison; another torch or system is named with what changed.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from labkit.check import TOLERANCE
from labkit.check.checking import baseline_folder
from labkit.check.comparison import ERROR_OVER_MAD, judge_levels
from labkit.check.facts import Difference, differences, is_alike, is_same_machine
from labkit.lab.project import write_file
from labkit.lab.runs.store import Run, RunFileError
from labkit.studies.your_training.lab import LAB, PART, found
from labkit.studies.your_training.loop import INPUT
from labkit.studies.your_training.worker import STEP, YARDSTICK

# Saved runs that show how a machine varies. A virtual machine took 1.2 to 1.8 times as long for an
# unchanged training within ten minutes, so one run says nothing of the next.
MIN_RUNS = 3
# Share of a step below which a part is not compared: the next batch of a list takes 4 us, and
# sometimes 12.
MIN_SHARE = 0.01
UNDECIDED = "undecided"


@dataclass(frozen=True)
class TrainingChange:
    """What changed between a training's baseline and a new run of it."""

    baseline: Sequence[Run]
    differences: Sequence[Difference]
    """Facts in which the new run differs from the newest of the baseline."""
    parts: pd.DataFrame
    """By part, as `judge_levels` returns it; empty if a difference forbids to compare."""

    @property
    def blockers(self) -> list[Difference]:
        """Differences of the machine: its times are those of another machine."""
        return [difference for difference in self.differences if difference.forbids]

    @property
    def is_slower(self) -> bool:
        """Whether a part, or the step, is slower by more than the tolerance of a check."""
        slower = self.parts[self.parts["verdict"] == "slower"]
        return bool((slower["ratio"] > 1 + TOLERANCE).any())


def compare_with_baseline(run: Run) -> TrainingChange | None:
    """Compare a run with this machine's saved runs of the same setup; None if there are none."""
    baseline = load_trainings(run)
    if not baseline:
        return None
    facts = differences(baseline[-1], run)
    parts = pd.DataFrame(columns=["ratio", "verdict"])
    if is_same_machine(baseline[-1], run):
        parts = compare_parts(baseline, run)
        if len(baseline) < MIN_RUNS:
            parts["verdict"] = UNDECIDED
    return TrainingChange(baseline, facts, parts)


def compare_parts(baseline: Sequence[Run], run: Run) -> pd.DataFrame:
    """Return the change of each part of a step from the runs of a baseline to a new one.

    Parts that take less than `MIN_SHARE` of a step in all runs are left out.
    """
    runs = (*baseline, run)
    speeds = _slowness(runs)
    samples = [_at_equal_speed(each, speed) for each, speed in zip(runs, speeds, strict=True)]
    logs = [
        sample.assign(log=np.log(sample["seconds"])).groupby("part")["log"] for sample in samples
    ]
    levels = pd.concat([log.median() for log in logs], axis=1, keys=range(len(logs)))
    shares = np.exp(levels - levels.loc[STEP]).max(axis=1)
    levels = levels[shares >= MIN_SHARE]
    variances = [log.agg(_median_variance) for log in logs]
    explained = pd.concat(variances, axis=1).mean(axis=1)[levels.index]
    # Parts are timed once per repeat: unlike a check's quantities, they have no second turn.
    noise = pd.Series(0.0, index=levels.index)
    return judge_levels(levels, explained, noise, n_compared=len(levels))


def _slowness(runs: Sequence[Run]) -> list[float]:
    """Return how much slower cores were in each run than in the middle one, by the yardstick."""
    medians = []
    for run in runs:
        results = run.results()
        seconds = results.rows(["seconds"], kind=YARDSTICK)["seconds"].astype(float)
        is_on_cpu = (found(results)["device"] == "cpu").all()
        medians.append(seconds.median() if is_on_cpu else np.nan)
    # The yardstick runs on the CPU: it says nothing of a GPU's clock.
    if np.isnan(medians).any():
        return [1.0] * len(runs)
    return list(np.array(medians) / np.median(medians))


def _at_equal_speed(run: Run, slowness: float) -> pd.DataFrame:
    """Return the samples of the parts as they would be on cores of the baseline's speed."""
    samples = PART.samples(run.frame()).pivot(index="repeat", columns="part", values="seconds")
    parts = samples.drop(columns=STEP)
    # Not the wait for input: a disk or a network takes as long on slow cores.
    parts = parts.apply(lambda part: part if part.name == INPUT else part / slowness)
    # Added up again: the step is as fast as its corrected parts.
    parts[STEP] = parts.sum(axis=1)
    return parts.melt(value_name="seconds")


def _median_variance(logs: pd.Series) -> float:
    """Variance of the median of repeats."""
    deviation = float((logs - logs.median()).abs().median())
    return (ERROR_OVER_MAD * deviation) ** 2 / len(logs)


def trainings_folder(run: Run) -> Path:
    """Folder of the baselines of trainings on the machine of a run."""
    return baseline_folder(run.header.machine) / LAB.name


def load_trainings(run: Run) -> list[Run]:
    """Return the saved runs of the same setup and arguments that are alike, the newest last."""
    saved = []
    for path in sorted(trainings_folder(run).glob("*.jsonl")):
        # Another version of labkit may have written it.
        with suppress(RunFileError):
            saved.append(Run.load(path))
    saved = [earlier for earlier in saved if _setup_key(earlier) == _setup_key(run)]
    if not saved:
        return []
    newest = saved[-1]
    return [earlier for earlier in saved if is_alike(newest, earlier)]


def _setup_key(run: Run) -> list[Any]:
    """Return file, function and arguments of a run's setup."""
    point = next(iter(run.header.planned.values()))
    return [point["file"], point["arguments"]]


def save_training(run: Run) -> Path:
    """Add a run to the baseline of its training; return the file."""
    path = trainings_folder(run) / run.path.name
    write_file(path, run.path.read_bytes())
    return path
