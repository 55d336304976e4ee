"""From the frame of a sharding run to the tables its findings and figures are made of.

Every table is tidy and carries units in its names. Times are of the slowest rank of each repeat, peaks of the rank
that needs most.
"""

from collections.abc import Iterable, Iterator
from functools import cache

import pandas as pd

from labkit.costs.memory import activation_bytes
from labkit.costs.sharding import PARTS, STAGES, state_bytes
from labkit.costs.transformer import SIZES, parameters_by_part
from labkit.lab.made_once import made_once
from labkit.lab.own_models import without_own
from labkit.lab.project import reference_directory
from labkit.lab.rows import Measured, in_order, select, summed
from labkit.scaling.model import parameters as parameters_of
from labkit.scaling.named_models import NAMED
from labkit.studies.sharding.memory import LEAST_PEAK
from labkit.studies.sharding.step_traffic import NOTES
from labkit.studies.sharding.worker import PHASES

NAMES = {
    "ddp": "DDP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "FSDP (ZeRO-3)",
    "torch_ddp": "torch's DDP",
    "torch_zero1": "torch's ZeRO-1",
    "torch_zero3": "torch's FSDP",
}
ORDER = tuple(NAMES.values())
LABKITS, TORCHS = ORDER[:4], ORDER[4:]
DDP, ZERO1, ZERO2, FSDP = LABKITS
WHERE = ("size", "batch", "optimizer", "transport", "world_size")
SETTING = (*WHERE, "device")
STEP, WAITING = "step", "waiting for gathers"
STEPS = Measured(SETTING, "way")
PARTS_OF_STEP = Measured(("part", *SETTING), "way")
MOMENTS = ("init", "before step", "after step")
REST = "activations and buffers"
HELD = ("parameters", "gradients", "optimizer state", REST)
PEAKS = Measured(("size", "world_size", "device"), "way", value="peak_bytes", exact=True)
FIT_SHARE = 0.9
"""Of a memory that a training may take: the rest is for everything else."""
GPU_BYTES, GPU_RANKS = 80 * 2**30, (2, 8, 64)


