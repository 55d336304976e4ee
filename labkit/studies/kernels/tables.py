"""From the frame of a kernels run to the tables its findings and figures are made of. Units are in the names.

Two modes are profiled, inference and a full step; what is called "forward" and "forward and backward" are the first
phases of the step. A share is an operator's or family's own time over that of everything in the same pass.
"""

import base64
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from labkit.bench.kernel_names import FAMILIES
from labkit.bench.operators import OperatorCall
from labkit.bench.trace import read_events
from labkit.costs.calibration import Calibration
from labkit.costs.transformer import forward_flops, softmax_flops
from labkit.lab.made_once import made_once
from labkit.lab.own_models import models_in, shape_of
from labkit.lab.predictions import Predicted, Row
from labkit.lab.project import reference_directory, relative_to_project
from labkit.lab.rows import Measured, in_order, select
from labkit.nn.training import PHASES
from labkit.nn.transformer import SIZES
from labkit.studies.kernels.traces import decode_trace, longest
from labkit.studies.kernels.worker import INFERENCE, OTHERS, STEP, KernelsPoint
from labkit.studies.shared.step_operators import step_operators

FORWARD, BOTH = "forward", "forward and backward"
# What is looked at: the profiled mode it comes from, and the phases of that.
VIEWS = {
    INFERENCE: (INFERENCE, PHASES[:1]),
    FORWARD: (STEP, PHASES[:1]),
    BOTH: (STEP, PHASES[:2]),
    STEP: (STEP, (*PHASES, "")),
}
SETTING = ("device", "model", "mode")
ATTENTION = ("matrix products", "scale and mask", "softmax")
CLOCK, EVENTS = "clock", "sum over events"
MEASURES = {"clock_s": CLOCK, "profiled_s": "clock, profiler on", "events_s": EVENTS}
TIMELINE_EVENTS = 1500
# Families below this share of every bar are drawn as "other".
LEAST_DRAWN_PERCENT = 1
MOST_OPERATORS = 5  # of a pass, in a table

CLOCKS = Measured(SETTING, "measure")
SHARES = Measured(SETTING, "family", "share_percent")
OPERATORS = Measured(SETTING, "operator", "self_s")
PARTS = Measured(SETTING, "part")
MODES = Measured(("device", "model"), "mode", "share_percent")


def _sorted(table: pd.DataFrame, **orders: Iterable[str]) -> pd.DataFrame:
    """Models from small to large, modes as in `VIEWS`, then as given."""
    return in_order(table, device=None, model=SIZES, mode=VIEWS, **orders)


@made_once
def passes(frame: pd.DataFrame) -> pd.DataFrame:
    """Own seconds and calls of each operator in each pass, by view (column `mode`).

    What the optimizer's range holds is of the family "optimizer", whatever operator it is, but for dispatch.
    """
    columns = [
        *SETTING,
        "batch",
        "context_length",
        "repeat",
        "phase",
        "within",
        "family",
        "operator",
        "self_s",
        "calls",
    ]
    rows = select(frame, columns, record="operator")
    is_update = (rows["phase"] == PHASES[2]) & (rows["family"] != "dispatch")
    rows = rows.assign(family=rows["family"].mask(is_update, "optimizer"))
    views = [select(rows, mode=mode, phase=phases).assign(mode=view) for view, (mode, phases) in VIEWS.items()]
    return pd.concat(views, ignore_index=True)


@made_once
def family_samples(frame: pd.DataFrame) -> pd.DataFrame:
    """`share_percent` of each family in each pass; 0 where a pass has none of it."""
    table, keys = passes(frame), [*SETTING, "repeat"]
    wide = table.pivot_table(index=keys, columns="family", values="self_s", aggfunc="sum", fill_value=0.0)
    if wide.empty:
        return pd.DataFrame(columns=[*keys, "family", "share_percent"])
    total = wide.sum(axis=1)
    shares = 100 * wide[total > 0].div(total[total > 0], axis=0)
    return shares.rename_axis(columns="family").stack().rename("share_percent").reset_index()


