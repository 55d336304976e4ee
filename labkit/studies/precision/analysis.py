"""From the frame of a precision run to the tables its answers and figures are made of. Units are in the names."""

import math
from functools import cache

import pandas as pd

from labkit.bench.statistics import compare_groups, summarize_groups
from labkit.costs.transformer import n_parameters
from labkit.lab.project import reference_directory
from labkit.nn.transformer import SIZES
from labkit.studies.precision.numerics import ACCUMULATIONS, NORM_STEPS
from labkit.studies.precision.worker import BOTH, FULL

SETTING = ["device", "mode", "model"]
VARIANTS = tuple(ACCUMULATIONS)
PRECISIONS = (FULL, "bfloat16", "float16")
MODELS = tuple(SIZES)
# Significant bits, the hidden one included; half a unit in the last place is 2^-bits of the value.
SIGNIFICANT_BITS = {"float32": 24, "float16": 11, "bfloat16": 8}


def part(frame: pd.DataFrame, name: str, *columns: str) -> pd.DataFrame:
    """The rows of one part of the lab that have all of `columns`; without any, an empty frame that has them."""
    if frame.empty or not {"part", *columns} <= set(frame.columns):
        return pd.DataFrame(columns=["part", "device", *columns])
    return frame[frame["part"] == name].dropna(subset=[name for name in columns if name not in NULLABLE])


# Columns that hold nothing where a value was not finite, or there is none because a precision failed.
NULLABLE = ("error", "own_error", "loss_error")


def accumulation(frame: pd.DataFrame) -> pd.DataFrame:
    """Sums so far, by (device, variant, additions), with the two sources of their error.

    `term_error` is what the term as stored would add up to, less the exact sum; `sum_error` is the rest, from
    rounding the sum; `relative_error` is both together over the exact sum.
    """
    table = part(frame, "accumulation", "variant", "additions", "sum", "exact_sum", "stored_sum")
    table = table.astype({"additions": int}).sort_values(["device", "variant", "additions"], ignore_index=True)
    term_error = table["stored_sum"] - table["exact_sum"]
    sum_error = table["sum"] - table["stored_sum"]
    relative = ((term_error + sum_error) / table["exact_sum"]).abs()
    return table.assign(term_error=term_error, sum_error=sum_error, relative_error=relative)


def accumulation_lines(frame: pd.DataFrame) -> pd.DataFrame:
    """The same for a figure, with `digits`, the decimal digits that are right; sums without any error are left out."""
    table = accumulation(frame)
    table = table[table["relative_error"] > 0]
    return table.assign(digits=[max(0.0, -math.log10(error)) for error in table["relative_error"]])


def final_sums(frame: pd.DataFrame) -> pd.DataFrame:
    """The last sum of each (device, variant), beside the published one where there is one."""
    table = accumulation(frame)
    last = table[table["additions"] == table.groupby(["device", "variant"])["additions"].transform("max")]
    order = {name: index for index, name in enumerate(VARIANTS)}
    last = last.sort_values(["device", "variant"], key=lambda column: column.map(order).fillna(0), ignore_index=True)
    columns = ["device", "variant", "additions", "sum", "exact_sum", "term_error", "sum_error"]
    return last[columns].assign(published=last["variant"].map(published_sums()))


def sums_shown(frame: pd.DataFrame) -> pd.DataFrame:
    """`final_sums` for a page, the sums with all the digits that matter."""
    table = final_sums(frame).drop(columns="exact_sum")
    return table.assign(sum=[f"{value:.8g}" for value in table["sum"]])


