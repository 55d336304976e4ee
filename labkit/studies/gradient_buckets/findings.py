"""What the gradient-buckets lab asks, and how a run answers."""

from dataclasses import replace

import pandas as pd

from labkit.bench.statistics import summarize, with_verdicts
from labkit.costs.calibration import Calibration
from labkit.lab.as_predicted import agreement
from labkit.lab.claims import Trend, claim, lies_within, published
from labkit.lab.comparing import Quantity, compared
from labkit.lab.findings import Finding, Questions
from labkit.lab.own_effects import with_own
from labkit.lab.places import scope_of
from labkit.lab.rows import select
from labkit.lab.units import format_bytes, format_seconds, format_share, join_words, span
from labkit.studies.gradient_buckets import model, tables
from labkit.studies.gradient_buckets.tables import MIB, SETTING
from labkit.studies.shared.rank_troubles import rank_troubles

QUESTIONS = Questions()
AXIS = ("sequence", "batch", "world_size", "workload")
SHARE = Quantity(
    *("waiting per step", "are {n} smaller than", "are {n} smaller than", "are {n} larger than", "are {n} as large as"),
    *("smaller", "larger"),
)
HARDLY = 1.04  # published: the step moves by less than 4 %


def _size(bucket_mb: float) -> str:
    return format_bytes(bucket_mb * MIB)


def _sizes(bucket_mb: pd.Series) -> str:
    return join_words([_size(size) for size in sorted(set(bucket_mb))])


def _troubles(frame: pd.DataFrame) -> str | None:
    return rank_troubles(select(frame, ["alternative"]), "alternative")


@QUESTIONS.ask("waiting", "How long does a training step wait for its gradients?")
def waiting(frame: pd.DataFrame) -> Finding | None:
    table, caveat = tables.overview(frame), _troubles(frame)
    if table.empty:
        return Finding("not measured", "Not measured: steps with right gradients.", None, caveat) if caveat else None
    shares = span(table["waiting_percent"], "{:.0f}".format)
    headline = f"A step spends {shares} % of its time waiting for its gradients."
    where = scope_of(table, ["workload", "world_size", "batch", "sequence", "bucket_mb"])
    return Finding("measured", headline, table, caveat, _beside(frame), where=where)


def _beside(frame: pd.DataFrame) -> str | None:
    """Where the step is longer by more, or by less, than what it waits for."""
    more, less = tables.beside_waiting(frame)
    several, one = more[more["buckets"] > 1], more[more["buckets"] == 1]
    costs = "With {} of {} communication costs another {}: "
    told = [
        costs.format(name, _sizes(some["bucket_mb"]), span(some["contention_s"], format_seconds)) + why
        for some, name, why in (
            (several, "buckets", "it slows down the backward pass that it runs beside."),
            (one, "one bucket", "backward still copies each gradient into the bucket."),
        )
        if len(some)
    ]
    if told:
        return " ".join(told)
    if len(less):
        return (
            f"With buckets of {_sizes(less['bucket_mb'])} {span(-less['contention_s'], format_seconds)} of that is "
            "waiting for a slower rank."
        )
    return None


@QUESTIONS.ask("bucket_size", "Does a larger bucket make a step faster?")
def bucket_size(frame: pd.DataFrame) -> Finding | None:
    steps = tables.steps(frame)
    smallest = steps["bucket_mb"].min()
    ratios = tables.over(frame, smallest)
    before_ratio = [*SETTING, "bucket_mb", "compared_with"]
    ratios = ratios.assign(compared_with=[_size(smallest)] * len(ratios))
    ratios = ratios[[*before_ratio, *(name for name in ratios if name not in before_ratio)]]
    over, why = f"over {_size(smallest)}", _paid_in_backward(frame)
    found = compared(ratios, "a larger bucket", "the smallest", axis=AXIS, why=why, setting=over)
    sizes = set(steps["alternative"])
    return with_own(found, tables.over_smallest(frame), "alternative", sizes, "the smallest buckets", axis=AXIS)


