"""The command `labkit try`: the lab on your own training, with its summary in the terminal."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from labkit.lab.commands.console import (
    Json,
    answer_numbers,
    err,
    number,
    out,
    print_json,
    progress,
    run_validity,
)
from labkit.lab.config import ParameterError, parse_assignments
from labkit.lab.project import path_from_here

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
    batch: Annotated[
        str | None,
        typer.Option("--batch", help="auto: the largest that fits, the fastest per sample."),
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option("--ranks", min=2, max=64, help="Train on this many ranks, in all ways."),
    ] = None,
    apply: Annotated[
        bool, typer.Option("--apply", help="Print a setup with the changes that pay.")
    ] = False,
    save: Annotated[
        bool, typer.Option("--save", help="Add this run to the baseline of this training.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Measure your own training, and try changes to it: right first, then how much faster.

    With --ranks: wrappers and stages of ZeRO, torch's and labkit's, instead of changes.
    With --batch auto, or several values as in --set batch=8,16: these values instead.

    Exit status: 0; 1 if nothing was measured, or a busy run not saved; 3 if a step, or a part of
    it, is slower than its baseline by more than 5%.
    """
    # Not above: torch takes seconds to import, and `labkit --help` needs none of it.
    from labkit.check.trainings import compare_with_baseline, save_training
    from labkit.check.try_summary import Summary
    from labkit.lab.runs.measure import measure
    from labkit.studies.your_training import lab
    from labkit.studies.your_training.script import script

    values: dict[str, Any] = {"file": setup, "changes": changes, "world_sizes": []}
    values |= _arguments(arguments or [], batch)
    if ranks is not None:
        values["world_sizes"] = [ranks]
    if ranks is not None or "argument" in values:
        values["changes"] = changes or []
    config = lab.LAB.configure("quick", values)
    summary = Summary(err if apply or as_json else out)
    with progress(lab.LAB.name) as show:

        def on_progress(now: "Progress") -> None:
            show(now)
            summary.print_step(now.run)

        run = measure(
            lab.LAB, config, profile="quick", on_progress=on_progress, on_output=err.print
        )
    _require_step(run)
    # A busy run would be slower than any baseline, and make a bad one.
    since_baseline = None if save or run.is_busy else compare_with_baseline(run)
    summary.finish(run)
    if since_baseline is not None:
        summary.print_change(since_baseline, run)
    if as_json:
        (found,) = json.loads(lab.found(run.results()).to_json(orient="records"))
        print_json("try", numbers(run, since_baseline), run=str(run.path), found=found)
    if apply:
        print(script(run), end="")
    if save and run.is_busy:
        err.print("no baseline was saved: the machine was busy; save it while it is quiet")
        raise typer.Exit(1)
    if save:
        err.print(f"baseline: {path_from_here(save_training(run))}")
    is_slower = since_baseline is not None and since_baseline.is_slower
    raise typer.Exit(3 if is_slower else 0)


def _require_step(run: "Run") -> None:
    """End the command unless a step was measured: ParameterError for a setup that is wrong."""
    from labkit.studies.your_training.lab import found

    reason = run.results().refusal
    if reason is not None:
        raise ParameterError(reason)
    if found(run.results()).empty:
        # A rank was killed, or the time was over.
        for note in run.missing_points():
            err.print(f"not measured: {note.status}: {note.reason}")
        raise typer.Exit(1)


def _arguments(assignments: list[str], batch: str | None) -> dict[str, Any]:
    """Return the lab's parameters for arguments of the setup, one of which may be swept."""
    parsed = parse_assignments(assignments)
    if batch not in (None, "auto"):
        parsed |= parse_assignments([f"batch={batch}"])
    # "8,16" is a tuple, several values; an argument that is a list is written as one.
    swept = {name: value for name, value in parsed.items() if isinstance(value, tuple)}
    if batch == "auto":
        swept["batch"] = ()
    if len(swept) > 1:
        raise ParameterError(f"expected one argument with several values, got {', '.join(swept)}")
    values: dict[str, Any] = {
        "arguments": {name: value for name, value in parsed.items() if name not in swept}
    }
    for name, several in swept.items():
        values |= {"argument": name, "values": list(several)}
    return values


def numbers(run: "Run", since_baseline: "TrainingChange | None") -> Iterator[dict[str, Any]]:
    """Yield the parts of the step, the answers' ratios, and the parts' ratios to the baseline."""
    from labkit.studies.your_training.lab import LAB, parts

    at = run.header.started
    facts: dict[str, Any] = {"validity": run_validity(run), "measured": at}
    for row in parts(run.results()).to_dict("records"):
        yield number(row["part"], row["seconds"], "s", low=row["low"], high=row["high"], **facts)
    yield from answer_numbers(LAB, run)
    if since_baseline is None:
        return
    for part, row in since_baseline.parts.iterrows():
        ends = {"low": row["low"], "high": row["high"]}
        facts = {"validity": row["verdict"], "measured": at}
        yield number(f"{part} since the baseline", row["ratio"], "ratio", **ends, **facts)
