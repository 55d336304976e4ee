"""What the all-reduce lab asks, and how a run answers."""

from dataclasses import replace

import pandas as pd

from labkit.costs.calibration import Calibration
from labkit.lab.as_predicted import agreement
from labkit.lab.claims import Trend, claim, lies_within, published, quotients
from labkit.lab.comparing import TIME, compared, contest
from labkit.lab.findings import Finding, Questions, troubles
from labkit.lab.rows import select
from labkit.lab.units import format_bytes, format_rate, format_seconds
from labkit.studies.all_reduce import tables
from labkit.studies.all_reduce.transports import CHOSEN, FLOOR, SHARED_MEMORY, TORCH

QUESTIONS = Questions()
KIB, MIB = 2**10, 2**20
TORCHS = "torch's all-reduce"
# "In proportion": the published time ratios over size ratios are 0.9 to 1.12.
PROPORTIONAL = (2 / 3, 3 / 2)


def _name(algorithm: str) -> str:
    return {CHOSEN: "labkit's all_reduce", TORCH: TORCHS, "ring": "the ring"}.get(
        algorithm, algorithm.replace("_", " ")
    )


@QUESTIONS.ask("size_and_ranks", "How does the time of an all-reduce grow with its size and with the number of ranks?")
def size_and_ranks(frame: pd.DataFrame) -> Finding | None:
    table = select(tables.times(frame, "sizes"), algorithm=TORCH)
    table = table[table["world_size"] > 1]
    if table.empty:
        return None
    of_one = table[table["backend"] == table["backend"].iloc[0]]
    fewest = of_one[of_one["world_size"] == of_one["world_size"].min()].sort_values("n_bytes")
    small, large = fewest.iloc[0], fewest.iloc[-1]
    headline = (
        f"With the fewest ranks the shortest tensor takes {format_seconds(small['seconds'])}; the longest moves at "
        f"{format_rate(large['busbw_gb_per_s'] * 1e9)}."
    )
    return Finding("measured", headline, table, why=_growth_with_ranks(of_one))


def _growth_with_ranks(table: pd.DataFrame) -> str | None:
    """How much longer the largest common size takes with the most ranks than with the fewest."""
    wide = table.pivot_table(index="n_bytes", columns="world_size", values="seconds").dropna()
    if wide.empty or len(wide.columns) < 2:
        return None
    fewest, most = wide.columns[0], wide.columns[-1]
    factor = wide[most].iloc[-1] / wide[fewest].iloc[-1]
    expected = (2 * (most - 1) / most) / (2 * (fewest - 1) / fewest)
    size = format_bytes(wide.index[-1])
    return (
        f"At {size}, {most} ranks take {factor:.1f} times as long as {fewest}; each rank sends {expected:.1f} times as "
        "many bytes."
    )


@QUESTIONS.ask(
    "algorithms_against_torch",
    "Does one of labkit's algorithms beat torch's all-reduce, and at which sizes?",
    "all_reduce",
)
def algorithms_against_torch(frame: pd.DataFrame) -> Finding | None:
    return contest(
        tables.against_torch(frame, "sizes"),
        "algorithm",
        TORCHS,
        names=_name,
        axis=("n_bytes", "world_size"),
        choose=lambda winner: f"Average by {winner}",
        keep="Keep torch's all-reduce",
        caveat=troubles(select(frame, ["algorithm"], sweep=["sizes", "ranks"]), "algorithm"),
    )


@QUESTIONS.ask("ring_against_torch", "Is a ring of point-to-point calls faster than torch's all-reduce?")
def ring_against_torch(frame: pd.DataFrame) -> Finding | None:
    ratios = select(tables.against_torch(frame, "sizes", "ranks"), algorithm="ring")
    return compared(ratios, "the ring", TORCHS, axis=("n_bytes", "world_size"))


@QUESTIONS.ask("alpha_beta", "Do the cost of a message and of a byte predict how long an all-reduce takes?")
def alpha_beta(frame: pd.DataFrame, calibration: Calibration | None) -> Finding | None:
    table = tables.predictions(frame, calibration)
    found = agreement(table, "times", "what their messages should take")
    links = tables.link_models(frame)
    if found is None and links:
        found = Finding(
            "measured", "Ranks on several hosts, whose links no calibration of one machine predicts.", table
        )
    if found is None:
        return None
    held = tables.crossovers(frame, calibration)["prediction"].value_counts()
    decided = held.get("holds", 0) + held.get("does not hold", 0)
    told = []
    if decided:
        holds = held.get("holds", 0)
        told.append(f"Of {decided} predictions of where one algorithm overtakes another, {holds} hold.")
    told += [
        f"{backend}, {world_size} ranks, one {link}: {format_seconds(model.alpha_s)} per message"
        + (f" and {format_rate(1 / model.beta_s_per_byte)} each way." if model.beta_s_per_byte > 0 else ".")
        for link, models in links.items()
        for (backend, world_size), model in models.items()
    ]
    return replace(found, why=" ".join(told) or None)


