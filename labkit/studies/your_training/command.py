"""The command `labkit try`: the lab on your own training, with its summary in the terminal."""

import json
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from labkit.lab.commands.console import (
    answer_numbers,
    err,
    number,
    out,
    print_json,
    print_table,
    progress,
)
from labkit.lab.config import ParameterError, parse_assignments
from labkit.lab.project import runs_directory
from labkit.lab.units import format_bytes, format_flops, format_seconds

if TYPE_CHECKING:
    from labkit.lab.runs.progress import Progress
    from labkit.lab.runs.store import Run


def try_training(
    setup: Annotated[
        str,
        typer.Argument(
            metavar="FILE:FUNCTION",
            help="A function that returns (model, batches, loss) or these and an optimizer.",
        ),
    ],
    changes: Annotated[
        list[str] | None, typer.Option("--change", help="Try this change; repeat for several.")
    ] = None,
    arguments: Annotated[
        list[str] | None, typer.Option("--set", help="An argument of the setup: batch=16.")
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Print the changes that pay, as Python.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document (docs/for-scripts.md).")
    ] = False,
) -> None:
    """Measure your own training, and try changes to it: right first, then how much faster."""
    # torch, which takes seconds to import
    from labkit.lab.runs.measure import measure
    from labkit.studies.your_training import lab

    values = {"file": setup, "arguments": parse_assignments(arguments or []), "changes": changes}
    config = lab.LAB.configure("quick", values)
    summary = Summary(err if apply or as_json else out)
    with progress(lab.LAB.name) as show:

        def on_progress(now: "Progress") -> None:
            show(now)
            summary.print_step(now.run)

        run = measure(
            lab.LAB, config, profile="quick", on_progress=on_progress, on_output=err.print
        )
    if reason := refusal(run):
        raise ParameterError(reason)
    summary.finish(run)
    if as_json:
        (found,) = json.loads(lab.found(run.results()).to_json(orient="records"))
        print_json("try", numbers(run), run=str(run.path), found=found)
    if apply:
        print(lab.code(run.results()), end="")


def refusal(run: "Run") -> str | None:
    """What is wrong with the setup, or None."""
    rows = run.results().rows(["reason"], sweep="step", status="refused")
    return None if rows.empty else str(rows["reason"].iloc[0])


class Summary:
    """What was measured, in a terminal: the step as soon as it is known, the changes in the end."""

    def __init__(self, console: Any) -> None:
        self._console = console
        self._has_step = False

    def print_step(self, name: str | None) -> None:
        """Print what a step costs once its point of this run has ended."""
        from labkit.lab.runs.store import Run
        from labkit.studies.your_training.lab import LAB, found

        path = runs_directory() / LAB.name / f"{name}.jsonl"
        if self._has_step or name is None or not path.exists():
            return
        run = Run.load(path)
        if len(found(run.results())) and run.ends:
            self._has_step = True
            _print_step(self._console, run)

    def finish(self, run: "Run") -> None:
        """Print the changes, why others were not measured, and where the run is."""
        from labkit.studies.your_training import lab

        self.print_step(run.name)
        table = lab.gains(run.results())
        if len(table):
            self._console.print("changes, each in turns with yours, gradients compared:")
        rows = []
        for row in table.to_dict("records"):
            effect = ""
            if not row["is_exact"]:
                effect = f"changes results: gradients by {100 * row['gradient_error']:.2g}%"
            rows.append((f"  {row['change']}", lab.describe_gain(row), effect))
        print_table(rows, console=self._console)
        for note in lab.CHANGE.failures(run.frame()):
            if note.status != "refused":
                names = ", ".join(note.names)
                self._console.print(f"  {names}: {note.status}: {note.reason}")
        for note in run.results().missing:
            self._console.print(f"not measured: {note.reason}")
        if run.is_busy:
            self._console.print("busy machine: measure again before you change anything")
        self._console.print(f"page     labkit report --run {run.name}")


def _print_step(console: Any, run: "Run") -> None:
    """Print what the setup returned, and what a step costs."""
    from labkit.studies.your_training import lab

    results = run.results()
    console.print(f"found    {describe_found(lab.found(results).iloc[0])}")
    parts = lab.parts(results).to_dict("records")
    step = parts.pop()
    ends = f"[{format_seconds(step['low'])}, {format_seconds(step['high'])}]"
    console.print(f"step     {format_seconds(step['seconds'])} {ends}")
    rows = [(f"  {row['part']}", row["seconds"], row["of_step_percent"], "") for row in parts]
    for row in lab.lines(results).to_dict("records"):
        unused = "no gradient comes from it" if row["unused_s"] else ""
        rows.append((f"  {row['line']}", row["seconds"], row["of_step_percent"], unused))
    print_table(
        [(name, format_seconds(time), f"{share:.0f}%", note) for name, time, share, note in rows],
        console=console,
    )
    for row in lab.speed(results).to_dict("records"):
        rate = f"{format_flops(row['flops_per_s'])}/s"
        console.print(f"speed    {rate}, {row['mfu_percent']:.0f}% of this machine's matmuls")
    memory = lab.memory(results)
    if len(memory):
        largest = memory.iloc[0]
        peak = format_bytes(largest["peak_bytes"])
        held = f"{largest['holder']}, {largest['of_peak_percent']:.0f}%"
        console.print(f"memory   peak {peak}; most: {held}")


def describe_found(found: Mapping[str, Any]) -> str:
    """What the setup returned: "GPT, 4.9M parameters; batch 8 x 128; AdamW; ..."."""
    optimizer = str(found["optimizer"])
    if not found["has_own_optimizer"]:
        optimizer += " (the setup has none)"
    batches = str(found["batches"])
    if batches == "DataLoader":
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


def numbers(run: "Run") -> Iterator[dict[str, Any]]:
    """Yield the parts of the step, then the answers with the ratios behind them."""
    from labkit.studies.your_training.lab import LAB, parts

    at = run.header.started
    for row in parts(run.results()).to_dict("records"):
        ends = {"low": row["low"], "high": row["high"]}
        yield number(row["part"], row["seconds"], "s", **ends, measured=at)
    yield from answer_numbers(LAB, run)
