"""From the frame of an end-to-end run to the tables its findings and figures are made of. Units are in the names."""

from functools import cache
from typing import Any

import numpy as np
import pandas as pd

from labkit.bench.statistics import MIN_SAMPLES
from labkit.costs.calibration import Calibration
from labkit.costs.transformer import backward_flops, forward_flops
from labkit.lab.own_models import models_in, shape_of
from labkit.lab.predictions import Predicted, Row
from labkit.lab.project import reference_directory
from labkit.lab.rows import Measured, in_order, select, summed
from labkit.nn.transformer import SIZES
from labkit.studies.end_to_end.worker import PHASES, PHASES_OF_MODE, EndToEndPoint
from labkit.studies.shared.step_operators import UNCOUNTED, seconds_of, step_operators

MODEL = ("device", "precision", "size")
BOTH = "forward + backward"
SUMS = {BOTH: ("forward", "backward"), "step": ("forward", "backward", "optimizer")}
PHASE_ORDER = (*PHASES[:3], BOTH, *PHASES[3:], "step")
WARMUPS = (0, 1, 2, 5)
STEPS_AVERAGED = 10

STEPS = Measured(MODEL, "phase")
FIRST_STEPS = Measured(MODEL, "step_number")
MEANS = Measured(MODEL, "warmup")
COMPILED = Measured((*MODEL, "phase"), "implementation")


def by_size(table: pd.DataFrame) -> pd.DataFrame:
    """Rows from the smallest model to the largest."""
    return in_order(table, size=SIZES)


def phases(frame: pd.DataFrame) -> pd.DataFrame:
    """Median, mean and std by (model, phase) with interval; `SUMS` of phases are added up repeat by repeat.

    `spread_percent` is the standard deviation over the mean, with a bootstrap interval `spread_low`, `spread_high`.
    """
    parts = STEPS.samples(frame, sweep="phases")
    samples = pd.concat([parts, *(summed(parts, "phase", of, name, MODEL) for name, of in SUMS.items())])
    table = STEPS.medians(samples).rename(columns={"mean": "mean_s", "std": "std_s"})
    bounds = [
        _spread_interval(select(samples, **{name: row[name] for name in STEPS.columns})["seconds"].to_numpy())
        for row in table.to_dict("records")
    ]
    spread = pd.DataFrame(bounds, columns=["spread_low", "spread_high"], index=table.index, dtype=float)
    table = table.assign(spread_percent=100 * table["std_s"] / table["mean_s"]).join(spread)
    return in_order(table, size=SIZES, phase=PHASE_ORDER)


def step_parts(table: pd.DataFrame) -> pd.DataFrame:
    """From `phases`: forward, backward, optimizer and the step that they add up to; `model` is size and precision."""
    parts = select(table, phase=(*SUMS["step"], "step"))
    several = parts["precision"].nunique() > 1
    models = [
        f"{size}, {precision}" if several else size for size, precision in parts[["size", "precision"]].to_numpy()
    ]
    return parts.assign(model=models)


