"""What a SyncBatchNorm run says: one answer to each question, nothing the intervals do not show."""

import pandas as pd

from labkit.lab.answers import Answer, Question, Verdict, answer_each
from labkit.lab.evidence import ratios_text, significant, span_text, verdict_of, wrong_rows
from labkit.lab.trends import trends_answer
from labkit.lab.units import format_bytes, format_seconds, join_words
from labkit.studies.sync_batchnorm import analysis
from labkit.studies.sync_batchnorm.alternatives import COLLECTIVES, LOCAL, OWN, TORCH, TWO_COLLECTIVES, WHOLE
from labkit.studies.sync_batchnorm.analysis import BOTH, MACHINE, PARTS, PRICE, SETTING
from labkit.studies.sync_batchnorm.predictions import predictions
from labkit.studies.sync_batchnorm.trends import published_trends

COST = Question("price", "What does synchronizing cost a layer, by features, batch and workers?", "batch_norm")
SPLIT = Question("split", "Where does that time go: into collectives or into arithmetic?")
ONE = Question("one_collective", "Is one collective in the forward pass faster than two?")
AGAINST_TORCH = Question("against_torch", "Is labkit's SyncBatchNorm faster than torch's?")
MEMORY = Question("memory", "How much memory does a synchronized layer save for backward, and need at its peak?")
PREDICTED = Question("prediction", "Do counted operators, bytes and messages predict the times?")
PUBLISHED = Question("published_trends", "Do the published trends hold on this machine?")
QUESTIONS = (COST, SPLIT, ONE, AGAINST_TORCH, MEMORY, PREDICTED, PUBLISHED)

TWOFOLD = 2.0
"""A prediction holds if it is off by no more than this factor."""
NOT_ABOVE_ZERO = "what it adds is not shown to be above zero"
GROWS = {"features": "features", "batch": "rows", "world_size": "ranks"}


def answer_all(frame: pd.DataFrame, coverage: pd.DataFrame) -> list[Answer]:
    """An answer to every question; a question whose rows are missing says so."""
    finders = {
        COST: price,
        SPLIT: split,
        ONE: one_collective,
        AGAINST_TORCH: against_torch,
        MEMORY: memory,
        PREDICTED: predicted,
        PUBLISHED: trends,
    }
    return answer_each(finders, frame, coverage)


def _where(machine: tuple[int, str, str]) -> str:
    ranks, backend, device = machine
    shared = ", ranks share a GPU: not a scaling result" if (device, backend) == ("cuda", "gloo") else ""
    return f"{ranks} ranks, {backend}{shared}"


def _name(alternative: str) -> str:
    return alternative.replace("_", " ")


def price(frame: pd.DataFrame) -> Answer | None:
    bad = wrong_rows(frame)
    sentences = []
    if not bad.empty:
        names = join_words(sorted({_name(name) for name in bad["alternative"]}))
        sentences.append(f"WRONG RESULTS, and therefore no times: {names}.")
    costs = analysis.prices(frame)
    costs = costs[costs["part"] == PRICE]
    if costs.empty:
        return Answer(COST, "not measured", " ".join(sentences)) if sentences else None
    both = analysis.times(frame, OWN, LOCAL, WHOLE, phase=BOTH)
    for machine, some in costs.groupby(MACHINE):
        here = both[(both[MACHINE] == list(machine)).all(axis=1)]
        medians = {name: span_text(rows["seconds"], format_seconds) for name, rows in here.groupby("alternative")}
        whole = f", on the whole batch in one process {medians[WHOLE]}" if WHOLE in medians else ""
        sentences.append(
            f"{_where(machine)}: forward and backward of a layer take {medians[OWN]}; plain BatchNorm on the local "
            f"batch takes {medians[LOCAL]}{whole}. Synchronizing adds {span_text(some['seconds'], format_seconds)}."
        )
    growth = analysis.growth(frame)
    sentences += [_growth_text(grows, some) for grows, some in growth.groupby("grows", sort=False)]
    over_plain = analysis.ratios(frame, OWN, LOCAL)
    _, slower = significant(over_plain)
    advised = len(slower) >= len(costs)
    evidence = ratios_text(over_plain, _setting_text)
    return Answer(COST, "measured", " ".join(sentences), "times", _advice(costs, advised), advised, evidence)


def _setting_text(row: pd.Series, over: str = "plain BatchNorm") -> str:
    return f"{row['world_size']} ranks, {row['batch']}x{row['features']}, over {over}"


def _growth_text(grows: str, some: pd.DataFrame) -> str:
    first, last = some["before"].iloc[0], some["after"].iloc[0]
    settings, some = len(some), some.dropna(subset="ratio")
    if some.empty:
        return f"With {last} {GROWS[grows]} instead of {first}: no ratio, as {NOT_ABOVE_ZERO}."
    left_out = f", in {len(some)} of {settings}: elsewhere {NOT_ABOVE_ZERO}" if len(some) < settings else ""
    shrunk, grown = (len(rows) for rows in significant(some))
    verdict = [f"shown to be more in {grown} of {len(some)}"] if grown else []
    verdict += [f"shown to be less in {shrunk} of {len(some)}"] if shrunk else []
    return (
        f"With {last} {GROWS[grows]} instead of {first} it adds {span_text(some['ratio'])} times as much "
        f"({join_words(verdict) or 'no difference shown'}{left_out})."
    )


