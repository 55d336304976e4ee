"""What the kernels lab asks, and how a run answers."""

from dataclasses import replace
from typing import Any

import pandas as pd

from labkit.bench.statistics import with_verdicts
from labkit.lab.claims import Trend, claim, lies_within, published, quotients
from labkit.lab.comparing import TIME, Quantity, compared
from labkit.lab.findings import Finding, Questions, at_the_cost_of, troubles, without_verdict
from labkit.lab.own_models import without_own
from labkit.lab.places import scope_of
from labkit.lab.rows import select
from labkit.lab.sentences import Words
from labkit.lab.units import format_seconds, format_share, join_words, span
from labkit.studies.kernels import tables
from labkit.studies.kernels.tables import BOTH, EVENTS, FORWARD
from labkit.studies.kernels.worker import INFERENCE, STEP

QUESTIONS = Questions()
# A share is worth naming if its whole interval is above this.
WORTH_NAMING_PERCENT = 5
LONGEST_NAME = 40  # characters of a kernel's name in a sentence
DURATION = replace(TIME, times_less="take {n} less time than", better="shorter", worse="longer")
SHARE = Quantity(
    "share of matrix products",
    *("spend {n} less of its time on matrix products than", "spend {n} less of its time on matrix products than"),
    *("spend {n} more of its time on matrix products than", "spend {n} as much of its time on matrix products as"),
    *("lighter on matrix products", "heavier on matrix products"),
)
SPOKEN = {
    **{"optimizer": "the optimizer", "softmax": "the softmax", "loss": "the loss", "norm": "norms"},
    **{"elementwise": "elementwise operators", "reduction": "reductions", "copy": "copies", "other": "other operators"},
}


def _percents(values: pd.Series) -> str:
    return f"{span(values, '{:.0f}'.format)} %"


def _sizes(frame: pd.DataFrame) -> str:
    """ "batch 2 · 64 tokens"."""
    return scope_of(select(without_own(frame), record="operator"), ["batch", "context_length"])


def _where(frame: pd.DataFrame, rows: pd.DataFrame) -> str:
    """ "nano and mini · forward · cpu · batch 2 · 64 tokens"."""
    return scope_of(rows, ["model", "mode", "device"], _sizes(frame))


@QUESTIONS.ask("profiler_and_clock", "Do profiler and clock agree on the time of a forward pass?")
def profiler_and_clock(frame: pd.DataFrame) -> Finding | None:
    table = select(tables.against_clock(frame), mode=INFERENCE)
    by_events, by_clock = "a forward pass by the profiler's events", "by the clock"
    found = compared(
        select(table, measure=EVENTS),
        by_events,
        by_clock,
        axis=("model",),
        quantity=DURATION,
        caveat=troubles(select(frame, ["model"], record="check"), "model"),
        why=_what_profiling_does(with_verdicts(table[table["measure"] != EVENTS])),
    )
    if found is None or found.table is None or not found.significant:
        return found
    apart = found.table[found.table["verdict"].isin([DURATION.better, DURATION.worse])]
    if apart["verdict"].nunique() == 1:
        told = Words(by_events, by_clock, DURATION, False).clause(apart)
        some = f" with {join_words(list(apart['model']))}" if len(apart) < len(found.table) else ""
        return replace(found, verdict="no", headline=f"No: {told}{some}.")
    return replace(found, verdict="no", headline=f"No: {found.headline.removeprefix('It depends: ')}")


def _what_profiling_does(profiled: pd.DataFrame) -> str | None:
    """What recording costs where it shows; on a GPU, in how much of the time no kernel runs."""
    slowed, told = profiled[profiled["verdict"] == "slower"], []
    if len(slowed):
        each = (slowed["profiled_s"] - slowed["clock_s"]) / slowed["recorded"]
        told.append(f"Recording an event costs {span(each, format_seconds)}.")
    if len(on_gpu := select(profiled, device="cuda")):
        idle = 1 - on_gpu["events_s"] / on_gpu["profiled_s"]
        told.append(f"No kernel runs in {span(idle, format_share)} of the time under the profiler.")
    return " ".join(told) or None


@QUESTIONS.ask("largest_operator", "Which operator or kernel takes most time, with and without the backward pass?")
def largest_operator(frame: pd.DataFrame) -> Finding | None:
    table = select(tables.operators(frame), mode=[FORWARD, BOTH])
    if table.empty:
        return None
    passes = table.groupby(list(tables.SETTING), sort=False)
    first, second = passes.nth(0), passes.nth(1)
    names = {_short(name) for name in first["operator"]}
    if len(names) == 1:
        headline = f"{names.pop()} takes most time: {_percents(first['share_percent'])} of a pass."
    else:
        last = first[first["model"] == first["model"].iloc[-1]].to_dict("records")
        told = [f"{_short(row['operator'])} in {row['mode']}" for row in last]
        headline = f"Most time goes to {join_words(told)} of the model {last[0]['model']}."
    close = first.merge(second, on=list(tables.SETTING), suffixes=("", "_second"))
    close = close[~(close["low"] > close["high_second"])]
    rivals = [f"{_short(row['operator_second'])} ({row['model']}, {row['mode']})" for row in close.to_dict("records")]
    return Finding(
        "measured",
        headline,
        tables.top_operators(frame),
        f"Not clearly more than {join_words(rivals)}." if rivals else None,
        where=_where(frame, table),
    )


def _short(name: str) -> str:
    """A kernel's name without its parameters."""
    return name.removeprefix("void ").partition("<")[0].partition("(")[0][:LONGEST_NAME]


