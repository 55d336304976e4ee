"""Frames for `notebooks/12_scaling.ipynb`: errors on held-out runs, a training taken apart, and break-even points."""

from collections.abc import Sequence

import numpy as np
import pandas as pd

from labkit.scaling import DATA
from labkit.scaling.advice import sums_s
from labkit.scaling.constants import Rows, load_constants
from labkit.scaling.hardware import find_hardware
from labkit.scaling.models import Numbers, find_model
from labkit.scaling.prediction import predict_runs
from labkit.scaling.published import load_published
from labkit.scaling.runs import Runs
from labkit.scaling.search import Request, rank
from labkit.scaling.step_time import BF16, group

PARTS = {
    "data": "data_parallel_s",
    "sharding": "gather_s",
    "tensor": "tensor_parallel_s",
    "context": "context_parallel_s",
    "pipeline": "bubble_s",
}
"""Kind of parallelism -> the part of a step that it costs."""


def held_out() -> pd.DataFrame:
    """Every timed published run that a fold leaves out, with its prediction by constants fitted to the others."""
    return judge(pd.read_csv(DATA / "cross_validated.csv"))


def judge(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of `cross_validated.csv` with their errors in percent, and whether the 90% interval holds the measured time.

    `distance` is from measured runs; `high_over_low` is the interval's width.
    """
    ratio = rows["predicted_s"] / rows["measured_s"]
    return rows.assign(
        predicted_over_measured=ratio,
        error_percent=100 * (ratio - 1).abs(),
        is_covered=rows["measured_s"].between(rows["low_s"], rows["high_s"]),
        high_over_low=rows["high_s"] / rows["low_s"],
    )


def summarize(rows: pd.DataFrame, *by: str) -> pd.DataFrame:
    """Count judged rows by these columns, with median error and coverage in percent, and median width and distance."""
    return rows.groupby(list(by), sort=False).agg(
        rows=("error_percent", "size"),
        median_error=("error_percent", "median"),
        error_of_nine_in_ten=("error_percent", lambda errors: errors.quantile(0.9)),
        covered=("is_covered", lambda covered: 100 * covered.mean()),
        high_over_low=("high_over_low", "median"),
        distance=("distance", "median"),
    )


def chosen_layouts() -> pd.DataFrame:
    """Return how far proposed layouts are behind the best measured one: mean percent over families, by table."""
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
    runs, predictions = published.runs, predict_runs(published.runs)
    ratios = compute_comm_ratio(runs, load_constants().rows(runs))
    tables = []
    for kind, part in PARTS.items():
        rows = np.flatnonzero(published.is_timed & np.isfinite(ratios[kind]))
        exposed = 100 * predictions.parts_s[part][rows] / predictions.step_s[rows]
        tables.append(pd.DataFrame({"kind": kind, "ratio": ratios[kind][rows], "exposed_percent": exposed}))
    return pd.concat(tables, ignore_index=True)


def compute_comm_ratio(runs: Runs, constants: Rows) -> dict[str, Numbers]:
    """Compute over communication (pipeline: busy over idle) by kind, (n,); nan in runs that do not use the kind.

    Below 1 a step is mostly communication, however well it overlaps; what hides communication or slows down a call is
    left out. Data: 3 T B / (g C) (the scaling book, "Training"). Sharding: t B / C, three half rings of 2 bytes per
    micro-batch (arXiv:1910.02054). Tensor: 3 P B / (8 h C) over tp - 1, four all-reduces of 2 h bytes per token
    (arXiv:1909.08053). Context: 7 S q B / (12 k C) over cp - 1, keys and values twice and their gradients, behind
    attention (arXiv:2310.01889). Pipeline: m vp over pp - 1 (arXiv:2104.04473).

    Legend: C FLOP/s that matmuls reach, B bytes/s around a group's ring, T tokens per replica and step, t per
    micro-batch and rank; P parameters of a layer, h hidden, q query width, k key width, S sequence, m micro-batches,
    g bytes per gradient.
    """
    n, fp8 = runs.dp * runs.cp, np.where(runs.precision == "fp8", runs.fp8_ratio * constants["fp8_efficiency"], 1.0)
    peak = runs.peak_tflops * 1e12 * runs.clock_share
    rate = peak * constants["gemm_efficiency"] * fp8
    replicas, tensor = group(runs, constants, n, runs.tp), group(runs, constants, runs.tp, 1)
    context = group(runs, constants, runs.cp, runs.tp)
    gathers = np.isin(runs.shard, ("zero3", "hsdp"))
    per_step = 3 * runs.micro_batches * runs.tokens / constants["gradient_bytes"]
    others = np.maximum(n - 1, 1) / n
    layer = 6 * runs.layer_parameters / (8 * BF16 * runs.hidden)
    attention = 7 * runs.seq_len * runs.query_width / (6 * BF16 * runs.kv_width)
    attention_rate = peak * constants["attention_efficiency"]
    ratios = {
        "data": (per_step * replicas.bytes_per_s / rate / others, (n > 1) & ~gathers),
        "sharding": (runs.tokens * replicas.bytes_per_s / rate / others, (n > 1) & gathers),
        "tensor": (layer * tensor.bytes_per_s / rate / np.maximum(runs.tp - 1, 1), runs.tp > 1),
        "context": (attention * context.bytes_per_s / attention_rate / np.maximum(runs.cp - 1, 1), runs.cp > 1),
        "pipeline": (runs.micro_batches * runs.vp / np.maximum(runs.pp - 1, 1), runs.pp > 1),
    }
    return {name: np.where(used, values, np.nan) for name, (values, used) in ratios.items()}
