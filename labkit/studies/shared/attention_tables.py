"""Tables of runs that `labkit.studies.shared.attention_passes` measured: times, ratios and what did not run.

"both" is forward and backward of one round together. Every table is tidy and carries units in its names.
"""

import pandas as pd

from labkit.bench.statistics import compare_groups, summarize_groups
from labkit.studies.shared.attention_passes import EXPLICIT, PHASES

SETTING = ["sweep", "device", "dtype", "batch", "head_dim", "sequence"]


def empty(*columns: str) -> pd.DataFrame:
    """No rows, with the columns of a setting and `columns`."""
    return pd.DataFrame(columns=[*SETTING, "implementation", *columns])


def samples(frame: pd.DataFrame, sweep: str | None = None) -> pd.DataFrame:
    """`seconds` of each repeat by (setting, implementation, phase); phase "both" is the sum of a round."""
    if frame.empty or "seconds" not in frame:
        return empty("phase", "repeat", "seconds")
    timed = frame[frame["phase"].isin(PHASES)].dropna(subset="seconds")
    timed = timed if sweep is None else timed[timed["sweep"] == sweep]
    columns = [*SETTING, "implementation", "repeat"]
    both = timed.groupby(columns, sort=False)["seconds"].sum().reset_index().assign(phase="both")
    return pd.concat([timed[[*columns, "phase", "seconds"]], both], ignore_index=True)


def times(frame: pd.DataFrame, sweep: str | None = None) -> pd.DataFrame:
    """Median seconds with interval, one row a (setting, implementation, phase)."""
    table = summarize_groups(samples(frame, sweep), "seconds", [*SETTING, "implementation", "phase"])
    return with_width(table.rename(columns={"median": "seconds"}))


def with_width(table: pd.DataFrame) -> pd.DataFrame:
    """Add `width`, the head dimension in words, for legends and panels."""
    return table.assign(width=[f"head dim {d:3.0f}" for d in table["head_dim"]])


def against(frame: pd.DataFrame, sweep: str, baseline: str = EXPLICIT) -> pd.DataFrame:
    """Time of each implementation over that of `baseline` in the same rounds, with interval and verdict."""
    table = samples(frame, sweep)
    return with_width(compare_groups(table, "seconds", [*SETTING, "phase"], "implementation", baseline))


def refused(frame: pd.DataFrame) -> pd.DataFrame:
    """Implementations that did not run at a point, one row each, with the reason in `gate`; wrong ones too."""
    if frame.empty or "gate" not in frame:
        return empty("gate")
    table = frame[(frame["phase"] == "both") & (frame["gate"] != "ok")]
    return table[[*SETTING, "implementation", "gate"]].reset_index(drop=True)
