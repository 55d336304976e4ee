"""A question to the predictor made of the options of `labkit advise`, with what it assumes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from labkit.lab.advise.options import Options, parse_number
from labkit.scaling.advice import round_batch
from labkit.scaling.calibration import calibrate
from labkit.scaling.hardware import Hardware, find_hardware
from labkit.scaling.model import Model, parameters
from labkit.scaling.named_models import find_model, is_bare_size, read_model
from labkit.scaling.published import frameworks
from labkit.scaling.runs import Run
from labkit.scaling.search import Request
from labkit.scaling.table import read_rows

TOKENS_PER_STEP, SEQUENCE, VOCABULARY = 4e6, 4096, 32_000
TOKENS_PER_PARAMETER = 20
"""Default budget: Hoffmann et al. 2022, arXiv:2203.15556."""
MAX_TABLE_BYTES = 2**24
SHAPE = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
LAYOUT = ("tp", "pp", "vp", "cp", "dp", "micro_batch", "shard", "recompute")
"""Options that fix a field of the layout; the others are searched."""


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


def make_request(options: Options) -> AdviceRequest:
    """The request that these options make. ValueError in one line, with what was expected."""
    assumptions: list[str] = []
    model = _model(options, assumptions)
    hardware, gpus = _hardware(options)
    seq_len = options.sequence or SEQUENCE
    tokens = options.tokens_per_step or TOKENS_PER_STEP
    if options.tokens is None:
        assumptions.append(f"{TOKENS_PER_PARAMETER} tokens per parameter")
    global_batch = round_batch(tokens, seq_len, gpus)
    if global_batch * seq_len != tokens:
        assumptions.append(f"{global_batch} sequences per step, so that they divide")
    framework = options.framework or "generic"
    if framework not in (profiles := ("generic", *sorted(frameworks()))):
        raise ValueError(f"expected --framework among {', '.join(profiles)}; got {framework[:40]!r}")
    request = Request(
        model=model,
        hardware=hardware,
        gpus=gpus,
        seq_len=seq_len,
        global_batch=global_batch,
        precision=options.precision or "bf16",
        framework=framework,
        fixed=options.named(*LAYOUT),
        reserve_gib=options.memory_reserve or 0.0,
    )
    advice_request = AdviceRequest(
        request,
        options.tokens or float(TOKENS_PER_PARAMETER * parameters(model)),
        assumptions,
        frozenset({"sequence", "tokens_per_step"} - set(options.named())),
    )
    return advice_request if options.calibrate is None else _calibrate(advice_request, Path(options.calibrate))


def _hardware(options: Options) -> tuple[Hardware, int]:
    """Hardware and number of GPUs; ValueError for a precision or a reserve that the GPU does not have."""
    if options.gpu is None or options.gpus is None:
        raise ValueError("expected --gpu and --gpus: which GPUs, and how many")
    hardware = find_hardware(options.gpu).with_network(
        network_gbps=options.network_gbps, gpus_per_node=options.gpus_per_node
    )
    precision = options.precision or "bf16"
    if precision == "fp8" and hardware.fp8_ratio == 1:
        raise ValueError(f"{hardware.name} has no fp8 matmuls: expected --precision bf16 or fp16")
    if precision == "bf16" and hardware.architecture in ("volta", "turing"):
        raise ValueError(f"{hardware.name} has no bf16 matmuls: expected --precision fp16")
    if (options.memory_reserve or 0.0) >= hardware.memory_gib:
        raise ValueError(f"expected --memory-reserve below the {hardware.memory_gib:g} GiB of {hardware.name}")
    return hardware, options.gpus


def _model(options: Options, assumptions: list[str]) -> Model:
    sizes = options.named(*SHAPE)
    if (name := options.model) is not None:
        if sizes:
            raise ValueError("expected --model or --layers, --hidden and --heads, not both")
        if name.endswith(".json") or _exists(Path(name)):
            return read_model(Path(name))
        model = find_model(name)
        if is_bare_size(name):
            assumptions.append(f"the sizes of {model.name}")
        return model
    if not {"layers", "hidden", "heads"} <= sizes.keys():
        raise ValueError("expected --model NAME, --model config.json, or --layers, --hidden and --heads")
    defaults = {"kv_heads": 0, "ffn": 256 * math.ceil(8 * sizes["hidden"] / 3 / 256), "vocab": VOCABULARY}
    named = {"ffn": "ffn", "vocab": "vocabulary"}
    assumptions += [f"{text} {defaults[size]}" for size, text in named.items() if size not in sizes]
    return Model(**(defaults | sizes), name=f"{sizes['layers']} layers of {sizes['hidden']}")


def _exists(path: Path) -> bool:
    try:
        return path.is_dir() or path.is_file()
    except (OSError, ValueError):  # too long, or with a zero byte
        return False


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
        step_s = parse_number(row.cells.get("step_s") or "0")
        if not 0 < step_s < math.inf:
            raise ValueError(f"{path}, line {row.line}: expected step_s above 0, the seconds per step")
        seconds.append(step_s)
    return runs, seconds


def _error(request: Request, run: Run, step_s: float) -> float:
    same = replace(request, model=run.model, hardware=run.hardware, seq_len=run.seq_len, reserve_gib=0.0)
    return abs(same.predict(run.layout).step_s / step_s - 1)
