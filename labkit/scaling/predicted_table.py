"""Predicts the rows of a table, and writes them with what was predicted."""

import csv
from collections.abc import Iterator, Mapping, Sequence
from typing import TextIO

from labkit.scaling.prediction import FITS_SHARE, Predictions, predict_runs
from labkit.scaling.published import load_measured
from labkit.scaling.runs import Runs
from labkit.scaling.table import Row

COLUMNS = (
    "step_s",
    "step_low",
    "step_high",
    "mfu_percent",
    "peak_gib",
    "peak_low",
    "peak_high",
    "fits",
    "unstable",
    "nearest",
    "note",
)
# Columns of the input that have a prediction's name, and their names in the output.
MEASURED = {
    "step_s": "measured_step_s",
    "mfu_percent": "measured_mfu_percent",
    "note": "published_note",
}


def predict_rows(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Return the cells of every row with `COLUMNS`; a refused row has only the note."""
    # All at once: a formula on columns takes as long for one run as for hundreds.
    possible = [row.run for row in rows if row.run is not None]
    predicted: Iterator[dict[str, str]] = iter(())
    if possible:
        predicted = _cells(predict_runs(Runs(possible)))
    merged = []
    for row in rows:
        cells = {"note": f"refused: {row.refusal}"}
        if row.run is not None:
            cells = next(predicted)
        merged.append(_merge(row, cells))
    return merged


def _cells(predictions: Predictions) -> Iterator[dict[str, str]]:
    """Yield the cells of each prediction."""
    measured = load_measured()
    low, high = predictions.interval_90()
    for at in range(len(predictions.runs)):
        reason = predictions.refusal_reason(at)
        if reason is not None:
            yield {"note": f"refused: {reason}"}
            continue
        yield {
            "step_s": f"{predictions.step_s[at]:.6g}",
            "step_low": f"{low[at]:.6g}",
            "step_high": f"{high[at]:.6g}",
            "mfu_percent": f"{100 * predictions.mfu[at]:.2f}",
            "peak_gib": f"{predictions.peak_gib[at]:.2f}",
            "peak_low": f"{predictions.peak_low[at]:.2f}",
            "peak_high": f"{predictions.peak_high[at]:.2f}",
            "fits": _fits_cell(predictions, at),
            "unstable": str(int(predictions.is_unstable[at])),
            "nearest": (
                f"{measured.key[predictions.nearest[at]]}, {predictions.distance[at]:.2g} away"
            ),
            "note": "; ".join(predictions.warnings(at)),
        }


def _fits_cell(predictions: Predictions, at: int) -> str:
    """Return 1 if the upper end of memory fits, 0 if the lower end does not, else nothing."""
    if predictions.fits[at]:
        return "1"
    limit_gib = FITS_SHARE * predictions.runs.memory_gib[at]
    return "0" if predictions.peak_low[at] > limit_gib else ""


def _merge(row: Row, predicted: Mapping[str, str]) -> dict[str, str]:
    """Return a row's cells, its prediction, and the assumptions about empty cells."""
    cells = {MEASURED.get(name, name): value for name, value in row.cells.items()}
    # The input may be an output of `labkit predict`.
    cells = {name: value for name, value in cells.items() if name not in COLUMNS}
    notes = [f"assumed: {name}" for name in row.assumptions]
    if predicted["note"]:
        notes.insert(0, predicted["note"])
    return cells | dict.fromkeys(COLUMNS, "") | dict(predicted) | {"note": "; ".join(notes)}


def write_rows(rows: Sequence[Mapping[str, str]], out: TextIO) -> None:
    """Write a CSV with every column that any row has.

    Characters that `out` cannot encode are replaced.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    encoding = getattr(out, "encoding", None) or "utf-8"
    writer = csv.DictWriter(out, names, restval="", lineterminator="\n")
    # The header is a row, too: columns of the input may have any name.
    for row in [dict(zip(names, names, strict=True)), *rows]:
        writer.writerow(
            {name: text.encode(encoding, "replace").decode(encoding) for name, text in row.items()}
        )
