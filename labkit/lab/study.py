"""A study: what a lab measures, expects, and finds. Its notebook only tells the story.

To add a lab: a package `labkit/studies/<lab>/` whose `study.py` defines `STUDY`, a notebook
`notebooks/<number>_<lab>.ipynb`, and a line in `labkit/studies/__init__.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import pandas as pd

from labkit.costs.calibration import Calibration
from labkit.lab.agreement import Known
from labkit.lab.answers import Answer, Question
from labkit.lab.config import LabConfig, ParameterError, nearest, resolve_config
from labkit.lab.findings import Finding, Questions
from labkit.lab.metric import Results
from labkit.lab.point import Point
from labkit.lab.predictions import Predicted
from labkit.machine import Machine


class Study(ABC):
    """One lab. Subclasses fill in the class variables and the abstract methods."""

    name: ClassVar[str]
    """Same as the notebook's and the page's."""
    title: ClassVar[str]
    summary: ClassVar[str]
    """One line for `labkit list` and the index page."""
    questions: ClassVar[Questions]
    profiles: ClassVar[Mapping[str, LabConfig]]
    """smoke, quick, standard and paper."""

    @staticmethod
    @abstractmethod
    def worker(point: Any) -> Iterable[Mapping[str, Any]] | None:
        """Runs on every rank and yields rows. Assign `staticmethod(function)`, from a module that imports nothing
        heavy: each rank imports it anew."""

    predicted: ClassVar[Predicted | None] = None
    """The times that are expected before anything is measured; None: the lab predicts none."""

    plugin_parameter: ClassVar[str | None] = None
    """The field of the config that names what is compared, where a reader can plug in an alternative; None: nowhere."""

    @staticmethod
    def register(name: str, alternative: Any, /) -> dict[str, Any]:
        """Make a reader's own alternative known in this process, under a name that is not taken: ValueError otherwise.

        Returns the table from which the name is taken out again after the measurement. Called in the notebook and in
        every rank. Assign `staticmethod(function)`, from the worker's module.
        """
        raise ValueError("this lab compares nothing of the kind")

    model_parameters: ClassVar[tuple[str, ...]] = ()
    """The fields of the config that name models, a reader's own too (`lab.own_models`)."""

    keeps_checkpoints: ClassVar[bool] = False
    """Whether the worker goes on with an interrupted point. It then gets a second argument, `checkpoints`: a directory
    of the run, in which `<point.id>/` is the point's and is removed when the point has ended; None on ranks that are
    not to write. Rows of an interrupted attempt are dropped: the worker keeps them in its checkpoint, and yields them.
    """

    @abstractmethod
    def points(self, config: Any, machine: Machine) -> Sequence[Point]:
        """What to measure, in order; points of one world size next to one another share their ranks."""

    def findings(
        self, frame: pd.DataFrame, coverage: pd.DataFrame, calibration: Calibration | None = None
    ) -> dict[str, Finding]:
        """A finding for each question, by its id, from `Run.frame()` and `Run.coverage()`; either may be empty.

        `calibration`: that of the run, which predictions are made of.
        """
        return self.questions.find(frame, coverage, calibration)

    def configure(self, profile: str, overrides: Mapping[str, Any]) -> LabConfig:
        return resolve_config(self.name, self.profiles, profile, overrides)

    def answers(self, results: Results) -> dict[str, Answer]:
        """The findings as answers, until this lab is declared on one page."""
        found = self.questions.find(results.frame, pd.DataFrame(), results.calibration)
        return {identifier: _answer(finding, results) for identifier, finding in found.items()}

    def question(self, identifier: str) -> Question:
        questions = {
            question.id: Question(id=question.id, text=question.text, topic=question.topic)
            for question in self.questions
        }
        if identifier not in questions:
            raise ParameterError(f"no question {identifier!r}{nearest(identifier, questions)}")
        return questions[identifier]

    def known(self, frame: pd.DataFrame) -> Iterable[Known]:
        """Which rows of `Run.frame()` measure what other labs measure, too, by the very same computation."""
        return ()

    def check_inputs(self, config: Any, say: Callable[[str], None]) -> None:  # noqa: B027 most studies have none
        """Check the files that the config names, before anything is planned or fetched; `say` shows how far it is.

        ParameterError for what the caller must change.
        """

    def prepare(self, config: Any, say: Callable[[str], None]) -> str | None:
        """Fetch and check what all points need, once nothing else stands in the way; `say` shows how far it is.

        Returns why nothing can be measured here (no network), or None. ParameterError for what the caller must change.
        """
        return None

    def progress(self, point: Any, values: Mapping[str, Any]) -> str | None:
        """A few words for the progress line from a row of rank 0 that has just come in, or None."""
        return None

    def skip_reason(self, point: Any, machine: Machine) -> str | None:
        """Why this machine cannot measure the point ("needs 51 GiB, 22 GiB available"), or None."""
        return None

    def series(self, point: Any) -> tuple[Hashable, float] | None:
        """(series, size): once a point of it runs out of memory, or takes far too long, larger ones are skipped."""
        return None


def _change(ratio: float) -> str:
    if not 0.5 < ratio < 2:
        return f"{1 / ratio:.1f} times less" if ratio < 1 else f"{ratio:.1f} times as much"
    return f"{100 * (1 - ratio):.0f}% less" if ratio < 1 else f"{100 * (ratio - 1):.0f}% more"


def _answer(finding: Finding, results: Results) -> Answer:
    notes = [finding.also, finding.caveat, finding.why, *(results.missing if finding.verdict == "not measured" else ())]
    return Answer(
        finding.verdict,
        finding.headline,
        finding.table,
        finding.advice,
        finding.lead.ratio if finding.lead else 1.0,
        change=_change(finding.lead.ratio) if finding.lead else None,
        scope=finding.where or "",
        notes=tuple(filter(None, notes)),
    )
