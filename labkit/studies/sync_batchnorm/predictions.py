"""What a layer should cost by what it does, from the machine's calibration: operators, bytes moved, messages."""

import pandas as pd

from labkit.costs.calibration import Calibration
from labkit.lab.predictions import Row
from labkit.lab.rows import select
from labkit.studies.shared.norm_collectives import collectives_s
from labkit.studies.sync_batchnorm import tables
from labkit.studies.sync_batchnorm.alternatives import ALONE, LOCAL, OWN
from labkit.studies.sync_batchnorm.tables import BOTH, LAYERS, SETTING
from labkit.studies.sync_batchnorm.worker import LAYER

PREDICTED = (LOCAL, ALONE, OWN)
COUNTS = ["operators", "moved_bytes"]


def predictions(frame: pd.DataFrame, calibration: Calibration | None) -> pd.DataFrame:
    """Forward and backward: setting, alternative, `seconds`, `predicted_s`, their ratio, and what was counted."""
    rows = select(frame, [*LAYERS.columns, *COUNTS], sweep=LAYER, alternative=list(PREDICTED), phase=BOTH)
    counts = rows.groupby(LAYERS.columns, as_index=False)[COUNTS].max()
    table = tables.times(frame, alternative=list(PREDICTED), phase=BOTH).merge(counts, on=LAYERS.columns, how="left")
    predicted = [_expected_s(row, calibration) if calibration else None for row in table.to_dict("records")]
    table = table.assign(predicted_s=pd.Series(predicted, dtype=float)).dropna(subset="predicted_s")
    table = table.assign(measured_over_predicted=table["seconds"] / table["predicted_s"])
    return table[[*SETTING, "alternative", "seconds", "predicted_s", "measured_over_predicted", *COUNTS, "panel"]]


def _expected_s(row: Row, calibration: Calibration) -> float | None:
    """Its operators, all of their mean size, under autograd, and its two collectives; None if not calibrated."""
    if not calibration.knows(row["device"]) or not row["operators"] > 0:
        return None
    rates = calibration.of_ranks(int(row["world_size"]), row["device"])
    operators = float(row["operators"])
    seconds = operators * rates.operator_s(0, row["moved_bytes"] / operators) + rates.under_autograd_s(operators)
    if row["alternative"] != OWN:
        return seconds
    sending = collectives_s(int(row["features"]), int(row["world_size"]), row["backend"], calibration)
    return None if sending is None else seconds + sending
