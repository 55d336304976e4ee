"""From the frame of a memory run to the tables its answers and figures are made of. Bytes unless a name says other."""

from functools import cache

import pandas as pd

from labkit.bench.statistics import compare_groups
from labkit.costs.memory import PHASES, best_segment
from labkit.lab.project import reference_directory
from labkit.nn.transformer import shape_named
from labkit.studies.memory.counting import PARTS
from labkit.studies.memory.worker import WITHOUT

SETTING = ["size", "context_length", "precision", "phase"]
PART_COLUMNS = [f"{part}_bytes" for part in PARTS]
PART_ORDER = PARTS
PHASE_ORDER = PHASES
SEEN = 0.005
FIT_SHARE = 0.9
"""Of a machine's memory that a step may take: the rest is for everything else."""
PRECISIONS = {"fp32": "float32", "bf16": "bfloat16"}


def rows_of(frame: pd.DataFrame, table: str, *columns: str) -> pd.DataFrame:
    """The rows of one kind; an empty frame with the columns they should have if there are none."""
    if frame.empty or "table" not in frame:
        return pd.DataFrame(columns=list(columns))
    rows = frame[frame["table"] == table]
    return rows.reindex(columns=[*rows.columns, *(name for name in columns if name not in rows)])


def peaks(frame: pd.DataFrame) -> pd.DataFrame:
    """The peak of every (method, setting) without checkpointing, the highest of its repeats, and its parts."""
    columns = ["method", *SETTING, "checkpoint_segment", "peak_bytes", "predicted_bytes", "peak_during"]
    columns += [*PART_COLUMNS, "machine_bytes", "count_s", "host_bytes", "batch"]
    rows = rows_of(frame, "peak", *columns)[columns].dropna(subset=["peak_bytes"])
    rows = rows[rows["checkpoint_segment"] == WITHOUT]
    highest = rows.sort_values("peak_bytes", kind="stable").drop_duplicates(["method", *SETTING], keep="last")
    return highest.sort_values(["size", "context_length"], ignore_index=True)


def of_method(frame: pd.DataFrame, method: str) -> pd.DataFrame:
    table = peaks(frame)
    return table[table["method"] == method]


def counted_against_measured(frame: pd.DataFrame) -> pd.DataFrame:
    """Settings that were both counted and measured: both peaks, and counted and predicted over measured."""
    wanted = [*SETTING, "peak_bytes", "predicted_bytes"]
    measured, counted = of_method(frame, "measured")[wanted], of_method(frame, "counted")[wanted]
    both = measured.merge(counted.drop(columns="predicted_bytes"), on=SETTING, suffixes=("", "_counted"))
    both = both.rename(columns={"peak_bytes": "measured_bytes", "peak_bytes_counted": "counted_bytes"})
    return both.assign(
        counted_over_measured=both["counted_bytes"] / both["measured_bytes"],
        predicted_over_measured=both["predicted_bytes"] / both["measured_bytes"],
    )


def by_context(frame: pd.DataFrame, *sizes: str) -> pd.DataFrame:
    """Peaks by context: measured where there is a measurement, else counted; `panel` is size and precision."""
    table = peaks(frame)
    table = table[table["size"].isin(sizes)] if sizes else table
    table = table.sort_values("method", ascending=False, kind="stable").drop_duplicates(SETTING)  # measured first
    table = table.assign(panel=table["size"] + ", " + table["precision"], width=_widths(table["size"]))
    return table.sort_values(["width", "precision", "context_length"], ascending=[True, False, True], ignore_index=True)


def measured_sizes(frame: pd.DataFrame) -> list[str]:
    """Sizes with a measured peak, the smallest first."""
    table = of_method(frame, "measured")
    return sorted(set(table["size"]), key=lambda size: shape_named(size).d_model)


def _widths(sizes: pd.Series) -> list[int]:
    return [shape_named(size).d_model for size in sizes]


def big_sizes(frame: pd.DataFrame) -> list[str]:
    """The largest size that was counted at several contexts: the one beside the published peaks."""
    table = of_method(frame, "counted")
    counts = table[table["phase"] == "full_step"].groupby("size")["context_length"].nunique()
    several = [size for size in counts.index if counts[size] == counts.max() or counts[size] > 1]
    return sorted(several, key=lambda size: shape_named(size).d_model)[-1:]


