"""An advice in a notebook: the ranking as a frame, and where the time goes as figures."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from labkit.lab.advise import report, screen, words
from labkit.lab.advise.request import Asked, read_request
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
    """What was asked in a notebook, and what is best. Its last expression in a cell prints the answer."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.advice: Advice = advise(asked.request)

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
        """Where the step of the best layouts goes, one bar each, numbered as in the ranking."""
        best = self.advice.best or [self.advice.first]
        return _stacked("layout", [(str(place), one) for place, one in enumerate(best, start=1)])

    def by_gpus(self, gpus: Iterable[int]) -> "Plot":
        """The same of the best layout on each number of GPUs; numbers on which nothing fits are left out."""
        found: list[tuple[str, Candidate]] = []
        for count in gpus:
            ranking = replace(self.asked.request, gpus=count).ranking()
            if ranking.order:
                found.append((str(count), ranking.candidate(ranking.order[0])))
        return _stacked("gpus", found)


def ask(variables: Mapping[str, Any]) -> Plan:
    """The plan for a notebook's variables: those named as an option of `labkit advise`. ValueError as there."""
    given = {name: str(variables[name]) for name in NAMES if variables.get(name) is not None}
    return Plan(read_request(given))


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
