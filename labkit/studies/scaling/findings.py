"""What the scaling lab asks, and how a run answers."""

from dataclasses import replace
from typing import Final

import numpy as np
import pandas as pd

from labkit.lab.as_predicted import CLOSE, agreement
from labkit.lab.claims import published
from labkit.lab.findings import Claim, Finding, Questions, Verdict
from labkit.lab.rows import select
from labkit.lab.units import counted, format_number, join_words, span
from labkit.scaling.paying import KINDS
from labkit.studies.scaling import tables
from labkit.studies.scaling.here import NOTHING

QUESTIONS = Questions(missing="no predictions of this kind in the run")
LEAST_COVERED, MOST_COVERED = 85.0, 95.0
TRENDS = (
    ("Megatron, 1.7B to 1T", "Models that grow with the GPUs use them better: from 32 to 3072 A100s, 1.7B to 1T"),
    ("Llama 3, 405B", "With twice the GPUs on the same batch, MFU falls: 43 to 41 % from 8,192 to 16,384 H100s"),
)
OPEN: Final = "is not shown here"
PUBLISHED = {"measured_s": "published_s", "measured_over_predicted": "published_over_predicted"}
FEWEST_ROWS = 20  # fewer do not tell 90 from 100 %
NEAR_BEST = 5.0  # percent behind the best measured, in the mean over families


@QUESTIONS.ask("error", "How wrong is this predictor?")
def error(frame: pd.DataFrame) -> Finding | None:
    table = tables.errors(frame)
    if table.empty:
        return None
    half, nine = (table["predicted_error"].quantile(q) for q in (0.5, 0.9))
    unseen = table["framework_left_out_error"]
    return Finding(
        "predicted",
        f"Half of the published steps are predicted within {half:.1f} %, nine of ten within {nine:.0f} %.",
        tables.scoreboard(frame),
        caveat="For a framework of your own, calibrate with three runs.",
        where=f"{len(table):,} steps, each predicted by constants fitted without any row of its architecture",
        also=f"Of a framework that was never published, half are within {unseen.median():.0f} %, nine of ten within "
        f"{unseen.quantile(0.9):.0f} %.",
    )


@QUESTIONS.ask("rivals", "Is that better than one constant, and than what other predictors claim?")
def rivals(frame: pd.DataFrame) -> Finding | None:
    table = tables.scoreboard(frame)
    if table.empty:
        return None
    better = table[table["median_percent"] < table["one_constant_median_percent"]]
    others = tables.predictors(frame)
    ahead = others[others["mean_percent"] < others["here_mean_percent"]]
    verdict: Verdict = "no" if better.empty else "it depends" if len(ahead) or len(better) < len(table) else "yes"
    one, ours = (tables.errors(frame)[f"{name}_error"].median() for name in ("one_constant", "predicted"))
    rest = sorted(set(table["group"]) - set(better["group"]))
    mostly = "Partly" if len(rest) > 2 else f"Yes, but on {join_words(rest)}" if rest else "Mostly"
    answer = {"yes": "Yes", "no": "No"}.get(verdict, mostly)
    headline = f"{answer}: the median error is {ours:.1f} %, against {one:.0f} % with one MFU"
    if len(ahead):
        less = "a lower mean error" + ("" if ahead["same_rows"].all() else " on other rows")
        headline += f"; {join_words(ahead['predictor'].tolist())} claim{'s' if len(ahead) == 1 else ''} {less}"
    told = {
        words: [
            f"{row['predictor']} {row['mean_percent']:.1f} %, here {row['here_mean_percent']:.1f} %"
            for _, row in others[others["same_rows"] == same].iterrows()
        ]
        for words, same in (("Mean errors on the same rows", True), ("Not on the same rows", False))
    }
    why = " ".join(f"{words}: {'; '.join(texts)}." for words, texts in told.items() if texts) or None
    return Finding(verdict, f"{headline}.", others, why=why)


@QUESTIONS.ask("coverage", "Do nine of ten measured steps lie in the 90 % intervals?")
def coverage(frame: pd.DataFrame) -> Finding | None:
    table = tables.scoreboard(frame)
    if table.empty:
        return None
    held = 100 * tables.errors(frame)["covered"].mean()
    narrow = table[table["covered_percent"] < LEAST_COVERED]
    wide = table[(table["covered_percent"] > MOST_COVERED) & (table["rows"] >= FEWEST_ROWS)]
    off = {"too few": narrow["group"].tolist(), "too many": wide["group"].tolist()}
    count = len(narrow) + len(wide)
    verdict: Verdict = "no" if not LEAST_COVERED <= held <= MOST_COVERED else "it depends" if count else "yes"
    answer = {"yes": "Yes", "no": "No", "it depends": "Mostly"}[verdict]
    but = f"; in {counted(count, 'table')} too few or too many" if count else ""
    headline = f"{answer}: the intervals hold {held:.0f} % of the rows{but}."
    told = [f"{words} on {join_words(groups)}" for words, groups in off.items() if groups]
    caveat = (
        f"They hold {', '.join(told)}: {LEAST_COVERED:.0f} to {MOST_COVERED:.0f} % would be right." if told else None
    )
    columns = ["group", "rows", "covered_percent"]
    return Finding(
        verdict, headline, table[columns], caveat, "Each interval comes from rows of other architectures only."
    )