def parts_of_peaks(frame: pd.DataFrame) -> pd.DataFrame:
    """The parts of counted full-step peaks, long: one row a (size, context, precision, part), with its share."""
    table = of_method(frame, "counted")
    table = table[table["phase"] == "full_step"]
    long = table.melt([*SETTING, "peak_bytes"], PART_COLUMNS, "part", "bytes")
    long["part"] = long["part"].str.removesuffix("_bytes")
    long["share"] = long["bytes"] / long["peak_bytes"]
    long = long.assign(width=_widths(long["size"])).sort_values(["width", "context_length"], kind="stable")
    long = long[_seen(long)]
    return long.assign(size_and_context=long["size"] + ", " + long["context_length"].astype(str))


def timeline(frame: pd.DataFrame) -> pd.DataFrame:
    """Live bytes by part over the events of one full step; `panel` names the model."""
    columns = ["size", "context_length", "moment", "part_of_step", *PART_COLUMNS]
    rows = rows_of(frame, "timeline", *columns)[columns].dropna(subset=["moment"])
    long = rows.melt(columns[:4], PART_COLUMNS, "part", "bytes")
    long["part"] = long["part"].str.removesuffix("_bytes")
    panel = long["size"] + ", " + long["context_length"].astype(str) + " tokens"
    long = long.assign(panel=panel, allocations_and_frees=long["moment"], width=_widths(long["size"]))
    return long[_seen(long)].sort_values(["width", "moment"], kind="stable", ignore_index=True)


def _seen(parts: pd.DataFrame) -> pd.Series:
    """Rows of the parts that reach a visible share of the largest anywhere."""
    most = parts.groupby("part")["bytes"].transform("max")
    return most >= SEEN * parts["bytes"].max()


def allocations(frame: pd.DataFrame) -> pd.DataFrame:
    """The largest allocations of a full step: operator, line, size of one, how often, bytes of them at the peak."""
    columns = ["size", "context_length", "operator", "line", "part_of_step", "category", "n_bytes", "times"]
    columns += ["at_peak_bytes"]
    rows = rows_of(frame, "allocation", *columns)[columns].dropna(subset=["n_bytes"])
    rows = rows.assign(width=_widths(rows["size"]), operator=rows["operator"].str.lstrip("_"))
    order = {"by": ["width", "n_bytes", "times"], "ascending": [True, False, False]}
    return rows.sort_values(**order, ignore_index=True)


def saved_by_operator(frame: pd.DataFrame) -> pd.DataFrame:
    """Bytes that one block keeps for backward, by the operator that made or first kept them, and precision."""
    columns = ["size", "context_length", "precision", "operator", "n_bytes"]
    rows = rows_of(frame, "saved", *columns)[columns].dropna(subset=["n_bytes"])
    grouped = rows.groupby(columns[:-1]).agg(bytes=("n_bytes", "sum"), tensors=("n_bytes", "count")).reset_index()
    return grouped.sort_values(["precision", "bytes"], ascending=[False, False], ignore_index=True)


def blocks(frame: pd.DataFrame) -> pd.DataFrame:
    """One row a block: bytes saved, predicted, of its residual stream and of the gradients it produces."""
    columns = ["size", "context_length", "precision", "batch", "saved_bytes", "predicted_bytes", "residual_bytes"]
    columns += ["predicted_residual_bytes", "parameter_gradients_bytes", "input_gradient_bytes"]
    return rows_of(frame, "block", *columns)[columns].dropna(subset=["saved_bytes"])


def checkpoints(frame: pd.DataFrame) -> pd.DataFrame:
    """Full-step peak by segment length (0: without), measured beside counted, or counted alone.

    One row a (method, size, context, segment); `seconds` with interval where it was timed.
    """
    columns = ["size", "context_length", "batch", "segment", "peak_bytes", "counted_bytes", "seconds", "gate"]
    rows = rows_of(frame, "checkpoint", *columns)[columns].dropna(subset=["peak_bytes"])
    keys = ["size", "context_length", "batch", "segment"]
    measured = rows.drop_duplicates(keys)[[*keys, "peak_bytes"]].assign(method="measured")
    again = rows.drop_duplicates(keys)[[*keys, "counted_bytes"]].rename(columns={"counted_bytes": "peak_bytes"})
    names = ["size", "context_length", "batch", "checkpoint_segment", "peak_bytes", "method", "precision", "phase"]
    counted = rows_of(frame, "peak", *names)[names]
    counted = counted[(counted["method"] == "counted") & (counted["phase"] == "full_step")]
    lengths = counted.groupby(["size", "context_length"])["checkpoint_segment"].transform("nunique")
    counted = counted[(lengths > 1) & (counted["precision"] == "float32")]
    counted = counted.rename(columns={"checkpoint_segment": "segment"})[[*keys, "peak_bytes"]]
    table = pd.concat([measured, again.assign(method="counted"), counted.assign(method="counted")], ignore_index=True)
    table = table.drop_duplicates(["method", *keys]).astype({"segment": "int64"})
    panel = table["size"] + ", " + table["context_length"].astype(str) + " tokens"
    table = table.assign(panel=panel, segment_length=table["segment"].map(segment_name))
    return table.sort_values(["size", "context_length", "method", "segment"], ignore_index=True)


