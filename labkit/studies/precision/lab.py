"""Precision: what 16-bit formats do to sums and dtypes, and what autocast to bfloat16 saves by
model size."""

from collections.abc import Iterator
from functools import partial
from typing import Annotated, Literal

import numpy as np
import pandas as pd
from pydantic import Field

from labkit.costs.transformer import SIZES
from labkit.lab.answers import Compare, Report
from labkit.lab.config import Count, Device, DeviceConfig, Seconds, Some, one_of
from labkit.lab.declaration import Lab
from labkit.lab.figures import Lines
from labkit.lab.metric import Metric, Results
from labkit.machine.description import Machine
from labkit.studies.precision.worker import (
    ACCUMULATION,
    DTYPES,
    FULL,
    SPEED,
    PrecisionPoint,
    measure,
)


class PrecisionConfig(DeviceConfig):
    models: Some[Annotated[str, one_of(lambda: SIZES)]] = ["nano", "mini"]
    precisions: Some[Literal["bfloat16", "float16"]] = ["bfloat16"]
    """Autocast dtypes that are timed against float32."""
    batch: Count = 2
    context_length: Count = 64
    term: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 0.01
    """The number that is added repeatedly."""
    additions: Annotated[int, Field(ge=2, le=10_000_000)] = 1000
    device: Device = "auto"
    """auto: sums and dtypes on every device, times on the GPU if there is one."""
    rounds_s: Seconds | None = 2.0


CONFIGURATION = ("device", "model", "batch", "context_length", "mode")
TIME = Metric("seconds", "precision", CONFIGURATION, where={"part": SPEED})
NAMES = {FULL: "float32", "bfloat16": "autocast to bfloat16", "float16": "autocast to float16"}


def points(config: PrecisionConfig, machine: Machine) -> Iterator[PrecisionPoint]:
    """Plan sums and dtypes on every device first, then timed models from small to large."""
    devices: list[str] = [config.device]
    if config.device == "auto":
        devices = ["cpu", "cuda"] if machine.gpus else ["cpu"]
    for device in devices:
        # Not `PrecisionPoint.of`: nothing is timed here, so rounds and sizes make no difference.
        point = partial(PrecisionPoint, device=device, seed=config.seed, timeout_s=config.timeout_s)
        yield point(part=ACCUMULATION, term=config.term, additions=config.additions)
        for precision in (FULL, "bfloat16", "float16"):
            yield point(part=DTYPES, precision=precision)
    precisions = (FULL, *config.precisions)
    for model in sorted(config.models, key=list(SIZES).index):
        yield PrecisionPoint.of(
            config, part=SPEED, device=devices[-1], model=model, precisions=precisions
        )


def sums(results: Results) -> pd.DataFrame:
    """Return running sums by variant, with the errors of storing the term and of adding."""
    table = results.rows(
        ["device", "variant", "n_added", "sum", "exact_sum", "stored_sum"], part=ACCUMULATION
    ).dropna()
    error = ((table["sum"] - table["exact_sum"]) / table["exact_sum"]).abs().astype(float)
    # A sum without an error has no number of digits, and no place on the axis.
    digits = np.log10(error.where(error > 0).clip(upper=1.0)).abs()
    return table.assign(
        term_error=table["stored_sum"] - table["exact_sum"],
        sum_error=table["sum"] - table["stored_sum"],
        correct_digits=digits,
    )


def final_sums(results: Results) -> pd.DataFrame:
    """Return the last sum of each variant."""
    # Rows come in the order of additions.
    return sums(results).groupby(["device", "variant"], sort=False).tail(1)


def dtypes(results: Results) -> pd.DataFrame:
    """Return one row per device, model and autocast dtype, one column per quantity."""
    keys = ["device", "model", "precision"]
    table = results.rows([*keys, "quantity", "observed"], part=DTYPES)
    # "first": words have no mean, and there is one per cell.
    wide = table.pivot_table(
        index=keys, columns="quantity", values="observed", aggfunc="first", sort=False
    )
    return wide.reset_index().rename(columns={"precision": "autocast"}).rename_axis(columns=None)


LAB = Lab(
    name="precision",
    title="Precision",
    summary=(
        "What 16-bit formats do to sums and dtypes, and what autocast to bfloat16 saves by model"
        " size."
    ),
    config=PrecisionConfig,
    # As in data/reference/mixed_precision.csv.
    paper={
        "models": ["small", "medium", "large", "xl", "2.7B"],
        "batch": 4,
        "context_length": 128,
        "warmup": 5,
        "repeats": 20,
    },
    on_gpu={"models": ["small", "medium", "large"], "batch": 4, "context_length": 512},
    worker=measure,
    points=points,
    model_parameters=("models",),
    alternatives=("precision",),
    names=NAMES,
    questions=[
        Compare(
            id="autocast_speed",
            text="How much time does autocast save, by model size, without the optimizer?",
            metric=TIME,
            baseline=FULL,
            topic="precision",
            advice="To save time, train under {name}{where}.",
            figure=Lines(x="model", hue="mode", log="y"),
        ),
        Report(
            id="accumulation",
            text="How far is a sum of many small numbers from the exact one, by dtype?",
            table=final_sums,
            pick=lambda table: table["correct_digits"].idxmin(),
            configuration=("device",),
            says="In {variant} the sum of {n_added} terms ends at {sum} instead of {exact_sum}.",
            figure=Lines(
                source=sums, x="n_added", y="correct_digits", hue="variant", panel="device", log="x"
            ),
        ),
        Report(
            id="dtypes",
            text="Which dtype does each part of a model have under autocast?",
            table=dtypes,
            # On the GPU if there is one, which comes last; none if bfloat16 was left out.
            pick=lambda table: max(table.index[table["autocast"] == "bfloat16"], default=None),
            configuration=("device", "model"),
            says=(
                "Under autocast to bfloat16 the logits are {logits}; parameters and gradients stay"
                " {parameters}."
            ),
        ),
    ],
)
