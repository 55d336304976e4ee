"""When a sharded optimizer should save time, by the machine's calibration; and when it does.

A step of ZeRO-1 saves (p-1)/p of the optimizer's time, and pays an all-gather of the updated parameters, half of an
all-reduce, with copies into and out of its buckets. Nothing hides: the cores that compute also send.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pandas as pd

from labkit.costs.calibration import ALL_REDUCE, CPU, Calibration
from labkit.costs.communication import MessageCost
from labkit.costs.transformer import n_parameters
from labkit.lab.own_models import models_in, shape_of
from labkit.lab.predictions import Predicted, Row
from labkit.lab.rows import select
from labkit.parallel.transport import POINT_TO_POINT, SHARED
from labkit.studies.sharding.tables import DDP, NAMES, SETTING, STEP, STEPS, ZERO1, named, steps_over, timed
from labkit.studies.sharding.training import ShardingPoint
from labkit.studies.shared.step_operators import BACKWARD, FORWARD, OPTIMIZER, UNCOUNTED, step_operators

MIB = 2**20
BUCKETS_MIB = {DDP: 25, ZERO1: 4}  # of gradients, of updated parameters
TRANSPORTS = {SHARED: "shared memory", POINT_TO_POINT: "gloo"}
MOVED_BY_SGD = 3  # times a parameter: it is read, and its gradient, and it is written


def _parts_s(row: Row, calibration: Calibration) -> dict[str, float] | None:
    """Seconds of what a setting's steps consist of; None where no formula or rate is known."""
    shape, ranks = shape_of(row["size"]), int(row["world_size"])
    way = calibration.transport(TRANSPORTS.get(row["transport"], ""), ALL_REDUCE, ranks)
    if shape is None or way is None or row["device"] != CPU or not calibration.knows(CPU):
        return None
    operators = step_operators(shape, int(row["batch"]), int(row["context_length"]))
    passes = [*operators[FORWARD], *operators[BACKWARD]]
    n_bytes, rates = 4 * n_parameters(shape), calibration.of_ranks(ranks)
    optimizer_s = rates.operator_s(0, MOVED_BY_SGD * n_bytes)
    if row["optimizer"] == "AdamW":
        optimizer_s = calibration.operators_s(operators[OPTIMIZER], ranks)
    calls = {name: float(np.ceil(n_bytes / MIB / mib)) for name, mib in BUCKETS_MIB.items()}
    return {
        "computing": calibration.operators_s(passes, ranks) + rates.under_autograd_s(len(passes)),
        "optimizer": optimizer_s,
        "all_reduce": way.predict_s(MessageCost(calls[DDP], n_bytes)),
        "saved": (1 - 1 / ranks) * optimizer_s,
        "paid": way.predict_s(MessageCost(calls[ZERO1] / 2, n_bytes / 2)) + rates.copy_s(2 * n_bytes),
    }


def _step_s(row: Row, calibration: Calibration) -> float | None:
    parts = _parts_s(row, calibration)
    return None if parts is None else _whole_s(parts, row["way"])


def _whole_s(parts: Mapping[str, float], way: str) -> float:
    of_ddp = parts["computing"] + parts["optimizer"] + parts["all_reduce"]
    return of_ddp if way == DDP else of_ddp - parts["saved"] + parts["paid"]


def _planned(point: ShardingPoint) -> Iterator[dict[str, Any]]:
    for way in (NAMES.get(way) for way in point.ways if point.kind == "time"):
        if way in (DDP, ZERO1):
            yield point.describe() | {"way": way}


def _steps(frame: pd.DataFrame) -> pd.DataFrame:
    return _with_context(STEPS.medians(timed(frame), part=STEP, way=[DDP, ZERO1]), frame)


def _with_context(table: pd.DataFrame, frame: pd.DataFrame) -> pd.DataFrame:
    keys = [*SETTING, "context_length"]
    return table.merge(select(named(frame), keys, kind="time")[keys].drop_duplicates(), on=list(SETTING))


PREDICTED = Predicted(
    (*SETTING, "context_length", "way"), _step_s, _planned, _steps, names=("size", "way"), leaves_out=UNCOUNTED
)
"""Steps of DDP and of ZeRO-1."""


def break_even(frame: pd.DataFrame, calibration: Calibration | None) -> pd.DataFrame:
    """ZeRO-1 over DDP by setting, and what the calibration says of it: `predicted_ratio`, and of what it is made.

    `saved_s` of the optimizer's time, `paid_s` for the gather: where more is saved than paid, a step should be faster.
    `saved_over_paid` is above 1 there. NaN without a calibration, and of models that are no Transformer.
    """
    table = _with_context(steps_over(frame, DDP, ZERO1), frame)
    with models_in(frame):
        known = [calibration and _parts_s(row, calibration) for row in table.to_dict("records")]
    found = [[_whole_s(of, ZERO1) / _whole_s(of, DDP), of["saved"], of["paid"]] if of else [np.nan] * 3 for of in known]
    added = pd.DataFrame(found, index=table.index, columns=["predicted_ratio", "saved_s", "paid_s"], dtype=float)
    table = pd.concat([table.drop(columns="context_length"), added], axis=1)
    return table.assign(saved_over_paid=table["saved_s"] / table["paid_s"])


def by_setting(frame: pd.DataFrame, calibration: Calibration | None) -> pd.DataFrame:
    """The same ratios, long: a row as measured, with its interval, and a row as predicted."""
    table = _in_words(break_even(frame, calibration))
    keys = ["model", "panel", "world_size", "kind"]
    predicted = table.assign(kind="predicted", ratio=table["predicted_ratio"], low=np.nan, high=np.nan)
    both = pd.concat([table.assign(kind="measured"), predicted.dropna(subset="ratio")], ignore_index=True)
    return both[[*keys, "ratio", "low", "high"]]


def flip(frame: pd.DataFrame, calibration: Calibration | None) -> pd.DataFrame:
    """By what is saved over what is paid, as predicted: the measured ratio, which should be below 1 from 1 on."""
    table = _in_words(break_even(frame, calibration)).dropna(subset="saved_over_paid")
    return table.rename(columns={"panel": "setting"})[["saved_over_paid", "setting", "ratio", "low", "high", "model"]]


def _in_words(table: pd.DataFrame) -> pd.DataFrame:
    models = [f"{size}, batch {batch}" for size, batch in zip(table["size"], table["batch"], strict=True)]
    panels = [f"{name}, {by}" for name, by in zip(table["optimizer"], table["transport"], strict=True)]
    return table.assign(model=models, panel=panels)
