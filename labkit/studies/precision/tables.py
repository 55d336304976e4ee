"""From the frame of a precision run to the tables its findings and figures are made of. Units are in the names."""

import math
from functools import cache
from typing import Any

import pandas as pd

from labkit.costs.calibration import Calibration
from labkit.costs.transformer import n_parameters
from labkit.lab.predictions import Predicted, Row
from labkit.lab.project import reference_directory
from labkit.lab.rows import Measured, in_order, select
from labkit.nn.transformer import SIZES
from labkit.studies.precision.dtypes import QUANTITIES
from labkit.studies.precision.numerics import ACCUMULATIONS, NORM_STEPS
from labkit.studies.precision.worker import BOTH, FULL, MODES, PrecisionPoint
from labkit.studies.shared.step_operators import BACKWARD, FORWARD, UNCOUNTED, seconds_of, step_operators

PRECISIONS = (FULL, "bfloat16", "float16")
# Significant bits, the hidden one included; half a unit in the last place is 2^-bits of the value.
SIGNIFICANT_BITS = {"float32": 24, "float16": 11, "bfloat16": 8}
MOSTLY = 0.5  # of the values: from here on a step counts as one that underflows

SPEED = Measured(("device", "mode", "model"), "alternative")


def accumulation(frame: pd.DataFrame) -> pd.DataFrame:
    """Sums so far, by (device, variant, additions), with the two sources of their error.

    `term_error` is what the term as stored would add up to, less the exact sum; `sum_error` is the rest, from
    rounding the sum; `relative_error` is both together over the exact sum.
    """
    columns = ["device", "variant", "additions", "sum", "exact_sum", "stored_sum"]
    table = select(frame, columns, part="accumulation")[columns].astype({"additions": int})
    table = table.assign(
        term_error=table["stored_sum"] - table["exact_sum"],
        sum_error=table["sum"] - table["stored_sum"],
        relative_error=((table["sum"] - table["exact_sum"]) / table["exact_sum"]).abs(),
    )
    return in_order(table, device=None, variant=ACCUMULATIONS, additions=None)


def accumulation_lines(frame: pd.DataFrame) -> pd.DataFrame:
    """The same for a figure, with `digits`, the decimal digits that are right; sums without any error are left out."""
    table = accumulation(frame)
    table = table[table["relative_error"] > 0]
    return table.assign(digits=[max(0.0, -math.log10(error)) for error in table["relative_error"]])


def final_sums(frame: pd.DataFrame) -> pd.DataFrame:
    """The last sum of each (device, variant), since how many additions it stands still, and the published one."""
    table = accumulation(frame)
    last = table.groupby(["device", "variant"], sort=False).tail(1)
    unchanged = table.merge(last[["device", "variant", "sum"]]).groupby(["device", "variant"])["additions"].min()
    last = last.merge(unchanged.rename("still_since").reset_index())
    still = last["still_since"].where(last["still_since"] < last["additions"])
    return last.assign(still_since=still, published=last["variant"].map(published_sums()))


