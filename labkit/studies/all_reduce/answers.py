"""What an all-reduce run says: one answer to each question, nothing the intervals do not show."""

from itertools import groupby

import pandas as pd

from labkit.bench.statistics import judged
from labkit.costs.communication import ALL_REDUCE_COSTS
from labkit.lab.answers import Answer, Question, Verdict, answer_each
from labkit.lab.evidence import ratios_text, significant, span_text, verdict_of, with_interval
from labkit.lab.trends import trends_answer
from labkit.lab.units import format_bytes, format_rate, format_seconds, format_share, join_words
from labkit.studies.all_reduce import analysis, trends
from labkit.studies.all_reduce.transport_tables import TRANSPORTS, transports
from labkit.studies.all_reduce.transports import CHOSEN, TORCH
from labkit.studies.all_reduce.worker import OWN

SIZE_AND_RANKS = Question(
    "size_and_ranks",
    "How does the time of an all-reduce grow with its size and with the number of ranks?",
)
ALGORITHMS = Question(
    "algorithms_against_torch",
    "Does one of labkit's algorithms beat torch's all-reduce, at which sizes, and at what error?",
    "all_reduce",
)
RING = Question("ring_against_torch", "Is a ring of point-to-point calls as fast as torch's all-reduce?")
ALPHA_BETA = Question(
    "alpha_beta",
    "Does an alpha-beta model explain the times, and does one algorithm overtake another where it says?",
)
SCHEDULING = Question(
    "scheduling",
    "Are small all-reduces faster under SCHED_BATCH than under the default scheduling policy?",
    "scheduling",
)
PUBLISHED = Question("published_trends", "Do the published trends hold on this machine?")
QUESTIONS = (SIZE_AND_RANKS, ALGORITHMS, RING, ALPHA_BETA, TRANSPORTS, SCHEDULING, PUBLISHED)


def answer_all(frame: pd.DataFrame, coverage: pd.DataFrame) -> list[Answer]:
    """An answer to every question; a question whose rows are missing says so."""
    finders = {
        SIZE_AND_RANKS: size_and_ranks,
        ALGORITHMS: algorithms_against_torch,
        RING: ring_against_torch,
        ALPHA_BETA: alpha_beta,
        TRANSPORTS: transports,
        SCHEDULING: scheduling,
        PUBLISHED: published_trends,
    }
    return answer_each(finders, frame, coverage, "no row of this run holds the times it needs")


def size_and_ranks(frame: pd.DataFrame) -> Answer | None:
    table = analysis.times(frame, "sizes")
    table = table[(table["algorithm"] == TORCH) & (table["world_size"] > 1)]
    if table.empty:
        return None
    sentences = []
    for backend, of_backend in table.groupby("backend"):
        for world_size, series in of_backend.groupby("world_size"):
            small, large = series.loc[series["n_bytes"].idxmin()], series.loc[series["n_bytes"].idxmax()]
            sentences.append(
                f"{backend}, {world_size} ranks: {with_interval(small)} for {format_bytes(small['n_bytes'])}, "
                f"{with_interval(large)} for {format_bytes(large['n_bytes'])}, where a link carries "
                f"{format_rate(large['busbw_gb_per_s'] * 1e9)} (bus bandwidth)."
            )
        growth = _growth_with_ranks(of_backend)
        sentences += [growth] if growth else []
    return Answer(SIZE_AND_RANKS, "measured", " ".join(sentences), "time_by_size", more_figures=("bus_bandwidth",))


def _growth_with_ranks(table: pd.DataFrame) -> str | None:
    """How much longer the largest common size takes with the most ranks than with the fewest."""
    fewest, most = table["world_size"].min(), table["world_size"].max()
    common = set(table.loc[table["world_size"] == fewest, "n_bytes"])
    common &= set(table.loc[table["world_size"] == most, "n_bytes"])
    if fewest == most or not common:
        return None
    at = table[table["n_bytes"] == max(common)].set_index("world_size")
    before, after = at.loc[fewest], at.loc[most]
    where = f"At {format_bytes(max(common))}, {most} ranks take"
    factor = after["seconds"] / before["seconds"]
    expected = (2 * (most - 1) / most) / (2 * (fewest - 1) / fewest)
    told = f"by the bytes a rank sends it would be {expected:.1f}"
    if after["low"] > before["high"]:
        return f"{where} {factor:.1f} times as long as {fewest}; {told}."
    if after["high"] < before["low"]:
        return f"{where} only {factor:.2f} of the time of {fewest}; {told}."
    return f"{where} no longer than {fewest}, as far as is shown."