@QUESTIONS.ask("worst", "Which published rows are predicted worst, and why?")
def worst(frame: pd.DataFrame) -> Finding | None:
    rows, table = tables.errors(frame), tables.worst(frame)
    if rows.empty:
        return None
    if table.empty:
        return Finding("predicted", "None is more than twice off.")
    groups = table["group"].value_counts()
    where = f"{'all' if len(groups) == 1 else 'most'} of them {groups.index[0]}'s"
    headline = f"{counted(len(table), 'row')} of {len(rows):,} are more than twice off, {where}."
    told = table["why"].value_counts().drop(tables.UNKNOWN, errors="ignore")
    known = f"A reason is known of {told.sum()}" + (
        f", most often: {told.index[0]} ({told.iloc[0]})." if len(told) else "."
    )
    columns = ["group", "line", "of_model", "of_gpu", "of_gpus", "arrangement", "measured_s", "predicted_s"]
    columns += ["times_off", "why"]
    return Finding("predicted", headline, table[columns].head(25).rename(columns=PUBLISHED), why=known)


@QUESTIONS.ask("where", "Where does the time go from one node to thousands of GPUs?")
def where(frame: pd.DataFrame) -> Finding | None:
    table, shares = tables.trainings(frame), tables.shares(frame)
    if table.empty:
        return None
    model = table["model"].iloc[0]
    own = shares[shares["model"] == model].pivot_table(
        index="gpus", columns="kind", values="share_percent", fill_value=0.0
    )
    busy = own[tables.COMPUTE]
    most = busy.index[-1]
    headline = f"Computing takes {busy.iloc[0]:.0f} % of a step on the fewest GPUs, {busy.iloc[-1]:.0f} % on the most."
    setting = f"{model} on {busy.index[0]:,} and {most:,} GPUs; computing includes what kernels lose to the peak"
    cost = table[table["model"] == model].set_index("gpus")["gpu_hours"]
    why = (
        f"{model} costs {format_number(cost.iloc[0])} GPU-hours per billion tokens on {cost.index[0]:,} GPUs and "
        f"{format_number(cost.iloc[-1])} on {most:,}."
    )
    widest = table[table["model"] == model].iloc[-1]
    caveat = (
        f"The 90 % interval of a framework never seen is wide: {format_number(widest['low'])} to "
        f"{format_number(widest['high'])} GPU-hours on {most:,} GPUs. {_left_out(frame)}"
    )
    return Finding("predicted", headline, table, why=why, caveat=caveat.strip(), where=setting)


def _left_out(frame: pd.DataFrame) -> str:
    """Trainings that fit on no layout."""
    rows = select(frame, ["model", "gpus", "not_measured"], sweep="training").dropna(subset="not_measured")
    told = [
        f"{row['model']} does not fit on {row['gpus']:.0f} GPUs: {row['not_measured']}" for _, row in rows.iterrows()
    ]
    return f"{'; '.join(told)}." if told else ""


@QUESTIONS.ask("paying", "When does each kind of parallelism stop paying?")
def paying(frame: pd.DataFrame) -> Finding | None:
    table = tables.margins(frame)
    if table.empty:
        return None
    rows = select(frame, ["kind", "margin", "exposed_percent"], sweep="margins").dropna(subset="margin")
    rows = rows.astype({"margin": float, "exposed_percent": float})
    shown = pd.DataFrame([(kind.name, kind.formula) for kind in KINDS], columns=["kind", "compute_over_communication"])
    is_below = rows["margin"] < 1
    below, above = (some.groupby("kind")["exposed_percent"] for some in (rows[is_below], rows[~is_below]))
    shown = shown.assign(
        rows=shown["kind"].map(rows["kind"].value_counts()).fillna(0).astype(int),
        rows_below_one=shown["kind"].map(below.size()).fillna(0).astype(int),
        exposed_below_percent=shown["kind"].map(below.median()),
        exposed_above_percent=shown["kind"].map(above.median()),
    )
    lost = shown.dropna(subset="exposed_below_percent").sort_values("exposed_below_percent")
    if lost.empty:
        return Finding("predicted", "No published row has less compute than communication.", shown)
    shares = span(lost["exposed_below_percent"], "{:.0f}".format)
    most = lost["kind"].iloc[-1]
    headline = f"With less compute than communication, a typical step loses {shares} %, most to {most} parallelism."
    never = shown.loc[shown["rows_below_one"] == 0, "kind"].tolist()
    caveat = f"No published row has so little compute for {join_words(never)} parallelism." if never else None
    return Finding("predicted", headline, shown, caveat)


