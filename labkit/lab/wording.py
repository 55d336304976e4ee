"""How answers word amounts and regions: "15 to 23% less time", "from 1 MiB up", "2 and 4 ranks, 4
KiB to 10 MiB"."""

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from labkit.lab.units import column, counted, format_factor, join_words, label, label_range

TWOFOLD = 1.95  # from this factor up "times" reads better than "%"
UNEVEN = 2.0  # an interval whose ends differ by more than this factor gives no size
MAX_NAMES = 4  # a scope lists up to this many names, and counts more


@dataclass(frozen=True)
class Phrasing:
    """Words for less and more of a quantity, between a subject and a baseline; `{n}` is the
    amount."""

    noun: str
    less: str
    """For a share: "takes {n} less time than"."""
    fraction: str
    """For less than half, as the inverse factor: "is {n} times faster than"."""
    more: str
    multiple: str
    better: str
    worse: str

    def clause(self, rows: pd.DataFrame) -> str:
        """Verb and amount for rows that are all better or all worse: "takes 15 to 23% less time
        than"."""
        ratios = quotable(rows)["ratio"].astype(float)
        is_less = ratios.iloc[0] < 1
        factors = sorted(1 / ratios if is_less else ratios)
        least = factors[0]
        most = factors[-1]
        if most < TWOFOLD:
            shares = [1 - 1 / factor if is_less else factor - 1 for factor in (least, most)]
            return (self.less if is_less else self.more).format(n=_percent_span(*shares))
        if is_less and "of the" in self.fraction:
            return self.fraction.format(n=_percent_span(1 / most, 1 / least))
        return (self.fraction if is_less else self.multiple).format(
            n=_span(format_factor(least), format_factor(most))
        )


TIME = Phrasing(
    noun="time",
    less="takes {n} less time than",
    fraction="is {n} times faster than",
    more="takes {n} longer than",
    multiple="takes {n} times as long as",
    better="faster",
    worse="slower",
)
MEMORY = Phrasing(
    noun="memory",
    less="needs {n} less memory than",
    fraction="needs {n} of the memory of",
    more="needs {n} more memory than",
    multiple="needs {n} times the memory of",
    better="lighter",
    worse="heavier",
)


def phrasing(value: str) -> Phrasing:
    """Choose words for the quantity in a column by its name."""
    if value.endswith("bytes"):
        return MEMORY
    if value == "seconds" or value.endswith("_s"):
        return TIME
    noun = column(value).title
    words = (
        f"has {{n}} lower {noun} than",
        f"has {{n}} of the {noun} of",
        f"has {{n}} higher {noun} than",
    )
    return Phrasing(noun, *words, f"has {{n}} times the {noun} of", "lower", "higher")


def quotable(rows: pd.DataFrame) -> pd.DataFrame:
    """Keep rows whose interval is narrow enough to quote their ratio; all rows if none is."""
    even = rows[(rows["high"] <= UNEVEN * rows["low"]).to_numpy(dtype=bool)]
    return even if len(even) else rows


def describe_region(table: pd.DataFrame, rows: pd.DataFrame, along: Sequence[str]) -> str | None:
    """Name the values that `rows` share and other rows of the table lack: "from 1 MiB up", "with 4
    ranks", "for mini".

    None if `rows` are no unbroken range of any of the columns `along`.
    """
    for name in along:
        values = table[name]
        theirs = set(rows[name])
        if values.nunique() < 2 or (values.isin(theirs) != table.index.isin(rows.index)).any():
            continue
        ordered = sorted(set(values))
        if name == "transport":
            return "over " + join_words(
                ["shared memory" if value == "shared" else value for value in sorted(theirs)]
            )
        if isinstance(ordered[0], str | bool):
            return f"for {join_words([label(name, value) for value in sorted(theirs)])}"
        if len(theirs) == 1:
            return f"{'with' if name == 'world_size' else 'at'} {label(name, min(theirs))}"
        if theirs == set(ordered[-len(theirs) :]):
            return f"from {label(name, min(theirs))} up"
        if theirs == set(ordered[: len(theirs)]):
            return f"up to {label(name, max(theirs))}"
    return None


def describe_scope(table: pd.DataFrame, columns: Sequence[str]) -> str:
    """Say which configurations a table covers: "gloo · 2 and 4 ranks · 4 KiB to 10 MiB"."""
    parts = [_describe_values(name, table[name].dropna()) for name in columns if name in table]
    return " · ".join(filter(None, parts))


def capitalize(text: str) -> str:
    """Capitalize the first letter, unless the first word is a name in code."""
    return text if "_" in text.partition(" ")[0] else text[:1].upper() + text[1:]


def _describe_values(name: str, values: pd.Series) -> str:
    if column(name).is_internal or values.empty:
        return ""
    distinct = sorted(set(values))
    if isinstance(distinct[0], str | bool):
        names = [label(name, value) for value in values.unique()]
        return (
            counted(len(names), column(name).title) if len(names) > MAX_NAMES else join_words(names)
        )
    return label_range(name, distinct)


def _span(low: str, high: str) -> str:
    return low if low == high else f"{low} to {high}"


def _percent_span(low: float, high: float) -> str:
    """Format two shares as "15 to 23%", with one decimal if the first is below one percent."""
    digits = 0 if 100 * low >= 0.95 else 1
    return f"{_span(f'{100 * low:.{digits}f}', f'{100 * high:.{digits}f}')}%"
