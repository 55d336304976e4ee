"""What the CIFAR-100 lab asks, and how a run answers: nothing that the intervals over seeds do not show."""

from collections.abc import Iterable
from dataclasses import replace

import pandas as pd

from labkit.costs.calibration import Calibration
from labkit.lab.claims import Trend, exact, lies_within, published
from labkit.lab.comparing import MEMORY, compared
from labkit.lab.findings import Claim, Effect, Finding, Questions, Verdict, at_the_cost_of, troubles
from labkit.lab.rows import select
from labkit.lab.units import counted, format_bytes, format_seconds, join_words, span
from labkit.studies.cifar100 import samples, tables
from labkit.studies.cifar100.training import SYNCHRONIZED, TORCH_SYNC
from labkit.studies.cifar100.worker import EPOCH

QUESTIONS = Questions()
OWN, TORCHS = "an epoch with labkit's parts", "one with torch's"
SYNC_EPOCH, LOCAL_EPOCH = "an epoch with batch norm over all ranks", "one with local batch norm"
REFUSED = (
    "torch's SyncBatchNorm refuses CPU tensors: labkit's is compared before training only, with one process that has "
    "the whole batch."
)
DIVERGED = "number of diverged trainings"
BETTER = {"accuracy": "higher", "validation loss": "lower", DIVERGED: "lower"}
OPPOSITE = {"higher": "lower", "lower": "higher"}
# What ratios are of: less of it is better. The error is what accuracy lacks of 100 %.
LESS_IS_BETTER = {"accuracy": "validation error", "validation loss": "validation loss"}
INTERNAL = ["both_with", "than_value"]  # columns that tell a reader nothing
LEAST = 0.01  # a smaller difference of peaks neither holds nor contradicts


@QUESTIONS.ask("learned", "How well does the net learn, and how much does that depend on the seed?")
def learned(frame: pd.DataFrame) -> Finding | None:
    table, about = tables.outcome(frame), samples.setting(frame)
    told = [
        f"DIVERGED, with a loss that is not finite: {row['diverged']:.0f} of {row['diverged'] + row['seeds']:.0f} "
        f"seeds with {row['implementation']}."
        for row in table[table["diverged"] > 0].to_dict("records")
    ]
    wrong = troubles(select(frame, ["implementation"], phase=EPOCH), "implementation")
    caveat = " ".join(filter(None, [wrong, *told])) or None
    if about is None:
        return Finding("not measured", "Not measured: nothing was trained.", caveat=caveat) if caveat else None
    images = "CIFAR-100" if about["dataset"] == "cifar100" else f"{about['dataset']} (not CIFAR-100)"
    known = table.dropna(subset="accuracy_percent")
    if known.empty:
        return Finding("measured", f"No training on {images} came to its end.", table, caveat)
    return Finding(
        "measured",
        f"At the end, {span(known['accuracy_percent'], '{:.0f}'.format)} % of the validation images of {images} are "
        "classified correctly.",
        table,
        caveat,
        why=f"Of {about['classes']:.0f} classes, a guess is right in {100 / about['classes']:.0f} %.",
        where=_where(frame, known["seeds"]),
        also=f"Seeds move it by up to {(known['largest'] - known['smallest']).max():.1f} points.",
    )


def _where(frame: pd.DataFrame, seeds: pd.Series) -> str | None:
    """ "digits · 2 ranks · 8 images per rank · 3 epochs · 6 seeds"."""
    if (about := samples.setting(frame)) is None:
        return None
    epochs = [counted(int(last), "epoch") for last in samples.last_epoch(frame)["epoch"].head(1)]
    told = [about["dataset"], counted(int(about["world_size"]), "rank"), f"{about['batch']:.0f} images per rank"]
    return " · ".join([*told, *epochs, f"{span(seeds, '{:.0f}'.format)} seeds"])


@QUESTIONS.ask("same_training", "Do labkit's parts train as well as torch's?")
def same_training(frame: pd.DataFrame) -> Finding | None:
    table, lost = tables.differences(frame, tables.SAME), tables.divergences(frame, tables.SAME)
    if lost.empty:
        return None
    rows = _verdicts(table, lost)
    beyond, said = rows[rows["verdict"].isin(OPPOSITE)], set(rows["verdict"])
    caveats = _diverged(lost)
    if TORCH_SYNC not in set(lost["than"]) and (frame["device"] == "cpu").all():
        caveats.append(REFUSED)
    parts = "wrapper and SyncBatchNorm" if TORCH_SYNC in set(lost["than"]) else "wrapper"
    verdict: Verdict = "undecided"
    headline = f"{_open(table)} whether training with labkit's {parts} is as good as with torch's."
    if len(beyond):
        first = beyond.iloc[0]
        ends = f"{first['implementation']} ends with a {first['verdict']} {first['metric']} than torch's"
        verdict, headline = "no", f"No: {ends}."
    elif said == {"the same"}:
        verdict, headline = "yes", f"Yes: with labkit's {parts}, accuracy and losses end {_margins()} of torch's."
    caveat, where = " ".join(caveats) or None, _where(frame, lost["seeds"])
    return Finding(verdict, headline, table.drop(columns=INTERNAL), caveat, where=where)


