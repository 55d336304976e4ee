"""Worker of the lab on model parallelism: check each training against one process, then time all in
turns.

``tensor``    a model on one rank, and cut over the ranks by transport: forward and backward
``pipeline``  schedules and numbers of micro-batches: seconds of a step and of a rank's idling
``axes``      a model and batch trained along each axis: seconds and peak memory of a step
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from labkit.bench.memory import measure_second_peak
from labkit.nn.transformer import Transformer
from labkit.parallel.pipeline import measure_layers
from labkit.parallel.ranks.worker import use_device
from labkit.parallel.transport import SHARED
from labkit.studies.model_parallel.point import LEAST_TASK_S, ModelParallelPoint
from labkit.studies.model_parallel.trainings import AXES, MAKERS, Problem, Trainer, train_pipeline
from labkit.studies.shared.alternatives import row_of, shared_memory_refusal, timed_rows


def measure(point: ModelParallelPoint) -> Iterator[dict[str, Any]]:
    """Yield the seconds of each alternative; then the allocator's peak of each axis."""
    device = use_device(point.device)
    rows = dict[str, dict[str, Any]]()
    trainers = dict[str, Trainer]()
    for name, about, problem, make in _alternatives(point, device):
        refusal = shared_memory_refusal(device) if SHARED in name else {}
        if refusal:
            yield about | refusal
            continue
        check = partial(problem.check, make, trainers, name)
        rows[name] = about | row_of(name, check, device=device)
    # Axes are compared by whole steps: sharding changes the optimizer's update, too.
    is_axis = point.sweep == "axes"
    turns = {
        name: trainer.step if is_axis else trainer.passes for name, trainer in trainers.items()
    }
    clock = point.rounds | {"prepare": lambda name: trainers[name].optimizer.zero_grad()}
    timed = timed_rows(rows, turns, device=device, before=dist.barrier, **clock)
    for name, row in zip(rows, timed, strict=True):
        if point.sweep == "pipeline" and "seconds" in row:
            # Only of the rounds that count: the check and the warm-up have idle times, too.
            row["idle_s"] = trainers[name].idle_s[-len(row["seconds"]) :]
        yield row
    if is_axis:
        for axis in trainers:
            dist.barrier()
            measure_peak = partial(_measure_peak, AXES[axis], problem)
            yield {"axis": axis} | row_of(axis, measure_peak, device=device)


def _alternatives(
    point: ModelParallelPoint, device: str
) -> Iterator[tuple[str, dict[str, Any], Problem, Callable[..., Trainer]]]:
    """Yield name, columns, problem and maker of each alternative."""
    if point.sweep == "pipeline":
        width = _choose_width(point, device)
        for micro_batches in point.micro_batches:
            # A micro-batch is one sequence.
            problem = Problem(replace(point, widths=(width,), batch=micro_batches), device)
            for schedule in point.alternatives:
                about = {"schedule": schedule, "micro_batches": micro_batches, "width": width}
                make = partial(train_pipeline, schedule=schedule, micro_batches=micro_batches)
                yield f"{schedule}, {micro_batches}", about, problem, make
        return
    problem = Problem(point, device)
    for name in point.alternatives:
        if point.sweep == "axes":
            yield name, {"axis": name}, problem, AXES[name]
            continue
        yield name, {"way": name, "width": point.widths[0]}, problem, MAKERS[name]


def _choose_width(point: ModelParallelPoint, device: str) -> int:
    """Return the first width whose forward passes take `LEAST_TASK_S` on a rank, or the last."""
    for width in point.widths:
        shape = replace(point, widths=(width,), layers=1).shape
        with torch.device(device):
            model = Transformer(shape, context_length=point.context_length)
            hidden = torch.zeros(1, point.context_length, width)
        (layer_s,) = measure_layers(list(model.layers), hidden)
        # All layers take equally long, and each rank has its share of them.
        if layer_s * point.layers / point.world_size >= LEAST_TASK_S:
            break
    return width


def _measure_peak(make: Callable[..., Trainer], problem: Problem) -> dict[str, Any]:
    """Measure the peak of a step along one axis."""
    # `gather` has all layers of a pipeline. Without it only this rank's stay in memory.
    return measure_second_peak(
        lambda: replace(make(problem), gather=dict), Trainer.step, device=problem.device
    )