def _paid_in_backward(frame: pd.DataFrame) -> str | None:
    """Where one size waits less than another, and the rest of its step is slower instead: the clearest case."""
    steps, pairs = tables.steps(frame), tables.pairs(frame, "waiting_s")
    clear = pairs[pairs["verdict"] != "no difference shown"]
    clear = clear.sort_values("ratio", key=lambda ratios: -ratios.where(ratios > 1, 1 / ratios))
    for row in clear.itertuples():
        long, short = (row.bucket_mb, row.smaller_mb) if row.ratio > 1 else (row.smaller_mb, row.bucket_mb)
        here = select(steps, **{name: getattr(row, name) for name in SETTING})
        wide = here.pivot_table(index="repeat", columns="bucket_mb", values=["waiting_s", "contention_s"])
        if "contention_s" in wide and summarize(wide["contention_s", short] - wide["contention_s", long]).low > 0:
            medians = wide.median()
            less, more = (abs(medians[q, short] - medians[q, long]) for q in ("waiting_s", "contention_s"))
            return (
                f"Buckets of {_size(short)} wait {format_seconds(less)} less than those of {_size(long)}, but slow the "
                f"rest of the step by {format_seconds(more)} (batch {row.batch}, {row.sequence} tokens)."
            )
    return None


@QUESTIONS.ask(
    "batch_and_length",
    "Does a step wait for a smaller share of its time with larger batches and longer sequences?",
    missing="this run has one batch and one sequence length",
)
def batch_and_length(frame: pd.DataFrame) -> Finding | None:
    return compared(
        tables.with_more_work(frame),
        "the share of a step spent waiting with more tokens",
        "with fewer",
        axis=("grows", "bucket_mb", "world_size", "workload"),
        quantity=SHARE,
    )


@QUESTIONS.ask(
    "model",
    "Does the all-reduce alone predict what communication adds to a step, and which bucket is best?",
    missing="this run has no steps with all-reduces that were calibrated",
)
def explained(frame: pd.DataFrame, calibration: Calibration | None) -> Finding | None:
    table = model.against_measured(frame, calibration)
    found = agreement(table, "additions to a step", "what their all-reduces should take", settings=SETTING)
    if found is None:
        return None
    several, why = table[(table["exposed_s"] > 0) & (table["buckets"] > 1)], None
    if len(several):
        hidden = format_share((several["last_alone_s"] / several["exposed_s"]).median())
        why = f"If all but the last bucket hid, communication would typically add {hidden} of what it does."
    return replace(found, why=why, also=_best_bucket(frame, table))


def _best_bucket(frame: pd.DataFrame, table: pd.DataFrame) -> str:
    """Is the measured size for which the model predicts the shortest step beaten by another?"""
    size = float(table.groupby("bucket_mb")["predicted_s"].mean().idxmin())
    others = with_verdicts(tables.over(frame, size))
    better, worse = (others[others["verdict"] == verdict] for verdict in ("faster", "slower"))
    said = f"It predicts the shortest step with buckets of {_size(size)}"
    if len(better):
        return f"{said}, but {_which(better, others)} faster."
    if len(worse):
        return f"{said}, and none is faster; {_which(worse, others)} slower."
    return f"{said}; the noise leaves open whether that is right."


def _which(differing: pd.DataFrame, others: pd.DataFrame) -> str:
    """The sizes that differ, and in how many settings if not in all."""
    of_them = others[others["bucket_mb"].isin(differing["bucket_mb"])]
    often = "" if len(differing) == len(of_them) else f", in {len(differing)} of {len(of_them)} settings,"
    return f"those of {_sizes(differing['bucket_mb'])}{often} are"


@QUESTIONS.ask("published_trends", "Do the published trends hold on this machine?")
def published_trends(frame: pd.DataFrame) -> Finding | None:
    return published([_size_hardly_matters(frame), *_more_work_waits_less(frame), _few_large_ones_wait_longer(frame)])


def _size_hardly_matters(frame: pd.DataFrame) -> Trend | None:
    """`ddp_bucketed_xl_2gpu.csv`: at every batch and length, four bucket sizes differ by less than 4 %."""
    return lies_within("The bucket size moves a step by less than 4 %", tables.pairs(frame), 1 / HARDLY, HARDLY)


def _more_work_waits_less(frame: pd.DataFrame) -> list[Trend | None]:
    """Published: the share falls with every longer sequence and with the larger batch, at every bucket size."""
    table = tables.with_more_work(frame)
    text = "With {} a step waits for a smaller share of its time"
    return [claim(text.format(grows), select(table, grows=grows), "faster") for grows in tables.GROWS.values()]


def _few_large_ones_wait_longer(frame: pd.DataFrame) -> Trend | None:
    """Published: buckets of 1000 MB wait longer than those of 100 MB. A question only if there are several of them."""
    several = select(tables.by_bucket(frame, "waiting_s"), bucket_mb=1000)
    ratios = select(tables.over(frame, 100, "waiting_s"), bucket_mb=1000)
    ratios = ratios.merge(several.loc[several["buckets"] > 1, list(SETTING)])
    return claim("Buckets of 1000 MiB are waited for longer than those of 100 MiB", ratios, "slower")