def _advice(costs: pd.DataFrame, everywhere: bool) -> str:
    if not everywhere:
        return "synchronize where it helps the model: its price is not shown in every setting measured here."
    fewest = costs["world_size"].min()
    adds = span_text(costs.loc[costs["world_size"] == fewest, "seconds"], format_seconds)
    return (
        f"each synchronized layer adds {adds} to a step with {fewest} ranks, and layers add up: worth it only where "
        "the rows of one rank are too few for statistics of their own."
    )


def split(frame: pd.DataFrame) -> Answer | None:
    table = analysis.prices(frame)
    if not set(PARTS) <= set(table["part"]):
        return None
    sentences = []
    for machine, some in table.groupby(MACHINE):
        wide = some.pivot_table(index=SETTING, columns="part", values="seconds").dropna()
        if wide.empty:
            continue
        above = some[(some["part"] == PRICE) & analysis.is_above_zero(some)].set_index(SETTING).index
        priced = wide[wide.index.isin(above)]
        shares = (100 * priced.div(priced[PRICE], axis=0)).round() + 0.0  # no "-0"
        spans = [f"{name} {_span(wide[name])}{_share(shares[name])}" for name in PARTS]
        of_some = f" Shares are of {len(priced)} of {len(wide)} settings: elsewhere {NOT_ABOVE_ZERO}."
        sentences.append(
            f"{_where(machine)}: of what synchronizing adds, {join_words(spans)}."
            f"{of_some if len(priced) < len(wide) else ''}"
        )
        sentences += _largest_part(some)
    bounds = analysis.bounds(frame)
    if not bounds.empty:
        within = int((bounds["high"] <= 1).sum())
        beyond = int((bounds["low"] > 1).sum())
        sentences.append(
            "Against plain BatchNorm on the local batch plus twice two bare all-reduces of the same bytes, forward and "
            f"backward take {span_text(bounds['ratio'])} of the time: shown not to exceed it in {within} of "
            f"{len(bounds)} settings, and to exceed it in {beyond}."
        )
    return Answer(SPLIT, "measured", " ".join(sentences), "price") if sentences else None


def _share(percent: pd.Series) -> str:
    return f" ({span_text(percent, '{:.0f}'.format)} %)" if len(percent) else ""


def _largest_part(some: pd.DataFrame) -> list[str]:
    """Which part has the largest median in all settings, and in how many of them intervals show it."""
    largest: list[str] = []
    shown_in = 0
    for _, of_setting in some.groupby(SETTING):
        parts = of_setting[of_setting["part"].isin(PARTS)]
        if not analysis.is_above_zero(of_setting[of_setting["part"] == PRICE]).all():
            return ["No one part is shown to be the largest everywhere."]
        if len(parts) < 2:  # an alternative without which nothing can be told apart has no times here
            continue
        rows = parts.sort_values("seconds", ascending=False)
        first, others = rows.iloc[0], rows.iloc[1:]
        largest.append(str(first["part"]))
        shown_in += bool(first["low"] > others["high"].max(skipna=False))  # no interval: nothing is shown
    if len(set(largest)) > 1 or (largest and not shown_in):
        return ["No one part is shown to be the largest everywhere."]
    if not largest:
        return []
    if shown_in == len(largest):
        return [f"The largest part is {largest[0]} in every setting."]
    return [
        f"The largest median is that of {largest[0]} everywhere; intervals show it in {shown_in} of {len(largest)}."
    ]


def one_collective(frame: pd.DataFrame) -> Answer | None:
    ratios = analysis.ratios(frame, OWN, TWO_COLLECTIVES, phase=None)
    forward = ratios[ratios["phase"] == "forward"]
    if forward.empty:
        return None
    sentences = []
    for machine, some in ratios.groupby(MACHINE):
        spans = {phase: span_text(rows["ratio"]) for phase, rows in some.groupby("phase")}
        text = f"{_where(machine)}: with one collective the forward pass takes {spans.get('forward', 'nothing')}"
        if BOTH in spans:
            text += f", forward and backward together {spans[BOTH]}"
        sentences.append(f"{text} of the time with two.")
    faster, slower = significant(forward)
    lead = (
        f"One collective is shown to be faster in {len(faster)} and slower in {len(slower)} of {len(forward)} forward "
        "passes"
    )
    both = ratios[ratios["phase"] == BOTH]
    if len(both):
        gains, losses = significant(both)
        lead += (
            f"; forward and backward together it is shown to be faster in {len(gains)} and slower in {len(losses)} of "
            f"{len(both)}"
        )
    sentences.insert(0, f"{lead}.")
    saved = _saved(frame)
    sentences += [saved] if saved else []
    return Answer(ONE, verdict_of(faster, slower), " ".join(sentences), "one_collective")


