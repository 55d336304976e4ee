"""What the sharding lab asks, and how a run answers. Bytes are counts: a difference of them needs no interval."""

from dataclasses import replace

import pandas as pd

from labkit.bench.statistics import LEAST_RELEVANT_DIFFERENCE, judged
from labkit.costs.calibration import Calibration
from labkit.costs.sharding import PARTS
from labkit.lab.as_predicted import agreement
from labkit.lab.claims import Trend, claim, exact, published
from labkit.lab.comparing import MEMORY, compared, contest, winner_of
from labkit.lab.findings import Claim, Finding, Questions, with_model
from labkit.lab.own_effects import with_own
from labkit.lab.rows import select
from labkit.lab.units import format_bytes, format_seconds, format_share, span
from labkit.studies.sharding import gathers as gathers_tables
from labkit.studies.sharding import predicting, tables
from labkit.studies.sharding.tables import DDP, FSDP, LABKITS, TORCHS, ZERO1, ZERO2
from labkit.studies.shared.rank_troubles import rank_troubles

QUESTIONS = Questions()
LITTLE_LONGER = 1.1  # than DDP's step, at the upper end of an interval: up to there a way is advised
AS_PROMISED = 1.1  # a saving is what the formula promises up to this factor
EXACT = 1.01  # the optimizer counts its steps, in a number per tensor
PAIRS = dict(zip(TORCHS[1:], (ZERO1, FSDP), strict=True))  # of what is sharded
WHAT_TO_SHARD = {ZERO1: "the optimizer", ZERO2: "the optimizer and gradients", FSDP: "everything"}


def _troubles(frame: pd.DataFrame, kind: str) -> str | None:
    return rank_troubles(select(tables.named(frame), ["way"], kind=kind), "way")


@QUESTIONS.ask("peaks", "Does a rank need less memory in shards, and what is its peak made of?")
def peaks(frame: pd.DataFrame) -> Finding | None:
    ratios, caveat = tables.peak_ratios(frame), _troubles(frame, "memory")
    labkits = ratios[ratios["way"].isin(LABKITS)]
    found = contest(labkits, "way", DDP, names=str, axis=("world_size",), quantity=MEMORY, caveat=caveat)
    parts = tables.peaks(frame)
    if found is None or parts.empty:
        return found
    columns = ["size", "world_size", "way", "moment", "peak_bytes", *(f"{part}_bytes" for part in PARTS)]
    fewest = parts[(parts["way"] == DDP) & (parts["world_size"] == parts["world_size"].min())]
    why = None
    if len(fewest):
        one = fewest.loc[fewest["peak_bytes"].astype(float).idxmax()]
        why = (
            f"DDP's peak, {format_bytes(one['peak_bytes'])} with {one['size']}, is "
            f"{format_share(one['optimizer_bytes'] / one['peak_bytes'])} optimizer state; in shards each of "
            f"{one['world_size']} ranks keeps {format_share(1 / one['world_size'])} of that."
        )
    found = replace(found, table=parts[[*columns, "rest_bytes"]], why=why)
    return with_own(found, ratios, "way", LABKITS, DDP, axis=("world_size",), quantity=MEMORY, names=str)


@QUESTIONS.ask("formula", "Does a rank hold the bytes that the formulas say?")
def formula(frame: pd.DataFrame) -> Finding | None:
    return agreement(tables.against_formula(frame), "bytes held", "those of the formula", close=EXACT)


@QUESTIONS.ask("fsdp_saving", "Does sharding save the memory that was expected?")
def fsdp_saving(frame: pd.DataFrame) -> Finding | None:
    table = tables.savings(frame)
    found = agreement(table, "savings against DDP", "what the formula promises", close=AS_PROMISED)
    least = table.sort_values("measured_over_predicted").head(1)
    if found is None or least.empty:
        return found
    one = least.iloc[0]
    missing = one["expected_bytes"] - one["saved_bytes"]
    if missing <= 0:
        return found
    why = (
        f"{one['way']} with {one['size']} on {one['world_size']} ranks saves {format_bytes(missing)} less than its "
        "states do: buffers to send from, and for FSDP whole layers, come on top."
    )
    return replace(found, why=why)


