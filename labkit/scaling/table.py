"""Tables of runs: a CSV with the columns of `data/reference/scaling/training_runs.csv` in, predictions out.

A wrong row is refused with its line and the reason; the others are predicted.
"""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from labkit.scaling.constants import Constants, load_constants
from labkit.scaling.hardware import find_hardware
from labkit.scaling.layout import Layout, why_impossible
from labkit.scaling.model import Model
from labkit.scaling.prediction import is_unstable, predict_runs, warnings_of
from labkit.scaling.runs import Run, Runs

REQUIRED = (
    *("gpu", "gpus", "layers", "hidden", "heads", "vocab", "seq_len", "tp", "pp", "dp"),
    *("micro_batch", "global_batch"),
)
PREDICTED = ("step_s", "step_low", "step_high", "mfu_percent", "peak_gib", "fits", "unstable", "note")
RENAMED = {"step_s": "measured_step_s", "mfu_percent": "measured_mfu_percent", "note": "published_note"}
"""Columns of the input that would be taken for predictions, and how they are written."""
LARGEST = 1e9

_FRAMEWORK_OF_GROUP = {
    "nanotron": "nanotron",
    "vtrain_multinode": "vtrain",
    "vtrain_singlenode": "vtrain_node",
    "mosaic": "mosaic",
    "dgxc": "nemo",
    "megatron": "megatron",
    "torchtitan": "torchtitan",
    "fms": "fms",
}
_SHARD_OF_WORDS = {"distributed optimizer": "zero1", "fsdp": "zero3", "ddp": "none"}
_OPTION_OF_NOTE = {
    "async tp": "async_tp",
    "rowwise": "fp8_rowwise",
    "before a fix": "old_pipeline",
    "16-bit master": "low_precision_master",
}


@dataclass(frozen=True)
class Row:
    """A row of a table as it stands there, the run it describes, or why it describes none; and what it assumed."""

    line: int
    cells: Mapping[str, str]
    run: Run | None
    refusal: str = ""
    assumed: tuple[str, ...] = ()


def read_rows(path: Path) -> list[Row]:
    """Every row of the file. ValueError if it is no table, or lacks a column."""
    try:
        text = path.read_text(encoding="utf-8-sig")
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        missing = [name for name in REQUIRED if name not in (reader.fieldnames or ())]
        if missing:
            raise ValueError(f"{path} lacks the columns {', '.join(missing)}")
        rows = [_row(reader.line_num, cells) for cells in reader]
    except UnicodeDecodeError:
        raise ValueError(f"expected a CSV in UTF-8: {path}") from None
    except csv.Error as error:
        raise ValueError(f"expected a CSV, and {path} is none: {error}") from None
    if not rows:
        raise ValueError(f"{path} has no rows")
    return rows


