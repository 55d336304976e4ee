"""Advice in a notebook: rankings as frames, and the parts of steps as waterfalls."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pandas as pd

from labkit.lab.advise.report import number_steps, report_advice
from labkit.lab.advise.request import Options, make_request, read_options
from labkit.lab.advise.text import PREDICTED
from labkit.lab.config import ParameterError
from labkit.lab.figures import Timeline
from labkit.lab.figures.draw import draw_frame
from labkit.lab.figures.plot import Plot
from labkit.scaling.advice import advise, sums_s
from labkit.scaling.prediction import Prediction
from labkit.scaling.published import nearest
from labkit.scaling.search import rank

MIN_SHARE = 5e-3
"""Share of a step from which on a part is plotted."""
WHOLE = "step"


class Plan:
    """A question by the options of `labkit advise`, and its answer.

    As the last expression of a cell it prints the answer. ParameterError for what the command
    refuses.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        try:
            self.options: Options = read_options(options)
            self.question = make_request(self.options)
            self.advice = advise(self.question.request)
        except ValueError as error:
            raise ParameterError(str(error)) from None

    def __repr__(self) -> str:
        rows = nearest(self.question.request.run(self.advice.first.layout))
        return "\n".join(report_advice(self.question, self.advice, rows).lines())

    def ranking(self, count: int = 10) -> pd.DataFrame:
        """Return the best layouts, one per row; times in seconds, memory in GiB."""
        rows = [_row(one) for one in rank(self.question.request).proposed(count)]
        return pd.DataFrame(rows, index=range(1, len(rows) + 1))

    def waterfall(self) -> Plot:
        """Draw the parts of the best layouts' steps, numbered as in the ranking."""
        return draw_steps(number_steps(self.advice))

    def but(self, **changes: Any) -> "Plan":
        """Return the plan with other values: `plan.but(gpus=128, network_gbps=400)`.

        None is the default.
        """
        return Plan(self.options.named() | changes)


def ask(variables: Mapping[str, Any]) -> Plan:
    """Make a plan from a notebook's variables that are options of `labkit advise`.

    ParameterError as there.
    """
    return Plan({name: variables.get(name) for name in Options.model_fields})


def compare(plans: Mapping[str, Plan], count: int = 3) -> pd.DataFrame:
    """Return the best layouts of each plan, one per row, and tokens per second of all GPUs."""
    rows = {
        (name, place): _row(one) | {"tokens_per_s": plan.question.request.tokens / one.step_s}
        for name, plan in plans.items()
        for place, one in enumerate(
            rank(plan.question.request).proposed(count) or [plan.advice.first], start=1
        )
    }
    return pd.DataFrame.from_dict(rows, orient="index")


def waterfall(plans: Mapping[str, Plan]) -> Plot:
    """Return the parts of each plan's best step, one panel each."""
    return draw_steps({name: plan.advice.first for name, plan in plans.items()})


def _row(one: Prediction) -> dict[str, object]:
    low, high = one.interval_90
    return {
        "layout": str(one.layout),
        "micro_batch": one.layout.micro_batch,
        "accumulated": int(one.layout.micro_batches),
        "recompute": one.layout.recompute,
        "step_s": one.step_s,
        "low_s": low,
        "high_s": high,
        "mfu_percent": 100 * one.mfu,
        "peak_gib": one.peak_gib,
        "out_of_memory": one.out_of_memory,
    }


def draw_steps(steps: Mapping[str, Prediction]) -> Plot:
    """Draw steps as waterfalls, a panel each.

    A box per part, which begins where the one above ends, and the whole step.
    """
    rows = [row for name, one in steps.items() for row in _boxes(name, one)]
    frame = pd.DataFrame(rows).sort_values("part", key=lambda parts: parts == WHOLE, kind="stable")
    is_large = frame["duration_s"] > MIN_SHARE * frame.groupby("layout")["duration_s"].transform(
        "max"
    )
    frame = frame[is_large.groupby(frame["part"]).transform("any")]
    plot = draw_frame(Timeline(panel="layout", lane="part"), frame)
    return replace(plot, data=plot.data.assign(source=PREDICTED))


def _boxes(name: str, one: Prediction) -> Iterator[dict[str, object]]:
    """Yield a row per part of a step, and one of the whole step with its interval."""
    start_s = 0.0
    box = {"layout": name, "low": math.nan, "high": math.nan}
    for part, seconds in sums_s(one).items():
        if seconds > 0:
            yield box | {"part": part, "start_s": start_s, "duration_s": seconds}
        start_s += seconds
    low, high = one.interval_90
    yield {
        "layout": name,
        "low": low,
        "high": high,
        "part": WHOLE,
        "start_s": 0.0,
        "duration_s": start_s,
    }
