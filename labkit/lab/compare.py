"""`labkit compare`: runs of a lab side by side, by their answers on the points that they share, on one page.

Repeats of different runs were not interleaved, so times are not compared. Ratios within a run are: two of one
configuration differ if their intervals are apart and they differ by more than one machine varies from run to run.
"""

import base64
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from labkit.lab.answers import Answer, Compare
from labkit.lab.config import ParameterError
from labkit.lab.declaration import Lab
from labkit.lab.pages import cards
from labkit.lab.pages.html import render
from labkit.lab.project import kind_of_path, recorded_directory, runs_directory, write_file
from labkit.lab.runs.store import Run, RunFileError, find_run
from labkit.lab.units import labels

REPEATING = {"seed", "warmup", "repeats", "ratio_within", "rounds_s", "sessions", "turns", "timeout_s"}
"""Parameters of how often and how long: runs that differ in them are comparable."""
MACHINE_DECIDES = {"session", "turn", "passes", "most_bytes", "machine_bytes", "archive", "peak_flops_per_s"}
"""Further fields of a point that do not change what is measured."""
PLACES = {"device", "backend"}
"""Fields that may differ between machines if they share no point otherwise."""
USUAL_VARIATION = 1.05
"""Factor by which ratios differ when measured twice on one quiet machine."""

NO_DIFFERENCE = "none measurable"
OUTCOMES = ("agree", "differ", "lost", "gained")
"""Fates of a verdict; "lost": the first run has it, and the other does not."""


@dataclass(frozen=True)
class Pair:
    """A run compared with the first one of its lab."""

    name: str
    run: Run
    parameters: Mapping[str, tuple[Any, Any]]
    """Parameters in which they differ, with both values."""
    n_shared: int
    n_others: int
    """Points that only one of them planned."""
    answers: Mapping[str, tuple[Answer, Answer]]
    """By question: the answers of the first run and of this one, on the points that they share."""
    ratios: pd.DataFrame
    """One row per question, configuration and alternative that both measured."""

    def outcomes(self) -> dict[str, str]:
        """Fate of each verdict that one of them has, by question."""
        outcomes = {}
        for question, (first, other) in self.answers.items():
            is_measured = first.verdict != "not measured", other.verdict != "not measured"
            if all(is_measured):
                outcomes[question] = "agree" if first.verdict == other.verdict else "differ"
            elif any(is_measured):
                outcomes[question] = "lost" if is_measured[0] else "gained"
        return outcomes


@dataclass(frozen=True)
class LabComparison:
    """Runs of one lab, each compared with the first of them, which is called `name`."""

    lab: Lab
    name: str
    run: Run
    pairs: Sequence[Pair]


def load_runs(names: Iterable[str]) -> tuple[list[Run], dict[str, str]]:
    """Load runs by path or name, or all below a folder; also return files left out, with the reason.

    Damaged files and copies are left out. ParameterError for a name without a run, a folder without runs, and fewer
    than two runs.
    """
    paths: dict[Path, None] = {}
    excluded: dict[str, str] = {}
    for name in names:
        if kind_of_path(name) == "folder":
            below = sorted(Path(name).rglob("*.jsonl"))
            if not below:
                raise ParameterError(f"expected a folder with runs (*.jsonl), got {name}: it holds no run")
            paths |= dict.fromkeys(below)
        else:
            folders = [folder for parent in (recorded_directory(), runs_directory()) for folder in parent.glob("*/")]
            paths[find_run(folders, name)] = None
    runs = []
    for path in paths:
        try:
            runs.append(Run.load(path))
        except RunFileError as error:
            excluded[str(path)] = str(error).removeprefix(str(path)).lstrip(":, ")
    runs, copies = without_copies(runs)
    excluded |= copies
    if len(runs) < 2:
        reasons = "".join(f"; {name}: {reason}" for name, reason in excluded.items())
        raise RunFileError(f"expected at least two different runs, got {len(runs)}{reasons}")
    return runs, excluded


