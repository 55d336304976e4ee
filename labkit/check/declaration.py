"""What a check measures: the labs' own correctness checks at their smallest, and the fixed set in several sessions."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from labkit.check.worker import CheckPoint, measure
from labkit.lab.config import RatioWithin, Repeats, RoundsSeconds, Sessions, TimedConfig, Warmup
from labkit.lab.declaration import Lab
from labkit.lab.point import Point, repeat_in_sessions
from labkit.machine import Machine
from labkit.studies import load_lab

RANKS = 2  # on a CPU; on GPUs one each


class CheckConfig(TimedConfig):
    """Parameters of the fixed set: how often, never what."""

    warmup: Warmup = 2
    repeats: Repeats = 16
    rounds_s: RoundsSeconds | None = 10.0
    ratio_within: RatioWithin = 0.0
    sessions: Sessions = 6
    timeout_s: float = 120.0


def _points(config: CheckConfig, machine: Machine) -> Iterator[Point]:
    """One rank and all ranks on each device, in new processes for every session."""
    places = [{"world_size": 1, "device": "cpu"}, {"world_size": RANKS, "device": "cpu", "backend": "gloo"}]
    if machine.gpus:
        places.append({"world_size": 1, "device": "cuda"})
    if len(machine.gpus) > 1:
        places.append({"world_size": len(machine.gpus), "device": "cuda", "backend": "nccl"})
    points = [CheckPoint.of(config, **place) for place in places]
    yield from points
    yield from repeat_in_sessions(points, config.sessions)


CHECK = Lab(
    name="check",
    title="Has this machine changed?",
    summary="A fixed small set of quantities, to be compared with an earlier measurement of the same machine",
    config=CheckConfig,
    points=_points,
    worker=measure,
    questions=(),
)

# The lab, what is set, and which of its points have correctness checks of their own. torch.compile of naive attention
# is torch's and takes longer than all the rest.
RIGHT: Mapping[str, tuple[Mapping[str, Any], Callable[[Any], bool]]] = {
    "attention": (
        {"implementations": ["tiled", "flash", "sdpa_flash", "sdpa_efficient", "sdpa_cudnn", "sdpa"]},
        lambda point: True,
    ),
    "all_reduce": ({}, lambda point: point.sweep in ("sizes", "transports")),
    "data_parallel": ({}, lambda point: point.sweep in ("wrappers", "accumulation")),
    "sharding": ({"optimizers": ["AdamW"]}, lambda point: point.kind == "time"),
    "sync_batchnorm": ({"alternatives": ["labkit", "torch"]}, lambda point: True),
}
ONCE = {"repeats": 1, "warmup": 0, "sessions": 1}


def correctness_labs(device: str) -> Iterator[tuple[Lab, Any]]:
    """Yield labs of which only the points with correctness checks are left, each with its shortest config."""
    for name, (settings, is_checked) in RIGHT.items():
        lab = load_lab(name)
        names = lab.config.model_fields
        values = {key: value for key, value in {**ONCE, **settings, "device": device}.items() if key in names}
        if "device" not in names and device != "cpu":
            continue  # its points have every backend there is
        yield replace(lab, points=_only(lab, is_checked)), lab.configure("smoke", values)


def _only(lab: Lab, is_checked: Callable[[Any], bool]) -> Callable[[Any, Machine], Iterator[Point]]:
    return lambda config, machine: (point for point in lab.points(config, machine) if is_checked(point))
