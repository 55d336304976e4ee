"""`labkit compare`: runs of a lab side by side, by their answers on the points that they share.

Repeats of different runs were not interleaved, so times are not compared. Ratios within a run are
(`lab.ratios`).
"""

import base64
import json
from collections.abc import Callable, Mapping, Sequence
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
from labkit.lab.project import write_file
from labkit.lab.ratios import PLACEMENT, USUAL_VARIATION, compare_ratios, ratio_tables
from labkit.lab.runs.store import Run

# Further fields of a point that do not change what is measured.
MACHINE_DECIDES = {"session", "archive", "host_ranks"}

# Fates of a verdict. "open": one run is undecided, and the other decides; "opposite": yes and no;
# "lost": only the first run has it.
OUTCOMES = ("agree", "open", "differ", "opposite", "lost", "gained")


@dataclass(frozen=True)
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

    def outcomes(self) -> dict[str, str]:
        """Fate of each verdict that one of them has, by question."""
        outcomes = {}
        for question, answers in self.answers.items():
            first = answers[0].verdict
            other = answers[1].verdict
            if first == other == "not measured":
                continue
            if other == "not measured":
                outcomes[question] = "lost"
            elif first == "not measured":
                outcomes[question] = "gained"
            else:
                outcomes[question] = verdict_outcome(first, other)
        return outcomes

    def unshared_reason(self) -> str:
        differences = (
            f"{name}: {one!r:.60} and {two!r:.60}" for name, (one, two) in self.parameters.items()
        )
        return (
            f"the runs of {self.lab.name} share no point:"
            f" {', '.join(differences) or 'none was planned by both'}"
        )


def verdict_outcome(first: Verdict, other: Verdict) -> str:
    """Return whether two verdicts on a question agree, differ, are opposite, or one is open."""
    if first == other:
        return "agree"
    # More rounds of the undecided run would say whether they differ.
    if "undecided" in (first, other):
        return "open"
    # Anything else leaves open what one of them says: "it depends" holds both.
    return "opposite" if {first, other} == {"yes", "no"} else "differ"


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
        raise ParameterError(
            f"nothing to compare: {'; '.join(pair.unshared_reason() for pair in pairs)}"
        )
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
    one = _answer_shared(lab, runs[0], keys[0], shared)
    two = _answer_shared(lab, runs[1], keys[1], shared)
    answers = {question: (one[question], two[question]) for question in one}
    before = runs[0].header.config
    after = runs[1].header.config
    parameters = {
        parameter: (before.get(parameter), after.get(parameter))
        for parameter in before | after
        if parameter not in REPETITION and before.get(parameter) != after.get(parameter)
    }
    n_others = len(first ^ other)
    return Pair(lab, runs, names, parameters, len(shared), n_others, answers, _ratios(lab, answers))


def _point_keys(run: Run, ignored: set[str]) -> dict[str, str]:
    """Return the key of each point, by its id: its fields without those ignored."""
    keys = {}
    for id, fields in run.header.planned.items():
        key = {}
        for name, value in sorted(fields.items()):
            # Of lists of alternatives, those that both runs have are compared.
            is_names = isinstance(value, list) and any(isinstance(one, str) for one in value)
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


def _ratios(lab: Lab, answers: Mapping[str, tuple[Answer, Answer]]) -> pd.DataFrame:
    """Return the ratios of both runs side by side, and how they changed."""
    runs = [{name: pair[index] for name, pair in answers.items()} for index in range(2)]
    first, other = ratio_tables(lab, runs)
    both = first.add_suffix("_first").join(other, how="inner")
    return both.join(compare_ratios([first], [other])).reset_index()


def write_comparison(
    pairs: Sequence[Pair], command: str, page: Path, excluded: Mapping[str, str]
) -> list[str]:
    """Write the page, which lists excluded files; return one line per lab and run."""
    rows = list[dict[str, Any]]()
    lines = list[str]()
    for pair in pairs:
        first, other = pair.names
        outcomes = list(pair.outcomes().values())
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
        outcomes = [pair.outcomes().get(question.id, "") for pair in pairs]
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
