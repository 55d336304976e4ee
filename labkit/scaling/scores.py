"""Frames for `notebooks/12_scaling.ipynb`: errors on held-out runs, and a training taken apart."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from labkit.scaling.advice import sums_s
from labkit.scaling.break_even import KINDS, compute_comm_ratio
from labkit.scaling.constants import load_constants
from labkit.scaling.hardware import find_hardware
from labkit.scaling.named_models import find_model
from labkit.scaling.prediction import predict_runs
from labkit.scaling.published import load_published
from labkit.scaling.search import Request, rank
from labkit.scaling.tables import DATA


def held_out() -> pd.DataFrame:
    """Every timed published run that a fold leaves out, with its prediction by constants fitted to the others.

    Errors are in percent; `distance` is from measured runs; `is_covered` says whether the 90% interval holds it.
    """
    rows = pd.read_csv(DATA / "cross_validated.csv")
    ratio = rows["predicted_s"] / rows["measured_s"]
    return rows.assign(
        predicted_over_measured=ratio,
        error_percent=100 * (ratio - 1).abs(),
        is_covered=rows["measured_s"].between(rows["low_s"], rows["high_s"]),
        high_over_low=rows["high_s"] / rows["low_s"],
    )


def chosen_layouts() -> pd.DataFrame:
    """How far proposed layouts are behind the best measured one, in percent, as a mean over families by table."""
    return pd.read_csv(DATA / "chosen_layouts.csv")


def training(
    model: str, gpu: str, gpus: Sequence[int], *, sequence: int = 8192, tokens_per_step: int = 2**24
) -> pd.DataFrame:
    """GPU-hours per billion tokens by part, on the best layout for each number of GPUs; parts add up to the step."""
    rows = []
    for count in gpus:
        batch = max(tokens_per_step // sequence, 1)
        request = Request(find_model(model), find_hardware(gpu), count, sequence, batch)
        best = rank(request).first()
        hours = count / 3600 * 1e9 / request.tokens
        rows += [{"gpus": count, "part": part, "gpu_hours": hours * value} for part, value in sums_s(best).items()]
    return pd.DataFrame(rows)


def exposed_by_ratio() -> pd.DataFrame:
    """The exposed share of a published step in percent against compute over communication, by kind of parallelism."""
    published = load_published()
    runs, found = published.runs, predict_runs(published.runs)
    ratios = compute_comm_ratio(runs, load_constants().rows(runs))
    tables = []
    for kind in KINDS:
        rows = np.flatnonzero(published.is_timed & np.isfinite(ratios[kind.name]))
        exposed = 100 * found.parts_s[kind.part][rows] / found.step_s[rows]
        tables.append(pd.DataFrame({"kind": kind.name, "ratio": ratios[kind.name][rows], "exposed_percent": exposed}))
    return pd.concat(tables, ignore_index=True)
