"""Reads a table of runs, a CSV as `training_runs.csv`.

A wrong row is refused with its line and the reason, and the others are read. Separators and decimal
commas as spreadsheets write them are understood; thousands are not.
"""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from labkit.scaling import Count, Rate, read_table, validate
from labkit.scaling.constants import TABLES, find_framework
from labkit.scaling.hardware import find_hardware
from labkit.scaling.models import Model
from labkit.scaling.runs import Layout, Run, impossible_reason

REQUIRED = ["gpu", "gpus", "layers", "hidden", "heads", "vocab", "seq_len"]
REQUIRED += ["tp", "pp", "dp", "micro_batch", "global_batch"]
_MODEL = ("model", *(one.name for one in fields(Model) if one.name != "name"))
# Columns that only an output of `labkit predict` has.
ONLY_PREDICTED = frozenset({"step_low", "step_high"})
SEPARATORS = (",", ";", "\t")
# First two bytes of a table that Excel has saved as "Unicode text".
ENCODINGS = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
_AMBIGUOUS = re.compile(r"[1-9]\d{0,2}([.,\s]\d{3})+")
# Columns whose 2.345 has decimals, in a file with `,`: nobody means 2,345 seconds.
_FRACTIONS = ("step_s", "node_network_gbps", "measured_bus_bandwidth")
# Columns with one of a few words.
_CHOICES = ("precision", "shard", "recompute")
# What publications write in a column, and the fields that it means.
_WORDS = [(re.compile(row["words"], re.IGNORECASE), row) for row in read_table("words")]


@dataclass(frozen=True, kw_only=True)
class _Site:
    """Columns that belong neither to the model nor to the layout."""

    gpu: str
    gpus: Count
    seq_len: Count
    gpus_per_node: Count | None = None
    node_network_gbps: Rate | None = None
    measured_bus_bandwidth: Rate | None = None
    step_s: Rate | None = None


@dataclass(frozen=True)
class Row:
    """A row's cells with its run, or the reason why it is none; and assumptions."""

    line: int
    cells: Mapping[str, str]
    run: Run | None
    refusal: str = ""
    assumptions: Sequence[str] = field(default_factory=list)
    step_s: float | None = None
    """Measured seconds of a step."""


def read_rows(path: Path) -> list[Row]:
    """Read every row of the file. ValueError for another kind of file or a missing column."""
    name = str(path)[-80:]
    try:
        content = path.read_bytes()
        text = content.decode(ENCODINGS.get(content[:2], "utf-8-sig"))
        separator = max(SEPARATORS, key=text.partition("\n")[0].count)
        reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
        rows = [(reader.line_num, row) for row in reader if any(map(str.strip, row))]
    except UnicodeDecodeError:
        raise ValueError(f"expected a CSV in UTF-8 or UTF-16: {name}") from None
    except csv.Error as error:
        raise ValueError(f"expected a CSV, and {name} is none: {error}") from None
    columns = _columns(rows[0][1] if rows else [], name)
    if len(rows) < 2:
        raise ValueError(f"{name} has no rows")
    return [_row(line, columns, row, separator) for line, row in rows[1:]]


def _columns(header: Sequence[str], name: str) -> list[str]:
    """Return column names, as `kv_heads` for `KV heads`.

    ValueError for missing, repeated and predicted ones.
    """
    columns = [re.sub("[ -]", "_", column.strip().lower()) for column in header]
    missing = [column for column in REQUIRED if column not in columns]
    if missing:
        line = ", ".join(columns)[:60] or "nothing"
        raise ValueError(
            f"{name} lacks the columns {', '.join(missing)}; its first line has {line}"
        )
    twice = sorted({column for column in columns if column and columns.count(column) > 1})
    if twice:
        raise ValueError(f"{name} has the column {twice[0]} twice: which one counts?")
    if set(columns) >= ONLY_PREDICTED:
        raise ValueError(
            f"{name} is an output of labkit predict: expected measurements, not predictions"
        )
    return columns


def _row(line: int, columns: Sequence[str], row: Sequence[str], separator: str) -> Row:
    texts = {name: cell.strip() for name, cell in zip(columns, row, strict=False) if name}
    if any(map(str.strip, row[len(columns) :])):
        return Row(line, texts, None, "more cells than columns")
    assumptions: list[str] = []
    try:
        plain = {name: _plain(name, text, separator) for name, text in texts.items() if text}
        run, step_s = _read_run(plain, assumptions)
    except ValueError as error:
        return Row(line, texts, None, str(error))
    return Row(line, texts, run, assumptions=assumptions, step_s=step_s)