def dtypes(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a (device, model, autocast), one column a quantity."""
    table = part(frame, "dtypes", "model", "precision", "quantity", "observed")
    if table.empty:
        return pd.DataFrame(columns=["device", "model", "autocast"])
    wide = table.pivot_table(
        index=["device", "model", "precision"], columns="quantity", values="observed", aggfunc="first", sort=False
    )
    return wide.reset_index().rename(columns={"precision": "autocast"}).rename_axis(columns=None)


def norm(frame: pd.DataFrame) -> pd.DataFrame:
    """Steps of the layer norm with `inputs` in words and `digits`, how many decimal digits are right.

    An overflow leaves none; an exact result has as many as the dtype of its arithmetic (or output) holds.
    """
    table = part(frame, "norm", "precision", "arithmetic", "offset", "scale", "step", "error", "own_error")
    kept = [row["precision"] if row["step"] == "output" else row["arithmetic"] for row in table.to_dict("records")]
    digits = [correct_digits(error, dtype) for error, dtype in zip(table["error"], kept, strict=True)]
    inputs = [f"{offset:g} ± {scale:g}" for offset, scale in zip(table["offset"], table["scale"], strict=True)]
    return table.assign(inputs=inputs, digits=digits)


def norm_in_its_dtype(frame: pd.DataFrame) -> pd.DataFrame:
    """Steps whose arithmetic is in the dtype of the inputs, on the first device, in the order of the steps."""
    table = norm(frame)
    table = table[(table["arithmetic"] == table["precision"]) & (table["device"] == first_device(table))]
    return table.sort_values("step", key=lambda column: column.map(NORM_STEPS.index), kind="stable")


def norm_outputs(frame: pd.DataFrame) -> pd.DataFrame:
    """Digits of the output by inputs: arithmetic in the dtype itself, and in float32."""
    table = norm(frame)
    table = table[table["step"] == "output"]
    inside = [
        "in_float32" if a != p else "in_its_dtype" for a, p in zip(table.arithmetic, table.precision, strict=True)
    ]
    wide = table.assign(inside=inside).pivot_table(
        index=["device", "precision", "inputs"], columns="inside", values="digits", sort=False
    )
    wide = wide.reindex(columns=["in_its_dtype", "in_float32"])
    return wide.reset_index().rename_axis(columns=None)


def correct_digits(error: float | None, dtype: str) -> float:
    """-log10 of a relative error, between 0 and what the dtype holds; 0 where there is no finite result."""
    if error is None or math.isnan(error):
        return 0.0
    most = SIGNIFICANT_BITS[dtype] * math.log10(2)
    return min(most, max(0.0, -math.log10(error))) if error > 0 else most


def times(frame: pd.DataFrame) -> pd.DataFrame:
    """Median seconds with interval, one row a (device, mode, model, precision), in the order of the sizes."""
    table = part(frame, "speed", "mode", "model", "alternative", "seconds")
    table = summarize_groups(table, "seconds", [*SETTING, "alternative"]).rename(columns={"median": "seconds"})
    return _by_size(table)


def ratios(frame: pd.DataFrame) -> pd.DataFrame:
    """Time under autocast over that of float32 from the same interleaved repeats, with interval and verdict."""
    table = part(frame, "speed", "mode", "model", "alternative", "seconds")
    return _by_size(compare_groups(table, "seconds", SETTING, "alternative", FULL))


def predictions(frame: pd.DataFrame) -> pd.DataFrame:
    """What the matrix-product rates alone would give as a ratio of times, and the measured one."""
    table = part(frame, "rates", "alternative", "flops_per_s")
    rates = table.groupby(["device", "alternative"])["flops_per_s"].median()
    rows = [
        {name: row[name] for name in (*SETTING, "alternative")}
        | {
            "ratio": row["ratio"],
            "predicted_ratio": rates[row["device"], FULL] / rates[row["device"], row["alternative"]],
        }
        for row in ratios(frame).to_dict("records")
        if {(row["device"], FULL), (row["device"], row["alternative"])} <= set(rates.index)
    ]
    return pd.DataFrame(rows, columns=[*SETTING, "alternative", "ratio", "predicted_ratio"])


def rates(frame: pd.DataFrame) -> pd.DataFrame:
    """Rate of a large matrix product, TFLOP/s, by device and precision, with interval."""
    table = part(frame, "rates", "alternative", "flops_per_s")
    table = table.assign(tflop_per_s=table["flops_per_s"].astype(float) / 1e12)
    table = summarize_groups(table, "tflop_per_s", ["device", "alternative"])
    return table.rename(columns={"median": "tflop_per_s"})[["device", "alternative", "tflop_per_s", "low", "high"]]


def errors(frame: pd.DataFrame) -> pd.DataFrame:
    """How far loss and gradients of each precision are from those of float32, by model."""
    table = part(frame, "speed", "model", "alternative", "loss_error", "error", "gate")
    columns = ["device", "model", "alternative", "loss_error", "gradient_error", "gate"]
    found = table.rename(columns={"error": "gradient_error"})[columns].drop_duplicates()
    return found[found["alternative"] != FULL].reset_index(drop=True)


def first_device(table: pd.DataFrame) -> str:
    """The accelerator where both were measured."""
    return max(set(table["device"]), default="")


def _by_size(table: pd.DataFrame) -> pd.DataFrame:
    """Add the millions of parameters, and sort by them."""
    known = table[table["model"].isin(list(SIZES))]
    millions = [n_parameters(SIZES[model]) / 1e6 for model in known["model"]]
    table = known.assign(million_parameters=millions)
    return table.sort_values(["device", "mode", "million_parameters"], kind="stable", ignore_index=True)


@cache
def published_sums() -> dict[str, str]:
    """Published results of the accumulation, with the digits in which they were printed, by variant."""
    table = pd.read_csv(reference_directory() / "profile_kernels.csv", dtype=str).set_index("quantity")["value"]
    return {name: table[f"accumulate_{name}"] for name in VARIANTS if f"accumulate_{name}" in table}


def agrees_with(value: float, printed: str) -> bool:
    """Whether a value rounds to a printed number, within one unit of its last digit."""
    decimals = len(printed.partition(".")[2])
    return abs(value - float(printed)) <= 10.0**-decimals


@cache
def published_times() -> pd.DataFrame:
    """`mixed_precision.csv`: seconds of forward + backward by model and precision, on an H100."""
    table = pd.read_csv(reference_directory() / "mixed_precision.csv")
    names = {"fp32": "float32", "bf16": "bfloat16"}
    return table.assign(seconds=table["mean_ms"] / 1000, alternative=table["precision"].map(names), mode=BOTH)


@cache
def published_ratios() -> pd.DataFrame:
    """The same as ratios of bfloat16 over float32, by model."""
    wide = published_times().pivot(index="model", columns="alternative", values="seconds")
    table = (wide["bfloat16"] / wide["float32"]).rename("ratio").reset_index()
    return _by_size(table.assign(device="H100", mode=BOTH, alternative="bfloat16"))
