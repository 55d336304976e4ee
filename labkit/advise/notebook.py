"""Advice in a notebook: rankings and the parts of steps as frames."""

from collections.abc import Mapping
from typing import Any

import pandas as pd

from labkit.advise.advice import advise
from labkit.advise.report import report_advice
from labkit.advise.request import Options, make_request, read_options
from labkit.lab.config import ParameterError
from labkit.scaling.search import rank


class Plan:
    """A request by the options of `labkit advise`, and its answer.

    As the last expression of a cell it prints the answer. ParameterError for what the command
    refuses.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        try:
            self.options = read_options(options)
            self.request = make_request(self.options)
            self.advice = advise(self.request)
        except (ValueError, OSError) as error:
            raise ParameterError(str(error)) from None

    def __repr__(self) -> str:
        return "\n".join(report_advice(self.advice))

    def ranking(self, count: int = 10) -> pd.DataFrame:
        """Return the best layouts, one per row; times in seconds, memory in GiB."""
        # Where nothing fits, the layout that needs the least memory stands for the answer.
        best = rank(self.request).proposed(count) or [self.advice.first]
        rows = [
            {
                "layout": str(prediction.layout),
                "micro_batch": prediction.layout.micro_batch,
                "accumulated": int(prediction.layout.micro_batches),
                "recompute": prediction.layout.recompute,
                "step_s": prediction.step_s,
                "low_s": prediction.interval_90[0],
                "high_s": prediction.interval_90[1],
                "mfu_percent": 100 * prediction.mfu,
                "peak_gib": prediction.peak_gib,
                "out_of_memory": prediction.out_of_memory,
                "tokens_per_s": self.request.tokens / prediction.step_s,
            }
            for prediction in best
        ]
        return pd.DataFrame(rows, index=range(1, len(rows) + 1))

    def parts(self) -> pd.DataFrame:
        """Return seconds of the parts of the best layouts' steps, one layout per row."""
        best = self.advice.best or [self.advice.first]
        return pd.DataFrame({str(layout.layout): layout.parts_s for layout in best}).T

    def but(self, **changes: Any) -> "Plan":
        """Return the plan with other values, as `plan.but(gpus=128)`; None is the default."""
        return Plan(self.options.named() | changes)


def ask(variables: Mapping[str, Any]) -> Plan:
    """Make a plan from variables that are options of `labkit advise`. ParameterError as there."""
    return Plan({name: variables.get(name) for name in Options.model_fields})