def shares(frame: pd.DataFrame) -> pd.DataFrame:
    """Share of each family, one row per (device, model, mode, family), with interval."""
    return _sorted(SHARES.medians(family_samples(frame)), family=FAMILIES)


def drawn_shares(frame: pd.DataFrame) -> pd.DataFrame:
    """Mean shares, which add up to 100 %, for a stacked figure; families small in every bar are "other"."""
    table = shares(frame)
    is_small = table.groupby("family")["mean"].transform("max") < LEAST_DRAWN_PERCENT
    table = table.assign(family=table["family"].mask(is_small, "other"), share_percent=table["mean"])
    return _sorted(table.groupby([*SETTING, "family"], as_index=False)["share_percent"].sum(), family=FAMILIES)


def families_of(table: pd.DataFrame) -> list[str]:
    """The families that a table has, in their order, so that figures keep their colors apart."""
    return [family for family in FAMILIES if family in set(table["family"])]


def step_against_inference(frame: pd.DataFrame) -> pd.DataFrame:
    """Share of matrix products in a full step over that in inference, from passes that took turns."""
    samples = select(family_samples(frame), mode=[INFERENCE, STEP], family="matmul")
    positive = samples[samples.groupby(["device", "model"])["share_percent"].transform("min") > 0]
    return _sorted(MODES.over(positive, INFERENCE))


def operators(frame: pd.DataFrame) -> pd.DataFrame:
    """Own seconds of each operator with interval, calls per pass and share, the largest of each (model, mode) first."""
    table = passes(frame)
    named = table[(table["family"] != "dispatch") & (table["operator"] != OTHERS)]
    by = OPERATORS.columns
    sums = named.groupby([*by, "repeat"]).agg(self_s=("self_s", "sum"), calls=("calls", "sum")).reset_index()
    facts = sums.groupby(by)[["calls"]].median().join(named.groupby(by)[["family"]].first()).reset_index()
    totals = table.groupby([*SETTING, "repeat"])["self_s"].sum().groupby(list(SETTING)).median().rename("total_s")
    found = OPERATORS.medians(sums).merge(facts).merge(totals.reset_index())
    found = found.assign(share_percent=100 * found["self_s"] / found["total_s"])
    return _sorted(found.sort_values("self_s", ascending=False))


def top_operators(frame: pd.DataFrame) -> pd.DataFrame:
    """The largest few of forward and of forward and backward, for a table."""
    table = select(operators(frame), mode=[FORWARD, BOTH]).groupby(list(SETTING), sort=False).head(MOST_OPERATORS)
    columns = [*SETTING, "operator", "family", "calls", "share_percent", "self_s", "low", "high"]
    return table[columns].astype({"calls": int}).reset_index(drop=True)


def _clock_samples(frame: pd.DataFrame) -> pd.DataFrame:
    columns = [*SETTING, "repeat", *MEASURES]
    table = select(frame, columns, record="clock").dropna(subset=list(MEASURES))[columns]
    long = table.melt([*SETTING, "repeat"], list(MEASURES), "measure", "seconds")
    return long.assign(measure=long["measure"].map(MEASURES), seconds=long["seconds"].astype(float))


def clocks(frame: pd.DataFrame) -> pd.DataFrame:
    """Seconds of a pass by the clock, by the clock with the profiler on, and of all recorded events, with intervals."""
    return _sorted(CLOCKS.medians(_clock_samples(frame)), measure=MEASURES.values())