@cache  # most cells of a table repeat
def _plain(name: str, text: str, separator: str) -> str:
    """Return a number as Python reads it: of 4.0, 4E+06, and of 0,5 in a file with `;`.

    A text that may have thousands or decimals gets a remark, with which it is no number.
    """
    has_decimal_commas = separator == ";"
    if _AMBIGUOUS.fullmatch(text) and (has_decimal_commas or name not in _FRACTIONS):
        return f"{text} (thousands, or decimals?)"
    if has_decimal_commas and re.fullmatch(r"\d+,\d+", text):
        text = text.replace(",", ".")
    # Spreadsheets write 4 as 4.0 or 4E+06, which is no whole number to a strict reader.
    if re.fullmatch(r"\d+\.0|\d+(\.\d+)?[eE]\+?\d+", text):
        return f"{float(text):.12g}"
    return text


def _read_run(texts: dict[str, str], assumptions: list[str]) -> tuple[Run, float | None]:
    """Return the run of a row's filled cells, and its time; add to `assumptions`.

    ValueError if it describes no run.
    """
    # Published tables often leave out the micro-batch; 1 is then an assumption.
    missing = [name for name in REQUIRED if name not in texts and name != "micro_batch"]
    if missing:
        raise ValueError(f"expected {missing[0]} to be stated")
    texts, options = _translate(texts)
    empty = {
        "micro_batch": "micro-batch of 1",
        "ffn": "ffn of 4 x hidden",
        "recompute": "no recomputation",
    }
    assumptions += [words for name, words in empty.items() if name not in texts]
    framework = _find_framework(texts, assumptions)
    if framework == "nanotron":
        options.add("empty_stages")
    # In torchtitan's tables, selective recomputation keeps every second matmul. Elsewhere it is
    # Megatron's, as `labkit advise` takes it.
    if texts.get("recompute") == "selective" and TABLES.get(texts.get("group", "")) == "torchtitan":
        options.add("op_recompute")
    site = validate(_Site, texts)
    model = _model(tuple(texts.get(name) for name in _MODEL))
    layout = validate(
        Layout, {"sequence_parallel": texts["tp"] != "1", **texts, "options": options}
    )
    hardware = find_hardware(site.gpu).with_network(
        network_gbps=site.node_network_gbps,
        gpus_per_node=site.gpus_per_node,
        bus_gb_s=site.measured_bus_bandwidth,
    )
    hardware.check_precision(layout.precision)
    if layout.gpus != site.gpus:
        raise ValueError(f"tp x pp x cp x dp is {layout.gpus}, and gpus is {site.gpus}")
    reason = impossible_reason(layout, model, site.seq_len)
    if reason is not None:
        raise ValueError(reason)
    run = Run(model, hardware, layout, site.seq_len, framework, texts.get("group", ""))
    return run, site.step_s


def _translate(texts: dict[str, str]) -> tuple[dict[str, Any], set[str]]:
    """Return cells with what their words mean, and options of the layout.

    ValueError for words of what is not predicted.
    """
    options = set[str]()
    meanings = {name: texts[name].lower() for name in _CHOICES if name in texts}
    for column in ("note", *_CHOICES):
        for name, value in _read_words(column, texts.get(column, "")):
            if name == "refusal":
                stated = "" if column == "note" else f", got {texts[column][:40]!r}"
                raise ValueError(value + stated)
            if name == "options":
                options.add(value)
            # A column says it more plainly than a note.
            if column != "note" or name not in texts:
                meanings[name] = value
    return {name: text for name, text in (texts | meanings).items() if text}, options


@cache  # most cells of a table repeat
def _read_words(column: str, text: str) -> list[tuple[str, str]]:
    """Return fields and values that a cell's words mean, by `words.csv`; of several, the last."""
    return [
        (row["field"], match.expand(row.get("value", "")))
        for words, row in _WORDS
        if row["column"] == column and (match := words.search(text))
    ]


@cache  # tables have few models
def _model(values: tuple[str | None, ...]) -> Model:
    sizes = dict(zip(_MODEL, values, strict=True))
    return validate(Model, {**sizes, "name": sizes["model"] or ""})


def _find_framework(texts: Mapping[str, str], assumptions: list[str]) -> str:
    """Return the profile of a row: its `framework`, else its group's, else "generic"."""
    name = texts.get("framework", "")
    framework = find_framework(name or texts.get("group", ""))
    if name and framework is None:
        assumptions.append(f"no published run of {name[:40]}")
    elif name and framework != name:
        assumptions.append(f"{name[:40]} is like {framework}")
    # Megatron's rows on A100 are of 2021. On later GPUs it is Megatron-Core, as NeMo has it.
    if framework == "megatron" and not texts["gpu"].startswith("A100"):
        return "nemo"
    return framework or "generic"
