"""How long a report takes on this machine, and how a given time is divided among its labs."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from labkit.lab.calibration import LIMITS
from labkit.lab.pages.report import PlannedPage
from labkit.lab.runs.budget import expected_lab_seconds
from labkit.lab.runs.measure import SHORT_LIMITS
from labkit.machine.description import describe_machine
from labkit.machine.load import slowdown_by_others

# Seconds of a page besides its points: the notebook's other cells, figures, HTML. Measured with ten
# other processes on two cores: 2.6 and 2.9 s.
PAGE_S = 3.0
MIN_SHARE_S = 1.0


@dataclass
class ReportTime:
    """The expected time of each lab, and what is left of the report's."""

    expected: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the points of each lab, by its name, in the order of measuring."""
    deadline: float = math.inf
    """When the last page must be written, by `time.monotonic`."""

    @property
    def total_s(self) -> float:
        """Seconds that the whole report takes without a budget."""
        return sum(self.expected.values()) + PAGE_S * len(self.expected)

    @property
    def is_limited(self) -> bool:
        return self.deadline < math.inf

    def limit(self, page: PlannedPage) -> PlannedPage:
        """Return the next page with points for the time that its lab may take."""
        if not self.is_limited:
            return page
        name = page.study.name
        if name != LIMITS:
            return page.with_config({"budget_s": round(self.shares(name)[name], 1)})
        # The other labs predict by all points of this one, but short ones do.
        if self.total_s > self.deadline - time.monotonic():
            return page.with_config(SHORT_LIMITS)
        return page

    def shares(self, first: str | None = None) -> dict[str, float]:
        """Return the seconds that the points of each lab may take, from the `first` one on."""
        names = list(self.expected)
        to_come = {name: self.expected[name] for name in names[names.index(first or names[0]) :]}
        # By what remains now: what a lab took too much or too little is divided among the others.
        remaining_s = self.deadline - time.monotonic() - PAGE_S * len(to_come)
        # The limits are measured whole, since the other labs predict by all of their points.
        limits_s = to_come.pop(LIMITS, 0.0)
        total_s = max(sum(to_come.values()), 1e-9)
        shares = {
            lab: max(MIN_SHARE_S, (remaining_s - limits_s) * seconds / total_s)
            for lab, seconds in to_come.items()
        }
        if limits_s:
            shares[LIMITS] = limits_s
        return shares


def plan_time(pages: Sequence[PlannedPage], deadline: float) -> ReportTime:
    """Plan the time of a report."""
    machine = describe_machine()
    slowdown = slowdown_by_others()
    expected = {}
    for page in pages:
        points = page.study.plan(page.config, machine)
        seconds = expected_lab_seconds(page.study, points, machine)
        expected[page.study.name] = slowdown * seconds
    return ReportTime(expected, deadline)