def dtypes(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per (device, model, autocast), one column per quantity."""
    table = select(frame, ["device", "model", "precision", "quantity", "observed"], part="dtypes")
    keys = ["device", "model", "precision"]
    wide = table.pivot_table(index=keys, columns="quantity", values="observed", aggfunc="first", sort=False)
    known = [name for name in QUANTITIES if name in wide]
    return wide[known].reset_index().rename(columns={"precision": "autocast"}).rename_axis(columns=None)


def norm(frame: pd.DataFrame) -> pd.DataFrame:
    """Steps of the layer norm in their order, with `inputs` in words and `digits`, how many decimal digits are right.

    An overflow leaves none; an exact result has as many as the dtype of its arithmetic (or output) holds.
    """
    columns = ["device", "precision", "arithmetic", "offset", "scale", "step", "error"]
    columns += ["own_error", "overflowed", "underflowed"]
    table = select(frame, columns, part="norm")[columns]
    kept = table["precision"].where(table["step"] == "output", table["arithmetic"])
    inputs = [f"{offset:g} ± {scale:g}" for offset, scale in zip(table["offset"], table["scale"], strict=True)]
    table = table.assign(
        inputs=pd.Series(inputs, table.index, dtype=object),
        digits=[correct_digits(error, dtype) for error, dtype in zip(table["error"], kept, strict=True)],
    )
    return table.sort_values("step", key=lambda column: column.map(NORM_STEPS.index), kind="stable")


def norm_in_its_dtype(frame: pd.DataFrame) -> pd.DataFrame:
    """Steps whose arithmetic is in the dtype of the inputs, on the first device."""
    table = norm(frame)
    return table[(table["arithmetic"] == table["precision"]) & (table["device"] == first_device(table))]


def norm_by_inputs(frame: pd.DataFrame) -> pd.DataFrame:
    """What becomes of each kind of inputs in 16-bit arithmetic, and how many digits of the output float32 would save.

    The steps that overflow first, that underflow first for most values, and that cost most digits where nothing
    overflows (`digits_before`, `digits_after`; `is_exact`: the step itself only uncovers earlier rounding). Digits of
    the output in the dtype itself, and with float32 inside.
    """
    keys = ["device", "precision", "inputs"]
    table = norm(frame)
    outputs = table[table["step"] == "output"]
    own = outputs["arithmetic"] == outputs["precision"]
    digits = [
        rows[[*keys, "digits"]].rename(columns={"digits": name})
        for name, rows in (("output_digits", outputs[own]), ("with_float32_digits", outputs[~own]))
    ]
    rows = [
        dict(zip(keys, key, strict=True)) | _what_happens(steps)
        for key, steps in table[table["arithmetic"] == table["precision"]].groupby(keys, sort=False)
    ]
    names = ["overflows", "underflows", "most_lost", "digits_before", "digits_after", "is_exact"]
    return pd.DataFrame(rows, columns=[*keys, *names]).merge(digits[0]).merge(digits[1], how="left")


def _what_happens(steps: pd.DataFrame) -> dict[str, Any]:
    over = steps.loc[steps["overflowed"] > 0, "step"]
    under = steps.loc[steps["underflowed"] > MOSTLY, "step"]
    found = {"overflows": next(iter(over), None), "underflows": next(iter(under), None)}
    lost = steps["digits"].shift() - steps["digits"]
    if len(over) or not (lost > 0).any():
        return found
    row = steps.loc[lost.idxmax()]
    return found | {
        "most_lost": row["step"],
        "digits_before": row["digits"] + lost[lost.idxmax()],
        "digits_after": row["digits"],
        "is_exact": bool(row["own_error"] == 0),
    }


def correct_digits(error: float | None, dtype: str) -> float:
    """-log10 of a relative error, between 0 and what the dtype holds; 0 where there is no finite result."""
    if error is None or math.isnan(error):
        return 0.0
    most = SIGNIFICANT_BITS[dtype] * math.log10(2)
    return min(most, max(0.0, -math.log10(error))) if error > 0 else most


def times(frame: pd.DataFrame) -> pd.DataFrame:
    """Median seconds with interval, one row per (device, mode, model, precision), in the order of the sizes."""
    return _by_size(SPEED.medians(frame, part="speed"))


def ratios(frame: pd.DataFrame, calibration: Calibration | None = None) -> pd.DataFrame:
    """Time under autocast over that of float32 from the same rounds, with interval and verdict.

    Besides: `predicted_ratio`, of what the operators of both should take by the machine's calibration, and
    `million_parameters`.
    """
    table, keys = SPEED.over(frame, FULL, part="speed"), list(SPEED.columns)
    expected = PREDICTED.beside(frame, calibration)[[*keys, "predicted_s"]]
    full = select(expected, alternative=FULL).drop(columns="alternative")
    both = expected.merge(full, on=list(SPEED.setting), suffixes=("", "_full"))
    both = both.assign(predicted_ratio=both["predicted_s"] / both["predicted_s_full"])
    return _by_size(table.merge(both[[*keys, "predicted_ratio"]], how="left", on=keys))


def _expected_s(row: Row, calibration: Calibration) -> float | None:
    """Forward, or forward and backward: what their operators take, casts among them."""
    if not calibration.knows(row["device"]):
        return None
    size = (SIZES[row["model"]], int(row["batch"]), int(row["context_length"]))
    operators = step_operators(*size, row["alternative"], row["device"])
    parts = (FORWARD, BACKWARD) if row["mode"] == BOTH else (FORWARD,)
    return seconds_of(calibration, operators, parts, row["device"])


def _planned(point: PrecisionPoint) -> list[dict[str, Any]]:
    if point.part != "speed":
        return []
    return [point.describe() | {"mode": mode, "alternative": name} for mode in MODES for name in point.precisions]


SIZED = Measured(("device", "model", "batch", "context_length", "mode"), "alternative")
PREDICTED = Predicted(
    tuple(SIZED.columns),
    _expected_s,
    _planned,
    lambda frame: _by_size(SIZED.medians(frame, part="speed")),
    names=("model", "mode", "alternative"),
    leaves_out=UNCOUNTED,
)


def errors(frame: pd.DataFrame) -> pd.DataFrame:
    """How far loss and gradients of each precision are from those of float32, by model."""
    columns = ["device", "model", "alternative", "loss_error", "error", "check"]
    found = select(frame, columns, part="speed")[columns].drop_duplicates().rename(columns={"error": "gradient_error"})
    return found[found["alternative"] != FULL].reset_index(drop=True)


def first_device(table: pd.DataFrame) -> str:
    """The accelerator where both were measured."""
    return max(set(table["device"]), default="")


def _by_size(table: pd.DataFrame) -> pd.DataFrame:
    """From small to large models, with their millions of parameters."""
    known = table[table["model"].isin(list(SIZES))]
    millions = [n_parameters(SIZES[model]) / 1e6 for model in known["model"]]
    return in_order(known.assign(million_parameters=millions), device=None, mode=None, model=SIZES)


@cache
def published_sums() -> dict[str, str]:
    """Published results of the accumulation, with the digits in which they were printed, by variant.

    Not that of fp32: its 10.0 is what was expected, and no result.
    """
    table = pd.read_csv(reference_directory() / "profile_kernels.csv", dtype=str).set_index("quantity")["value"]
    return {
        name: table[f"accumulate_{name}"] for name in ACCUMULATIONS if name != "fp32" and f"accumulate_{name}" in table
    }


def agrees_with(value: float, printed: str) -> bool:
    """Whether a value rounds to a printed number, within one unit of its last digit."""
    decimals = len(printed.partition(".")[2])
    return abs(value - float(printed)) <= 10.0**-decimals


@cache
def published_ratios() -> pd.DataFrame:
    """`mixed_precision.csv`: time of forward and backward in bfloat16 over float32, by model; an H100."""
    table = pd.read_csv(reference_directory() / "mixed_precision.csv")
    wide = table.pivot(index="model", columns="precision", values="mean_ms")
    ratio = (wide["bf16"] / wide["fp32"]).rename("ratio").reset_index()
    return _by_size(ratio.assign(device="H100", mode=BOTH, alternative="bfloat16"))
