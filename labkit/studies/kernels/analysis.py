"""From the frame of a kernels run to the tables its answers and figures are made of. Units are in the names.

Two modes are profiled, inference and a full step; what is called "forward" and "forward and backward" are the first
phases of the step. A share is an operator's or family's own time over that of everything in the same pass.
"""

import base64
from functools import cache
from pathlib import Path

import pandas as pd

from labkit.bench.statistics import compare_groups, summarize_groups
from labkit.bench.trace import FAMILIES, decode_trace, longest, read_events
from labkit.costs.transformer import BACKWARD_OVER_FORWARD, forward_flops, n_parameters, softmax_flops
from labkit.lab.project import reference_directory, relative_to_project
from labkit.nn.training import PHASES
from labkit.nn.transformer import SIZES
from labkit.studies.kernels.worker import INFERENCE, OTHERS, STEP

FORWARD, BOTH = "forward", "forward and backward"
# What is looked at: the profiled mode it comes from, and the phases of that.
VIEWS = {
    INFERENCE: (INFERENCE, PHASES[:1]),
    FORWARD: (STEP, PHASES[:1]),
    BOTH: (STEP, PHASES[:2]),
    STEP: (STEP, (*PHASES, "")),
}
SETTING = ["device", "model", "mode"]
ATTENTION = ("matrix products", "scale and mask", "softmax")
MEASURES = {"clock_s": "clock", "profiled_s": "clock, profiler on", "events_s": "sum over events"}
TIMELINE_EVENTS = 1500
# Families below this share of every bar are drawn as "other".
LEAST_DRAWN = 0.01


def records(frame: pd.DataFrame, kind: str, *columns: str) -> pd.DataFrame:
    """The rows of one kind that have all of `columns`; without any, an empty frame that has them."""
    if frame.empty or not {"record", *columns} <= set(frame.columns):
        return pd.DataFrame(columns=["record", "repeat", "batch", "context_length", *SETTING, *columns])
    return frame[frame["record"] == kind].dropna(subset=list(columns))


def passes(frame: pd.DataFrame) -> pd.DataFrame:
    """Own seconds and calls of each operator in each pass, by view (column `mode`).

    What the optimizer's range holds is of the family "optimizer", whatever operator it is, but for dispatch.
    """
    rows = records(frame, "operator", "phase", "within", "family", "operator", "self_s", "calls")
    is_update = (rows["phase"] == PHASES[2]) & (rows["family"] != "dispatch")
    rows = rows.assign(family=rows["family"].mask(is_update, "optimizer"))
    views = [
        rows[(rows["mode"] == mode) & rows["phase"].isin(phases)].assign(mode=view)
        for view, (mode, phases) in VIEWS.items()
    ]
    return pd.concat(views, ignore_index=True)


def shares(frame: pd.DataFrame) -> pd.DataFrame:
    """Share of each family, one row a (device, model, mode, family), with interval; 0 where a pass has none of it."""
    table = summarize_groups(family_samples(frame), "share", [*SETTING, "family"])
    return _in_order(table.rename(columns={"median": "share"}), "family", FAMILIES)


def family_samples(frame: pd.DataFrame) -> pd.DataFrame:
    """The share of each family in each pass."""
    table = passes(frame)
    keys = [*SETTING, "repeat"]
    wide = table.pivot_table(index=keys, columns="family", values="self_s", aggfunc="sum", fill_value=0.0)
    if wide.empty:
        return pd.DataFrame(columns=[*keys, "family", "share"])
    total = wide.sum(axis=1)
    long = wide[total > 0].div(total[total > 0], axis=0).rename_axis(columns="family")
    return long.stack().rename("share").reset_index()


def drawn_shares(frame: pd.DataFrame) -> pd.DataFrame:
    """Mean shares in percent, which add up to 100, for a stacked figure; families small in every bar are "other"."""
    table = shares(frame).drop(columns="share").rename(columns={"mean": "share"})[[*SETTING, "family", "share"]]
    largest = table.groupby("family")["share"].transform("max")
    table = table.assign(family=table["family"].mask(largest < LEAST_DRAWN, "other"))
    table = table.groupby([*SETTING, "family"], sort=False)["share"].sum().reset_index()
    return _in_order(table.assign(share_percent=table["share"] * 100), "family", FAMILIES)


def matmul_shares(frame: pd.DataFrame) -> pd.DataFrame:
    """Share of matrix products in percent, with interval, by model and mode."""
    table = shares(frame)
    table = table[table["family"] == "matmul"].rename(columns={"share": "share_percent"})
    return table.assign(**{name: table[name] * 100 for name in ("share_percent", "low", "high")})


def families_of(table: pd.DataFrame) -> list[str]:
    """The families that a table has, in their order, so that figures keep their colors apart."""
    return [family for family in FAMILIES if family in set(table["family"])]


