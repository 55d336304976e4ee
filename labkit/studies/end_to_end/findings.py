"""What the end-to-end lab asks, and how a run answers."""

from dataclasses import replace
from typing import Any

import pandas as pd

from labkit.costs.calibration import Calibration
from labkit.lab.as_predicted import CLOSE, agreement
from labkit.lab.claims import Trend, claim, lies_within, published, quotients
from labkit.lab.comparing import compared
from labkit.lab.findings import Finding, Questions, troubles, with_model, without_verdict
from labkit.lab.own_models import models_in, parameters_of, without_own
from labkit.lab.places import scope_of
from labkit.lab.rows import select
from labkit.lab.units import counted, format_seconds, format_share, join_words, span
from labkit.studies.end_to_end import tables

QUESTIONS = Questions()
SIZES = ("batch", "context_length")
PARTS = {"forward": "forward pass", "backward": "backward pass", "optimizer": "optimizer"}
# Published: backward over forward is 2.06; two matrix products for one, give or take what is not a product.
TWICE = (1.5, 2.5)
SMALL_SPREAD_PERCENT = 0.5  # published: 1.7 of 517 ms, 0.33 %


@QUESTIONS.ask("step_times", "How long do forward, backward and optimizer step take, and how much do they vary?")
def step_times(frame: pd.DataFrame) -> Finding | None:
    table, caveat = tables.phases(frame), _troubles(frame, "phases")
    if table.empty:
        return Finding("not measured", "Not measured: the phases of a step.", caveat=caveat) if caveat else None
    last = select(table, **{name: table[name].iloc[-1] for name in tables.MODEL})
    largest, size = last.set_index("phase")["seconds"], last["size"].iloc[-1]
    parts = largest[largest.index.isin(PARTS)]
    whole = "training step" if largest.index[-1] == "step" else largest.index[-1]
    headline = f"One {whole} of the model {size} takes {format_seconds(largest.iloc[-1])}"
    if len(parts) > 1:
        headline += f", {format_share(parts.max() / parts.sum())} of it in the {PARTS[parts.idxmax()]}"
    spread, also = table.dropna(subset="spread_percent"), None
    if len(spread):
        most = spread.loc[spread["spread_percent"].idxmax()]
        also = f"The standard deviation of repeats is typically {spread['spread_percent'].median():.1f} %, "
        also += f"at most {most['spread_percent']:.1f} % ({most['phase']} of {most['size']})."
    columns = ["precision", "size", "phase", "seconds", "low", "high", "mean_s", "std_s", "spread_percent", "n"]
    with models_in(frame):
        count = parameters_of(size)
    millions = [f"{count / 1e6:.3g} million parameters"] if count else []
    load = scope_of(without_own(select(frame, size=size)), SIZES)
    where = " · ".join(filter(None, [*millions, scope_of(last, ["precision", "device"], load)]))
    return Finding("measured", f"{headline}.", table[columns], caveat, where=where, also=also)


def _troubles(frame: pd.DataFrame, sweep: str) -> str | None:
    """What failed, or was wrong, in a sweep, by model."""
    return troubles(select(frame, ["size"], sweep=sweep), "size")


@QUESTIONS.ask("warmup", "Is the first step of a process slower than later ones, and how many should not count?")
def warmup(frame: pd.DataFrame) -> Finding | None:
    ratios, enough, caveat = tables.later_over_first(frame), tables.enough_warmup(frame), _troubles(frame, "warmup")
    leave = f"Leave the first {counted(enough, 'step') if enough > 1 else 'step'} of a process out of every mean"
    told: dict[str, Any] = {"axis": ("size",), "choose": leave if enough else None, "caveat": caveat}
    told["setting"] = scope_of(without_own(frame), SIZES)
    alone = compared(select(ratios, steps=1), "a later step", "the first of its process", **told)
    later, first = "ten later steps together", "the first ten together"
    ten = compared(select(ratios, steps=tables.STEPS_AVERAGED), later, first, plural=True, **told)
    if alone is None or ten is None or ten.table is None:
        return alone
    found = alone if alone.significant or not ten.significant else ten
    settled = f"Before a mean of ten steps, {counted(enough, 'warm-up step')} {'is' if enough == 1 else 'are'} enough."
    if enough == tables.WARMUPS[-1]:
        settled = f"Before a mean of ten steps, leave out at least the first {enough}; more were not tried."
    return replace(
        found,
        table=pd.concat([alone.table, ten.table], ignore_index=True),
        effects=(*alone.effects, *ten.effects),
        also=settled if enough else without_verdict(ten.headline) if alone.significant else None,
    )


