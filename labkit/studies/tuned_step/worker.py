"""Worker of the tuned-step lab: the combined configuration and the default, in turns."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from labkit.bench.check import (
    OK,
    describe_error,
    largest_difference,
    max_over_ranks,
    status_columns,
)
from labkit.bench.clock import SET_UP_SHARE
from labkit.costs.memory import peak_bytes
from labkit.costs.transformer import SIZES
from labkit.lab.point import ModelPoint
from labkit.nn.attention_implementations import IMPLEMENTATIONS
from labkit.nn.training import TrainingStep, gradients
from labkit.parallel.data_parallel import wrap
from labkit.parallel.ranks.worker import use_device
from labkit.studies.shared.alternatives import check_and_time
from labkit.studies.shared.checks import TOLERANCES, check_completeness

DEFAULT_NAME = "default"
# As stored runs name it.
COMBINED = "joined"
TORCH = "torch"  # the wrapper of the default
# Seconds that a plan allows for compiling `mini` without a cache: 49 s on two slow cores.
COMPILE_S = 45.0


@dataclass(frozen=True, kw_only=True)
class TunedStepPoint(ModelPoint):
    """A model, and the combined configuration that is compared with the default one."""

    model: str
    precision: str
    attention: str
    compiled: bool
    wrapper: str

    @property
    def refusal(self) -> str | None:
        """Return why nothing is compared if the combined configuration changes nothing.

        One rank has no wrapper.
        """
        step = (self.precision, self.attention, self.compiled)
        if step != ("float32", "explicit", False):
            return None
        if self.world_size > 1 and self.wrapper != TORCH:
            return None
        return (
            "the newest runs of the other labs here recommend nothing but the default: measure them"
            " first"
        )

    @property
    def planned_s(self) -> float:
        """With compiling, unless the runs here recommend other changes alone.

        Runs that recommend nothing so far may do so once all labs are measured. After compiling,
        rounds may take longer than `rounds_s` (`SET_UP_SHARE`). Machines with GPUs have faster
        cores than those that `COMPILE_S` is of.
        """
        is_not_compiled = not self.compiled and self.refusal is None
        if is_not_compiled or self.device_type == "cuda":
            return super().planned_s
        longer_s = max(0.0, SET_UP_SHARE * COMPILE_S - (self.rounds_s or 0.0))
        return super().planned_s + COMPILE_S + longer_s

    @property
    def needed_bytes(self) -> float:
        # Both steps, as if in float32: the default one is.
        return 2 * peak_bytes(SIZES[self.model], self.batch, self.context_length)


def make_step(point: TunedStepPoint, name: str, device: str) -> TrainingStep:
    """Return a step of a Transformer under the configuration `name`.

    On several ranks it is under a wrapper, and each rank has a batch.
    """
    if name == DEFAULT_NAME:
        # `recommended.DEFAULT`, without importing what no rank needs.
        point = replace(
            point, precision="float32", attention="explicit", compiled=False, wrapper=TORCH
        )
    rank = dist.get_rank() if dist.is_initialized() else 0
    step = TrainingStep(
        SIZES[point.model],
        batch=point.batch,
        context_length=point.context_length,
        device=device,
        precision=point.precision,
        attention=IMPLEMENTATIONS[point.attention],
        seed=point.batch_seed(rank),
    )
    if point.compiled:
        step.model.compile(dynamic=False)
        # One rank compiles, and the others find the code in the user's cache: together they would
        # take as many times as long. Not under torch's DDP, which cuts graphs at its buckets.
        if point.world_size > 1 and point.wrapper != TORCH:
            if rank == 0:
                _run_passes(step)
                step.drop_gradients()
            dist.barrier()
    if point.world_size > 1:
        step.call = wrap(point.wrapper, step.model)
    return step


def measure(point: TunedStepPoint) -> Iterator[dict[str, Any]]:
    """Yield seconds of a step by configuration, in turns.

    If their gradients differ, only the default has some; the other row has the reason.
    """
    device = use_device(point.device)
    steps = dict[str, TrainingStep]()

    def check(name: str) -> tuple[dict[str, Any], Callable[[], None]]:
        steps[name] = make_step(point, name, device)
        if name == DEFAULT_NAME:
            return dict(OK), steps[name].run
        return _check(steps, TOLERANCES[point.precision]), steps[name].run

    rows = {name: {"implementation": name} for name in (DEFAULT_NAME, COMBINED)}
    before = dist.barrier if dist.is_initialized() else None
    yield from check_and_time(rows, check, device=device, before=before, **point.rounds)


def _check(steps: dict[str, TrainingStep], tolerance: float) -> dict[str, Any]:
    """Compare the gradients of a first step: the largest difference, and the status.

    In 16 bits a mean without one of many ranks could be within the tolerance, so its completeness
    is checked, too.
    """
    both: dict[str, dict[str, Tensor]] = {}
    for configuration, step in steps.items():
        _run_passes(step)
        # Cloned: gradients may be views of a wrapper's buckets, which its next pass overwrites.
        both[configuration] = {name: one.clone() for name, one in gradients(step.model).items()}
        step.drop_gradients()
    error = max_over_ranks(largest_difference(both[COMBINED], both[DEFAULT_NAME]))
    wrong = describe_error(error, tolerance)
    if dist.is_initialized():
        for step in steps.values():
            parameters = dict(step.model.named_parameters())
            wrong = wrong or check_completeness(parameters, partial(_run_passes, step))
    return {"error": error, **status_columns(wrong)}


def _run_passes(step: TrainingStep) -> None:
    step.forward()
    step.backward()
