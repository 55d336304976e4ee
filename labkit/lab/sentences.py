"""How a comparison is put in words: verdict and headline of a judged table."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd

from labkit.bench.statistics import MIN_RELEVANT_DIFFERENCE
from labkit.lab.findings import Verdict
from labkit.lab.places import place_of, reach_of
from labkit.lab.quantities import Quantity
from labkit.lab.units import format_factor

TWOFOLD = 1.95  # from here on "times" reads better than "%"
UNEVEN = 2.0  # the width of an interval, as a factor, from which on a ratio is not quoted
MOST_WORDS = 25  # of a headline
FEWEST_TIMES = 1.1  # below it the lower end of "1.0 to 6 times" says nothing


def quoted_of(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows whose ratios a sentence quotes, the nearest to 1 first.

    Of rows some of which are uneven only one: of the others that which is nearest to the middle of all, for their span
    would leave out what is known least. If all are, the one whose interval comes nearest to 1.
    """
    is_even = rows["high"] <= UNEVEN * rows["low"]
    if not is_even.any():
        nearest = rows[["low", "high"]].astype(float).apply(np.log).abs().min(axis=1)
        return rows.loc[[nearest.fillna(np.inf).idxmin()]]
    sizes = np.log(rows["ratio"].astype(float)).abs()
    if is_even.all():
        return rows.loc[sizes.sort_values(kind="stable").index]
    return rows.loc[[(sizes[is_even] - sizes.median()).abs().idxmin()]]


def towards_1(factor: float) -> float:
    """A factor above 1 as far as `format_factor` tells it, rounded down: it is at least that."""
    digits = 1 if factor >= 10 else 10
    return math.floor(digits * factor) / digits


@dataclass(frozen=True)
class Words:
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
        quoted, is_less = quoted_of(rows), bool(rows["ratio"].iloc[0] < 1)
        if (rows["high"] > UNEVEN * rows["low"]).all():
            return self._at_least(quoted, is_less)
        is_uneven = len(quoted) < len(rows)
        factors = (1 / quoted["ratio"] if is_less else quoted["ratio"]).to_numpy(dtype=float)
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
        nearer, least = float(1 / rows["high"].iloc[0] if is_less else rows["low"].iloc[0]), "at least"
        if nearer >= TWOFOLD:
            words = self.quantity.times_less if is_less else self.quantity.times_more
            return words, f"{least} {format_factor(towards_1(nearer))} times"
        words, share = (self.quantity.less, 1 - 1 / nearer) if is_less else (self.quantity.more, nearer - 1)
        percent = int(100 * share)
        return words, f"{least} {percent} %" if percent >= 100 * MIN_RELEVANT_DIFFERENCE else "clearly"


@dataclass(frozen=True)
class Told:
    """What a table says: `place` is where the subject is better, if that part of the settings has a name.

    `rows` are those that the headline speaks of; none where nothing differs.
    """

    verdict: Verdict
    headline: str
    rows: pd.DataFrame
    place: str | None = None


def told_of(table: pd.DataFrame, better: pd.DataFrame, worse: pd.DataFrame, words: Words, axis: Sequence[str]) -> Told:
    subject, baseline, quantity = words.subject, words.baseline, words.quantity
    if better.empty and worse.empty:
        return _no_difference(table, quantity, f"{subject} and {baseline}", len(table))
    verb = "are" if words.plural else "is"
    if better.empty:
        if len(worse) == len(table):
            return Told("no", f"No: {words.clause(worse)}.", worse)
        never = f"{subject} {verb} never measurably {quantity.better} than {baseline}"
        return Told("no", f"No: {never}, and {quantity.worse} in {len(worse)} of {len(table)} settings.", worse)
    place = place_of(table, better, axis)
    if worse.empty:
        if len(better) == len(table):
            return Told("yes", f"Yes: {words.clause(better)}.", better)
        is_most = 2 * len(better) > len(table)
        verdict: Verdict = "yes" if is_most else "it depends"
        if place:
            headline = f"{'Yes' if is_most else 'Only'} {place}: {words.clause(better, briefly=True)}."
            return Told(verdict, headline, better, place)
        settings = f"{'Yes, in most' if is_most else 'Only in some'} settings"
        reach = reach_of(table, better, axis)
        return Told(verdict, f"{settings}: {words.clause(better)}.", better, reach[0] if reach else None)
    if place and (elsewhere := place_of(table, worse, axis)):
        both = f"{quantity.better} than {baseline} {place}, {quantity.worse} {elsewhere}"
        return Told("it depends", f"It depends: {subject} {verb} {both}.", better, place)
    if place is None and (reach := reach_of(table, better, axis)):
        place, rows = reach
        headline = f"It depends: {place} {words.clause(rows, briefly=True)}, elsewhere not always."
        return Told("it depends", headline, rows, place)
    gain, loss = words.clause(better, briefly=True), words.amount(worse, briefly=True)
    loss = loss.removesuffix(" than").removesuffix(" as")
    headline = f"It depends: {gain} in some settings, {loss} in others."
    if len(headline.split()) > MOST_WORDS:
        headline = f"It depends: {gain} in some settings, {quantity.worse} in others."
    return Told("it depends", headline, better, place)


def _no_difference(table: pd.DataFrame, quantity: Quantity, between: str, settings: int = 1) -> Told:
    if table["p"].isna().all():
        return Told("undecided", f"Too few repeats to tell {between} apart.", table[:0])
    settings = min(settings, int(table["p"].notna().sum()))
    where = f" in any of {settings} settings" if settings > 1 else ""
    headline = f"No clear difference{quantity.lead} between {between}{quantity.part}{where}."
    return Told("no clear difference", headline, table[:0])


def told_of_losers(
    table: pd.DataFrame,
    worse: pd.DataFrame,
    alternative: str,
    baseline: str,
    names: Callable[[str], str],
    quantity: Quantity,
) -> Told:
    """Of a contest among several that the baseline does not lose."""
    if worse.empty:
        return _no_difference(table, quantity, f"{baseline} and any of {table[alternative].nunique()} alternatives")
    slowest = worse.loc[[worse["ratio"].idxmax()]]
    clause = Words(names(str(slowest[alternative].iloc[0])), baseline, quantity, False).clause(slowest)
    headline = f"No: none is measurably {quantity.better} than {baseline}; at worst {clause}."
    return Told("no", headline, slowest)
