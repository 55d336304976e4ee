"""From the frame of an end-to-end run to the tables its answers and figures are made of.

Every table is tidy and carries units in its names; `seconds` are those of one repeat or their median.
"""

from functools import cache

import numpy as np
import pandas as pd

from labkit.bench.statistics import FEWEST_SAMPLES, RESAMPLES, compare_groups, summarize_groups
from labkit.costs.transformer import ADAMW_STATES, backward_flops, forward_flops, n_parameters
from labkit.lab.project import reference_directory
from labkit.nn.transformer import SIZES
from labkit.studies.end_to_end.worker import PHASES

MODEL = ["device", "precision", "size"]
SIZE_ORDER = list(SIZES)
BOTH = "forward + backward"
PHASE_ORDER = [*PHASES[:3], BOTH, *PHASES[3:], "step"]
SUMS = {BOTH: ("forward", "backward"), "step": ("forward", "backward", "optimizer")}
PUBLISHED_PHASE = {"forward_backward": BOTH}
WARMUPS = (0, 1, 2, 5)
STEPS_AVERAGED = 10

# AdamW reads parameter, gradient and its states, and writes all but the gradient; float32.
ADAMW_BYTES = 4 * ((2 + ADAMW_STATES) + (1 + ADAMW_STATES))


def of_sweep(frame: pd.DataFrame, sweep: str, value: str = "seconds") -> pd.DataFrame:
    """Rows of one sweep that hold `value`; empty, with the columns there should be, if there are none."""
    if frame.empty or value not in frame or "sweep" not in frame:
        columns = [*MODEL, "phase", "implementation", "repeat", "trial", "batch", "context_length", value]
        return pd.DataFrame(columns=columns)
    return frame[frame["sweep"] == sweep].dropna(subset=value)


def by_size(table: pd.DataFrame) -> pd.DataFrame:
    """Rows from the smallest model to the largest."""
    return table.sort_values("size", key=lambda sizes: sizes.map(SIZE_ORDER.index), kind="stable", ignore_index=True)


def phases(frame: pd.DataFrame) -> pd.DataFrame:
    """Median, mean, std and interval by (model, phase); `SUMS` of phases are added up repeat by repeat.

    `spread_percent` is the standard deviation over the mean, with a bootstrap interval `spread_low`, `spread_high`.
    """
    rows = of_sweep(frame, "phases")
    pieces = [rows, *(_summed(rows, name, parts) for name, parts in SUMS.items())]
    samples = pd.concat([piece for piece in pieces if len(piece)] or [rows])
    table = summarize_groups(samples, "seconds", [*MODEL, "phase"])
    table = table.rename(columns={"median": "seconds", "mean": "mean_s", "std": "std_s"})
    table = table.assign(spread_percent=100 * table["std_s"] / table["mean_s"])
    by_phase = samples.groupby([*MODEL, "phase"])["seconds"]
    bounds = {key: _spread_interval(seconds.to_numpy()) for key, seconds in by_phase}
    keys = list(table[[*MODEL, "phase"]].itertuples(index=False, name=None))
    table = table.assign(spread_low=[bounds[key][0] for key in keys], spread_high=[bounds[key][1] for key in keys])
    return by_size(table.sort_values("phase", key=lambda names: names.map(PHASE_ORDER.index), kind="stable"))


def _summed(rows: pd.DataFrame, name: str, parts: tuple[str, ...]) -> pd.DataFrame:
    some = rows[rows["phase"].isin(parts)]
    complete = some.groupby([*MODEL, "repeat"]).filter(lambda group: len(group) == len(parts))
    return complete.groupby([*MODEL, "repeat"], as_index=False)["seconds"].sum().assign(phase=name)