def _margins() -> str:
    loss = tables.MARGINS["validation loss"]
    return f"within {counted(int(tables.MARGINS['accuracy']), 'point')} and {loss:.0f} %"


def _open(table: pd.DataFrame) -> str:
    return "Too few seeds to tell" if table["low"].isna().any() else "Too much scatter over seeds to tell"


def _diverged(lost: pd.DataFrame) -> list[str]:
    """Of each pair that lost a seed: how many with which."""
    return [
        f"DIVERGED: of {row['seeds']} seeds {row['diverged']} with {row['implementation']} and {row['than_diverged']} "
        f"with {row['than']}."
        for row in lost[lost["verdict"] != "none"].to_dict("records")
    ]


def _verdicts(table: pd.DataFrame, lost: pd.DataFrame) -> pd.DataFrame:
    """What differs and what does not, by pair and metric; `mark` says whether that is "better" or "worse"."""
    rows = pd.concat([table, lost[lost["verdict"] != "none"].assign(metric=DIVERGED)], ignore_index=True)
    wanted = rows["metric"].map(BETTER)
    is_told = rows["verdict"].isin(OPPOSITE) & wanted.notna()
    mark = (rows["verdict"] == wanted).map({True: "better", False: "worse"})
    return rows.assign(mark=mark.where(is_told, "no difference shown"))


@QUESTIONS.ask("time", "Is an epoch faster with labkit's parts than with torch's?")
def time(frame: pd.DataFrame) -> Finding | None:
    table, ratios = tables.time_summary(frame), tables.time_ratios(frame, tables.SAME)
    if table.empty:
        return None
    epochs = f"Epochs take {span(table['epoch_s'], format_seconds)}, by implementation"
    found = compared(ratios, OWN, TORCHS, axis=("both_with",), why=f"{epochs}.")
    return found or Finding("measured", f"{epochs}.", table)


@QUESTIONS.ask("memory", "Does training need less memory with labkit's parts than with torch's?")
def memory(frame: pd.DataFrame) -> Finding | None:
    table = tables.memory(frame)
    if table.empty:
        return None
    peaks = f"Peaks are {span(table['peak_bytes'], format_bytes)}, model, gradients, momentum and images included"
    found = compared(
        tables.memory_ratios(frame),
        "updates with labkit's parts",
        "those with torch's",
        axis=("batch_norm",),
        quantity=MEMORY,
        plural=True,
        why=f"{peaks}.",
    )
    return found or Finding("measured", f"{peaks}.", table)


@QUESTIONS.ask(
    "sync_batchnorm",
    "Does batch norm over all ranks train better than local batch norm, and what does it cost?",
    "batch_norm",
)
def sync_batchnorm(frame: pd.DataFrame, calibration: Calibration | None) -> Finding | None:
    table, lost = tables.differences(frame, tables.SYNC), tables.divergences(frame, tables.SYNC)
    if lost.empty:
        return None
    ratios, costs = tables.time_ratios(frame, tables.SYNC), tables.synchronizing(frame, calibration)
    rows = _verdicts(table, lost)
    better, worse = (_with_every_wrapper(rows, mark, len(lost)) for mark in ("better", "worse"))
    effects = _effects(rows)
    is_whole, one = set(lost["verdict"]) == {"none"}, not better and (rows["mark"] == "better").any()
    verdict: Verdict = "undecided"
    headline = f"{_open(table)} whether batch norm over all ranks trains better than local batch norm."
    if better and worse:
        verdict, headline = "it depends", f"It depends: {_told(rows, better)}, but {_told(rows, worse)}."
    elif better or worse:
        verdict = "yes" if better else "no"
        headline = f"{verdict.capitalize()}: with batch norm over all ranks, {_told(rows, better or worse)}."
    elif is_whole and set(table["verdict"]) == {"the same"}:
        verdict, headline = "no", f"No: accuracy and losses end {_margins()} of those with local batch norm."
    if one and verdict == "undecided":
        verdict, headline = "it depends", "It depends: a gain shows with one wrapper only."
    caveats = _diverged(lost)
    advice = None
    about = samples.setting(frame)
    if about is not None and not ratios.empty and not table["low"].isna().any() and (is_whole or better or worse):
        here = f"with {about['batch']:.0f} images per rank ({about['dataset']})"
        advice = f"Synchronize batch norm {here}." if better else f"Keep local batch norm {here}."
        advice = None if (better and worse) or one else advice
    quoted = {LESS_IS_BETTER.get(metric) for metric in better or worse}
    gain = Finding(
        verdict,
        headline,
        table.drop(columns=INTERNAL),
        " ".join(caveats) or None,
        advice=advice,
        significant=any(effect.verdict != "no difference shown" for effect in effects),
        effects=effects,
        where=_where(frame, lost["seeds"]),
        lead=max((one for one in effects if one.quantity in quoted), key=lambda one: abs(one.ratio - 1), default=None),
    )
    price = compared(ratios, SYNC_EPOCH, LOCAL_EPOCH, axis=("both_with",))
    found = at_the_cost_of(gain, price)
    if found is None or price is None or not price.significant or costs.empty:
        return found
    extra, sending = span(costs["extra_s"], format_seconds), costs["predicted_s"].iloc[0]
    told = f"The difference is {extra}"
    if sending != sending:
        return replace(found, why=f"{told}.")
    rest = ", the rest is arithmetic and waiting for the slower rank" if sending < costs["extra_s"].min() else ""
    return replace(found, why=f"{told}; its collectives should take {format_seconds(sending)}{rest}.")