@QUESTIONS.ask("bytes", "Does a rank send the bytes that the formulas say?")
def sent_bytes(frame: pd.DataFrame) -> Finding | None:
    table = tables.sent(frame)
    found = agreement(table, "bytes sent", "those of the formulas", close=EXACT)
    totals = tables.sent_per_step(frame)
    if found is None or totals.empty:
        return found
    for row in table.to_dict("records"):
        if (not row["sent_bytes"] and row["formula_bytes"]) or (row["sent_bytes"] and row["formula_bytes"] == 0):
            what = "lacks its" if row["formula_bytes"] else "has one more collective than the formulas: an"
            headline = f"No: {row['way']} {what} {row['collective'].replace('_', '-')}."
            found = replace(found, verdict="no", headline=headline)
    told = [f"{way} {rows['times_parameters'].median():.3g}" for way, rows in totals.groupby("way", sort=False)]
    found = replace(found, caveat=_troubles(frame, "time"))
    return replace(found, why=f"In units of the parameters' bytes, times (p-1)/p, a step sends: {', '.join(told)}.")


@QUESTIONS.ask("zero_stage_1", "How does sharding the optimizer alone differ from ZeRO stage 1 as published?")
def zero_stage_1(frame: pd.DataFrame) -> Finding | None:
    table = tables.sent_per_step(frame)
    by_way = table.groupby("way")["times_parameters"].median()
    if not {ZERO1, DDP} <= set(by_way.index):
        return None
    more = by_way[ZERO1] / by_way[DDP] - 1
    headline = (
        f"It sends {format_share(abs(more))} {'more' if more > 0 else 'less'} than DDP; the paper's stage 1, which "
        "reduce-scatters gradients, sends as much."
    )
    why = None
    if ZERO2 in by_way.index:
        share = format_share(by_way[ZERO2] / by_way[DDP])
        why = f"Where gradients are reduce-scattered, too (ZeRO-2), a step sends {share} of DDP's bytes."
    return Finding("measured", headline, table, why=why)


@QUESTIONS.ask("time", "Is a step in shards faster than one with whole copies?", "sharding")
def time(frame: pd.DataFrame) -> Finding | None:
    everything = tables.contests(tables.steps_over(frame, DDP))  # of the others: `break_even`
    table, axis = everything[everything["way"].isin(LABKITS)], ("transport", "size", "world_size")
    found = contest(table, "way", DDP, names=str, axis=axis, caveat=_troubles(frame, "time"))
    if found is not None and len(table) and found.verdict != "undecided":
        slower = found.table[found.table["verdict"] == "slower"] if found.table is not None else table[:0]
        told = [f"{row['way']} takes {format_share(row['ratio'] - 1)} longer." for row in slower.to_dict("records")]
        why = " ".join(filter(None, [_of_the_optimizer(frame), *told]))
        found = with_model(replace(found, advice=_advice(judged(table), frame), why=why or None), table)
    return with_own(found, everything, "way", (*LABKITS, *TORCHS), DDP, axis=axis, names=str)