@QUESTIONS.ask("beside_matmul", "What besides matrix multiplication takes a share worth naming?")
def beside_matmul(frame: pd.DataFrame) -> Finding | None:
    table = select(tables.shares(frame), mode=[FORWARD, STEP])
    if table.empty:
        return None
    others = table[table["family"] != "matmul"]
    worth = others[others["low"] > WORTH_NAMING_PERCENT]
    shown = worth[[*tables.SHARES.columns, "share_percent", "low", "high"]].reset_index(drop=True)
    if table["low"].isna().all():
        return Finding("undecided", "Too few passes to bound any share.", shown)
    last = table.iloc[-1]
    here = select(worth, device=last["device"], model=last["model"], mode=last["mode"])
    most = here.sort_values("share_percent", ascending=False).head(2).to_dict("records")
    of_pass = f"a {last['mode']}{' pass' if last['mode'] == FORWARD else ''} of the model {last['model']}"
    told = [f"{row['share_percent']:.0f} % on {SPOKEN.get(row['family'], row['family'])}" for row in most]
    headline = f"Besides matrix products, {of_pass} spends {join_words(told)}."
    if not told:
        headline = f"Nothing else clearly exceeds {WORTH_NAMING_PERCENT} % of {of_pass}."
    return Finding("measured", headline, shown, where=_where(frame, table.tail(1)))


@QUESTIONS.ask("matmul_share", "Is the share of matrix multiplication smaller in a full AdamW step than in inference?")
def matmul_share(frame: pd.DataFrame) -> Finding | None:
    optimizer = select(tables.shares(frame), mode=STEP, family="optimizer")["share_percent"]
    return compared(
        tables.step_against_inference(frame),
        "a full step",
        "inference",
        axis=("model",),
        quantity=SHARE,
        why=f"The optimizer takes {_percents(optimizer)} of a full step and multiplies no matrices."
        if len(optimizer)
        else None,
        setting=_sizes(frame),
    )


@QUESTIONS.ask(
    "softmax_in_attention",
    "Inside attention, do the softmax, scaling and masking take less time than the two matrix products?",
)
def softmax_in_attention(frame: pd.DataFrame) -> Finding | None:
    table = select(tables.against_products(frame), mode=INFERENCE)
    ratios, masks = select(table, part="softmax"), select(table, part="scale and mask")
    flops = 100 * ratios["flop_ratio"].dropna()
    why = f"By FLOPs the softmax would take {_percents(flops)} of their time." if len(flops) else None
    told: dict[str, Any] = {
        "baseline": "the two matrix products",
        "axis": ("model",),
        "quantity": DURATION,
        "setting": _sizes(frame),
    }
    softmax = compared(ratios, "the softmax", **told, why=why)
    others = compared(masks, "scaling and masking", **told, plural=True)
    found = at_the_cost_of(softmax, others)
    if found is None:
        return None
    both = [one for one in (softmax, others) if one is not None]
    if {"yes", "no"} <= {one.verdict for one in both}:
        said = without_verdict(found.headline)
        found = replace(found, verdict="it depends", headline=f"It depends: {said[0].lower()}{said[1:]}")
    return replace(found, table=pd.concat([one.table for one in both], ignore_index=True))


@QUESTIONS.ask("published_trends", "Do the published observations hold on this machine?")
def published_trends(frame: pd.DataFrame) -> Finding | None:
    frame = without_own(frame)
    events = select(tables.against_clock(frame), mode=INFERENCE, measure=EVENTS)
    return published(
        [
            # `end_to_end.csv`: 87.9 ms by the host's timer, 63.9 ms of kernels
            claim("A forward pass is shorter by the profiler's events than by the clock", events, "faster"),
            _a_product_leads(frame),
            _elementwise_take_their_share(frame),
            # `profile_kernels.csv`: 66.3 % of a forward pass alone and 54.5 % of a full step
            claim(
                "Matrix products have a smaller share of a full step than of inference",
                tables.step_against_inference(frame),
                "faster",
            ),
            # `profile_kernels.csv`: the softmax 316 microseconds, the scores 146
            claim(
                "The softmax takes more time than the product of queries and keys",
                tables.softmax_over_scores(frame),
                "slower",
            ),
        ]
    )


def _a_product_leads(frame: pd.DataFrame) -> Trend | None:
    """`profile_kernels.csv`: the kernel with the largest share of the forward pass multiplies matrices."""
    table = select(tables.operators(frame), mode=FORWARD)
    is_product = table["family"] == "matmul"
    product, other = (rows.groupby(["device", "model"]).nth(0) for rows in (table[is_product], table[~is_product]))
    pairs = product.merge(other, on=["device", "model"])
    first, second = (pairs.filter(regex=f"{end}$").rename(columns=lambda name: name[:-2]) for end in ("_x", "_y"))
    text = "A matrix product is the largest single operator of a forward pass"
    return lies_within(
        text, quotients(first, second, "self_s"), least=1.0, seen=_percents(pairs["share_percent_x"]), equal=None
    )


def _elementwise_take_their_share(frame: pd.DataFrame) -> Trend | None:
    """`profile_kernels.csv`: elementwise kernels take at least 15 % of the forward pass."""
    table, least = tables.shares(frame), tables.published()["elementwise_share_of_forward"]
    table = select(table, mode=FORWARD, family="elementwise")
    text, seen = (
        f"Elementwise operators take at least {least:.0f} % of a forward pass",
        _percents(table["share_percent"]),
    )
    return lies_within(text, table.rename(columns={"share_percent": "ratio"}), least, seen=seen, equal=None)
