"""What the tests of answers share: a study asked about a frame, as its notebook asks it."""

import re

import pandas as pd

MOST_WORDS, MOST_NUMBERS = 25, 2
# A digit within a name (float32, 2.7B, CIFAR-100) or an id is no number.
NUMBER = re.compile(r"(?<![\w.])(?<![A-Za-z]-)\d[\d,]*(?:\.\d+)?(?!\w|\.\d)")


def answers_of(study, frame, *reasons, calibration=None):
    """The findings by the id of their question; `reasons` are those of the points that were skipped."""
    coverage = pd.DataFrame({"status": ["skipped"] * len(reasons), "reason": list(reasons)})
    return study.findings(frame, coverage, calibration)


def check_headline(headline):
    """One sentence that is short enough to be read, of a recorded run or a fresh one."""
    assert len(headline.split()) <= MOST_WORDS, headline
    assert len(NUMBER.findall(headline)) <= MOST_NUMBERS, headline
    assert headline.endswith("."), headline
