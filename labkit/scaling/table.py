"""Reads tables of runs, a CSV with the columns of `data/reference/scaling/training_runs.csv`, and writes predictions.

A wrong row is refused with its line and the reason, and the others are read. Separators, encodings and thousands as
spreadsheets write them are understood.
"""

import csv
import io
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from labkit.scaling.hardware import find_hardware
from labkit.scaling.models import Model
from labkit.scaling.runs import Layout, Run, impossible_reason

REQUIRED = (
    *("gpu", "gpus", "layers", "hidden", "heads", "vocab", "seq_len", "tp", "pp", "dp"),
    *("micro_batch", "global_batch"),
)
ONLY_PREDICTED = frozenset({"step_low", "step_high"})
"""Columns that only an output of `labkit predict` has."""
LARGEST = 1e9
ENCODINGS = {b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
SEPARATORS = (",", ";", "\t")
_AMBIGUOUS = re.compile(r"\d{1,3},\d{3}")  # in a file with `;`: thousands, or decimals
_FRACTIONS = ("step_s", "node_network_gbps")  # where 2.345 may have decimals, whatever separates cells

_FRAMEWORKS = {
    **{"nanotron": "nanotron", "vtrain_multinode": "vtrain", "vtrain_singlenode": "vtrain_node", "mosaic": "mosaic"},
    **{"dgxc": "nemo", "megatron": "megatron", "torchtitan": "torchtitan", "fms": "fms", "titan_blog": "torchtitan"},
    **{"nemo_b200_log": "nemo", "dgxc_example": "nemo", "bigscience": "vtrain", "dlperf_megatron": "vtrain"},
    "internevo": "internevo",
}
"""Published table -> framework."""
_SHARDS = {"distributed optimizer": "zero1", "fsdp": "zero3", "ddp": "none"}
NOTES = {
    "async tp": "async_tp",
    "rowwise": "fp8_rowwise",
    "before a fix": "old_pipeline",
    "after a fix": "new_pipeline",
    "16-bit master": "low_precision_master",
    "CUDA_LAUNCH_BLOCKING=1": "blocking_launch",
}
"""Words of a note -> option of the layout."""
_CPU_OPTIMIZER = re.compile(r"optimi[sz]er[^;,]{0,40} (on|to) (the )?cpu|cpu[ -](optimi[sz]er|adam)", re.IGNORECASE)
_FLAGS = {**dict.fromkeys(("1", "1.0", "true", "yes"), True), **dict.fromkeys(("0", "0.0", "false", "no"), False)}


class Cells(dict[str, str]):
    """A row's texts by column, and their values; assumptions about empty cells are noted."""

    def __init__(self, cells: Mapping[str, str]) -> None:
        super().__init__(cells)
        self.assumptions: list[str] = []

    def text(self, name: str, default: str = "") -> str:
        return self.get(name) or default

    def number(self, name: str) -> float | None:
        """A positive number; None for an empty cell. ValueError for another text."""
        text = self.text(name)
        if not text:
            return None
        try:
            value = float(text)
        except ValueError:
            raise ValueError(f"expected {name} to be a number, got {text[:40]!r}") from None
        if not (math.isfinite(value) and 0 < value <= LARGEST):
            raise ValueError(f"expected {name} above 0 and at most {LARGEST:.0e}, got {text[:40]}")
        return value

    def integer(self, name: str, default: int | None = None, assumption: str = "") -> int:
        """A whole number, or the default of an empty cell, which is noted if it has a name."""
        if re.fullmatch(r"\d{1,3}(\.\d{3})+", self.text(name)):
            raise ValueError(f"expected {name} to be a whole number without points, got {self.text(name)}")
        value = self.number(name)
        if value is None:
            if default is None:
                raise ValueError(f"{name} is empty")
            self.assumptions += [assumption] if assumption else []
            return default
        if value != int(value):
            raise ValueError(f"expected {name} to be a whole number, got {value:g}")
        return int(value)

    def flag(self, name: str, default: bool) -> bool:
        text = self.text(name).lower()
        if text and text not in _FLAGS:
            raise ValueError(f"expected {name} to be 0 or 1, got {text[:40]!r}")
        return _FLAGS.get(text, default)


@dataclass(frozen=True)
class Row:
    """A row's cells and the run it describes, or the reason why none; and assumptions about empty cells."""

    line: int
    cells: Mapping[str, str]
    run: Run | None
    refusal: str = ""
    assumptions: Sequence[str] = field(default_factory=list)


def read_rows(path: Path) -> list[Row]:
    """Every row of the file; `-` is standard input. ValueError for another kind of file or a missing column."""
    name = "standard input" if str(path) == "-" else str(path)[-80:]
    text = _decode(sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes(), name)
    lines = text.splitlines()
    stated = re.fullmatch(r"sep=(.)", lines[0].strip("\n")) if lines else None
    header = lines[1 if stated else 0] if len(lines) > bool(stated) else ""
    separator = stated[1] if stated else max(SEPARATORS, key=header.count)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True)
    try:
        content = [(reader.line_num, row) for row in reader]
    except csv.Error as error:
        raise ValueError(f"expected a CSV, and {name} is none: {error}") from None
    columns = _columns(content[int(bool(stated))][1] if header else [], name)
    filled = [(line, row) for line, row in content[1 + bool(stated) :] if any(map(str.strip, row))]
    if not filled:
        raise ValueError(f"{name} has no rows")
    return [_row(line, columns, row, separator) for line, row in filled]


