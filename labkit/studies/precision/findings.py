"""What the precision lab asks, and how a run answers."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pandas as pd

from labkit.costs.calibration import Calibration
from labkit.lab.claims import Trend, claim, exact, lies_within, published, quotients
from labkit.lab.comparing import contest
from labkit.lab.findings import Claim, Finding, Questions, troubles
from labkit.lab.places import scope_of
from labkit.lab.quantities import time_of_a_part
from labkit.lab.rows import select
from labkit.lab.units import format_share, join_words
from labkit.studies.precision import tables
from labkit.studies.precision.worker import BOTH, FULL

QUESTIONS = Questions()
OF_PASSES = time_of_a_part("without the optimizer")
PLURALS = ("parameters", "logits", "gradients", "squares")


def _s(noun: str) -> str:
    """The ending of its verb: the variance overflows, the squares overflow."""
    return "" if noun in PLURALS else "s"


@QUESTIONS.ask(
    "accumulation",
    "What does adding 0.01 a thousand times come to in fp32, fp16, bf16, and with an fp32 sum of 16-bit terms?",
)
def accumulation(frame: pd.DataFrame) -> Finding | None:
    table = tables.final_sums(frame)
    if table.empty:
        return None
    here = select(table, device=tables.first_device(table))
    off = (here["sum"] - here["exact_sum"]).abs()
    worst, best = (here.loc[at].to_dict() for at in (off.idxmax(), off.idxmin()))
    headline = f"In {worst['variant']} the sum ends at {worst['sum']:.6g} instead of {worst['exact_sum']:g}"
    headline += f"; {best['variant']} comes closest." if off.max() > 0 else "."
    differing = table.groupby("variant", sort=False)["sum"].nunique()
    devices = [str(name).replace("_", " ") for name in differing[differing > 1].index]
    # a sum is of more digits than a table's numbers have
    shown = table.assign(sum=[f"{value:.8g}" for value in table["sum"]]).drop(columns=["exact_sum", "stored_sum"])
    caveat = f"Devices differ in {join_words(devices)}." if devices else None
    where = f"{worst['additions']} additions · {worst['device']}"
    return Finding("measured", headline, shown, caveat, _source_of(worst, here), where=where)


def _source_of(worst: dict[Any, Any], sums: pd.DataFrame) -> str:
    """Where the largest error comes from, and what of it a sum in float32 leaves."""
    name = worst["variant"]
    told = f"Of its error, {worst['term_error']:+.3g} is the term as {name} holds it"
    told += f" and {worst['sum_error']:+.3g} the rounding of the sum"
    if worst["still_since"] == worst["still_since"]:
        told += f", which stands still from {worst['still_since']:.0f} additions on"
    mixed = select(sums, variant=f"{name}_into_fp32")["sum_error"]
    return f"{told}; an fp32 sum of the same terms rounds by {mixed.iloc[0]:.3g}." if len(mixed) else f"{told}."


@QUESTIONS.ask(
    "dtypes", "Under autocast, which dtype do parameters, activations, norm, logits, loss and gradients have?"
)
def dtypes(frame: pd.DataFrame) -> Finding | None:
    table = tables.dtypes(frame)
    mixed = table[table["autocast"] != FULL]
    if mixed.empty:
        return None
    quantities = [name for name in mixed if name not in ("device", "model", "autocast")]
    kept = [name for name in quantities if (mixed[name] == FULL).all()]
    lowered = [name for name in quantities if (mixed[name] == mixed["autocast"]).all()]
    others = [name for name in quantities if name not in (*kept, *lowered)]
    told = [f"{join_words(kept)} stay in {FULL}"] if kept else []
    told += [f"{join_words(lowered)} take autocast's dtype"] if lowered else []
    headline = "; ".join(told) or "no quantity has one dtype in all models"
    where = scope_of(mixed, ["model", "autocast", "device"])
    also = _where_they_differ(mixed, others)
    return Finding("measured", f"{headline[0].upper()}{headline[1:]}.", table, where=where, also=also)


def _where_they_differ(mixed: pd.DataFrame, quantities: list[str]) -> str | None:
    """ "Under bfloat16, norm: bfloat16 in the toy model and float32 in the Transformer." """
    if not quantities:
        return None
    first = select(mixed, autocast=mixed["autocast"].iloc[0])
    several = first["device"].nunique() > 1
    told = []
    for name in quantities:
        rows = first[["device", "model", name]].itertuples(index=False)
        each = [f"{dtype} in the {model}{f' on {device}' if several else ''}" for device, model, dtype in rows]
        told.append(f"{name} is {join_words(each)}")
    return f"Under {first['autocast'].iloc[0]}, {'; '.join(told)}."


@QUESTIONS.ask("layer_norm", "Which step of a layer norm loses digits or overflows in fp16 and in bf16?", "precision")
def layer_norm(frame: pd.DataFrame) -> Finding | None:
    table = tables.norm_by_inputs(frame)
    if table.empty:
        return None
    here = select(table, device=tables.first_device(table))
    headline = "; ".join(f"in {dtype} {_breakdown(rows)}" for dtype, rows in here.groupby("precision"))
    losses = here.dropna(subset="most_lost")
    worst = losses.loc[(losses["digits_before"] - losses["digits_after"]).groupby(losses["precision"]).idxmax()]
    lost = [
        f'"{row["most_lost"]}" in {row["precision"]} '
        f"(from {row['digits_before']:.1f} digits to {row['digits_after']:.1f})"
        for row in worst.to_dict("records")
    ]
    is_saved = bool((table["with_float32_digits"] > table["output_digits"]).any())
    over = join_words(list(dict.fromkeys(here.dropna(subset="overflows")["precision"])))
    reason = f"{over} can overflow" if over else "16 bits lose digits"
    return Finding(
        "measured",
        f"I{headline[1:]}.",
        table,
        advice=f"Compute norms in float32: {reason}." if is_saved else None,
        significant=is_saved,
        where=f"inputs {join_words(list(here['inputs'].unique()))} · {here['device'].iloc[0]}",
        also=f"Where nothing overflows, most digits are lost in the step {join_words(lost)}." if lost else None,
    )


def _breakdown(rows: pd.DataFrame) -> str:
    """ "the squares overflow and underflow", "no step overflows"."""
    kinds: dict[str, list[str]] = {}
    for kind in ("overflow", "underflow"):
        for step in dict.fromkeys(rows[f"{kind}s"].dropna()):
            kinds.setdefault(step, []).append(f"{kind}{_s(step)}")
    told = [f"the {step} {join_words(verbs)}" for step, verbs in kinds.items()]
    return join_words(told) or "no step overflows or underflows"


@QUESTIONS.ask(
    "autocast_speed",
    "Is bf16 autocast faster than fp32, and does that grow with the size of the model?",
    "precision",
)
def autocast_speed(frame: pd.DataFrame, calibration: Calibration | None) -> Finding | None:
    table = tables.ratios(frame, calibration)
    found = contest(
        table,
        "alternative",
        FULL,
        names=lambda name: f"autocast to {name}",
        axis=("model", "mode", "device"),
        quantity=OF_PASSES,
        choose=lambda winner: f"To save time, train under {winner}",
        keep=f"Stay with {FULL}",
        caveat=troubles(select(frame, ["alternative"], part="speed"), "alternative"),
        setting=scope_of(select(frame, part="speed"), ["batch", "context_length"]),
    )
    if found is None or table.empty:
        return found
    steps = select(table, mode=BOTH, device=tables.first_device(table), alternative="bfloat16")
    if len(steps) < 2:
        return found
    small, large = steps.iloc[0], steps.iloc[-1]
    expected = f"Operators of {large['model']} should take {_times(large['predicted_ratio'])} {FULL}'s time."
    return replace(found, also=_with_size(small, large), why=expected if large["predicted_ratio"] > 0 else None)


def _with_size(small: pd.Series, large: pd.Series) -> str:
    """The smallest and the largest model; a trend where their intervals part."""
    trend = "No clear trend with size"
    if large["high"] < small["low"]:
        trend = "The gain grows with the model" if large["high"] < 1 else "The loss shrinks with the model"
    elif large["low"] > small["high"]:
        trend = "Larger models gain less" if small["high"] < 1 else "The loss grows with the model"
    takes = f"forward and backward take {_times(small['ratio'])} {FULL}'s time for {small['model']}"
    return f"{trend}: {takes}, {_times(large['ratio'])} it for {large['model']}."


def _times(ratio: float) -> str:
    """ "94 % of", "15 times"."""
    return f"{ratio:.0f} times" if ratio >= 2 else f"{format_share(ratio)} of"


@QUESTIONS.ask("published_trends", "Do the published results hold on this machine?")
def published_trends(frame: pd.DataFrame) -> Finding | None:
    table = select(tables.ratios(frame), alternative="bfloat16", mode=BOTH)
    here = tables.published_ratios()
    # `mixed_precision.csv`: slower at the smallest size, faster at every larger one
    slow, fast = (select(table, model=list(here.loc[some, "model"])) for some in (here["ratio"] > 1, here["ratio"] < 1))
    return published(
        [
            _same_sums(frame),
            _gains_with_size(table),
            claim(f"bf16 autocast is slower than fp32 for {_models(slow)}", slow, "slower"),
            claim(f"bf16 autocast is faster than fp32 for {_models(fast)}", fast, "faster"),
        ]
    )


def _models(rows: pd.DataFrame) -> str:
    return join_words(list(dict.fromkeys(rows["model"])))


def _same_sums(frame: pd.DataFrame) -> Claim | None:
    """`profile_kernels.csv`: 1000 x 0.01. Arithmetic, not speed: every machine should give the same digits."""
    table = tables.final_sums(frame).dropna(subset="published")
    table = table[(table["exact_sum"] - 10).abs() < 1e-9]
    same = [tables.agrees_with(value, text) for value, text in zip(table["sum"], table["published"], strict=True)]
    seen = f"{sum(same)} of {len(same)} in every printed digit"
    return exact("1000 x 0.01 comes to the published sums", same, [not agrees for agrees in same], seen)


def _gains_with_size(ratios: pd.DataFrame) -> Trend | None:
    """`mixed_precision.csv`: the ratio of bf16 over fp32 falls from each size to the next, and below 1.

    A ratio that falls and stays above 1 is less of a loss, which is no saving: it does not show the trend.
    """
    steps = [pair for _, of_device in ratios.groupby("device") for pair in pairwise(of_device.to_dict("records"))]
    text = "The larger the model, the more time bf16 autocast saves, forward and backward"
    rows = [pd.DataFrame(rows) for rows in zip(*steps, strict=True)]
    if not rows:
        return None
    saves = bool((rows[1]["high"] < 1).all())
    return lies_within(text, quotients(rows[1], rows[0], "ratio"), most=1.0, if_shown=saves)
