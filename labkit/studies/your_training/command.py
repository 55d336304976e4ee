"""The command `labkit try`: measures a training, and says what to change in it."""

from pathlib import Path
from typing import Annotated, Any

import typer

from labkit.lab.commands.console import err, out, print_json, progress
from labkit.lab.config import ParameterError, parse_assignments


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
    from labkit.lab.runs.progress import Progress
    from labkit.studies.your_training import tables
    from labkit.studies.your_training.lab import LAB
    from labkit.studies.your_training.summary import Summary, numbers, plain_facts

    overrides: dict[str, Any] = {
        "setup": _with_absolute_path(setup),
        "arguments": parse_assignments(arguments or []),
    }
    if changes:
        overrides["changes"] = changes
    config = LAB.configure("quick", overrides)
    printer = err if apply or as_json else out
    told = Summary(printer)
    with progress(LAB.name) as show:

        def on_progress(now: Progress) -> None:
            show(now)
            told.update(now.run)

        run = measure(LAB, config, profile="quick", on_progress=on_progress, on_output=err.print)
    results = run.results()
    if reason := tables.refusal(results):
        raise ParameterError(reason)
    told.finish(run)
    if as_json:
        print_json(
            "try", numbers(results), run=str(run.path), found=plain_facts(tables.found(results))
        )
    if apply:
        print(tables.code(results), end="")
    raise typer.Exit(0)


def _with_absolute_path(setup: str) -> str:
    """The setup with an absolute path: ranks run in other folders."""
    path, _, name = setup.partition(":")
    return f"{Path(path).expanduser().absolute()}:{name or 'setup'}"
