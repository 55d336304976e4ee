"""A study that measures nothing of interest, in every way a measurement can go."""

import os
import signal
from dataclasses import dataclass

import torch
import torch.distributed as dist

from labkit.lab.config import LabConfig
from labkit.lab.findings import Finding, Questions
from labkit.lab.point import Point
from labkit.lab.study import Study
from labkit.parallel.ranks import current_alternative


@dataclass(frozen=True, kw_only=True)
class FakePoint(Point):
    action: str
    size: int = 1
    rounds_s: float | None = None


def measure_point(point):
    rank = dist.get_rank() if dist.is_initialized() else 0
    yield {"seconds": [0.1 * point.size, 0.2 * point.size], "half": 1, "pid": os.getpid()}
    reason = current_alternative.excluded_reason("broken")
    if point.action == "break" and reason is None:
        current_alternative.begin("broken")
    if rank == point.world_size - 1:
        _act(point, reason)
    if dist.is_initialized():
        dist.all_reduce(torch.ones(1))


def _act(point, reason):
    if point.action == "break" and reason is None:
        os.abort()
    if point.action == "raise":
        raise RuntimeError("deliberate")
    if point.action == "die":
        os.kill(os.getpid(), signal.SIGKILL)
    if point.action == "oom":
        raise MemoryError(f"no room for {point.size}")


class FakeConfig(LabConfig):
    actions: list[str] = ["fine"]
    world_size: int = 2


QUESTIONS = Questions()


@QUESTIONS.ask("how_many", "How many rows?")
def how_many(frame):
    return Finding("measured", f"{len(frame)} rows.")


class FakeStudy(Study):
    name = "fake"
    title = "Fake"
    summary = "Nothing."
    questions = QUESTIONS
    profiles = {"smoke": FakeConfig(), "quick": FakeConfig()}
    worker = staticmethod(measure_point)

    def points(self, config, machine):
        backend = "gloo" if config.world_size > 1 else None
        return [
            FakePoint(
                world_size=config.world_size,
                backend=backend,
                action=action,
                size=size,
                timeout_s=20,
                fresh_ranks=action == "fresh",
                rounds_s=0.01 if action == "slow" else None,
            )
            for size, action in enumerate(config.actions, start=1)
        ]

    def skip_reason(self, point, machine):
        return "needs what this machine has not" if point.action == "skip" else None

    def series(self, point):
        return point.world_size, point.size


FAKE = FakeStudy()
