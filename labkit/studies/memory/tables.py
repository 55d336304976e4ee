"""From the frame of a memory run to the tables its findings and figures are made of. Bytes unless a name says other."""

from functools import cache

import pandas as pd

from labkit.costs.memory import PHASES, best_segment
from labkit.lab.project import reference_directory
from labkit.lab.rows import Measured, exactly_over, in_order, select
from labkit.lab.units import join_words
from labkit.nn.transformer import SIZES, shape_named
from labkit.studies.memory.counting import PARTS
from labkit.studies.memory.worker import ITS_OWN, WITHOUT

SETTING = ["size", "context_length", "precision", "phase"]
PART_COLUMNS = [f"{part}_bytes" for part in PARTS]
PART_ORDER, PHASE_ORDER = PARTS, PHASES
SEEN = 0.005  # of the largest part: what is less is not drawn
FIT_SHARE = 0.9
"""Of a machine's memory that a step may take: the rest is for everything else."""
SEGMENT_TIMES = Measured(("size", "context_length"), "segment")
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}


def _by_size(table: pd.DataFrame, *then: str) -> pd.DataFrame:
    """The smallest size first, a reader's own last."""
    return in_order(table, size=SIZES, **dict.fromkeys(then))


def _setting(table: pd.DataFrame, unit: str = "") -> pd.Series:
    """Size and context; of a model that comes with its own batch, its name."""
    contexts = ", " + table["context_length"].astype(str) + unit
    return table["size"] + contexts.where(table["context_length"] != ITS_OWN, "")


def peaks(frame: pd.DataFrame, **wanted: object) -> pd.DataFrame:
    """The peak of every (method, setting) without checkpointing, the highest of its repeats, and its parts."""
    needed = ["method", *SETTING, "peak_bytes"]
    about = ["predicted_bytes", *PART_COLUMNS, "machine_bytes", "batch", "count_s", "host_bytes"]
    rows = select(frame, needed, table="peak", checkpoint_segment=WITHOUT, **wanted).reindex(columns=[*needed, *about])
    rows = rows.dropna(subset="peak_bytes").sort_values("peak_bytes", kind="stable")
    return _by_size(rows.drop_duplicates(["method", *SETTING], keep="last"), "context_length")


def counted_against_measured(frame: pd.DataFrame) -> pd.DataFrame:
    """Settings that were both counted and measured: both peaks, and counted and predicted over measured."""
    counted = peaks(frame, method="counted")[[*SETTING, "peak_bytes"]].rename(columns={"peak_bytes": "counted_bytes"})
    measured = peaks(frame, method="measured")[[*SETTING, "peak_bytes", "predicted_bytes"]]
    both = measured.rename(columns={"peak_bytes": "measured_bytes"}).merge(counted, on=SETTING)
    return both.assign(
        counted_over_measured=both["counted_bytes"] / both["measured_bytes"],
        predicted_over_measured=both["predicted_bytes"] / both["measured_bytes"],
    )


def by_context(frame: pd.DataFrame, *sizes: str) -> pd.DataFrame:
    """Peaks by context: measured where there is a measurement, else counted; `panel` is size and precision."""
    table = peaks(frame, **({"size": sizes} if sizes else {}))
    table = table.sort_values("method", ascending=False, kind="stable").drop_duplicates(SETTING)  # measured first
    return _by_size(table.assign(panel=table["size"] + ", " + table["precision"]), "precision", "context_length")


def phases(frame: pd.DataFrame, *sizes: str) -> pd.DataFrame:
    """`by_context` with a column a phase: `inference_bytes`, `forward_bytes`, `full_step_bytes`; and their `method`."""
    table, keys = by_context(frame, *sizes), ["size", "precision", "context_length"]
    wide = (
        table.pivot(index=keys, columns="phase", values="peak_bytes").reindex(columns=PHASES).rename_axis(columns=None)
    )
    methods = table.groupby(keys)["method"].agg(lambda methods: join_words(sorted(set(methods))))
    return _by_size(wide.add_suffix("_bytes").assign(method=methods).reset_index(), *keys[1:])


def shown_sizes(frame: pd.DataFrame) -> list[str]:
    """Those of which peaks are drawn, and the one beside the published peaks."""
    return list(dict.fromkeys([*drawn_sizes(frame), *big_size(frame)]))


def drawn_sizes(frame: pd.DataFrame) -> list[str]:
    """The largest measured size, and a reader's models."""
    measured = peaks(frame, method="measured", size=list(SIZES))["size"].tolist()[-1:]
    return [*(measured or big_size(frame)), *own_models(frame)]


def big_size(frame: pd.DataFrame) -> list[str]:
    """The largest size that was counted at several contexts, to stand beside the published peaks; none without rows."""
    counts = peaks(frame, method="counted", phase="full_step", size=list(SIZES)).groupby("size")
    counts = counts["context_length"].nunique()
    return _by_size(counts[counts >= min(2, counts.max())].reset_index())["size"].tolist()[-1:] if len(counts) else []


