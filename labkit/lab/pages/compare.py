"""The page of `labkit compare`: one table over all labs and runs, then each lab's answers and ratios side by side."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

import pandas as pd

from labkit.lab.answers import Answer
from labkit.lab.config import ParameterError
from labkit.lab.pages import cards
from labkit.lab.pages.html import render
from labkit.lab.pages.record import read_record
from labkit.lab.project import (
    kind_of_path,
    project_root,
    recorded_directory,
    runs_directory,
    shipped,
    write_file,
)
from labkit.lab.runs.comparison import NO_DIFFERENCE, USUAL_VARIATION, LabComparison, Outcome, Pair, without_copies
from labkit.lab.runs.store import Run, RunFileError, find_run

OUTCOMES = get_args(Outcome)


def load_runs(names: Iterable[str]) -> tuple[list[Run], dict[str, str]]:
    """Runs by path or name, or all below a folder, those that its reports were made of included.

    Files that are left out come with the reason: they cannot be read, or are copies. ParameterError for a name that no
    run has, for a folder without runs and reports, and if less than two runs are left.
    """
    paths: dict[Path, None] = {}
    excluded: dict[str, str] = {}
    for name in names:
        if kind_of_path(name) == "folder":
            paths |= dict.fromkeys(_runs_below(Path(name), excluded))
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


def _runs_below(folder: Path, excluded: dict[str, str]) -> list[Path]:
    """Run files below a folder, and the runs of the records below it, whose checkout may have been copied here."""
    runs, n_records = sorted(folder.rglob("*.jsonl")), 0
    for path in sorted(folder.rglob("*.json")):
        try:
            record = read_record(path)
        except ValueError:
            continue
        n_records += 1
        name = record.run.run if record.run else ""
        places = [parent / name for parent in (*path.resolve().parents, project_root(), shipped())]
        run = next((place for place in places if place.is_file()), None)
        if run is None:
            excluded[str(path)] = f"its run is not here: {name}" if name else "it names no run"
        elif run.name not in {other.name for other in runs}:
            runs.append(run)
    if not runs and not n_records:
        raise ParameterError(f"expected a folder with runs (*.jsonl) or a report, got {folder}: it holds no run")
    return runs


def write_comparison(
    comparisons: Sequence[LabComparison], command: str, page: Path, excluded: Mapping[str, str]
) -> list[str]:
    """Write the page, which lists what was left out; returns one line per lab and run."""
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
    return [_overview_line(row) for row in rows]


def _overview_row(comparison: LabComparison, pair: Pair) -> dict[str, Any]:
    outcomes = list(pair.outcomes().values())
    row = {"lab": comparison.lab.name, "run": pair.name, "against": comparison.name}
    row |= {name: outcomes.count(name) for name in OUTCOMES}
    return row | {"points shared": pair.n_shared, "different parameters": ", ".join(pair.parameters) or "none"}


def _overview_line(row: Mapping[str, Any]) -> str:
    counts = ", ".join(f"{row[name]} {name}" for name in OUTCOMES if row[name])
    return f"{row['lab']}: {row['run']} against {row['against']}: answers: {counts or 'none in both'}"


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