def segment_name(segment: int) -> str:
    return "none" if segment == WITHOUT else str(segment)


def checkpoint_ratios(frame: pd.DataFrame) -> pd.DataFrame:
    """Time with each segment length over the time without checkpointing, from the same interleaved repeats."""
    keys = ["size", "context_length"]
    rows = rows_of(frame, "checkpoint", *keys, "segment", "seconds").dropna(subset=["seconds"])
    rows = rows.assign(segment_length=[segment_name(int(segment)) for segment in rows["segment"]])
    return compare_groups(rows, "seconds", keys, "segment_length", segment_name(WITHOUT))


def best_segments(frame: pd.DataFrame) -> pd.DataFrame:
    """Where the peak is lowest, by (method, size, context): segment length, its peak, the peak without; predictions."""
    rows, measured = [], checkpoints(frame).dropna(subset="peak_bytes")
    for (method, size, context), group in measured.groupby(["method", "size", "context_length"]):
        without, some = group[group["segment"] == WITHOUT], group[group["segment"] != WITHOUT]
        if without.empty or some.empty:
            continue
        best = some.loc[some["peak_bytes"].idxmin()]
        shape = shape_named(str(size))
        rows.append(
            {
                "method": method,
                "size": size,
                "context_length": context,
                "layers": shape.n_layers,
                "best_segment": best["segment"],
                "peak_bytes": best["peak_bytes"],
                "without_bytes": without["peak_bytes"].iloc[0],
                "highest_bytes": some["peak_bytes"].max(),
                "root_of_layers": shape.n_layers**0.5,
                "predicted_best": best_segment(shape, int(best["batch"]), int(context)),
            }
        )
    names = ["method", "size", "context_length", "layers", "best_segment", "peak_bytes", "without_bytes"]
    return pd.DataFrame(rows, columns=[*names, "highest_bytes", "root_of_layers", "predicted_best"])


def fits(frame: pd.DataFrame) -> pd.DataFrame:
    """Full-step peak of each size at the context most sizes were counted at, and whether it fits this machine."""
    table = of_method(frame, "counted")
    table = table[(table["phase"] == "full_step") & (table["precision"] == "float32")]
    if table.empty:
        return table.assign(parameters=0.0, fits=False)
    counts = table.groupby("context_length")["size"].nunique()
    at = table[table["context_length"] == counts.index[counts == counts.max()][0]]
    at = at.assign(parameters=[float(row) / 4 for row in at["parameters_bytes"]])
    return at.assign(fits=at["peak_bytes"] <= FIT_SHARE * at["machine_bytes"]).sort_values("peak_bytes")


@cache
def published() -> pd.DataFrame:
    """`memory_peaks.csv` as (context_length, phase, precision, peak_bytes); its GB are taken as 10^9 bytes."""
    table = pd.read_csv(reference_directory() / "memory_peaks.csv")
    return pd.DataFrame(
        {
            "context_length": table["context_length"],
            "phase": table["mode"],
            "precision": table["precision"].map(PRECISIONS),
            "peak_bytes": table["peak_gb"] * 1e9,
        }
    )


def beside_published(frame: pd.DataFrame) -> pd.DataFrame:
    """The big size's counted peaks at the published settings, with the published ones and their ratio."""
    counted = of_method(frame, "counted")
    counted = counted[counted["size"].isin(big_sizes(frame))]
    both = counted.merge(published(), on=["context_length", "phase", "precision"], suffixes=("", "_published"))
    both = both.rename(columns={"peak_bytes": "counted_bytes", "peak_bytes_published": "published_bytes"})
    both = both.assign(counted_over_published=both["counted_bytes"] / both["published_bytes"])
    names = [*SETTING, "counted_bytes", "published_bytes", "counted_over_published", *PART_COLUMNS]
    order = {"by": ["phase", "precision", "context_length"], "ascending": [True, False, True]}
    return both[names].sort_values(**order, ignore_index=True)
