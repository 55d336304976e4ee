"""A study: what a lab measures, what it expects, and what it answers. Its notebook only tells the story.

To add a lab: a package `labkit/studies/<lab>/` whose `study.py` defines `STUDY`, a notebook
`notebooks/<number>_<lab>.ipynb`, and a line in `labkit/studies/__init__.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import pandas as pd

from labkit.lab.answers import Answer, Question
from labkit.lab.config import LabConfig
from labkit.lab.point import Point
from labkit.machine import Machine


class Study(ABC):
    """One lab. Subclasses fill in the class variables and the abstract methods."""

    name: ClassVar[str]
    """Same as the notebook's and the page's."""
    title: ClassVar[str]
    summary: ClassVar[str]
    """One line for `labkit list` and the index page."""
    questions: ClassVar[Sequence[Question]]
    profiles: ClassVar[Mapping[str, LabConfig]]
    """smoke, quick, standard and paper."""

    @staticmethod
    @abstractmethod
    def worker(point: Any) -> Iterable[Mapping[str, Any]] | None:
        """Runs on every rank and yields rows. Assign `staticmethod(function)`, from a module that imports nothing
        heavy: each rank imports it anew."""

    @abstractmethod
    def points(self, config: Any, machine: Machine) -> Sequence[Point]:
        """What to measure, in order; points of one world size next to one another share their ranks."""

    @abstractmethod
    def answers(self, frame: pd.DataFrame, coverage: pd.DataFrame) -> Sequence[Answer]:
        """One answer to each question, from `Run.frame()` and `Run.coverage()` alone; either may be empty."""

    def skip_reason(self, point: Any, machine: Machine) -> str | None:
        """Why this machine cannot measure the point ("needs 51 GiB, 22 GiB available"), or None."""
        return None

    def series(self, point: Any) -> tuple[Hashable, float] | None:
        """(series, size): once a point of a series runs out of memory, its larger ones are skipped."""
        return None
