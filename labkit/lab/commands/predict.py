"""`labkit predict`: a table of training runs in, their predictions out."""

import csv
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer

from labkit.lab.commands.console import Json, err, number, out, print_json
from labkit.lab.config import ParameterError
from labkit.lab.project import is_full_disk, reference_directory

COLUMNS = reference_directory() / "scaling" / "README.md"


def predict(
    rows: Annotated[
        Path,
        typer.Argument(
            metavar="ROWS.csv",
            help=f"Runs, one per row; columns: {COLUMNS}.",
        ),
    ],
    output: Annotated[
        Path | None, typer.Option(help="File of the predictions.", show_default="printed")
    ] = None,
    as_json: Json = False,
) -> None:
    """Predict step time, memory and MFU of training runs on many GPUs, one per row of a table."""
    from labkit.scaling.prediction import predict_rows
    from labkit.scaling.table import read_rows

    try:
        table = read_rows(rows)
        predicted = predict_rows(table)
        if as_json:
            print_json(
                "predict", (_number(line, row) for line, row in enumerate(predicted, start=1))
            )
        elif output is None:
            _write(predicted, sys.stdout)
        if output is not None:
            with output.open("w", newline="", encoding="utf-8") as file:
                _write(predicted, file)
    except BrokenPipeError:
        raise  # the reader has left, which is no mistake
    except (OSError, ValueError) as error:
        if is_full_disk(error):
            raise OSError(error.errno, error.strerror, str(output or "standard output")) from None
        message = (
            f"{error.filename}: {error.strerror}" if isinstance(error, OSError) else str(error)
        )
        raise ParameterError(message) from None
    # The other rows are predicted all the same: one bad line of a thousand costs only itself.
    refused = [
        (row.line, cells["note"])
        for row, cells in zip(table, predicted, strict=True)
        if not cells["step_s"]
    ]
    for line, note in refused:
        err.print(f"line {line}: {note.removeprefix('refused: ')}")
    if output is not None:
        counts = f"{len(table) - len(refused)} predicted, {len(refused)} refused; {output}"
        (err if as_json else out).print(counts)
    raise typer.Exit(1 if refused else 0)


def _write(rows: Sequence[Mapping[str, str]], file: TextIO) -> None:
    """Write a CSV with every column that any row has."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(file, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def _number(line: int, row: Mapping[str, str]) -> dict[str, Any]:
    """Return the predicted step time of a row, with its input and the other predictions."""

    def seconds(column: str) -> float | None:
        return float(row[column]) if row[column] else None

    step_s = seconds("step_s")
    low = seconds("step_low")
    high = seconds("step_high")
    note = row["note"] or "ok"
    return number(f"row {line}", step_s, "s", low=low, high=high, validity=note, row=dict(row))
