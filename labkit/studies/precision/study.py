"""The precision lab: its parameters and the points it measures."""

from collections.abc import Hashable, Iterable, Sequence
from typing import Annotated, Any, Literal

import pandas as pd
from pydantic import Field

from labkit.costs.memory import peak_bytes, state_bytes
from labkit.costs.transformer import n_parameters
from labkit.lab import capacity
from labkit.lab.agreement import Known, step_times
from labkit.lab.config import Device, TimedConfig, TimeoutSeconds, one_of
from labkit.lab.rows import select
from labkit.lab.study import Study
from labkit.machine import Machine
from labkit.nn.transformer import SIZES, shape_named
from labkit.studies.precision.findings import QUESTIONS
from labkit.studies.precision.tables import PREDICTED
from labkit.studies.precision.worker import FULL, PrecisionPoint, measure_point

HEADROOM = 1.1  # over the formulas, which leave out what comes while something else goes

Size = Annotated[str, one_of(lambda: SIZES)]
Low = Literal["bfloat16", "float16"]
Pair = Annotated[list[Annotated[float, Field(allow_inf_nan=False)]], Field(min_length=2, max_length=2)]


class PrecisionConfig(TimedConfig):
    """What a reader may set."""

    device: Device = "auto"
    """auto: sums, norms and dtypes on every device there is, times on the GPU if there is one."""
    models: Annotated[list[Size], Field(min_length=1)]
    precisions: Annotated[list[Low], Field(min_length=1)] = ["bfloat16"]
    """Autocast dtypes that are timed against float32."""
    batch: Annotated[int, Field(ge=1, le=2**16)] = 4
    context_length: Annotated[int, Field(ge=1, le=2**20)] = 128
    term: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.01
    """What is added again and again."""
    additions: Annotated[int, Field(ge=2, le=10_000_000)] = 1000
    norm_inputs: Annotated[list[Pair], Field(min_length=1)] = [
        [0.0, 1.0],
        [0.0, 1e-4],
        [0.0, 300.0],
        [30.0, 1.0],
        [1000.0, 1.0],
    ]
    """[offset, scale] of the inputs of the layer norm."""
    timeout_s: TimeoutSeconds = 300.0


class PrecisionStudy(Study):
    """What 16-bit formats do to numbers, and what they save in time."""

    name = "precision"
    title = "Precision"
    summary = "What 16-bit formats do to sums, norms and dtypes, and what bf16 autocast saves by model size."
    questions = QUESTIONS
    profiles = {
        "smoke": PrecisionConfig(models=["nano"], batch=1, context_length=32, warmup=1, repeats=6),
        "quick": PrecisionConfig(models=["nano", "mini"], batch=2, context_length=64, warmup=1, rounds_s=5.0),
        "standard": PrecisionConfig(models=["nano", "mini", "small", "medium", "large"]),
        "paper": PrecisionConfig(
            models=["small", "medium", "large", "xl", "2.7B"], warmup=5, repeats=20, ratio_within=0.0, rounds_s=200.0
        ),
    }
    worker = staticmethod(measure_point)
    predicted = PREDICTED

    def points(self, config: PrecisionConfig, machine: Machine) -> Sequence[PrecisionPoint]:
        """Numbers on every device first, then models from small to large."""
        present = ["cpu", "cuda"] if machine.gpus else ["cpu"]
        devices = present if config.device == "auto" else [config.device]
        numbers = [point for device in devices for point in _number_points(config, device)]
        models = sorted(dict.fromkeys(config.models), key=list(SIZES).index)
        return [*numbers, *(_timed_point(config, devices[-1], model) for model in models)]

    def known(self, frame: pd.DataFrame) -> Iterable[Known]:
        rows = select(frame, ["seconds", "mode", "model", "alternative"], part="speed")
        yield step_times(rows.assign(part=rows["mode"], size=rows["model"], precision=rows["alternative"]), "AdamW")

    def skip_reason(self, point: PrecisionPoint, machine: Machine) -> str | None:
        return capacity.skip_reason(machine, point.device, needed_bytes(point) if point.part == "speed" else 0)

    def series(self, point: PrecisionPoint) -> tuple[Hashable, float] | None:
        if point.part != "speed":
            return None
        return (point.part, point.device), n_parameters(shape_named(point.model))


def _number_points(config: PrecisionConfig, device: str) -> list[PrecisionPoint]:
    """Fields that a part does not use keep their defaults, whatever the config says."""
    common: dict[str, Any] = {"device": device, "seed": config.seed, "timeout_s": config.timeout_s}
    points = [PrecisionPoint(part="accumulation", term=config.term, additions=config.additions, **common)]
    points += [PrecisionPoint(part="dtypes", precision=name, **common) for name in (FULL, "bfloat16", "float16")]
    points += [
        PrecisionPoint(part="norm", precision=name, offset=offset, scale=scale, **common)
        for name in ("bfloat16", "float16")
        for offset, scale in dict.fromkeys(map(tuple, config.norm_inputs))
    ]
    return points


def _timed_point(config: PrecisionConfig, device: str, model: str) -> PrecisionPoint:
    """The times of a model."""
    fields: dict[str, Any] = {"term": PrecisionPoint.term, "additions": PrecisionPoint.additions}
    fields["precisions"] = (FULL, *dict.fromkeys(config.precisions))
    return PrecisionPoint.of(config, part="speed", device=device, model=model, **fields)


def needed_bytes(point: PrecisionPoint) -> int:
    """Memory of a step without its optimizer, in the precision that needs most, by the formulas.

    What a forward pass leaves, and two sets of gradients: its own, and those that the check holds them against.
    """
    shape = shape_named(point.model)
    size, device = (shape, point.batch, point.context_length), point.device
    forward = max(
        peak_bytes(*size, phase="forward", precision=precision, device=device)
        for precision in (FULL, *point.precisions)
    )
    return round(HEADROOM * (forward + 2 * state_bytes(shape)["gradients"]))


STUDY = PrecisionStudy()
