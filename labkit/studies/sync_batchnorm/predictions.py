"""What a layer should cost by what it does: operators, bytes moved, bytes sent; and what it costs.

Copies of a few sizes, timed first, give the cost of an operator and of a byte it moves; the layer's collectives, at a
few sizes, what each costs at once and a byte (alpha and beta, fitted to relative errors).
"""

from dataclasses import dataclass
from typing import Any

import pandas as pd

from labkit.bench.statistics import slowest_rank, summarize_groups
from labkit.costs.communication import AlphaBeta, MessageCost, fit_alpha_beta
from labkit.studies.sync_batchnorm import analysis
from labkit.studies.sync_batchnorm.alternatives import ALONE, COLLECTIVES, LOCAL, OWN
from labkit.studies.sync_batchnorm.analysis import KEYS, MACHINE
from labkit.studies.sync_batchnorm.worker import COPY, LAYER, PHASES, PROBE

PREDICTED = (LOCAL, ALONE, COLLECTIVES, OWN)
ONE_WAY = PHASES[:2]


@dataclass(frozen=True)
class Costs:
    """Of one world size: an operator and a byte it moves; the collective forward and the one backward."""

    operators: AlphaBeta
    collectives: dict[str, AlphaBeta]

    def arithmetic_s(self, operators: float, moved_bytes: float) -> float:
        return self.operators.predict_s(MessageCost(operators, moved_bytes))

    def collectives_s(self, sent_bytes: dict[str, float]) -> float:
        return sum(self.collectives[phase].predict_s(MessageCost(1, n)) for phase, n in sent_bytes.items())


def costs(frame: pd.DataFrame) -> dict[tuple[int, str, str], Costs]:
    """By (world size, backend, device), from what was timed before any layer."""
    found = {}
    if frame.empty or not {"sweep", "sent_bytes", "moved_bytes", "seconds"} <= set(frame.columns):
        return {}
    rows = frame[frame["sweep"] == PROBE].dropna(subset="seconds")
    size = rows["sent_bytes"].fillna(rows["moved_bytes"])
    by = [*MACHINE, "alternative", "phase", "n_bytes"]
    rows = rows.assign(n_bytes=size, phase=rows["phase"].fillna(""))
    medians = summarize_groups(slowest_rank(rows, "seconds", by), "seconds", by)
    for key, group in medians.groupby(MACHINE):
        fits = {}
        for names, series in group.groupby(["alternative", "phase"]):
            if len(series) >= 2:
                sizes = [MessageCost(1, n) for n in series["n_bytes"]]
                fits[names] = fit_alpha_beta(sizes, series["median"].tolist())
        collectives = {phase: fits[COLLECTIVES, phase] for phase in ONE_WAY if (COLLECTIVES, phase) in fits}
        if (COPY, "") in fits and len(collectives) == len(ONE_WAY):
            found[int(key[0]), str(key[1]), str(key[2])] = Costs(fits[COPY, ""], collectives)
    return found


def cost_table(frame: pd.DataFrame) -> pd.DataFrame:
    """What `costs` found: an operator, each collective, and what their bytes add."""
    rows = []
    for (world_size, _, _), found in costs(frame).items():
        fits = {"operator": found.operators}
        fits |= {f"collective {phase}": fit for phase, fit in found.collectives.items()}
        for name, fit in fits.items():
            beta = {"beta_ns_per_byte": fit.beta_s_per_byte * 1e9, "median_error_percent": 100 * fit.median_error}
            rows.append({"world_size": world_size, "of": name, "alpha_s": fit.alpha_s} | beta)
    return pd.DataFrame(rows, columns=["world_size", "of", "alpha_s", "beta_ns_per_byte", "median_error_percent"])


def predictions(frame: pd.DataFrame, phase: str = analysis.BOTH) -> pd.DataFrame:
    """Setting, phase, alternative, `operators`, `moved_bytes`, `seconds`, `predicted_s`, `measured_over_predicted`."""
    columns = [*KEYS, "panel", "alternative", "operators", "moved_bytes", "seconds", "predicted_s"]
    known, counted = costs(frame), _counts(frame)
    if not known or counted.empty:
        return pd.DataFrame(columns=[*columns, "measured_over_predicted"])
    rows = []
    for row in (
        analysis.times(frame, *PREDICTED, phase=phase)
        .merge(counted, on=[*KEYS, "alternative"], how="left")
        .to_dict("records")
    ):
        machine = (row["world_size"], row["backend"], row["device"])
        if machine in known:
            rows.append({name: row[name] for name in columns[:-1]} | {"predicted_s": _predict(row, known[machine])})
    table = pd.DataFrame(rows, columns=columns).dropna(subset="predicted_s")
    return table.assign(measured_over_predicted=table["seconds"] / table["predicted_s"])


def _predict(row: dict[str, Any], known: Costs) -> float:
    seconds = 0.0
    if row["alternative"] != COLLECTIVES:
        seconds += known.arithmetic_s(row["operators"], row["moved_bytes"])
    if row["alternative"] in (COLLECTIVES, OWN):
        phases = ONE_WAY if row["phase"] == analysis.BOTH else (str(row["phase"]),)
        seconds += known.collectives_s({phase: row[f"sent_{phase}"] for phase in phases})
    return seconds


def _counts(frame: pd.DataFrame) -> pd.DataFrame:
    """What each alternative does, by phase: operators, bytes moved, and bytes sent forward and backward."""
    rows = frame[(frame["sweep"] == LAYER)].dropna(subset="phase") if "operators" in frame else frame.iloc[:0]
    if rows.empty:
        return rows
    most = rows.groupby([*KEYS, "alternative"], as_index=False)[["operators", "moved_bytes", "sent_bytes"]].max()
    sent = most[most["alternative"] == COLLECTIVES].pivot_table(
        index=analysis.SETTING, columns="phase", values="sent_bytes"
    )
    sent = sent.reindex(columns=list(ONE_WAY)).add_prefix("sent_").reset_index()
    return most.drop(columns="sent_bytes").merge(sent, on=analysis.SETTING, how="left")
