"""What the SyncBatchNorm lab asks, and how a run answers."""

from dataclasses import replace

import pandas as pd

from labkit.costs.calibration import Calibration
from labkit.lab.as_predicted import agreement
from labkit.lab.claims import Trend, claim, exact, lies_within, published
from labkit.lab.comparing import MEMORY, compared
from labkit.lab.findings import Claim, Finding, Questions, at_the_cost_of, without_verdict
from labkit.lab.own_effects import with_own
from labkit.lab.places import scope_of
from labkit.lab.rows import select
from labkit.lab.units import format_factor, format_seconds, join_words, span
from labkit.studies.shared.rank_troubles import rank_troubles
from labkit.studies.sync_batchnorm import tables
from labkit.studies.sync_batchnorm.alternatives import ALONE, ALTERNATIVES, LOCAL, OWN, TORCH, TWO_COLLECTIVES
from labkit.studies.sync_batchnorm.predictions import predictions
from labkit.studies.sync_batchnorm.tables import BOTH, PARTS, PRICE, SETTING
from labkit.studies.sync_batchnorm.worker import LAYER

QUESTIONS = Questions()
LABKITS, PLAIN, TORCHS = "labkit's SyncBatchNorm", "plain BatchNorm", "torch's SyncBatchNorm"
AXIS = ("world_size", "features", "batch")
JUDGED = ("ratio", "low", "high", "p", "rounds", "verdict")
GROWS = {"features": "features", "batch": "rows", "world_size": "ranks"}
# Published with 2 workers: 128 to 1024 features, batch 32 to 64; ratios of medians are 0.90 to 1.08 and 0.78 to 1.06.
PUBLISHED_RANKS, FEATURES, BATCHES, HARDLY = 2, (128, 1024), (32, 64), 1.15
# Published: from the smallest to the largest batch, the peak grows by 0.86 (torch) and 0.98 times the batch's growth.
PROPORTIONAL = (0.8, 1.1)
PUBLISHED_PEAK = 2.4  # the self-made layer's peak over torch's, at the least: 2.4 to 2.8


@QUESTIONS.ask("price", "How much longer does a synchronized layer take than plain BatchNorm?", "batch_norm")
def price(frame: pd.DataFrame) -> Finding | None:
    found = compared(
        tables.ratios(frame, OWN, LOCAL, phase=BOTH),
        LABKITS,
        PLAIN,
        axis=AXIS,
        keep="Synchronize where it helps the model",
        caveat=rank_troubles(select(frame, ["alternative"], sweep=LAYER), "alternative"),
        why=_growth(frame),
    )
    if found is None or found.table is None or found.verdict != "no":
        return found
    adds = select(tables.prices(frame), part=PRICE)[[*SETTING, "seconds"]].rename(columns={"seconds": "adds_s"})
    table = found.table.merge(adds)[[*SETTING, "adds_s", *JUDGED]]
    by_ranks = table.groupby("world_size")[["ratio", "adds_s"]].median()
    told = [
        f"{format_factor(ratio)} times with {ranks} ranks ({format_seconds(adds_s)} more)"
        for ranks, ratio, adds_s in by_ranks.itertuples()
    ]
    return replace(
        found,
        verdict="measured",
        headline=without_verdict(found.headline),
        also=f"Typically {join_words(told)}.",
        advice="Synchronize only where the rows of one rank are too few for statistics of their own.",
        table=table,
    )


def _growth(frame: pd.DataFrame) -> str | None:
    """By how much the price grows with what makes it grow in every setting."""
    told = [
        f"With {some['after'].iloc[0]} {GROWS[grows]} instead of {some['before'].iloc[0]} it typically adds "
        f"{some['ratio'].median():.1f} times as much."
        for grows, some in tables.price_growth(frame).groupby("grows", sort=False)
        if (some["verdict"] == "slower").all()
    ]
    return " ".join(told) or None


