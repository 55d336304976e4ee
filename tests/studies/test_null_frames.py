"""Runs in which nothing differs: recorded runs of every lab whose times are replaced by noise around one value.

Whatever a finding claims of times then is false: of many such runs at most 5 % may hold a claim, for each question.
"""

import numpy as np
import pandas as pd
import pytest

from labkit.lab.project import recorded_directory
from labkit.lab.runs.comparison import LIMITS, NOTES, REPEATS, ROW_SETTINGS
from labkit.lab.runs.store import Run
from labkit.studies import LABS, load_study

FRAMES = 8  # of each kind of noise
MOST = 0.05
CORRELATED = 0.1  # between one repeat and the next


def _recorded(lab):
    paths = sorted((recorded_directory() / lab).glob("*.jsonl"))
    return Run.load(paths[-1]).frame() if paths else pd.DataFrame()


def _times(frame):
    """Columns of measured seconds; one that is predicted is none."""
    names = [name for name in frame if name == "seconds" or (name.endswith("_s") and not name.endswith("per_s"))]
    return [name for name in names if name not in LIMITS and pd.api.types.is_float_dtype(frame[name])]


def _rows(frame):
    """A number for each thing that has samples of its own: what one point measured, whichever rank and repeat."""
    texts = [name for name in frame if frame[name].map(lambda value: isinstance(value, str)).any()]
    settings = sorted({*texts, *(name for name in (*ROW_SETTINGS, *REPEATS) if name in frame)} - set(NOTES))
    about = frame[settings].astype(object).where(frame[settings].notna(), "").astype(str)
    return about.agg("|".join, axis=1).factorize()[0]


def _residuals(frame, rows):
    found = []
    for name in _times(frame):
        logs = np.log(frame[name].where(frame[name] > 0)).dropna()
        found.append((logs - logs.groupby(rows[logs.index]).transform("median")).to_numpy())
    return np.concatenate(found)


def _kinds(residuals):
    """How the noise of a sample series, (n,), is drawn, by name."""

    def correlated(rng, n):
        noise = rng.normal(0, 0.1, n)
        for index in range(1, n):
            noise[index] += CORRELATED * noise[index - 1]
        return noise

    return {
        "10 %": lambda rng, n: rng.normal(0, 0.1, n),
        "20 %": lambda rng, n: rng.normal(0, 0.2, n),
        "40 %": lambda rng, n: rng.normal(0, 0.4, n),
        "correlated": correlated,
        "as recorded": lambda rng, n: rng.choice(residuals, n),
    }


def _null(frame, rows, draw, rng):
    """The same rows, each time a draw around 1 ms; all ranks of a repeat take as long."""
    for name in _times(frame):
        frame = _null_column(frame, name, rows, draw, rng)
    return frame


def _null_column(frame, name, rows, draw, rng):
    keys = pd.Series(rows, index=frame.index).astype(str) + "," + frame["repeat"].astype(str)
    codes, names = keys.factorize()
    order = pd.Series(names).str.split(",", expand=True).astype(int)
    drawn = np.empty(len(names))
    for _, of_row in order.groupby(0):
        drawn[of_row.sort_values(1).index] = draw(rng, len(of_row))
    return frame.assign(**{name: np.where(frame[name].notna(), 1e-3 * np.exp(drawn[codes]), np.nan)})


@pytest.mark.slow
@pytest.mark.parametrize("lab", LABS)
def test_runs_in_which_nothing_differs_claim_next_to_nothing(lab):
    frame = _recorded(lab)
    if not _times(frame):
        pytest.skip("no times in a recorded run")
    study, rows = load_study(lab), _rows(frame)
    claims: dict[str, int] = {}
    kinds = _kinds(_residuals(frame, rows))
    for number, draw in enumerate(kinds.values()):
        for seed in range(FRAMES):
            null = _null(frame, rows, draw, np.random.default_rng([number, seed]))
            for identifier, finding in study.findings(null, pd.DataFrame()).items():
                timed = [effect for effect in finding.effects if effect.quantity == "time"]
                claimed = any(effect.verdict in ("faster", "slower") for effect in timed)
                claims[identifier] = claims.get(identifier, 0) + claimed
    tries = FRAMES * len(kinds)
    most = tries * (MOST + 2 * np.sqrt(MOST * (1 - MOST) / tries))
    assert {identifier: count for identifier, count in claims.items() if count > most} == {}
