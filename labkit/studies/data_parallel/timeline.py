"""One training step as the profiler sees it: when backward computes, when collectives run, what is waited for."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import record_function

from labkit.bench.operators import OperatorRecord
from labkit.bench.trace import Profile, TraceEvent, profile_call, read_events
from labkit.studies.data_parallel.alternatives import FINISH, PHASES, Alternative

# Events of a collective at work, not of the call that begins it.
GLOO = "gloo:"
COLLECTIVES = (GLOO + "all_reduce", "nccl:all_reduce", "ncclDevKernel_AllReduce", "ncclKernel_AllReduce")
LAST_GRADIENT = "torch::autograd::AccumulateGrad"
WARMUP_STEPS = 1  # the gate's passes have made what first ones make
MOST_PROFILED_STEPS = 3  # of which the one of median length is told: a single one may be a freak


def timeline_rows(step: Alternative, device: str, steps: int) -> Iterator[dict[str, Any]]:
    """One row per box of the one of `steps` steps of median length: `lane`, and within it `start_s`, `duration_s`.

    Lanes are forward, backward, all-reduce and optimizer. Backward ends where the last gradient is there;
    `during_s` of a collective is how much of it ran before that.
    """
    for _ in range(WARMUP_STEPS):
        _run(step)
    profiles = [profile_call(lambda: _run(step), device=device, before=dist.barrier) for _ in range(steps)]
    boxes = _boxes(profiles[_median_step([one.seconds for one in profiles])])
    if not boxes["all-reduce"]:
        reason = "the profiler saw none of the collectives, which the timeline therefore lacks"
        yield {"implementation": step.implementation, "not_measured": reason}
    start = boxes["forward"][0][0]
    end_of_backward = boxes["backward"][-1][1]
    for lane, spans in boxes.items():
        for begin, end in spans:
            row: dict[str, Any] = {"implementation": step.implementation, "lane": lane, "check": "ok"}
            row |= {"start_s": begin - start, "duration_s": end - begin}
            if lane == "all-reduce":
                row |= {"during_s": max(0.0, min(end, end_of_backward) - begin)}
            yield row


def _run(step: Alternative) -> None:
    with record_function("forward"):
        step.forward()
    with record_function("backward"):
        step.backward()
    with record_function("optimizer"):
        step.step()


def _boxes(profile: Profile) -> dict[str, list[tuple[float, float]]]:
    """(start, end) in seconds, by lane. On a CPU the last gradient ends backward, on a GPU its last other kernel.

    What the wrapper launches when it finishes is no part of backward. Where ranks share a GPU, gloo's collectives run
    on the host beside the kernels. A barrier before the step may be an all-reduce as well.
    """
    events = read_events(profile.trace, also=GLOO)
    collectives = [event for event in events if event.name.startswith(COLLECTIVES)]
    others = [event for event in events if not event.name.startswith(COLLECTIVES)]
    others = [event for event in others if FINISH not in event.ranges]
    boxes = {phase: [_around([event for event in others if phase in event.ranges])] for phase in PHASES}
    if last := [event for event in others if event.name == LAST_GRADIENT]:
        boxes["backward"] = [(boxes["backward"][0][0], _around(last)[1])]
    start = boxes["forward"][0][0]
    return boxes | {"all-reduce": [_around([event]) for event in collectives if event.start_s >= start]}


def _median_step(lengths_s: Sequence[float]) -> int:
    """Which of several steps has the median length, that of its slowest rank; the same on all ranks."""
    device = "cuda" if dist.is_initialized() and dist.get_backend() == "nccl" else "cpu"
    slowest = torch.tensor(lengths_s, dtype=torch.float64, device=device)
    if dist.is_initialized():
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return int(slowest.argsort(stable=True)[(len(slowest) - 1) // 2])


def _around(events: Sequence[TraceEvent]) -> tuple[float, float]:
    return min(event.start_s for event in events), max(event.start_s + event.duration_s for event in events)


def operators_of_step(alternative: Alternative) -> OperatorRecord:
    """The operators and collectives of a step, which is not to be the first."""
    with OperatorRecord() as count:
        alternative.run()
    return count


def added_by_averaging(alternative: Alternative, alone: OperatorRecord) -> dict[str, float]:
    """What averaging adds to a step: all-reduces and what they add up, copies and divisions and what they move."""
    count = operators_of_step(alternative)
    return {
        "collectives": len(count.all_reduces),
        "collective_bytes": sum(count.all_reduces),
        "added_operators": len(count.calls) - len(alone.calls),
        "added_bytes": sum(call.n_bytes for call in count.calls) - sum(call.n_bytes for call in alone.calls),
    }