def against_clock(frame: pd.DataFrame) -> pd.DataFrame:
    """The time with the profiler on, and the sum over events, over the time by the clock alone, from turns.

    Columns besides: median seconds of each (`clock_s`, ...), and `recorded` events.
    """
    values = [*MEASURES, "host_s", "recorded"]
    facts = (
        select(frame, [*SETTING, *values], record="clock").dropna(subset=values).astype(dict.fromkeys(values, float))
    )
    medians = facts.groupby(list(SETTING))[values].median().reset_index()
    return _sorted(CLOCKS.over(_clock_samples(frame), CLOCK).merge(medians))


def attention_samples(frame: pd.DataFrame) -> pd.DataFrame:
    """Seconds of each part of attention in each forward pass; `part` as in `ATTENTION`, matrix products by family."""
    table = select(passes(frame), mode=[INFERENCE, FORWARD])
    table = table[table["within"] != ""]
    part = pd.Series("scale and mask", index=table.index, dtype=object)
    is_product = (table["family"] == "matmul") | (table["within"] == "values")
    part = part.mask(is_product, "matrix products").mask(table["within"] == "softmax", "softmax")
    return table.assign(part=part).groupby([*PARTS.columns, "repeat"])["self_s"].sum().rename("seconds").reset_index()


def attention_parts(frame: pd.DataFrame) -> pd.DataFrame:
    """Seconds of each part of attention, with interval, by model and mode."""
    return _sorted(PARTS.medians(attention_samples(frame)), part=ATTENTION)


def against_products(frame: pd.DataFrame) -> pd.DataFrame:
    """Time of the other parts over that of attention's two matrix products, and `flop_ratio`, of the softmax."""
    samples = attention_samples(frame)
    table = PARTS.over(samples[samples["seconds"] > 0], "matrix products")
    sizes = select(frame, ["model", "batch", "context_length"], record="operator").groupby("model").first()
    with models_in(frame):
        ratios = {
            model: _flop_ratio(str(model), int(row["batch"]), int(row["context_length"]))
            for model, row in sizes.iterrows()
        }
    is_softmax = table["part"] == "softmax"
    return _sorted(table.assign(flop_ratio=table["model"].map(ratios).where(is_softmax)), part=ATTENTION)


def softmax_over_scores(frame: pd.DataFrame) -> pd.DataFrame:
    """Time of the softmax over that of the product of queries and keys, in inference."""
    table = select(passes(frame), mode=INFERENCE)
    parts = [select(table, within="softmax").assign(part="softmax")]
    parts.append(select(table, within="scores", family="matmul").assign(part="scores"))
    samples = pd.concat(parts).groupby([*PARTS.columns, "repeat"])["self_s"].sum().rename("seconds").reset_index()
    return _sorted(PARTS.over(samples[samples["seconds"] > 0], "scores"))


def _flop_ratio(model: str, batch: int, context: int) -> float:
    """Operations of the softmax over those of the two products around it; NaN of a model that is not known."""
    if (shape := shape_of(model)) is None:
        return float("nan")
    forward = forward_flops(shape, batch, context)
    return softmax_flops(shape, batch, context) / (forward["scores"] + forward["values"])


def predictions(frame: pd.DataFrame, calibration: Calibration | None) -> pd.DataFrame:
    """Time of all matrix products as profiled, and what they should take by the machine's calibration; `gflop`."""
    table = PREDICTED.beside(frame, calibration)
    with models_in(frame):
        flops = [sum(one.flops for one in _products(row)) for row in table.to_dict("records")]
    return _sorted(table.assign(gflop=[n / 1e9 for n in flops]).drop(columns=["batch", "context_length"]))


def _products(row: Row) -> list[OperatorCall]:
    """The matrix products of a view: those of a step are its forward's and its backward's."""
    if (shape := shape_of(row["model"])) is None:
        return []
    operators = step_operators(shape, int(row["batch"]), int(row["context_length"]), device=row["device"])
    parts = {"inference": ("inference",), "forward": ("forward",)}.get(row["mode"], ("forward", "backward"))
    return [one for part in parts for one in operators[part] if one.flops]