def _spread_interval(seconds: np.ndarray) -> tuple[float, float]:
    """95 % percentile bootstrap of std over mean, in percent; NaN where there are too few samples."""
    if len(seconds) < MIN_SAMPLES:
        return float("nan"), float("nan")
    resampled = seconds[np.random.default_rng(0).integers(0, len(seconds), (2000, len(seconds)))]
    low, high = np.percentile(100 * resampled.std(axis=1, ddof=1) / resampled.mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def predictions(frame: pd.DataFrame, calibration: Calibration | None) -> pd.DataFrame:
    """Times beside what the operators of each phase should take; `flops` of matrix products by formula.

    `mfu_percent`: those FLOPs per second over the data-sheet peak; NaN where no peak is known or the precision is not
    the peak's.
    """
    table = PREDICTED.beside(frame, calibration)
    known = select(frame, [*MODEL, "peak_flops_per_s"], sweep="phases").groupby(list(MODEL))["peak_flops_per_s"]
    table = table.merge(known.first().reset_index(), how="left", on=list(MODEL))
    rows = table[["size", "phase", "batch", "context_length"]].itertuples(index=False)
    with models_in(frame):
        flops = pd.Series([_flops(*row) for row in rows], dtype=float)
    peak = table["peak_flops_per_s"].astype(float).where(table["precision"] == "bfloat16")
    table = table.assign(flops=flops, mfu_percent=(100 * flops / table["seconds"] / peak).where(flops > 0))
    return table.drop(columns=["batch", "context_length", "peak_flops_per_s"])


def _flops(size: str, phase: str, batch: float, sequence: float) -> int:
    """Of the matrix products of a phase."""
    if phase in SUMS:
        return sum(_flops(size, part, batch, sequence) for part in SUMS[phase])
    if phase == "optimizer":
        return 0
    count, shape = backward_flops if phase == "backward" else forward_flops, shape_of(size)
    return sum(count(shape, int(batch), int(sequence)).values()) if shape else 0


def _expected_s(row: Row, calibration: Calibration) -> float | None:
    """What the operators of a phase, or of several, take by the machine's rates."""
    device, precision, size, batch, context_length, phase = (row[name] for name in PREDICTED.columns)
    if not calibration.knows(device) or (shape := shape_of(size)) is None:
        return None
    operators = step_operators(shape, int(batch), int(context_length), precision, device)
    return seconds_of(calibration, operators, SUMS.get(phase, (phase,)), device)


def _planned(point: EndToEndPoint) -> list[dict[str, Any]]:
    if point.sweep != "phases":
        return []
    phases_of_point = PHASES_OF_MODE[point.mode]
    names = [name for name in PHASE_ORDER if set(SUMS.get(name, (name,))) <= set(phases_of_point)]
    return [point.describe() | {"phase": name} for name in names]


def _with_sizes(frame: pd.DataFrame) -> pd.DataFrame:
    """`phases`, and the batch and context length that each model was timed with."""
    sizes = select(frame, [*MODEL, "batch", "context_length"], sweep="phases").groupby(list(MODEL))
    return phases(frame).merge(sizes[["batch", "context_length"]].first().reset_index(), on=list(MODEL))


PREDICTED = Predicted(
    (*MODEL, "batch", "context_length", "phase"),
    _expected_s,
    _planned,
    _with_sizes,
    names=("size", "phase"),
    leaves_out=UNCOUNTED,
)


def _of_processes(frame: pd.DataFrame) -> pd.DataFrame:
    """Steps of new processes: `step_number` from 1 within a process, which is the `repeat`."""
    rows = select(frame, [*MODEL, "trial", "repeat", "seconds"], sweep="warmup").dropna(subset="seconds")
    return rows.assign(step_number=rows["repeat"] + 1, repeat=rows["trial"])


def first_steps(frame: pd.DataFrame) -> pd.DataFrame:
    """Median seconds and interval of the n-th step of a process, `step_number` from 1, over the processes."""
    return by_size(FIRST_STEPS.medians(_of_processes(frame)))


def settled_steps(frame: pd.DataFrame) -> pd.DataFrame:
    """Steps of new processes after the most warm-up steps, as repeats of one point: that of the first process."""
    rows = select(frame, [*MODEL, "phase", "point", "trial", "repeat", "seconds"], sweep="warmup")
    rows = rows[rows["repeat"] >= max(WARMUPS)]
    first = rows.groupby(list(MODEL), dropna=False)["point"].transform("first")
    return rows.assign(point=first, repeat=rows["repeat"] + 1000 * rows["trial"])


def means(frame: pd.DataFrame) -> pd.DataFrame:
    """Mean and std of ten steps of each process (`repeat`) after 0, 1, 2 and 5 warm-up steps: `seconds`, `std_s`."""
    steps = _of_processes(frame)
    windows = [
        steps[steps["step_number"].between(warmup + 1, warmup + STEPS_AVERAGED)].assign(warmup=warmup)
        for warmup in WARMUPS
    ]
    groups = pd.concat(windows).groupby([*MODEL, "warmup", "repeat"])["seconds"]
    table = groups.agg(seconds="mean", std_s="std", steps="size").reset_index()
    return table[table["steps"] == STEPS_AVERAGED]


def mean_by_warmup(frame: pd.DataFrame) -> pd.DataFrame:
    """Those means with interval, and the std: each the median over processes, one row per (model, warm-up steps)."""
    samples = means(frame)
    spread = samples.groupby(MEANS.columns)["std_s"].median().reset_index()
    table = MEANS.medians(samples)[[*MEANS.columns, "seconds", "low", "high"]].merge(spread)
    return by_size(table.rename(columns={"seconds": "mean_s"}))


def later_over_first(frame: pd.DataFrame) -> pd.DataFrame:
    """Steps after the most warm-up steps over the first of the same process: one, and the mean of ten (`steps`).

    Of later ones that stand alone the median.
    """
    steps, most = _of_processes(frame), max(WARMUPS)
    later = steps[steps["step_number"] > most].groupby([*MODEL, "repeat"], as_index=False)["seconds"].median()
    alone = pd.concat([steps[steps["step_number"] == 1].assign(warmup=0), later.assign(warmup=most)])
    together = means(frame)[lambda table: table["warmup"].isin([0, most])]
    ratios = [
        MEANS.over(rows, 0).rename(columns={"warmup": "steps"}).assign(steps=count)
        for count, rows in ((1, alone), (STEPS_AVERAGED, together))
    ]
    return by_size(pd.concat(ratios, ignore_index=True))


def enough_warmup(frame: pd.DataFrame) -> int:
    """After how many warm-up steps no mean differs significantly from that after the most, in any model."""
    samples = means(frame)
    over_most = MEANS.over(samples, samples["warmup"].max())
    differing = over_most.loc[over_most["verdict"] != "no difference shown", "warmup"]
    return next(n for n in WARMUPS if not (differing >= n).any())


def compiled_against_eager(frame: pd.DataFrame) -> pd.DataFrame:
    """Time of the compiled model over eager's, by (model, phase): `ratio` with interval and verdict.

    With `eager_s`, `compiled_s` (medians), `compile_s`, and `worth_it_after`: calls after which the time for compiling
    is earned back (NaN where compiled is not faster).
    """
    keys = list(COMPILED.setting)
    ratios = COMPILED.over(frame, "eager", sweep="compile")
    medians = COMPILED.medians(frame, sweep="compile").pivot(index=keys, columns="implementation", values="seconds")
    medians = medians.reindex(columns=["eager", "compiled"]).set_axis(["eager_s", "compiled_s"], axis=1).reset_index()
    compiling = select(frame, [*keys, "compile_s"], sweep="compile").dropna(subset="compile_s")
    table = ratios.merge(medians).merge(compiling.groupby(keys, as_index=False)["compile_s"].first(), how="left")
    gain = table["eager_s"] - table["compiled_s"]
    return by_size(table.assign(worth_it_after=(table["compile_s"] / gain).where(table["verdict"] == "faster")))


@cache
def published_compile() -> pd.DataFrame:
    """`transformer_compile.csv` (H100) as (size, phase, ratio): compiled time over eager time."""
    table = pd.read_csv(reference_directory() / "transformer_compile.csv")
    pieces = [
        pd.DataFrame(
            {"size": table["model"], "phase": phase, "ratio": table[f"compiled_{name}_ms"] / table[f"eager_{name}_ms"]}
        )
        for phase, name in (("inference", "forward"), ("step", "step"))
    ]
    return by_size(pd.concat(pieces))
