"""This machine's own ranks: steps of its newest data-parallel and sharding runs, predicted from its calibration."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd

from labkit.costs.calibration import ALL_REDUCE, CPU, Calibration
from labkit.costs.communication import MessageCost
from labkit.costs.sharding import STAGES, sent_bytes
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
BYTES_OF_ADAMW = 84.0  # a CPU's, operator by operator: what `shared.step_operators` counts of it
LOCAL, SHARED, GLOO = "local", "shared memory", "gloo"
NOTHING = "this machine has no complete run of limits, or none of data_parallel or sharding: measure them first"


def own_ranks(machine: Machine) -> Iterator[dict[str, Any]]:
    """By lab and implementation: the median step that was measured here and the predicted one, or why there is none."""
    calibration, runs = newest_calibration(machine), newest_runs(machine, LABS)
    steps = [step | {"lab": lab} for lab, read in LABS.items() if lab in runs for step in read(runs[lab].frame())]
    if calibration is None or not calibration.transports or not steps:
        yield {"not_measured": NOTHING}
        return
    for step in steps:
        seconds = _predicted_s(calibration, machine, step)
        if seconds is not None:
            yield {
                "lab": step["lab"],
                "workload": f"{step['workload']}, batch {step['batch']:.0f}, {step['world_size']:.0f} ranks",
                "world_size": int(step["world_size"]),
                "implementation": step["implementation"],
                "measured_s": step["measured_s"],
                "predicted_s": float(seconds),
            }


def _data_parallel(frame: pd.DataFrame) -> Iterator[dict[str, Any]]:
    rows = select(frame, ["workload", "phase"], sweep="implementations", device="cpu", workload=list(SIZES))
    for step in _medians(rows, "phase", "implementation"):
        name = step["implementation"]
        calls = _calls(step["workload"], name)
        if calls is not None:
            stage = None if name == LOCAL else "ddp"
            yield step | {"stage": stage, "calls": calls, "way": SHARED if name.endswith("_shared") else GLOO}


def _sharding(frame: pd.DataFrame) -> Iterator[dict[str, Any]]:
    """Steps of AdamW. Ways are called after the stage of ZeRO; those of torch send by gloo, whatever the transport."""
    if "optimizer" in frame:  # older runs have AdamW only
        frame = frame[frame["optimizer"].isin(["AdamW"])]
    rows = select(frame, ["size", "part", "transport"], kind="time", device="cpu", size=list(SIZES))
    told = set()
    for transport, some in rows.rename(columns={"size": "workload"}).groupby("transport"):
        for step in _medians(some, "part", "way"):
            stage = step["way"].removeprefix("torch_")
            if stage not in STAGES:  # a reader's own
                continue
            is_torch = stage != step["way"]
            is_shared = transport == "shared" and not is_torch
            setting = (step["way"], step["workload"], step["batch"], step["world_size"])
            if is_torch and setting in told:  # it took turns in both transports, and sent by gloo in both
                continue
            told.add(setting)
            yield step | {
                "implementation": f"{step['way']}, {SHARED if is_shared else 'messages'}",
                "stage": stage,
                "calls": _sharding_calls(step["workload"], stage, is_torch),
                "way": SHARED if is_shared else GLOO,
                "adamw": True,
                "scatters_by_all_reduce": is_torch and stage == "zero3",
            }


def _sharding_calls(workload: str, stage: str, is_torch: bool) -> float:
    """Collectives of a step. torch's ZeRO-1 broadcasts tensor by tensor."""
    buckets, layers = _calls(workload, "bucketed") or 1, SIZES[workload].n_layers + 1
    after = (_calls(workload, "naive") or 1) if is_torch else buckets
    return {"ddp": buckets, "zero1": buckets + after, "zero2": 2 * buckets}.get(stage, 3 * layers)


def _medians(rows: pd.DataFrame, part: str, name: str) -> list[dict[str, Any]]:
    """Median seconds of a step, of the slowest rank of each repeat, by setting and `name`."""
    by = ["workload", "world_size", name, "batch", "context_length"]
    rows = rows[rows[part].isin(WHOLE_STEP)].dropna(subset="seconds") if len(rows) else rows.reindex(columns=by)
    if rows.empty:
        return []
    of_rank = rows.groupby([*by, "point", "repeat", "rank"])["seconds"].sum()
    table = of_rank.groupby([*by, "point", "repeat"]).max().groupby(by).median().reset_index(name="measured_s")
    return [{str(key): value for key, value in row.items()} for row in table.to_dict("records")]


LABS = {"data_parallel": _data_parallel, "sharding": _sharding}


def _predicted_s(calibration: Calibration, machine: Machine, step: dict[str, Any]) -> float | None:
    """Compute of one rank beside the others, and its collectives; nothing hides, for the cores do both.

    An all-reduce of n bytes sends 2 n (p-1)/p of them, so that whatever is sent is told in all-reduced bytes.
    """
    ranks = int(step["world_size"])
    computing = _compute_s(calibration, machine, step, ranks)
    if step["stage"] is None:
        return computing
    way = calibration.transport(step["way"], ALL_REDUCE, ranks)
    if way is None or ranks == 1:
        return None
    n_bytes = 4 * n_parameters(SIZES[step["workload"]])
    reduced = sent_bytes(n_bytes, step["stage"], ranks) / (2 * (ranks - 1) / ranks)
    if step.get("scatters_by_all_reduce"):  # gloo has no reduce-scatter: a whole all-reduce instead of half of one
        reduced += 0.5 * n_bytes
    return computing + way.predict_s(MessageCost(step["calls"], reduced))


def _compute_s(calibration: Calibration, machine: Machine, step: dict[str, Any], ranks: int) -> float:
    """A step without communication. In float32: elements are twice as long as the formulas have them."""
    batch, shards = int(step["batch"]), ranks if step["stage"] in ("zero1", "zero2", "zero3") else 1
    rates, known = calibration.of_ranks(ranks), load_constants()
    hardware = hardware_of(calibration, machine.memory_bytes, ranks=ranks, device=CPU)
    values = {
        "launch_s": CALLS_PER_LAYER * rates.call_s,
        "optimizer_traffic": (BYTES_OF_ADAMW / shards if "adamw" in step else BYTES_OF_SGD) / 2,
        "loss_traffic": known.table["loss_traffic"]["default"] / 2,
        "unfused_attention": 1.0,
    }
    found = predict(
        find_model(step["workload"]),
        replace(hardware, memory_gb_s=hardware.memory_gb_s / 2),
        Layout(micro_batch=batch, global_batch=batch),
        seq_len=int(step["context_length"]),
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
