"""Reads a table of runs, a CSV as `training_runs.csv`, and writes predictions.

A wrong row is refused with its line and the reason, and the others are read. Separators, encodings
and decimal commas as spreadsheets write them are understood; thousands are not.
"""

import csv
import io
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from types import MappingProxyType

from labkit.scaling import Count, Rate, validate
from labkit.scaling.constants import find_framework
from labkit.scaling.hardware import find_hardware
from labkit.scaling.models import Model
from labkit.scaling.runs import Layout, Run, impossible_reason

REQUIRED = ["gpu", "gpus", "layers", "hidden", "heads", "vocab", "seq_len"]
REQUIRED += ["tp", "pp", "dp", "micro_batch", "global_batch"]
_MODEL = ("model", *(one.name for one in fields(Model) if one.name != "name"))
# Columns that only an output of `labkit predict` has.
ONLY_PREDICTED = frozenset({"step_low", "step_high"})
ENCODINGS = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
SEPARATORS = (",", ";", "\t")
_AMBIGUOUS = re.compile(r"[1-9]\d{0,2}([.,\s]\d{3})+")
# Columns whose 2.345 has decimals, in a file with `,`: nobody means 2,345 seconds.
_FRACTIONS = ("step_s", "node_network_gbps", "measured_bus_bandwidth")

_SHARDS = {"distributed optimizer": "zero1", "fsdp": "zero3", "ddp": "none"}
# Words of a note -> option of the layout.
NOTES = {
    "before a fix": "old_pipeline",
    "16-bit master": "low_precision_master",
    "CUDA_LAUNCH_BLOCKING=1": "blocking_launch",
}
_CPU_OPTIMIZER = re.compile(
    r"optimi[sz]er[^;,]{0,40} (on|to) (the )?cpu|cpu[ -](optimi[sz]er|adam)", re.IGNORECASE
)


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


def read_rows(path: Path, defaults: Mapping[str, str] = MappingProxyType({})) -> list[Row]:
    """Read every row of the file; `-` is standard input. `defaults` fill empty cells.

    ValueError for another kind of file or a missing column.
    """
    if str(path) == "-":
        name = "standard input"
        text = _decode(sys.stdin.buffer.read(), name)
    else:
        name = str(path)[-80:]
        text = _decode(path.read_bytes(), name)
    header = next(iter(text.splitlines()), "")
    separator = max(SEPARATORS, key=header.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        content = [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise ValueError(f"expected a CSV, and {name} is none: {error}") from None
    columns = _columns(content[0][1] if header else [], name)
    filled = [(line, row) for line, row in content[1:] if any(map(str.strip, row))]
    if not filled:
        raise ValueError(f"{name} has no rows")
    return [_row(line, columns, row, separator, defaults) for line, row in filled]


def _decode(content: bytes, name: str) -> str:
    try:
        return content.decode(ENCODINGS.get(content[:2], "utf-8-sig"))
    except UnicodeDecodeError:
        raise ValueError(f"expected a CSV in UTF-8 or UTF-16: {name}") from None


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


def _row(
    line: int,
    columns: Sequence[str],
    row: Sequence[str],
    separator: str,
    defaults: Mapping[str, str],
) -> Row:
    texts = {name: cell.strip() for name, cell in zip(columns, row, strict=False) if name}
    if len(row) > len(columns) and any(cell.strip() for cell in row[len(columns) :]):
        return Row(line, texts, None, "more cells than columns")
    assumptions: list[str] = []
    try:
        plain = {name: _plain(name, text, separator) for name, text in texts.items() if text}
        run, step_s = _read_run({**defaults, **plain}, assumptions)
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


def _read_run(texts: Mapping[str, str], assumptions: list[str]) -> tuple[Run, float | None]:
    """Return the run of a row's filled cells, and its time; add to `assumptions`.

    ValueError if it describes no run.
    """
    note = texts.get("note", "")
    tp = texts.get("tp", "1")
    if _CPU_OPTIMIZER.search(note):
        raise ValueError(
            "no run with optimizer states on the CPU was published; the nearest is zero3 without it"
        )
    if re.search(r"\blora\b|\bqlora\b", note, re.IGNORECASE):
        raise ValueError("LoRA is not modeled; the nearest is training all parameters")
    # Published tables often leave out the micro-batch; 1 is then an assumption.
    missing = [name for name in REQUIRED if name not in texts and name != "micro_batch"]
    if missing:
        raise ValueError(f"expected {missing[0]} to be stated")
    options = {option for words, option in NOTES.items() if words in note}
    recompute = _recompute(texts, options, assumptions)
    framework = _find_framework(texts, assumptions)
    if framework == "nanotron":
        options.add("empty_stages")
    head_dim = re.search(r"head width (\d{1,4})", note)
    if head_dim is not None:
        texts = {"head_dim": head_dim[1], **texts}
    site = validate(_Site, texts)
    model = _model(tuple(texts.get(name) for name in _MODEL))
    shard = texts.get("shard", "none").lower()
    meanings = {
        "shard": _SHARDS.get(shard, shard),
        "recompute": recompute,
        "precision": _precision(texts.get("precision", "bf16")),
        "options": options,
    }
    layout = validate(Layout, {"sequence_parallel": tp != "1", **texts, **meanings})
    defaults = {"micro_batch": "micro-batch of 1", "ffn": "ffn of 4 x hidden"}
    assumptions += [words for name, words in defaults.items() if name not in texts]
    hardware = find_hardware(site.gpu)
    hardware = hardware.with_network(
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
    if "maxtext" in texts.get("recompute", ""):
        return "maxtext"
    # Megatron's rows on A100 are of 2021. On later GPUs it is Megatron-Core, as NeMo has it.
    if framework == "megatron" and not texts.get("gpu", "").startswith("A100"):
        return "nemo"
    return framework or "generic"


def _precision(words: str) -> str:
    """Return the layout's precision.

    ValueError for one without a measured row, with the nearest that has some.
    """
    words = words.lower()
    for name, nearest in (("fp4", "fp8"), ("fp32", "bf16"), ("tf32", "bf16"), ("float32", "bf16")):
        if name in words:
            raise ValueError(
                f"no run in {words[:20]} was published; the nearest known precision is {nearest}"
            )
    return "fp8" if "fp8" in words else words


def _recompute(texts: Mapping[str, str], options: set[str], assumptions: list[str]) -> str:
    """Return the layout's recomputation from the column's words; a variant is added to options."""
    words = texts.get("recompute", "none")
    if words == "not printed":
        assumptions.append("no recomputation")
        return "none"
    # MaxText's remat policies: minimal keeps every matmul, the others few or none.
    if "maxtext" in words:
        return "none" if "minimal" in words else "full"
    if words == "per-op selective":
        options.add("op_recompute")
        return "selective"
    if words == "selective" and texts.get("group") in ("torchtitan", "titan_blog"):
        options.add("op_recompute")
    return words
