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
from labkit.lab.project import path_from_here, runs_directory
from labkit.lab.units import format_bytes, format_flops, format_seconds

if TYPE_CHECKING:
    from labkit.check.trainings import TrainingChange
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
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", min=2, max=64, help="Train on this many ranks, in all ways."),
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Print the changes that pay, as Python.")
    ] = False,
    save: Annotated[
        bool, typer.Option("--save", help="Add this run to the baseline of this training.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON document (docs/for-scripts.md).")
    ] = False,
) -> None:
    """Measure your own training, and try changes to it: right first, then how much faster.

    With --ranks: wrappers and stages of ZeRO, torch's and labkit's, instead of changes.

    Exit status: 0; 1 if a busy run was not saved; 3 if a step is slower than its baseline by more
    than 5%.
    """
    # torch, which takes seconds to import
    from labkit.check.trainings import compare_with_baseline, save_training
    from labkit.lab.runs.measure import measure
    from labkit.studies.your_training import lab

    values: dict[str, Any] = {"file": setup, "arguments": parse_assignments(arguments or [])}
    values |= {"changes": changes, "world_sizes": []}
    if ranks is not None:
        values |= {"changes": changes or [], "world_sizes": [ranks]}
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
    change = None if save or run.is_busy else compare_with_baseline(run)
    summary.finish(run)
    if change is not None:
        summary.print_change(change)
    if as_json:
        (found,) = json.loads(lab.found(run.results()).to_json(orient="records"))
        print_json("try", numbers(run, change), run=str(run.path), found=found)
    if apply:
        print(lab.code(run.results()), end="")
    if save and run.is_busy:
        err.print("no baseline was saved: the machine was busy; save it while it is quiet")
        raise typer.Exit(1)
    if save:
        err.print(f"baseline: {path_from_here(save_training(run))}")
    raise typer.Exit(3 if change is not None and change.is_slower else 0)


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
        from labkit.studies.your_training.rank_tables import STRATEGY

        if not self._has_step:
            _print_step(self._console, run)
        table = lab.gains(run.results())
        if run.is_busy:
            self._console.print(
                "busy     other programs were at work: nothing below is a gain; measure again"
            )
        if len(table):
            self._console.print("changes, each in turns with yours, gradients compared:")
        rows = []
        for row in table.to_dict("records"):
            effect = ""
            if not row["is_exact"]:
                effect = f"changes results: gradients by {100 * row['gradient_error']:.2g}%"
            rows.append((f"  {row['change']}", lab.describe_gain(row, is_busy=run.is_busy), effect))
        print_table(rows, console=self._console)
        _print_ranks(self._console, run)
        failures = [*lab.CHANGE.failures(run.frame()), *STRATEGY.failures(run.frame())]
        for note in failures:
            if note.status != "refused":
                names = ", ".join(note.names)
                self._console.print(f"  {names}: {note.status}: {note.reason}")
        for note in run.results().missing:
            self._console.print(f"not measured: {note.reason}")
        self._console.print(f"page     labkit report --run {run.name}")

    def print_change(self, change: "TrainingChange") -> None:
        """Print what changed since the baseline, and what may explain it."""
        from labkit.check.trainings import MIN_RUNS

        newest = change.baseline[-1].header.started
        about = f"since the baseline ({len(change.baseline)}, the newest of {newest:%Y-%m-%d})"
        if change.blockers:
            reasons = ", ".join(map(str, change.blockers))
            self._console.print(f"{about}: not comparable: {reasons}")
            return
        others = ", ".join(map(str, change.differences)) or "the same software"
        self._console.print(f"{about}: {others}; the machine is the same")
        rows = []
        for part, row in change.parts.iterrows():
            ends = f"[{100 * row['low']:.0f}, {100 * row['high']:.0f}]"
            change_of_part = f"{100 * row['ratio']:.0f}% {ends} of the time then"
            rows.append((f"  {part}", change_of_part, row["verdict"]))
        print_table(rows, console=self._console)
        if len(change.baseline) < MIN_RUNS:
            self._console.print(
                f"undecided: `--save` {MIN_RUNS} runs, at different hours, to show how much this"
                " machine varies by itself"
            )


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


def _print_ranks(console: Any, run: "Run") -> None:
    """Print what each strategy does on several ranks, and which rank is late."""
    from labkit.studies.your_training import lab
    from labkit.studies.your_training.rank_tables import lateness, scaling

    results = run.results()
    rows = []
    for row in scaling(results).to_dict("records"):
        exposed = f"{format_seconds(row['exposed_s'])} exposed, {row['exposed_percent']:.0f}%"
        rows.append(
            (
                f"  {lab.LAB.names[row['strategy']]}",
                format_seconds(row["seconds"]),
                f"{row['times_one_process']:.2f}x one process",
                exposed,
                f"holds {format_bytes(row['held_bytes'])}",
            )
        )
    if rows:
        n_ranks = results.frame["world_size"].max()
        console.print(f"{n_ranks:.0f} ranks, checked against one process on the batches of all:")
    print_table(rows, console=console)
    for row in lateness(results).query("is_late").to_dict("records"):
        ends = f"[{format_seconds(row['low'])}, {format_seconds(row['high'])}]"
        later = f"{format_seconds(row['later_s'])} {ends} longer than the others, in {row['part']}"
        console.print(f"late     rank {row['rank']}: {later}")


def describe_found(found: Mapping[str, Any]) -> str:
    """What the setup returned: "GPT, 4.9M parameters; batch 8 x 128; AdamW; ..."."""
    optimizer = str(found["optimizer"])
    if not found["has_own_optimizer"]:
        optimizer += " (the setup has none)"
    batches = str(found["batches"])
    if batches == "DataLoader":
        workers = int(found["loader_workers"])
        batches += f" with {workers} workers" if workers else " without workers"
    n_parameters = int(found["n_parameters"])
    size = f"{n_parameters / 1e6:.3g}M" if n_parameters >= 100_000 else f"{n_parameters:,}"
    words = [
        f"{found['model']}, {size} parameters",
        f"batch {found['batch_shape']}",
        optimizer,
        batches,
    ]
    if found["without_gradient"]:
        words.append(f"no gradient reaches {found['without_gradient']}")
    return "; ".join(words)


def numbers(run: "Run", change: "TrainingChange | None") -> Iterator[dict[str, Any]]:
    """Yield the parts of the step, then the answers with the ratios behind them.

    Then the parts' ratios to the baseline.
    """
    from labkit.studies.your_training.lab import LAB, parts

    at = run.header.started
    for row in parts(run.results()).to_dict("records"):
        ends = {"low": row["low"], "high": row["high"]}
        yield number(row["part"], row["seconds"], "s", **ends, measured=at)
    yield from answer_numbers(LAB, run)
    for part, row in change.parts.iterrows() if change is not None else ():
        ends = {"low": row["low"], "high": row["high"]}
        facts = {"validity": row["verdict"], "measured": at}
        yield number(f"{part} since the baseline", row["ratio"], "ratio", **ends, **facts)
