"""Findings of one kind: are measurements what a prediction says, and how far is it off?"""

import numpy as np
import pandas as pd

from labkit.lab.findings import Finding
from labkit.lab.units import format_factor, format_share

CLOSE = 1.5  # factor up to which a prediction counts as right


def agreement(
    table: pd.DataFrame,
    subject: str,
    prediction: str,
    ratio: str = "measured_over_predicted",
    close: float = CLOSE,
) -> Finding | None:
    """Are `subject` (plural) what `prediction` says? The column `ratio` is measured over predicted; None without any.

    "Yes" if all are within a factor of `close`, "it depends" if at least half of them are.
    """
    ratios = table[ratio].dropna()
    if ratios.empty:
        return None
    off = np.maximum(ratios, 1 / ratios).where(ratios > 0, np.inf)
    middle, worst = float(off.quantile(0.5, interpolation="lower")), float(off.max())
    all_of_them = f"Yes: all {subject}" if len(ratios) > 1 else f"Yes, in the one setting measured: {subject}"
    if worst == 1:
        return Finding("yes", f"{all_of_them} are exactly {prediction}.", table)
    if worst <= close:
        return Finding("yes", f"{all_of_them} are {_within(worst)} of {prediction}.", table)
    if middle <= close:
        within = f"half of the {subject} are {_within(middle)} of {prediction}"
        return Finding("it depends", f"Partly: {within}, the worst is {format_factor(worst)} times off.", table)
    side = " off" if ratios.min() < 1 < ratios.max() else "" if ratios.min() > 1 else " below"
    off_by = f"{format_factor(middle)} times{side} {prediction}"
    if format_factor(middle) == format_factor(worst):
        return Finding("no", f"No: {subject} are {off_by}.", table)
    text = f"No: {subject} are typically {off_by}, at worst {format_factor(worst)} times."
    return Finding("no", text, table)


def _within(factor: float) -> str:
    """1.2 -> "within 20 %"; what is nearer than 1 % is not told more exactly."""
    return f"within {format_share(max(factor - 1, 0.01))}"
