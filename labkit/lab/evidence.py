"""From rows with intervals to claims: which differences are more than chance, and how a number is quoted."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from labkit.bench.statistics import judged
from labkit.lab.answers import Verdict
from labkit.lab.units import format_seconds, join_words


def significant(ratios: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Rows that are faster, and slower, judged as the comparisons that answer one question: these and no others."""
    table = judged(ratios)
    return table[table["verdict"] == "faster"], table[table["verdict"] == "slower"]


def verdict_of(faster: pd.DataFrame, slower: pd.DataFrame) -> Verdict:
    """Is it faster: yes, no, both, or not shown."""
    if faster.empty and slower.empty:
        return "no difference shown"
    return "mixed" if len(faster) and len(slower) else "yes" if len(faster) else "no"


def with_interval(row: pd.Series, value: str = "seconds", form: Callable[[float], str] = format_seconds) -> str:
    """A median and its interval, "366 µs [299 µs, 436 µs]", from a row with `low` and `high`."""
    if row["low"] != row["low"]:
        return f"{form(row[value])} (too few repeats for an interval)"
    return f"{form(row[value])} [{form(row['low'])}, {form(row['high'])}]"


def ratio_text(row: pd.Series) -> str:
    """A ratio and its interval, "0.82 [0.79, 0.85]"."""
    return with_interval(row, "ratio", "{:.2f}".format)


def ratios_text(ratios: pd.DataFrame, place: Callable[[pd.Series], str], most: int = 3) -> str | None:
    """A table's ratios, each with its place and interval: "mini: 0.82 [0.79, 0.85]; and 4 more".

    The smallest first if one is shown to be faster, and otherwise those furthest from 1.
    """
    if ratios.empty:
        return None
    distance = np.log(ratios["ratio"].to_numpy(dtype=float))
    order = distance if (ratios["verdict"] == "faster").any() else -np.abs(distance)
    ordered = ratios.iloc[np.argsort(order, kind="stable")]
    parts = [f"{place(row)}: {ratio_text(row)}" for _, row in ordered.head(most).iterrows()]
    left = len(ratios) - most
    return "; ".join(parts) + (f"; and {left} more" if left > 0 else "")


def span_text(values: Iterable[float], form: Callable[[float], str] = "{:.2f}".format) -> str:
    """From the smallest to the largest, "0.74 to 0.91"; one number where they read the same."""
    numbers = list(values)
    return " to ".join(dict.fromkeys(form(pick(numbers)) for pick in (min, max)))


def ranks_text(row: Mapping[str, Any] | pd.Series) -> str:
    """Where ranks measured, "mini, 2 ranks, gloo", from `workload`, `world_size`, `backend` and `device`."""
    shared = ", ranks share a GPU: not a scaling result" if (row["device"], row["backend"]) == ("cuda", "gloo") else ""
    return f"{row['workload']}, {row['world_size']:.0f} ranks, {row['backend']}{shared}"


def wrong_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows that did not pass their gate."""
    return frame[frame["gate"].fillna("ok") != "ok"] if "gate" in frame else frame.iloc[:0]


def no_times(gates: pd.Series) -> str:
    """How a sentence begins about what has no time: a wrong result is shouted, a failure only told."""
    return "WRONG RESULTS, and therefore no times" if gates.str.startswith("wrong").any() else "No times"


def not_measured_text(frame: pd.DataFrame, name: str) -> str:
    """What ranks could not measure, and why: a sentence, or nothing. `name` is the column that names it."""
    if "not_measured" not in frame or (refused := frame.dropna(subset="not_measured")).empty:
        return ""
    parts = [
        f"{join_words(sorted(set(rows[name])))} ({reason})"
        for reason, rows in refused.groupby("not_measured", sort=False)
    ]
    return f"Not measured: {join_words(parts)}."
