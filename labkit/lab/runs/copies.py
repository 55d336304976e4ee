"""Runs named on a command line, each once: copies and damaged files are left out, with a reason."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from labkit.lab.config import ParameterError
from labkit.lab.project import kind_of_path, recorded_directory, runs_directory
from labkit.lab.runs.store import Run, RunFileError, find_run


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
        whole = by_content.setdefault(content, run)
        if whole.path.resolve() != run.path.resolve():
            copies[str(run.path)] = f"a copy of {whole.path}"
            if len(run.pending) > len(whole.pending):
                copies[str(run.path)] = f"a partial copy of {whole.path}"
    return [run for run in runs if run in by_content.values()], copies
