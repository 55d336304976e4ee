"""Numbers as people read them, and the name of every column, for tables, figures and sentences.

A column that is not listed is called by its name, and the end of its name gives the unit: `step_s`,
`peak_bytes`. Imports nothing heavy: ranks load this module.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd

_TIME_UNITS = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (1e-9, "ns"), (1e-12, "ps"))
_SIZE_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def format_seconds(seconds: float) -> str:
    """0.00123 -> "1.23 ms"; minutes and seconds above two minutes."""
    if seconds >= 119.5:
        minutes, rest = divmod(round(seconds), 60)
        return f"{minutes} min {rest} s"
    if seconds == 0:
        return "0 s"
    return _scale(seconds, _TIME_UNITS, "ps")


def format_estimate(seconds: float) -> str:
    """Round to one digit: 53 -> "50 s", 503 -> "8 min"."""
    if seconds >= 119.5:
        return f"{float(f'{seconds / 60:.1g}'):.0f} min"
    return format_seconds(float(f"{seconds:.1g}"))


def format_bytes(n_bytes: float) -> str:
    """65536 -> "64 KiB"."""
    return _scale(n_bytes, _SIZE_UNITS, "B")


def format_rate(bytes_per_s: float) -> str:
    """1.5e9 -> "1.5 GB/s"; decimal units, as usual for bandwidths."""
    return _scale(bytes_per_s, ((1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s")), "B/s")


def format_flops(flops: float) -> str:
    """2.5e9 -> "2.5 GFLOP"."""
    prefixes = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))
    return _scale(flops, [(scale, f"{prefix}FLOP") for scale, prefix in prefixes], "FLOP")


def format_number(value: float) -> str:
    """Format three digits, or a whole number with separators from 1000 up: 0.784, 1,822."""
    if 1000 <= abs(value) < 1e12:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def format_factor(value: float) -> str:
    """1.25 -> "1.2", 3.0 -> "3", 47.3 -> "47", infinity -> "many"."""
    if math.isinf(value):
        return "many"
    if value >= 10:
        return f"{value:.0f}"
    return f"{value:.1f}".removesuffix(".0")


def counted(number: int, noun: str) -> str:
    """1, "rank" -> "1 rank"; 2, "rank" -> "2 ranks"; 2, "quantity" -> "2 quantities"."""
    if number == 1:
        return f"{number} {noun}"
    if noun.endswith("ty"):
        return f"{number} {noun[:-1]}ies"
    return f"{number} {noun}s"


def join_words(words: Sequence[str]) -> str:
    """["a", "b", "c"] -> "a, b and c"; ["a, b", "c"] -> "a, b; c"."""
    # Commas of a list within a list would leave open where an item ends.
    if any(", " in word or " and " in word for word in words):
        return "; ".join(words)
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _scale(value: float, units: Iterable[tuple[float, str]], smallest: str) -> str:
    """Return the value in the largest unit that is not larger than it, or whole in the smallest."""
    if math.isnan(value):
        return "not measured"
    for scale, unit in units:
        if abs(value) >= 100 * scale:
            return f"{value / scale:.0f} {unit}"
        if abs(value) >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f} {smallest}"


Form = Callable[[float], str]


@dataclass(frozen=True)
class Column:
    """How a column reads."""

    title: str
    """Above a table."""
    axis: str
    """In a figure."""
    form: Form
    """Formats a value."""
    label: str = "{title} {value}"
    """A value on its own."""
    singular: str = ""
    """Label of the value 1, if it differs."""
    doubles: bool = False
    """Whether values double along an axis."""
    is_internal: bool = False
    """Whether it only tells rows apart, and means nothing to a reader."""


_whole: Form = "{:.0f}".format


def _flops_per_s(value: float) -> str:
    return f"{format_flops(value)}/s"


# (ending of a name, its replacement in the title, form): cells carry their unit, so most titles
# drop it.
_ENDINGS: tuple[tuple[str, str, Form], ...] = (
    ("_flops_per_s", "", _flops_per_s),
    ("_gb_per_s", " (GB/s)", format_number),
    ("_bytes_per_s", "", format_rate),
    ("_per_s", " per second", format_number),
    ("_flops", "", format_flops),
    ("_bytes", "", format_bytes),
    ("_s", "", format_seconds),
    ("_percent", " (%)", format_number),
    # Published tables keep the units of their sources.
    ("_ms", " (ms)", format_number),
    ("_kb", " (kB)", format_number),
    ("_mb", " (MB)", format_number),
    ("_gb", " (GB)", format_number),
    ("_gib", " (GiB)", format_number),
    ("_melements", " (Mi elements)", format_number),
)
_COLUMNS = {
    "n_bytes": Column("size", "size of the tensor", format_bytes, "{value}", doubles=True),
    "bytes": Column("bytes", "memory", format_bytes, "{value}"),
    "gpus": Column("GPUs", "GPUs", format_number, "{value} GPUs", "1 GPU", doubles=True),
    "world_size": Column("ranks", "ranks", _whole, "{value} ranks", "1 rank", doubles=True),
    "seconds": Column("time", "time", format_seconds),
    "sequence": Column(
        "sequence", "sequence length (tokens)", _whole, "{value} tokens", "1 token", doubles=True
    ),
    "context_length": Column(
        "context", "context length (tokens)", _whole, "{value} tokens", "1 token", doubles=True
    ),
    "seq_len": Column("sequence", "sequence length (tokens)", _whole, "{value} tokens"),
    "features": Column("features", "features", _whole, "{value} features", "1 feature"),
    "busbw_gb_per_s": Column("bus bandwidth (GB/s)", "bus bandwidth (GB/s)", format_number),
    "algbw_gb_per_s": Column(
        "algorithm bandwidth (GB/s)", "algorithm bandwidth (GB/s)", format_number
    ),
    "flops_per_s": Column("FLOP/s", "FLOP/s", _flops_per_s),
    "bytes_per_s": Column("bytes per second", "bytes per second", format_rate),
    "flops": Column("FLOPs", "FLOPs", format_flops),
    "ratio": Column("ratio", "ratio of times", format_number),
    "rows": Column("rows", "rows", _whole),
    "way": Column("alternative", "alternative", format_number),
    "mfu_percent": Column("MFU (%)", "MFU (%)", format_number),
    "sweep": Column("sweep", "sweep", format_number, is_internal=True),
    "scheduling": Column("scheduling", "scheduling", format_number, is_internal=True),
}

# Titles of axes and legends of columns whose names are not clear enough.
_AXES = {
    "axis": "kind of parallelism",
    "busy": "busy share of a step",
    "counted_bytes": "counted peak",
    "formula_busy": "formula",
    "intensity": "intensity (FLOPs per byte)",
    "kind": "",
    "n_added": "terms added",
    "peak_bytes": "peak memory",
    "saved_bytes": "held before backward",
    "segment": "layers per checkpoint (0: none)",
}

# Endings of column names by the direction that is better.
_BETTER = {
    "higher is better": ("_per_s", "digits", "accuracy_percent", "mfu_percent"),
    "lower is better": ("bytes", "loss", "waiting_percent", "error"),
    "lower is faster": ("seconds", "_s", "ratio"),
}


def better(name: str) -> str | None:
    """Return the direction that is better, such as "lower is faster"; None if neither is."""
    return next((words for words, endings in _BETTER.items() if name.endswith(endings)), None)


def column(name: str) -> Column:
    """Look up a column, or derive it from its name."""
    if name in _COLUMNS:
        return _COLUMNS[name]
    for ending, unit, form in _ENDINGS:
        if name.endswith(ending):
            title = name.removesuffix(ending).replace("_", " ") + unit
            # "64 KiB" says what it is, and "8 ms" does not say of what.
            text = "{value}" if ending == "_bytes" else "{title} {value}"
            return Column(title, _AXES.get(name, title), form, text)
    words = name.removeprefix("n_").replace("micro_", "micro-").replace("_", " ")
    axis = _AXES.get(name, words)
    is_plural = words.endswith("s") and not words.endswith("ss")
    if not is_plural:
        return Column(words, axis, format_number)
    # What a plural counts is labeled as "4 ranks", "1 rank"; all else as "batch 8".
    singular = words.removesuffix("es" if words.endswith("ches") else "s")
    return Column(words, axis, format_number, "{value} {title}", f"1 {singular}")


def spell_name(name: str) -> str:
    """Spell a name for a reader: "one_shot" becomes "one shot"."""
    # Not operators, paths, lines of a file, and arguments: a reader looks for them.
    return name if set(name) & set(".:/=") else name.replace("_", " ")


def label(name: str, value: Any) -> str:
    """Format a value on its own: "butterfly", "4 ranks", "64 KiB", "batch 8", "compiled"."""
    if isinstance(value, str):
        return spell_name(value)
    about = column(name)
    if isinstance(value, bool | np.bool_):
        return about.title if value else f"not {about.title}"
    if not isinstance(value, Real):
        return f"{about.title} {value}"
    if value == 1 and about.singular:
        return about.singular
    return about.label.format(title=about.title, value=about.form(float(value)))


def format_value(name: str, value: Any) -> str:
    """Format a value of a column for a sentence, with its unit."""
    is_number = isinstance(value, Real) and not isinstance(value, bool | np.bool_)
    return column(name).form(float(value)) if is_number else label(name, value)


def label_range(name: str, values: Sequence[float]) -> str:
    """Label ascending numbers together: "2 and 4 ranks", "4 KiB to 10 MiB", "batch 8"."""
    if len(values) == 1 or not all(isinstance(value, Real) for value in values):
        return join_words([label(name, value) for value in values])
    about = column(name)
    separator = " and " if len(values) == 2 else " to "
    text = separator.join(about.form(float(end)) for end in (values[0], values[-1]))
    return about.label.format(title=about.title, value=text)


def is_missing(value: Any) -> bool:
    """Return whether a value of a frame is None or NaN."""
    # Arrays and pandas' NA cannot be asked whether they differ from themselves.
    return value is None or (isinstance(value, Real) and value != value)


def labels(table: "pd.DataFrame", columns: Sequence[str]) -> list[str]:
    """Name each row by its values in some columns, such as "small, forward"."""
    names = []
    for row in table.to_dict("records"):
        values = {name: row[name] for name in columns}
        present = [(name, value) for name, value in values.items() if not is_missing(value)]
        names.append(", ".join(label(name, value) for name, value in present))
    return names
