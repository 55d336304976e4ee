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
# How busy the machine is changes between the plan and the lab's turn: its shortest point must fit
# then, too.
MARGIN = 1.2
# A lab is left out if its shortest point takes more than so many times an even share: it would
# leave next to nothing for the others.
MAX_EVEN_SHARES = 4


@dataclass
class ReportTime:
    """The expected time of each lab, and what is left of the report's."""

    expected: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the points of each lab, by its name, in the order of measuring."""
    deadline: float = math.inf
    """When the last page must be written, by `time.monotonic`."""
    shortest: Mapping[str, float] = field(default_factory=dict)
    """Seconds of the shortest point of each lab: with less it measures nothing."""

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
        # The other labs predict by every point of this one: in a short report each has fewer
        # repeats, and none is left out.
        if self.total_s > self.deadline - time.monotonic():
            return page.with_config(SHORT_LIMITS)
        return page

    def shares(self, first: str | None = None) -> dict[str, float]:
        """Return the seconds that the points of each lab may take, from the `first` one on.

        Each gets those of its shortest point. The rest is divided by how long labs take.
        """
        names = list(self.expected)
        to_come = names[names.index(first or names[0]) :]
        # By what remains now: what a lab took too much or too little is divided among the others.
        left_s = self.deadline - time.monotonic() - PAGE_S * len(to_come)
        shares = dict[str, float]()
        if LIMITS in to_come:
            # Measured whole, since the other labs predict by all of their points.
            shares[LIMITS] = self.expected[LIMITS]
            left_s -= shares[LIMITS]
            to_come.remove(LIMITS)
        needed = {lab: MARGIN * self.shortest.get(lab, 0.0) for lab in to_come}
        even_s = max(0.0, left_s) / max(1, len(to_come))
        too_long = [lab for lab in to_come if needed[lab] > MAX_EVEN_SHARES * even_s]
        for lab in too_long:
            shares[lab] = MIN_SHARE_S
            to_come.remove(lab)
            del needed[lab]
        further = {lab: max(0.0, self.expected[lab] - needed[lab]) for lab in to_come}
        total_s = max(sum(further.values()), 1e-9)
        spare_s = max(0.0, left_s - sum(needed.values()))
        for lab in to_come:
            share = needed[lab] + spare_s * further[lab] / total_s
            # Without time for a point of each, the first labs measure one, and the last ones none.
            shares[lab] = max(MIN_SHARE_S, min(share, left_s))
            left_s -= shares[lab]
        return shares


def plan_time(pages: Sequence[PlannedPage], deadline: float) -> ReportTime:
    """Plan the time of a report."""
    machine = describe_machine()
    slowdown = slowdown_by_others()
    expected = {}
    shortest = {}
    for page in pages:
        points = page.study.plan(page.config, machine)
        seconds = expected_lab_seconds(page.study, points, machine)
        expected[page.study.name] = slowdown * sum(seconds)
        shortest[page.study.name] = slowdown * min(seconds, default=0.0)
    return ReportTime(expected, deadline, shortest)