def _spread_interval(seconds: np.ndarray) -> tuple[float, float]:
    """95 % percentile bootstrap of std over mean, in percent; NaN where there are too few samples."""
    if len(seconds) < FEWEST_SAMPLES:
        return float("nan"), float("nan")
    resampled = seconds[np.random.default_rng(0).integers(0, len(seconds), (RESAMPLES, len(seconds)))]
    low, high = np.percentile(100 * resampled.std(axis=1, ddof=1) / resampled.mean(axis=1), [2.5, 97.5])
    return float(low), float(high)


def rates(frame: pd.DataFrame) -> pd.DataFrame:
    """Median `matmul_flops_per_s` and `copy_bytes_per_s` by (device, precision), as far as measured."""
    rows = of_sweep(frame, "rates", "per_s")
    table = rows.groupby(["device", "precision", "rate"])["per_s"].median().unstack() if len(rows) else pd.DataFrame()
    columns = ["device", "precision", "matmul_flops_per_s", "copy_bytes_per_s"]
    named = table.rename(columns={"matmul": columns[2], "copy": columns[3]}).reset_index()
    return named.reindex(columns=columns)


def predictions(frame: pd.DataFrame) -> pd.DataFrame:
    """Seconds by FLOPs over the matmul rate (optimizer: bytes over the copy rate) beside the measured ones.

    Columns: model, phase, `flops`, `predicted_s`, `seconds`, `measured_over_predicted`, `mfu_percent` (model FLOPs a
    second over the data-sheet peak; NaN where no peak is known or the precision is not the peak's).
    """
    found = {(row["device"], row["precision"]): row for row in rates(frame).dropna().to_dict("records")}
    shapes = of_sweep(frame, "phases")
    rows = []
    for row in phases(frame).to_dict("records"):
        key = row["device"], row["precision"]
        if key not in found:
            continue
        first = shapes[(shapes[MODEL] == [row[name] for name in MODEL]).all(axis=1)].iloc[0]
        flops, n_bytes = _work(row["size"], row["phase"], int(first["batch"]), int(first["context_length"]))
        predicted_s = flops / found[key]["matmul_flops_per_s"] + n_bytes / found[key]["copy_bytes_per_s"]
        peak = first.get("peak_flops_per_s")
        has_peak = row["precision"] == "bfloat16" and peak is not None and not pd.isna(peak)
        mfu = 100 * flops / row["seconds"] / peak if has_peak and flops else np.nan
        kept = {name: row[name] for name in (*MODEL, "phase", "seconds")}
        rows.append(kept | {"flops": flops, "predicted_s": predicted_s, "mfu_percent": mfu})
    columns = [*MODEL, "phase", "seconds", "flops", "predicted_s", "mfu_percent"]
    table = pd.DataFrame(rows, columns=columns)
    return table.assign(measured_over_predicted=table["seconds"] / table["predicted_s"])


def _work(size: str, phase: str, batch: int, sequence: int) -> tuple[int, int]:
    """(FLOPs of matrix products, bytes of the optimizer's update) of one phase."""
    shape = SIZES[size]
    forward, backward = (sum(f(shape, batch, sequence).values()) for f in (forward_flops, backward_flops))
    update = ADAMW_BYTES * n_parameters(shape)
    return {
        "inference": (forward, 0),
        "forward": (forward, 0),
        "backward": (backward, 0),
        BOTH: (forward + backward, 0),
        "optimizer": (0, update),
        "step": (forward + backward, update),
    }[phase]


def first_steps(frame: pd.DataFrame) -> pd.DataFrame:
    """Median seconds and interval of the n-th step of a process, `step_number` from 1, over the processes."""
    rows = of_sweep(frame, "warmup")
    rows = rows.assign(step_number=rows["repeat"] + 1)
    table = summarize_groups(rows, "seconds", [*MODEL, "step_number"])
    return by_size(table.rename(columns={"median": "seconds"}))