@QUESTIONS.ask("split", "Where does the added time go: into collectives, arithmetic or waiting?")
def split(frame: pd.DataFrame) -> Finding | None:
    parts = tables.prices(frame)
    if not set(PARTS) <= set(parts["part"]):
        return None
    found = {ranks: found for ranks, some in parts.groupby("world_size") if (found := _largest_part(some))}
    largest, named = {ranks: part for ranks, (part, _) in found.items()}, {part for part, _ in found.values()}
    table, caveat = tables.price_table(frame), _beyond_the_bound(frame)
    if not named:
        return Finding("undecided", "Too noisy to tell: no part is the largest in every setting.", table, caveat)
    shown = join_words([f"{settings} with {ranks} ranks" for ranks, (_, settings) in found.items()])
    scope = f"intervals show it in {shown}: {scope_of(parts, ['backend', 'device', 'batch', 'features'])}"
    if len(named) > 1:
        fewest, most = min(largest), max(largest)
        different = f"{largest[fewest]} is the largest part with {fewest} ranks, {largest[most]} with {most}"
        return Finding("it depends", f"It depends: {different}.", table, caveat, where=scope)
    all_ranks = len(largest) == parts["world_size"].nunique()
    where = "" if all_ranks else f" with {join_words([str(ranks) for ranks in largest])} ranks"
    headline = f"Into {named.pop()}: it is the largest part in every setting{where}."
    return Finding("measured", headline, table, caveat, where=scope)


def _largest_part(some: pd.DataFrame) -> tuple[str, str] | None:
    """Which part has the largest median in all settings, and in how many intervals show it, if they do in any."""
    largest, shown, of_settings = set(), 0, some.groupby(list(SETTING))
    for _, of_setting in of_settings:
        parts = of_setting[of_setting["part"].isin(PARTS)].sort_values("seconds", ascending=False)
        if not (of_setting.loc[of_setting["part"] == PRICE, "low"] > 0).all():
            return None
        if len(parts) < 2:  # an alternative without which nothing can be told apart has no times here
            continue
        largest.add(str(parts["part"].iloc[0]))
        # no interval: nothing is shown
        shown += bool(parts["low"].iloc[0] > parts["high"].iloc[1:].max(skipna=False))
    return (largest.pop(), f"{shown} of {len(of_settings)} settings") if len(largest) == 1 and shown else None


def _beyond_the_bound(frame: pd.DataFrame) -> str | None:
    beyond = tables.bounds(frame)["verdict"].eq("slower")
    text = "settings a layer takes longer than plain BatchNorm and two all-reduces of its bytes per pass"
    return f"In {beyond.sum()} of {len(beyond)} {text}." if beyond.any() else None


@QUESTIONS.ask("one_collective", "Is one collective in the forward pass faster than two?")
def one_collective(frame: pd.DataFrame) -> Finding | None:
    forward, both = (
        compared(tables.ratios(frame, OWN, TWO_COLLECTIVES, phase=phase), subject, "with two", axis=AXIS)
        for phase, subject in (
            ("forward", "a forward pass with one collective"),
            (BOTH, "a forward and backward pass with one"),
        )
    )
    found = at_the_cost_of(forward, both)
    if found is None or found.table is None:
        return found
    return replace(found, table=found.table[[*SETTING, *JUDGED]])


@QUESTIONS.ask("against_torch", "Is labkit's SyncBatchNorm faster than torch's?")
def against_torch(frame: pd.DataFrame) -> Finding | None:
    return with_own(_over_torch(frame), tables.over_labkits(frame), "alternative", ALTERNATIVES, LABKITS, axis=AXIS)


def _over_torch(frame: pd.DataFrame) -> Finding | None:
    ratios = tables.ratios(frame, OWN, TORCH, phase=BOTH)
    if ratios.empty and len(refused := select(frame, ["refused"])["refused"].dropna().unique()):
        quoted = f"It says: “{'; '.join(sorted(refused))}”."
        return Finding("not measured", "Not measured: torch's layer does not take this input.", caveat=quoted)
    return compared(ratios, LABKITS, TORCHS, axis=AXIS, choose=f"Use {LABKITS}", keep=f"Use {TORCHS}")