@QUESTIONS.ask("choice", "Is the layout it chooses near the best that was measured?")
def choice(frame: pd.DataFrame) -> Finding | None:
    table = tables.choices(frame)
    if table.empty:
        return None
    three, first, simple = (table[f"{name}_behind_percent"] for name in ("best_of_three", "first", "simple"))
    near, beats = ((first <= NEAR_BEST).all(), (three <= NEAR_BEST).all()), bool((first < simple).all())
    verdict: Verdict = "yes" if all(near) and beats else "it depends" if any(near) or beats else "no"
    alone, mean, plain = (float(np.average(one, weights=table["families"])) for one in (first, three, simple))
    told = f"its first proposal is {alone:.0f} % behind on the mean, the best of its three {mean:.1f} %."
    why = f"The smallest layout that fits is {plain:.0f} % behind. Time two or three before a long training."
    return Finding(verdict, f"{verdict.capitalize()}: {told}", table, why=why)


@QUESTIONS.ask("students", "Does it predict what students measured on two to four GPUs?")
def students(frame: pd.DataFrame) -> Finding | None:
    table = tables.students(frame)
    found = agreement(table, "published steps", "what is predicted")
    if found is None:
        return None
    inside = ((table["low"] <= table["measured_s"]) & (table["measured_s"] <= table["high"])).sum()
    why = f"{inside} of {len(table)} lie in the 90 % interval of a framework never seen. {_of_buckets(table)}"
    caveat = (
        "The write-ups do not all name their GPUs: H100s are assumed, linked as the author of the sweep and of "
        f"write-up A measured, by NVLink elsewhere. {_of_sharded_optimizers(table)}"
    )
    return replace(found, table=table.rename(columns=PUBLISHED), why=why.strip(), caveat=caveat.strip())


def _of_buckets(table: pd.DataFrame) -> str:
    """What small buckets cost, published and predicted."""
    swept = table.dropna(subset="bucket_mb")
    if swept.empty:
        return ""
    sums = swept.groupby("bucket_mb")[["measured_s", "predicted_s"]].sum()
    measured, predicted = (100 * (sums[name].iloc[0] / sums[name].min() - 1) for name in sums)
    return f"The smallest buckets cost {measured:.1f} %, {predicted:.1f} % predicted."


def _of_sharded_optimizers(table: pd.DataFrame) -> str:
    """By write-up, what sharding the optimizer does to the step."""
    whole = table.set_index(["author", "setting", "variant"])[["measured_s", "predicted_s"]]
    told: dict[str, list[pd.Series]] = {}
    for author, setting, variant in whole.index:
        other = (author, setting, f"{variant}+sharded_optimizer")
        if other in whole.index:
            told.setdefault(author, []).append(whole.loc[other] / whole.loc[(author, setting, variant)])
    changes = [(author, 100 * (pd.DataFrame(ratios).mean() - 1)) for author, ratios in told.items()]
    texts = [
        f"{author} {change['measured_s']:+.0f} %, {change['predicted_s']:+.0f} % predicted"
        for author, change in changes
    ]
    return f"A sharded optimizer changes the step of {'; of '.join(texts)}." if texts else ""


@QUESTIONS.ask("here", "What do this machine's own ranks do, beside what its limits predict?", missing=NOTHING)
def here(frame: pd.DataFrame) -> Finding | None:
    settings = ("workload", "world_size", "implementation")
    return agreement(tables.here(frame), "steps of its ranks", "what the limits predict", settings=settings)


@QUESTIONS.ask("trends", "Do published trends follow?")
def trends(frame: pd.DataFrame) -> Finding | None:
    table = tables.trends(frame)
    claims = [_trend(text, own) for name, text in TRENDS if len(own := table[table["trend"] == name])]
    found = published(claims)
    if found is None:
        return None
    held = sum(claim.outcome == "holds here" for claim in claims)
    rest = "" if held == len(claims) else "; the other is not" if len(claims) == 2 else "; the others are not"
    headline = f"{held} of {counted(len(claims), 'published trend')} {'is' if held == 1 else 'are'} predicted"
    why = f"Change of MFU: {'; '.join(f'{claim.text}: {claim.seen}' for claim in claims)}."
    return replace(found, headline=f"{headline} in direction and size{rest}.", table=table, why=why, claims=())


def _trend(text: str, own: pd.DataFrame) -> Claim:
    """Whether MFU changes as published from the fewest GPUs to the most: in direction, and in size within `CLOSE`."""
    ends = own.sort_values("gpus")[["published_percent", "mfu_percent"]].astype(float).iloc[[0, -1]]
    theirs, ours = np.log(ends.iloc[1] / ends.iloc[0])
    is_as_large = theirs * ours > 0 and 1 / CLOSE <= ours / theirs <= CLOSE
    seen = f"published {100 * np.expm1(theirs):+.0f} %, predicted {100 * np.expm1(ours):+.0f} %"
    return Claim(text, "holds here" if is_as_large else "is contradicted here" if theirs * ours < 0 else OPEN, seen)
