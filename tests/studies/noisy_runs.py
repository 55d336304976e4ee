"""Recorded runs of labs whose times are replaced by noise around one value, each repeat by a draw of its own."""

import numpy as np
import pandas as pd

from labkit.lab.project import recorded_directory
from labkit.lab.runs.store import Run

LIMITS = ("timeout_s",)
"""A field in seconds that was not measured."""
ROW_SETTINGS = ("n_bytes", "bucket_mb", "of_bucket_mb", "segment", "seed", "epoch")
"""Numbers recorded with a row that say what it is; all other numbers were measured."""
NOTES = ("is_freak", "check", "tensor_dtype", "readers", "line", "trace", "shape", "float32_matmul_precision")


def newest_recorded(lab):
    return Run.load(max((recorded_directory() / lab).glob("*.jsonl")))


def timed_columns(frame):
    """Columns of measured seconds; one that is predicted is none."""
    names = [name for name in frame if name == "seconds" or (name.endswith("_s") and not name.endswith("per_s"))]
    return [name for name in names if name not in LIMITS and pd.api.types.is_float_dtype(frame[name])]


def rows_with_samples(frame):
    """A number for each thing that has samples of its own: what one point measured, whichever rank and repeat."""
    texts = [name for name in frame if frame[name].map(lambda value: isinstance(value, str)).any()]
    settings = sorted({*texts, *(name for name in ROW_SETTINGS if name in frame)} - set(NOTES))
    about = frame[settings].astype(object).where(frame[settings].notna(), "").astype(str)
    return about.agg("|".join, axis=1).factorize()[0]


def with_noise(frame, name, rows, draw, rng, measured):
    keys = pd.Series(rows, index=frame.index).astype(str) + "," + frame["repeat"].astype(str)
    codes, names = keys.factorize()
    order = pd.Series(names).str.split(",", expand=True).astype(int)
    drawn = np.empty(len(names))
    for _, of_row in order.groupby(0):
        drawn[of_row.sort_values(1).index] = draw(rng, len(of_row))
    return frame.assign(**{name: frame[name].mask(frame[name].notna() & measured, 1e-3 * np.exp(drawn[codes]))})
