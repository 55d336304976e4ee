"""Writes predictions of a table of runs, one row each."""

import csv
from collections.abc import Mapping, Sequence
from typing import TextIO

from labkit.scaling.constants import Constants
from labkit.scaling.prediction import Predictions, predict_runs
from labkit.scaling.published import nearest_key
from labkit.scaling.runs import Runs
from labkit.scaling.table import Row

COLUMNS = ("step_s", "step_low", "step_high", "mfu_percent", "peak_gib", "fits", "unstable", "nearest", "note")
MEASURED = {"step_s": "measured_step_s", "mfu_percent": "measured_mfu_percent", "note": "published_note"}
"""Columns of the input that have a prediction's name, and their names in the output."""


def predict_rows(rows: Sequence[Row], constants: Constants | None = None) -> list[dict[str, str]]:
    """The cells of every row with `COLUMNS`; for a refused row these are empty except for the note."""
    good = [row for row in rows if row.run is not None]
    predicted: dict[int, dict[str, str]] = {}
    if good:
        found = predict_runs(Runs([row.run for row in good if row.run is not None]), constants)
        for at, row in enumerate(good):
            reason = found.refusal_reason(at)
            predicted[row.line] = _refused(reason) if reason else _cells(found, at, row)
    return [_input(row.cells) | predicted.get(row.line, _refused(row.refusal)) for row in rows]


def _cells(found: Predictions, at: int, row: Row) -> dict[str, str]:
    key, away = nearest_key(found.runs, at)
    return {
        "step_s": f"{found.step_s[at]:.6g}",
        "step_low": f"{found.low_90[at]:.6g}",
        "step_high": f"{found.high_90[at]:.6g}",
        "mfu_percent": f"{100 * found.mfu[at]:.2f}",
        "peak_gib": f"{found.peak_gib[at]:.2f}",
        "fits": str(int(found.fits[at])),
        "unstable": str(int(found.is_unstable[at])),
        "nearest": f"{key}, {away:.2g} away",
        "note": "; ".join([*found.warnings(at), *(f"assumed: {name}" for name in row.assumptions)]),
    }


def write_rows(rows: Sequence[Mapping[str, str]], out: TextIO) -> None:
    """A CSV with every column that any row has; characters that `out` cannot encode are replaced."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    encoding = getattr(out, "encoding", None) or "utf-8"
    writer = csv.DictWriter(out, names, restval="", lineterminator="\n")
    for row in [dict(zip(names, names, strict=True)), *rows]:
        writer.writerow({name: text.encode(encoding, "replace").decode(encoding) for name, text in row.items()})


def _input(cells: Mapping[str, str]) -> dict[str, str]:
    return {MEASURED.get(name, name): value for name, value in cells.items() if name in MEASURED or name not in COLUMNS}


def _refused(reason: str) -> dict[str, str]:
    return dict.fromkeys(COLUMNS, "") | {"note": f"refused: {reason}"}