def run_of(cells: Mapping[str, str]) -> tuple[Run, tuple[str, ...]]:
    """The run of a row, and what was assumed for cells it leaves empty. ValueError with the reason if it is none."""
    assumed: list[str] = []
    recompute, options = _recompute(cells, assumed)
    note = cells.get("published_note") or cells.get("note") or ""
    options |= {option for words, option in _OPTION_OF_NOTE.items() if words in note}
    framework = framework_of(cells)
    if framework == "nanotron":
        options.add("empty_stages")
    hidden, heads, tp = (_whole(cells, name) for name in ("hidden", "heads", "tp"))
    if not cells.get("ffn"):
        assumed.append("ffn of 4 x hidden")
    if "micro_batch" in cells and not cells["micro_batch"]:
        assumed.append("micro-batch of 1")
    model = Model(
        layers=_whole(cells, "layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=_whole(cells, "kv_heads", heads),
        ffn=_whole(cells, "ffn", 4 * hidden),
        ffn_gated=_flag(cells, "ffn_gated", True),
        vocab=_whole(cells, "vocab"),
        tied=_flag(cells, "tied", False),
    )
    network = _positive(cells, "node_network_gbps")
    hardware = find_hardware(cells["gpu"]).linked(
        network_gbps=network, gpus_per_node=_whole(cells, "gpus_per_node", 0) or None
    )
    layout = Layout(
        tp=tp,
        sequence_parallel=_flag(cells, "sequence_parallel", tp > 1),
        pp=_whole(cells, "pp"),
        vp=_whole(cells, "vp", 1),
        cp=_whole(cells, "cp", 1),
        dp=_whole(cells, "dp"),
        shard=_shard(cells),
        micro_batch=_whole(cells, "micro_batch", 1),
        global_batch=_whole(cells, "global_batch"),
        recompute=recompute,
        precision="fp8" if "fp8" in (words := cells.get("precision") or "bf16").lower() else words,
        compiled=_flag(cells, "compiled", False),
        options=frozenset(options),
    )
    gpus, seq_len = _whole(cells, "gpus"), _whole(cells, "seq_len")
    if layout.gpus != gpus:
        raise ValueError(f"tp x pp x cp x dp is {layout.gpus}, and gpus is {gpus}")
    if reason := why_impossible(layout, model, seq_len):
        raise ValueError(reason)
    return Run(model, hardware, layout, seq_len, framework), tuple(assumed)


def framework_of(cells: Mapping[str, str]) -> str:
    """The profile of a row: its column `framework`, else what is known of its group; "generic" for one never seen."""
    if cells.get("framework"):
        return cells["framework"]
    if "maxtext" in (cells.get("recompute") or ""):
        return "maxtext"
    group = cells.get("group") or ""
    if group == "megatron" and not cells["gpu"].startswith("A100"):
        return "nemo"  # Megatron-Core, as NeMo
    own_names = set(_FRAMEWORK_OF_GROUP.values()) | {"maxtext"}
    return _FRAMEWORK_OF_GROUP.get(group, group if group in own_names else "generic")


def predicted_rows(rows: Sequence[Row], constants: Constants | None = None) -> list[dict[str, str]]:
    """The cells of every row with the columns of `PREDICTED`; of a refused row these are empty but for its note."""
    constants = constants or load_constants()
    good = [row for row in rows if row.run is not None]
    written: dict[int, dict[str, str]] = {}
    if good:
        runs = Runs.of([row.run for row in good if row.run is not None])
        found = predict_runs(runs, constants)
        unstable = is_unstable(runs, found)
        warnings = warnings_of(runs, found, constants)
        for at, row in enumerate(good):
            note = "; ".join([*warnings[at], *(f"assumed: {name}" for name in row.assumed)])
            written[row.line] = {
                "step_s": f"{found.step_s[at]:.6g}",
                "step_low": f"{found.low_90[at]:.6g}",
                "step_high": f"{found.high_90[at]:.6g}",
                "mfu_percent": f"{100 * found.mfu[at]:.2f}",
                "peak_gib": f"{found.peak_gib[at]:.2f}",
                "fits": str(int(found.fits[at])),
                "unstable": str(int(unstable[at])),
                "note": note,
            }
    return [_kept(row.cells) | written.get(row.line, _refused(row)) for row in rows]


def write_rows(rows: Sequence[Mapping[str, str]], out: TextIO) -> None:
    names = list(dict.fromkeys(name for row in rows for name in row))
    writer = csv.DictWriter(out, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)


def _kept(cells: Mapping[str, str]) -> dict[str, str]:
    """The cells of the input, renamed where predictions have that name; of a table predicted before, as it was then."""
    kept: dict[str, str] = {}
    for name, value in cells.items():
        other = RENAMED.get(name)
        if other is None and name not in PREDICTED:
            kept[name] = value
        elif other is not None and other not in cells:
            kept[other] = value
    return kept


def _refused(row: Row) -> dict[str, str]:
    return dict.fromkeys(PREDICTED, "") | {"note": f"refused: {row.refusal}"}


def _row(line: int, cells: Mapping[str | None, object]) -> Row:
    named = {str(name): str(value or "").strip() for name, value in cells.items() if name is not None}
    if None in cells:
        return Row(line, named, None, "more cells than columns")
    try:
        run, assumed = run_of(named)
    except ValueError as error:
        return Row(line, named, None, str(error))
    return Row(line, named, run, assumed=assumed)


def _shard(cells: Mapping[str, str]) -> str:
    shard = (cells.get("shard") or "none").lower()
    return _SHARD_OF_WORDS.get(shard, shard)


def _recompute(cells: Mapping[str, str], assumed: list[str]) -> tuple[str, set[str]]:
    """The column's words as one of three kinds, with what a framework means by them as options."""
    words, group = cells.get("recompute") or "none", cells.get("group") or ""
    if words == "not printed":
        assumed.append("no recomputation")
        return "none", set()
    if "maxtext" in words:  # its remat policies: minimal keeps every product, full none, save_qkv_proj three of them
        return ("none", set()) if "minimal" in words else ("full", set() if "full" in words else {"save_qkv"})
    if words == "per-op selective" or (words == "selective" and group == "torchtitan"):
        return "selective", {"op_recompute"}
    if words == "selective" and group == "fms":
        return "selective", {"layer_recompute"}
    return words, set()


def _positive(cells: Mapping[str, str], name: str) -> float | None:
    """A positive number, None where the cell is empty."""
    text = cells.get(name) or ""
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        raise ValueError(f"expected {name} to be a number, got {text[:40]!r}") from None
    if not (math.isfinite(value) and 0 < value <= LARGEST):
        raise ValueError(f"expected {name} above 0 and at most {LARGEST:.0e}, got {text[:40]}")
    return value


def _whole(cells: Mapping[str, str], name: str, default: int | None = None) -> int:
    value = _positive(cells, name)
    if value is None:
        if default is None and name != "micro_batch":
            raise ValueError(f"{name} is empty")
        return 1 if default is None else default
    if value != int(value):
        raise ValueError(f"expected {name} to be a whole number, got {value:g}")
    return int(value)


def _flag(cells: Mapping[str, str], name: str, default: bool) -> bool:
    text = (cells.get(name) or "").lower()
    if not text:
        return default
    if text in ("1", "1.0", "true"):
        return True
    if text in ("0", "0.0", "false"):
        return False
    raise ValueError(f"expected {name} to be 0 or 1, got {text[:40]!r}")