def algorithms_against_torch(frame: pd.DataFrame) -> Answer | None:
    ratios = analysis.against_torch(frame, "sizes")
    ratios = ratios[(ratios["world_size"] > 1) & ratios["algorithm"].isin(list(OWN))]
    if ratios.empty:
        return None
    compared = ratios[ratios["algorithm"] != CHOSEN]
    compared = ratios if compared.empty else compared  # it is one of the others, where they were measured
    faster, _ = significant(compared)
    sentences = [
        _winners(of_world, faster, f"{backend}, {world_size} ranks")
        for (backend, world_size), of_world in compared.groupby(["backend", "world_size"])
    ]
    sentences.append(_error_sentence(frame))
    wins, settings = faster.groupby(analysis.SETTING).ngroups, compared.groupby(analysis.SETTING).ngroups
    verdict: Verdict = "yes" if wins == settings else "mixed" if wins else "no"
    if not wins and verdict_of(*significant(compared)) == "no difference shown":
        verdict = "no difference shown"
    text = " ".join(sentence for sentence in sentences if sentence)
    chosen = ratios[(ratios["algorithm"] == CHOSEN) & (ratios["backend"] == "gloo")]
    is_shown = any(len(some) for some in significant(chosen))
    evidence = ratios_text(chosen, _place)
    return Answer(ALGORITHMS, verdict, text, "against_torch", _chooser_recommendation(chosen), is_shown, evidence)


def _place(row: pd.Series) -> str:
    return f"{format_bytes(row['n_bytes'])}, {row['world_size']} ranks"


def _winners(compared: pd.DataFrame, faster: pd.DataFrame, where: str) -> str:
    """Which own algorithm beats torch from which size to which; sizes at which none does end a range."""
    rows = faster[faster.index.isin(compared.index)]
    best = {n: group.loc[group["ratio"].idxmin()] for n, group in rows.groupby("n_bytes")}
    sizes = sorted(compared["n_bytes"].unique())
    parts: list[str] = []
    before = None
    for name, run in groupby(sizes, key=lambda n: best[n]["algorithm"] if n in best else None):
        if name is None:
            continue
        won = list(run)
        place = f"at {format_bytes(won[0])}"
        if len(won) > 1:
            place = f"from {format_bytes(won[0])} to {format_bytes(won[-1])}"
        ratios = [best[n]["ratio"] for n in won]
        span = dict.fromkeys(f"{pick(ratios):.2f}" for pick in (min, max))
        subject = "" if name == before else f"{_name(name)} "
        parts.append(f"{subject}{place} ({' to '.join(span)} of torch's time)")
        before = name
    if not parts:
        return f"{where}: no algorithm is shown to be faster than torch."
    return f"{where}: torch is beaten by {join_words(parts)}."


def _error_sentence(frame: pd.DataFrame) -> str:
    checked = analysis.errors_and_memory(frame)
    if checked.empty:
        return ""
    wrong = checked[checked["gate"] != "ok"]
    if not wrong.empty:
        names = join_words(sorted({_name(name) for name in wrong["algorithm"]}))
        return f"WRONG RESULTS, and therefore no times, from {names} in {len(wrong)} settings."
    worst = checked.groupby("algorithm")["error"].max()
    own, torch = worst.drop(TORCH, errors="ignore"), worst.get(TORCH)
    beside = f" (torch: {torch:.1e})" if torch is not None else ""
    return f"All agree with the exact mean: the largest relative error of any is {own.max():.1e}{beside}."


def _chooser_recommendation(chosen: pd.DataFrame) -> str | None:
    if chosen.empty:
        return None
    faster, slower = significant(chosen)
    if faster.empty and slower.empty:
        return "labkit's all_reduce or torch's: no difference is shown beyond chance."
    parts = []
    if not faster.empty:
        gain = f"{faster['ratio'].min():.2f} to {faster['ratio'].max():.2f} of torch's time"
        where = _sizes_by_ranks(faster, chosen)
        parts.append(f"use labkit's all_reduce {where}: faster in {len(faster)} of {len(chosen)} settings ({gain})")
    if not slower.empty:
        worst = slower.loc[slower["ratio"].idxmax()]
        at_worst = f"in {len(slower)} of {len(chosen)} settings (at worst {worst['ratio']:.2f}x at {_place(worst)})"
        start = "" if parts else "labkit's all_reduce is "
        parts.append(f"{start}slower {at_worst}")
    return f"{'; '.join(parts)}."


def _sizes_by_ranks(rows: pd.DataFrame, compared: pd.DataFrame) -> str:
    """ "for 4 KiB with 2 ranks and 1 KiB to 256 KiB with 4 ranks": a span only where no compared size is left out."""
    parts = []
    for world_size, of_world in rows.groupby("world_size"):
        sizes = sorted(of_world["n_bytes"].unique())
        all_sizes = compared.loc[compared["world_size"] == world_size, "n_bytes"]
        is_span = len(sizes) > 2 and all_sizes.between(sizes[0], sizes[-1]).sum() == len(of_world)
        told = span_text(sizes, format_bytes) if is_span else join_words([format_bytes(size) for size in sizes])
        parts.append(f"{told} with {world_size} ranks")
    return f"for {'; '.join(parts)}"