def _advice(table: pd.DataFrame, frame: pd.DataFrame) -> str:
    """What is faster; else the most that can be sharded without a step that takes longer: it saves memory."""
    slower = set(table.loc[table["verdict"] == "slower", "way"])
    unclear = set(table.loc[~(table["high"] < LITTLE_LONGER), "way"])
    free = [way for way in WHAT_TO_SHARD if way in set(table["way"]) and way not in slower | unclear]
    if not free and slower >= set(table["way"]):
        return "Do not shard unless memory is short: every stage makes a step longer."
    if not free:
        return "Do not shard unless memory is short: what it costs in time is not clear here."
    fastest = winner_of(table[table["way"].isin(free)], "way")
    way = fastest or free[-1]
    less = "less memory" if _needs_less(frame, way, DDP) else "less memory by the formulas"
    if fastest is None:
        return f"Shard {WHAT_TO_SHARD[way]} ({way}): {less}, and no clear cost in time."
    is_further = free[-1] != fastest and _needs_less(frame, free[-1], fastest)
    more = f"; where memory is short, {WHAT_TO_SHARD[free[-1]]} ({free[-1]})" if is_further else ""
    return f"Shard {WHAT_TO_SHARD[fastest]} ({fastest}): {less} and less time{more}."


def _needs_less(frame: pd.DataFrame, way: str, than: str) -> bool:
    """Whether its peak was measured, and is the lower one with every number of ranks."""
    over_ddp = tables.peak_ratios(frame).pivot_table(index=["size", "world_size"], columns="way", values="ratio")
    peaks = over_ddp.assign(**{DDP: 1.0})
    most = 1 - LEAST_RELEVANT_DIFFERENCE
    return {way, than} <= set(peaks) and bool((peaks[way] <= most * peaks[than]).all())


def _of_the_optimizer(frame: pd.DataFrame) -> str | None:
    parts = tables.times(frame).set_index(["way", "part"])["seconds"]
    parts = parts[~parts.index.duplicated()]
    if not {(DDP, "optimizer"), (FSDP, "optimizer")} <= set(parts.index):
        return None
    whole, share = (format_seconds(parts[way, "optimizer"]) for way in (DDP, FSDP))
    return f"The optimizer takes {whole} for all parameters on each rank, and {share} for a share (FSDP)."


@QUESTIONS.ask("torch", "Is labkit's sharding as fast as torch's?")
def against_torch(frame: pd.DataFrame) -> Finding | None:
    pieces = [tables.steps_over(frame, theirs, own).assign(baseline=theirs) for theirs, own in PAIRS.items()]
    table = pd.concat([piece for piece in pieces if len(piece)]) if any(map(len, pieces)) else pieces[0]
    by_transport = table.groupby(["way", "transport"])["ratio"].median().unstack() if len(table) else table
    why = None
    if {"point_to_point", "shared"} <= set(by_transport.columns):
        told = [
            f"{way} takes {format_share(one['point_to_point'])} of the time of torch's over the same gloo, and "
            f"{format_share(one['shared'])} through shared memory"
            for way, one in by_transport.dropna().iterrows()
        ]
        why = f"{'; '.join(told)}." if told else None
    return compared(
        table,
        "labkit's sharding",
        "torch's of the same kind",
        axis=("way", "transport"),
        caveat=_troubles(frame, "time"),
        why=why,
    )


@QUESTIONS.ask("break_even", "When does sharding the optimizer save time?")
def break_even(frame: pd.DataFrame, calibration: Calibration | None) -> Finding | None:
    table = predicting.break_even(frame, calibration)
    found = compared(
        table, ZERO1, DDP, axis=("optimizer", "transport", "size", "batch"), caveat=_troubles(frame, "time")
    )
    known = found.table.dropna(subset="predicted_ratio") if found is not None and found.table is not None else table[:0]
    if found is None or known.empty:
        return found
    told = [
        f"{span(rows['saved_over_paid'])} with {optimizer} "
        f"{'through shared memory' if transport == 'shared' else 'by messages'}"
        for (optimizer, transport), rows in known.groupby(["optimizer", "transport"])
    ]
    why = f"What the update saves over what the gather costs, by the calibration: {', '.join(told)}."
    clear = known[known["verdict"] != "no difference shown"]
    if len(clear):
        right = ((clear["predicted_ratio"] < 1) == (clear["ratio"] < 1)).sum()
        why += f" The sign so predicted is right in {right} of {len(clear)} settings that differ clearly."
    return replace(found, why=why)