def own_models(frame: pd.DataFrame) -> list[str]:
    """A reader's models."""
    return [size for size in peaks(frame)["size"].drop_duplicates() if size not in SIZES]


def in_tokens(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of models whose batch has a context length."""
    return table[table["context_length"] != ITS_OWN]


def its_own(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of models that come with their own batch."""
    return table[table["context_length"] == ITS_OWN]


def parts_of_peaks(frame: pd.DataFrame) -> pd.DataFrame:
    """The parts of counted full-step peaks, long: one row per (size, context, precision, part), with its share."""
    table = peaks(frame, method="counted", phase="full_step", precision="float32", size=shown_sizes(frame))
    table = table.assign(place=range(len(table)))
    long = _long(table, [*SETTING, "place", "peak_bytes"], "place").sort_values("place", kind="stable")
    long = long.assign(share=long["bytes"] / long["peak_bytes"])
    return long.assign(size_and_context=_setting(long))


def _long(table: pd.DataFrame, about: list[str], panel: str) -> pd.DataFrame:
    """One row per part, as `part` and `bytes`, of those that reach a visible share of the largest in any `panel`."""
    long = table.melt(about, PART_COLUMNS, "part", "bytes")
    seen = long["bytes"] / long.groupby(panel)["bytes"].transform("max") >= SEEN
    return long[seen.groupby(long["part"]).transform("any")].assign(part=long["part"].str.removesuffix("_bytes"))


def shares(frame: pd.DataFrame) -> pd.DataFrame:
    """The same, wide: percent of the peak by part."""
    wide = parts_of_peaks(frame).pivot_table(
        index=["size", "context_length", "peak_bytes"], columns="part", values="share"
    )
    kept = [part for part in PARTS if part in wide]
    return _by_size((100 * wide[kept]).add_suffix("_percent").reset_index(), "context_length")


def timeline(frame: pd.DataFrame) -> pd.DataFrame:
    """Live bytes by part over the events of one full step; `panel` names the model."""
    about = ["size", "context_length", "moment", "part_of_step"]
    rows = select(frame, [*about, *PART_COLUMNS], table="timeline").dropna(subset="moment")
    rows = rows.assign(panel=_setting(rows, " tokens"), allocations_and_frees=rows["moment"])
    return _by_size(_long(rows, [*about, "panel", "allocations_and_frees"], "panel"), "moment")


def allocations(frame: pd.DataFrame) -> pd.DataFrame:
    """The largest allocations of a full step: operator, line, size of one, how often, bytes of them at the peak."""
    columns = ["size", "context_length", "operator", "line", "part_of_step", "category", "n_bytes", "times"]
    rows = select(frame, [*columns, "at_peak_bytes"], table="allocation")[[*columns, "at_peak_bytes"]]
    rows = rows.assign(operator=rows["operator"].str.lstrip("_")).sort_values("times", ascending=False, kind="stable")
    return _by_size(rows.sort_values("n_bytes", ascending=False, kind="stable"))


def saved_by_operator(frame: pd.DataFrame) -> pd.DataFrame:
    """Bytes that one block keeps for backward, by the operator that made or first kept them, and precision."""
    keys = ["size", "context_length", "precision", "operator"]
    rows = select(frame, [*keys, "n_bytes"], table="saved").groupby(keys)["n_bytes"]
    grouped = rows.agg(bytes="sum", tensors="count").reset_index()
    return grouped.sort_values(["precision", "bytes"], ascending=[False, False], ignore_index=True)


def blocks(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per block: bytes saved, predicted, of its residual stream and of the gradients it produces."""
    columns = ["size", "context_length", "precision", "batch", "saved_bytes", "predicted_bytes", "residual_bytes"]
    columns += ["predicted_residual_bytes", "parameter_gradients_bytes", "input_gradient_bytes"]
    return select(frame, columns, table="block")[columns].reset_index(drop=True)


def checkpoints(frame: pd.DataFrame) -> pd.DataFrame:
    """Full-step peak by segment length, measured beside counted, or counted alone.

    Rows: (size, context, method, segment). `segment` is `WITHOUT` without checkpointing, `segment_length` its text.
    """
    keys = ["size", "context_length", "batch", "segment"]
    rows = select(frame, [*keys, "peak_bytes", "counted_bytes"], table="checkpoint").drop_duplicates(keys)
    again = rows.assign(peak_bytes=rows["counted_bytes"])
    about = {"table": "peak", "method": "counted", "phase": "full_step", "precision": "float32"}
    counted = select(frame, [*keys[:-1], "checkpoint_segment", "peak_bytes"], **about)
    counted = counted.assign(segment=counted["checkpoint_segment"])
    counted = counted[counted.groupby(keys[:2])["segment"].transform("nunique") > 1]
    by_method = [("measured", rows), ("counted", again), ("counted", counted)]
    table = pd.concat([some[[*keys, "peak_bytes"]].assign(method=method) for method, some in by_method])
    table = table.dropna(subset="peak_bytes").drop_duplicates(["method", *keys]).astype({"segment": "int64"})
    panel = _setting(table, " tokens")
    lengths = table["segment"].astype(str).mask(table["segment"] == WITHOUT, "none")
    return _by_size(table.assign(panel=panel, segment_length=lengths), "context_length", "method", "segment")


def segment_peaks(frame: pd.DataFrame) -> pd.DataFrame:
    """Peak with each segment length over that without checkpointing, measured where it was, else counted."""
    table = exactly_over(checkpoints(frame), ["size", "context_length", "method"], "segment", "peak_bytes", WITHOUT)
    of_setting = table.groupby(["size", "context_length"])["method"]  # "measured" comes after "counted"
    return table[table["method"] == of_setting.transform("max")].reset_index(drop=True)


def of_largest(table: pd.DataFrame) -> pd.DataFrame:
    """The rows of the largest model, of which a sentence speaks."""
    return table[table["size"] == _by_size(table)["size"].iloc[-1]] if len(table) else table


def segment_times(frame: pd.DataFrame) -> pd.DataFrame:
    """Time with each segment length over that without checkpointing, from the same rounds."""
    return SEGMENT_TIMES.over(frame, WITHOUT, table="checkpoint").astype({"segment": "int64"})


def segments(frame: pd.DataFrame) -> pd.DataFrame:
    """Peak by segment length, and peak and time over those without checkpointing, the time with its interval."""
    keys = ["size", "context_length", "method", "segment"]
    gain = segment_peaks(frame)[[*keys, "ratio"]].rename(columns={"ratio": "peak_ratio"})
    cost = segment_times(frame).rename(columns={"ratio": "time_ratio"})[
        ["size", "context_length", "segment", "time_ratio", "low", "high"]
    ]
    table = checkpoints(frame)[[*keys, "peak_bytes"]].merge(gain, how="left", on=keys)
    return table.merge(cost.assign(method="measured"), how="left", on=keys)


def best_segments(frame: pd.DataFrame) -> pd.DataFrame:
    """Where the peak is lowest, by (size, context): that segment length, the one predicted, the textbook's root.

    No segment is shorter than a layer. `highest_over_lowest`: of the peaks, how much the length matters.
    """
    table = segment_peaks(frame)
    ratios = table.groupby(["size", "context_length"])["ratio"]
    best = table.assign(highest_over_lowest=ratios.transform("max") / ratios.transform("min")).loc[ratios.idxmin()]
    batch = int(checkpoints(frame)["batch"].max()) if len(best) else 0
    shapes = [shape_named(size) for size in best["size"]]
    contexts = best["context_length"]
    predicted = [best_segment(shape, batch, int(n)) for shape, n in zip(shapes, contexts, strict=True)]
    return best[["size", "context_length", "highest_over_lowest", "segment"]].assign(
        predicted_segment=[max(1.0, length) for length in predicted],
        root_of_layers=[shape.n_layers**0.5 for shape in shapes],
    )


def fits(frame: pd.DataFrame) -> pd.DataFrame:
    """Full-step peak of each size at the context most sizes were counted at, and whether it fits this machine."""
    table = peaks(frame, method="counted", phase="full_step", precision="float32")
    counts = in_tokens(table).groupby("context_length")["size"].nunique()
    at = table[table["context_length"].isin([counts.idxmax(), ITS_OWN])] if len(counts) else table
    at = at.assign(parameters=at["parameters_bytes"] / 4, fits=at["peak_bytes"] <= FIT_SHARE * at["machine_bytes"])
    columns = ["size", "parameters", "peak_bytes", "predicted_bytes", "machine_bytes", "fits", "batch"]
    return at[[*columns, "context_length"]].sort_values("peak_bytes", ignore_index=True)


@cache
def published() -> pd.DataFrame:
    """`memory_peaks.csv` as (context_length, phase, precision, peak_bytes); its GB are taken as 10^9 bytes."""
    table = pd.read_csv(reference_directory() / "memory_peaks.csv")
    about = {"phase": table["mode"], "precision": table["precision"].map(PRECISIONS)}
    return table[["context_length"]].assign(**about, peak_bytes=table["peak_gb"] * 1e9)


def beside_published(frame: pd.DataFrame) -> pd.DataFrame:
    """The big size's counted peaks at the published settings, with the published ones and their ratio."""
    counted = peaks(frame, method="counted", size=big_size(frame))[[*SETTING, "peak_bytes"]]
    both = counted.merge(published(), on=SETTING[1:], suffixes=("", "_published"))
    both = both.rename(columns={"peak_bytes": "counted_bytes", "peak_bytes_published": "published_bytes"})
    both = both.assign(counted_over_published=both["counted_bytes"] / both["published_bytes"])
    order = {"by": ["phase", "precision", "context_length"], "ascending": [True, False, True]}
    return both.sort_values(**order, ignore_index=True)