def operators(frame: pd.DataFrame) -> pd.DataFrame:
    """Own seconds of each operator with interval, calls a pass and share, the largest of each (model, mode) first."""
    table = passes(frame)
    table = table[(table["family"] != "dispatch") & (table["operator"] != OTHERS)]
    by = [*SETTING, "operator"]
    sums = table.groupby([*by, "repeat"])[["self_s", "calls"]].sum().reset_index()
    found = summarize_groups(sums, "self_s", by).rename(columns={"median": "self_s"})
    found["calls"] = sums.groupby(by)["calls"].median().reindex(pd.MultiIndex.from_frame(found[by])).to_numpy()
    found["family"] = table.groupby(by)["family"].first().reindex(pd.MultiIndex.from_frame(found[by])).to_numpy()
    totals = passes(frame).groupby([*SETTING, "repeat"])["self_s"].sum().groupby(SETTING).median()
    total = totals.reindex(pd.MultiIndex.from_frame(found[SETTING])).to_numpy()
    found = found.assign(share_percent=100 * found["self_s"] / total)
    return _in_order(found.sort_values("self_s", ascending=False), "mode", tuple(VIEWS))


def top_operators(frame: pd.DataFrame, most: int = 5) -> pd.DataFrame:
    """The largest few of forward and of forward and backward, for a table."""
    table = operators(frame)
    table = table[table["mode"].isin([FORWARD, BOTH])].groupby(SETTING, sort=False).head(most)
    columns = ["model", "mode", "operator", "family", "calls", "self_s", "share_percent"]
    return table[columns].astype({"calls": int})


def clocks(frame: pd.DataFrame) -> pd.DataFrame:
    """Seconds of a pass by the clock, by the clock with the profiler on, and of all recorded events, with intervals."""
    table = records(frame, "clock", "clock_s", "profiled_s", "events_s")
    long = table.melt([*SETTING, "repeat"], list(MEASURES), "measure", "seconds")
    long = long.assign(measure=long["measure"].map(MEASURES), seconds=long["seconds"].astype(float))
    found = summarize_groups(long, "seconds", [*SETTING, "measure"]).rename(columns={"median": "seconds"})
    return _in_order(found, "measure", tuple(MEASURES.values()))


def against_clock(frame: pd.DataFrame) -> pd.DataFrame:
    """The time with the profiler on, and the sum over events, over the time by the clock alone, from turns.

    Columns besides: `measure` ("profiled_s", "events_s"), median seconds of each (`clock_s`, ...), `recorded` events.
    """
    table = records(frame, "clock", "clock_s", "profiled_s", "events_s", "host_s", "recorded")
    values = ["clock_s", "profiled_s", "events_s", "host_s", "recorded"]
    long = table.melt([*SETTING, "repeat"], values[:3], "measure", "seconds").astype({"seconds": float})
    ratios = compare_groups(long, "seconds", SETTING, "measure", "clock_s")
    medians = table.astype(dict.fromkeys(values, float)).groupby(SETTING)[values].median().reset_index()
    return _in_order(ratios.merge(medians, on=SETTING), "mode", tuple(VIEWS))


def step_against_inference(frame: pd.DataFrame) -> pd.DataFrame:
    """Share of matrix products in a full step over that in inference, from passes that took turns."""
    samples = family_samples(frame)
    samples = samples[samples["mode"].isin([INFERENCE, STEP]) & (samples["family"] == "matmul")]
    positive = samples[samples.groupby(["device", "model"])["share"].transform("min") > 0]
    return _in_order(compare_groups(positive, "share", ["device", "model"], "mode", INFERENCE), "mode", (STEP,))


def attention_samples(frame: pd.DataFrame) -> pd.DataFrame:
    """Seconds of each part of attention in each forward pass; `part` as in `ATTENTION`, matrix products by family."""
    table = passes(frame)
    table = table[table["mode"].isin([INFERENCE, FORWARD]) & (table["within"] != "")]
    part = pd.Series("scale and mask", index=table.index, dtype=object)
    is_product = (table["family"] == "matmul") | (table["within"] == "values")
    part = part.mask(is_product, "matrix products").mask(table["within"] == "softmax", "softmax")
    keys = [*SETTING, "repeat", "part"]
    return table.assign(part=part).groupby(keys)["self_s"].sum().rename("seconds").reset_index()


def attention_parts(frame: pd.DataFrame) -> pd.DataFrame:
    """Seconds of each part of attention, with interval, by model and mode."""
    table = summarize_groups(attention_samples(frame), "seconds", [*SETTING, "part"])
    return _in_order(table.rename(columns={"median": "seconds"}), "part", ATTENTION)


def softmax_against_products(frame: pd.DataFrame) -> pd.DataFrame:
    """Time of the softmax over that of the two matrix products of attention, beside the ratio of their operations."""
    samples = attention_samples(frame)
    positive = samples[samples["seconds"] > 0]
    table = compare_groups(positive, "seconds", SETTING, "part", "matrix products")
    sizes = frame.dropna(subset="model").groupby("model")[["batch", "context_length"]].first() if len(table) else None
    flops = []
    for model in table["model"]:
        batch, context = sizes.loc[model].astype(int) if sizes is not None else (1, 1)
        forward = forward_flops(SIZES[model], batch, context)
        flops.append(softmax_flops(SIZES[model], batch, context) / (forward["scores"] + forward["values"]))
    return _in_order(table[table["part"].isin(ATTENTION)].assign(flop_ratio=flops), "part", ATTENTION)


