"""What the scaling lab asks, and how a run answers."""

from dataclasses import replace

import numpy as np
import pandas as pd

from labkit.lab.claims import judged_claim, published
from labkit.lab.comparing import agreement
from labkit.lab.findings import Claim, Finding, Questions, Verdict
from labkit.lab.rows import select
from labkit.lab.units import counted, format_number, join_words
from labkit.scaling.paying import KINDS
from labkit.studies.scaling import tables
from labkit.studies.scaling.here import NOTHING

QUESTIONS = Questions(missing="no predictions of this kind in the run")
LEAST_COVERED, MOST_COVERED = 85.0, 95.0
TRENDS = (
    ("Megatron, 1.7B to 1T", "Models that grow with the GPUs use them better: from 32 to 3072 A100s, 1.7B to 1T", True),
    ("Llama 3, 405B", "With twice the GPUs on the same batch, MFU falls: 43 to 41 % from 8,192 to 16,384 H100s", False),
)
NEAR_BEST = 5.0  # percent behind the best measured, in the mean over families


@QUESTIONS.ask("error", "How wrong is this predictor?")
def error(frame: pd.DataFrame) -> Finding | None:
    table = tables.errors(frame)
    if table.empty:
        return None
    half, nine = (table["predicted_error"].quantile(q) for q in (0.5, 0.9))
    unseen = table["framework_left_out_error"]
    return Finding(
        "measured",
        f"Half of the published steps are predicted within {half:.1f} %, nine of ten within {nine:.0f} %.",
        tables.scoreboard(frame),
        caveat=f"Of a framework that was never published, half are within {unseen.median():.0f} %, nine of ten within "
        f"{unseen.quantile(0.9):.0f} %: calibrate with three runs of your own.",
        why="Each row is predicted by constants fitted without any row of its architecture.",
    )


@QUESTIONS.ask("rivals", "Is that better than one constant, and than what other predictors claim?")
def rivals(frame: pd.DataFrame) -> Finding | None:
    table = tables.scoreboard(frame)
    if table.empty:
        return None
    better = table[table["median_percent"] < table["one_constant_median_percent"]]
    others = tables.predictors(frame)
    verdict: Verdict = "yes" if len(better) == len(table) else "it depends" if len(better) else "no"
    one, ours = (tables.errors(frame)[f"{name}_error"].median() for name in ("one_constant", "predicted"))
    rest = sorted(set(table["group"]) - set(better["group"]))
    answer = {"yes": "Yes", "no": "No"}.get(verdict, f"Yes, but on {join_words(rest)}" if len(rest) < 3 else "Partly")
    headline = f"{answer}: the median error is {ours:.1f} %, against {one:.0f} % with one MFU."
    told = [
        f"{row['predictor']} {row['mean_percent']:.1f} %, here {row['here_mean_percent']:.1f} %"
        for _, row in others.iterrows()
    ]
    why = f"Mean errors on the same published tables: {'; '.join(told)}." if told else None
    return Finding(verdict, headline, others, why=why)


@QUESTIONS.ask("coverage", "Do nine of ten measured steps lie in the 90 % intervals?")
def coverage(frame: pd.DataFrame) -> Finding | None:
    table = tables.scoreboard(frame)
    if table.empty:
        return None
    held = 100 * tables.errors(frame)["covered"].mean()
    narrow = table[table["covered_percent"] < LEAST_COVERED]
    verdict: Verdict = "no" if not LEAST_COVERED <= held <= MOST_COVERED else "yes" if narrow.empty else "it depends"
    answer = {"yes": "Yes", "no": "No", "it depends": "Mostly"}[verdict]
    few = f"; too few on {narrow['group'].iloc[0]}" if len(narrow) == 1 else f"; too few in {len(narrow)} tables"
    headline = f"{answer}: the intervals hold {held:.0f} % of the rows{few if len(narrow) else ''}."
    columns = ["group", "rows", "covered_percent"]
    return Finding(verdict, headline, table[columns], why="Each interval comes from rows of other architectures only.")


