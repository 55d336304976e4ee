"""Compare two sets of runs: by which factor each quantity changed, with an interval.

A run gives one level per quantity, a logarithm of seconds or of a ratio, and the variance of it
that the run's sessions or repeats explain. Runs differ by more than that, by a drift that is
similar for all quantities. Several runs estimate it, and the variance of each quantity is shrunk
towards it (moderated t-statistics: Smyth 2004, section 3). Intervals hold for all quantities of a
comparison together (Bonferroni).
"""

import math

import numpy as np
import pandas as pd
from scipy.special import chdtri, stdtrit

from labkit.bench.statistics import moderate_variance

# Probability that a comparison of an unchanged machine reports a change.
FALSE_ALARMS = 0.05
# Smallest drift, a standard deviation: three runs may be alike by chance.
MIN_DRIFT = 0.01
# Degrees of freedom from which a quantity helps to estimate the drift: three runs of one set.
MIN_FREEDOM = 2
# Weight, in degrees of freedom, of the assumption that all quantities drift alike.
PRIOR_FREEDOM = 10.0


def compare_levels(
    before: pd.DataFrame,
    after: pd.DataFrame,
    explained: pd.Series,
    *,
    drift: float,
    n_compared: int,
) -> pd.DataFrame:
    """Return the change of each quantity from one set of runs to another.

    Args:
        before, after: levels, one row per quantity and one column per run; NaN if a run lacks it.
        explained: variance of a level that its sessions or repeats explain, by quantity.
        drift: standard deviation of a level from run to run, assumed while there are few runs.
        n_compared: quantities of the whole comparison, for which the intervals hold together.

    Returns:
        `change` and `reach` of each quantity, as logarithms: the interval is change ± reach. NaN
        for a quantity that one of the sets lacks.
    """
    sets = (before, after)
    counts = [levels.count(axis="columns") for levels in sets]
    freedom = (counts[0] + counts[1] - 2).clip(lower=0)
    squares = [
        levels.sub(levels.mean(axis="columns"), axis="index").pow(2).sum(axis="columns")
        for levels in sets
    ]
    between = (squares[0] + squares[1]) / freedom.where(freedom > 0)
    # A variance's expectation is larger than its median, and the drift is a median over quantities.
    typical = freedom / chdtri(freedom, 0.5)
    excess = (between * typical - explained)[freedom >= MIN_FREEDOM].median()
    prior = drift**2 if math.isnan(excess) else max(excess, MIN_DRIFT**2)
    # Counts have neither noise nor drift: any difference between two of them is one.
    is_exact = (explained == 0) & ~(between > 0)
    variance, total = moderate_variance(
        between.fillna(0.0), freedom, explained + prior, PRIOR_FREEDOM
    )
    error = np.sqrt(variance.mask(is_exact, 0.0) * (1 / counts[0] + 1 / counts[1]))
    change = after.mean(axis="columns") - before.mean(axis="columns")
    reach = stdtrit(total, 1 - FALSE_ALARMS / n_compared / 2) * error
    return pd.DataFrame({"change": change, "reach": reach})
