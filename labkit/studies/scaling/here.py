"""This machine's own ranks: the steps of its newest data-parallel run, predicted from its calibration alone."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from labkit.costs.calibration import ALL_REDUCE, Calibration
from labkit.costs.communication import MessageCost
from labkit.costs.transformer import SIZES, n_parameters
from labkit.lab.advise.machine import WHOLE_STEP, newest_runs
from labkit.lab.calibration import newest_calibration
from labkit.lab.rows import select
from labkit.machine import Machine
from labkit.scaling.constants import Profile, load_constants
from labkit.scaling.layout import Layout
from labkit.scaling.named_models import find_model
from labkit.scaling.prediction import predict
from labkit.scaling.this_machine import hardware_of

MIB = 2**20
TENSORS_PER_LAYER, TENSORS_AROUND = 9, 3
CALLS_PER_LAYER = 75  # forward and backward, as in the lab `limits`
BYTES_OF_SGD = 12.0  # per parameter: gradient and weight read, weight written
LOCAL = "local"
NOTHING = "no complete limits and data_parallel runs of this machine: measure them first"


def own_ranks(machine: Machine) -> Iterator[dict[str, Any]]:
    """By implementation: the median step that was measured here, and the predicted one; or why there is neither."""
    calibration, run = newest_calibration(machine), newest_runs(machine).get("data_parallel")
    if calibration is None or run is None:
        yield {"not_measured": NOTHING}
        return
    for step in _steps(run.frame()).to_dict("records"):
        seconds = _predicted_s(calibration, machine, step)
        if seconds is not None:
            yield {name: step[name] for name in ("workload", "ranks", "implementation", "measured_s")} | {
                "predicted_s": seconds
            }


def _steps(frame: pd.DataFrame) -> pd.DataFrame:
    """Median seconds of a step, of the slowest rank of each repeat, by workload, ranks and implementation."""
    by = ["workload", "world_size", "implementation", "batch", "context_length"]
    rows = select(
        frame, [*by, "rank", "repeat", "seconds"], sweep="implementations", device="cpu", workload=list(SIZES)
    )
    rows = rows[rows["phase"].isin(WHOLE_STEP)] if len(rows) else rows
    of_rank = rows.groupby([*by, "repeat", "rank"])["seconds"].sum()
    steps = of_rank.groupby([*by, "repeat"]).max().groupby(by).median().reset_index(name="measured_s")
    return steps.rename(columns={"world_size": "ranks"})


def _predicted_s(calibration: Calibration, machine: Machine, step: dict[str, Any]) -> float | None:
    """Compute of one rank beside the others, and its all-reduces; nothing hides, for the cores do both."""
    ranks, name = int(step["ranks"]), step["implementation"]
    computing = _compute_s(
        calibration, machine, step["workload"], int(step["batch"]), int(step["context_length"]), ranks
    )
    calls = _calls(step["workload"], name)
    if name == LOCAL:
        return computing
    way = calibration.transport("shared memory" if name.endswith("_shared") else "gloo", ALL_REDUCE, ranks)
    if calls is None or way is None:
        return None
    return computing + way.predict_s(MessageCost(calls, 4.0 * n_parameters(SIZES[step["workload"]])))


def _compute_s(calibration: Calibration, machine: Machine, workload: str, batch: int, tokens: int, ranks: int) -> float:
    """A step without communication. In float32: elements are twice as long as the formulas have them."""
    rates, known = calibration.of_ranks(ranks), load_constants()
    hardware = hardware_of(calibration, machine.memory_bytes, ranks=ranks)
    values = {
        "launch_s": CALLS_PER_LAYER * rates.call_s,
        "optimizer_traffic": BYTES_OF_SGD / 2,
        "loss_traffic": known.table["loss_traffic"]["default"] / 2,
        "unfused_attention": 1.0,
    }
    found = predict(
        find_model(workload),
        replace(hardware, memory_gb_s=hardware.memory_gb_s / 2),
        Layout(micro_batch=batch, global_batch=batch),
        seq_len=tokens,
        framework="here",
        constants=known.with_profile(Profile("here", "generic", values)),
    )
    return found.step_s


def _calls(workload: str, implementation: str) -> float | None:
    """All-reduces of a step; None for an implementation that this lab knows nothing of."""
    tensors = TENSORS_PER_LAYER * SIZES[workload].n_layers + TENSORS_AROUND
    mib = 4 * n_parameters(SIZES[workload]) / MIB
    buckets = min(1 + np.ceil(max(mib - 1, 0) / 25), tensors)
    known = {"flat": 1, "naive": tensors, "overlapped": tensors, "naive_shared": tensors}
    known |= dict.fromkeys(("torch", "bucketed", "bucketed_sync", "bucketed_shared"), buckets) | {LOCAL: 0}
    return known.get(implementation)
