"""Findings of the commonest kind: is A faster than B, where, and by how much?

Each function judges the comparisons it is given (`bench.statistics.with_verdicts`), so that the mark of a table's
row, the verdict, the headline, the advice and the effects come from one rule.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd

from labkit.bench.statistics import MIN_RELEVANT_DIFFERENCE, with_verdicts
from labkit.lab.columns import column, labels
from labkit.lab.findings import Effect, Finding, Verdict
from labkit.lab.places import place_of_best, scope_of
from labkit.lab.quantities import MEMORY as MEMORY
from labkit.lab.quantities import TIME as TIME
from labkit.lab.quantities import Quantity as Quantity
from labkit.lab.sentences import Words, quoted_of, told_of, told_of_losers


def compared(
    ratios: pd.DataFrame,
    subject: str,
    baseline: str,
    *,
    axis: Sequence[str] = (),
    quantity: Quantity = TIME,
    plural: bool = False,
    choose: str | None = None,
    keep: str | None = None,
    caveat: str | None = None,
    why: str | None = None,
    setting: str = "",
) -> Finding | None:
    """Is `subject` faster than `baseline`? None without ratios, unless a caveat says why there are none.

    `ratios` has a row per setting, as `rows.Measured.over` gives it. `axis` names the columns by which places are told
    ("from 1 MiB on"), the most telling first. `choose` and `keep` are the advice where it is faster and where it is
    not, as imperatives without a period. `plural`: the subject is several things. `setting`: what no column of
    `ratios` says of where they were measured.
    """
    if ratios.empty:
        return _without_times(subject, caveat)
    table = with_verdicts(ratios.reset_index(drop=True))  # which may be several tables, one below the other
    better, worse = table[table["verdict"] == "faster"], table[table["verdict"] == "slower"]
    told = told_of(table, better, worse, Words(subject, baseline, quantity, plural), axis)
    return Finding(
        told.verdict,
        told.headline,
        quantity.marked(table),
        caveat,
        why,
        _advice(told.verdict, _where(table, better, worse, told.place, axis), choose, keep),
        significant=len(better) + len(worse) > 0,
        effects=(found := effects(table, subject, baseline, quantity)),
        where=_scope(table, quantity, setting, told.rows),
        lead=_lead(found, table, told.rows),
    )


def contest(
    ratios: pd.DataFrame,
    alternative: str,
    baseline: str,
    *,
    names: Callable[[str], str] = lambda name: name.replace("_", " "),
    axis: Sequence[str] = (),
    quantity: Quantity = TIME,
    choose: Callable[[str], str] | None = None,
    keep: str | None = None,
    caveat: str | None = None,
    why: str | None = None,
    setting: str = "",
) -> Finding | None:
    """Which of several alternatives beats `baseline`? None without ratios, unless a caveat says why there are none.

    The column `alternative` of `ratios` tells them apart, `names` says how a sentence names one. The winner is the one
    that is faster in most settings, and slower in fewest. Otherwise as `compared`; `choose` gets the winner's name.
    """
    if ratios.empty:
        return _without_times(f"anything beside {baseline}", caveat)
    table = with_verdicts(ratios.reset_index(drop=True))
    better, worse = table[table["verdict"] == "faster"], table[table["verdict"] == "slower"]
    effects_of = {
        str(name): effects(rows, names(str(name)), baseline, quantity)
        for name, rows in table.groupby(alternative, sort=False)
    }
    parts = tuple(effect for of_one in effects_of.values() for effect in of_one)
    where, winner, rows = "", "", table
    if better.empty and len(effects_of) > 1:
        told = told_of_losers(table, worse, alternative, baseline, names, quantity)
    else:  # or the only one
        best = table[alternative].iloc[0] if better.empty else winner_of(table, alternative)
        rows, winner = table[table[alternative] == best], names(best)
        won, lost = rows[rows["verdict"] == "faster"], rows[rows["verdict"] == "slower"]
        told = told_of(rows, won, lost, Words(winner, baseline, quantity, False), axis)
        where = _where(rows, won, lost, told.place, axis)
    lead = None
    if len(told.rows):
        name = told.rows[alternative].iloc[0]
        lead = _lead(effects_of[str(name)], table[table[alternative] == name], told.rows)
    return Finding(
        told.verdict,
        told.headline,
        quantity.marked(table),
        caveat,
        why,
        _advice(told.verdict, where, choose(winner) if choose and winner else None, keep),
        significant=len(better) + len(worse) > 0,
        effects=parts,
        where=_scope(rows, quantity, setting, told.rows),
        lead=lead,
    )


def _without_times(subject: str, caveat: str | None) -> Finding | None:
    """What failed or was wrong is told even where nothing else was measured."""
    return Finding("not measured", f"Not measured: {subject}.", caveat=caveat) if caveat else None


def effects(table: pd.DataFrame, subject: str, baseline: str, quantity: Quantity = TIME) -> tuple[Effect, ...]:
    """The judged rows as effects. The setting is what stands left of the ratio.

    The alternative, which stands beside it, is named where there are several.
    """
    settings = _settings(table)
    ends = table[["ratio", "low", "high"]].astype(float).itertuples(index=False)
    return tuple(
        Effect(subject, baseline, setting, quantity.name, ratio, low, high, str(verdict))
        for setting, (ratio, low, high), verdict in zip(labels(table, settings), ends, table["verdict"], strict=True)
    )


def _settings(table: pd.DataFrame) -> list[str]:
    *before, alternative = table.columns[: list(table.columns).index("ratio")]
    alternatives = [alternative] if table[alternative].nunique() > 1 else []
    return [name for name in (*before, *alternatives) if not column(name).is_internal]


def _scope(table: pd.DataFrame, quantity: Quantity, setting: str, told: pd.DataFrame) -> str:
    """ "faster in 3 of 8 settings, no difference shown in 5: 2 and 4 ranks · 4 KiB to 10 MiB (most: 4 ranks, 64 KiB)".

    `told` are the rows of which the headline speaks; the last word is of that with the largest ratio it quotes.
    """
    less, more = quantity.marks or (quantity.better, quantity.worse)
    verdicts = quantity.marked(table)["verdict"].tolist()
    counts = {verdict: verdicts.count(verdict) for verdict in (less, more, *verdicts) if verdict in verdicts}
    if len(counts) > 1:
        first, *others = [f"{verdict} in {number}" for verdict, number in counts.items()]
        where = ", ".join([f"{first} of {len(table)} settings", *others])
    elif len(table) == 1:
        where = "the one setting measured"
    else:
        where = "both settings" if len(table) == 2 else f"all {len(table)} settings"
    settings = _settings(table)
    where = ": ".join(filter(None, [where, scope_of(table, settings, setting)]))
    quoted = quoted_of(told).iloc[-1:] if len(told) else told
    varying = [name for name in settings if table[name].nunique() > 1]
    if len(quoted) and varying and len(quoted_of(told)) == len(told) and len(table) > 1:
        where += f" (most: {labels(quoted, varying)[0]})"
    return where


def _lead(effects_of: Sequence[Effect], table: pd.DataFrame, rows: pd.DataFrame) -> Effect | None:
    """Of the effects of a table, the one whose ratio is told of these rows, or would be: the last of `quoted_of`."""
    return effects_of[table.index.get_loc(quoted_of(rows).index[-1])] if len(rows) else None


def winner_of(table: pd.DataFrame, alternative: str) -> Any:
    """The alternative that is faster in most settings less those in which it is slower; of several the fastest.

    Where that is by less than a difference that counts, the first of them in the table. `table` is judged. None if
    nothing is faster anywhere.
    """

    def standing(name: Any) -> tuple[int, float]:
        rows = table[table[alternative] == name]
        net = (rows["verdict"] == "faster").sum() - (rows["verdict"] == "slower").sum()
        return int(net), -float(np.log(rows["ratio"]).mean())

    faster = set(table.loc[table["verdict"] == "faster", alternative])
    standings = {name: standing(name) for name in table[alternative].unique() if name in faster}
    if not standings:
        return None
    net, speed = max(standings.values())
    alike = speed - np.log1p(MIN_RELEVANT_DIFFERENCE)
    return next(name for name, (wins, its) in standings.items() if wins == net and its >= alike)


def _advice(verdict: Verdict, where: str, choose: str | None, keep: str | None) -> str | None:
    """What to do, if a finding was told what to advise."""
    if verdict in ("yes", "it depends"):
        return f"{choose}{where}." if choose else None
    return f"{keep}." if keep and verdict != "undecided" else None


def _where(
    table: pd.DataFrame, better: pd.DataFrame, worse: pd.DataFrame, place: str | None, axis: Sequence[str]
) -> str:
    """After an advice: the place, or in how many settings it helps, and in which most; nothing if in all of them."""
    if place:
        return f" {place}"
    if better.empty or len(better) == len(table):
        return ""
    best = place_of_best(table, better, axis) if len(better) > 1 else None
    helps = f"in {len(better)} of {len(table)} settings{f' (most {best})' if best else ''}"
    if len(worse) >= len(better):
        return f" only where it was measured to help, {helps}; it hurts in {len(worse)}"
    return f": it helps {helps}{f', and hurts in {len(worse)}' if len(worse) else ''}"
