"""Frames of how wrong the predictor is, and of a training taken apart, for `notebooks/12_scaling.ipynb`."""

import numpy as np
import pandas as pd

from labkit.scaling.advice import Request, sums_s
from labkit.scaling.break_even import KINDS, compute_comm_ratio
from labkit.scaling.choices import choices
from labkit.scaling.constants import load_constants
from labkit.scaling.folds import FOLDS
from labkit.scaling.hardware import find_hardware
from labkit.scaling.named_models import find_model
from labkit.scaling.prediction import predict_runs
from labkit.scaling.published import arrangement, load_held_out, load_published


def held_out(fold: str = "beyond_64") -> pd.DataFrame:
    """Every timed published run that a fold leaves out, with its prediction; `fold` is a name in `FOLDS`."""
    published, found = load_published(), load_held_out(fold)
    runs = published.runs
    rows = np.flatnonzero(published.is_timed & np.isfinite(found.step_s))
    measured, predicted = published.step_s[rows], found.step_s[rows]
    low, high = found.low_90[rows], found.high_90[rows]
    return pd.DataFrame(
        {
            "table": published.group[rows],
            "row": published.key[rows],
            "model": published.model[rows],
            "gpu": published.gpu[rows],
            "gpus": runs.gpus[rows].astype(int),
            "layout": [arrangement(runs, int(row)) for row in rows],
            "measured_s": measured,
            "predicted_s": predicted,
            "low_s": low,
            "high_s": high,
            "predicted_over_measured": predicted / measured,
            "error_percent": 100 * np.abs(predicted / measured - 1),
            "is_covered": (low <= measured) & (measured <= high),
            "distance": found.distance[rows],
            "high_over_low": high / low,
        }
    )


def scoreboard() -> pd.DataFrame:
    """Rows, median and 90th percentile of the error and coverage in percent, by fold and published table."""
    boards = []
    for fold in FOLDS:
        rows = held_out(fold.name).groupby("table")
        board = rows["error_percent"].agg(["size", "median", lambda errors: errors.quantile(0.9)])
        board.columns = pd.Index(["rows", "median_percent", "ninety_percent"])
        board["covered_percent"] = 100 * rows["is_covered"].mean()
        boards.append(board.reset_index().assign(fold=fold.title))
    return pd.concat(boards, ignore_index=True)


def widths_by_distance() -> pd.DataFrame:
    """Width of the interval (high over low) against the distance from measured runs, over all folds."""
    rows = pd.concat([held_out(fold.name).assign(fold=fold.title) for fold in FOLDS], ignore_index=True)
    return rows[["fold", "table", "distance", "high_over_low", "error_percent", "is_covered"]]


def training(
    model: str, gpu: str, gpus: list[int], *, sequence: int = 8192, tokens_per_step: int = 2**24
) -> pd.DataFrame:
    """GPU-hours per billion tokens by part, on the best layout for each number of GPUs; parts add up to the step."""
    rows = []
    for count in gpus:
        batch = max(tokens_per_step // sequence, 1)
        request = Request(find_model(model), find_hardware(gpu), count, sequence, batch)
        ranking = request.ranking()
        if not ranking.order:
            continue
        best = ranking.candidate(ranking.order[0])
        hours = count / 3600 * 1e9 / request.tokens
        for part, seconds in sums_s(best).items():
            rows.append({"gpus": count, "part": part, "gpu_hours": hours * seconds, "mfu_percent": 100 * best.mfu})
    return pd.DataFrame(rows)


def exposed_by_ratio() -> pd.DataFrame:
    """The exposed share of a step in percent against compute over communication, by kind of parallelism."""
    published = load_published()
    runs = published.runs
    found = predict_runs(runs)
    ratios = compute_comm_ratio(runs, load_constants().rows(runs))
    tables = []
    for kind in KINDS:
        rows = np.flatnonzero(published.is_timed & np.isfinite(ratios[kind.name]))
        exposed = 100 * found.parts_s[kind.part][rows] / found.step_s[rows]
        tables.append(pd.DataFrame({"kind": kind.name, "ratio": ratios[kind.name][rows], "exposed_percent": exposed}))
    return pd.concat(tables, ignore_index=True)


def layouts_behind() -> pd.DataFrame:
    """How far proposals are behind the best measured layout, in percent, as a mean over families by table."""
    rows = [
        {
            "table": choice.group,
            "first": 100 * choice.behind[0],
            "best of three": 100 * choice.best_behind,
            "smallest that fits": 100 * choice.behind_simple,
        }
        for choice in choices()
    ]
    return pd.DataFrame(rows).replace(np.inf, np.nan).groupby("table").mean().reset_index()
