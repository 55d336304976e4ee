"""An advice in a notebook: the ranking as a frame, and the parts of steps as figures."""

import base64
from collections.abc import Iterable, Mapping
from dataclasses import replace
from html import escape
from typing import Any

import pandas as pd

from labkit.lab.advise import report, screen, words
from labkit.lab.advise.figures import waterfalls
from labkit.lab.advise.request import AdviceRequest, read_request
from labkit.lab.config import ParameterError
from labkit.lab.figures import Plot, bars
from labkit.scaling.advice import Advice, advise, sums_s
from labkit.scaling.prediction import Prediction
from labkit.scaling.published import nearest
from labkit.scaling.search import rank

NAMES = (
    *("model", "gpu", "gpus", "gpus_per_node", "network_gbps", "tokens_per_step", "sequence", "precision"),
    *("memory_reserve", "tokens", "framework", "calibrate"),
)
"""Variables of a notebook that are options of `labkit advise`."""
MIN_PERCENT = 0.5
"""Percent of a step from which on a part is plotted."""


class Plan:
    """A question by the options of `labkit advise`, and its answer.

    As the last expression of a cell it prints the answer. ParameterError for what the command refuses.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self.options = options
        try:
            self.question: AdviceRequest = read_request(options)
            self.advice: Advice = advise(self.question.request)
        except ValueError as error:
            raise ParameterError(str(error)) from None

    def __repr__(self) -> str:
        rows = nearest(self.question.request.run(self.advice.first.layout))
        return "\n".join(screen.lines(report.make_report(self.question, self.advice, rows)))

    def ranking(self, count: int = 10) -> pd.DataFrame:
        """The best layouts, one per row; times in seconds, memory in GiB."""
        rows = [_row(one) for one in rank(self.question.request).proposed(count)]
        return pd.DataFrame(rows, index=range(1, len(rows) + 1))

    def waterfall(self) -> Plot:
        """The parts of the best layouts' steps, one panel each, numbered as in the ranking."""
        return waterfalls(report.number_steps(self.advice.best or [self.advice.first]))

    def but(self, **changes: Any) -> "Plan":
        """The plan with other values: `plan.but(gpus=128, network_gbps=400)`; None is the default."""
        if unknown := set(changes) - set(NAMES):
            raise ParameterError(f"expected options among {', '.join(NAMES)}; got {', '.join(sorted(unknown))}")
        return Plan(_texts({**self.options, **changes}))

    def compare(self, **changes: Any) -> "Comparison":
        """This plan and the one with other values, `plan.compare(gpus=32)`: both rankings and both waterfalls."""
        title = ", ".join(f"{name} {value}" for name, value in changes.items())
        return Comparison({"as asked": self, title: self.but(**changes)})

    def by_gpus(self, gpus: Iterable[int]) -> Plot:
        """Shares of the best layout's step on each number of GPUs; numbers on which nothing fits are left out."""
        best: dict[str, Prediction] = {}
        for count in gpus:
            ranking = rank(replace(self.question.request, gpus=count))
            if ranking.order:
                best[str(count)] = ranking.first()
        rows = [
            {"gpus": count, "part": words.PARTS[part], "percent": 100 * seconds / one.step_s}
            for count, one in best.items()
            for part, seconds in sums_s(one).items()
        ]
        frame = pd.DataFrame(rows, columns=["gpus", "part", "percent"])
        large = frame[frame["percent"] > MIN_PERCENT]["part"].unique()
        frame = frame[frame["part"].isin(large)]
        return bars(
            frame,
            x="gpus",
            y="percent",
            hue="part",
            hue_order=[name for name in words.PARTS.values() if name in large],
            stacked=True,
            y_title="share of a step (%)",
            source=report.PREDICTED,
        )


class Comparison:
    """Plans to compare. As the last expression of a cell: the three best layouts of each, and their best's parts."""

    def __init__(self, plans: Mapping[str, Plan]) -> None:
        self.plans = plans

    def __repr__(self) -> str:
        return compare(self.plans).to_string()

    def _repr_html_(self) -> str:
        columns = ["layout", "step_s", "mfu_percent", "peak_gib"]
        tables = [
            f"<div><p><b>{escape(name)}</b></p>{plan.ranking(3)[columns].to_html(float_format='{:.3g}'.format)}</div>"
            for name, plan in self.plans.items()
        ]
        image = base64.b64encode(waterfall(self.plans).png()).decode()
        alt = f"The parts of a step: {', '.join(self.plans)}."
        return (
            f'<div style="display: flex; flex-wrap: wrap; gap: 2em">{"".join(tables)}</div>'
            f'<img style="max-width: 100%" alt="{escape(alt)}" src="data:image/png;base64,{image}">'
        )


def ask(variables: Mapping[str, Any]) -> Plan:
    """The plan for a notebook's variables: those named as an option of `labkit advise`. ParameterError as there."""
    return Plan(_texts({name: variables.get(name) for name in NAMES}))


def compare(plans: Mapping[str, Plan]) -> pd.DataFrame:
    """The best layout of each plan, one per row, and tokens per second of all GPUs."""
    rows = []
    for plan in plans.values():
        first = plan.advice.first
        rows.append(_row(first) | {"tokens_per_s": plan.question.request.tokens / first.step_s})
    return pd.DataFrame(rows, index=list(plans))


def waterfall(plans: Mapping[str, Plan]) -> Plot:
    """The parts of each plan's best step, one panel each."""
    first = {name: plan.advice.first for name, plan in plans.items()}
    return waterfalls([report.Step(name, report.list_parts(one), one.interval_90) for name, one in first.items()])


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items() if value is not None}


def _row(one: Prediction) -> dict[str, object]:
    low, high = one.interval_90
    return {
        "layout": words.arrangement(one.layout),
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
