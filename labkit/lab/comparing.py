"""Findings of the commonest kind: is A faster than B, where, and by how much? No other code words a ratio.

Each function judges exactly the comparisons it is given (`bench.statistics.judged`), so that the mark of a table's row,
the verdict, the headline, the advice and the effects come from one rule.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from labkit.bench.statistics import LEAST_RELEVANT_DIFFERENCE, judged
from labkit.lab.columns import column, labels
from labkit.lab.findings import Effect, Finding, Verdict
from labkit.lab.places import place_of, place_of_best, reach_of
from labkit.lab.quantities import MEMORY as MEMORY
from labkit.lab.quantities import TIME as TIME
from labkit.lab.quantities import Quantity as Quantity
from labkit.lab.units import format_factor

TWOFOLD = 1.95  # from here on "times" reads better than "%"
UNEVEN = 2.0  # the width of an interval, as a factor, from which on a ratio is not quoted
FEWEST_TIMES = 1.1  # below it the lower end of "1.0 to 6 times" says nothing


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
) -> Finding | None:
    """Is `subject` faster than `baseline`? None without ratios, unless a caveat says why there are none.

    `ratios` has a row per setting, as `rows.Measured.over` gives it. `axis` names the columns by which places are told
    ("from 1 MiB on"), the most telling first. `choose` and `keep` are the advice where it is faster and where it is
    not, as imperatives without a period. `plural`: the subject is several things.
    """
    if ratios.empty:
        return _without_times(subject, caveat)
    table = judged(ratios.reset_index(drop=True))  # which may be several tables, one below the other
    better, worse = table[table["verdict"] == "faster"], table[table["verdict"] == "slower"]
    told = _Told(subject, baseline, quantity, plural)
    verdict, headline, place = _told(table, better, worse, told, axis)
    return Finding(
        verdict,
        headline,
        quantity.marked(table),
        caveat,
        why,
        _advice(verdict, _where(table, better, worse, place, axis), choose, keep),
        significant=len(better) + len(worse) > 0,
        effects=effects(table, subject, baseline, quantity),
        subject=subject,
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
) -> Finding | None:
    """Which of several alternatives beats `baseline`? None without ratios, unless a caveat says why there are none.

    The column `alternative` of `ratios` tells them apart, `names` says how a sentence names one. The winner is the one
    that is faster in most settings, and slower in fewest. Otherwise as `compared`; `choose` gets the winner's name.
    """
    if ratios.empty:
        return _without_times(f"anything beside {baseline}", caveat)
    table = judged(ratios.reset_index(drop=True))
    better, worse = table[table["verdict"] == "faster"], table[table["verdict"] == "slower"]
    parts = [
        effect
        for name, rows in table.groupby(alternative, sort=False)
        for effect in effects(rows, names(str(name)), baseline, quantity)
    ]
    where, winner = "", ""
    if better.empty and table[alternative].nunique() > 1:
        verdict, headline = _nothing_better(table, worse, alternative, baseline, names, quantity)
    else:  # or the only one
        best = table[alternative].iloc[0] if better.empty else winner_of(table, alternative)
        rows, winner = table[table[alternative] == best], names(best)
        won, lost = rows[rows["verdict"] == "faster"], rows[rows["verdict"] == "slower"]
        verdict, headline, place = _told(rows, won, lost, _Told(winner, baseline, quantity, False), axis)
        where = _where(rows, won, lost, place, axis)
    advice = _advice(verdict, where, choose(winner) if choose and winner else None, keep)
    about = winner or (names(str(worse.loc[worse["ratio"].idxmax(), alternative])) if len(worse) else None)
    is_significant = len(better) + len(worse) > 0
    marked = quantity.marked(table)
    return Finding(verdict, headline, marked, caveat, why, advice, is_significant, (), tuple(parts), about)


def _without_times(subject: str, caveat: str | None) -> Finding | None:
    """What failed or was wrong is told even where nothing else was measured."""
    return Finding("not measured", f"Not measured: {subject}.", caveat=caveat) if caveat else None


def effects(table: pd.DataFrame, subject: str, baseline: str, quantity: Quantity = TIME) -> tuple[Effect, ...]:
    """The judged rows as effects. The setting is what stands left of the ratio.

    The alternative, which stands beside it, is named where there are several.
    """
    *before, alternative = table.columns[: list(table.columns).index("ratio")]
    alternatives = [alternative] if table[alternative].nunique() > 1 else []
    settings = [name for name in (*before, *alternatives) if not column(name).is_internal]
    ends = table[["ratio", "low", "high"]].astype(float).itertuples(index=False)
    return tuple(
        Effect(subject, baseline, setting, quantity.name, ratio, low, high, str(verdict))
        for setting, (ratio, low, high), verdict in zip(labels(table, settings), ends, table["verdict"], strict=True)
    )


@dataclass(frozen=True)
class _Told:
    """Two things that are compared, and how to put it in words."""

    subject: str
    baseline: str
    quantity: Quantity
    plural: bool

    def clause(self, rows: pd.DataFrame, *, briefly: bool = False) -> str:
        """ "the ring takes 15 to 23 % less time than torch"; `briefly` with one number, "up to 23 % less time"."""
        return f"{self.subject} {self.amount(rows, briefly=briefly)} {self.baseline}{self.quantity.part}"

    def amount(self, rows: pd.DataFrame, *, briefly: bool = False) -> str:
        """ "takes 15 to 23 % less time than"."""
        words, amount = self._words(rows, briefly)
        verb, _, rest = words.format(n=amount).partition(" ")
        return f"{verb if self.plural else {'are': 'is'}.get(verb, f'{verb}s')} {rest}"

    def _words(self, rows: pd.DataFrame, briefly: bool) -> tuple[str, str]:
        quoted = rows[rows["high"] <= UNEVEN * rows["low"]]["ratio"]
        is_less = bool(rows["ratio"].iloc[0] < 1)
        if quoted.empty:
            return self._at_least(rows, is_less)
        is_uneven = len(quoted) < len(rows)
        if is_uneven:  # the span of the others would leave out what is known least
            quoted = pd.Series([rows["ratio"].median()])
        factors = np.sort(1 / quoted if is_less else quoted)
        if factors[-1] >= TWOFOLD:
            low, high = (format_factor(factors[index]) for index in (0, -1))
            words, unit = (self.quantity.times_less if is_less else self.quantity.times_more), " times"
            briefly = briefly or factors[0] < FEWEST_TIMES
        else:
            shares = 1 - 1 / factors if is_less else factors - 1
            low, high = (f"{100 * shares[index]:.0f}" for index in (0, -1))
            words, unit = (self.quantity.less if is_less else self.quantity.more), " %"
        if low == high:
            return words, f"{'typically ' if is_uneven else ''}{high}{unit}"
        return words, f"up to {high}{unit}" if briefly else f"{low} to {high}{unit}"

    def _at_least(self, rows: pd.DataFrame, is_less: bool) -> tuple[str, str]:
        """Of ratios too uneven to quote: the end of an interval that is nearest to 1, rounded towards it."""
        nearer, least = float((1 / rows["high"] if is_less else rows["low"]).min()), "at least"
        if nearer >= TWOFOLD:
            words = self.quantity.times_less if is_less else self.quantity.times_more
            digits = 1 if nearer >= 10 else 10  # a tenth, where `format_factor` tells it
            return words, f"{least} {format_factor(np.floor(digits * nearer) / digits)} times"
        words, share = (self.quantity.less, 1 - 1 / nearer) if is_less else (self.quantity.more, nearer - 1)
        percent = int(100 * share)
        return words, f"{least} {percent} %" if percent >= 100 * LEAST_RELEVANT_DIFFERENCE else "clearly"


def _told(
    table: pd.DataFrame, better: pd.DataFrame, worse: pd.DataFrame, told: _Told, axis: Sequence[str]
) -> tuple[Verdict, str, str | None]:
    """Verdict, headline, and where the subject is better if that part of the settings has a name."""
    subject, baseline, quantity = told.subject, told.baseline, told.quantity
    if better.empty and worse.empty:
        return *_no_difference(table, quantity, f"{subject} and {baseline}", len(table)), None
    verb = "are" if told.plural else "is"
    of_one = ", in the one setting measured" if axis and len(table) == 1 else ""
    if better.empty:
        if len(worse) == len(table):
            return "no", f"No{of_one}: {told.clause(worse)}.", None
        never = f"{subject} {verb} never measurably {quantity.better} than {baseline}"
        return "no", f"No: {never}, and {quantity.worse} in {len(worse)} of {len(table)} settings.", None
    place = place_of(table, better, axis)
    if worse.empty:
        if len(better) == len(table):
            return "yes", f"Yes{of_one}: {told.clause(better)}.", None
        is_most = 2 * len(better) > len(table)
        verdict: Verdict = "yes" if is_most else "it depends"
        if place:
            return verdict, f"{'Yes' if is_most else 'Only'} {place}: {told.clause(better, briefly=True)}.", place
        settings = f"{'Yes, in most' if is_most else 'Only in some'} settings"
        reach = reach_of(table, better, axis)
        return verdict, f"{settings}: {told.clause(better)}.", reach[0] if reach else None
    if place and (elsewhere := place_of(table, worse, axis)):
        both = f"{quantity.better} than {baseline} {place}, {quantity.worse} {elsewhere}"
        return "it depends", f"It depends: {subject} {verb} {both}.", place
    if place is None and (reach := reach_of(table, better, axis)):
        place, rows = reach
        return "it depends", f"It depends: {place} {told.clause(rows, briefly=True)}, elsewhere not always.", place
    gain, loss = told.clause(better, briefly=True), told.amount(worse, briefly=True)
    loss = loss.removesuffix(" than").removesuffix(" as")
    return "it depends", f"It depends: {gain} in some settings, and {loss} in others.", place


def _no_difference(table: pd.DataFrame, quantity: Quantity, between: str, settings: int = 1) -> tuple[Verdict, str]:
    if table["p"].isna().all():
        return "undecided", f"Too few repeats to tell {between} apart."
    settings = min(settings, int(table["p"].notna().sum()))
    where = f" in any of {settings} settings" if settings > 1 else ""
    return "no clear difference", f"No clear difference{quantity.lead} between {between}{quantity.part}{where}."


def _nothing_better(
    table: pd.DataFrame,
    worse: pd.DataFrame,
    alternative: str,
    baseline: str,
    names: Callable[[str], str],
    quantity: Quantity,
) -> tuple[Verdict, str]:
    """Of a contest among several that the baseline does not lose."""
    if worse.empty:
        return _no_difference(table, quantity, f"{baseline} and any of {table[alternative].nunique()} alternatives")
    slowest = worse.loc[worse["ratio"].idxmax()]
    clause = _Told(names(str(slowest[alternative])), baseline, quantity, False).clause(worse.loc[[slowest.name]])
    return "no", f"No: none is measurably {quantity.better} than {baseline}; at worst {clause}."


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
    alike = speed - np.log1p(LEAST_RELEVANT_DIFFERENCE)
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
