"""What the sharding lab asks, and how a run answers. Bytes are counts: a difference of them needs no interval."""

from dataclasses import replace

import pandas as pd

from labkit.bench.statistics import MIN_RELEVANT_DIFFERENCE
from labkit.costs.calibration import Calibration
from labkit.costs.sharding import PARTS
from labkit.lab.as_predicted import agreement
from labkit.lab.claims import Trend, claim, exact, published
from labkit.lab.comparing import MEMORY, TIME, compared, contest, effects, winner_of
from labkit.lab.findings import Claim, Finding, Questions, at_the_cost_of, with_model
from labkit.lab.own_effects import with_own
from labkit.lab.places import scope_of
from labkit.lab.rows import select
from labkit.lab.sentences import Words, quoted_of
from labkit.lab.units import format_bytes, format_share, join_words, span
from labkit.parallel.transport import POINT_TO_POINT, SHARED
from labkit.studies.sharding import gathers as gathers_tables
from labkit.studies.sharding import predicting, tables
from labkit.studies.sharding.tables import DDP, FSDP, LABKITS, TORCHS, WHERE, ZERO1, ZERO2
from labkit.studies.shared.rank_troubles import rank_troubles

QUESTIONS = Questions()
LITTLE_LONGER = 1.1  # than DDP's step, at the upper end of an interval: up to there a way is advised
AS_PROMISED = 1.1  # a saving is what the formula promises up to this factor
EXACT = 1.01  # the optimizer counts its steps, in a number per tensor
PAIRS = dict(zip(TORCHS[1:], (ZERO1, FSDP), strict=True))  # of what is sharded
BY = {SHARED: "through shared memory", POINT_TO_POINT: "point to point"}
SAME_TRANSPORT = "labkit's own, DDP too, by the same transport"
LOAD = ("batch", "context_length")
WHAT_TO_SHARD = {ZERO1: "the optimizer", ZERO2: "the optimizer and gradients", FSDP: "everything"}


def _troubles(frame: pd.DataFrame, kind: str) -> str | None:
    return rank_troubles(select(tables.named(frame), ["way"], kind=kind), "way")


def _by_place(found: Finding | None, baseline: str) -> Finding | None:
    """A finding of `compared` that says with what optimizer and transport ways gain, the most first; `also` the rest.

    If all settings with an optimizer and a transport agree on a way. Where none gains, the finding is as it was.
    """
    if found is None or found.table is None or not (gains := _said_by_place(found.table, "faster")):
        return found
    (rows, said), *others = sorted(gains, key=lambda gain: float(gain[0]["ratio"].min()))
    others += _said_by_place(found.table, "slower")
    also = "; ".join(more.removesuffix(" than").removesuffix(" as") for _, more in others)
    is_everywhere = (found.table["verdict"] == "faster").all()
    verdict = "It depends" if found.verdict != "yes" else "Yes" if is_everywhere else "Yes, in most settings"
    largest = quoted_of(rows)["ratio"].iloc[-1]
    return replace(
        found,
        headline=f"{verdict}: {said} {baseline}.",
        also=f"{also[0].upper()}{also[1:]}." if also else None,
        lead=next(effect for effect in found.effects if effect.ratio == largest),
    )


def _said_by_place(table: pd.DataFrame, verdict: str) -> list[tuple[pd.DataFrame, str]]:
    """By optimizer and transport: the rows of ways that are so in all settings there, "point to point ZeRO-1 takes"."""
    is_so = (table["verdict"] == verdict).groupby([table[name] for name in ("way", "optimizer", "transport")])
    found = []
    for (optimizer, transport), rows in table[is_so.transform("all")].groupby(["optimizer", "transport"], sort=False):
        ways = list(dict.fromkeys(rows["way"]))
        words = Words(join_words(ways), "", TIME, len(ways) > 1)
        of_optimizer = f"with {optimizer}" if table["optimizer"].nunique() > 1 else None
        said = (of_optimizer, BY.get(str(transport)), words.subject, words.amount(rows))
        found.append((rows, " ".join(filter(None, said))))
    return found


