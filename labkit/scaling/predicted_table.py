"""Writes predictions of a table of runs, one row each."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO

from labkit.scaling.constants import Constants
from labkit.scaling.prediction import Predictions, predict_runs
from labkit.scaling.published import nearest_keys
from labkit.scaling.runs import Runs
from labkit.scaling.table import Row

COLUMNS = ("step_s", "step_low", "step_high", "mfu_percent", "peak_gib", "fits", "unstable", "nearest", "note")
MEASURED = {"step_s": "measured_step_s", "mfu_percent": "measured_mfu_percent", "note": "published_note"}
"""Columns of the input that have a prediction's name, and their names in the output."""


def predict_rows(rows: Sequence[Row], constants: Constants | None = None) -> list[dict[str, str]]:
    """The cells of every row with `COLUMNS`; for a refused row these are empty except for the note."""
    possible = {row.line: row.run for row in rows if row.run is not None}
    predicted: dict[int, dict[str, str]] = {}
    if possible:
        predictions = predict_runs(Runs(list(possible.values())), constants)
        predicted = dict(zip(possible, _cells(predictions), strict=True))
    return [_merge(row, predicted.get(row.line, {"note": f"refused: {row.refusal}"})) for row in rows]


def _cells(predictions: Predictions) -> Iterator[dict[str, str]]:
    for at, (key, away) in enumerate(nearest_keys(predictions.runs)):
        if reason := predictions.refusal_reason(at):
            yield {"note": f"refused: {reason}"}
            continue
        yield {
            "step_s": f"{predictions.step_s[at]:.6g}",
            "step_low": f"{predictions.low_90[at]:.6g}",
            "step_high": f"{predictions.high_90[at]:.6g}",
            "mfu_percent": f"{100 * predictions.mfu[at]:.2f}",
            "peak_gib": f"{predictions.peak_gib[at]:.2f}",
            "fits": str(int(predictions.fits[at])),
            "unstable": str(int(predictions.is_unstable[at])),
            "nearest": f"{key}, {away:.2g} away",
            "note": "; ".join(predictions.warnings(at)),
        }


def _merge(row: Row, predicted: Mapping[str, str]) -> dict[str, str]:
    """A row's cells, its prediction, and what was assumed about empty cells."""
    cells = {MEASURED.get(name, name): value for name, value in row.cells.items()}
    notes = [note for note in (predicted["note"], *(f"assumed: {name}" for name in row.assumptions)) if note]
    cells = {name: value for name, value in cells.items() if name not in COLUMNS}
    return cells | dict.fromkeys(COLUMNS, "") | dict(predicted) | {"note": "; ".join(notes)}


def write_rows(rows: Sequence[Mapping[str, str]], out: TextIO) -> None:
    """A CSV with every column that any row has; characters that `out` cannot encode are replaced."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    encoding = getattr(out, "encoding", None) or "utf-8"
    writer = csv.DictWriter(out, names, restval="", lineterminator="\n")
    for row in [dict(zip(names, names, strict=True)), *rows]:
        writer.writerow({name: text.encode(encoding, "replace").decode(encoding) for name, text in row.items()})
