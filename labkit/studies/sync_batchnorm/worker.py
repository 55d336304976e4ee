"""What a rank runs to measure one point of the SyncBatchNorm lab. Imports torch, the layers and the instruments.

A call takes a millisecond or less, so that a sample is the mean of several calls behind one barrier.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch.distributed as dist

from labkit.bench.memory import record_allocations, saved_for_backward
from labkit.bench.operators import record_operators
from labkit.lab.point import TimedPoint
from labkit.parallel.ranks.worker import use_device
from labkit.studies.shared.alternatives import row_of, time_those_that_run, turn_of
from labkit.studies.sync_batchnorm.alternatives import (
    BARE,
    TORCH,
    WHOLE,
    Bare,
    Batch,
    Layer,
    bare_gate,
    check_layer,
)

LAYER = "layer"
PHASES = ("forward", "backward", "both")


@dataclass(frozen=True, kw_only=True)
class SyncBatchNormPoint(TimedPoint):
    """A batch with the alternatives compared on it."""

    sweep: str = LAYER
    device: str = "cpu"
    """ "cpu" or "cuda"; several ranks may share one CUDA device."""
    batch: int
    """Rows of all ranks together."""
    features: int
    alternatives: tuple[str, ...] = ()
    calls: int = 5
    """Of which one sample is the mean."""

    def title(self) -> str:
        return f"{super().title()}, {self.batch} x {self.features}"


def measure_point(point: SyncBatchNormPoint) -> Iterator[dict[str, Any]]:
    """Rows of one point: seconds of every alternative and phase, and memory."""
    device = use_device(point.device)
    batch = Batch.of_rank(point.batch, point.features, seed=point.seed, device=device)
    right: dict[str, Layer | Bare] = {}
    abouts: dict[str, dict[str, Any]] = {}
    for name in point.alternatives:
        if refusal := _refusal(name, batch):
            yield {"alternative": name, "refused": refusal}
            continue
        found = row_of(name, partial(_check, name, point, batch, device, right), device=device)
        abouts[name] = {"alternative": name} | found
        if name not in right:
            yield abouts[name]
    turns = {turn: parts for one in right.values() for turn, parts in _turns(one).items()}
    owner = {turn: name for name, one in right.items() for turn in _turns(one)}
    timing: dict[str, Any] = point.rounds | {"calls": point.calls, "device": device, "before": dist.barrier}
    times, failed = time_those_that_run(turns, alternative_of=owner.__getitem__, **timing)
    for name, one in right.items():
        if name in failed:
            yield abouts[name] | {"check": failed[name]}
            continue
        with turn_of(name, device):
            counts = _counts(one)
        for turn in _turns(one):
            for phase, seconds in times[turn].items():
                if not _is_idle(name):
                    yield abouts[name] | {"phase": phase, "seconds": seconds} | counts[phase]
        if isinstance(one, Layer) and not _is_idle(name):
            # one rank tells, the others take part: a profiler in every rank costs more than all timing
            with turn_of(name, device):
                memory = _memory(name, batch, device) if dist.get_rank() == 0 else _take_part(name, batch)
            if memory:
                yield abouts[name] | memory


def _check(
    name: str, point: SyncBatchNormPoint, batch: Batch, device: str, right: dict[str, Layer | Bare]
) -> dict[str, Any]:
    """The gate; an alternative that passes it comes to those that are `right`."""
    candidate: Layer | Bare
    if name in BARE:
        candidate = Bare(name, point.features, device)
        gate = bare_gate(candidate)
        error = 0.0 if gate == "ok" else math.inf
    else:
        candidate = Layer(name, batch)
        error, gate = check_layer(candidate, batch)
    if gate == "ok":
        right[name] = candidate
    return {"error": error, "check": gate}


def _refusal(name: str, batch: Batch) -> str | None:
    """What torch says where it does not take the input: its SyncBatchNorm is for GPUs."""
    if name != TORCH or batch.whole.is_cuda:
        return None
    try:
        Layer(name, batch).forward()
    except (ValueError, RuntimeError) as error:
        return str(error)
    return None


def _is_idle(name: str) -> bool:
    """The whole batch in one process is the first rank's work; the others wait for it."""
    return name == WHOLE and dist.get_rank() != 0


def _turns(one: Layer | Bare) -> dict[str, dict[str, Callable[[], None]]]:
    """Two turns: forward, and backward of what that has left; and both at once."""
    actions = _actions(one)
    return {one.name: {phase: actions[phase] for phase in PHASES[:2]}, f"{one.name}, both": {"both": actions["both"]}}


def _actions(one: Layer | Bare) -> dict[str, Callable[[], None]]:
    if _is_idle(one.name):
        return dict.fromkeys(PHASES, _nothing)

    def both() -> None:
        one.forward()
        one.backward()

    return dict(zip(PHASES, (one.forward, one.backward, both), strict=True))


def _nothing() -> None:
    pass


def _counts(one: Layer | Bare) -> dict[str, dict[str, float]]:
    """By phase: operators and the bytes they move, or the bytes that are sent."""
    if isinstance(one, Bare):
        sent = one.sent_bytes
        return {phase: {"sent_bytes": sent.get(phase, sum(sent.values()))} for phase in PHASES}
    counts: dict[str, dict[str, float]] = {}
    for phase, action in _actions(one).items():
        calls = record_operators(action)
        counts[phase] = {"operators": len(calls), "moved_bytes": sum(call.n_bytes for call in calls)}
    return counts


def _memory(name: str, batch: Batch, device: str) -> dict[str, Any]:
    """Bytes saved for backward, and the allocator's peak over forward and backward, layer and input included."""
    with record_allocations(device) as record:
        layer = Layer(name, batch)
        _, saved = saved_for_backward(layer.forward)
        layer.backward()
        with record.window("step"):
            layer.forward()
            layer.backward()
        input_address = layer.x.untyped_storage().data_ptr()
        del layer
    return {
        "saved_bytes": sum(one.n_bytes for one in saved),
        "beside_input_bytes": sum(one.n_bytes for one in saved if one.address != input_address),
        "peak_bytes": record.windows["step"].peak_bytes,
    }


def _take_part(name: str, batch: Batch) -> dict[str, Any]:
    """The collectives of `_memory`, for the rank that measures it."""
    layer = Layer(name, batch)
    for _ in range(2):
        layer.forward()
        layer.backward()
    return {}
