"""What the tests of answers share: a study asked about a frame, as its notebook asks it."""

import re
from collections.abc import Mapping

import pandas as pd

from labkit.lab.made_once import unchanged_frames

MOST_WORDS, MOST_NUMBERS = 25, 2
# A digit within a name (float32, 2.7B, CIFAR-100) or an id is no number.
NUMBER = re.compile(r"(?<![\w.])(?<![A-Za-z]-)\d[\d,]*(?:\.\d+)?(?!\w|\.\d)")


class Answers(Mapping):
    """The findings by the id of their question, each found when it is asked for: most tests look at one or two."""

    def __init__(self, study, *asked):
        self._questions, self._asked = study.questions, asked
        self._found = {}

    def __getitem__(self, identifier):
        if identifier not in self._found:
            with unchanged_frames():
                self._found[identifier] = self._questions.finding(identifier, *self._asked)
        return self._found[identifier]

    def __iter__(self):
        return (question.id for question in self._questions)

    def __len__(self):
        return len(self._questions)


def answers_of(study, frame, *reasons, calibration=None):
    """The findings by the id of their question; `reasons` are those of the points that were skipped."""
    coverage = pd.DataFrame({"status": ["skipped"] * len(reasons), "reason": list(reasons)})
    return Answers(study, frame, coverage, calibration)


def check_headline(headline):
    """One sentence that is short enough to be read, of a recorded run or a fresh one."""
    assert len(headline.split()) <= MOST_WORDS, headline
    assert len(NUMBER.findall(headline)) <= MOST_NUMBERS, headline
    assert headline.endswith("."), headline