@QUESTIONS.ask(
    "transports",
    "Is shared memory faster than torch's messages, and how far is it from this machine's limit?",
    "transport",
)
def transports(frame: pd.DataFrame) -> Finding | None:
    ratios = tables.transports_over(frame, TORCH)
    floor = tables.transports_over(frame, FLOOR)
    floor = floor[floor["n_bytes"] == floor["n_bytes"].max()]
    by_transport = floor.groupby("transport")["ratio"].median()
    why = None
    if {TORCH, SHARED_MEMORY} <= set(by_transport.index):
        why = (
            f"At {format_bytes(floor['n_bytes'].iloc[0])}, torch takes {by_transport[TORCH]:.1f} times as long as the "
            f"bare additions and copies, shared memory {by_transport[SHARED_MEMORY]:.1f} times."
        )
    found = compared(
        select(ratios, transport=SHARED_MEMORY),
        "shared memory",
        TORCHS,
        axis=("n_bytes", "world_size"),
        choose="Let ranks of one machine exchange CPU tensors through shared memory",
        keep="Keep torch's messages between ranks of one machine",
        caveat=troubles(select(frame, ["transport"], sweep="transports"), "transport"),
        why=why,
    )
    if found is None or found.table is None:
        return found
    shown = TIME.marked(ratios)  # the other transports' rows, judged beside them
    shown.loc[shown["transport"] == SHARED_MEMORY, ["p", "verdict"]] = found.table[["p", "verdict"]].to_numpy()
    return replace(found, table=shown)


@QUESTIONS.ask("phases", "Are reduce-scatter and all-gather, alone, faster through shared memory than torch's own?")
def phases(frame: pd.DataFrame) -> Finding | None:
    found = compared(
        select(tables.phases_over_torch(frame), transport=SHARED_MEMORY),
        "the phases through shared memory",
        "gloo's own",
        plural=True,
        axis=("collective", "n_bytes", "world_size"),
        caveat=troubles(select(frame, ["transport"], sweep="phases"), "transport"),
    )
    sent = tables.phases(frame).dropna(subset="measured_over_predicted")
    if found is None or sent.empty:
        return found
    of_formula = sent.groupby(["collective", "transport"])["measured_over_predicted"].max()
    told = [
        f"{collective} {of_formula[collective, TORCH]:.2g} (labkit's {of_formula[collective, SHARED_MEMORY]:.2g})"
        for collective in sent["collective"].unique()
        if {(collective, TORCH), (collective, SHARED_MEMORY)} <= set(of_formula.index)
    ]
    if not told:
        return found
    return replace(found, why=f"In units of (p-1)/p of the tensor, a rank sends by torch's {' and '.join(told)}.")


@QUESTIONS.ask(
    "scheduling",
    "Are small all-reduces faster under SCHED_BATCH than under the default scheduling policy?",
    "scheduling",
)
def scheduling(frame: pd.DataFrame) -> Finding | None:
    ratios = tables.batch_against_default(frame)
    return compared(
        ratios,
        "small all-reduces under SCHED_BATCH",
        "those under the default policy",
        plural=True,
        axis=("world_size", "n_bytes", "algorithm"),  # ranks first: a policy is of all that they send
        choose=f"Run CPU ranks that all-reduce up to {format_bytes(ratios['n_bytes'].max())} under SCHED_BATCH",
        keep="Leave the default scheduling policy",
    )


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
    """`allreduce_ring_vs_torch.csv`: ring is behind torch with 16 ranks and 131,072 elements."""
    many = _many_ranks(frame, least_ranks=16)
    near = many[(many["world_size"] == 16) & many["n_bytes"].between(256 * KIB, 2 * MIB)]
    ratios = tables.ALL_REDUCES.over(near, TORCH, algorithm=[TORCH, "ring"])
    return claim("With 16 ranks and 131,072 elements torch is faster than ring", ratios, "slower")


def _many_ranks(frame: pd.DataFrame, least_ranks: int) -> pd.DataFrame:
    ranks = tables.ALL_REDUCES.samples(frame, sweep="ranks", backend="gloo")
    return ranks[ranks["world_size"] >= least_ranks]
