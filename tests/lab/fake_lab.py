"""A lab that measures nothing of interest, in every way a measurement can go."""

import os
import signal
from dataclasses import dataclass
from datetime import UTC, datetime

import pandas as pd
import torch
import torch.distributed as dist
from pydantic import field_validator

from labkit.lab.answers import Report
from labkit.lab.config import LabConfig
from labkit.lab.declaration import Lab
from labkit.lab.point import Point
from labkit.lab.runs.store import RunHeader
from labkit.machine.description import describe_machine
from labkit.parallel.ranks.results import current_alternative


@dataclass(frozen=True, kw_only=True)
class FakePoint(Point):
    action: str
    size: int = 1
    rounds_s: float | None = None

    @property
    def series(self):
        return self.world_size, self.size

    def skip_reason(self, machine):
        return "needs what this machine has not" if self.action == "skip" else None


def measure_point(point):
    rank = dist.get_rank() if dist.is_initialized() else 0
    yield {"seconds": [0.1 * point.size, 0.2 * point.size], "half": 1, "pid": os.getpid()}
    if point.action == "sum":
        yield {"seconds": [0.1 * point.size, 0.2 * point.size], "is_sum": True}
    if point.action == "break":
        current_alternative.begin("broken")
    if rank == point.world_size - 1:
        _act(point)
    if dist.is_initialized():
        dist.all_reduce(torch.ones(1))


def _act(point):
    if point.action == "break":
        os.abort()
    if point.action == "raise":
        raise RuntimeError("deliberate")
    if point.action == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if point.action == "oom":
        raise MemoryError(f"no room for {point.size}")


class FakeConfig(LabConfig):
    actions: list[str] = ["fine"]
    world_size: int = 1

    @field_validator("*")
    @classmethod
    def _drop_repetitions(cls, value):
        return value  # two points may do the same


def points(config, machine):
    return [
        FakePoint(
            world_size=config.world_size,
            backend="gloo" if config.world_size > 1 else None,
            action=action,
            size=size,
            timeout_s=20,
            fresh_ranks=action == "fresh",
            rounds_s={"slow": 0.01, "sum": 0.06}.get(action),
        )
        for size, action in enumerate(config.actions, start=1)
    ]


def count_rows(results):
    return pd.DataFrame([{"rows": len(results.frame)}]) if len(results.frame) else pd.DataFrame()


FAKE = Lab(
    name="fake",
    title="Fake",
    summary="Nothing.",
    config=FakeConfig,
    points=points,
    worker=measure_point,
    questions=[Report(id="how_many", text="How many rows?", table=count_rows, says="{rows} rows.")],
)


def header(points, **changes):
    """The header of a run of these points on this machine."""
    fields = {
        "lab": "fake",
        "profile": "smoke",
        "config": {},
        "machine": describe_machine(),
        "command": "labkit",
    }
    fields |= {
        "started": datetime(2030, 1, 2, tzinfo=UTC),
        "planned": {point.id: point.describe() for point in points},
    }
    return RunHeader(**(fields | changes))