def _saved(frame: pd.DataFrame) -> str | None:
    """Seconds saved forward, beside the time of one bare collective."""
    forward = analysis.times(frame, OWN, TWO_COLLECTIVES, COLLECTIVES, phase="forward")
    wide = forward.pivot_table(index=SETTING, columns="alternative", values="seconds")
    wide = wide.reindex(columns=[OWN, TWO_COLLECTIVES, COLLECTIVES]).dropna()
    if wide.empty:
        return None
    less = span_text(wide[TWO_COLLECTIVES] - wide[OWN], format_seconds)
    return f"The difference of medians is {less}; a bare forward collective takes {_span(wide[COLLECTIVES])}."


def _span(seconds: pd.Series) -> str:
    return span_text(seconds, format_seconds)


def against_torch(frame: pd.DataFrame) -> Answer | None:
    ratios = analysis.ratios(frame, OWN, TORCH)
    if ratios.empty:
        if refused := analysis.refusals(frame):
            text = f"Not measured: torch's layer refuses this input (“{'; '.join(refused)}”). It runs on GPUs only."
            return Answer(AGAINST_TORCH, "not measured", text)
        return None
    faster, slower = significant(ratios)
    text = (
        f"Forward and backward take {span_text(ratios['ratio'])} of the time of torch's layer: shown to be faster in "
        f"{len(faster)} and slower in {len(slower)} of {len(ratios)} settings."
    )
    verdict = verdict_of(faster, slower)
    advice = {"yes": "labkit's layer is the faster one here.", "no": "use torch's layer here: it is faster."}
    recommended = advice.get(verdict)
    evidence = ratios_text(ratios, lambda row: _setting_text(row, "torch's layer"))
    return Answer(AGAINST_TORCH, verdict, text, "times", recommended, recommended is not None, evidence)


def memory(frame: pd.DataFrame) -> Answer | None:
    table = analysis.memory(frame)
    own = table[table["alternative"] == OWN]
    if own.empty:
        return None
    sentences = []
    for name in (OWN, TORCH, LOCAL):
        some = table[table["alternative"] == name]
        if not some.empty:
            beside = some["beside_input_bytes"] / some["features"]
            sentences.append(
                f"Beside its input, {_name(name)} saves {span_text(some['beside_input_bytes'], format_bytes)} for "
                f"backward, {span_text(beside, '{:.1f}'.format)} bytes a feature."
            )
    wide = table.pivot_table(index=SETTING, columns="alternative", values="peak_bytes")
    for other in (TORCH, LOCAL):
        if other in wide:
            ratios = (wide[OWN] / wide[other]).dropna()
            if len(ratios):
                sentences.append(f"Labkit's peak is {span_text(ratios)} times that of {_name(other)}.")
    if beside_published := _beside_published(own):
        sentences.append(beside_published)
    return Answer(MEMORY, "measured", " ".join(sentences), "memory")


def _beside_published(own: pd.DataFrame) -> str | None:
    """Peaks of the same sizes on other hardware: an allocator counts the same bytes there."""
    keys = ["world_size", "batch", "features"]
    both = own.merge(analysis.published()[[*keys, "alternative", "peak_bytes"]], on=keys, suffixes=("", "_published"))
    if both.empty:
        return None
    over = (both["peak_bytes"] / both["peak_bytes_published"]).groupby(both["alternative_published"])
    spans = [f"{span_text(ratios)} times that of the {name} one" for name, ratios in over]
    return f"Of the published peaks at the same sizes, with two GPUs, it is {join_words(spans)}."


def predicted(frame: pd.DataFrame) -> Answer | None:
    table = predictions(frame)
    own = table[table["alternative"] == OWN]["measured_over_predicted"]
    if own.empty:
        return None
    parts = [
        f"{_name(name)} {span_text(rows['measured_over_predicted'])}"
        for name, rows in table.groupby("alternative", sort=False)
    ]
    counts = table[table["alternative"].isin([OWN, LOCAL])].groupby("alternative")["operators"].max()
    sentences = [f"Forward and backward, measured over predicted: {join_words(parts)}."]
    if {OWN, LOCAL} <= set(counts.index):
        sentences.append(
            f"A synchronized layer runs {counts[OWN]:.0f} operators beside its collectives, a plain one "
            f"{counts[LOCAL]:.0f}."
        )
    near = own.between(1 / TWOFOLD, TWOFOLD)
    sentences.insert(
        0, f"For the synchronized layer the count is within a factor of two in {near.sum()} of {len(own)} settings."
    )
    verdict: Verdict = "yes" if near.all() else "mixed" if near.any() else "no"
    return Answer(PREDICTED, verdict, " ".join(sentences), "predicted")


def trends(frame: pd.DataFrame) -> Answer | None:
    return trends_answer(PUBLISHED, published_trends(frame), "times")
