"""What the all-reduce lab asks, and how a run answers."""

from dataclasses import replace

import pandas as pd

from labkit.costs.calibration import Calibration
from labkit.lab.as_predicted import agreement
from labkit.lab.claims import Trend, claim, lies_within, published, quotients
from labkit.lab.comparing import TIME, compared, contest
from labkit.lab.findings import Finding, Questions, troubles
from labkit.lab.places import place_of, scope_of
from labkit.lab.rows import select
from labkit.lab.units import format_bytes, format_factor, format_rate, format_seconds, join_words, span
from labkit.studies.all_reduce import tables
from labkit.studies.all_reduce.transports import CHOSEN, FLOOR, SHARED_MEMORY, TORCH

QUESTIONS = Questions()
KIB, MIB = 2**10, 2**20
TORCHS = "torch's all-reduce"
WITHOUT_SHARED_MEMORY = "Where ranks share no memory, average by"
# "In proportion": the published time ratios over size ratios are 0.9 to 1.12.
PROPORTIONAL = (2 / 3, 3 / 2)
HARDLY = 1.25  # times as long as the shortest tensor takes: medians of short ones are not known better


def _name(algorithm: str) -> str:
    known = {CHOSEN: "labkit's all_reduce over messages", TORCH: TORCHS, "ring": "the ring"}
    return known.get(algorithm, algorithm.replace("_", " "))


@QUESTIONS.ask("size_and_ranks", "How does the time of an all-reduce grow with its size and with the number of ranks?")
def size_and_ranks(frame: pd.DataFrame) -> Finding | None:
    table = select(tables.times(frame, "sizes"), algorithm=TORCH)
    table = table[table["world_size"] > 1]
    if table.empty:
        return None
    of_one = table[table["backend"] == table["backend"].iloc[0]]
    wide = of_one.pivot_table(index="n_bytes", columns="world_size", values="seconds").dropna()
    told, also, why = [], None, None
    if len(wide) > 1:
        slowed = (wide / wide.iloc[0]).max(axis=1).cummax()
        flat, (before, longest) = slowed[slowed <= HARDLY].index[-1], wide.index[-2:]
        size = format_bytes(flat)
        told.append(f"up to {size} its size hardly matters" if flat > wide.index[0] else f"it grows from {size} on")
        growth = span(wide.iloc[-1] / wide.iloc[-2], format_factor)
        also = f"From {format_bytes(before)} to {format_bytes(longest)} it grows {growth} times."
    if len(wide) and len(wide.columns) > 1:
        fewest, most = wide.columns[0], wide.columns[-1]
        short, long = (wide[most] / wide[fewest]).iloc[[0, -1]]
        told.append(f"with more ranks the shortest takes {format_factor(short)} times as long")
        sent = (most - 1) / most / ((fewest - 1) / fewest)
        why = (
            f"At {format_bytes(wide.index[-1])}, {most} ranks take {format_factor(long)} times as long as {fewest}; "
            f"each rank sends {format_factor(sent)} times as many bytes."
        )
    headline = "; ".join(told) or f"the shortest takes {format_seconds(of_one['seconds'].min())}"
    common = of_one[of_one["n_bytes"].isin(wide.index)] if len(wide) else of_one
    where = scope_of(common, ["algorithm", "backend", "world_size", "n_bytes"])
    return Finding("measured", f"{headline[0].upper()}{headline[1:]}.", table, why=why, where=where, also=also)


@QUESTIONS.ask(
    "algorithms_against_torch",
    "Over messages, does one of labkit's algorithms beat torch's all-reduce, and at which sizes?",
    "all_reduce",
)
def algorithms_against_torch(frame: pd.DataFrame) -> Finding | None:
    found = contest(
        tables.against_torch(frame, "sizes"),
        "algorithm",
        TORCHS,
        names=_name,
        axis=("n_bytes", "world_size"),
        choose=lambda winner: f"{WITHOUT_SHARED_MEMORY} {winner}",
        keep="Keep torch's all-reduce",
        caveat=troubles(select(frame, ["algorithm"], sweep=["sizes", "ranks"]), "algorithm"),
    )
    if found is None or found.table is None or found.lead is None or found.verdict == "no":
        return found
    winner = found.lead.subject
    places = _sizes_by_ranks(select(found.table[found.table["algorithm"].map(_name) == winner], backend="gloo"))
    return replace(found, advice=f"{WITHOUT_SHARED_MEMORY} {winner} {places}.") if places else found


