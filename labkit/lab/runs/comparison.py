"""Runs of one lab from several machines or commits, compared by their answers on the points that they share.

Repeats of different runs were not interleaved, so times are not compared. Ratios within a run are: two of one
configuration differ if their intervals are apart by more than ratios of one machine vary from run to run.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from labkit.lab.answers import Answer, Compare
from labkit.lab.columns import labels
from labkit.lab.config import ParameterError
from labkit.lab.declaration import Lab
from labkit.lab.runs.store import Run

REPEATING = {"seed", "warmup", "repeats", "ratio_within", "rounds_s", "sessions", "turns", "timeout_s"}
"""Parameters of how often and how long: runs that differ in them are comparable."""
MACHINE_DECIDES = {"session", "turn", "passes", "most_bytes", "machine_bytes", "archive", "peak_flops_per_s"}
"""Further fields of a point that do not say what is measured."""
PLACES = {"device", "backend"}
"""Fields that may differ between machines if they share no point otherwise."""
USUAL_VARIATION = 1.05
"""Ratios measured twice on one machine differed by up to about this factor."""

NO_DIFFERENCE = "none measurable"
Outcome = Literal["agree", "differ", "lost", "gained"]
"""What became of a verdict; "lost": the first run measured it, and the other did not."""


@dataclass(frozen=True)
class Pair:
    """A run compared with the first one."""

    name: str
    run: Run
    parameters: Mapping[str, tuple[Any, Any]]
    """Parameters in which they differ, with both values."""
    n_shared: int
    n_others: int
    """Points that only one of them planned."""
    answers: Mapping[str, tuple[Answer, Answer]]
    """By question: of the first run, and of this one, on the points that they share."""
    ratios: pd.DataFrame
    """One row per question, configuration and alternative that both measured."""

    def outcomes(self) -> dict[str, Outcome]:
        """What became of each verdict that one of them has."""
        outcomes: dict[str, Outcome] = {}
        for question, (first, other) in self.answers.items():
            is_measured = first.verdict != "not measured", other.verdict != "not measured"
            if all(is_measured):
                outcomes[question] = "agree" if first.verdict == other.verdict else "differ"
            elif any(is_measured):
                outcomes[question] = "lost" if is_measured[0] else "gained"
        return outcomes


@dataclass(frozen=True)
class LabComparison:
    """Runs of one lab, each compared with the first of them."""

    lab: Lab
    name: str
    """Of the first run."""
    run: Run
    pairs: Sequence[Pair]


def compare_runs(runs: Sequence[Run], load_lab: Callable[[str], Lab]) -> list[LabComparison]:
    """Runs grouped by lab, in their order. ParameterError if no two runs of one lab share a point."""
    by_lab: dict[str, list[Run]] = {}
    for run in runs:
        by_lab.setdefault(run.header.lab, []).append(run)
    several = {lab: group for lab, group in by_lab.items() if len(group) > 1}
    if not several:
        raise ParameterError(f"expected two different runs of one lab, got one run each of {', '.join(by_lab)}")
    names = run_names(runs)
    comparisons = []
    for name, (first, *others) in several.items():
        lab = load_lab(name)
        pairs = [_compare_pair(lab, first, other, names[other.path]) for other in others]
        comparisons.append(LabComparison(lab, names[first.path], first, pairs))
    pairs = [pair for comparison in comparisons for pair in comparison.pairs]
    if not any(pair.n_shared for pair in pairs):
        raise ParameterError(f"nothing to compare: {'; '.join(map(_unshared_reason, pairs))}")
    return comparisons


def without_copies(runs: Iterable[Run]) -> tuple[list[Run], dict[str, str]]:
    """Different runs, and by path those left out: a run that began as another did, with the same plan, is a copy.

    Of a run and a copy made before it was resumed, the one with more ended points stays.
    """
    by_content: dict[Any, Run] = {}
    copies: dict[str, str] = {}
    for run in {run.path.resolve(): run for run in runs}.values():
        header = run.header
        content = (header.lab, header.started, tuple(header.machine.identity), tuple(header.planned))
        earlier = by_content.setdefault(content, run)
        if earlier is not run:
            longer, shorter = (run, earlier) if len(run.pending) < len(earlier.pending) else (earlier, run)
            by_content[content] = longer
            kind = "a partial copy" if len(shorter.pending) > len(longer.pending) else "a copy"
            copies[str(shorter.path)] = f"{kind} of {longer.path}"
    return list(by_content.values()), copies


def run_names(runs: Sequence[Run]) -> dict[Path, str]:
    """A name per run, as short as tells the runs of each lab apart: machine, then its host, source or start, too."""
    facts = {run.path: _describe(run) for run in runs}
    names: dict[Path, str] = {}
    for parts in ((), ("host",), ("source",), ("host", "source"), ("start",)):
        names = {path: ", ".join(fact[part] for part in ("label", *parts)) for path, fact in facts.items()}
        if len({(run.header.lab, names[run.path]) for run in runs}) == len(runs):
            break
    return names


def _describe(run: Run) -> dict[str, str]:
    machine = run.header.machine
    source = " then ".join(str(source or "source not recorded") for source in run.sources)
    source = source.replace("commit ", "").replace(" with local changes", "+")
    return {"label": machine.label, "host": machine.host, "source": source, "start": f"{run.header.started:%F %T}"}


def _compare_pair(lab: Lab, first: Run, other: Run, name: str) -> Pair:
    for left_out in (REPEATING | MACHINE_DECIDES, REPEATING | MACHINE_DECIDES | PLACES):
        keys = [_point_keys(run, left_out) for run in (first, other)]
        shared = set(keys[0].values()) & set(keys[1].values())
        if shared:
            break
    one, two = (_answers(lab, run, ids, shared) for run, ids in zip((first, other), keys, strict=True))
    answers = {question: (one[question], two[question]) for question in one}
    n_others = len(set(keys[0].values()) ^ set(keys[1].values()))
    return Pair(name, other, _different_parameters(first, other), len(shared), n_others, answers, _ratios(lab, answers))


def _point_keys(run: Run, left_out: set[str]) -> dict[str, str]:
    """What each point measures, by its id: its fields but for lists of alternatives and those left out."""
    return {
        id: json.dumps(
            {
                name: value
                for name, value in sorted(fields.items())
                if name not in left_out and not (isinstance(value, list) and any(isinstance(one, str) for one in value))
            }
        )
        for id, fields in run.header.planned.items()
    }


def _answers(lab: Lab, run: Run, keys: Mapping[str, str], shared: set[str]) -> dict[str, Answer]:
    results, points = run.results(), [point for point, key in keys.items() if key in shared]
    is_shared = results.frame.reindex(columns=["point"])["point"].isin(points)
    return lab.answers(replace(results, frame=results.frame[is_shared]))


def _different_parameters(first: Run, other: Run) -> dict[str, tuple[Any, Any]]:
    one, two = first.header.config, other.header.config
    values = {name: (one.get(name), two.get(name)) for name in one | two if name not in REPEATING}
    return {name: pair for name, pair in values.items() if pair[0] != pair[1]}


def _unshared_reason(pair: Pair) -> str:
    lab = pair.run.header.lab
    if not pair.parameters:
        return f"the runs of {lab} share no measured point"
    first, *others = pair.parameters
    values = " and ".join(f"{value!r:.60}" for value in pair.parameters[first])
    more = f" ({', '.join(others)} differ too)" if others else ""
    return f"the runs of {lab} share no point: their {first} are {values}{more}"


def _ratios(lab: Lab, answers: Mapping[str, tuple[Answer, Answer]]) -> pd.DataFrame:
    """The ratios of each `Compare` side by side."""
    columns = ["question", "configuration", "first ratio", "low", "high", "ratio", "low", "high", "difference"]
    ends = ["ratio_first", "low_first", "high_first", "ratio", "low", "high"]
    rows: list[list[Any]] = []
    for name, (first, other) in answers.items():
        question = lab.question(name)
        if isinstance(question, Compare) and first.table is not None and other.table is not None:
            table = first.table
            keys = [key for key in question.metric.columns if key not in PLACES or table[key].nunique() > 1]
            both = table.merge(other.table, on=keys, suffixes=("_first", ""))
            for text, *values in zip(labels(both, keys), *(both[end] for end in ends), strict=True):
                rows.append([name, text, *values, _difference(*values)])
    return pd.DataFrame(rows, columns=columns)


def _difference(first: float, first_low: float, first_high: float, ratio: float, low: float, high: float) -> str:
    """Whether intervals are apart, and by more than what is usual from run to run."""
    is_apart = low > first_high or high < first_low
    is_large = max(ratio / first, first / ratio) > USUAL_VARIATION if first > 0 and ratio > 0 else first != ratio
    if not (is_apart and is_large):
        return NO_DIFFERENCE
    return "higher" if ratio > first else "lower"
