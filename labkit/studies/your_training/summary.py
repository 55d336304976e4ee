"""What `labkit try` says in a terminal and in JSON."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from rich.table import Table

from labkit.lab.commands.console import number
from labkit.lab.metric import Results
from labkit.lab.project import path_from_here, runs_directory
from labkit.lab.runs.store import Run
from labkit.lab.units import format_seconds
from labkit.studies.your_training import tables
from labkit.studies.your_training.lab import LAB
from labkit.studies.your_training.worker import STEP, TOGETHER


class Summary:
    """What was measured, in a terminal: the step as soon as it is known, the changes in the end."""

    def __init__(self, console: Any) -> None:
        self._console = console
        self._has_step = False

    def update(self, run: str | None, path: Path | None = None) -> None:
        """Print the step once its point has ended."""
        if self._has_step or run is None:
            return
        path = path or runs_directory() / LAB.name / f"{run}.jsonl"
        if path.exists():
            self._print_step(Run.load(path).results())

    def finish(self, run: Run) -> None:
        """Print what is not printed yet, and where the run is."""
        results = run.results()
        self._print_step(results)
        rows = [
            (str(row["change"]), tables.describe_gain(row), _effect_on_results(row))
            for row in tables.changes(results).to_dict("records")
            if row["status"] != "refused"
        ]
        if rows:
            self._console.print("changes, each in turns with yours, gradients compared:")
            self._print_table(sorted(rows, key=lambda row: row[0] == TOGETHER))
        reasons = [note.reason for note in results.missing]
        for reason in reasons:
            self._console.print(f"not measured: {reason}")
        if run.is_busy:
            self._console.print("busy machine: measure again before you change anything")
        self._console.print(f"run      {path_from_here(run.path)}")

    def _print_step(self, results: Results) -> None:
        found = tables.found(results)
        if self._has_step or not found:
            return
        self._has_step = True
        self._console.print(f"found    {_describe_found(found)}")
        parts = tables.parts(results).to_dict("records")
        step = next(row for row in parts if row["part"] == STEP)
        interval = f"[{format_seconds(step['low'])}, {format_seconds(step['high'])}]"
        self._console.print(f"step     {format_seconds(step['seconds'])} {interval}")
        self._print_table(
            (f"  {row['part']}", format_seconds(row["seconds"]), f"{row['of_step_percent']:.0f}%")
            for row in parts
            if row["part"] != STEP
        )
        for row in tables.lines(results).to_dict("records"):
            unused = "; trains nothing" if row["unused_s"] else ""
            share = f"{row['of_step_percent']:.0f}%"
            self._console.print(
                f"  {row['line']}   {format_seconds(row['seconds'])}   {share}{unused}"
            )

    def _print_table(self, rows: Iterable[tuple[str, ...]]) -> None:
        table = Table(box=None, show_header=False, pad_edge=False)
        for row in rows:
            table.add_row(*row)
        self._console.print(table, soft_wrap=False)


def _describe_found(found: Mapping[str, Any]) -> str:
    optimizer = str(found["optimizer"])
    if not found["has_own_optimizer"]:
        optimizer += " (the setup has none)"
    batches = str(found["batches"])
    if found["batches"] == "DataLoader":
        workers = int(found["loader_workers"])
        batches += f" with {workers} workers" if workers else " without workers"
    words = [
        f"{found['model']}, {found['n_parameters'] / 1e6:.3g}M parameters",
        f"batch {found['batch_shape']}",
        optimizer,
        batches,
    ]
    if found["without_gradient"]:
        words.append(f"no gradient reaches {found['without_gradient']}")
    return "; ".join(words)


def _effect_on_results(row: Mapping[str, Any]) -> str:
    if row["status"] != "ok" or row["is_exact"]:
        return ""
    return f"changes results: gradients off by {row['error']:.1e}"


def numbers(results: Results) -> Iterator[dict[str, Any]]:
    """Yield the parts of the step, then the ratio of each change to the training as it is."""
    for row in tables.parts(results).to_dict("records"):
        yield number(row["part"], row["seconds"], "s", low=row["low"], high=row["high"])
    for row in tables.changes(results).to_dict("records"):
        facts = {"status": row["status"], "reason": row["reason"], "verdict": row["verdict"]}
        ends = {"low": row.get("low"), "high": row.get("high")} if row["status"] == "ok" else {}
        value = row["ratio"] if row["status"] == "ok" else None
        yield number(row["change"], value, "ratio", **ends, **facts)


def plain_facts(found: Mapping[str, Any]) -> dict[str, Any]:
    names = ("model", "n_parameters", "batch_shape", "optimizer", "batches", "loader_workers")
    return {name: _item(found[name]) for name in names}


def _item(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value
