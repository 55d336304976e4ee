"""Findings of one kind: are measurements what a prediction says, and how far is it off?"""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from labkit.lab.findings import Finding, Verdict
from labkit.lab.places import scope_of
from labkit.lab.units import format_factor, format_share

CLOSE = 1.5  # factor up to which a prediction counts as right


def agreement(
    table: pd.DataFrame,
    subject: str,
    prediction: str,
    ratio: str = "measured_over_predicted",
    close: float = CLOSE,
    settings: Sequence[str] = (),
    setting: str = "",
) -> Finding | None:
    """Are `subject` (plural) what `prediction` says? The column `ratio` is measured over predicted; None without any.

    "Yes" if all are within a factor of `close`, "it depends" if at least half of them are. `settings` are the columns
    that say of what, `setting` what else does.
    """
    ratios = table[ratio].dropna()
    if ratios.empty:
        return None
    ratios = ratios.sort_values(ascending=False, ignore_index=True)  # the lowest of those that are nothing comes last
    off = np.maximum(ratios, 1 / ratios).where(ratios > 0, np.inf).sort_values(kind="stable")
    middle, worst = off.index[(len(off) - 1) // 2], off.index[-1]
    is_one_sided = len(off) > 1 and not ratios.min() <= 1 <= ratios.max()
    verdict: Verdict = "yes" if off[worst] <= close else "it depends" if off[middle] <= close else "no"
    if verdict == "yes":
        amount = "exactly" if off[worst] == 1 else f"{_within(off[worst])} of"
        told = f"Yes: all {subject} are {amount} {prediction}."
    elif verdict == "it depends":
        most = "most" if len(off) % 2 else "half"
        within = f"{most} of the {subject} are {_within(off[middle])} of {prediction}"
        told = f"Partly: {within}, the worst is {_times(ratios[worst])} that."
    else:
        typical, most = _times(ratios.median() if is_one_sided else ratios[middle]), _times(ratios[worst])
        told = f"No: {subject} are {'typically ' if typical != most else ''}{typical} {prediction}"
        told += f", at worst {most.removesuffix(' than')}." if typical != most else "."
    where = f"{len(ratios)} compared" if len(ratios) > 1 else "the one setting measured"
    if is_one_sided:
        where += f", all {'more' if ratios.min() > 1 else 'less'} than {prediction}"
    scope = scope_of(table, settings, setting)
    return Finding(verdict, told, table, where=f"{where}: {scope}" if scope else where)


def _times(ratio: float) -> str:
    """3.0 -> "3 times", 0.4 -> "60 % less than": to which side it is off, and by how much."""
    return f"{format_factor(ratio)} times" if ratio > 1 else f"{format_share(1 - ratio)} less than"


def _within(factor: float) -> str:
    """1.2 -> "within 20 %"; what is nearer than 1 % is not told more exactly."""
    return f"within {format_share(max(factor - 1, 0.01))}"
