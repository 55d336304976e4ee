"""One ratio from several turns: the same comparison measured by other processes, at another time.

A process, or a group of ranks, has a luck that its rounds do not show: where its memory lies, which cores it got.
Two all-reduces of 64 KB were seen to differ by 14 % one way in one group of ranks and by 16 % the other way in the
next, each known to 8 % by its rounds. So what turns differ by is measured, not assumed, and a ratio is known no better
than that (random effects of groups, as in DerSimonian & Laird 1986, "Meta-analysis in clinical trials").
"""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy.special import ndtri, stdtr, stdtrit

from labkit.bench.intervals import CONFIDENCE, TAIL

Z = float(ndtri((1 + CONFIDENCE) / 2))


def combine_sessions(ratios: pd.DataFrame, setting: Sequence[str], alternative: str) -> pd.DataFrame:
    """One row per (setting, alternative) with `ratio`, `low`, `high`, `p`, `rounds`, from one per turn with the same.

    The ratio is the geometric mean of the turns'. The variance of one turn's logarithm is the largest of three: what
    its own rounds say; what turns of this setting differ by, mean over its alternatives, which share a baseline; and
    the mean over all settings. As many settings as there are tell the last, of which Student's t takes account.
    That holds for what has one turn, too, in a setting where others have several; elsewhere it keeps its interval.
    """
    keys = [*setting, alternative]
    if not ratios.duplicated(keys).any():
        return ratios[[*keys, "ratio", "low", "high", "p", "rounds"]]
    within = (np.log(ratios["high"]) - np.log(ratios["low"])) / (2 * Z)
    logs = ratios.assign(log=np.log(ratios["ratio"]), within=(within**2).fillna(np.inf))
    found = (
        logs.groupby(keys, dropna=False, sort=False)
        .agg(
            turns=("log", "size"),
            log=("log", "mean"),
            between=("log", "var"),
            within=("within", "mean"),
            rounds=("rounds", "sum"),
            low=("low", "first"),
            high=("high", "first"),
            p=("p", "first"),
        )
        .reset_index()
    )
    here = found.groupby(list(setting), dropna=False)["between"].transform("mean")
    known = found["within"] < np.inf
    variance = np.fmax(np.fmax(here, found["between"].mean()), found["within"]).where(known)
    error = np.sqrt(variance / found["turns"])
    several = found.groupby(list(setting), dropna=False)["turns"].transform("max") > 1
    freedom = max(1, len(found[several].drop_duplicates(list(setting))))
    reach = float(stdtrit(freedom, 1 - TAIL)) * error
    return found[keys].assign(
        ratio=np.exp(found["log"]),
        low=np.exp(found["log"] - reach).where(several, found["low"]),
        high=np.exp(found["log"] + reach).where(several, found["high"]),
        p=pd.Series(2 * stdtr(freedom, (-np.abs(found["log"]) / error).astype(float))).where(several, found["p"]),
        rounds=found["rounds"],
    )