@QUESTIONS.ask("worst", "Which published rows are predicted worst, and why?")
def worst(frame: pd.DataFrame) -> Finding | None:
    rows, table = tables.errors(frame), tables.worst(frame)
    if rows.empty:
        return None
    if table.empty:
        return Finding("measured", "None is more than twice off.")
    groups = table["group"].value_counts()
    where = f"{'all' if len(groups) == 1 else 'most'} of them {groups.index[0]}'s"
    headline = f"{counted(len(table), 'row')} of {len(rows):,} are more than twice off, {where}."
    told = table["why"].value_counts()
    columns = [
        "group",
        "line",
        "of_model",
        "of_gpu",
        "of_gpus",
        "arrangement",
        "measured_s",
        "predicted_s",
        "times_off",
        "why",
    ]
    return Finding("measured", headline, table[columns].head(25), why=f"Most often: {told.index[0]} ({told.iloc[0]}).")


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
    headline = f"Compute is {busy.iloc[0]:.0f} % of a step on the fewest GPUs, {busy.iloc[-1]:.0f} % on the most."
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
    return Finding("measured", headline, table, why=why, caveat=caveat.strip())


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
    told = []
    for kind in KINDS:
        own = rows[rows["kind"] == kind.name]
        below, above = own[own["margin"] < 2], own[own["margin"] >= 2]
        told.append(
            {
                "kind": kind.name,
                "margin": kind.formula,
                "rows": len(own),
                "below_twice": len(below),
                "exposed_below_percent": below["exposed_percent"].median(),
                "exposed_above_percent": above["exposed_percent"].median(),
            }
        )
    shown = pd.DataFrame(told)
    low, high = (rows[rows["margin"] < 2]["exposed_percent"], rows[rows["margin"] >= 8]["exposed_percent"])
    headline = (
        f"Where compute is under twice its communication: there a typical step loses {low.median():.0f} %, "
        f"above eightfold {high.median():.0f} %."
    )
    return Finding("measured", headline, shown)


@QUESTIONS.ask("choice", "How far is the layout it chooses from the best that was measured?")
def choice(frame: pd.DataFrame) -> Finding | None:
    table = tables.choices(frame)
    if table.empty:
        return None
    three, first, simple = (table[f"{name}_behind_percent"] for name in ("best_of_three", "first", "simple"))
    near, beats = bool((three <= NEAR_BEST).all()), bool((first < simple).all())
    verdict: Verdict = "yes" if near and beats else "it depends" if near or beats else "no"
    weights = table["families"]
    mean, plain = (float(np.average(one, weights=weights)) for one in (three, simple))
    headline = f"The best of its three proposals is {mean:.1f} % behind; the smallest layout that fits {plain:.0f} %."
    alone = float(np.average(first, weights=weights))
    why = f"Its first proposal alone is {alone:.0f} % behind on the mean: time two or three before a long training."
    return Finding(verdict, headline, table, why=why)


@QUESTIONS.ask("students", "Does it predict what students measured on two to four GPUs?")
def students(frame: pd.DataFrame) -> Finding | None:
    table = tables.students(frame)
    found = agreement(table, "their steps", "what is predicted")
    if found is None:
        return None
    inside = ((table["low"] <= table["measured_s"]) & (table["measured_s"] <= table["high"])).sum()
    swept = table.dropna(subset="bucket_mb").groupby("bucket_mb")[["measured_s", "predicted_s"]].sum()
    measured, predicted = (
        100 * (swept[name].iloc[0] / swept[name].min() - 1) for name in ("measured_s", "predicted_s")
    )
    why = (
        f"{inside} of {len(table)} lie in the 90 % interval of a framework never seen. The bucket sweep has the right "
        f"shape: small buckets cost {measured:.0f} %, {predicted:.0f} % predicted. What is missing takes as long "
        "on few tokens as on many, as an optimizer written in Python does."
    )
    return replace(found, why=why, caveat="The write-ups do not all name their GPUs: H100s are assumed.")


@QUESTIONS.ask("here", "What do this machine's own ranks do, beside what its limits predict?", missing=NOTHING)
def here(frame: pd.DataFrame) -> Finding | None:
    return agreement(tables.here(frame), "steps of its ranks", "what the limits predict")


@QUESTIONS.ask("trends", "Do published trends follow?")
def trends(frame: pd.DataFrame) -> Finding | None:
    table = tables.trends(frame)
    found = published(_trend(text, own, up) for name, text, up in TRENDS if len(own := table[table["trend"] == name]))
    return None if found is None else replace(found, table=table, why="Predicted, not run: no number here is measured.")


def _trend(text: str, own: pd.DataFrame, rises: bool) -> Claim | None:
    """Whether the predicted MFU goes the published way from the fewest GPUs to the most."""
    first, last = (float(own.sort_values("gpus")["mfu_percent"].iloc[index]) for index in (0, -1))
    follows = last > first if rises else last < first
    return judged_claim(text, [follows], [not follows], f"predicted: {first:.0f} to {last:.0f} %")
