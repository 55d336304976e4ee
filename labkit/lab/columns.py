"""What every column of a frame is called and how its values read: once for tables, figures, headlines and `compare`.

A column that is not listed is shown under its name, and the end of its name says the unit: `step_s`, `peak_bytes`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import pandas as pd

from labkit.lab.units import format_bytes, format_flops, format_number, format_rate, format_seconds, join_words

Form = Callable[[float], str]
INTERVAL = "interval"
"""Of a table's `attrs`: what share its intervals are of, where that is not 95 %."""


@dataclass(frozen=True)
class Column:
    """`title` above a table's column, `axis` beside an axis, `form` of its values, `label` of one that stands alone.

    `doubles`: an axis on which values double. `is_internal`: it tells rows apart without saying anything to a reader.
    """

    title: str
    axis: str
    form: Form
    label: str = "{title} {value}"
    doubles: bool = False
    is_internal: bool = False


def _whole(value: float) -> str:
    return f"{value:.0f}"


def _flops_per_s(value: float) -> str:
    return f"{format_flops(value)}/s"


# Endings that say a unit; what a heading has in its place (cells carry the others), and the form of the values.
_ENDINGS: tuple[tuple[str, str, Form], ...] = (
    ("_flops_per_s", "", _flops_per_s),
    ("_gb_per_s", " (GB/s)", format_number),
    ("_bytes_per_s", "", format_rate),
    ("_per_s", " per second", format_number),
    ("_flops", "", format_flops),
    ("_bytes", "", format_bytes),
    ("_s", "", format_seconds),
    ("_percent", " (%)", format_number),
    ("_ns_per_byte", " (ns/byte)", format_number),
)
_COLUMNS = {
    "n_bytes": Column("size", "size of the tensor", format_bytes, "{value}", doubles=True),
    "bytes": Column("bytes", "memory", format_bytes, "{value}"),
    "bucket_bytes": Column("bucket", "bucket size", format_bytes, "buckets of {value}"),
    "bucket_mb": Column("bucket (MiB)", "bucket size (MiB)", format_number, "buckets of {value} MiB"),
    "buckets": Column("buckets", "number of buckets", format_number, "{value} buckets"),
    "gpu_hours": Column("GPU-hours per 1B tokens", "GPU-hours per billion tokens", format_number),
    "gpus": Column("GPUs", "GPUs", format_number, "{value} GPUs", doubles=True),
    "world_size": Column("ranks", "ranks", _whole, "{value} ranks", doubles=True),
    "seconds": Column("time", "time", format_seconds),
    "sequence": Column("sequence", "sequence length (tokens)", _whole, "{value} tokens", doubles=True),
    "context_length": Column("context", "context length (tokens)", _whole, "{value} tokens", doubles=True),
    "head_dim": Column("head dim", "head dimension", _whole),
    "batch": Column("batch", "batch", _whole),
    "features": Column("features", "features", _whole, "{value} features"),
    "busbw_gb_per_s": Column("bus bandwidth (GB/s)", "bus bandwidth (GB/s)", format_number),
    "algbw_gb_per_s": Column("algorithm bandwidth (GB/s)", "algorithm bandwidth (GB/s)", format_number),
    "flops_per_s": Column("FLOP/s", "FLOP/s", _flops_per_s),
    "bytes_per_s": Column("bytes per second", "bytes per second", format_rate),
    "flops": Column("FLOPs", "FLOPs", format_flops),
    "ratio": Column("ratio", "ratio of times", format_number),
    "warmup": Column("warm-up steps", "warm-up steps", format_number),
    "n_elements": Column("n elements", "n elements", format_number, "{value} elements"),
    "keep_trace": Column("with a trace", "with a trace", format_number),
    "detail": Column("in detail", "in detail", format_number),
    "mfu_percent": Column("MFU (%)", "MFU (%)", format_number),
    "tflop_per_s": Column("TFLOP/s", "TFLOP/s", format_number),
    "gflop": Column("GFLOP", "GFLOP", format_number),
    "sweep": Column("sweep", "sweep", format_number, is_internal=True),
    "panel": Column("panel", "panel", format_number, is_internal=True),
    "scheduling": Column("scheduling", "scheduling", format_number, is_internal=True),
    "of_bucket_mb": Column("of bucket", "of bucket", format_number, is_internal=True),
}

# Which way is better, by how a column's name ends.
_BETTER = {
    "higher is better": ("_per_s", "digits", "accuracy_percent", "mfu_percent"),
    "lower is better": ("bytes", "loss", "waiting_percent", "error", "gpu_hours"),
    "lower is faster": ("seconds", "_s", "ratio"),
}


def better(name: str) -> str | None:
    """Which way is better along a column: "lower is faster". None where neither is."""
    return next((words for words, endings in _BETTER.items() if name.endswith(endings)), None)


def column(name: str) -> Column:
    """The column by that name, listed or read from its name."""
    if name in _COLUMNS:
        return _COLUMNS[name]
    for ending, unit, form in _ENDINGS:
        if name.endswith(ending):
            title = name.removesuffix(ending).replace("_", " ") + unit
            return Column(title, title, form, "{value}" if ending == "_bytes" else "{title} {value}")
    words = name.replace("_", " ")
    return Column(words, words, format_number)


def label(name: str, value: Any) -> str:
    """A value on its own: "butterfly", "4 ranks", "64 KiB", "batch 8", "compiled"."""
    if isinstance(value, str):
        return value.replace("_", " ")
    about = column(name)
    if isinstance(value, bool | np.bool_):
        return about.title if value else f"not {about.title}"
    if not isinstance(value, Real):
        return f"{about.title} {value}"
    text = about.label.format(title=about.title, value=about.form(float(value)))
    return text.removesuffix("s") if value == 1 and about.label.startswith("{value} ") else text  # "1 rank"


def format_value(name: str, value: Any) -> str:
    """A value of a column in its unit, as a sentence has it."""
    is_number = isinstance(value, Real) and not isinstance(value, bool | np.bool_)
    return column(name).form(float(value)) if is_number else label(name, value)


def label_of_several(name: str, values: Sequence[float]) -> str:
    """Numbers from small to large as one label: "2 and 4 ranks", "4 KiB to 10 MiB", "batch 8"."""
    if len(values) == 1 or not all(isinstance(value, Real) for value in values):
        return join_words([label(name, value) for value in values])
    about = column(name)
    text = (" and " if len(values) == 2 else " to ").join(about.form(float(end)) for end in (values[0], values[-1]))
    return about.label.format(title=about.title, value=text)


def labels(table: pd.DataFrame, columns: Sequence[str]) -> list[str]:
    """A name for each row by the values of some columns, "small, forward"; one that is missing is left out."""
    return [
        ", ".join(label(name, row[name]) for name in columns if row[name] is not None and row[name] == row[name])
        for row in table.to_dict("records")
    ]
