"""A reader's guesses, shown next to what was predicted and measured."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pandas as pd

from labkit.lab.answers import Answer, Check
from labkit.lab.columns import labels
from labkit.lab.config import ParameterError, nearest
from labkit.lab.units import format_factor


def check_guesses(guesses: object) -> dict[str, float]:
    """The guesses if they are positive numbers by name. ParameterError otherwise."""
    if not isinstance(guesses, Mapping):
        raise ParameterError(f"guess: expected {{name: seconds}}, got {guesses!r:.80}")
    for name, value in guesses.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
            raise ParameterError(f"guess: expected a number above zero for {name!r}, got {value!r}")
    return {str(name): float(value) for name, value in guesses.items()}


def with_guesses(question: Check, answer: Answer, guesses: Mapping[str, float]) -> Answer:
    """The answer with a column of guesses, and a note on how far off they are.

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
    off = [
        format_factor(float(np.exp(np.log(guessed[question.measured] / guessed[name]).abs().mean())))
        for name in ("your_guess_s", question.predicted)
    ]
    note = f"Your guesses are off by a factor of {off[0]}, the predictions of the same times by {off[1]}."
    return replace(answer, table=table, notes=(note, *answer.notes))
