"""`labkit predict`: a table of training runs in, their predictions out."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from labkit.lab.commands.console import err, out, plain, print_json
from labkit.lab.config import ParameterError
from labkit.lab.project import reference_directory

COLUMNS = reference_directory() / "scaling" / "README.md"


def predict(
    rows: Annotated[
        Path, typer.Argument(metavar="ROWS.csv", help=f"Runs, one per row, `-` for standard input; columns: {COLUMNS}.")
    ],
    output: Annotated[Path | None, typer.Option(help="File of the predictions.", show_default="printed")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document (docs/for-scripts.md).")] = False,
) -> None:
    """Predict step time, memory and MFU of training runs on many GPUs, one per row of a table."""
    from labkit.scaling.prediction import predict_rows, write_rows
    from labkit.scaling.table import read_rows

    try:
        table = read_rows(rows)
        predicted = predict_rows(table)
        if as_json:
            from labkit.lab.json_output import prediction_numbers

            print_json("predict", prediction_numbers(predicted))
        elif output is None:
            write_rows(predicted, sys.stdout)
        if output is not None:
            with output.open("w", newline="", encoding="utf-8") as file:
                write_rows(predicted, file)
    except (OSError, ValueError) as error:
        message = f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        raise ParameterError(message) from None
    refused = [row for row in table if row.run is None]
    for row in refused:
        err.print(f"line {row.line}: {plain(row.refusal)}", soft_wrap=True)
    if output is not None:
        counts = f"{len(table) - len(refused)} predicted, {len(refused)} refused; {plain(output)}"
        (err if as_json else out).print(counts, soft_wrap=True)
    raise typer.Exit(1 if refused else 0)