def _decode(content: bytes, name: str) -> str:
    try:
        text = content.decode(ENCODINGS.get(content[:2], "utf-8-sig"))
    except UnicodeDecodeError:
        raise ValueError(f"expected a CSV in UTF-8 or UTF-16: {name}") from None
    before, zero, _ = text.partition("\0")
    if zero:
        raise ValueError(f"expected a CSV, and {name} has a zero byte in line {before.count(chr(10)) + 1}")
    return text


def _columns(header: Sequence[str], name: str) -> list[str]:
    """Return column names, as `kv_heads` for `KV heads`. ValueError for missing, repeated and predicted ones."""
    columns = [re.sub("[ -]", "_", column.strip().lower()) for column in header]
    if missing := [column for column in REQUIRED if column not in columns]:
        line = ", ".join(columns)[:60] or "nothing"
        raise ValueError(f"{name} lacks the columns {', '.join(missing)}; its first line has {line}")
    if twice := sorted({column for column in columns if column and columns.count(column) > 1}):
        raise ValueError(f"{name} has the column {twice[0]} twice: which one counts?")
    if set(columns) >= ONLY_PREDICTED:
        raise ValueError(f"{name} is an output of labkit predict: expected measurements, not predictions")
    return columns


def _row(line: int, columns: Sequence[str], row: Sequence[str], separator: str) -> Row:
    texts = {name: cell.strip() for name, cell in zip(columns, row, strict=False) if name}
    if len(row) > len(columns) and any(cell.strip() for cell in row[len(columns) :]):
        return Row(line, texts, None, "more cells than columns")
    cells = Cells(texts | dict(_numbers(texts, separator)))
    try:
        run = _read_run(cells)
    except ValueError as error:
        return Row(line, texts, None, str(error))
    return Row(line, texts, run, assumptions=cells.assumptions)


def _numbers(texts: Mapping[str, str], separator: str) -> Iterator[tuple[str, str]]:
    """Read numbers as spreadsheets write them: 4,000,000 or 4 000 000, and 1.600,5 in a file with `;`."""
    for name, text in texts.items():
        if re.fullmatch(r"\d{1,3}([,\s\u202f\u00a0_]\d{3})+", text) and not (separator == ";" and text.count(",") == 1):
            yield name, re.sub(r"\D", "", text)
        elif separator == ";" and name in _FRACTIONS and re.fullmatch(r"[1-9]\d{0,2}\.\d{3}", text):
            yield name, f"{text} (thousands, or decimals?)"
        elif (
            separator == ";"
            and re.fullmatch(r"[1-9]\d{0,2}(\.\d{3})+(,\d+)?|\d+,\d+", text)
            and not _AMBIGUOUS.fullmatch(text)
        ):
            yield name, text.replace(".", "").replace(",", ".")


