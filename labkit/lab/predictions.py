"""What a lab expects before it measures: numbers from the machine's calibration, a reader's guess beside them.

    PREDICTED = Predicted(("device", "size", "phase"), seconds, planned, medians, names=("size", "phase"))

`seconds(row, calibration)` is the formula, of a mapping with these columns; `planned(point)` gives the rows that a
point will have, `medians(frame)` those that a run has. So one formula serves before and after.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from labkit.costs.calibration import Calibration
from labkit.lab.as_predicted import CLOSE
from labkit.lab.columns import column
from labkit.lab.config import ParameterError, nearest
from labkit.lab.own_models import models_in
from labkit.lab.point import Point
from labkit.lab.units import counted, format_number

Row = Mapping[str, Any]
FASTER = "Parts ran at once that are expected one after another, or the machine is faster than when it was calibrated."
MOST_ROWS = 10  # that are shown before anything is measured


@dataclass(frozen=True)
class Predicted:
    """The times that a lab predicts: what tells them apart, their formula, what is planned of them, what it took.

    `columns` are of the setting and, last, of what took turns; a row of `planned` has them all. `seconds` gives None
    for what has no formula. `medians` makes of a run's frame a table with `columns`, `value`, `low` and `high`.
    `names` are the columns that always name a row; of the others, those do that tell rows apart.
    """

    columns: tuple[str, ...]
    seconds: Callable[[Row, Calibration], float | None]
    planned: Callable[[Any], Iterable[Row]]
    medians: Callable[[pd.DataFrame], pd.DataFrame]
    value: str = "seconds"
    names: tuple[str, ...] = ()
    leaves_out: str = ""
    """A sentence on what the formula does not count, and what therefore takes longer."""

    def before(self, points: Iterable[Point], calibration: Calibration) -> pd.DataFrame:
        """One row for each time that is planned and has a formula: `predicted_s`."""
        rows = [dict(row) for point in points for row in self.planned(point)]
        return self._predicted(pd.DataFrame(rows, columns=list(self.columns)).drop_duplicates(), calibration)

    def beside(self, frame: pd.DataFrame, calibration: Calibration | None) -> pd.DataFrame:
        """Medians of a run with their intervals, `predicted_s`, and `measured_over_predicted`."""
        table = self.medians(frame)[[*self.columns, self.value, "low", "high"]]
        if calibration is None:
            return table.iloc[:0].assign(predicted_s=[], measured_over_predicted=[])
        with models_in(frame):
            found = self._predicted(table, calibration)
        return found.assign(measured_over_predicted=found[self.value].astype(float) / found["predicted_s"])

    def told(self, table: pd.DataFrame) -> str:
        """How `beside`'s times stand to what was expected, in the middle, and why if they are far from it."""
        middle = float(table["measured_over_predicted"].median())
        if middle != middle:
            return ""
        known = table["measured_over_predicted"].notna().sum()
        times = format_number(float(f"{middle:.2g}"))
        text = f"Of {counted(known, 'time')} the typical one was {times} times as long as expected."
        if middle < 1 / CLOSE:
            return f"{text} {FASTER}"
        return text if middle <= CLOSE else f"{text} {self.leaves_out}".rstrip()

    def _predicted(self, table: pd.DataFrame, calibration: Calibration) -> pd.DataFrame:
        seconds = [self.seconds(row, calibration) for row in table.to_dict("records")]
        table = table.assign(predicted_s=pd.Series(seconds, index=table.index, dtype=float))
        return table.dropna(subset="predicted_s").reset_index(drop=True)

    def naming(self, table: pd.DataFrame) -> list[str]:
        """The columns that name the rows of a table."""
        shown = [name for name in self.columns if not column(name).is_internal]
        return [name for name in shown if name in self.names or table[name].nunique(dropna=False) > 1]


def named(guess: object, names: Sequence[str]) -> dict[str, float]:
    """A guess by the names that its rows have here.

    A part of a name does where one row alone has it: what tells rows apart depends on the parameters. ParameterError
    for a guess of what is not predicted or could be several, and for what is no number of seconds.
    """
    if not isinstance(guess, Mapping):
        raise ParameterError(f"guess: expected {{name: seconds}}, got {guess!r:.80}")
    found: dict[str, float] = {}
    for name, seconds in guess.items():
        parts = set(str(name).split(", "))
        meant = [one for one in dict.fromkeys(names) if parts <= set(one.split(", "))]
        if not meant:
            known = nearest(name, names) or (f"; one is {names[0]!r}" if names else "")
            raise ParameterError(f"guess: nothing is called {name!r}{known}")
        if len(meant) > 1:
            raise ParameterError(f"guess: {name!r} may be {meant[0]!r} or {meant[1]!r}: say which")
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds > 0:
            raise ParameterError(f"guess: expected seconds above zero for {name!r}, got {seconds!r}")
        if meant[0] in found:
            raise ParameterError(f"guess: {meant[0]!r} is guessed twice, as {name!r}, too")
        found[meant[0]] = seconds
    return found


def to_show(names: Sequence[str], guess: Mapping[str, float]) -> list[str]:
    """The guessed ones, and of the others as many as a table has room for, spread evenly."""
    at = np.linspace(0, len(names) - 1, min(MOST_ROWS, len(names))).round().astype(int)
    wanted = {names[i] for i in at} | set(guess)
    return [name for name in names if name in wanted]