@QUESTIONS.ask("memory", "Does a synchronized layer need less memory than plain BatchNorm?")
def memory(frame: pd.DataFrame) -> Finding | None:
    found = compared(tables.memory_over(frame, LOCAL), LABKITS, PLAIN, axis=AXIS, quantity=MEMORY)
    if found is None or found.table is None:
        return found
    percent = (100 * found.table["ratio"] - 100).groupby(found.table["world_size"])
    told = [f"{span(of_ranks, '{:+.0f}'.format)} % with {ranks} ranks" for ranks, of_ranks in percent]
    also = f"Its peak differs by {join_words(told)}." if found.verdict == "it depends" else None
    table = select(tables.memory(frame), alternative=[OWN, TORCH, LOCAL])
    return replace(found, table=table.drop(columns="panel"), also=also)


@QUESTIONS.ask("prediction", "Do counted operators, bytes and messages predict the times?")
def predicted(frame: pd.DataFrame, calibration: Calibration | None) -> Finding | None:
    table = predictions(frame, calibration)
    own = select(table, alternative=OWN)
    found = agreement(own, f"times of {LABKITS}", "what its counts predict", settings=SETTING)
    return found and replace(found, table=table.drop(columns="panel"), why=_unpredicted(table))


def _unpredicted(table: pd.DataFrame) -> str | None:
    """How far the arithmetic alone is off, without messages: by ranks, since cores are shared with more of them."""
    of_ranks = select(table, alternative=ALONE).groupby("world_size")["measured_over_predicted"]
    told = [f"{span(ratios)} with {ranks} ranks" for ranks, ratios in of_ranks]
    return f"Without messages, measured over predicted is {join_words(told)}." if told else None


@QUESTIONS.ask("published_trends", "Do the published trends hold on this machine?")
def published_trends(frame: pd.DataFrame) -> Finding | None:
    ratios = select(tables.ratios(frame, OWN, TORCH, phase=BOTH), world_size=PUBLISHED_RANKS)
    return published(
        [
            _hardly_grows(frame, "features", FEATURES),
            _hardly_grows(frame, "batch", BATCHES),
            _peak_grows_with_size(frame),
            claim("A self-made layer is faster than torch's", ratios, "faster"),
            _peak_over_torch(frame),
        ]
    )


def _hardly_grows(frame: pd.DataFrame, grows: str, span_of: tuple[int, int]) -> Trend | None:
    """`sync_batchnorm.csv`, torch's and the self-made layer: neither features nor batch make it slower by 15 %."""
    table = select(tables.time_growth(frame), grows=grows, world_size=PUBLISHED_RANKS)
    some = table[(table["before"] >= span_of[0]) & (table["after"] <= span_of[1])]
    if some.empty:
        return None
    text = "A layer with {0} {2} takes as long as one with {1}, or at most 15 % longer"
    text = text.format(some["after"].iloc[0], some["before"].iloc[0], GROWS[grows])
    return lies_within(text, some, most=HARDLY)


def _peak_grows_with_size(frame: pd.DataFrame) -> Claim | None:
    """Published, of both layers: the peak grows about as batch times features does."""
    table = select(tables.memory(frame), alternative=OWN, world_size=PUBLISHED_RANKS)
    table = table.assign(size=table["batch"] * table["features"]).sort_values("size")
    growths = []
    for _, group in table.groupby(list(tables.MACHINE)):
        first, last = group.iloc[0], group.iloc[-1]
        if first["size"] < last["size"]:
            growths.append(last["peak_bytes"] / first["peak_bytes"] / (last["size"] / first["size"]))
    holds = [PROPORTIONAL[0] <= growth <= PROPORTIONAL[1] for growth in growths]
    seen = f"{span(growths)} times their growth" if growths else ""
    return exact("Peak memory grows in proportion to batch times features", holds, [not o for o in holds], seen)


def _peak_over_torch(frame: pd.DataFrame) -> Claim | None:
    """Published, of the self-made layer: 2.4 to 2.8 times the peak memory of torch's."""
    over = select(tables.memory_over(frame, TORCH), world_size=PUBLISHED_RANKS)["ratio"]
    seen = f"{span(over)} times" if len(over) else ""
    text = f"A self-made layer needs {PUBLISHED_PEAK} times the memory of torch's or more"
    return exact(text, over >= PUBLISHED_PEAK, over < PUBLISHED_PEAK, seen)
