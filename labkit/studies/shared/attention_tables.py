"""Tables of runs that `labkit.studies.shared.attention_passes` measured: times, memory, and what did not run."""

from dataclasses import replace

import pandas as pd

from labkit.lab.findings import Finding, troubles
from labkit.lab.rows import Measured, select, summed
from labkit.nn.attention_implementations import IMPLEMENTATIONS
from labkit.studies.shared.attention_passes import COMPILED, EXPLICIT, FLASH, PHASES, TILED

BOTH = "forward and backward"
"""The phase of both passes of one round together."""
ORDER = tuple(IMPLEMENTATIONS)
PROBLEM = ("device", "dtype", "mask", "batch", "head_dim", "sequence")
PASSES = Measured((*PROBLEM, "phase"), "implementation")
PEAKS = Measured(PROBLEM, "implementation", value="peak_bytes", exact=True)
# Of explicit attention: resident sets count whole pages and what libraries keep, which smaller peaks drown in.
LEAST_BYTES = 64 * 2**20
NAMES = {EXPLICIT: "explicit attention", COMPILED: "compiled attention", TILED: "tiled attention"}
NAMES |= {FLASH: "the Triton kernel", "sdpa": "SDPA"}


def name_of(implementation: str) -> str:
    """What a sentence calls it: "sdpa_flash" -> "SDPA's flash backend"."""
    if (backend := implementation.removeprefix("sdpa_")) != implementation:
        return f"SDPA's {backend} backend"
    return NAMES.get(implementation, implementation.replace("_", " "))


def with_mask(frame: pd.DataFrame) -> pd.DataFrame:
    """Add `mask`, whether the problem is causal, in words; not to a frame that does not know."""
    if "causal" not in frame:
        return frame
    return frame.assign(mask=frame["causal"].map({True: "causal", False: "no mask"}))


def passes(frame: pd.DataFrame, sweep: str) -> pd.DataFrame:
    """Seconds of each pass of a sweep, and of both passes of each round together as one more phase."""
    timed = select(with_mask(frame), [*PASSES.columns, "rank", "repeat", "seconds"], sweep=sweep, phase=PHASES)
    timed = timed.dropna(subset="seconds")
    both = summed(timed, "phase", PHASES, BOTH, PASSES.columns)
    return pd.concat([timed, both], ignore_index=True) if len(timed) else timed


def times(frame: pd.DataFrame, sweep: str) -> pd.DataFrame:
    """Median seconds with interval, one row per (problem, phase, implementation)."""
    return PASSES.medians(passes(frame, sweep))


def against(frame: pd.DataFrame, sweep: str, baseline: str = EXPLICIT) -> pd.DataFrame:
    """Time of each implementation over that of `baseline` in the same rounds, with interval and verdict."""
    return PASSES.over(passes(frame, sweep), baseline)


def peaks(frame: pd.DataFrame, sweep: str) -> pd.DataFrame:
    """Peak memory of a forward and backward pass above the inputs, and the error, by problem and implementation."""
    columns = [*PROBLEM, "implementation", "peak_bytes", "error"]
    rows = select(with_mask(frame), columns, sweep=sweep, phase="both").dropna(subset="peak_bytes")
    return rows[columns].reset_index(drop=True)


def memory_against_explicit(frame: pd.DataFrame, sweep: str) -> pd.DataFrame:
    """Peak of each implementation over that of the explicit one, and both; where that is `LEAST_BYTES` or more."""
    table = peaks(frame, sweep)
    table = table[table["peak_bytes"] > 0]
    explicit = table[table["implementation"] == EXPLICIT].rename(columns={"peak_bytes": "explicit_bytes"})
    ratios = PEAKS.over(table, EXPLICIT).merge(table.drop(columns="error"))
    ratios = ratios.merge(explicit[[*PROBLEM, "explicit_bytes"]])
    return ratios[ratios["explicit_bytes"] >= LEAST_BYTES].reset_index(drop=True)


def refused(frame: pd.DataFrame) -> pd.DataFrame:
    """Implementations without times at a problem, one row each, with the first reason in `gate`; wrong ones too."""
    columns = ["dtype", "head_dim", "sequence", "implementation", "check"]
    rows = select(frame, columns, phase="both")
    rows = rows[rows["check"].fillna("ok") != "ok"]
    of_problem = [name for name in ("sweep", "batch", *columns[:-1]) if name in rows]
    return rows.drop_duplicates(of_problem)[columns].reset_index(drop=True)


def caveat(frame: pd.DataFrame, *asked: str) -> str | None:
    """Wrong results of any implementation, and why those that were `asked` for have no times anywhere."""
    rows = refused(frame)
    ran = set(select(frame, ["implementation"], phase=PHASES)["implementation"])
    missing = rows["implementation"].isin(set(asked) - ran)
    rows = rows[rows["check"].str.startswith("wrong") | missing].drop_duplicates("implementation")
    return troubles(rows.assign(implementation=[name_of(name) for name in rows["implementation"]]), "implementation")


def from_shortest(found: Finding | None) -> Finding | None:
    """A finding whose advice holds at every length that was measured says from which one on."""
    if found is None or found.table is None or found.advice is None or found.lead is None:
        return found
    if any(effect.verdict != "faster" for effect in found.effects if effect.subject == found.lead.subject):
        return found
    return replace(found, advice=f"{found.advice.rstrip('.')} from {found.table['sequence'].min()} tokens on.")
