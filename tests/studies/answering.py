"""What the tests of answers share: a study asked about a frame, as its notebook asks it."""

import pandas as pd


def answers_of(study, frame, *reasons):
    """The findings by the id of their question; `reasons` are those of the points that were skipped."""
    coverage = pd.DataFrame({"status": ["skipped"] * len(reasons), "reason": list(reasons)})
    return study.findings(frame, coverage)
