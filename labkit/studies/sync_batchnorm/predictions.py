"""What a layer should cost by what it does, from the machine's calibration: operators, bytes moved, messages."""

import pandas as pd

from labkit.costs.calibration import Calibration
from labkit.costs.communication import ALL_GATHER_COSTS
from labkit.lab.predictions import Row
from labkit.lab.rows import select
from labkit.parallel.chooser import choose_algorithm, choose_phase_algorithm
from labkit.parallel.collectives import ALGORITHMS
from labkit.parallel.transport.contract import SHARED
from labkit.studies.sync_batchnorm import tables
from labkit.studies.sync_batchnorm.alternatives import ALONE, LOCAL, OWN, sent_bytes
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
    """Its operators, all of their mean size, and its two collectives; None for what was not calibrated."""
    if not calibration.knows(row["device"]) or not row["operators"] > 0:
        return None
    rates = calibration.of_ranks(int(row["world_size"]), row["device"])
    seconds = float(row["operators"]) * rates.operator_s(0, row["moved_bytes"] / row["operators"])
    if row["alternative"] != OWN:
        return seconds
    collectives = _collectives_s(int(row["world_size"]), int(row["features"]), calibration)
    return seconds + collectives if collectives and row["backend"] == "gloo" else None


def _collectives_s(ranks: int, features: int, calibration: Calibration) -> float | None:
    """An all-gather forward and an all-reduce backward, over shared memory."""
    statistics, sums = sent_bytes(features)
    gather = choose_phase_algorithm(ranks * statistics, ranks, SHARED)
    add = choose_algorithm(sums, ranks, SHARED)
    each = (
        calibration.algorithm_s("shared memory", gather, ALL_GATHER_COSTS[gather](ranks, ranks * statistics), ranks),
        calibration.algorithm_s("shared memory", add, ALGORITHMS[add].cost(ranks, sums), ranks),
    )
    return sum(each) if None not in each else None