@QUESTIONS.ask("predicted", "Do counts of FLOPs and bytes predict the times?")
def predicted(frame: pd.DataFrame, calibration: Calibration | None) -> Finding | None:
    table = tables.predictions(frame, calibration)
    columns, setting = ["size", "precision", "device"], scope_of(without_own(frame), SIZES)
    found = agreement(table, "times", "what is predicted", settings=columns, setting=setting)
    if found is None:
        return None
    by_size, told = table.groupby("size", sort=False)["measured_over_predicted"].median(), []
    if len(by_size) > 1:
        small, large = (f"the {by_size.index[at]} model {{}}{by_size.iloc[at]:.1f} times" for at in (0, -1))
        told.append(f"Typically {small.format('takes ')} what is predicted, {large.format('')}.")
    if by_size.max() > CLOSE:
        told.append(tables.PREDICTED.leaves_out)
    if len(mfu := table.dropna(subset="mfu_percent")):
        best = mfu.loc[mfu["mfu_percent"].idxmax()]
        told.append(f"At best {best['mfu_percent']:.0f} % of the data-sheet peak ({best['phase']} of {best['size']}).")
    return replace(found, why=" ".join(told) or None)


@QUESTIONS.ask("compile", "Does torch.compile of the whole model pay, and after how many steps?", "compile")
def compiling(frame: pd.DataFrame) -> Finding | None:
    table = tables.compiled_against_eager(frame)
    steps = select(table, phase="step").dropna(subset="worth_it_after")
    choose, earned = "Compile the whole model", ""
    if len(steps):
        most = float(f"{steps['worth_it_after'].max():.2g}")
        worth = f"{most:,.0f} steps"
        choose = f"Compile {join_words(list(steps['size'].unique()))} as a whole for runs of more than {worth}"
        earned = f" and pays for itself within about {worth}"
    found = compared(
        table,
        "the compiled model",
        "the eager one",
        axis=("phase", "size"),
        choose=choose,
        keep="Stay with the eager model",
        caveat=_troubles(frame, "compile"),
        why=_besides(frame),
        setting=scope_of(without_own(frame), SIZES),
    )
    if found is None or table.empty:
        return found
    also = f"Compiling takes up to {format_seconds(table['compile_s'].max())}{earned}."
    return with_model(replace(found, also=also), table)


def _besides(frame: pd.DataFrame) -> str | None:
    """What runs have in no compile time; in those that lack this column it is part of the first."""
    seconds = select(frame, ["compiler_s"], sweep="compile")["compiler_s"].dropna()
    told = f"Before that, torch took {format_seconds(seconds.max())} to try the C++ compiler."
    return told if (seconds > 0).any() else None


@QUESTIONS.ask("published_trends", "Do the published trends hold on this machine?")
def published_trends(frame: pd.DataFrame) -> Finding | None:
    frame = without_own(frame)
    compiled = tables.compiled_against_eager(frame)
    return published(
        [
            _backward_twice_forward(frame),
            _small_spread(frame),
            # `transformer_compile.csv`: both are faster compiled, at every size
            claim("Forward alone is faster compiled", select(compiled, phase="inference"), "faster"),
            claim("A full step is faster compiled", select(compiled, phase="step"), "faster"),
        ]
    )


def _backward_twice_forward(frame: pd.DataFrame) -> Trend | None:
    """`end_to_end.csv`: backward 347.7 ms, forward 169.1 ms."""
    table = tables.phases(frame)
    both = select(table, phase="backward").merge(select(table, phase="forward"), on=list(tables.MODEL))
    ends = (both.filter(regex=f"{end}$").rename(columns=lambda name: name[:-2]) for end in ("_x", "_y"))
    return lies_within("Backward takes about twice as long as forward", quotients(*ends), *TWICE)


def _small_spread(frame: pd.DataFrame) -> Trend | None:
    """`end_to_end.csv`: the standard deviation of forward + backward is 0.3 % of the mean."""
    table = select(tables.phases(frame), phase=tables.BOTH).dropna(subset="spread_low").drop(columns=["low", "high"])
    named = table.rename(columns={"spread_percent": "ratio", "spread_low": "low", "spread_high": "high"})
    seen = f"{span(table['spread_percent'], '{:.1f}'.format)} %"
    text = f"Forward and backward together vary by less than {SMALL_SPREAD_PERCENT} % of their mean"
    return lies_within(text, named, most=SMALL_SPREAD_PERCENT, seen=seen, equal=None)
