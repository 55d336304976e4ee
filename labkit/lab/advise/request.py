"""What was asked for, from the texts of the command line: checked before anything is computed or written."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from labkit.scaling.advice import Request, whole_batch
from labkit.scaling.calibration import calibrate
from labkit.scaling.constants import load_constants
from labkit.scaling.hardware import find_hardware
from labkit.scaling.layout import PRECISIONS, RECOMPUTE, SHARDS
from labkit.scaling.model import Model, parameters
from labkit.scaling.model_config import read_model
from labkit.scaling.named_models import find_model, is_bare_size
from labkit.scaling.runs import Run
from labkit.scaling.table import read_rows

Given = Mapping[str, str | None]
TOKENS_PER_STEP = 4e6
SEQUENCE = 4096
TOKENS_PER_PARAMETER = 20
"""Of a budget that nobody named: Hoffmann et al. 2022, arXiv:2203.15556."""
MOST_GPUS = 2**20
LARGEST_TABLE = 2**24
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_SHAPE = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
_DEGREES = ("tp", "pp", "vp", "cp", "dp", "micro_batch")
_CHOICES = {"shard": SHARDS, "recompute": RECOMPUTE}
_LARGEST = {"layers": 10_000, "heads": 10_000, "kv_heads": 10_000, "gpus": MOST_GPUS, "gpus_per_node": 1024}


@dataclass(frozen=True)
class Asked:
    """A request, the tokens to train on, and what was assumed; `calibrated_on` own runs and how they are explained."""

    request: Request
    budget: float
    assumed: Sequence[str]
    calibrated_on: int = 0
    calibration_error: float = 0.0
    """Median of |predicted / measured - 1| over those runs."""
    unnamed: frozenset[str] = frozenset()
    """Options that were left at their usual values."""


def read_request(given: Given) -> Asked:
    """The question that these options ask. ValueError in one line, with what was expected, for anything else."""
    assumed: list[str] = []
    model = _model(given, assumed)
    if given.get("gpu") is None or given.get("gpus") is None:
        raise ValueError("expected --gpu and --gpus: which GPUs, and how many")
    hardware = find_hardware(given["gpu"] or "").linked(
        network_gbps=_number(given, "network_gbps"), gpus_per_node=whole(given, "gpus_per_node")
    )
    gpus = whole(given, "gpus") or 0
    seq_len = whole(given, "sequence") or SEQUENCE
    tokens = _number(given, "tokens_per_step") or TOKENS_PER_STEP
    budget = _number(given, "tokens") or float(TOKENS_PER_PARAMETER * parameters(model))
    if given.get("tokens") is None:
        assumed.append(f"{TOKENS_PER_PARAMETER} tokens per parameter")
    precision = _choice(given, "precision", PRECISIONS) or "bf16"
    if precision == "fp8" and hardware.fp8_ratio == 1:
        raise ValueError(f"{hardware.name} has no fp8 products: expected --precision bf16 or fp16")
    if precision == "bf16" and hardware.architecture == "volta":
        raise ValueError(f"{hardware.name} has no bf16 products: expected --precision fp16")
    reserve = _number(given, "memory_reserve", unit="gib") or 0.0
    if reserve >= hardware.memory_gib:
        raise ValueError(f"expected --memory-reserve below the {hardware.memory_gib:g} GiB of {hardware.name}")
    global_batch = whole_batch(tokens, seq_len, gpus)
    if global_batch * seq_len != tokens:
        assumed.append(f"{global_batch} sequences per step, so that they divide")
    constants = load_constants()
    framework = given.get("framework") or "generic"
    known = ("generic", *constants.seen["frameworks"])
    if framework not in known:
        raise ValueError(f"expected --framework among {', '.join(known)}; got {framework[:40]!r}")
    request = Request(
        model=model,
        hardware=hardware,
        gpus=gpus,
        seq_len=seq_len,
        global_batch=global_batch,
        precision=precision,
        framework=framework,
        fixed=_fixed(given),
        reserve_gib=reserve,
    )
    unnamed = frozenset(name for name in ("sequence", "tokens_per_step") if given.get(name) is None)
    asked = Asked(request, budget, assumed, unnamed=unnamed)
    return asked if given.get("calibrate") is None else _calibrated(asked, Path(given["calibrate"] or ""))


def measured(given: Given) -> tuple[float | None, float | None]:
    """(tokens per second of all GPUs, MFU from 0 to 1) that were measured. ValueError for neither, or an MFU over 1."""
    tokens_per_s, percent = _number(given, "tokens_per_second"), _number(given, "mfu")
    if tokens_per_s is None and percent is None:
        raise ValueError("expected --tokens-per-second or --mfu (in percent) with --explain")
    if percent is not None and percent > 100:
        raise ValueError(f"expected --mfu of at most 100 percent, got {percent:g}")
    return tokens_per_s, None if percent is None else percent / 100


def _model(given: Given, assumed: list[str]) -> Model:
    named, sizes = given.get("model"), {name: whole(given, name) for name in _SHAPE}
    if named is not None:
        if any(size is not None for size in sizes.values()):
            raise ValueError("expected --model or --layers, --hidden and --heads, not both")
        path = Path(named)
        if named.endswith(".json") or _is_there(path):
            return read_model(path)
        model = find_model(named)
        if is_bare_size(named):
            assumed.append(f"the sizes of {model.name}")
        return model
    layers, hidden, heads = (sizes[name] for name in ("layers", "hidden", "heads"))
    if layers is None or hidden is None or heads is None:
        raise ValueError("expected --model NAME, --model config.json, or --layers, --hidden and --heads")
    ffn, vocab = sizes["ffn"], sizes["vocab"]
    if ffn is None:
        ffn = 256 * math.ceil(8 * hidden / 3 / 256)
        assumed.append(f"ffn {ffn}")
    if vocab is None:
        vocab = 32_000
        assumed.append(f"vocabulary {vocab}")
    name = f"{layers} layers of {hidden}"
    return Model(layers=layers, hidden=hidden, heads=heads, kv_heads=sizes["kv_heads"], ffn=ffn, vocab=vocab, name=name)


def _is_there(path: Path) -> bool:
    try:
        return path.is_dir() or path.is_file()
    except (OSError, ValueError):  # too long, or with a zero byte
        return False


def _fixed(given: Given) -> dict[str, object]:
    """What of the layout was named; the rest is searched."""
    fixed: dict[str, object] = {name: whole(given, name) for name in _DEGREES}
    fixed |= {name: _choice(given, name, allowed) for name, allowed in _CHOICES.items()}
    return {name: value for name, value in fixed.items() if value is not None}


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _number(given: Given, name: str, unit: str = "") -> float | None:
    """A positive number with k, M, B or T; None where the option was left out."""
    text = given.get(name)
    if text is None:
        return None
    words = text.strip().lower().removesuffix(unit).replace("_", "").strip()
    found = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{0,20})?(?:e[0-9]{1,2})?)\s*([kmbgt]?)", words, re.ASCII)
    value = float(found[1]) * _UNITS[found[2]] if found else math.nan
    if not 0 < value <= 1e18:
        example = "8GiB" if unit else "4M"
        raise ValueError(f"expected {_option(name)} to be a number above 0 such as {example}, got {text[:40]!r}")
    return value


def whole(given: Given, name: str) -> int | None:
    """A whole number of a size that can be meant; None where the option was left out. ValueError for any other."""
    value = _number(given, name)
    if value is None:
        return None
    most = _LARGEST.get(name, 10**7)
    if value != int(value) or value > most:
        text = (given.get(name) or "")[:40]
        raise ValueError(f"expected {_option(name)} to be a whole number from 1 to {most:,}, got {text!r}")
    return int(value)


def _choice(given: Given, name: str, allowed: Sequence[str]) -> str | None:
    value = given.get(name)
    if value is not None and value not in allowed:
        raise ValueError(f"expected {_option(name)} among {', '.join(allowed)}; got {value[:40]!r}")
    return value


def _calibrated(asked: Asked, path: Path) -> Asked:
    """The request with a profile of the reader's own runs, a CSV as `labkit predict` takes it, with `step_s`."""
    runs, seconds = _own_runs(path)
    profile = calibrate(runs, seconds, base=asked.request.framework)
    constants = asked.request.constants.with_profile(profile)
    request = replace(asked.request, constants=constants, framework=profile.name)
    errors = [_error(request, run, step_s) for run, step_s in zip(runs, seconds, strict=True)]
    return replace(asked, request=request, calibrated_on=len(runs), calibration_error=sorted(errors)[len(errors) // 2])


def _own_runs(path: Path) -> tuple[list[Run], list[float]]:
    if not _is_there(path) or path.is_dir():
        raise ValueError(f"expected --calibrate to name a CSV of runs, and there is no file {str(path)[-80:]}")
    if path.stat().st_size > LARGEST_TABLE:
        raise ValueError(f"expected --calibrate to name a CSV of at most {LARGEST_TABLE >> 20} MiB")
    try:
        rows = read_rows(path)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from None
    runs, seconds = [], []
    for row in rows:
        if row.run is None:
            raise ValueError(f"{path}, line {row.line}: {row.refusal}")
        step_s = _number({"step_s": row.cells.get("measured_step_s") or row.cells.get("step_s") or ""}, "step_s")
        runs.append(row.run)
        seconds.append(step_s or 0.0)
    return runs, seconds


def _error(request: Request, run: Run, step_s: float) -> float:
    as_own = replace(request, model=run.model, hardware=run.hardware, seq_len=run.seq_len, reserve_gib=0.0)
    return abs(as_own.prediction(run.layout).step_s / step_s - 1)