def _sizes_by_ranks(table: pd.DataFrame) -> str | None:
    """ "up to 64 KiB with 2 ranks and up to 1 MiB with 4 and 6 ranks"; None if sizes of one have no name."""
    ranks_of: dict[str, list[str]] = {}
    for ranks, rows in table.groupby("world_size"):
        faster = rows[rows["verdict"] == "faster"]
        if len(faster):
            place = "at all sizes" if len(faster) == len(rows) else place_of(rows, faster, ["n_bytes"])
            if place is None:
                return None
            ranks_of.setdefault(place, []).append(str(ranks))
    return join_words([f"{place} with {join_words(ranks)} ranks" for place, ranks in ranks_of.items()])


@QUESTIONS.ask("ring_against_torch", "Is a ring of point-to-point calls faster than torch's all-reduce?")
def ring_against_torch(frame: pd.DataFrame) -> Finding | None:
    ratios = select(tables.against_torch(frame, "sizes", "ranks"), algorithm="ring")
    return compared(ratios, "the ring", TORCHS, axis=("n_bytes", "world_size"))


@QUESTIONS.ask("alpha_beta", "Do the cost of a message and of a byte predict how long an all-reduce takes?")
def alpha_beta(frame: pd.DataFrame, calibration: Calibration | None) -> Finding | None:
    table = tables.predictions(frame, calibration)
    found = agreement(table, "times", "what their messages should take", settings=("backend", "world_size", "n_bytes"))
    links = tables.link_models(frame)
    if found is None and links:
        found = Finding(
            "measured", "Ranks on several hosts, whose links no calibration of one machine predicts.", table
        )
    if found is None:
        return None
    told = [
        f"{backend}, {world_size} ranks, one {link}: {format_seconds(model.alpha_s)} per message"
        + (f" and {format_rate(1 / model.beta_s_per_byte)} each way." if model.beta_s_per_byte > 0 else ".")
        for link, models in links.items()
        for (backend, world_size), model in models.items()
    ]
    return replace(found, why=" ".join(told) or None)


@QUESTIONS.ask(
    "transports",
    "Is labkit's all-reduce through shared memory faster than torch's, and how far is it from this machine's limit?",
    "transport",
)
def transports(frame: pd.DataFrame) -> Finding | None:
    ratios = tables.transports_over(frame, TORCH)
    found = compared(
        select(ratios, transport=SHARED_MEMORY),
        "labkit's all-reduce through shared memory",
        TORCHS,
        axis=("n_bytes", "world_size"),
        choose="Let ranks of one machine exchange CPU tensors through shared memory",
        keep="Keep torch's all-reduce between ranks of one machine",
        caveat=troubles(select(frame, ["transport"], sweep="transports"), "transport"),
        setting="torch's over gloo",
    )
    if found is None or found.table is None:
        return found
    shown = TIME.marked(ratios)  # the other transports' rows, judged beside them
    shown.loc[shown["transport"] == SHARED_MEMORY, ["p", "verdict"]] = found.table[["p", "verdict"]].to_numpy()
    return replace(found, table=shown, also=_over_the_floor(frame))


def _over_the_floor(frame: pd.DataFrame) -> str | None:
    """Of the longest tensors: only these take their time for additions and copies."""
    floor = select(tables.transports_over(frame, FLOOR), transport=SHARED_MEMORY)
    floor = floor[floor["n_bytes"] == floor["n_bytes"].max()]
    if floor.empty:
        return None
    times = _by_ranks(floor.set_index("world_size")["ratio"], "as long as bare additions and copies")
    return f"At {format_bytes(floor['n_bytes'].iloc[0])} it takes {times}."


def _by_ranks(factors: pd.Series, than: str) -> str:
    """ "1.8 and 7 times faster with 2 and 4 ranks", of factors by number of ranks."""
    ranks = join_words([str(ranks) for ranks in factors.index])
    return f"{join_words([format_factor(factor) for factor in factors])} times {than} with {ranks} ranks"


@QUESTIONS.ask("phases", "Are reduce-scatter and all-gather, alone, faster through shared memory than torch's own?")
def phases(frame: pd.DataFrame) -> Finding | None:
    found = compared(
        select(tables.phases_over_torch(frame), transport=SHARED_MEMORY),
        "labkit's reduce-scatter and all-gather through shared memory",
        "torch's",
        plural=True,
        axis=("collective", "n_bytes", "world_size"),
        caveat=troubles(select(frame, ["transport"], sweep="phases"), "transport"),
        setting="torch's over gloo",
    )
    sent = tables.phases(frame).pivot_table("measured_over_predicted", "collective", "transport", "max", sort=False)
    both = sent.reindex(columns=[TORCH, SHARED_MEMORY]).dropna()
    if found is None or both.empty:
        return found
    told = [f"{collective} {torchs:.2g} (labkit's {own:.2g})" for collective, torchs, own in both.itertuples()]
    return replace(found, why=f"Bytes that a rank sends over those it must: torch's {' and '.join(told)}.")