@QUESTIONS.ask("peaks", "Does a rank need less memory in shards, and what is its peak made of?")
def peaks(frame: pd.DataFrame) -> Finding | None:
    ratios, caveat = tables.peak_ratios(frame), _troubles(frame, "memory")
    labkits = ratios[ratios["way"].isin(LABKITS)]
    found = contest(labkits, "way", DDP, names=str, axis=("world_size",), quantity=MEMORY, caveat=caveat)
    parts = tables.peaks(frame)
    if found is None or parts.empty:
        return found
    columns = ["size", "world_size", "way", "moment", "peak_bytes", *(f"{part}_bytes" for part in PARTS), "rest_bytes"]
    where = f"{found.where} · {scope_of(parts, LOAD)}"
    found = replace(found, table=parts[columns], where=where)
    fewest = parts[(parts["way"] == DDP) & (parts["world_size"] == parts["world_size"].min())]
    if len(fewest):
        one = fewest.loc[fewest["peak_bytes"].astype(float).idxmax()]
        share = format_share(one["optimizer_bytes"] / one["peak_bytes"])
        peak = format_bytes(one["peak_bytes"])
        found = replace(found, also=f"DDP's peak, {peak} with {one['size']}, is {share} optimizer state.")
    return with_own(found, ratios, "way", LABKITS, DDP, axis=("world_size",), quantity=MEMORY, names=str)


@QUESTIONS.ask("formula", "Does a rank hold, from step to step, the bytes that the formulas say?")
def formula(frame: pd.DataFrame) -> Finding | None:
    settings = ("size", "world_size", "way")
    return agreement(
        tables.against_formula(frame), "bytes held", "those of the formula", close=EXACT, settings=settings
    )


@QUESTIONS.ask("fsdp_saving", "Does a rank's peak fall by as much as it holds less?")
def fsdp_saving(frame: pd.DataFrame) -> Finding | None:
    table = tables.savings(frame)
    setting = scope_of(tables.moments(frame), ("size", *LOAD, "world_size"))
    found = agreement(table, "savings at the peak", "what is held less", close=AS_PROMISED, setting=setting)
    if found is None:
        return None
    one = table.loc[table["measured_over_predicted"].idxmin()]
    missing = one["expected_bytes"] - one["saved_bytes"]
    if missing <= 0:
        return found
    layers = ", and whole layers," if one["way"] == FSDP else ""
    why = (
        f"At the peak, buffers to send from{layers} come on top: {format_bytes(missing)} for {one['way']} with "
        f"{one['size']} on {one['world_size']} ranks."
    )
    return replace(found, why=why)


@QUESTIONS.ask("bytes", "Does a rank send the bytes that the formulas say?")
def sent_bytes(frame: pd.DataFrame) -> Finding | None:
    table = tables.sent(frame)
    found = agreement(table, "bytes sent", "those of the formulas", close=EXACT, settings=WHERE)
    if found is None:
        return None
    for row in table.to_dict("records"):
        if (not row["sent_bytes"] and row["formula_bytes"]) or (row["sent_bytes"] and row["formula_bytes"] == 0):
            what = "lacks its" if row["formula_bytes"] else "has one more collective than the formulas: an"
            headline = f"No: {row['way']} {what} {row['collective'].replace('_', '-')}."
            found = replace(found, verdict="no", headline=headline)
    return replace(found, caveat=_troubles(frame, "time"))


@QUESTIONS.ask("zero_stage_1", "How does sharding the optimizer alone differ from ZeRO stage 1 as published?")
def zero_stage_1(frame: pd.DataFrame) -> Finding | None:
    table = tables.sent_per_step(frame)
    by_way = table.groupby("way")["times_parameters"].median()
    if not {ZERO1, DDP} <= set(by_way.index):
        return None
    more = by_way[ZERO1] / by_way[DDP] - 1
    headline = (
        f"It sends {format_share(abs(more))} {'more' if more > 0 else 'less'} than DDP; the paper's stage 1, which "
        "reduce-scatters gradients as ZeRO-2 does, sends as much as DDP."
    )
    return Finding("counted", headline, table, where=scope_of(table, WHERE))