def warmup_effect(frame: pd.DataFrame) -> pd.DataFrame:
    """Mean and std over ten steps after 0, 1, 2 and 5 warm-up steps: the median over processes, with interval.

    Columns: model, `warmup`, `mean_s` (low, high), `std_s`, and `over_steady`: the mean over that after the most
    warm-up steps, with `ratio_low`, `ratio_high` and `verdict`, compared within each process.
    """
    rows = of_sweep(frame, "warmup")
    found = []
    for key, steps in rows.groupby([*MODEL, "trial"]):
        seconds = steps.sort_values("repeat")["seconds"].to_numpy()
        for warmup in WARMUPS:
            window = seconds[warmup : warmup + STEPS_AVERAGED]
            if len(window) == STEPS_AVERAGED:
                about = dict(zip([*MODEL, "repeat"], key, strict=True))
                found.append(about | {"warmup": warmup, "mean_s": window.mean(), "std_s": window.std(ddof=1)})
    columns = [*MODEL, "repeat", "warmup", "mean_s", "std_s"]
    table = pd.DataFrame(found, columns=columns)
    if table.empty:
        return table.assign(over_steady=[], ratio_low=[], ratio_high=[], p=[], verdict=[])
    most = table["warmup"].max()
    means = summarize_groups(table, "mean_s", [*MODEL, "warmup"]).rename(columns={"median": "mean_s", "std": "between"})
    spreads = summarize_groups(table, "std_s", [*MODEL, "warmup"]).rename(columns={"median": "std_s"})
    named = table.assign(mean_s=table["mean_s"].astype(float)).sort_values("repeat")
    ratios = compare_groups(named, "mean_s", MODEL, "warmup", most)
    ratios = ratios.rename(columns={"ratio": "over_steady", "low": "ratio_low", "high": "ratio_high"})
    joined = means[[*MODEL, "warmup", "mean_s", "low", "high"]].merge(spreads[[*MODEL, "warmup", "std_s"]])
    return by_size(joined.merge(ratios, how="left"))


def compiled_against_eager(frame: pd.DataFrame) -> pd.DataFrame:
    """Time of the compiled model over eager's, by (model, phase): `ratio` with interval and verdict.

    With `eager_s`, `compiled_s` (medians), `compile_s`, and `worth_it_after`: calls after which the time for compiling
    is earned back (NaN where compiled is not faster).
    """
    rows = of_sweep(frame, "compile")
    ratios = compare_groups(rows, "seconds", [*MODEL, "phase"], "implementation", "eager")
    if ratios.empty:
        return ratios.assign(eager_s=[], compiled_s=[], compile_s=[], worth_it_after=[])
    medians = rows.groupby([*MODEL, "phase", "implementation"])["seconds"].median().unstack()
    medians = medians.rename(columns={"eager": "eager_s", "compiled": "compiled_s"}).reset_index()
    compile_s = rows.dropna(subset="compile_s").groupby([*MODEL, "phase"], as_index=False)["compile_s"].first()
    table = ratios.merge(medians).merge(compile_s, how="left")
    gain = table["eager_s"] - table["compiled_s"]
    return by_size(table.assign(worth_it_after=(table["compile_s"] / gain).where(table["verdict"] == "faster")))


@cache
def published_steps() -> pd.DataFrame:
    """`end_to_end.csv` (H100, host timer): size, phase, seconds."""
    table = pd.read_csv(reference_directory() / "end_to_end.csv")
    table = table[table["method"] != "nsys"]
    names = table["phase"].replace(PUBLISHED_PHASE)
    return by_size(
        pd.DataFrame(
            {
                "size": table["model"],
                "phase": names,
                "seconds": table["mean_ms"] / 1e3,
            }
        )
    )


@cache
def published_compile() -> pd.DataFrame:
    """`transformer_compile.csv` (H100) as (size, phase, ratio): compiled time over eager time."""
    table = pd.read_csv(reference_directory() / "transformer_compile.csv")
    rows = [
        {"size": row["model"], "phase": phase, "ratio": row[f"compiled_{name}_ms"] / row[f"eager_{name}_ms"]}
        for row in table.to_dict("records")
        for phase, name in (("inference", "forward"), ("step", "step"))
    ]
    return by_size(pd.DataFrame(rows))
