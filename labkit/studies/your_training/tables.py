"""Tables of a run on your own training: what was found, parts, lines, and what changes gain."""

import math
from typing import Any

import pandas as pd

from labkit.bench.statistics import MIN_RELEVANT_DIFFERENCE
from labkit.lab.metric import Metric, Results
from labkit.studies.your_training.changes import CHANGES
from labkit.studies.your_training.loop import PARTS
from labkit.studies.your_training.worker import STEP, TOGETHER, YOURS

PART = Metric("seconds", "part", (), where={"kind": "part"})
CHANGE = Metric("seconds", "variant", ("change",), where={"sweep": "changes"})
MAX_LINES = 5
MIN_LINE_SHARE = 0.03
"""Share of a step below which a line is not worth a row."""


def found(results: Results) -> dict[str, Any]:
    """What the setup returned: one row's columns; {} if it was refused."""
    frame = results.frame
    if "kind" not in frame:
        return {}
    rows = frame[frame["kind"] == "found"]
    return {} if rows.empty else dict(rows.iloc[0])


def refusal(results: Results) -> str | None:
    """Why nothing could be measured: what is wrong with the setup, or None."""
    if found(results):
        return None
    reasons = results.rows(["reason"], sweep="step", status="refused")["reason"].dropna()
    return None if reasons.empty else str(reasons.iloc[0])


def parts(results: Results) -> pd.DataFrame:
    """Seconds and share of the step by part, in the order of a step, with intervals."""
    table = PART.medians(results.frame)
    order = {name: place for place, name in enumerate((*PARTS, STEP))}
    table = table.sort_values("part", key=lambda names: names.map(order)).reset_index(drop=True)
    step_s = table.loc[table["part"] == STEP, "seconds"].sum()
    return table.assign(of_step_percent=100 * table["seconds"] / step_s)


def lines(results: Results) -> pd.DataFrame:
    """The reader's lines that take most of a step, the slowest first; `seconds` with backward."""
    columns = ["line", "line_s", "backward_s", "seconds", "calls", "unused_s", "of_step_percent"]
    frame = results.frame
    table = parts(results)
    if "line" not in frame or table.empty:
        return pd.DataFrame(columns=columns)
    rows = frame.dropna(subset="line").drop_duplicates("line")
    step_s = float(table.loc[table["part"] == STEP, "seconds"].iloc[0])
    seconds = rows["line_s"] + rows["backward_s"]
    rows = rows.assign(seconds=seconds, of_step_percent=100 * seconds / step_s)
    rows = rows.sort_values("seconds", ascending=False)
    is_large = rows[["seconds", "unused_s"]].max(axis=1) > MIN_LINE_SHARE * step_s
    return rows.loc[is_large, columns].head(MAX_LINES).reset_index(drop=True)


def changes(results: Results) -> pd.DataFrame:
    """Each change with its ratio to yours and verdict, the largest gain first; then the others.

    `less_low_percent` and `less_high_percent` are the ends of the time saved. `pays_after`: steps
    after which a compiled model has earned its compilation. `status`: ok, wrong, failed, oom or
    refused, with a reason.
    """
    frame = results.frame
    if "change" not in frame:
        return pd.DataFrame(columns=["change", "status", "reason", "verdict"])
    ratios = CHANGE.ratios_to(YOURS, frame).set_index("change")
    medians = CHANGE.medians(frame)
    yours_s = medians[medians["variant"] == YOURS].set_index("change")["seconds"]
    rows = []
    for name, group in frame.dropna(subset="change").groupby("change", sort=False):
        changed = group[group["variant"] != YOURS] if "variant" in group else group
        row = changed.iloc[0] if len(changed) else group.iloc[0]
        rows.append(_change_row(str(name), row, ratios, yours_s))
    table = pd.DataFrame(rows)
    return table.sort_values(["rank", "ratio"]).drop(columns="rank").reset_index(drop=True)


def _change_row(name: str, row: Any, ratios: pd.DataFrame, yours_s: pd.Series) -> dict[str, Any]:
    status = str(row["status"])
    about: dict[str, Any] = {"change": name, "parts_of_change": row.get("parts_of_change", name)}
    if status != "ok" or name not in ratios.index:
        about |= {"status": status, "reason": str(row["reason"]), "verdict": ""}
        return about | {"ratio": math.nan, "rank": 3 if status != "refused" else 4}
    ratio = ratios.loc[name]
    gain_s = (1 - float(ratio["ratio"])) * float(yours_s[name])
    first_s = float(row.get("first_s", math.nan))
    is_faster = ratio["verdict"] == "faster"
    is_compiled = "torch.compile" in about["parts_of_change"]
    pays_after = math.ceil(first_s / gain_s) if is_faster and is_compiled else math.nan
    ranks = {"faster": 0 if name != TOGETHER else -1}
    return about | {
        "status": "ok",
        "reason": "",
        "verdict": ratio["verdict"],
        "ratio": float(ratio["ratio"]),
        "low": float(ratio["low"]),
        "high": float(ratio["high"]),
        "less_low_percent": 100 * (1 - float(ratio["high"])),
        "less_high_percent": 100 * (1 - float(ratio["low"])),
        "is_undecided": is_undecided(float(ratio["low"]), float(ratio["high"])),
        "pays_after": pays_after,
        "is_exact": bool(row.get("is_exact", True)),
        "error": float(row.get("error", math.nan)),
        "rank": ranks.get(str(ratio["verdict"]), 1),
    }


def is_undecided(low: float, high: float) -> bool:
    """Whether an interval holds both no gain and one worth having."""
    return low < 1 - MIN_RELEVANT_DIFFERENCE and high > 1 - MIN_RELEVANT_DIFFERENCE


def gains(results: Results) -> pd.DataFrame:
    """The changes that make a step faster, alone."""
    table = changes(results)
    return table[(table["verdict"] == "faster") & (table["change"] != TOGETHER)]


def code(results: Results) -> str:
    """The changes that pay, as Python to paste, each with what it gains."""
    table = gains(results)
    if table.empty:
        return "# nothing that was tried makes this training faster\n"
    blocks = []
    for row in table.to_dict("records"):
        about = f"# {_range(row)}"
        if not row["is_exact"]:
            about += f"; changes results: gradients differ by {row['error']:.1e}"
        blocks.append(f"{about}\n{CHANGES[row['change']].code}\n")
    return "\n".join(blocks)


def _range(row: Any) -> str:
    low = round(row["less_low_percent"])
    high = round(row["less_high_percent"])
    return f"{low}% less time" if low == high else f"{low} to {high}% less time"


def describe_gain(row: Any) -> str:
    """A change's result in a few words: "31 to 36% less time", "undecided: 4% less [-1, 9]"."""
    if row["status"] != "ok":
        return str(row["reason"])
    if row["verdict"] == "faster":
        text = _range(row)
        if not math.isnan(row["pays_after"]):
            text += f"; pays after {row['pays_after']:,.0f} steps"
        return text
    if row["verdict"] == "slower":
        return f"{-round(row['less_high_percent'])} to {-round(row['less_low_percent'])}% longer"
    typical = 100 * (1 - row["ratio"])
    ends = f"[{row['less_low_percent']:.0f}, {row['less_high_percent']:.0f}]"
    if row["is_undecided"]:
        return f"undecided: {typical:.0f}% less {ends}"
    return f"no difference: {typical:.0f}% less {ends}"