@QUESTIONS.ask(
    "scheduling",
    "Are small all-reduces faster under SCHED_BATCH than under the default scheduling policy?",
    "scheduling",
)
def scheduling(frame: pd.DataFrame) -> Finding | None:
    ratios = tables.batch_against_default(frame)
    policy = f"Run CPU ranks that all-reduce up to {format_bytes(ratios['n_bytes'].max())} under SCHED_BATCH"
    found = compared(
        ratios.replace({"algorithm": {CHOSEN: "labkit's", TORCH: "torch's"}}),
        "small all-reduces under SCHED_BATCH",
        "those under the default policy",
        plural=True,
        axis=("world_size", "n_bytes", "algorithm"),  # ranks first: a policy is of all that they send
        choose=f"{policy} (labkit's do; others by `chrt -b 0`)",
        keep="Leave the default scheduling policy",
    )
    if found is None or found.table is None:
        return found
    faster = found.table[found.table["verdict"] == "faster"]
    factors = (1 / faster["ratio"].astype(float)).groupby(faster["world_size"]).median()
    if len(factors) < 2:
        return found
    return replace(found, also=f"Where it helps, typically {_by_ranks(factors, 'faster')}.")


@QUESTIONS.ask("published_trends", "Do the published trends hold on this machine?")
def published_trends(frame: pd.DataFrame) -> Finding | None:
    return published([_linear_in_size(frame), _slower_with_ranks(frame), _butterfly_ahead(frame), _ring_behind(frame)])


def _torch_gloo(frame: pd.DataFrame, least_bytes: int) -> pd.DataFrame:
    table = select(tables.times(frame, "sizes"), algorithm=TORCH, backend="gloo")
    return table[(table["n_bytes"] >= least_bytes) & (table["world_size"] > 1)].sort_values(["world_size", "n_bytes"])


def _linear_in_size(frame: pd.DataFrame) -> Trend | None:
    """`allreduce_gloo_nccl.csv`: from 10 MB to 1 GB gloo's time grows about as the size does."""
    by_ranks = _torch_gloo(frame, 10 * MIB).groupby("world_size")
    smallest, largest = by_ranks.first(), by_ranks.last()
    growth = quotients(largest, smallest).div(largest["n_bytes"] / smallest["n_bytes"], axis=0)
    text = "From 10 MB on, gloo's time grows in proportion to the size"
    return lies_within(text, growth[largest["n_bytes"] > smallest["n_bytes"]], *PROPORTIONAL, equal=None)


def _slower_with_ranks(frame: pd.DataFrame) -> Trend | None:
    """`allreduce_gloo_nccl.csv`: from 1 MB on, more ranks take longer at every size."""
    table = _torch_gloo(frame, MIB)
    steps = quotients(table, table.groupby("n_bytes").shift(1)).dropna()
    return lies_within("From 1 MB on, more ranks take longer at every size", steps, least=1.0)


def _butterfly_ahead(frame: pd.DataFrame) -> Trend | None:
    """`allreduce_ring_vs_butterfly.csv`: butterfly is ahead of ring from 8 ranks on, at one element a rank."""
    many = _many_ranks(frame, least_ranks=8)
    shortest = many[many["n_bytes"] == many["n_bytes"].min()]
    ratios = tables.ALL_REDUCES.over(shortest, "ring", algorithm=["ring", "butterfly"])
    return claim("From 8 ranks on butterfly is faster than ring for the shortest tensors", ratios, "faster")


def _ring_behind(frame: pd.DataFrame) -> Trend | None:
    """`allreduce_ring_vs_torch.csv`: ring is behind torch with 16 ranks and 131,072 elements (512 KiB)."""
    many = _many_ranks(frame, least_ranks=16)
    near = many[(many["world_size"] == 16) & many["n_bytes"].between(256 * KIB, 2 * MIB)]
    ratios = tables.ALL_REDUCES.over(near, TORCH, algorithm=[TORCH, "ring"])
    text = f"With 16 ranks and 512 KiB (here {span(near['n_bytes'], format_bytes)}) torch is faster than ring"
    return claim(text, ratios, "slower")


def _many_ranks(frame: pd.DataFrame, least_ranks: int) -> pd.DataFrame:
    ranks = tables.ALL_REDUCES.samples(frame, sweep="ranks", backend="gloo")
    return ranks[ranks["world_size"] >= least_ranks]