def without_copies(runs: Iterable[Run]) -> tuple[list[Run], dict[str, str]]:
    """Return the different runs, and the copies by path: a run with the start, machine and plan of another.

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


def compare_runs(runs: Sequence[Run], load_lab: Callable[[str], Lab]) -> list[LabComparison]:
    """Compare the runs of each lab with its first. ParameterError if no two runs of one lab share a point."""
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


def run_names(runs: Sequence[Run]) -> dict[Path, str]:
    """Name each run by its machine, with its start if another run of the lab has the same name."""
    machines = [(run.header.lab, run.header.machine.label) for run in runs]
    return {
        run.path: label if machines.count((lab, label)) == 1 else f"{label}, {run.header.started:%F %T}"
        for run, (lab, label) in zip(runs, machines, strict=True)
    }


def _compare_pair(lab: Lab, first: Run, other: Run, name: str) -> Pair:
    for ignored in (REPEATING | MACHINE_DECIDES, REPEATING | MACHINE_DECIDES | PLACES):
        keys = [_point_keys(run, ignored) for run in (first, other)]
        shared = set(keys[0].values()) & set(keys[1].values())
        if shared:
            break
    one, two = (_answer_shared(lab, run, ids, shared) for run, ids in zip((first, other), keys, strict=True))
    answers = {question: (one[question], two[question]) for question in one}
    before, after = first.header.config, other.header.config
    parameters = {
        parameter: (before.get(parameter), after.get(parameter))
        for parameter in before | after
        if parameter not in REPEATING and before.get(parameter) != after.get(parameter)
    }
    n_others = len(set(keys[0].values()) ^ set(keys[1].values()))
    return Pair(name, other, parameters, len(shared), n_others, answers, _ratios(lab, answers))


def _point_keys(run: Run, ignored: set[str]) -> dict[str, str]:
    """Key of each point, by its id: its fields except lists of alternatives and those ignored."""

    def matters(name: str, value: Any) -> bool:
        return name not in ignored and not (isinstance(value, list) and any(isinstance(one, str) for one in value))

    return {
        id: json.dumps({name: value for name, value in sorted(fields.items()) if matters(name, value)})
        for id, fields in run.header.planned.items()
    }


def _answer_shared(lab: Lab, run: Run, keys: Mapping[str, str], shared: set[str]) -> dict[str, Answer]:
    results, points = run.results(), [point for point, key in keys.items() if key in shared]
    is_shared = results.frame.reindex(columns=["point"])["point"].isin(points)
    return lab.answers(replace(results, frame=results.frame[is_shared]))


def _unshared_reason(pair: Pair) -> str:
    differences = (f"{name}: {one!r:.60} and {two!r:.60}" for name, (one, two) in pair.parameters.items())
    return f"the runs of {pair.run.header.lab} share no point: {', '.join(differences) or 'none was planned by both'}"


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
    """Direction of a difference if intervals are apart, by more than is usual from run to run."""
    is_apart = low > first_high or high < first_low
    is_large = max(ratio / first, first / ratio) > USUAL_VARIATION if first > 0 and ratio > 0 else first != ratio
    if not (is_apart and is_large):
        return NO_DIFFERENCE
    return "higher" if ratio > first else "lower"


def write_comparison(
    comparisons: Sequence[LabComparison], command: str, page: Path, excluded: Mapping[str, str]
) -> list[str]:
    """Write the page, which lists excluded files; return one line per lab and run."""
    rows = [_overview_row(comparison, pair) for comparison in comparisons for pair in comparison.pairs]
    html = render(
        "compare_page.html.j2",
        command=command,
        overview=cards.table(pd.DataFrame(rows), "Every run compared with the first one of its lab").data,
        excluded=dict(excluded),
        variation_percent=f"{100 * (USUAL_VARIATION - 1):.0f}",
        labs=[_lab_section(comparison) for comparison in comparisons],
    )
    write_file(page, html)
    lines = []
    for row in rows:
        counts = ", ".join(f"{row[name]} {name}" for name in OUTCOMES if row[name])
        lines.append(f"{row['lab']}: {row['run']} against {row['against']}: answers: {counts or 'none in both'}")
    return lines


def _overview_row(comparison: LabComparison, pair: Pair) -> dict[str, Any]:
    outcomes = list(pair.outcomes().values())
    row: dict[str, Any] = {"lab": comparison.lab.name, "run": pair.name, "against": comparison.name}
    row |= {name: outcomes.count(name) for name in OUTCOMES}
    return row | {"points shared": pair.n_shared, "different parameters": ", ".join(pair.parameters) or "none"}


def _lab_section(comparison: LabComparison) -> dict[str, Any]:
    ratios = pd.concat([pair.ratios.assign(run=pair.name) for pair in comparison.pairs], ignore_index=True)
    return {
        "name": comparison.lab.name,
        "title": comparison.lab.title,
        "runs": {comparison.name: comparison.run} | {pair.name: pair.run for pair in comparison.pairs},
        "answers": cards.table(_answer_table(comparison), "Verdicts, and the typical ratio of each").data,
        "pairs": comparison.pairs,
        "n_ratios": len(ratios),
        "n_different": int((ratios["difference"] != NO_DIFFERENCE).sum()),
        "ratios": cards.table(ratios, f"{len(ratios)} ratios side by side").on_page,
        "csv": base64.b64encode(ratios.to_csv(index=False).encode()).decode(),
    }


def _answer_table(comparison: LabComparison) -> pd.DataFrame:
    """One row per question that any run answers, one column per run."""
    rows = []
    for question in comparison.lab.questions:
        outcomes = [pair.outcomes().get(question.id, "") for pair in comparison.pairs]
        if any(outcomes):
            row = {"question": question.text, comparison.name: _verdict(comparison.pairs[0].answers[question.id][0])}
            row |= {pair.name: _verdict(pair.answers[question.id][1]) for pair in comparison.pairs}
            rows.append(row | {"outcome": outcomes[0] if len(outcomes) == 1 else f"{outcomes.count('agree')} agree"})
    return pd.DataFrame(rows)


def _verdict(answer: Answer) -> str:
    return answer.verdict if answer.effect == 1 else f"{answer.verdict} ({answer.effect:.2g})"
