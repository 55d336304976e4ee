"""The options of `labkit advise`, checked, and the request that they make."""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from labkit.advise.advice import round_batch
from labkit.lab.project import kind_of_path
from labkit.scaling import first_problem
from labkit.scaling.calibration import as_calibrated, calibrate
from labkit.scaling.constants import CALIBRATED, GENERIC, find_framework
from labkit.scaling.hardware import find_hardware
from labkit.scaling.models import find_model, read_model
from labkit.scaling.prediction import predict_runs
from labkit.scaling.runs import Precision, Recompute, Shard
from labkit.scaling.search import Request
from labkit.scaling.table import read_rows

_NUMBER = re.compile(r"([0-9]+(?:\.[0-9]*)?(?:e[0-9]{1,2})?)\s*([kmbgt]?)", re.ASCII)
_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


def parse_number(value: Any) -> Any:
    """Parse "4M", "15T" or "4,000,000"; other types stay. ValueError for other text."""
    if not isinstance(value, str):
        return value
    text = value.strip().lower().replace("_", "")
    # Only commas that group thousands: "3,5" is more likely a European 3.5 than 35.
    if re.fullmatch(r"[0-9]{1,3}(,[0-9]{3})+", text):
        text = text.replace(",", "")
    match = _NUMBER.fullmatch(text)
    if match is None:
        raise ValueError("should be a number such as 8, 4M or 15T")
    return float(match[1]) * _UNITS[match[2]]


Whole = Annotated[int, BeforeValidator(parse_number), Field(ge=1, le=10**7)]
Amount = Annotated[float, BeforeValidator(parse_number), Field(gt=0, le=1e18)]
Percent = Annotated[float, BeforeValidator(parse_number), Field(gt=0, le=100)]


class Options(BaseModel, extra="forbid", frozen=True):
    """Options, as `labkit advise --help` describes them; None if left out."""

    model: str | None = None
    gpus: Whole | None = None
    gpu: str | None = None
    gpus_per_node: Whole | None = None
    network_gbps: Amount | None = None
    measured_bus_bandwidth: Amount | None = None
    tokens_per_step: Amount | None = None
    sequence: Whole | None = None
    precision: Precision | None = None
    tokens: Amount | None = None
    framework: str | None = None
    calibrate: str | None = None
    tokens_per_second: Amount | None = None
    mfu: Percent | None = None
    tp: Whole | None = None
    pp: Whole | None = None
    vp: Whole | None = None
    cp: Whole | None = None
    dp: Whole | None = None
    shard: Shard | None = None
    micro_batch: Whole | None = None
    recompute: Recompute | None = None

    def named(self, *names: str) -> dict[str, Any]:
        """Options that are set, of these names or of all."""
        values = self.model_dump(exclude_none=True)
        return {name: values[name] for name in names or values if name in values}


def flag(name: str) -> str:
    """Return an option as the command line spells it."""
    return f"--{name.replace('_', '-')}"


def read_options(values: Mapping[str, Any]) -> Options:
    """Read options by name, as a command line has them. ValueError for the first wrong one."""
    try:
        return Options(**{name: value for name, value in values.items() if value is not None})
    except ValidationError as error:
        name, problem = first_problem(error)
        if name not in Options.model_fields:
            problem = f"is no option: expected options among {', '.join(Options.model_fields)}"
        raise ValueError(f"{flag(name)} {problem}") from None


TOKENS_PER_STEP = 4e6
SEQUENCE = 4096
# Default budget of tokens: compute-optimal by Hoffmann et al. 2022, arXiv:2203.15556.
TOKENS_PER_PARAMETER = 20
# Options that fix a field of the layout; those that are left out are searched.
LAYOUT = ("tp", "pp", "vp", "cp", "dp", "micro_batch", "shard", "recompute")


def make_request(options: Options) -> Request:
    """Build the request of these options. ValueError in one line, with what was expected."""
    name = options.model
    if name is None or options.gpu is None or options.gpus is None:
        raise ValueError("expected --model (a name or a config.json), --gpu and --gpus")
    # A path may be the folder of a downloaded model. A missing file is reported as missing, not as
    # an unknown model.
    is_path = name.endswith(".json") or kind_of_path(name) is not None
    model = read_model(Path(name)) if is_path else find_model(name)
    hardware = find_hardware(options.gpu).with_network(
        network_gbps=options.network_gbps,
        gpus_per_node=options.gpus_per_node,
        bus_gb_s=options.measured_bus_bandwidth,
    )
    precision = options.precision or "bf16"
    hardware.check_precision(precision)
    # Within a node the links count, which the GPU's data sheet declares.
    if options.measured_bus_bandwidth and options.gpus <= hardware.gpus_per_node:
        raise ValueError(
            "expected --measured-bus-bandwidth with several nodes: these GPUs share one"
        )
    seq_len = options.sequence or SEQUENCE
    tokens = options.tokens_per_step or TOKENS_PER_STEP
    request = Request(
        model=model,
        hardware=hardware,
        gpus=options.gpus,
        seq_len=seq_len,
        global_batch=round_batch(tokens, seq_len, options.gpus),
        precision=precision,
        framework=find_framework(options.framework or GENERIC),
        fixed=options.named(*LAYOUT),
        budget=options.tokens or float(TOKENS_PER_PARAMETER * model.parameters),
    )
    notes = []
    if request.tokens != tokens:
        notes.append(f"Assumed: {request.global_batch} sequences per step, which ranks can divide.")
    if options.framework and request.framework != options.framework.lower():
        notes.append(f"Assumed: {options.framework[:40]} is like {request.framework}.")
    if options.calibrate:
        request, note = _calibrated(request, Path(options.calibrate))
        notes.append(note)
    return replace(request, notes=notes)


def _calibrated(request: Request, path: Path) -> tuple[Request, str]:
    """Return the request with a profile of the user's runs, and how well it explains them."""
    runs = []
    seconds = []
    for row in read_rows(path):
        if row.run is None or row.step_s is None:
            problem = row.refusal or "expected step_s above 0, the seconds per step"
            raise ValueError(f"{path}, line {row.line}: {problem}")
        runs.append(row.run)
        seconds.append(row.step_s)
    constants = calibrate(runs, seconds, base=request.framework)
    # A bad profile of the very runs it is fitted to says that they differ.
    explained = predict_runs(as_calibrated(runs, constants)).step_s / seconds
    error = np.median(np.abs(explained - 1))
    return (
        replace(request, constants=constants, framework=CALIBRATED),
        f"Calibrated on {len(runs)} runs of yours, explained to {error:.1%}.",
    )
