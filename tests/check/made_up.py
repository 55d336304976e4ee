"""Runs of the fixed set made up from numbers: sessions of known speed and noise."""

from functools import cache
from pathlib import Path

import numpy as np

from labkit.check.checking import CHECK
from labkit.lab.runs.records import End, Row
from labkit.lab.runs.store import Run
from labkit.machine.description import describe_machine
from tests.lab.fake_lab import header

THIS_MACHINE = describe_machine().model_copy(update={"gpus": [], "cores": 2, "cpu_quota": None})
QUANTITIES = ("matmul float32", "matmul bfloat16", "copy", "call", "attention", "training step")


def made_run(
    seed,
    path=None,
    *,
    slower=None,
    between=0.015,
    drift=0.0,
    sessions=6,
    machine=None,
    load=None,
    exchange=(),
    status="ok",
    threads=2,
    shared=0.0,
):
    """A run of one CPU rank: time factors by quantity, noise of sessions and runs, `exchange`
    seconds by session.

    `shared`: noise that all quantities have in common, of runs and of rounds. It is written to
    `path`, if there is one.
    """
    generator = np.random.default_rng(seed)
    machine = machine or THIS_MACHINE
    points = _points(sessions)
    shift = dict(
        zip(QUANTITIES, np.exp(generator.normal(0, drift, size=len(QUANTITIES))), strict=True)
    )
    about = header(points, lab="check", profile="quick", machine=machine)
    rows = []
    ends = {}
    run_shift = generator.normal(0, shared)
    for point in points:
        common = np.exp(run_shift + generator.normal(0, shared, size=16))
        for quantity in QUANTITIES if status == "ok" else ():
            base = (
                0.01
                * (slower or {}).get(quantity, 1.0)
                * shift[quantity]
                * np.exp(generator.normal(0, between))
            )
            for turn in ("first", "again"):
                seconds = base * common * np.exp(np.abs(generator.normal(0, 0.03, size=16)))
                values = {
                    "quantity": quantity,
                    "turn": turn,
                    "unit": "s",
                    "work": 0.0,
                    "threads": threads,
                }
                values["seconds"] = seconds.tolist()
                rows.append(Row(kind="row", point=point.id, rank=0, values=values))
        reason = {} if status == "ok" else {"reason": "rank 0 died"}
        end = {"kind": "end", "point": point.id, "status": status, "elapsed_s": 1.0, "load": load}
        if exchange:
            end["load"] = {"exchange_s": exchange[point.session - 1], **(load or {})}
        ends[point.id] = End.model_validate(end | reason)
    run = Run(path or Path("made-up.jsonl"), about, rows, ends)
    if path is not None:
        lines = [about, *rows, *ends.values()]
        path.write_text("".join(f"{line.model_dump_json()}\n" for line in lines))
    return run


@cache
def _points(sessions):
    """Those of one CPU rank."""
    config = CHECK.configure("quick", {"sessions": sessions})
    points = CHECK.points(config, THIS_MACHINE)
    return [point for point in points if point.world_size == 1 and point.device == "cpu"]
