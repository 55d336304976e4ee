"""`labkit compare`: runs of a lab side by side, by their answers on the points that they share.

Repeats of different runs were not interleaved, so times are not compared. Ratios within a run are
(`lab.ratios`).
"""

import base64
import json
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pandas as pd

from labkit.bench.statistics import NO_DIFFERENCE_SHOWN
from labkit.lab.config import ParameterError
from labkit.lab.declaration import Lab
from labkit.lab.facts import Answer, Verdict
from labkit.lab.pages import cards
from labkit.lab.pages.html import render
from labkit.lab.point import REPETITION
from labkit.lab.project import kind_of_path, recorded_directory, runs_directory, write_file
from labkit.lab.ratios import PLACEMENT, USUAL_VARIATION, compare_ratios
from labkit.lab.runs.store import Run, RunFileError, find_run

# Further fields of a point that do not change what is measured.
MACHINE_DECIDES = {"session", "archive", "host_ranks"}

# Fates of a verdict. "open": one run is undecided, and the other decides; "opposite": yes and no;
# "lost": only the first run has it.
OUTCOMES = ("agree", "open", "differ", "opposite", "lost", "gained")


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A run compared with the first one of its lab."""

    lab: Lab
    runs: tuple[Run, Run]
    names: tuple[str, str]
    parameters: Mapping[str, tuple[Any, Any]]
    """Parameters in which they differ, with both values."""
    n_shared: int
    n_others: int
    """Points that only one of them planned."""
    answers: Mapping[str, tuple[Answer, Answer]]
    """By question: the answers of both runs on the points that they share."""
    ratios: pd.DataFrame
    """One row per question, configuration and alternative that both measured."""

    @property
    def outcomes(self) -> dict[str, str]:
        """Fate of each verdict that one of them has, by question."""
        outcomes = {
            question: verdict_outcome(first.verdict, other.verdict)
            for question, (first, other) in self.answers.items()
        }
        return {question: outcome for question, outcome in outcomes.items() if outcome}


def verdict_outcome(first: Verdict, other: Verdict) -> str:
    """Return the fate of a verdict, one of `OUTCOMES`; "" if neither run has one."""
    if first == other:
        return "" if first == "not measured" else "agree"
    if other == "not measured":
        return "lost"
    if first == "not measured":
        return "gained"
    # More rounds of the undecided run would say whether they differ.
    if "undecided" in (first, other):
        return "open"
    # Anything else leaves open what one of them says: "it depends" holds both.
    return "opposite" if {first, other} == {"yes", "no"} else "differ"


def load_runs(names: Iterable[str]) -> tuple[list[Run], dict[str, str]]:
    """Load runs by path or name, or all below a folder; return also why files were left out.

    ParameterError for a name without a run, a folder without runs, and fewer than two runs.
    """
    paths: dict[Path, None] = {}
    excluded: dict[str, str] = {}
    for name in names:
        if kind_of_path(name) == "folder":
            # Not `rglob`, which raises if a folder goes away while it reads.
            below = sorted(
                Path(at, file)
                for at, _, files in os.walk(name)
                for file in files
                if file.endswith(".jsonl")
            )
            if not below:
                raise ParameterError(
                    f"expected a folder with runs (*.jsonl), got {name}: it holds no run"
                )
            paths |= dict.fromkeys(below)
        else:
            parents = (recorded_directory(), runs_directory())
            folders = [folder for parent in parents for folder in parent.glob("*/")]
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


def without_copies(runs: Sequence[Run]) -> tuple[list[Run], dict[str, str]]:
    """Return the different runs, and the copies by path: same start, machine and plan."""
    by_content: dict[Any, Run] = {}
    copies: dict[str, str] = {}
    # The most complete first: a copy may be older than the resumption of its run.
    for run in sorted(runs, key=lambda run: len(run.pending)):
        header = run.header
        content = (header.lab, header.started, *header.machine.identity, *header.planned)
        original = by_content.setdefault(content, run)
        if original.path.resolve() != run.path.resolve():
            copies[str(run.path)] = f"a copy of {original.path}"
            if len(run.pending) > len(original.pending):
                copies[str(run.path)] = f"a partial copy of {original.path}"
    return [run for run in runs if run in by_content.values()], copies


def compare_runs(runs: Sequence[Run], load_lab: Callable[[str], Lab]) -> list[Pair]:
    """Compare the runs of each lab with its first. ParameterError if none share a point."""
    by_lab: dict[str, list[Run]] = {}
    for run in runs:
        by_lab.setdefault(run.header.lab, []).append(run)
    names = run_names(runs)
    pairs = []
    for lab, (first, *others) in by_lab.items():
        for other in others:
            pairs.append(
                _compare_pair(load_lab(lab), (first, other), (names[first.path], names[other.path]))
            )
    if not pairs:
        raise ParameterError(
            f"expected two different runs of one lab, got one run each of {', '.join(by_lab)}"
        )
    if not any(pair.n_shared for pair in pairs):
        reasons = []
        for pair in pairs:
            differences = [
                f"{name}: {first!r:.60} and {other!r:.60}"
                for name, (first, other) in pair.parameters.items()
            ]
            reason = ", ".join(differences) or "none was planned by both"
            reasons.append(f"the runs of {pair.lab.name} share no point: {reason}")
        raise ParameterError(f"nothing to compare: {'; '.join(reasons)}")
    return pairs


def run_names(runs: Sequence[Run]) -> dict[Path, str]:
    """Name each run by its machine, with its start if another run of the lab has the same name."""
    machines = [(run.header.lab, run.header.machine.label) for run in runs]
    # The start only where it is needed: a page compares machines, as a rule.
    names = {}
    for run, (lab, label) in zip(runs, machines, strict=True):
        names[run.path] = label
        if machines.count((lab, label)) > 1:
            names[run.path] = f"{label}, {run.header.started:%F %T}"
    return names


def _compare_pair(lab: Lab, runs: tuple[Run, Run], names: tuple[str, str]) -> Pair:
    ignored = REPETITION | MACHINE_DECIDES
    keys = [_point_keys(run, ignored) for run in runs]
    # Placement counts if something is shared with it: a run may have points of both devices.
    if not set(keys[0].values()) & set(keys[1].values()):
        keys = [_point_keys(run, ignored | PLACEMENT) for run in runs]
    first = set(keys[0].values())
    other = set(keys[1].values())
    shared = first & other
    before, after = (
        _answer_shared(lab, run, points, shared) for run, points in zip(runs, keys, strict=True)
    )
    answers = {question: (before[question], after[question]) for question in before}
    configs = [run.header.config for run in runs]
    parameters = {}
    for name in configs[0] | configs[1]:
        values = configs[0].get(name), configs[1].get(name)
        if name not in REPETITION and values[0] != values[1]:
            parameters[name] = values
    return Pair(
        lab=lab,
        runs=runs,
        names=names,
        parameters=parameters,
        n_shared=len(shared),
        n_others=len(first ^ other),
        answers=answers,
        ratios=compare_ratios(lab, before, after),
    )


def _point_keys(run: Run, ignored: set[str]) -> dict[str, str]:
    """Return the key of each point, by its id: its fields without those ignored."""
    keys = {}
    for id, fields in run.header.planned.items():
        key = {}
        for name, value in sorted(fields.items()):
            # Of lists of alternatives, those that both runs have are compared.
            is_names = isinstance(value, list) and any(isinstance(item, str) for item in value)
            if name not in ignored and not is_names:
                key[name] = value
        keys[id] = json.dumps(key)
    return keys


def _answer_shared(
    lab: Lab, run: Run, keys: Mapping[str, str], shared: set[str]
) -> dict[str, Answer]:
    # Answered again from the shared points alone: a region or a count of others would not compare.
    results = run.results()
    points = [point for point, key in keys.items() if key in shared]
    is_shared = results.frame.reindex(columns=["point"])["point"].isin(points)
    return lab.answers(replace(results, frame=results.frame[is_shared]))


def write_comparison(
    pairs: Sequence[Pair], command: str, page: Path, excluded: Mapping[str, str]
) -> list[str]:
    """Write the page, which lists excluded files; return one line per lab and run."""
    rows = list[dict[str, Any]]()
    lines = list[str]()
    for pair in pairs:
        first, other = pair.names
        outcomes = list(pair.outcomes.values())
        counts = {name: outcomes.count(name) for name in OUTCOMES}
        about = {
            "points shared": pair.n_shared,
            "different parameters": ", ".join(pair.parameters) or "none",
        }
        rows.append({"lab": pair.lab.name, "run": other, "against": first, **counts, **about})
        fates = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
        lines.append(
            f"{pair.lab.name}: {other} against {first}: answers: {fates or 'none in both'}"
        )
    html = render(
        "compare_page.html.j2",
        command=command,
        overview=cards.table(
            pd.DataFrame(rows), "Every run compared with the first one of its lab"
        ).data,
        excluded=dict(excluded),
        variation_percent=f"{100 * (USUAL_VARIATION - 1):.0f}",
        labs=[
            _lab_section(list(group)) for _, group in groupby(pairs, key=lambda pair: pair.lab.name)
        ],
    )
    write_file(page, html)
    return lines


def _lab_section(pairs: Sequence[Pair]) -> dict[str, Any]:
    ratios = pd.concat([pair.ratios.assign(run=pair.names[1]) for pair in pairs], ignore_index=True)
    return {
        "name": pairs[0].lab.name,
        "title": pairs[0].lab.title,
        "runs": {
            name: run for pair in pairs for name, run in zip(pair.names, pair.runs, strict=True)
        },
        "answers": (
            cards.table(_answer_table(pairs), "Verdicts, and the typical ratio of each").data
        ),
        "pairs": pairs,
        "n_ratios": len(ratios),
        "n_different": int((ratios["difference"] != NO_DIFFERENCE_SHOWN).sum()),
        "ratios": cards.table(ratios, f"{len(ratios)} ratios side by side").on_page,
        "csv": base64.b64encode(ratios.to_csv(index=False).encode()).decode(),
    }


def _answer_table(pairs: Sequence[Pair]) -> pd.DataFrame:
    """Return one row per question that any run answers, one column per run."""
    rows = []
    for question in pairs[0].lab.questions:
        outcomes = [pair.outcomes.get(question.id, "") for pair in pairs]
        if any(outcomes):
            row = {
                "question": question.text,
                pairs[0].names[0]: _describe(pairs[0].answers[question.id][0]),
            }
            row |= {pair.names[1]: _describe(pair.answers[question.id][1]) for pair in pairs}
            row["outcome"] = f"{outcomes.count('agree')} agree"
            if len(outcomes) == 1:
                row["outcome"] = outcomes[0]
            rows.append(row)
    return pd.DataFrame(rows)


def _describe(answer: Answer) -> str:
    # 1: nothing differs, or the answer has no ratio.
    if answer.effect == 1:
        return answer.verdict
    return f"{answer.verdict} ({answer.effect:.2g})"
