"""The timeline of a training step, from the profiler: when backward computes, and when collectives run."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch.profiler import record_function

from labkit.bench.trace import TraceEvent, profile_call
from labkit.studies.shared.trainer import BACKWARD, FINISH, FORWARD, OPTIMIZER

# Events of running collectives, not of the calls that launch them.
COLLECTIVES = ("gloo:all_reduce", "nccl:all_reduce", "ncclDevKernel_AllReduce", "ncclKernel_AllReduce")
LAST_GRADIENT = "torch::autograd::AccumulateGrad"
ALL_REDUCE = "all-reduce"


def profile_step(phases: Mapping[str, Callable[[], None]], device: str) -> list[dict[str, Any]]:
    """One row per box of the second step: `lane`, `start_s`, `duration_s`, and `during_s` of collectives.

    `phases` are forward, backward and optimizer, by name. Backward ends with the last gradient; `during_s` is the part
    of a collective before that.
    """

    def run() -> None:
        for phase, action in phases.items():
            with record_function(phase):
                action()

    run()
    boxes = _find_boxes(profile_call(run, device=device, before=dist.barrier))
    if not boxes[ALL_REDUCE]:
        return [{"not_measured": "the profiler saw none of the collectives"}]
    start, end_of_backward = boxes[FORWARD][0][0], boxes[BACKWARD][-1][1]
    rows = []
    for lane, spans in boxes.items():
        for begin, end in spans:
            row: dict[str, Any] = {"lane": lane, "check": "ok", "start_s": begin - start, "duration_s": end - begin}
            if lane == ALL_REDUCE:
                row["during_s"] = max(0.0, min(end, end_of_backward) - begin)
            rows.append(row)
    return rows


def _find_boxes(events: Sequence[TraceEvent]) -> dict[str, list[tuple[float, float]]]:
    """(start, end) in seconds, by lane.

    Backward ends with the last gradient on a CPU, and with its last kernel other than a collective on a GPU; what the
    wrapper launches when it finishes comes after. A barrier before the step may be an all-reduce as well.
    """
    collectives = [event for event in events if event.name.startswith(COLLECTIVES)]
    others = [event for event in events if not event.name.startswith(COLLECTIVES) and FINISH not in event.ranges]
    boxes = {
        phase: [_span([event for event in others if phase in event.ranges])] for phase in (FORWARD, BACKWARD, OPTIMIZER)
    }
    if last := [event for event in others if event.name == LAST_GRADIENT]:
        boxes[BACKWARD] = [(boxes[BACKWARD][0][0], _span(last)[1])]
    start = boxes[FORWARD][0][0]
    return boxes | {ALL_REDUCE: [_span([event]) for event in collectives if event.start_s >= start]}


def _span(events: Sequence[TraceEvent]) -> tuple[float, float]:
    return min(event.start_s for event in events), max(event.start_s + event.duration_s for event in events)