@QUESTIONS.ask("gathers", "Does a step wait less for FSDP's gathers than they take alone?")
def gathers(frame: pd.DataFrame) -> Finding | None:
    table = gathers_tables.gathers(frame)
    found = compared(
        gathers_tables.waits_over_gathers(frame),
        "waiting for FSDP's gathers",
        "the same gathers with nothing else to do",
        axis=("transport", "world_size"),
        caveat=_troubles(frame, "time"),
    )
    of_fsdp = table[table["way"] == FSDP]
    if found is None or of_fsdp.empty:
        return found
    one = of_fsdp.iloc[0]
    why = (
        f"With {one['size']}, {one['gathers']:.0f} gathers take {format_seconds(one['alone_s'])} alone and "
        f"{format_seconds(one['gathering_s'])} while a step computes, "
        f"which waits for {format_seconds(one['waiting_s'])}."
    )
    if (extra := one["extra_s"]) == one["extra_s"]:
        side = "more" if extra > 0 else "less"
        why += f" Forward and backward take {format_seconds(abs(extra))} {side} than DDP's."
    return replace(found, why=why)


@QUESTIONS.ask("largest_model", "Which is the largest model that fits, by what is sharded?", "largest_model")
def largest_model(frame: pd.DataFrame) -> Finding | None:
    table = tables.fits(frame)
    here = table[table["place"] == "here"]
    if here.empty:
        return None
    here = here[here["world_size"] == here["world_size"].min()].set_index("way")
    whole, shards, ranks = here.loc[DDP, "model"], here.loc[FSDP, "model"], here.loc[DDP, "world_size"]
    headline = f"With {ranks} ranks here, {whole} is the largest in whole copies and {shards} in shards (FSDP)."
    caveat = "Computed, not measured: float32, AdamW; on the GPUs without activations."
    far = table[(table["place"] != "here") & (table["world_size"] == table["world_size"].max())].set_index("way")
    ranks, models = far.loc[DDP, "world_size"], far["model"]
    why = f"On {ranks} GPUs of 80 GiB it would be {models[DDP]} and {models[FSDP]}."
    advice = f"Train models of up to the size {shards} with FSDP." if shards not in (whole, "none") else None
    return Finding("predicted", headline, table, caveat, why, advice)


@QUESTIONS.ask("published_trends", "Do the published trends hold on this machine?")
def published_trends(frame: pd.DataFrame) -> Finding | None:
    return published([_a_quarter(frame), _longer(frame), _most_in_time(frame)])


def _a_quarter(frame: pd.DataFrame) -> Claim | None:
    """`sharded_training_2gpu.csv`: peaks of 29.8 and 34.1 GB become 22.5 and 26.3: 23 to 25 % less on two ranks."""
    ratios = select(tables.peak_ratios(frame), way=ZERO1, world_size=2)["ratio"].astype(float)
    near, off = (ratios >= 0.7) & (ratios <= 0.8), (ratios < 0.6) | (ratios > 0.95)
    return exact("Sharding AdamW over two ranks lowers the peak by about a quarter", near, off, _times(ratios))


def _longer(frame: pd.DataFrame) -> Trend | None:
    """Two of three write-ups: a step takes 1.37 to 1.45 times as long; the third: 0.97 times."""
    ratios = tables.steps_over(frame, DDP, ZERO1)
    return claim("A step with a sharded optimizer takes longer (two of three write-ups)", ratios, "slower")


def _most_in_time(frame: pd.DataFrame) -> Claim | None:
    """65 and 73 % of FSDP's gathers were ready before they were used, two ranks over gloo."""
    table = gathers_tables.gathers(frame)
    shares = table.loc[table["way"] == FSDP, "in_time_percent"]
    seen = f"{span(shares, '{:.0f}'.format)} %"
    return exact("Most of FSDP's gathers are complete before they are used", shares > 50, shares < 40, seen)


def _times(ratios: pd.Series) -> str:
    return f"{span(ratios)} times"