@QUESTIONS.ask("time", "Is a step in shards faster than one with whole copies?", "sharding")
def time(frame: pd.DataFrame) -> Finding | None:
    everything = tables.contests(tables.steps_over(frame, DDP))  # of the others: `break_even`
    table, axis = everything[everything["way"].isin(LABKITS)], ("transport", "size", "world_size")
    caveat = _troubles(frame, "time")
    found = compared(table, "a step in shards", DDP, axis=axis, caveat=caveat, setting=SAME_TRANSPORT)
    if found is not None and found.table is not None and found.verdict != "undecided":
        each = [effects(rows, str(way), DDP) for way, rows in found.table.groupby("way", sort=False)]
        found = replace(found, effects=sum(each, ()), advice=_advice(found.table, frame))
        found = with_model(_by_place(found, DDP), table)
    return with_own(found, everything, "way", (*LABKITS, *TORCHS), DDP, axis=axis, names=str)


def _advice(table: pd.DataFrame, frame: pd.DataFrame) -> str:
    """What is faster, by the transport that gains most; else the most that can be sharded without a longer step."""
    if len(faster := table[table["verdict"] == "faster"]):
        table = table[table["transport"] == faster.loc[faster["ratio"].astype(float).idxmin(), "transport"]]
    slower = set(table.loc[table["verdict"] == "slower", "way"])
    unclear = set(table.loc[~(table["high"] < LITTLE_LONGER), "way"])
    free = [way for way in WHAT_TO_SHARD if way in set(table["way"]) and way not in slower | unclear]
    if not free and slower >= set(table["way"]):
        return "Do not shard unless memory is short: every stage makes a step longer."
    if not free:
        return "Do not shard unless memory is short: what it costs in time is not clear here."
    fastest = winner_of(table[table["way"].isin(free)], "way")
    way = fastest or free[-1]
    transports = {BY.get(transport) for transport in table.loc[table["way"] == way, "transport"]}
    by = transports.pop() if len(transports) == 1 else None
    shard = " ".join(filter(None, ["Shard", WHAT_TO_SHARD[way], f"({way})", by]))
    less = "less memory" if _needs_less(frame, way, DDP) else "less memory by the formulas"
    if fastest is None:
        return f"{shard}: {less}, and no clear cost in time."
    is_further = free[-1] != fastest and _needs_less(frame, free[-1], fastest)
    more = f"; where memory is short, {WHAT_TO_SHARD[free[-1]]} ({free[-1]})" if is_further else ""
    return f"{shard}: {less} and less time{more}."


def _needs_less(frame: pd.DataFrame, way: str, than: str) -> bool:
    """Whether its peak was measured, and is the lower one with every number of ranks."""
    over_ddp = tables.peak_ratios(frame).pivot_table(index=["size", "world_size"], columns="way", values="ratio")
    peaks = over_ddp.assign(**{DDP: 1.0})
    most = 1 - MIN_RELEVANT_DIFFERENCE
    return {way, than} <= set(peaks) and bool((peaks[way] <= most * peaks[than]).all())


@QUESTIONS.ask("torch", "Is labkit's sharding as fast as torch's?")
def against_torch(frame: pd.DataFrame) -> Finding | None:
    pieces = [tables.steps_over(frame, theirs, own).assign(baseline=theirs) for theirs, own in PAIRS.items()]
    table = pd.concat([piece for piece in pieces if len(piece)]) if any(map(len, pieces)) else pieces[0]
    theirs, caveat = "torch's of the same kind", _troubles(frame, "time")
    return _by_place(compared(table, "labkit's sharding", theirs, axis=("way", "transport"), caveat=caveat), theirs)


