"""Reads a table of runs, a CSV as `training_runs.csv`.

A wrong row is refused with its line and the reason, and the others are read. Separators and decimal
commas as spreadsheets write them are understood; thousands are not.
"""

import csv
import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from labkit.scaling import Count, Rate, validate
from labkit.scaling.constants import GENERIC, TABLES, find_framework
from labkit.scaling.hardware import find_hardware
from labkit.scaling.models import Model
from labkit.scaling.runs import Layout, Run, impossible_reason

REQUIRED = ["gpu", "gpus", "layers", "hidden", "heads", "vocab", "seq_len"]
REQUIRED += ["tp", "pp", "dp", "micro_batch", "global_batch"]
SEPARATORS = (",", ";", "\t")
_AMBIGUOUS = re.compile(r"[1-9]\d{0,2}([.,\s]\d{3})+")
# Columns whose 2.345 has decimals, in a file with `,`: nobody means 2,345 seconds.
_FRACTIONS = ("step_s", "node_network_gbps", "measured_bus_bandwidth")
# Columns with one of a few words.
_CHOICES = ("precision", "shard", "recompute")


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
    assumptions: Sequence[str] = ()
    step_s: float | None = None
    """Measured seconds of a step."""


def read_rows(path: Path) -> list[Row]:
    """Read every row of the file. ValueError for another kind of file or a missing column."""
    name = str(path)[-80:]
    try:
        text = path.read_text("utf-8-sig")
        separator = max(SEPARATORS, key=text.partition("\n")[0].count)
        reader = csv.reader(io.StringIO(text), delimiter=separator, strict=True)
        rows = [(reader.line_num, row) for row in reader if any(map(str.strip, row))]
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"expected a CSV in UTF-8, and {name} is none: {error}") from None
    except OSError as error:
        raise ValueError(f"{name}: {error.strerror}") from None
    if len(rows) < 2:
        raise ValueError(f"{name} has no rows")
    # As `kv_heads` for `KV heads`.
    columns = [re.sub("[ -]", "_", column.strip().lower()) for column in rows[0][1]]
    missing = [column for column in REQUIRED if column not in columns]
    if missing:
        line = ", ".join(columns)[:60]
        raise ValueError(
            f"{name} lacks the columns {', '.join(missing)}; its first line has {line}"
        )
    repeated = [column for column in columns if column and columns.count(column) > 1]
    if repeated:
        raise ValueError(f"{name} has the column {repeated[0]} twice: which one counts?")
    if {"step_low", "step_high"} <= set(columns):
        raise ValueError(
            f"{name} is an output of labkit predict: expected measurements, not predictions"
        )
    return [_row(line, columns, row, separator) for line, row in rows[1:]]


def _row(line: int, columns: Sequence[str], row: Sequence[str], separator: str) -> Row:
    texts = {name: cell.strip() for name, cell in zip(columns, row, strict=False) if name}
    assumptions: list[str] = []
    try:
        if any(map(str.strip, row[len(columns) :])):
            raise ValueError("more cells than columns")
        plain = {name: _plain(name, text, separator) for name, text in texts.items() if text}
        run, step_s = _read_run(plain, assumptions)
    except ValueError as error:
        return Row(line, texts, None, str(error))
    return Row(line, texts, run, assumptions=assumptions, step_s=step_s)


@cache  # most cells of a table repeat
def _plain(name: str, text: str, separator: str) -> str:
    """Return a number as Python reads it: of 4.0, and of 0,5 in a file with `;`.

    A text that may have thousands or decimals gets a remark, with which it is no number.
    """
    has_decimal_commas = separator == ";"
    if _AMBIGUOUS.fullmatch(text) and (has_decimal_commas or name not in _FRACTIONS):
        return f"{text} (thousands, or decimals?)"
    if has_decimal_commas and re.fullmatch(r"\d+,\d+", text):
        return text.replace(",", ".")
    if re.fullmatch(r"\d+\.0", text):
        return text.removesuffix(".0")
    return text


def _read_run(texts: dict[str, str], assumptions: list[str]) -> tuple[Run, float | None]:
    """Return a row's run and its time; add to `assumptions`. ValueError if it is no run."""
    # Published tables often leave out the micro-batch; 1 is then an assumption.
    missing = [name for name in REQUIRED if name not in texts and name != "micro_batch"]
    if missing:
        raise ValueError(f"expected {missing[0]} to be stated")
    words = {name: texts[name].lower() for name in _CHOICES if name in texts}
    texts = {"sequence_parallel": str(texts["tp"] != "1"), **texts, **words}
    empty = {
        "micro_batch": "micro-batch of 1",
        "ffn": "ffn of 4 x hidden",
        "recompute": "no recomputation",
    }
    assumptions += [words for name, words in empty.items() if name not in texts]
    framework = _find_framework(texts, assumptions)
    site = validate(_Site, texts)
    model = validate(Model, {**texts, "name": texts.get("model", "")})
    layout = validate(Layout, {**texts, "options": texts.get("options", "").split()})
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


def _find_framework(texts: Mapping[str, str], assumptions: list[str]) -> str:
    """Return the profile of a row: its `framework`, else its group's, else "generic"."""
    framework = TABLES.get(texts.get("group", ""), GENERIC)
    name = texts.get("framework", "")
    if name:
        # Another one has the wide interval of an unknown framework, unless its runs calibrate.
        try:
            framework = find_framework(name)
            words = f"is like {framework}"
        except ValueError:
            framework = GENERIC
            words = "has no published runs"
        if framework != name.lower():
            assumptions.append(f"{name[:40]} {words}")
    # Megatron's rows on A100 are of 2021. On later GPUs it is Megatron-Core, as NeMo has it.
    if framework == "megatron" and find_hardware(texts["gpu"]).architecture != "ampere":
        return "nemo"
    return framework
