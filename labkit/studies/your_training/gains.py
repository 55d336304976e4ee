"""What was tried on a training, in numbers and words: changes, values of an argument."""

import math
from typing import Any

import numpy as np
import pandas as pd

from labkit.bench.intervals import FALSE_DISCOVERY_RATE
from labkit.bench.statistics import MIN_RELEVANT_DIFFERENCE, NO_DIFFERENCE_SHOWN
from labkit.lab.metric import Metric, Results
from labkit.studies.shared.tables import join
from labkit.studies.your_training.attention import BY_HAND, SDPA
from labkit.studies.your_training.changes import CHANGES, COMPILE
from labkit.studies.your_training.worker import TOGETHER, YOURS

CHANGE = Metric("seconds", "change", (), where={"sweep": "changes"})
ARGUMENT = Metric("seconds", "argument", (), where={"kind": "argument"})
ATTENTION = Metric("seconds", "attention", ("line", "shape"), where={"kind": "attention"})
# Time that is saved, and its interval.
LESS = ("less_percent", "less_low_percent", "less_high_percent")


def gains(results: Results) -> pd.DataFrame:
    """Return what each change saves: gains first, then what shows no difference, then losses.

    `less_percent`, with its interval: time that it saves. `pays_after_steps`: after which a
    compiled model has earned its compilation. `gradient_error` and `loss_change` are relative to
    yours; an `is_exact` change differs by rounding alone. `less_memory_percent`: at the peak of a
    step, of changes that are there for it.
    """
    columns = ["session", "error", "loss_change", "first_s", "is_exact", "made_of", "peak_ratio"]
    about = results.rows(["change", *columns], sweep="changes", status="ok")
    about = about[about["change"] != YOURS].drop_duplicates("change")
    # Verdicts allow for the number of comparisons, so each question has its own rows.
    ratios_by_question = [
        CHANGE.ratios_to(YOURS, results.frame, among) for among in ([*CHANGES], [TOGETHER])
    ]
    table = join(pd.concat(ratios_by_question), about, ["change"], "left")
    samples = CHANGE.samples(results.frame)
    # Each change was compared with yours of the same minutes.
    yours_s = samples[samples["change"] == YOURS].groupby("session")["seconds"].median()
    saved_s = table["session"].map(yours_s).astype(float) * (1 - table["ratio"].astype(float))
    # Only compiling takes time before the first step that it saves.
    is_compiled = table["made_of"].astype(str).str.contains(COMPILE)
    is_faster = table["verdict"] == "faster"
    pays_after = np.ceil(table["first_s"].astype(float) / saved_s)
    table = _add_savings(table).assign(
        saved_s=saved_s,
        pays_after_steps=pays_after.where(is_compiled & is_faster),
        gradient_error=table["error"],
        less_memory_percent=100 * (1 - table["peak_ratio"].astype(float)),
    )
    columns = ["change", *LESS, "verdict", "saved_s", "pays_after_steps", "gradient_error"]
    columns += ["loss_change", "less_memory_percent", "is_exact"]
    table["order"] = table["verdict"].map({"faster": 0, "slower": 2}).fillna(1)
    table = table.sort_values(["order", "less_percent"], ascending=[True, False])
    return table[columns].reset_index(drop=True)


def _add_savings(table: pd.DataFrame) -> pd.DataFrame:
    """Add the percent of time that is saved, and its interval: the smaller ratio saves more."""
    ratios = table[["ratio", "high", "low"]].astype(float)
    return table.assign(**dict(zip(LESS, (100 * (1 - ratios)).to_numpy().T, strict=True)))


def sdpa_gains(results: Results) -> pd.DataFrame:
    """Return what SDPA saves of each attention by hand, the largest first.

    Then, with a `reason`, attention on which it was not timed: if there is any.
    """
    table = ATTENTION.ratios_to(BY_HAND, results.frame)
    table = table.reindex(columns=["line", "shape", "ratio", "low", "high", "verdict"])
    table = _add_savings(table).sort_values("less_percent", ascending=False, ignore_index=True)
    untimed = results.rows(["line", "shape", "reason"], kind="attention", attention=SDPA)
    untimed = untimed[untimed["reason"].notna()]
    return pd.concat([table, untimed], ignore_index=True) if len(untimed) else table


def argument_times(results: Results) -> pd.DataFrame:
    """Return seconds per sample by value of a swept argument, the fastest first."""
    table = ARGUMENT.medians(results.frame)
    sizes = results.rows(["argument", "n_samples"], kind="argument").dropna().drop_duplicates()
    table = join(table, sizes, ["argument"], "left")
    return table.sort_values("seconds", ignore_index=True)


def fits(results: Results) -> pd.DataFrame:
    """Return the largest batch that fits, counted, in one row; none unless that was asked."""
    columns = ["largest_batch", "is_all_data", "sample_bytes", "available_bytes"]
    return results.rows(columns, kind="fits")


def describe_gain(row: Any, *, is_busy: bool = False) -> str:
    """Return what a row of `gains` says, such as "31 to 36% less time".

    Without a difference: "no difference shown: 4% less [-1, 9]"; if 0 lies outside of the interval,
    with the reason. Of a busy run, without a verdict: "34% less [31, 36]".
    """
    low = round(row["less_low_percent"])
    high = round(row["less_high_percent"])
    if row["less_percent"] < 0:
        estimate = f"{-row['less_percent']:.0f}% more [{-high}, {-low}]"
    else:
        estimate = f"{row['less_percent']:.0f}% less [{low}, {high}]"
    if is_busy:
        return estimate
    if row["verdict"] == "faster":
        text = f"{_span(low, high)} less time"
        pays_after = row.get("pays_after_steps", math.nan)
        if pays_after > 0:
            text += f"; pays after {pays_after:,.0f} steps"
        return text
    if row["verdict"] == "slower":
        return f"{_span(-high, -low)} more time"
    why = ""
    if row["less_low_percent"] > 0 or row["less_high_percent"] < 0:
        # An interval is of one comparison, at 95%; a verdict allows for all of its question.
        why = f" at {FALSE_DISCOVERY_RATE:.1%} over all comparisons"
        least = 1 + MIN_RELEVANT_DIFFERENCE
        if 1 / least < 1 - row["less_percent"] / 100 < least:
            why = f" of {MIN_RELEVANT_DIFFERENCE:.0%} or more"
    return f"{NO_DIFFERENCE_SHOWN}{why}: {estimate}"


def _span(low: int, high: int) -> str:
    return f"{low}%" if low == high else f"{low} to {high}%"


def describe_effects(row: Any) -> str:
    """Return what a change of `gains` affects besides time: "12% less memory at the peak" or ""."""
    effects = []
    if not row["is_exact"]:
        effects.append(f"changes results: gradients by {100 * row['gradient_error']:.2g}%")
    if row["less_memory_percent"] > 0:
        effects.append(f"{row['less_memory_percent']:.0f}% less memory at the peak")
    return "; ".join(effects)
