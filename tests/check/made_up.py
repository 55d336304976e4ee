"""Runs of the fixed set made up from numbers: sessions of known speed and noise."""

from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from labkit.check.declaration import CHECK
from labkit.lab.runs.store import Run, RunHeader
from labkit.machine import describe_machine

QUANTITIES = ("matmul float32", "matmul bfloat16", "copy", "call", "attention", "training step")


def made_run(
    seed, *, slower=None, between=0.015, within=0.03, sessions=6, machine=None, load=None, status="ok", threads=2
):
    """A run of one CPU rank; `slower` are factors by quantity, `between` and `within` the noise."""
    generator = np.random.default_rng(seed)
    machine = machine or describe_machine().model_copy(update={"gpus": [], "cores": 2, "cpu_quota": None})
    points = [
        point
        for point in CHECK.points(CHECK.configure("quick", {"sessions": sessions}), machine)
        if point.world_size == 1 and point.device == "cpu"
    ]
    header = RunHeader(
        lab="check",
        profile="quick",
        config={},
        machine=machine,
        command="labkit check",
        started=datetime(2026, 1, 1, tzinfo=UTC),
        planned={point.id: point.describe() for point in points},
    )
    rows, ends = [], {}
    for point in points:
        for quantity in QUANTITIES:
            base = 0.01 * (slower or {}).get(quantity, 1.0) * np.exp(generator.normal(0, between))
            for turn in ("first", "again"):
                seconds = base * np.exp(np.abs(generator.normal(0, within, size=16)))
                values = {"quantity": quantity, "turn": turn, "unit": "s", "work": 0.0, "threads": threads}
                rows.append({"point": point.id, "rank": 0, "values": values | {"seconds": seconds.tolist()}})
        ends[point.id] = {"status": status, "reason": None if status == "ok" else "rank 0 died", "load": load}
    return Run(Path("made-up.jsonl"), header, rows if status == "ok" else [], ends)
