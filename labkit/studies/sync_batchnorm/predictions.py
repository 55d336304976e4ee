"""What a layer should cost by what it does: operators, bytes moved, bytes sent; and what it costs.

Copies of a few sizes, timed first, give the cost of an operator and of a byte it moves; the layer's collectives, at a
few sizes, what each costs at once and a byte (alpha and beta, fitted to relative errors).
"""

from dataclasses import dataclass
from typing import Any

import pandas as pd

from labkit.costs.communication import AlphaBeta, MessageCost, fit_alpha_beta
from labkit.lab.rows import Measured, select
from labkit.studies.sync_batchnorm import tables
from labkit.studies.sync_batchnorm.alternatives import ALONE, COLLECTIVES, LOCAL, OWN
from labkit.studies.sync_batchnorm.tables import LAYERS, MACHINE, SETTING
from labkit.studies.sync_batchnorm.worker import COPY, LAYER, PHASES, PROBE

PREDICTED = (LOCAL, ALONE, COLLECTIVES, OWN)
ONE_WAY = PHASES[:2]
PROBES = Measured((*MACHINE, "alternative", "phase"), "n_bytes")


@dataclass(frozen=True)
class Costs:
    """Of one world size: an operator and a byte it moves; the collective forward and the one backward."""

    operators: AlphaBeta
    collectives: dict[str, AlphaBeta]

    def predict_s(self, row: dict[str, Any]) -> float:
        """Of a row with the counts of an alternative and phase."""
        seconds = 0.0
        if row["alternative"] != COLLECTIVES:
            seconds += self.operators.predict_s(MessageCost(row["operators"], row["moved_bytes"]))
        if row["alternative"] in (COLLECTIVES, OWN):
            sent = [(phase, row[f"sent_{phase}"]) for phase in ONE_WAY if row["phase"] in (tables.BOTH, phase)]
            seconds += sum(self.collectives[phase].predict_s(MessageCost(1, n_bytes)) for phase, n_bytes in sent)
        return seconds


def costs(frame: pd.DataFrame) -> dict[tuple[int, str, str], Costs]:
    """By (world size, backend, device), from what was timed before any layer."""
    rows = select(frame, ["phase", "sent_bytes", "moved_bytes"], sweep=PROBE)
    size = rows["sent_bytes"].fillna(rows["moved_bytes"])
    medians, found = PROBES.medians(rows.assign(n_bytes=size, phase=rows["phase"].fillna(""))), {}
    for key, group in medians.groupby(list(MACHINE)):
        fits = {}
        for names, series in group.groupby(["alternative", "phase"]):
            if len(series) >= 2:
                sizes = [MessageCost(1, n) for n in series["n_bytes"]]
                fits[names] = fit_alpha_beta(sizes, series["seconds"].tolist())
        collectives = {phase: fits[COLLECTIVES, phase] for phase in ONE_WAY if (COLLECTIVES, phase) in fits}
        if (COPY, "") in fits and len(collectives) == len(ONE_WAY):
            found[int(key[0]), str(key[1]), str(key[2])] = Costs(fits[COPY, ""], collectives)
    return found


def cost_table(frame: pd.DataFrame) -> pd.DataFrame:
    """What `costs` found: an operator, each collective, and what their bytes add."""
    rows = [
        [world_size, name, fit.alpha_s, fit.beta_s_per_byte * 1e9, 100 * fit.median_error]
        for (world_size, _, _), found in costs(frame).items()
        for name, fit in [("operator", found.operators)]
        + [(f"collective {phase}", fit) for phase, fit in found.collectives.items()]
    ]
    return pd.DataFrame(rows, columns=["world_size", "of", "alpha_s", "beta_ns_per_byte", "median_error_percent"])


def predictions(frame: pd.DataFrame) -> pd.DataFrame:
    """Forward and backward: setting, alternative, `seconds`, `predicted_s`, their ratio, and what was counted."""
    known = costs(frame)
    table = tables.times(frame, alternative=list(PREDICTED), phase=tables.BOTH)
    table = table.merge(_counts(frame), on=LAYERS.columns, how="left")
    predicted = [
        known[key].predict_s(row) if (key := tuple(row[name] for name in MACHINE)) in known else float("nan")
        for row in table.to_dict("records")
    ]
    table = table.assign(predicted_s=pd.Series(predicted, dtype=float)).dropna(subset="predicted_s")
    table = table.assign(measured_over_predicted=table["seconds"] / table["predicted_s"])
    columns = ["alternative", "seconds", "predicted_s", "measured_over_predicted", "operators", "moved_bytes", "panel"]
    return table[[*SETTING, *columns]]


def _counts(frame: pd.DataFrame) -> pd.DataFrame:
    """What each alternative does, by phase: operators, bytes moved, and bytes sent forward and backward."""
    values = ["operators", "moved_bytes", "sent_bytes"]
    rows = select(frame, [*LAYERS.columns, *values], sweep=LAYER).dropna(subset="phase")
    most = rows.groupby(LAYERS.columns, as_index=False)[values].max()
    bare = most[most["alternative"] == COLLECTIVES]
    sent = bare.pivot_table(index=list(SETTING), columns="phase", values="sent_bytes")
    sent = sent.reindex(columns=list(ONE_WAY)).add_prefix("sent_").reset_index()
    return most.drop(columns="sent_bytes").merge(sent, on=list(SETTING), how="left")