def _expected_s(row: Row, calibration: Calibration) -> float | None:
    device = row["device"]
    products = _products(row)
    return calibration.operators_s(products, device=device) if products and calibration.knows(device) else None


def _planned(point: KernelsPoint) -> list[dict[str, Any]]:
    return [point.describe() | {"mode": view} for view in VIEWS]


def _product_times(frame: pd.DataFrame) -> pd.DataFrame:
    of_one = select(passes(frame), family="matmul").groupby([*PRODUCTS.columns, "repeat"])["self_s"].sum()
    return _sorted(PRODUCTS.medians(of_one.reset_index()))


PRODUCTS = Measured(("device", "model", "batch", "context_length"), "mode", "self_s")
PREDICTED = Predicted(tuple(PRODUCTS.columns), _expected_s, _planned, _product_times, "self_s", names=("model", "mode"))


def _traces(frame: pd.DataFrame) -> pd.DataFrame:
    return select(frame, ["model", "trace"], record="trace").dropna(subset="trace")


def timeline(frame: pd.DataFrame) -> pd.DataFrame:
    """The longest events of the step whose trace the run carries: start_s, duration_s, family, phase."""
    events = [event for text in _traces(frame)["trace"].head(1) for event in read_events(decode_trace(text))]
    rows = [
        (e.start_s, e.duration_s, e.family, e.within(PHASES) or "none", e.name)
        for e in longest(events, TIMELINE_EVENTS)
    ]
    columns = ["start_s", "duration_s", "family", "phase", "operator"]
    return pd.DataFrame(rows, columns=columns).sort_values("start_s", ignore_index=True)


def save_trace(frame: pd.DataFrame, directory: Path) -> pd.DataFrame:
    """Write the trace that the run carries as `<model>-step.trace.json.gz`; a table that names file and size."""
    rows = []
    for row in _traces(frame).to_dict("records"):
        path = directory / f"{row['model']}-step.trace.json.gz"
        directory.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(row["trace"]))
        rows.append({"model": row["model"], "file": relative_to_project(path), "n_bytes": path.stat().st_size})
    return pd.DataFrame(rows, columns=["model", "file", "n_bytes"])


def nsight_note(frame: pd.DataFrame) -> str:
    """How to see the same ranges in Nsight Systems, where a GPU was measured that has it; Markdown."""
    table = select(frame, [*SETTING, "nsys"], record="clock", device="cuda")
    if table.empty:
        return "Nsight Systems (`nsys`) shows what a GPU does; this run used none. Nothing on this page needs it."
    if not table["nsys"].astype(bool).any():
        return "Nsight Systems (`nsys`) is not on this machine. Nothing on this page needs it."
    row = table.iloc[0]
    sizes = f"'{row['model']}', batch={row['batch']:.0f}, context_length={row['context_length']:.0f}"
    call = f"from labkit.studies.kernels.worker import run_with_nvtx; run_with_nvtx({sizes})"
    command = f'nsys profile --trace=cuda,nvtx --output=kernels python -c "{call}"'
    return f"Nsight Systems is on this machine. The same ranges, as NVTX:\n\n```sh\n{command}\n```"


@cache
def published() -> dict[str, float]:
    """`profile_kernels.csv`: percent, or microseconds, by quantity; an H100."""
    table = pd.read_csv(reference_directory() / "profile_kernels.csv")
    return dict(zip(table["quantity"], table["value"].astype(float), strict=True))


def published_shares() -> pd.DataFrame:
    """The published shares in percent, as far as they were published."""
    given = published()
    rows = [
        (FORWARD, "matmul", given["matmul_share_forward_only"]),
        (FORWARD, "elementwise", given["elementwise_share_of_forward"]),
        (FORWARD, "reduction", given["reduce_share_of_forward"]),
        (STEP, "matmul", given["matmul_share_full_step"]),
    ]
    return pd.DataFrame(rows, columns=["mode", "family", "share_percent"])