def _with_every_wrapper(rows: pd.DataFrame, mark: str, pairs: int) -> list[str]:
    """Metrics that all pairs have this mark in."""
    marked = rows[rows["mark"] == mark].groupby("metric").size()
    return [metric for metric in BETTER if marked.get(metric) == pairs]


def _told(rows: pd.DataFrame, metrics: list[str]) -> str:
    """What differs: of one metric alone by how much, and of a loss alone that accuracy does not."""
    told, units = [], {"accuracy": "points ", "validation loss": "% "} if len(metrics) == 1 else {}
    for metric in metrics:
        here = rows[rows["metric"] == metric]
        amount = f"{here['difference'].abs().max():.1f} {units[metric]}" if metric in units else ""
        told.append(f"{metric} is {'up to ' if amount and len(here) > 1 else ''}{amount}{here['verdict'].iloc[0]}")
    accuracy = rows.loc[rows["metric"] == "accuracy", "mark"]
    is_alike = metrics == ["validation loss"] and (accuracy == "no difference shown").all()
    return f"the {join_words(told)}{'; accuracy shows no clear difference' if is_alike else ''}"


def _effects(rows: pd.DataFrame) -> tuple[Effect, ...]:
    """As ratios of quantities of which less is better; none of an error where local batch norm makes none."""
    found = []
    for row in rows.dropna(subset="both_with").to_dict("records"):
        # what accuracy gains in points, the error loses
        whole = 100.0 if row["unit"] == "%" else row["than_value"] - 100.0
        if row["metric"] in LESS_IS_BETTER and whole:
            ratio, *ends = (1 + row[name] / whole for name in ("difference", "low", "high"))
            verdict = {"better": "faster", "worse": "slower"}.get(row["mark"], row["mark"])
            about = ("batch norm over all ranks", "local batch norm", row["both_with"], LESS_IS_BETTER[row["metric"]])
            found.append(Effect(*about, ratio, min(ends), max(ends), verdict))
    return tuple(found)


@QUESTIONS.ask("published_trends", "Do the published trends hold on this machine?")
def published_trends(frame: pd.DataFrame) -> Finding | None:
    found = published([_as_fast(frame), _smaller(frame), _as_good(frame)])
    return found and replace(found, why=_reached(frame))


def _as_fast(frame: pd.DataFrame) -> Trend | None:
    """`cifar100_training_2gpu.csv`: 29.6 s against 29.3 s."""
    ratios = tables.time_ratios(frame, tables.SAME)
    seen = _beside(ratios["ratio"], tables.published_ratio("training_s"))
    return lies_within(
        "Training with self-made parts takes about as long as with torch's", ratios, 0.95, 1.05, seen=seen
    )


def _smaller(frame: pd.DataFrame) -> Claim | None:
    """`cifar100_training_2gpu.csv`: 170.1 MB against 174.1 MB."""
    ratios = tables.memory_ratios(frame)["ratio"]
    return exact(
        "Training with self-made parts needs a little less memory",
        ratios < 1 - LEAST,
        ratios > 1 + LEAST,
        _beside(ratios, tables.published_ratio("peak_bytes")),
    )


def _beside(ratios: Iterable[float], published_ratio: float) -> str:
    here = list(ratios)
    return f"{span(here)} times; published {published_ratio:.2f}" if here else ""


def _as_good(frame: pd.DataFrame) -> Claim | None:
    """`cifar100_training_2gpu.csv`: 27.3 % against 27.7 %, one training each."""
    rows = _verdicts(tables.differences(frame, tables.SAME), tables.divergences(frame, tables.SAME))
    said = rows.loc[rows["metric"].isin(["accuracy", DIVERGED]), "verdict"]
    seen = join_words(list(dict.fromkeys(said)))
    told = span(tables.published()["accuracy_percent"], "{:.1f}".format)
    return exact(
        "Both train equally well",
        said == "the same",
        said.isin(OPPOSITE),
        f"{seen}; published {told} %" if seen else "",
    )


def _reached(frame: pd.DataFrame) -> str:
    """Whether the published accuracy itself can be compared with one from here."""
    if not tables.is_published_training(frame):
        return "Accuracies themselves cannot be compared: images or recipe are others."
    table = tables.outcome(frame).dropna(subset="accuracy_percent")
    best = table.loc[table["implementation"].isin(SYNCHRONIZED), "accuracy_percent"]
    if best.empty:
        return "Accuracies cannot be compared: no training with SyncBatchNorm, as published, came to its end."
    return f"With SyncBatchNorm, as published, accuracy here is {span(best, '{:.1f}'.format)} %."