@QUESTIONS.ask("break_even", "Does sharding the optimizer alone save time?")
def break_even(frame: pd.DataFrame, calibration: Calibration | None) -> Finding | None:
    table, axis = predicting.break_even(frame, calibration), ("optimizer", "transport", "size", "batch")
    caveat = _troubles(frame, "time")
    found = _by_place(compared(table, ZERO1, DDP, axis=axis, caveat=caveat, setting=SAME_TRANSPORT), DDP)
    if found is None or found.table is None:
        return found
    clear = found.table[found.table["verdict"] != "no difference shown"].dropna(subset="predicted_ratio")
    if clear.empty:
        return found
    right = ((clear["predicted_ratio"] < 1) == (clear["ratio"] < 1)).sum()
    why = (
        "By the calibration, a step should be faster where the update saves more than the gather costs: that is right "
        f"in {right} of {len(clear)} settings that differ clearly."
    )
    return replace(found, why=why)


@QUESTIONS.ask("gathers", "Does a step wait less for FSDP's gathers than they take alone?")
def gathers(frame: pd.DataFrame) -> Finding | None:
    axis, both = ("transport", "world_size"), "DDP's with the gathers after them"
    waits, passes = gathers_tables.waits_over_gathers(frame), gathers_tables.passes_over_ddp_and_gathers(frame)
    alone, caveat = "the same gathers with nothing else to do", _troubles(frame, "time")
    found = compared(waits, "waiting for FSDP's gathers", alone, axis=axis, caveat=caveat)
    found = at_the_cost_of(found, compared(passes, "FSDP's forward and backward", both, axis=axis, plural=True))
    if found is None or found.table is None:
        return found
    return replace(found, table=found.table.merge(gathers_tables.gathers(frame), how="left", on=[*WHERE, "way"]))


@QUESTIONS.ask("largest_model", "Which is the largest model that fits, by what is sharded?", "largest_model")
def largest_model(frame: pd.DataFrame) -> Finding | None:
    table = tables.fits(frame)
    here = table[table["place"] == "here"]
    if here.empty:
        return None
    here = here[here["world_size"] == here["world_size"].min()].set_index("way")
    whole, largest, ranks = here.loc[DDP, "model"], here.loc[FSDP, "model"], here.loc[DDP, "world_size"]
    ways = " or ".join(here.index[here["model"] == largest])
    headline = f"With {ranks} ranks here, {whole} is the largest in whole copies, {largest} with {ways}."
    if whole == largest:
        headline = f"With {ranks} ranks here, {whole} is the largest, in whole copies as in shards."
    if largest == "none":
        headline = f"With {ranks} ranks here, no named model fits, not even in shards."
    far = table[(table["place"] != "here") & (table["world_size"] == table["world_size"].max())].set_index("way")
    gpus, models = far.loc[DDP, "world_size"], far["model"]
    why = f"For states alone, {gpus} GPUs of 80 GiB would hold {models[DDP]} in whole copies, {models[FSDP]} in shards."
    load = scope_of(tables.moments(frame), LOAD)
    can_shard = f"Shard to train models of up to the size {largest} ({load}): predicted to fit with {ways}."
    advice = can_shard if largest not in (whole, "none") else None
    where = f"{load} · float32 · AdamW"
    return Finding("predicted", headline, table, why=why, advice=advice, where=where)


@QUESTIONS.ask("published_trends", "Do the published trends hold on this machine?")
def published_trends(frame: pd.DataFrame) -> Finding | None:
    return published([_a_quarter(frame), _longer(frame), _most_in_time(frame)])


def _a_quarter(frame: pd.DataFrame) -> Claim | None:
    """`sharded_training_2gpu.csv`: peaks of 29.8 and 34.1 GB become 22.5 and 26.3: 23 to 25 % less on two ranks.

    After the optimizer's step, as there.
    """
    after = select(tables.peaks(frame), moment=tables.MOMENTS[-1], world_size=2, way=[DDP, ZERO1])
    ratios = tables.PEAKS.over(after, DDP)["ratio"].astype(float)
    near, off = (ratios >= 0.7) & (ratios <= 0.8), (ratios < 0.6) | (ratios > 0.95)
    text = "Sharding AdamW over two ranks lowers the peak by about a quarter"
    return exact(text, near, off, f"{span(ratios)} times")


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
