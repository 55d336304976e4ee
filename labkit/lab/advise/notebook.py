"""An advice in a notebook: the ranking as a frame, and where the time goes as figures."""

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html import escape
from typing import TYPE_CHECKING, Any

from labkit.lab.advise import report, screen, words
from labkit.lab.advise.request import Asked, read_request
from labkit.lab.config import ParameterError
from labkit.lab.project import reference_directory
from labkit.scaling.advice import Advice, advise, sums_s
from labkit.scaling.published import load_published, nearest
from labkit.scaling.search import Candidate

if TYPE_CHECKING:
    import pandas as pd

    from labkit.lab.figures import Plot

NAMES = (
    *("model", "gpu", "gpus", "gpus_per_node", "network_gbps", "tokens_per_step", "sequence", "precision"),
    *("memory_reserve", "tokens", "framework", "calibrate"),
)
"""Variables of a notebook that are options of `labkit advise`."""
PREDICTED = "predicted"
DRAWN = 0.5
"""Percent of a step from which on a part is drawn."""


class Plan:
    """What was asked in a notebook, by the options of `labkit advise`, and what is best.

    As the last expression of a cell it prints the answer. ParameterError for what the command refuses.
    """

    def __init__(self, options: Mapping[str, str]) -> None:
        self.options = options
        try:
            self.asked: Asked = read_request(options)
            self.advice: Advice = advise(self.asked.request)
        except ValueError as error:
            raise ParameterError(str(error)) from None

    def __repr__(self) -> str:
        published = load_published(reference_directory() / "scaling")
        rows = nearest(published, self.asked.request.run(self.advice.first.layout))
        return "\n".join(screen.lines(report.report(self.asked, self.advice, rows)))

    def ranking(self, count: int = 10) -> "pd.DataFrame":
        """The best layouts, one a row; times in seconds, memory in GiB."""
        import pandas as pd

        rows = [_row(one) for one in self.asked.request.ranking().proposed(count)]
        return pd.DataFrame(rows, index=range(1, len(rows) + 1))

    def waterfall(self) -> "Plot":
        """Where the step of the best layouts goes, one panel each, numbered as in the ranking."""
        from labkit.lab.advise.drawn import waterfalls

        return waterfalls(report.steps_of(self.advice.best or [self.advice.first]))

    def but(self, **changes: Any) -> "Plan":
        """The plan for the same question with other values: `plan.but(gpus=128, network_gbps=400)`; None: as usual."""
        if unknown := set(changes) - set(NAMES):
            raise ParameterError(f"expected options among {', '.join(NAMES)}; got {', '.join(sorted(unknown))}")
        return Plan(_texts({**self.options, **changes}))

    def beside(self, **changes: Any) -> "Beside":
        """This plan and the one with other values, `plan.beside(gpus=32)`: both rankings and both waterfalls."""
        told = ", ".join(f"{name} {value}" for name, value in changes.items())
        return Beside({"as asked": self, told: self.but(**changes)})

    def by_gpus(self, gpus: Iterable[int]) -> "Plot":
        """The same of the best layout on each number of GPUs; numbers on which nothing fits are left out."""
        found: list[tuple[str, Candidate]] = []
        for count in gpus:
            ranking = replace(self.asked.request, gpus=count).ranking()
            if ranking.order:
                found.append((str(count), ranking.candidate(ranking.order[0])))
        return _stacked("gpus", found)


class Beside:
    """Plans to compare. As the last expression of a cell: the three best layouts of each, and where their best goes."""

    def __init__(self, plans: Mapping[str, Plan]) -> None:
        self.plans = plans

    def __repr__(self) -> str:
        return compare(self.plans).to_string()

    def _repr_html_(self) -> str:
        shown = ["layout", "step_s", "mfu_percent", "peak_gib"]
        tables = [
            f"<div><p><b>{escape(name)}</b></p>{plan.ranking(3)[shown].to_html(float_format='{:.3g}'.format)}</div>"
            for name, plan in self.plans.items()
        ]
        image = base64.b64encode(waterfall(self.plans).png()).decode()
        alt = f"Where a step goes: {', '.join(self.plans)}."
        return (
            f'<div style="display: flex; flex-wrap: wrap; gap: 2em">{"".join(tables)}</div>'
            f'<img style="max-width: 100%" alt="{escape(alt)}" src="data:image/png;base64,{image}">'
        )


def ask(variables: Mapping[str, Any]) -> Plan:
    """The plan for a notebook's variables: those named as an option of `labkit advise`. ParameterError as there."""
    return Plan(_texts({name: variables.get(name) for name in NAMES}))


def compare(plans: Mapping[str, Plan]) -> "pd.DataFrame":
    """The best layout of each plan, one a row, and tokens per second of all GPUs."""
    import pandas as pd

    rows = [_row(plan.advice.first) | {"tokens_per_s": _tokens_per_s(plan)} for plan in plans.values()]
    return pd.DataFrame(rows, index=list(plans))


def waterfall(plans: Mapping[str, Plan]) -> "Plot":
    """Where the step of each plan's best layout goes, one panel each."""
    from labkit.lab.advise.drawn import waterfalls

    first = {name: plan.advice.first for name, plan in plans.items()}
    return waterfalls([report.Step(name, report.parts_of(one), one.interval_90) for name, one in first.items()])


def _tokens_per_s(plan: Plan) -> float:
    return plan.asked.request.tokens / plan.advice.first.step_s


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in values.items() if value is not None}


def _row(one: Candidate) -> dict[str, object]:
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


def _stacked(axis: str, found: Sequence[tuple[str, Candidate]]) -> "Plot":
    """Shares of the step, so that steps of different lengths can be compared."""
    import pandas as pd

    from labkit.lab.figures import bars

    rows: list[dict[str, Any]] = [
        {axis: name, "part": words.PARTS[part], "percent": 100 * seconds / one.step_s}
        for name, one in found
        for part, seconds in sums_s(one).items()
    ]
    order = [
        name for name in words.PARTS.values() if any(row["part"] == name and row["percent"] > DRAWN for row in rows)
    ]
    frame = pd.DataFrame([row for row in rows if row["part"] in order], columns=[axis, "part", "percent"])
    return bars(
        frame,
        x=axis,
        y="percent",
        hue="part",
        hue_order=order,
        stacked=True,
        y_title="share of a step (%)",
        source=PREDICTED,
    )