def _read_run(cells: Cells) -> Run:
    """The run of a row. ValueError with the reason if it describes none."""
    recompute, options = _recompute(cells)
    note = cells.text("note")
    cells.number("step_s")
    if _CPU_OPTIMIZER.search(note):
        raise ValueError("no run with optimizer states on the CPU was published; the nearest is zero3 without it")
    options |= {option for words, option in NOTES.items() if words in note}
    framework = _find_framework(cells)
    if framework == "nanotron":
        options.add("empty_stages")
    model = _read_model(cells)
    hardware = find_hardware(cells["gpu"]).with_network(
        network_gbps=cells.number("node_network_gbps"), gpus_per_node=cells.integer("gpus_per_node", 0) or None
    )
    tp, shard = cells.integer("tp"), cells.text("shard", "none").lower()
    layout = Layout(
        tp=tp,
        sequence_parallel=cells.flag("sequence_parallel", tp > 1),
        pp=cells.integer("pp"),
        vp=cells.integer("vp", 1),
        cp=cells.integer("cp", 1),
        dp=cells.integer("dp"),
        shard=_SHARDS.get(shard, shard),
        micro_batch=cells.integer("micro_batch", 1, "micro-batch of 1"),
        global_batch=cells.integer("global_batch"),
        recompute=recompute,
        precision=_precision(cells.text("precision", "bf16")),
        compiled=cells.flag("compiled", False),
        options=frozenset(options),
    )
    hardware.check_precision(layout.precision)
    gpus, seq_len = cells.integer("gpus"), cells.integer("seq_len")
    if layout.gpus != gpus:
        raise ValueError(f"tp x pp x cp x dp is {layout.gpus}, and gpus is {gpus}")
    if reason := impossible_reason(layout, model, seq_len):
        raise ValueError(reason)
    return Run(model, hardware, layout, seq_len, framework, cells.text("group"))


def _find_framework(cells: Cells) -> str:
    """The profile of a row: its column `framework`, else its group's framework; "generic" for an unknown one."""
    if name := cells.text("framework"):
        if name not in {*_FRAMEWORKS.values(), "maxtext", "generic"}:
            cells.assumptions.append(f"no published run of {name[:40]}")
        return name
    if "maxtext" in cells.text("recompute"):
        return "maxtext"
    group = cells.text("group")
    if group == "megatron" and not cells["gpu"].startswith("A100"):
        return "nemo"  # Megatron-Core, as NeMo
    return _FRAMEWORKS.get(group, group if group in {*_FRAMEWORKS.values(), "maxtext"} else "generic")


def _read_model(cells: Cells) -> Model:
    hidden, heads = cells.integer("hidden"), cells.integer("heads")
    width = re.search(r"head width (\d{1,4})", cells.text("note"))
    return Model(
        layers=cells.integer("layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=cells.integer("kv_heads", heads),
        head_dim=cells.integer("head_dim", int(width[1]) if width else 0),
        ffn=cells.integer("ffn", 4 * hidden, "ffn of 4 x hidden"),
        ffn_gated=cells.flag("ffn_gated", True),
        vocab=cells.integer("vocab"),
        tied=cells.flag("tied", False),
    )


def _precision(words: str) -> str:
    """The layout's precision. ValueError for the ones without a measured row, with the nearest that has some."""
    words = words.lower()
    for name, nearest in (("fp4", "fp8"), ("fp32", "bf16"), ("tf32", "bf16"), ("float32", "bf16")):
        if name in words:
            raise ValueError(
                f"no run in {words[:20]} was published for many GPUs; the nearest known precision is {nearest}"
            )
    return "fp8" if "fp8" in words else words


def _recompute(cells: Cells) -> tuple[str, set[str]]:
    """The column's words as one of three kinds, with a framework's variant of it as options."""
    words, group = cells.text("recompute", "none"), cells.text("group")
    if words == "not printed":
        cells.assumptions.append("no recomputation")
        return "none", set()
    if "maxtext" in words:  # its remat policies: minimal keeps every matmul, full none, save_qkv_proj three of them
        return ("none", set()) if "minimal" in words else ("full", set() if "full" in words else {"save_qkv"})
    if words == "per-op selective" or (words == "selective" and group in ("torchtitan", "titan_blog")):
        return "selective", {"op_recompute"}
    if words == "selective" and group == "fms":
        return "selective", {"layer_recompute"}
    return words, set()