def ring_against_torch(frame: pd.DataFrame) -> Answer | None:
    ratios = analysis.against_torch(frame)
    ratios = judged(ratios[(ratios["algorithm"] == "ring") & (ratios["world_size"] > 1)])
    if ratios.empty:
        return None
    counts = ratios["verdict"].value_counts()
    text = (
        f"Over {len(ratios)} settings the ring is faster in {counts.get('faster', 0)}, slower in "
        f"{counts.get('slower', 0)}, and no difference is shown in {counts.get('no difference shown', 0)}."
    )
    faster, slower = significant(ratios)
    for word, some, at in (("best", faster, "idxmin"), ("worst", slower, "idxmax")):
        if not some.empty:
            row = some.loc[getattr(some["ratio"], at)()]
            text += (
                f" At {word} it takes {row['ratio']:.2f} [{row['low']:.2f}, {row['high']:.2f}] of torch's time "
                f"({format_bytes(row['n_bytes'])}, {row['world_size']} ranks, {row['backend']})."
            )
    return Answer(RING, verdict_of(faster, slower), text, "many_ranks")


def alpha_beta(frame: pd.DataFrame) -> Answer | None:
    fitted = analysis.fits(frame)
    if not fitted:
        return None
    typical = [model.median_error for model in fitted.values()]
    worst = max(model.largest_error for model in fitted.values())
    sentences = [
        "Fitted to all algorithms of a world size together, alpha and beta leave half of the times within "
        f"{format_share(max(typical))} and the worst off by {format_share(worst)}."
    ]
    predicted = analysis.predictions(frame)["measured_over_predicted"].dropna()
    if not predicted.empty:
        sentences.append(
            "Predicted from single exchange steps before measuring, the median of measured over predicted is "
            f"{predicted.median():.2f} (from {predicted.min():.2f} to {predicted.max():.2f})."
        )
    held = analysis.crossover_table(frame)["prediction"].value_counts()
    decided = held.get("holds", 0) + held.get("does not hold", 0)
    if decided:
        sentences.append(
            f"Of {decided} predictions of where one algorithm overtakes another that the measurements can decide, "
            f"{held.get('holds', 0)} hold."
        )
    else:
        sentences.append("Where one algorithm overtakes another, the measurements do not decide.")
    sentences += _link_sentences(frame)
    verdict: Verdict = "measured"
    if decided:
        verdict = "yes" if held.get("holds", 0) == decided else "mixed" if held.get("holds", 0) else "no"
    return Answer(ALPHA_BETA, verdict, " ".join(sentences), figure="predicted")


def _link_sentences(frame: pd.DataFrame) -> list[str]:
    """What a link costs within a host and between hosts; nothing where all ranks share one."""
    return [
        f"{backend}, {world_size} ranks, one {link}: {format_seconds(model.alpha_s)} a message"
        + (f" and {format_rate(1 / model.beta_s_per_byte)} each way." if model.beta_s_per_byte > 0 else ".")
        for link, models in analysis.link_models(frame).items()
        for (backend, world_size), model in models.items()
    ]


def scheduling(frame: pd.DataFrame) -> Answer | None:
    ratios = analysis.batch_against_default(frame)
    ratios = ratios[ratios["scheduling"] == "batch"]
    if ratios.empty:
        return None
    faster, slower = significant(ratios)
    text = (
        f"SCHED_BATCH is shown to be faster in {len(faster)} of {len(ratios)} settings and slower in {len(slower)}; "
        f"its time over the default policy's is {ratios['ratio'].median():.2f} in the middle, from "
        f"{ratios['ratio'].min():.2f} to {ratios['ratio'].max():.2f}."
    )
    verdict = verdict_of(faster, slower)
    advice = {
        "yes": f"run CPU ranks under SCHED_BATCH: faster in {len(faster)} of {len(ratios)} settings"
        + (f" ({span_text(faster['ratio'])} of the time)." if len(faster) else "."),
        "no": "leave the default scheduling policy: SCHED_BATCH is nowhere shown to be faster.",
        "mixed": f"SCHED_BATCH helps in {len(faster)} and hurts in {len(slower)} of {len(ratios)} settings.",
        "no difference shown": "the scheduling policy does not matter here, as far as is shown.",
    }
    is_shown = verdict != "no difference shown"
    evidence = ratios_text(ratios, lambda row: f"{_name(row['algorithm'])}, {_place(row)}")
    return Answer(SCHEDULING, verdict, text, "scheduling", advice[verdict], is_shown, evidence)


def published_trends(frame: pd.DataFrame) -> Answer | None:
    return trends_answer(PUBLISHED, trends.published_trends(frame), "time_by_size", ("published_ranks",))


def _name(algorithm: str) -> str:
    return algorithm.replace("_", " ") if algorithm in ALL_REDUCE_COSTS else algorithm
