"""Runs of one lab from several machines or commits: what they share, and what their samples say of it.

Repeats in different runs did not take turns, so that they are not paired: an interval of a ratio covers what varied
within both runs, and not what changed between them. How much that is can be seen only where one machine was measured
twice with the same source; then no difference is claimed that such repeated runs show among themselves. Elsewhere
`UNKNOWN_REPEAT_DIFFERENCE` stands for it.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from math import exp, log
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from labkit.bench.statistics import MIN_RELEVANT_DIFFERENCE, compare, slowest_rank, summarize, with_verdicts
from labkit.lab.config import ParameterError
from labkit.lab.rows import TURN
from labkit.lab.runs.store import Run
from labkit.machine import Source

# Fields of a point that a machine or the patience of its user decides, not what is measured.
LIMITS = (
    "timeout_s",
    "repeats",
    "passes",
    "most_bytes",
    "machine_bytes",
    "archive",
    "peak_flops_per_s",
    "keep_trace",
    "fresh_ranks",
)
# What may differ between machines if nothing else tells two rows of one run apart.
PLACES = ("device", "backend")
# Numbers recorded with a row that say what it is; all other numbers were measured.
ROW_SETTINGS = ("n_bytes", "bucket_mb", "of_bucket_mb", "segment")
REPEATS = ("seed", "epoch")
"""What tells rows apart that hold one time each: they are samples of one setting."""
NOTES = ("check", "tensor_dtype", "readers", "line", "trace", "shape", "float32_matmul_precision")
USUAL_REPEAT_PERCENT = 95
# Times of one two-core machine differed by about this much from run to run while others used it, ratios within a run by
# a quarter of it. A busier machine may differ by more.
UNKNOWN_REPEAT_DIFFERENCE = 0.20
COLUMNS = ["row", "machine", "baseline_s", "time_s", "ratio", "low", "high", "verdict"]

Samples = dict[str, np.ndarray]


@dataclass(frozen=True)
class LabComparison:
    """Runs of one lab, compared with the first of them.

    `rows` has one row per (shared setting, other machine): the columns of `settings`, and `COLUMNS`. `medians` has one
    row a (shared setting, machine) with `seconds`, `low`, `high`. `not_shared` names, by machine, the settings that
    only one of it and the first run has, and those whose median is not above zero in one. `repeat_difference` is by
    how much runs of one machine and source differ (0.05: five percent), None if there are no two.
    """

    lab: str
    runs: dict[str, Run]
    settings: list[str]
    constant: dict[str, Any]
    rows: pd.DataFrame
    medians: pd.DataFrame
    not_shared: dict[str, list[str]] = field(default_factory=dict)
    repeat_difference: float | None = None

    @property
    def baseline(self) -> str:
        return next(iter(self.runs))


def compare_runs(runs: Sequence[Run]) -> list[LabComparison]:
    """Runs grouped by lab, in the order given. ParameterError if no two of them share a measured setting."""
    unique = list({run.path.resolve(): run for run in runs}.values())
    if len(unique) < 2:
        raise ParameterError("expected at least two different runs to compare, got one")
    by_lab: dict[str, list[Run]] = {}
    for run in unique:
        by_lab.setdefault(run.header.lab, []).append(run)
    several = {lab: of_lab for lab, of_lab in by_lab.items() if len(of_lab) > 1}
    if not several:
        raise ParameterError(f"nothing to compare: one run each of {', '.join(by_lab)}; give two runs of one lab")
    names = machine_names(unique)
    found = [compare_lab(lab, {names[run.path]: run for run in of_lab}) for lab, of_lab in several.items()]
    if all(comparison.rows.empty for comparison in found):
        raise ParameterError(f"nothing to compare: the runs of {', '.join(several)} share no measured setting")
    return found


def machine_names(runs: Sequence[Run]) -> dict[Path, str]:
    """A name a run, as short as tells the runs of each lab apart: machine, host, source, number of the run."""
    described = {run.path: _description(run) for run in runs}
    levels: list[tuple[str, ...]] = [("label",), ("label", "host"), ("label", "source"), ("label", "host", "source")]
    for level in levels:
        names = {path: ", ".join(parts[part] for part in level) for path, parts in described.items()}
        if len({(run.header.lab, names[run.path]) for run in runs}) == len(runs):
            return names
    seen: Counter[tuple[str, str]] = Counter()
    for run in runs:
        seen[key := (run.header.lab, names[run.path])] += 1
        names[run.path] += f", run {seen[key]}"
    return names


def _description(run: Run) -> dict[str, str]:
    machine = run.header.machine
    sources = " then ".join(map(_short_name, run.sources))
    return {"label": machine.label, "host": machine.host, "source": sources}


def _short_name(source: Source | None) -> str:
    if source is None:
        return "source not recorded"
    return source.commit[:7] + ("+" if source.dirty else "") if source.commit else str(source)


def compare_lab(lab: str, runs: Mapping[str, Run]) -> LabComparison:
    """Every run over the first one, setting by setting."""
    found = dict(zip(runs, _by_setting(list(runs.values())), strict=True))
    first, *others = runs
    measured = {name: {key: x for key, x in of.items() if np.median(x) > 0} for name, of in found.items()}
    shared_keys = {name: measured[name].keys() & measured[first].keys() for name in others}
    shared = [key for key in measured[first] if any(key in measured[name] for name in others)]
    descriptions = pd.DataFrame([json.loads(key) for key in shared])
    varying = [name for name in descriptions if descriptions[name].astype(str).nunique() > 1]
    constant = {name: descriptions[name].iloc[0] for name in descriptions if name not in varying}
    difference = _repeat_difference(runs, measured)
    tables = [_over(measured[name], measured[first], shared, difference).assign(machine=name) for name in others]
    rows = pd.concat(tables, ignore_index=True) if shared else pd.DataFrame(columns=COLUMNS)
    settings = descriptions[varying].assign(row=range(1, len(shared) + 1)) if shared else pd.DataFrame(columns=["row"])
    medians = [
        {"row": index, "machine": name, "seconds": summary.median, "low": summary.low, "high": summary.high}
        for index, key in enumerate(shared, start=1)
        for name, samples in measured.items()
        if key in samples
        for summary in [summarize(samples[key])]
    ]
    medians_frame = pd.DataFrame(medians, columns=["row", "machine", "seconds", "low", "high"])
    return LabComparison(
        lab,
        dict(runs),
        varying,
        {name: value for name, value in constant.items() if value is not None and value == value},
        settings.merge(rows, on="row").sort_values(["row", "machine"], ignore_index=True),
        settings.merge(medians_frame, on="row"),
        {name: sorted((found[name].keys() | found[first].keys()) - shared_keys[name]) for name in others},
        difference,
    )


def _by_setting(runs: Sequence[Run]) -> list[Samples]:
    """Samples by setting of each run; device and backend are part of it only where one run has several of them."""
    full = [_samples(run) for run in runs]
    shorts = [Counter(map(_without_places, samples)) for samples in full]
    ambiguous = {short for of_run in shorts for short, number in of_run.items() if number > 1}
    return [
        {key if _without_places(key) in ambiguous else _without_places(key): values for key, values in samples.items()}
        for samples in full
    ]


def _without_places(key: str) -> str:
    return json.dumps({name: value for name, value in json.loads(key).items() if name not in PLACES})


def _samples(run: Run) -> Samples:
    """Seconds of the slowest rank by setting as JSON: one a repeat of all turns, or one a seed and epoch of one time.

    Rows that cannot be told apart are left out.
    """
    frame = run.frame()
    if frame.empty:
        return {}
    if "check" in frame:
        frame = frame[frame["check"].fillna("ok") == "ok"]
    found: Samples = {}
    settings = _setting_columns(run, frame)
    turns = [TURN] if any(TURN in fields for fields in run.header.planned.values()) else []
    for quantity in _times(run, frame):
        of_one_time = () if quantity in run.sampled() else REPEATS
        repeats = [name for name in (*of_one_time, *turns) if name in frame]
        by = [name for name in settings if name not in repeats]
        seconds = pd.to_numeric(frame[quantity], errors="coerce")
        rows = frame.assign(**{quantity: seconds.where(np.isfinite(seconds))}).dropna(subset=quantity)
        rows = rows[~rows.duplicated([*by, *repeats, "rank", "repeat"], keep=False)]
        slowest = slowest_rank(rows, quantity, [*by, *repeats])
        for values, group in slowest.groupby(by, dropna=False, sort=False):
            known = {name: value for name, value in zip(by, values, strict=True) if not _is_missing(value)}
            key = json.dumps(
                known | ({} if quantity == "seconds" else {"time": quantity.removesuffix("_s")}), default=_plain
            )
            found[key] = group[quantity].to_numpy(dtype=float)
    return found


def _times(run: Run, frame: pd.DataFrame) -> list[str]:
    """Columns of measured seconds."""
    planned = {name for fields in run.header.planned.values() for name in fields}
    names = [str(name) for name in frame.columns if name not in planned and name not in LIMITS]
    return [name for name in names if name == "seconds" or (name.endswith("_s") and not name.endswith("per_s"))]


def _setting_columns(run: Run, frame: pd.DataFrame) -> list[str]:
    """Columns that say what a row is: fields of the point, and names recorded with the row."""
    of_points = {name for fields in run.header.planned.values() for name in fields} - set(LIMITS)
    columns = []
    for name in frame.columns:
        recorded = name not in run.sampled() and name not in NOTES and name not in ("point", "rank", "repeat")
        is_name = frame[name].map(lambda value: value is None or isinstance(value, str) or value != value).all()
        if name in of_points or (recorded and name not in LIMITS and (is_name or name in ROW_SETTINGS)):
            columns.append(str(name))
    return columns


def _is_missing(value: Any) -> bool:
    return value is None or value == "" or value != value


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)


def _over(samples: Samples, baseline: Samples, shared: Iterable[str], difference: float | None) -> pd.DataFrame:
    """One row per shared setting: the ratio, its interval, and the verdict of all of them together."""
    rows = []
    for index, key in enumerate(shared, start=1):
        if key in samples:
            ratio = compare(samples[key], baseline[key], interleaved=False)
            times = {"baseline_s": float(np.median(baseline[key])), "time_s": float(np.median(samples[key]))}
            interval = {"ratio": ratio.ratio, "low": ratio.low, "high": ratio.high, "p": ratio.p}
            rows.append({"row": index} | times | interval)
    table = with_verdicts(pd.DataFrame(rows, columns=[*COLUMNS, "p"]))
    beyond = [_verdict(low, high, difference) for low, high in zip(table["low"], table["high"], strict=True)]
    agreed = table["verdict"].where(table["verdict"] == pd.Series(beyond, index=table.index), "no difference shown")
    return table.assign(verdict=agreed)[[name for name in COLUMNS if name != "machine"]]


def _verdict(low: float, high: float, difference: float | None) -> str:
    """Beyond what is relevant at all, and beyond what repeated runs of one machine differ by."""
    least = max(MIN_RELEVANT_DIFFERENCE, UNKNOWN_REPEAT_DIFFERENCE if difference is None else difference)
    return "faster" if high < 1 / (1 + least) else "slower" if low > 1 + least else "no difference shown"


def _repeat_difference(runs: Mapping[str, Run], measured: Mapping[str, Samples]) -> float | None:
    """By how much medians differ between runs of one machine with one source: 95 % of them by less."""
    logs = [
        abs(log(float(np.median(measured[a][key])) / float(np.median(measured[b][key]))))
        for a, b in combinations(runs, 2)
        if _is_repeat(runs[a], runs[b])
        for key in measured[a].keys() & measured[b].keys()
    ]
    return exp(float(np.percentile(logs, USUAL_REPEAT_PERCENT))) - 1 if logs else None


def _is_repeat(a: Run, b: Run) -> bool:
    """Whether only time lies between two runs: one machine, and one source, also where they were resumed."""
    first, second = (run.header.machine.model_copy(update={"source": None}) for run in (a, b))
    source, *others = [*a.sources, *b.sources]
    is_one = source is not None and all(other is not None and source.is_same_as(other) for other in others)
    return first == second and is_one


def overview(comparisons: Iterable[LabComparison]) -> pd.DataFrame:
    """One row per (machine, lab) compared with the first run of that lab: the one table that a teacher reads."""
    rows = []
    for found in comparisons:
        for name in list(found.runs)[1:]:
            some = found.rows[found.rows["machine"] == name]
            counts = some["verdict"].value_counts()
            row: dict[str, Any] = {"machine": name, "lab": found.lab, "verdict": _summary(some)}
            row |= {verdict: int(counts.get(verdict, 0)) for verdict in ("faster", "slower", "no difference shown")}
            row |= {"median_ratio": some["ratio"].median(), "least": some["ratio"].min(), "most": some["ratio"].max()}
            rows.append(row | {"against": found.baseline})
    return pd.DataFrame(rows)


def _summary(rows: pd.DataFrame) -> str:
    if rows.empty:
        return "not comparable"
    found = {verdict for verdict in rows["verdict"] if verdict in ("faster", "slower")}
    return "mixed" if len(found) > 1 else next(iter(found), "no difference shown")