def named(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows, with ways by the names that a reader knows."""
    if "optimizer" not in frame:  # older runs have AdamW only
        frame = frame.assign(optimizer="AdamW")
    return frame.assign(way=frame["way"].map(lambda way: NAMES.get(way, way))) if "way" in frame else frame


@made_once
def timed(frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of times, and each whole step as the sum of its phases on its rank."""
    of_rank = [*SETTING, "way", "rank", "repeat"]
    rows = select(named(frame), [*of_rank, "part", "seconds"], kind="time").dropna(subset="seconds")
    return pd.concat([rows, summed(rows, "part", PHASES, STEP, of_rank)]) if len(rows) else rows


def times(frame: pd.DataFrame) -> pd.DataFrame:
    """Median seconds by setting, way and part, with interval; of `contests`."""
    table = PARTS_OF_STEP.medians(timed(frame), part=[*PHASES, STEP, WAITING])
    columns = [*WHERE, "way", "part", "seconds", "low", "high"]
    return in_order(contests(table), size=SIZES, way=ORDER, part=[*PHASES, STEP, WAITING])[columns]


def contests(table: pd.DataFrame) -> pd.DataFrame:
    """The settings in which more than the sharded optimizer was tried beside DDP."""
    others = ~table["way"].isin((DDP, ZERO1))
    return table[others.groupby([table[name] for name in WHERE]).transform("any")] if len(table) else table


def in_panels(table: pd.DataFrame) -> pd.DataFrame:
    """Add `panel`: what labkit's ways send by, and how many ranks there are; of several models also which."""
    several = table["size"].nunique() > 1
    about = zip(table["size"], table["transport"], table["world_size"], strict=True)
    return table.assign(panel=[f"{f'{size}, ' if several else ''}{by}, {ranks} ranks" for size, by, ranks in about])


def steps_over(frame: pd.DataFrame, baseline: str, *ways: str) -> pd.DataFrame:
    """Time of a step of these ways, or of all, over that of another, from the same rounds: `ratio`, interval."""
    wanted = {"way": [baseline, *ways]} if ways else {}
    return in_order(STEPS.over(timed(frame), baseline, part=STEP, **wanted), way=ORDER)


def _ordered(table: pd.DataFrame, **then: Iterable[str]) -> pd.DataFrame:
    """By size, ranks and way, then as given."""
    return in_order(table, size=SIZES, world_size=None, way=ORDER, **then)


def moments(frame: pd.DataFrame) -> pd.DataFrame:
    """By size, ranks, way and moment: what the rank that needs most holds, its peak, if all ranks have one."""
    parts = [f"{part}_bytes" for part in PARTS]
    formulas = [f"formula_{part}" for part in parts]
    keys = ["size", "world_size", "device", "way", "moment"]
    rows = select(named(frame), [*keys, "peak_bytes", *parts, *formulas, "machine_bytes", "batch", "context_length"])
    rows = rows[rows["moment"].isin(MOMENTS)]
    rows = rows.assign(held_bytes=rows[parts].sum(axis=1))
    if len(rows):
        is_known = rows["peak_bytes"].notna().groupby([rows[key] for key in keys]).transform("all")
        rows = rows.assign(peak_bytes=rows["peak_bytes"].where(is_known))
    rows = rows.sort_values(["peak_bytes", "held_bytes"], kind="stable").drop_duplicates(keys, keep="last")
    return _ordered(rows, moment=MOMENTS)


def peaks(frame: pd.DataFrame) -> pd.DataFrame:
    """Those with a peak, and what it is made of beside what is held. A peak below that is none, and left out."""
    table = moments(frame).dropna(subset="peak_bytes")
    table = table[table["peak_bytes"] >= LEAST_PEAK * table["held_bytes"]]
    return table.assign(rest_bytes=table["peak_bytes"] - table["held_bytes"]).reset_index(drop=True)


def made_of(frame: pd.DataFrame, *, held: bool = False) -> pd.DataFrame:
    """The parts of these peaks, long; `held`: only what ranks hold at the end of a step, without torch's ways."""
    table = moments(frame) if held else peaks(frame)  # what is held is known without a peak
    names = {f"{part}_bytes": part for part in PARTS} | ({} if held else {"rest_bytes": REST})
    if held:
        table = table[(table["moment"] == MOMENTS[-1]) & ~table["way"].isin(TORCHS)]
    long = table.melt(["size", "world_size", "way", "moment"], list(names), "part", "bytes")
    panels = [f"{size}, {ranks} ranks" for size, ranks in zip(long["size"], long["world_size"], strict=True)]
    long = long.assign(part=long["part"].map(names).replace({"optimizer": "optimizer state"}), panel=panels)
    return _ordered(long, moment=MOMENTS, part=HELD)


def peak_ratios(frame: pd.DataFrame) -> pd.DataFrame:
    """The higher of the peaks before and after the optimizer's step over that of DDP."""
    return _ordered(PEAKS.over(_highest(peaks(frame)), DDP))


def _highest(table: pd.DataFrame) -> pd.DataFrame:
    """Of the ways whose peak is known at both of these moments, the row of the higher one."""
    keys = ["size", "world_size", "device", "way"]
    rows = table[table["moment"].isin(MOMENTS[1:])]
    if rows.empty:
        return rows
    rows = rows[rows.groupby(keys)["moment"].transform("nunique") == len(MOMENTS[1:])]
    return rows.sort_values("peak_bytes", kind="stable").drop_duplicates(keys, keep="last")


def against_formula(frame: pd.DataFrame) -> pd.DataFrame:
    """Bytes that a rank holds at the end of a step, by stage and part, beside the formula."""
    table = moments(frame)
    table, keys = table[table["moment"] == MOMENTS[-1]], ["size", "world_size", "way"]
    pieces = [
        table[keys].assign(part=part, held_bytes=table[f"{part}_bytes"], formula_bytes=table[f"formula_{part}_bytes"])
        for part in PARTS
    ]
    long = pd.concat(pieces).dropna(subset="formula_bytes")
    return _ordered(long.assign(measured_over_predicted=long["held_bytes"] / long["formula_bytes"]), part=PARTS)


def savings(frame: pd.DataFrame) -> pd.DataFrame:
    """By stage, the peak less than DDP's, beside what the formula says is held less."""
    table, keys = _highest(peaks(frame)), ["size", "world_size"]
    table = table[table["way"].isin(LABKITS)]
    table = table.assign(formula_bytes=table[[f"formula_{part}_bytes" for part in PARTS]].sum(axis=1))
    both = table[table["way"] != DDP].merge(table[table["way"] == DDP], on=keys, suffixes=("", "_of_ddp"))
    expected = (both["formula_bytes_of_ddp"] - both["formula_bytes"]).astype(float)
    saved = (both["peak_bytes_of_ddp"] - both["peak_bytes"]).astype(float)
    both = both.assign(expected_bytes=expected, saved_bytes=saved, measured_over_predicted=saved / expected)
    return _ordered(both)[[*keys, "way", "peak_bytes", "expected_bytes", "saved_bytes", "measured_over_predicted"]]


def sent(frame: pd.DataFrame) -> pd.DataFrame:
    """By way and collective: calls per step, bytes of tensors, bytes that a rank sends (mean over ranks), the formula.

    `of_model`: the tensors over the model's own bytes, Psi. `measured_over_predicted` is infinite where the formula has
    nothing, and there is none of FSDP's notes and of ways that are not labkit's, which no formula has.
    """
    numbers = ["calls", "tensors_bytes", "sent_bytes", "formula_bytes", "model_bytes"]
    columns = [*WHERE, "way", "collective", *numbers]
    rows = select(named(frame), columns, kind="time").dropna(subset="collective").drop_duplicates(columns)[columns]
    rows = rows.astype(dict.fromkeys(numbers[1:], float))
    rows["formula_bytes"] = rows["formula_bytes"].mask(rows["collective"] == NOTES)
    rows = rows.assign(
        of_model=rows["tensors_bytes"] / rows["model_bytes"],
        measured_over_predicted=rows["sent_bytes"] / rows["formula_bytes"],
    )
    return in_order(rows, way=ORDER).reset_index(drop=True)


def sent_in_panels(frame: pd.DataFrame) -> pd.DataFrame:
    """The same by the first transport and number of ranks, for each model."""
    table = contests(sent(frame))
    for name in ("world_size", "transport"):
        table = table[table[name] == table[name].iloc[:1].squeeze()]
    return in_order(table, size=SIZES, way=ORDER)


def sent_per_step(frame: pd.DataFrame) -> pd.DataFrame:
    """By way, all collectives together: bytes that a rank sends per step, and in units of Psi (p-1)/p."""
    table = sent(frame).groupby([*WHERE, "way"], as_index=False)[["sent_bytes", "model_bytes"]]
    table = table.agg({"sent_bytes": "sum", "model_bytes": "max"})
    share = (table["world_size"] - 1) / table["world_size"]
    times_psi = (table["sent_bytes"] / table["model_bytes"] / share).astype(float).round(3)
    return in_order(table.assign(times_parameters=times_psi), way=ORDER)


def fits(frame: pd.DataFrame) -> pd.DataFrame:
    """By stage: the largest size whose training fits into this machine; and, states alone, into GPUs of 80 GiB."""
    table = moments(without_own(frame))
    columns = ["place", "world_size", "way", "model", "parameters", "needed_bytes", "memory_bytes"]
    found: list[list[object]] = []
    for _, one in table.drop_duplicates(["world_size"]).iterrows():
        memory = one["machine_bytes"] / (one["world_size"] if one["device"] == "cpu" else 1)
        found += _largest("here", int(one["world_size"]), memory, _here(int(one["batch"]), int(one["context_length"])))
    published = {name: float(parameters_of(model)) for name, model in NAMED.items() if name not in SIZES}
    for world_size in GPU_RANKS if found else ():
        needs = {name: (n, 0.0, 0.0) for name, n in published.items()}
        found += _largest("GPUs of 80 GiB, states alone", world_size, GPU_BYTES, needs)
    return pd.DataFrame(found, columns=columns)


Needs = dict[str, tuple[float, float, float]]
"""By model: parameters, bytes of activations, bytes of what is gathered at once."""


def _here(batch: int, context_length: int) -> Needs:
    return {
        name: (
            sum(parameters_by_part(shape).values()),
            activation_bytes(shape, batch, context_length) + 8 * batch * context_length * shape.vocabulary,
            2 * 4 * max(shape.vocabulary * shape.d_model, 4 * shape.d_model**2 + 3 * shape.d_model * shape.d_ff),
        )
        for name, shape in SIZES.items()
    }


def _largest(place: str, world_size: int, memory: float, needs: Needs) -> Iterator[list[object]]:
    """Per stage the largest model that a rank with so much memory holds."""
    for stage in STAGES:
        best: list[object] = ["none", 0, float("nan")]
        for name, (n, activations, gathered) in sorted(needs.items(), key=lambda item: item[1]):
            states = sum(state_bytes(int(n), stage, world_size).values())
            needed = states + activations + (gathered if stage == "zero3" else 0)
            if needed <= FIT_SHARE * memory:
                best = [name, n, needed]
        yield [place, world_size, NAMES[stage], *best, memory]


@cache
def published() -> pd.DataFrame:
    """`sharded_training_2gpu.csv`: pairs with and without a sharded optimizer: ratios of step time and of peak."""
    table = pd.read_csv(reference_directory() / "sharded_training_2gpu.csv")
    table = table.assign(
        source=table["source"].str.split("@").str[0], is_sharded=table["variant"].str.contains("shard")
    )
    keys = ["source", "hardware", "seq_len", "global_batch"]
    table = table[table["optimizer"].str.startswith("AdamW") & ~table["variant"].str.contains("fsdp|gpipe")]
    pairs = table[~table["is_sharded"]].merge(table[table["is_sharded"]], on=keys, suffixes=("", "_sharded"))
    return pairs[keys].assign(
        step_ratio=pairs["step_ms_sharded"] / pairs["step_ms"],
        peak_ratio=pairs["mem_after_step_sharded"] / pairs["mem_after_step"],
    )
