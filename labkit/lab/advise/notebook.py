"""An advice in a notebook: rankings as frames, shares of a step and waterfalls as figures."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from labkit.lab.advise import layouts
from labkit.lab.advise.options import Options, read_options
from labkit.lab.advise.report import PARTS, PREDICTED, YOURS, Step, describe_layout, predicted_step
from labkit.lab.advise.request import make_request
from labkit.lab.config import ParameterError
from labkit.lab.figures import Bars, Plot, Timeline
from labkit.scaling.advice import advise, sums_s
from labkit.scaling.prediction import Prediction
from labkit.scaling.published import nearest
from labkit.scaling.search import rank

NAMES = (
    *("model", "gpu", "gpus", "gpus_per_node", "network_gbps", "tokens_per_step", "sequence", "precision"),
    *("memory_reserve", "tokens", "framework", "calibrate"),
)
"""Variables of a notebook that are options of `labkit advise`."""
MIN_SHARE = 5e-3
"""Share of a step from which on a part is plotted."""
WHOLE = "step"


class Plan:
    """A question by the options of `labkit advise`, and its answer.

    As the last expression of a cell it prints the answer. ParameterError for what the command refuses.
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
        return "\n".join(layouts.make_report(self.question, self.advice, rows).lines())

    def ranking(self, count: int = 10) -> pd.DataFrame:
        """The best layouts, one per row; times in seconds, memory in GiB."""
        rows = [_row(one) for one in rank(self.question.request).proposed(count)]
        return pd.DataFrame(rows, index=range(1, len(rows) + 1))

    def waterfall(self) -> Plot:
        """The parts of the best layouts' steps, one panel each, numbered as in the ranking."""
        return draw_steps(layouts.number_steps(self.advice.best or [self.advice.first]))

    def but(self, **changes: Any) -> "Plan":
        """The plan with other values: `plan.but(gpus=128, network_gbps=400)`; None is the default."""
        return Plan(self.options.named() | changes)

    def by_gpus(self, gpus: Iterable[int]) -> Plot:
        """Shares of the best layout's step on each number of GPUs; numbers on which nothing fits are left out."""
        rankings = {count: rank(replace(self.question.request, gpus=count)) for count in gpus}
        best = {str(count): ranking.first() for count, ranking in rankings.items() if ranking.order}
        rows = [
            {"gpus": count, "part": PARTS[part], "share_percent": 100 * seconds / one.step_s}
            for count, one in best.items()
            for part, seconds in sums_s(one).items()
        ]
        frame = pd.DataFrame(rows, columns=["gpus", "part", "share_percent"])
        large = frame.groupby("part")["share_percent"].transform("max") > 100 * MIN_SHARE
        return Bars(x="gpus", y="share_percent", hue="part", stacked=True).plot(frame[large])


def ask(variables: Mapping[str, Any]) -> Plan:
    """The plan for a notebook's variables: those named as an option of `labkit advise`. ParameterError as there."""
    return Plan({name: variables.get(name) for name in NAMES})


def compare(plans: Mapping[str, Plan], count: int = 1) -> pd.DataFrame:
    """The best layouts of each plan, one per row, and tokens per second of all GPUs."""
    rows = {
        (name, place): _row(one) | {"tokens_per_s": plan.question.request.tokens / one.step_s}
        for name, plan in plans.items()
        for place, one in enumerate(rank(plan.question.request).proposed(count) or [plan.advice.first], start=1)
    }
    frame = pd.DataFrame.from_dict(rows, orient="index")
    return frame if count > 1 else frame.droplevel(1)


def waterfall(plans: Mapping[str, Plan]) -> Plot:
    """The parts of each plan's best step, one panel each."""
    return draw_steps([predicted_step(name, plan.advice.first) for name, plan in plans.items()])


def _row(one: Prediction) -> dict[str, object]:
    low, high = one.interval_90
    return {
        "layout": describe_layout(one.layout),
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


def draw_steps(steps: Sequence[Step]) -> Plot:
    """Steps as waterfalls, a panel each: a box per part that begins where the one above ends, and the whole step."""
    rows = [row for step in steps for row in _boxes(step)]
    frame = pd.DataFrame(rows).sort_values("part", key=lambda parts: parts == WHOLE, kind="stable")
    is_large = frame["seconds"] > MIN_SHARE * frame.groupby("layout")["seconds"].transform("max")
    frame = frame[is_large.groupby(frame["part"]).transform("any")]
    plot = Timeline(panel="layout", start="start_s", duration="seconds", lane="part").plot(frame)
    source = f"{PREDICTED}, {YOURS}" if any(step.name == YOURS for step in steps) else PREDICTED
    return replace(plot, data=plot.data.assign(source=source))


def _boxes(step: Step) -> Iterator[dict[str, object]]:
    """A row per part of a step, and one of the whole step with its interval."""
    start_s, no_interval = 0.0, (math.nan, math.nan)
    boxes = []
    for part, seconds in step.parts_s:
        boxes.append((part, start_s, seconds, *no_interval))
        start_s += seconds
    names = ("part", "start_s", "seconds", "low", "high")
    for box in [*boxes, (WHOLE, 0.0, start_s, *step.interval_s)]:
        yield {"layout": step.name} | dict(zip(names, box, strict=True))