def predictions(frame: pd.DataFrame) -> pd.DataFrame:
    """Time of all matrix products: predicted from their FLOPs and the rate of a large one, and as profiled."""
    rates = records(frame, "rate", "flops_per_s").groupby("device")["flops_per_s"].median()
    table = passes(frame)
    table = table[table["family"] == "matmul"]
    sums = table.groupby([*SETTING, "batch", "context_length", "repeat"])["self_s"].sum().reset_index()
    rows = []
    for (device, model, mode, batch, context), group in sums.groupby([*SETTING, "batch", "context_length"]):
        if device in rates.index:
            passes_worth = 1 if mode in (INFERENCE, FORWARD) else 1 + BACKWARD_OVER_FORWARD
            flops = passes_worth * sum(forward_flops(SIZES[model], int(batch), int(context)).values())
            names = {"device": device, "model": model, "mode": mode}
            rows.append(
                names
                | {"gflop": flops / 1e9, "predicted_s": flops / rates[device], "profiled_s": group["self_s"].median()}
            )
    found = pd.DataFrame(rows, columns=[*SETTING, "gflop", "predicted_s", "profiled_s"])
    found = found.assign(profiled_over_predicted=found["profiled_s"] / found["predicted_s"])
    return _in_order(found, "mode", tuple(VIEWS))


def timeline(frame: pd.DataFrame) -> pd.DataFrame:
    """The longest events of the step whose trace the run carries: start_s, duration_s, family, phase."""
    table = records(frame, "trace", "trace")
    columns = ["start_s", "duration_s", "family", "phase", "operator"]
    if table.empty:
        return pd.DataFrame(columns=columns)
    events = longest(read_events(decode_trace(table["trace"].iloc[0])), TIMELINE_EVENTS)
    rows = [(e.start_s, e.duration_s, e.family, e.within(PHASES) or "none", e.name) for e in events]
    return pd.DataFrame(rows, columns=columns).sort_values("start_s", ignore_index=True)


def save_trace(frame: pd.DataFrame, directory: Path) -> pd.DataFrame:
    """Write the trace that the run carries as `<model>-step.trace.json.gz`; a table that names file and size."""
    rows = []
    for row in records(frame, "trace", "trace").to_dict("records"):
        path = directory / f"{row['model']}-step.trace.json.gz"
        directory.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(row["trace"]))
        rows.append({"model": row["model"], "file": relative_to_project(path), "n_bytes": path.stat().st_size})
    return pd.DataFrame(rows, columns=["model", "file", "n_bytes"])


def nsight_note(frame: pd.DataFrame) -> str:
    """How to see the same ranges in Nsight Systems, where a GPU was measured that has it; Markdown."""
    table = records(frame, "clock", "nsys", "model")
    table = table[table["device"] == "cuda"]
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
def published_clocks() -> pd.DataFrame:
    """`end_to_end.csv`: one forward pass by a host timer and by a GPU profiler, an H100; seconds, as `clocks`."""
    table = pd.read_csv(reference_directory() / "end_to_end.csv")
    measures = {"timer": MEASURES["clock_s"], "nsys": MEASURES["events_s"]}
    table = table[(table["phase"] == "forward") & (table["model"] == "medium")]
    return table.assign(mode=FORWARD, measure=table["method"].map(measures), seconds=table["mean_ms"] / 1000)


@cache
def published() -> dict[str, float]:
    """`profile_kernels.csv`: percent, or microseconds, by quantity; an H100."""
    table = pd.read_csv(reference_directory() / "profile_kernels.csv")
    return dict(zip(table["quantity"], table["value"].astype(float), strict=True))


def published_shares(drawn: pd.DataFrame) -> pd.DataFrame:
    """The published shares in percent, as far as they were published, in the families of `drawn_shares`."""
    given = published()
    rows = [
        (FORWARD, "matmul", given["matmul_share_forward_only"]),
        (FORWARD, "elementwise", given["elementwise_share_of_forward"]),
        (FORWARD, "reduction", given["reduce_share_of_forward"]),
        (STEP, "matmul", given["matmul_share_full_step"]),
    ]
    table = pd.DataFrame(rows, columns=["mode", "family", "share_percent"])
    table = table.assign(family=table["family"].where(table["family"].isin(drawn["family"]), "other"))
    return table.groupby(["mode", "family"], sort=False)["share_percent"].sum().reset_index()


def _in_order(table: pd.DataFrame, column: str, order: tuple[str, ...]) -> pd.DataFrame:
    """Models from small to large, modes as in `VIEWS`, then `column` in the order given."""
    orders = {"model": tuple(sorted(SIZES, key=lambda name: n_parameters(SIZES[name]))), "mode": tuple(VIEWS)}
    orders[column] = order
    by = [name for name in dict.fromkeys(["device", "model", "mode", column]) if name in table]
    places = {name: {value: place for place, value in enumerate(values)} for name, values in orders.items()}
    return table.sort_values(
        by, key=lambda values: values.map(places[values.name]) if values.name in places else values, kind="stable"
    ).reset_index(drop=True)
