"""Checks of a reader's alternative, which is right or wrong within seconds, and of guesses of the results."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import pandas as pd

from labkit.lab.answers import Answer, Check
from labkit.lab.config import ParameterError, nearest
from labkit.lab.declaration import Lab
from labkit.lab.runs.measure import measure
from labkit.lab.units import format_factor, labels
from labkit.lab.user_plugins import Plugins

NAME = "mine"
DEADLINE_S = 20.0
"""Deadline of one point; an alternative that takes longer hangs."""
RANKS = (2, 3, 4)
"""Two ranks have one route; a mistake in the order of messages shows with three or four."""
SHORTEST = {"repeats": 1, "warmup": 0, "sessions": 1, "timeout_s": DEADLINE_S}
UNEVEN_BYTES = 4088  # 1,022 elements of float32, which neither three nor four ranks divide evenly

Verdict = Literal["right", "wrong", "fails", "hangs"]
STATUS: dict[Verdict, int] = {"right": 0, "wrong": 1, "fails": 2, "hangs": 3}


@dataclass(frozen=True, repr=False)
class AlternativeCheck:
    """Result of checking a reader's alternative; true if it is right."""

    verdict: Verdict
    details: str = ""
    """Where it is wrong, what it raises, or on how many ranks it hangs."""

    @property
    def status(self) -> int:
        """Exit status for a grader: 0 right, 1 wrong, 2 fails, 3 hangs."""
        return STATUS[self.verdict]

    def __bool__(self) -> bool:
        return self.verdict == "right"

    def __repr__(self) -> str:
        return f"{self.verdict}: {self.details}" if self.details else self.verdict


def check_alternative(lab: Lab, alternative: Callable[..., Any]) -> AlternativeCheck:
    """Check one alternative at the lab's smallest sizes on 2, 3 and 4 ranks, up to the first failure; keep nothing.

    ParameterError, before anything starts, for a lab that compares nothing of the kind, and for a value that is no
    function.
    """
    names = lab.config.model_fields
    for ranks in RANKS if "world_sizes" in names else (1,):
        wanted = {"sizes_bytes": [UNEVEN_BYTES], "world_sizes": [ranks], **SHORTEST}
        result = _check(lab, alternative, {name: value for name, value in wanted.items() if name in names})
        if not result:
            where = f", on {ranks} ranks" if ranks > 1 else ""
            return replace(result, details=f"{result.details}{where}")
    return AlternativeCheck("right")


def _check(lab: Lab, alternative: Callable[..., Any], settings: Mapping[str, Any]) -> AlternativeCheck:
    config = lab.configure("smoke", settings)
    with TemporaryDirectory(prefix="labkit-check-") as folder:
        plugins = Plugins({NAME: alternative})
        run = measure(lab, config, profile="smoke", plugins=plugins, only_plugins=True, directory=Path(folder))
    ends = run.coverage()
    for status, reason in zip(ends["status"], ends["reason"], strict=True):
        if status != "ok":
            return AlternativeCheck("hangs" if status == "timeout" else "fails", str(reason))
    rows = run.frame()
    checks = rows[rows.eq(NAME).any(axis=1)].get("check", pd.Series(dtype=object)).dropna()
    if checks.empty:
        return AlternativeCheck("fails", "it was not measured")
    for check in checks[checks != "ok"]:
        kind, _, details = str(check).partition(": ")
        return AlternativeCheck("wrong" if kind == "wrong" else "fails", details)
    return AlternativeCheck("right")


def check_guesses(guesses: object) -> dict[str, float]:
    """Return guesses that are positive numbers by name. ParameterError otherwise."""
    if not isinstance(guesses, Mapping):
        raise ParameterError(f"guess: expected {{name: seconds}}, got {guesses!r:.80}")
    for name, value in guesses.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ParameterError(f"guess: expected a number above zero for {name!r}, got {value!r}")
    return {str(name): float(value) for name, value in guesses.items()}


def with_guesses(question: Check, answer: Answer, guesses: Mapping[str, float]) -> Answer:
    """Add a column of guesses to the answer, and a note on how far off they are.

    A guess belongs to the row whose name has all its parts: "2 ranks, ring" may stand for "gloo, 2 ranks, 4 KiB, ring".
    ParameterError for a guess that belongs to no row or to several.
    """
    if answer.table is None:
        return answer
    table = answer.table.reset_index(drop=True)
    place = list(table.columns).index(question.measured)
    names = labels(table, list(table.columns[:place]))
    column = pd.Series(np.nan, index=table.index)
    for guess, value in guesses.items():
        rows = [row for row, name in enumerate(names) if set(guess.split(", ")) <= set(name.split(", "))]
        if len(rows) != 1:
            hint = f"{len(rows)} rows, such as {names[rows[0]]!r}" if rows else f"no row{nearest(guess, names)}"
            raise ParameterError(f"guess: {guess!r} belongs to {hint}")
        column[rows[0]] = value
    table.insert(place, "your_guess_s", column)
    guessed = table.dropna(subset="your_guess_s")
    if guessed.empty:
        return replace(answer, table=table)
    yours, predictions = (
        format_factor(float(np.exp(np.log(guessed[question.measured] / guessed[name]).abs().mean())))
        for name in ("your_guess_s", question.predicted)
    )
    note = f"Your guesses are off by a factor of {yours}, the predictions of the same times by {predictions}."
    return replace(answer, table=table, notes=(note, *answer.notes))
