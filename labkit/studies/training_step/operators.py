"""The operators of a training step of a Transformer, by phase: traced on fake tensors, which take no memory or time."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from labkit.bench.operators import OperatorCall, record_operators
from labkit.costs.calibration import Calibration
from labkit.costs.transformer import TransformerShape
from labkit.nn.training import TrainingStep, adamw

INFERENCE, FORWARD, BACKWARD, OPTIMIZER = "inference", "forward", "backward", "optimizer"
Phases = Mapping[str, tuple[OperatorCall, ...]]


@cache
def list_operators(
    shape: TransformerShape, batch: int, context_length: int, precision: str = "float32", device: str = "cpu"
) -> Phases:
    """What each phase of a step calls, in any order, from the second step on: the first makes the optimizer's states.

    Traced on the CPU, whatever the device, so that a page is the same wherever it is drawn: a torch without CUDA has
    no backward pass even of fake tensors there. The optimizer is that of the device.
    """
    return {**_passes(shape, batch, context_length, precision), **_update(shape, device)}


def predict_seconds(calibration: Calibration, operators: Phases, parts: Iterable[str], device: str) -> float:
    """What the operators of these parts of a step take by the machine's rates, under autograd."""
    parts = list(parts)
    passed = sum(len(operators[part]) for part in parts if part in (FORWARD, BACKWARD))
    seconds = sum(calibration.operators_s(operators[part], device=device) for part in parts)
    begin = {FORWARD, BACKWARD} <= set(parts)
    return seconds + calibration.of_ranks(1, device).under_autograd_s(passed, begin=begin)


@cache
def _passes(shape: TransformerShape, batch: int, context_length: int, precision: str) -> Phases:
    return _of_all_layers(
        shape, partial(_traced_passes, batch=batch, context_length=context_length, precision=precision)
    )


@cache
def _update(shape: TransformerShape, device: str) -> Phases:
    """The optimizer's part, which knows of neither batch nor precision."""
    return _of_all_layers(shape, partial(_traced_update, device=device))


def _of_all_layers(shape: TransformerShape, traced: Callable[[TransformerShape], Phases]) -> Phases:
    """Layers are alike: one and two of them are traced, which takes a fraction of the time of all, and what the second
    one adds is taken for each of the others. Where all layers are in one call, as in a GPU's optimizer, the whole model
    is traced.
    """
    one, two = (traced(replace(shape, n_layers=layers)) for layers in (1, 2))
    each = {phase: Counter(two[phase]) - Counter(one[phase]) for phase in one}
    if any(Counter(one[phase]) + each[phase] != Counter(two[phase]) for phase in one):
        return traced(shape)
    return {phase: (*calls, *(shape.n_layers - 1) * tuple(each[phase].elements())) for phase, calls in one.items()}


def _traced_passes(shape: TransformerShape, batch: int, context_length: int, precision: str) -> Phases:
    with _fake():
        step = TrainingStep(shape, batch=batch, context_length=context_length, precision=precision)
        actions = {INFERENCE: step.infer, FORWARD: step.forward, BACKWARD: step.backward}
        return {name: record_operators(action) for name, action in actions.items()}


def _traced_update(shape: TransformerShape, device: str) -> Phases:
    with _fake():
        step = TrainingStep(shape, batch=1, context_length=1)
        step.optimizer = adamw(step.model.parameters(), torch.device(device))
        calls: tuple[OperatorCall, ...] = ()
        for _ in range(2):
            for parameter in step.model.parameters():
                parameter.grad = torch.empty_like(parameter)
            calls = record_operators(step.optimizer_step)
        return {OPTIMIZER: calls}


def _fake() -> AbstractContextManager[Any]:
    from torch._subclasses.fake_tensor import FakeTensorMode  # not needed by ranks, who import this package

    return FakeTensorMode(allow_non_fake_inputs=True)
