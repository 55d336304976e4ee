"""Advice in a notebook: rankings and the parts of steps as frames."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from labkit.advise.advice import advise
from labkit.advise.report import report_advice
from labkit.advise.request import Options, Question, make_request, read_options
from labkit.lab.config import ParameterError
from labkit.scaling.prediction import Prediction
from labkit.scaling.search import rank


class Plan:
    """A question by the options of `labkit advise`, and its answer.

    As the last expression of a cell it prints the answer. ParameterError for what the command
    refuses.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        try:
            self.question: Question = make_request(read_options(options))
            self.advice = advise(self.question.request)
        except ValueError as error:
            raise ParameterError(str(error)) from None

    def __repr__(self) -> str:
        return "\n".join(report_advice(self.question, self.advice))

    def ranking(self, count: int = 10) -> pd.DataFrame:
        """Return the best layouts, one per row; times in seconds, memory in GiB."""
        request = self.question.request
        # Where nothing fits, the layout that needs the least memory stands for the answer.
        best = rank(request).proposed(count) or [self.advice.first]
        rows = [_row(one) | {"tokens_per_s": request.tokens / one.step_s} for one in best]
        return pd.DataFrame(rows, index=range(1, len(rows) + 1))

    def parts(self) -> pd.DataFrame:
        """Return seconds of the parts of the best layouts' steps, one layout per row."""
        return parts({str(one.layout): one for one in self.advice.best or [self.advice.first]})

    def but(self, **changes: Any) -> "Plan":
        """Return the plan with other values, as `plan.but(gpus=128)`; None is the default."""
        return Plan(self.question.options.named() | changes)


def ask(variables: Mapping[str, Any]) -> Plan:
    """Make a plan from variables that are options of `labkit advise`. ParameterError as there."""
    return Plan({name: variables.get(name) for name in Options.model_fields})


def compare(plans: Mapping[str, Plan], count: int = 3) -> pd.DataFrame:
    """Return the best layouts of each plan, one per row."""
    return pd.concat({name: plan.ranking(count) for name, plan in plans.items()})


def compare_parts(plans: Mapping[str, Plan]) -> pd.DataFrame:
    """Return seconds of the parts of each plan's best step, one plan per row."""
    return parts({name: plan.advice.first for name, plan in plans.items()})


def parts(steps: Mapping[str, Prediction]) -> pd.DataFrame:
    """Return seconds of the parts of steps, one step per row; a part that none has is left out."""
    frame = pd.DataFrame({name: one.sums_s for name, one in steps.items()}).T
    return frame.loc[:, (frame > 0).any()]


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
