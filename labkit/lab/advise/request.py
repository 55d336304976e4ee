"""A question of `labkit advise` from the texts of the command line, checked before anything is computed or written."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from labkit.scaling.advice import round_batch
from labkit.scaling.calibration import calibrate
from labkit.scaling.hardware import Hardware, find_hardware
from labkit.scaling.layout import PRECISIONS, RECOMPUTE, SHARDS
from labkit.scaling.model import Model, parameters
from labkit.scaling.model_config import read_model
from labkit.scaling.named_models import find_model, is_bare_size
from labkit.scaling.published import frameworks
from labkit.scaling.runs import Run
from labkit.scaling.search import Request
from labkit.scaling.table import read_rows

Options = Mapping[str, str | None]
"""Option (with underscores) -> its text; None if it was left out."""
TOKENS_PER_STEP = 4e6
SEQUENCE = 4096
TOKENS_PER_PARAMETER = 20
"""Default budget: Hoffmann et al. 2022, arXiv:2203.15556."""
MAX_GPUS = 2**20
MAX_TABLE_BYTES = 2**24
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_SHAPE = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
_DEGREES = ("tp", "pp", "vp", "cp", "dp", "micro_batch")
_CHOICES = {"shard": SHARDS, "recompute": RECOMPUTE}
_MAX = {"layers": 10_000, "heads": 10_000, "kv_heads": 10_000, "gpus": MAX_GPUS, "gpus_per_node": 1024}


@dataclass(frozen=True)
class AdviceRequest:
    """A request, the tokens to train on, and its assumptions."""

    request: Request
    budget: float
    assumptions: Sequence[str]
    unspecified: frozenset[str] = frozenset()
    """Options that were left at their defaults."""
    calibration_runs: int = 0
    calibration_error: float = 0.0
    """Median of |predicted / measured - 1| over those runs."""


def read_request(options: Options) -> AdviceRequest:
    """The request that these options make. ValueError in one line, with what was expected."""
    assumptions: list[str] = []
    model = _model(options, assumptions)
    hardware, gpus, precision, reserve_gib = _machine(options)
    seq_len = parse_int(options, "sequence") or SEQUENCE
    tokens = _number(options, "tokens_per_step") or TOKENS_PER_STEP
    budget = _number(options, "tokens") or float(TOKENS_PER_PARAMETER * parameters(model))
    if options.get("tokens") is None:
        assumptions.append(f"{TOKENS_PER_PARAMETER} tokens per parameter")
    global_batch = round_batch(tokens, seq_len, gpus)
    if global_batch * seq_len != tokens:
        assumptions.append(f"{global_batch} sequences per step, so that they divide")
    framework = _choice(options, "framework", ("generic", *sorted(frameworks()))) or "generic"
    request = Request(
        model=model,
        hardware=hardware,
        gpus=gpus,
        seq_len=seq_len,
        global_batch=global_batch,
        precision=precision,
        framework=framework,
        fixed=_fixed(options),
        reserve_gib=reserve_gib,
    )
    unspecified = frozenset(name for name in ("sequence", "tokens_per_step") if options.get(name) is None)
    advice_request = AdviceRequest(request, budget, assumptions, unspecified)
    path = options.get("calibrate")
    return advice_request if path is None else _calibrate(advice_request, Path(path))


def read_measurement(options: Options) -> tuple[float | None, float | None]:
    """Measured (tokens per second of all GPUs, MFU from 0 to 1). ValueError for neither, or an MFU over 1."""
    tokens_per_s, percent = _number(options, "tokens_per_second"), _number(options, "mfu")
    if tokens_per_s is None and percent is None:
        raise ValueError("expected --tokens-per-second or --mfu (in percent) with --explain")
    if percent is not None and percent > 100:
        raise ValueError(f"expected --mfu of at most 100 percent, got {percent:g}")
    return tokens_per_s, None if percent is None else percent / 100


def _machine(options: Options) -> tuple[Hardware, int, str, float]:
    """Hardware, number of GPUs, precision, and GiB to leave free."""
    if options.get("gpu") is None or options.get("gpus") is None:
        raise ValueError("expected --gpu and --gpus: which GPUs, and how many")
    hardware = find_hardware(options["gpu"] or "").with_network(
        network_gbps=_number(options, "network_gbps"), gpus_per_node=parse_int(options, "gpus_per_node")
    )
    precision = _choice(options, "precision", PRECISIONS) or "bf16"
    if precision == "fp8" and hardware.fp8_ratio == 1:
        raise ValueError(f"{hardware.name} has no fp8 matmuls: expected --precision bf16 or fp16")
    if precision == "bf16" and hardware.architecture in ("volta", "turing"):
        raise ValueError(f"{hardware.name} has no bf16 matmuls: expected --precision fp16")
    reserve_gib = _number(options, "memory_reserve", unit="gib") or 0.0
    if reserve_gib >= hardware.memory_gib:
        raise ValueError(f"expected --memory-reserve below the {hardware.memory_gib:g} GiB of {hardware.name}")
    return hardware, parse_int(options, "gpus") or 0, precision, reserve_gib


def _model(options: Options, assumptions: list[str]) -> Model:
    name, sizes = options.get("model"), {size: parse_int(options, size) for size in _SHAPE}
    if name is not None:
        if any(size is not None for size in sizes.values()):
            raise ValueError("expected --model or --layers, --hidden and --heads, not both")
        if name.endswith(".json") or _exists(Path(name)):
            return read_model(Path(name))
        model = find_model(name)
        if is_bare_size(name):
            assumptions.append(f"the sizes of {model.name}")
        return model
    layers, hidden, heads = (sizes[size] for size in ("layers", "hidden", "heads"))
    if layers is None or hidden is None or heads is None:
        raise ValueError("expected --model NAME, --model config.json, or --layers, --hidden and --heads")
    ffn, vocab = sizes["ffn"], sizes["vocab"]
    if ffn is None:
        ffn = 256 * math.ceil(8 * hidden / 3 / 256)
        assumptions.append(f"ffn {ffn}")
    if vocab is None:
        vocab = 32_000
        assumptions.append(f"vocabulary {vocab}")
    name, kv_heads = f"{layers} layers of {hidden}", sizes["kv_heads"] or 0
    return Model(layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, ffn=ffn, vocab=vocab, name=name)


def _exists(path: Path) -> bool:
    try:
        return path.is_dir() or path.is_file()
    except (OSError, ValueError):  # too long, or with a zero byte
        return False


def _fixed(options: Options) -> dict[str, object]:
    """Named fields of the layout; the rest is searched."""
    fixed: dict[str, object] = {name: parse_int(options, name) for name in _DEGREES}
    fixed |= {name: _choice(options, name, allowed) for name, allowed in _CHOICES.items()}
    return {name: value for name, value in fixed.items() if value is not None}


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _number(options: Options, name: str, unit: str = "") -> float | None:
    """A positive number with k, M, B or T, or thousands as 4,000,000; None if the option was left out."""
    text = options.get(name)
    if text is None:
        return None
    words = text.strip().lower().removesuffix(unit).replace("_", "").strip()
    if re.fullmatch(r"[0-9]{1,3}(,[0-9]{3})+", words):
        words = words.replace(",", "")
    found = re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{0,20})?(?:e[0-9]{1,2})?)\s*([kmbgt]?)", words, re.ASCII)
    value = float(found[1]) * _UNITS[found[2]] if found else math.nan
    if not 0 < value <= 1e18:
        example = "8GiB" if unit else "4M"
        raise ValueError(f"expected {_flag(name)} to be a number above 0 such as {example}, got {text[:40]!r}")
    return value


def parse_int(options: Options, name: str) -> int | None:
    """A whole number of a plausible size; None if the option was left out. ValueError for any other."""
    value = _number(options, name)
    if value is None:
        return None
    largest = _MAX.get(name, 10**7)
    if value != int(value) or value > largest:
        text = (options.get(name) or "")[:40]
        raise ValueError(f"expected {_flag(name)} to be a whole number from 1 to {largest:,}, got {text!r}")
    return int(value)


def _choice(options: Options, name: str, allowed: Sequence[str]) -> str | None:
    value = options.get(name)
    if value is not None and value not in allowed:
        raise ValueError(f"expected {_flag(name)} among {', '.join(allowed)}; got {value[:40]!r}")
    return value


def _calibrate(advice_request: AdviceRequest, path: Path) -> AdviceRequest:
    """The request with a profile of the user's runs, a CSV as `labkit predict` takes it, with `step_s`."""
    request = advice_request.request
    runs, seconds = _read_runs(path)
    profile = calibrate(runs, seconds, base=request.framework)
    request = replace(request, constants=request.constants.with_profile(profile), framework=profile.name)
    errors = sorted(_error(request, run, step_s) for run, step_s in zip(runs, seconds, strict=True))
    median = errors[len(errors) // 2]
    return replace(advice_request, request=request, calibration_runs=len(runs), calibration_error=median)


def _read_runs(path: Path) -> tuple[list[Run], list[float]]:
    if str(path) != "-" and not path.is_file():
        raise ValueError(f"expected --calibrate to name a CSV of runs, and there is no file {str(path)[-80:]}")
    if str(path) != "-" and path.stat().st_size > MAX_TABLE_BYTES:
        raise ValueError(f"expected --calibrate to name a CSV of at most {MAX_TABLE_BYTES >> 20} MiB")
    runs, seconds = [], []
    for row in read_rows(path):
        if row.run is None:
            raise ValueError(f"{path}, line {row.line}: {row.refusal}")
        runs.append(row.run)
        seconds.append(_number({"step_s": row.cells.get("step_s") or ""}, "step_s") or 0.0)
    return runs, seconds


def _error(request: Request, run: Run, step_s: float) -> float:
    same = replace(request, model=run.model, hardware=run.hardware, seq_len=run.seq_len, reserve_gib=0.0)
    return abs(same.predict(run.layout).step_s / step_s - 1)
