"""The table of labs at the start: what each shows, and how long that takes here."""

from collections.abc import Iterable

from labkit.lab.declaration import Lab
from labkit.lab.project import notebook_path, runs_directory
from labkit.lab.runs.store import Run, RunFileError
from labkit.lab.units import format_seconds

NOT_MEASURED_YET = "one or two minutes"


def labs_table(studies: Iterable[Lab]) -> str:
    """Markdown: a row per lab, with a link to its notebook that works from the notebooks' own folder."""
    rows = ["| lab | what it shows | questions | time at `quick` |", "|---|---|---|---|"]
    for study in studies:
        link = f"[{study.title}]({notebook_path(study.name).name})"
        rows.append(f"| {link} | {study.summary} | {len(study.questions)} | {_quick_time(study)} |")
    return "\n".join(rows)


def _quick_time(study: Lab) -> str:
    """What the last whole run at `quick` took on this machine; a guess where there is none."""
    for path in sorted((runs_directory() / study.name).glob("*-quick.jsonl"), reverse=True):
        try:
            run = Run.load(path)
        except RunFileError:
            continue
        if not run.pending:
            return f"{format_seconds(run.coverage()['elapsed_s'].sum())}, measured here"
    return NOT_MEASURED_YET
