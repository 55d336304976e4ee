"""The options of `labkit advise`, checked, and the question that they make."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from labkit.lab.project import kind_of_path
from labkit.scaling import first_problem
from labkit.scaling.advice import round_batch
from labkit.scaling.hardware import Hardware, find_hardware
from labkit.scaling.models import find_model, read_model
from labkit.scaling.prediction import CALIBRATED, as_calibrated, calibrate, predict_runs
from labkit.scaling.published import load_ground
from labkit.scaling.runs import Run
from labkit.scaling.search import Request
from labkit.scaling.table import read_rows

_NUMBER = re.compile(r"([0-9]{1,18}(?:\.[0-9]{0,20})?(?:e[0-9]{1,2})?)\s*([kmbgt]?)", re.ASCII)
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def parse_number(value: Any) -> Any:
    """Return a number from "4M", "15T" or "4,000,000"; pass other types unchanged.

    ValueError for other text.
    """
    if not isinstance(value, str):
        return value
    text = value.strip().lower().replace("_", "")
    if re.fullmatch(r"[0-9]{1,3}(,[0-9]{3})+", text):
        text = text.replace(",", "")
    if (match := _NUMBER.fullmatch(text)) is None:
        raise ValueError("should be a number such as 8, 4M or 15T")
    return float(match[1]) * _UNITS[match[2]]


def _parse_gib(value: Any) -> Any:
    return parse_number(
        re.sub(r"\s*gib$", "", value, flags=re.IGNORECASE) if isinstance(value, str) else value
    )


Whole = Annotated[int, BeforeValidator(parse_number), Field(ge=1, le=10**7)]
Gpus = Annotated[int, BeforeValidator(parse_number), Field(ge=1, le=2**20)]
Amount = Annotated[float, BeforeValidator(parse_number), Field(gt=0, le=1e18)]
Gib = Annotated[float, BeforeValidator(_parse_gib), Field(gt=0, le=1e6)]
Percent = Annotated[float, BeforeValidator(parse_number), Field(gt=0, le=100)]


class Options(BaseModel, extra="forbid", frozen=True):
    """Options of a question; None if left out."""

    model: str | None = Field(
        None, description="A name (llama-3-8b, qwen-2.5-7b, gpt-3-175b, mini) or a config.json."
    )
    gpus: Gpus | None = Field(None, description="Number of GPUs.")
    gpu: str | None = Field(None, description="GPU: h100, a100-40gb, h200, b200, mi300x, 4090, ...")
    gpus_per_node: Gpus | None = Field(None, description="GPUs that share a node; default 8.")
    network_gbps: Amount | None = Field(
        None, description="Gbit/s of all links of a node, in one direction."
    )
    tokens_per_step: Amount | None = Field(
        None, description="Tokens per step of all GPUs together; default 4M."
    )
    sequence: Whole | None = Field(None, description="Tokens per sequence; default 4096.")
    precision: Literal["bf16", "fp16", "fp8"] | None = Field(
        None, description="bf16, fp16 or fp8; default bf16."
    )
    memory_reserve: Gib | None = Field(
        None, description="Memory of each GPU to leave free, such as 8GiB."
    )
    tokens: Amount | None = Field(
        None, description="Tokens to train on, such as 15T; default 20 per parameter."
    )
    framework: str | None = Field(
        None, description="Framework: nanotron, nemo, torchtitan, mosaic, megatron, ..."
    )
    calibrate: str | None = Field(
        None, description="A CSV of three or more of your runs, with step_s."
    )
    tokens_per_second: Amount | None = Field(
        None, description="With --explain: measured rate of all GPUs."
    )
    mfu: Percent | None = Field(None, description="With --explain: measured MFU in percent.")
    tp: Whole | None = Field(
        None, description="Tensor-parallel ranks. This and the following are searched unless set."
    )
    pp: Whole | None = Field(None, description="Pipeline stages.")
    vp: Whole | None = Field(None, description="Chunks per stage.")
    cp: Whole | None = Field(None, description="Context-parallel ranks.")
    dp: Whole | None = Field(None, description="Data-parallel ranks.")
    shard: Literal["none", "zero1", "zero2", "zero3", "hsdp"] | None = Field(
        None, description="Sharding: none, zero1, zero2, zero3 or hsdp."
    )
    micro_batch: Whole | None = Field(None, description="Sequences per micro-batch of a rank.")
    recompute: Literal["none", "selective", "full"] | None = Field(
        None, description="none, selective or full."
    )

    def named(self, *names: str) -> dict[str, Any]:
        """Options that are set, of these names or of all."""
        values = self.model_dump(exclude_none=True)
        return {name: values[name] for name in names or values if name in values}


def flag(name: str) -> str:
    """Return an option as the command line spells it."""
    return f"--{name.replace('_', '-')}"


def read_options(values: Mapping[str, Any]) -> Options:
    """Read options by name; text is read as on the command line.

    ValueError in one line for the first wrong one.
    """
    try:
        return Options.model_validate(
            {name: value for name, value in values.items() if value is not None}
        )
    except ValidationError as error:
        name, problem = first_problem(error)
        if name not in Options.model_fields:
            raise ValueError(
                f"expected options among {', '.join(Options.model_fields)}; got {name}"
            ) from None
        raise ValueError(f"{flag(name)} {problem}") from None


TOKENS_PER_STEP = 4e6
SEQUENCE = 4096
TOKENS_PER_PARAMETER = 20
"""Default budget: Hoffmann et al. 2022, arXiv:2203.15556."""
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
    """Build the request of these options. ValueError in one line, with what was expected."""
    assumptions: list[str] = []
    if (name := options.model) is None:
        raise ValueError("expected --model NAME or --model config.json")
    model = (
        read_model(Path(name)) if name.endswith(".json") or kind_of_path(name) else find_model(name)
    )
    hardware, gpus = _hardware(options)
    seq_len = options.sequence or SEQUENCE
    tokens = options.tokens_per_step or TOKENS_PER_STEP
    if options.tokens is None:
        assumptions.append(f"{TOKENS_PER_PARAMETER} tokens per parameter")
    global_batch = round_batch(tokens, seq_len, gpus)
    if global_batch * seq_len != tokens:
        assumptions.append(f"{global_batch} sequences per step, so that they divide")
    framework = options.framework or "generic"
    if framework not in (profiles := ("generic", *sorted(load_ground().frameworks))):
        raise ValueError(
            f"expected --framework among {', '.join(profiles)}; got {framework[:40]!r}"
        )
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
    budget = options.tokens or float(TOKENS_PER_PARAMETER * model.parameters)
    unspecified = frozenset({"sequence", "tokens_per_step"} - set(options.named()))
    advice_request = AdviceRequest(request, budget, assumptions, unspecified)
    return (
        advice_request
        if options.calibrate is None
        else _calibrate(advice_request, Path(options.calibrate))
    )


def _hardware(options: Options) -> tuple[Hardware, int]:
    """Return hardware and number of GPUs.

    ValueError for a precision or a reserve that the GPU does not have.
    """
    if options.gpu is None or options.gpus is None:
        raise ValueError("expected --gpu and --gpus: which GPUs, and how many")
    hardware = find_hardware(options.gpu).with_network(
        network_gbps=options.network_gbps, gpus_per_node=options.gpus_per_node
    )
    hardware.check_precision(options.precision or "bf16")
    if (options.memory_reserve or 0.0) >= hardware.memory_gib:
        raise ValueError(
            f"expected --memory-reserve below the {hardware.memory_gib:g} GiB of {hardware.name}"
        )
    return hardware, options.gpus


def _calibrate(advice_request: AdviceRequest, path: Path) -> AdviceRequest:
    """Return the request with a profile of the user's runs.

    A CSV as `labkit predict` takes it, with `step_s`.
    """
    request = advice_request.request
    runs, seconds = _read_runs(path)
    request = replace(
        request, constants=calibrate(runs, seconds, base=request.framework), framework=CALIBRATED
    )
    error = float(
        np.median(np.abs(predict_runs(as_calibrated(runs, request.constants)).step_s / seconds - 1))
    )
    return replace(
        advice_request, request=request, calibration_runs=len(runs), calibration_error=error
    )


def _read_runs(path: Path) -> tuple[list[Run], list[float]]:
    if str(path) != "-" and not path.is_file():
        raise ValueError(
            f"expected --calibrate to name a CSV of runs, and there is no file {str(path)[-80:]}"
        )
    runs = []
    seconds = []
    for row in read_rows(path):
        if row.run is None:
            raise ValueError(f"{path}, line {row.line}: {row.refusal}")
        if row.step_s is None:
            raise ValueError(
                f"{path}, line {row.line}: expected step_s above 0, the seconds per step"
            )
        runs.append(row.run)
        seconds.append(row.step_s)
    return runs, seconds
